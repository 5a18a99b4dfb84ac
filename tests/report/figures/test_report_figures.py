"""Figures: units and methods on the axes, and a thinned curve that keeps its peaks."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vl_convert

from joulelab.report.compare.method_rows import compare
from joulelab.report.compare.scopes import datasets
from joulelab.report.export import comparison_data
from joulelab.report.figures.chart_base import GRAY, energy_unit, label_scales, stage_colors, thin, value_scale
from joulelab.report.figures.comparison_figures import quality_against_energy, repeats, stages_by_method
from joulelab.report.figures.power_figures import attempt_traces, power_over_time
from joulelab.runs.paths import RunPaths


def texts(spec: Any, key: str) -> list[str]:
    """All values of a key anywhere in a spec."""
    if isinstance(spec, dict):
        own = [spec[key]] if isinstance(spec.get(key), str) else []
        return own + [text for value in spec.values() for text in texts(value, key)]
    return [text for value in spec for text in texts(value, key)] if isinstance(spec, list) else []


def traces_of(folder: Path) -> Any:
    return attempt_traces(RunPaths(folder))


def rows(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of all layers."""
    named = [row for found in spec.get("datasets", {}).values() for row in found]
    values = spec.get("data", {}).get("values", [])
    return [*named, *values, *(row for layer in spec.get("layer", ()) for row in rows(layer))]


def test_a_thinned_curve_keeps_ends_and_extremes() -> None:
    times = np.arange(100_000)
    watts = 50 + np.sin(times / 500)
    watts[70_123], watts[20_456] = 400.0, 1.0
    thin_times, thin_watts = thin(times, watts, buckets=200)
    assert len(thin_times) <= 402
    assert thin_watts.max() == 400.0 and thin_watts.min() == 1.0
    assert thin_times[0] == 0 and thin_times[-1] == 99_999
    assert (np.diff(thin_times) > 0).all()


def test_a_short_curve_is_left_alone() -> None:
    times, watts = np.arange(10), np.ones(10)
    assert thin(times, watts)[0] is times


@pytest.mark.parametrize(("top", "unit"), [(0.5, "mJ"), (999, "J"), (1000, "kJ"), (3e6, "MJ"), (0, "J")])
def test_the_axis_takes_the_unit_of_its_largest_value(top: float, unit: str) -> None:
    assert energy_unit([top])[1] == unit


def test_stages_keep_their_color_and_overhead_stays_gray(made) -> None:
    (record,) = [one for one in made.demo_records() if one.label == "response KD"][:1]
    overhead = made.stages_of([made.Part("run.overhead", 1.0, 5.0)], measured=False)
    (teacher, *rest) = record.inherited
    two_stages = teacher.model_copy(update={"stages": ("teacher.train", "teacher.validate")})
    changes = {"stages": (*overhead, *record.stages), "lineage": (two_stages, *rest), "made": ()}
    colors = stage_colors([record.model_copy(update=changes)])
    assert list(colors)[-1] == "run.overhead" and colors["run.overhead"] == GRAY
    # an inherited artifact of several stages has a line of the legend of its own
    assert "teacher.train + teacher.validate" in colors and len(set(colors.values())) == len(colors)


def test_forty_methods_still_differ_in_color_or_shape() -> None:
    _, colors, shapes = label_scales(f"m{i}" for i in range(40))
    assert len(set(zip(colors, shapes, strict=True))) == 40


@pytest.mark.parametrize("measured", [False, True])
def test_axes_name_unit_and_method(made, tmp_path: Path, measured: bool) -> None:
    records = made.demo_records(measured)
    made.write_group(tmp_path, records, measured)
    comparison = compare(made.group_of(records), records, tmp_path)
    word = "" if measured else ", estimated"
    quality, bars = quality_against_energy(comparison), stages_by_method(comparison)
    assert quality and bars
    assert {f"Energy per student (J{word})", "Accuracy (%)"} <= set(texts(quality.spec, "title"))
    assert f"Mean energy per run (J{word})" in texts(bars.spec, "title")
    assert quality.spec["width"] == "container"
    power = power_over_time(records[0], traces_of(tmp_path / records[0].run_id))
    assert power and f"Power (W{word})" in texts(power.spec, "title")
    assert ("idle 10.0 W" in texts(power.spec, "text")) is measured


