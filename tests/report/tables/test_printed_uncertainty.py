"""The printed uncertainty covers the printed number, in every table, page and export."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from joulelab.meter.figures import missing
from joulelab.report.compare.method_rows import compare
from joulelab.report.compare.scopes import datasets
from joulelab.report.figures.chart_base import folded, stages_of_run
from joulelab.report.figures.comparison_figures import quality_against_energy, repeats, stages_by_method
from joulelab.report.figures.serving_figures import joules_against_time
from joulelab.report.opening import run_headline
from joulelab.report.tables.bill_tables import bill_markdown, run_bill
from joulelab.report.tables.comparison_tables import comparison_markdown, run_view, runs_grid
from joulelab.report.tables.grid import render_text, to_rich
from joulelab.report.tables.run_tables import stages_grid
from joulelab.runs.index import row_of
from joulelab.runs.record import RunRecord, flat_summary

# Of the made estimates 0.2 to 15 % are random, and 70 % the scale.
SMALL = re.compile(r"[kmµ]?J ± ?(<0\.1|0\.\d+|[1-9](\.\d)?|1\d) %")


def incomplete(value: Any) -> Any:
    """A record whose sensors were seen for 72 % of the time, with half-widths that know nothing of it."""
    if isinstance(value, dict):
        changed = {key: incomplete(inner) for key, inner in value.items()}
        if "energy_j" in value and "half_width_j" in value and value["energy_j"] is not None:
            changed |= {"coverage": 0.72, "half_width_j": 0.0, "errors": []}
        return changed
    return [incomplete(inner) for inner in value] if isinstance(value, list | tuple) else value


def texts(records: list[RunRecord], made: Any, store: Path, measured: bool) -> dict[str, str]:
    made.write_group(store, records, measured)
    student = records[3]
    return {
        "show": render_text(run_view(student), 140),
        "runs": render_text(to_rich(runs_grid(records)), 140),
        "compare": comparison_markdown(compare(made.group_of(records), records, store)),
        "bill": bill_markdown(run_bill(student)),
        "page": run_headline(student),
    }


def test_no_output_prints_the_random_part_of_an_estimate(made, tmp_path: Path) -> None:
    for name, text in texts(made.demo_records(), made, tmp_path, measured=False).items():
        assert "±70 %" in text, name
        assert not SMALL.search(text), (name, SMALL.search(text))


@pytest.mark.parametrize("measured", [False, True], ids=["estimated", "measured"])
def test_no_output_prints_a_tight_interval_at_72_percent_coverage(made, tmp_path: Path, measured: bool) -> None:
    whole = made.demo_records(measured)
    records = [RunRecord.model_validate(incomplete(record.model_dump(mode="json"))) for record in whole]
    for name, text in texts(records, made, tmp_path, measured).items():
        assert re.search(r"≥ \d+(\.\d+)? J \(72 % covered\)", text), name
        assert not re.search(r"≥ [^|,;\n]*±", text), (name, "an interval around a lower bound")
        assert not SMALL.search(text), (name, SMALL.search(text))
    compared = comparison_markdown(compare(made.group_of(records), records, tmp_path))
    assert "readings are missing (72 % covered)" in compared, "no ratio of lower bounds"


def drawn_bounds(spec: Any) -> list[dict[str, Any]]:
    """The layers that write ≥ at the end of a bar."""
    layers = [found for layer in spec.get("layer", ()) for found in drawn_bounds(layer)]
    return [*([spec] if isinstance(mark := spec.get("mark"), dict) and mark.get("text") == "≥" else []), *layers]


def test_bars_of_lower_bounds_are_marked_in_every_figure(made, tmp_path: Path) -> None:
    whole = made.demo_records(True)
    for records, bound in (
        (whole, False),
        ([RunRecord.model_validate(incomplete(one.model_dump(mode="json"))) for one in whole], True),
    ):
        comparison = compare(made.group_of(records), records, tmp_path)
        found = [
            stages_of_run(records[3]),
            stages_by_method(comparison),
            quality_against_energy(comparison),
            repeats(comparison),
            joules_against_time(comparison),
        ]
        for figure in (figure for figure in found if figure):
            assert bool(drawn_bounds(figure.spec)) is bound, figure.title
            assert ("≥: lower bound" in figure.caption) is bound, figure.title
            svg = vl_convert.vegalite_to_svg(figure.complete(datasets(comparison)))
            assert ("≥" in svg) is bound, figure.title


def test_a_run_without_joules_is_in_no_mean_of_the_bars(made, tmp_path: Path) -> None:
    """It counted as 0 J: a bar of 8 J where the table had 24 J, of three repeats of which one was measured."""
    records = made.demo_records(True)
    comparison = compare(made.group_of(records), records, tmp_path)
    row = next(row for row in comparison.rows if len(row.runs) > 1)
    gone = replace(row.runs[1], joules=replace(row.runs[1].joules, with_teacher=missing("no reading")))
    rows = tuple(replace(one, runs=(row.runs[0], gone)) if one is row else one for one in comparison.rows)
    spec = json.dumps(stages_by_method(replace(comparison, rows=rows)).spec)
    assert json.dumps({"method": row.label, "row": folded(row.label), "repeats": 1}) in spec


def test_a_stage_of_a_lower_bound_prints_its_item_energy_as_one(made) -> None:
    record = made.demo_records(True)[3]
    stage = record.stage("student.train")
    assert stages_grid(record).rows[-1] and stage.j_per_sample
    bound = RunRecord.model_validate(incomplete(record.model_dump(mode="json")))
    rows = {row[0]: row for row in stages_grid(bound).rows}
    assert any(cell.startswith("≥ ") for cell in rows["student.train"][7:9])
    assert "≥: lower bound" in stages_grid(bound).note


def test_machine_readable_fields_keep_random_half_width_and_gain_error_apart(made) -> None:
    record = made.demo_records()[3]
    flat, best = flat_summary(record), record.totals.best
    assert flat["shown_energy_half_width_j"] == best.half_width_j
    assert flat["shown_energy_gain_error_rel"] == best.gain_error_rel == pytest.approx(0.7)
    assert flat["shown_energy_coverage"] == 1.0 and flat["shown_energy_lower_bound"] is False
    assert flat["student.train.half_width_j"] == record.stage("student.train").best.half_width_j


def test_energy_above_idle_has_its_half_width_in_the_summary(made) -> None:
    record = made.demo_records(True)[3]
    above = record.totals.best.with_interval(40.0, 3.0, "idle")
    record = record.model_copy(
        update={
            "totals": record.totals.model_copy(update={"above_idle_j": 40.0, "above_idle": above}),
            "stages": tuple(
                stage.model_copy(update={"above_idle_j": 40.0, "above_idle": above}) for stage in record.stages
            ),
        }
    )
    flat, listed = flat_summary(record), row_of(record)
    assert (flat["above_idle_j"], flat["above_idle_half_width_j"]) == (40.0, 3.0)
    assert flat["student.train.above_idle_half_width_j"] == 3.0
    assert listed["above_idle_half_width_j"] == 3.0
