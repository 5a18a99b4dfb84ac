"""A sweep's table from made records: intervals over repeats, failed runs, phases, and what is not apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from joulelab.report.figures.training_figures import sweep_figures
from joulelab.report.tables.grid import render_text
from joulelab.report.tables.sweep_table import Sweep, interval_text, read_sweep, sweep_data, sweep_headline, sweep_view
from joulelab.report.tables.training_table import training_grids
from joulelab.runs.groups import GroupRecord, Member, varying
from joulelab.runs.record import ErrorRecord, PhaseRecord, Result
from joulelab.stats import Interval
from joulelab.units import energy_text, three_digits

PHASES = {"input": 0.001, "forward": 0.020, "backward": 0.040, "optimizer_step": 0.005}


def member_of(made: Any, batch_size: int, seed: int, seconds: float, joules: float, **more: Any) -> Any:
    """A training of 6,400 images that was measured, with what its trackers found."""
    parts = (made.Part("model.prepare", 5.0, 400.0), made.Part("model.train", seconds, joules, 6_400))
    label = f"batch_size={batch_size}"
    record = made.make_record(label, seed, parts, measured=True, name=f"made-{batch_size}", **more)
    rows = [{"phase": "step", "clock": "device", "count": 100, "mean_s": 0.066}]
    rows += [{"phase": name, "clock": "device", "count": 100, "mean_s": mean} for name, mean in PHASES.items()]
    energy = {name: {"method": "isolated", "energy_j": 300 * s, "half_width_j": 0.1} for name, s in PHASES.items()}
    found = {
        "model": {"item": "image", "flops_counted_on": "fake tensors", "mfu_missing": "", "notes": ""},
        "simple": {"phases": rows},
        "energy": {"isolated": {"phases": energy}},
    }
    results = {
        "model.train.first_loss": 6.9, "model.train.final_loss": 2.1 + 0.1 * seed, "model.train.steps": 100,
        "model.train.mfu": 0.41, "model.train.items_per_s": 650.0, "model.peak_memory_bytes": 2.5e9,
        "model.parameters": 25_557_032, "model.forward_flops_per_item": 8.2e9, "model.evaluate.loss": 2.3,
        "model.training_flops_per_item": 24.5e9,
    }  # fmt: skip
    spec = {**record.spec, "pipeline": "train", "training": {"batch_size": batch_size}}
    return record.model_copy(
        update={
            "spec": spec,
            "findings": {"model.train": found},
            "results": {name: Result(value=value) for name, value in results.items()},
        }
    )


@pytest.fixture
def records(made: Any) -> list[Any]:
    error = ErrorRecord(kind="OutOfMemory", message="model.train does not fit into the GPU's memory")
    return [
        member_of(made, 8, 0, 10.0, 5_000.0),
        member_of(made, 16, 0, 8.0, 4_000.0),
        member_of(made, 8, 1, 10.2, 5_050.0),
        member_of(made, 16, 1, 8.1, 4_060.0),
        made.make_record("batch_size=32", 0, (), status="failed", name="made-32", error=error),
    ]


@pytest.fixture
def sweep(records: list[Any], tmp_path: Path) -> Sweep:
    members = [
        Member(label=r.label, seed=r.spec["seed"], experiment=r.name, spec=r.spec, run_id=r.run_id) for r in records
    ]
    specs = [*(m.spec for m in members[:-1]), {**members[-1].spec, "training": {"batch_size": 32}}]
    found = {key: values for key, values in varying(specs).items() if key == "training.batch_size"}
    group = GroupRecord(
        group_id="sweep-resnet50-20260301T100000Z-beef", name="sweep-resnet50", about="3 configurations",
        sweep=True, created_at="2026-03-01T10:00:00+00:00", members=tuple(members), varying=found,
    )  # fmt: skip
    return read_sweep(group, records, tmp_path)


def test_the_table_as_a_terminal_shows_it(sweep: Sweep, golden: Any) -> None:
    golden("sweep.txt", render_text(sweep_view(sweep), width=120))


def test_checkpoints_state_how_long_they_held_the_training_up(records: list[Any]) -> None:
    trained = records[0].stage("model.train")
    saved = PhaseRecord(count=4, sum_s=0.32, mean_s=0.08, p50_s=0.08, p95_s=0.09, max_s=0.09)
    held_up = trained.model_copy(update={"phases": {"checkpoint": saved}})
    record = records[0].model_copy(update={"stages": (held_up,)})
    assert training_grids(record)[1].note == "4 checkpoints paused training for 80 ms each, 0.32 s in total."


def test_a_training_as_a_terminal_shows_it(records: list[Any], golden: Any) -> None:
    from rich.console import Group

    from joulelab.report.tables.grid import to_rich

    golden("training.txt", render_text(Group(*map(to_rich, training_grids(records[0]))), width=120))


def test_means_have_t_intervals_over_the_repeats(sweep: Sweep) -> None:
    found = sweep.rows[0].items_per_s
    assert found is not None
    assert found.value == pytest.approx((640 + 6_400 / 10.2) / 2)
    assert found.low < 6_400 / 10.2 < 640 < found.high


def test_configurations_whose_intervals_touch_are_not_resolved(sweep: Sweep) -> None:
    assert sweep_headline(sweep).startswith("Lowest energy per image: batch_size=16")
    assert "distinguishable from the next, batch_size=8" in sweep_headline(sweep)


def test_an_interval_that_one_run_cannot_have_is_left_out_and_none_goes_below_zero() -> None:
    assert interval_text(Interval(5.0, float("-inf"), float("inf")), three_digits) == "5.00"
    assert interval_text(Interval(5.0, -1.0, 11.0), three_digits) == "5.00, wide interval"
    assert interval_text(None, three_digits) == "-"


def test_the_data_is_json_and_states_what_failed(sweep: Sweep) -> None:
    output_text = json.loads(json.dumps(sweep_data(sweep), allow_nan=False))
    assert [row["label"] for row in output_text["configurations"]] == ["batch_size=8", "batch_size=16", "batch_size=32"]
    assert output_text["configurations"][2]["items_per_s"] is None
    assert output_text["failed"][0]["why"] == "failed: model.train does not fit into the GPU's memory"


def test_the_figures_show_speed_joules_and_phases(sweep: Sweep) -> None:
    titles = [figure.title for figure in sweep_figures(sweep)]
    assert titles == ["Energy per item", "Speed", "Energy of a step by phase", "Time of a step by phase"]


def test_an_interval_that_reaches_below_0_is_called_wide_and_the_unit_follows_the_number(sweep: Sweep) -> None:
    """Two repeats of 1 J and 3 J: [0.0 J, 14.7 J] was printed."""
    assert interval_text(Interval(2.0, -10.7, 14.7), energy_text) == "2.00 J, wide interval"
    assert interval_text(Interval(255.0, -1.0, 511.0), three_digits, " images/s") == "255 images/s, wide interval"
    assert interval_text(Interval(255.0, 250.0, 260.0), three_digits, " images/s") == "255 [250, 260] images/s"
    assert "ide interval" not in render_text(sweep_view(sweep))
    wide = replace(sweep.rows[1], items_per_s=Interval(795.0, -1.0, 1591.0), j_per_item=Interval(0.6, -0.1, 1.3))
    scattered = replace(sweep, rows=(sweep.rows[0], wide))
    text = " ".join(render_text(sweep_view(scattered), width=120).split())
    assert "Wide interval: the repeats are too few, or scatter too much, for one that excludes 0." in text
    assert (
        "not distinguishable from the next, batch_size=8. Fastest: batch_size=16 (795 images/s, wide interval)." in text
    )
    assert interval_text(Interval(2.0, 1.5, 2.5), energy_text) == "2.00 J [1.50 J, 2.50 J]"