def test_parts_tell_inherited_from_own_and_what_students_share(made, tmp_path: Path) -> None:
    records = made.demo_records()
    found = datasets(compare(made.group_of(records), records, tmp_path))
    kd = {part["stage"]: part for part in found["parts"] if part["run"] == "response KD, seed 0"}
    assert (kd["teacher.train"]["paid"], kd["teacher.train"]["shared"]) == ("inherited", True)
    assert (kd["student.train"]["paid"], kd["student.train"]["shared"]) == ("own", False)
    assert kd["data.preprocess"]["shared"] is False and "sample:minilm" not in kd
    assert sum(part["policy"] for part in kd.values()) == pytest.approx(12 + 640 + 130 + 131 + 9)


def drawn(spec: dict[str, Any]) -> str:
    """The figure as the library draws it: a spec that names a field wrongly has nothing in it."""
    return str(vl_convert.vegalite_to_svg(spec))


def test_a_figure_in_a_file_shows_every_run_and_the_front(made, tmp_path: Path) -> None:
    records = made.demo_records()
    comparison = compare(made.group_of(records), records, tmp_path)
    figure, spread = quality_against_energy(comparison), repeats(comparison)
    assert figure and spread
    svg = drawn({**figure.complete(datasets(comparison)), "width": 500})
    assert all(f"run: {name}" in svg for name in ("teacher, seed 0", "response KD, seed 1"))
    assert svg.count("teacher included: 864") == 4  # the rule, the interval and the two marks of the teacher's run
    assert 'stroke-dasharray="5,4"' in svg
    marks = drawn({**spread.complete(datasets(comparison)), "width": 500})
    assert marks.count('aria-roledescription="point"') == len(records)


def test_no_front_is_drawn_over_estimates_that_others_on_the_cores_have_made(made, tmp_path: Path) -> None:
    records = [made.with_contention(one) if one.label == "response KD" else one for one in made.demo_records()]
    comparison = compare(made.group_of(records), records, tmp_path)
    figure = quality_against_energy(comparison)
    assert figure and "No Pareto front is marked: energy was estimated" in figure.caption
    svg = drawn({**figure.complete(datasets(comparison)), "width": 500})
    assert "run: response KD, seed 1" in svg and 'stroke-dasharray="5,4"' not in svg
    data = comparison_data(comparison)
    assert data["pareto_front"] == [] and data["no_pareto_front"].startswith("No Pareto front")


def test_the_axis_of_repeats_has_no_joules_below_0(made, tmp_path: Path) -> None:
    """Two repeats far apart have an interval that reaches below; joules do not."""
    records = [made.labels_only(0, 790, 120.0), made.labels_only(1, 796, 700.0)]
    comparison = compare(made.group_of(records), records, tmp_path)
    spread = repeats(comparison)
    assert spread
    svg = drawn({**spread.complete(datasets(comparison)), "width": 500})
    ticks = re.findall(r">([−-]?[\d,.]+)</text>", svg)
    assert "0.0" in ticks or "0" in ticks
    assert not [tick for tick in ticks if tick[0] in "−-"]


def test_bands_cover_the_stages_on_the_time_axis_of_the_trace(made, tmp_path: Path) -> None:
    record = made.teacher_run()
    figure = power_over_time(record, traces_of(made.write_run(tmp_path, record)))
    assert figure
    bands = {row["stage"]: (row["t"], row["until"]) for row in rows(figure.spec) if "until" in row}
    assert bands["teacher.train"] == (4.0, 94.0)
    assert "run.overhead" not in bands


def test_without_a_trace_there_is_no_power_figure(made, tmp_path: Path) -> None:
    assert power_over_time(made.teacher_run(), traces_of(tmp_path)) is None


@pytest.mark.parametrize(
    ("values", "top", "wanted"),
    [
        ([0.02, 1.7], math.inf, (0.0, 1.8008)),
        ([0.9, 0.9], math.inf, (0.855, 0.945)),
        ([60.0, 99.0], 100.0, (57.66, 100.0)),
        ([-0.3, 0.5], math.inf, (-0.348, 0.548)),
    ],
    ids=["loss near 0", "equal values", "percent", "negative"],
)
def test_an_axis_has_a_margin_that_ends_at_the_bounds_of_its_quantity(values, top, wanted) -> None:
    assert value_scale(values, top).domain == pytest.approx(wanted)
