"""The power figure tells gaps, throttling and both ways to the joules; curves set quality against joules so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from joulelab.meter.trace import LineFile, copy_to_parquet, read_lines
from joulelab.report.compare.method_rows import compare
from joulelab.report.figures.power_figures import attempt_traces, power_over_time, throttled
from joulelab.report.figures.training_figures import curve_points, quality_over_joules
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord

NS = 1_000_000_000


@pytest.fixture
def held_back(made, tmp_path: Path) -> tuple[Any, RunPaths]:
    """A measured run whose card was at its power limit for 5 s, with a counter, and no readings from 20 s to 21.5 s."""
    record = made.distilled("response KD", 0, 826, 131.0, True)
    paths = RunPaths(made.write_run(tmp_path, record, True))
    (path,) = [trace for _, _, trace in paths.traces()]
    lines, counted_j = [], 0.0
    for line in read_lines(path):
        if line["kind"] == "gpu":
            second = (line["mono_ns"] - made.FIRST_NS) / NS
            counted_j += line["power_watts"] / 2
            line |= {"throttle_reasons": 4 if 10 <= second < 15 else 1, "energy_counter_j": 1.02 * counted_j}
        lines.append(line)
    gap = {"kind": "gap", "timestamp": made.STAMP, "device": "gpu:0", "reason": "lost"}
    gaps = [{**gap, "mono_ns": made.FIRST_NS + half_second * NS // 2} for half_second in range(40, 43)]
    lost = [line for line in lines[:-1] if line["mono_ns"] not in [gap["mono_ns"] for gap in gaps]]
    path.unlink()
    file = LineFile(path)
    file.append(*lost, *gaps, lines[-1])
    file.close()
    return record, paths


def test_the_figure_states_gaps_throttling_and_counter_against_integral(held_back) -> None:
    record, paths = held_back
    figure = power_over_time(record, attempt_traces(paths))
    assert figure
    (gap,), (held,) = figure.spec["datasets"]["gaps"], figure.spec["datasets"]["throttling"]
    assert (gap["t"], gap["until"], gap["times"], gap["why"]) == (20.0, 21.5, 3, "gpu:0: lost")
    parts = {part: [p["t"] for p in figure.spec["datasets"]["curves"] if p["part"] == part] for part in (0, 1)}
    assert max(parts[0]) <= 20.0 and min(parts[1]) >= 21.5  # no line leads across
    assert (held["t"], held["until"], held["why"]) == (10.0, 15.0, "power limit")
    assert "1 gap in the readings, 1.5 s in total (gpu:0: lost)" in figure.caption
    assert "5.0 s of GPU throttling (power limit)" in figure.caption
    assert "counter 144 J, integral of power 131 J (-9.0 %)" in figure.caption  # the gap is not in the integral


def test_the_figure_keeps_no_energy_curves_in_memory(held_back) -> None:
    """Those of a day with eight GPUs are 0.7 GB."""
    record, paths = held_back
    traces = attempt_traces(paths)
    assert power_over_time(record, traces)
    kept = {name for placed in traces for series in placed.trace.devices for name in vars(series)}
    assert kept.isdisjoint({"counter_path", "power_path", "best_path"})


def test_a_trace_in_columns_states_the_same_throttling(held_back) -> None:
    _, paths = held_back
    (path,) = [trace for _, _, trace in paths.traces()]
    assert throttled(copy_to_parquet(path, read_lines), 0.5) == throttled(path, 0.5) != []


def test_quality_stands_against_the_joules_that_the_run_had_taken_by_then(made, tmp_path: Path) -> None:
    record = made.distilled("response KD", 0, 826, 131.0, True)
    paths = RunPaths(made.write_run(tmp_path, record, True))
    rows = [
        (6, "student.train", {"loss": 0.9}),
        (12, "student.validate", {"accuracy": 0.6}),
        (24, "student.validate", {"accuracy": 0.8}),
    ]
    lines = [
        {"step": second, "attempt": 1, "mono_ns": made.FIRST_NS + second * NS, "stage": stage, **values}
        for second, stage, values in rows
    ]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (validation,) = made.stages_of([made.Part("student.validate", 1.0, 1.0)], measured=True)
    stages = (*record.stages, validation.model_copy(update={"segments": ()}))
    record = record.model_copy(update={"stages": stages})
    points = curve_points(record, paths.folder, attempt_traces(paths))
    # with the data's 12 J, and without the teacher's 770 J
    assert [point["joules"] for point in points] == pytest.approx([12 + 131 / 4, 12 + 131 / 2, 12 + 131], rel=0.05)
    figure = quality_over_joules(compare(made.group_of([record]), [record], tmp_path), points)
    assert figure and figure.title == "Validation: Accuracy (%) over energy"
    assert [one["value"] for one in figure.spec["datasets"]["evaluations"]] == [60.0, 80.0]
    estimated = record.model_copy(update={"lineage": made.teacher_lineage(False)})  # its data, for one
    assert curve_points(estimated, paths.folder, attempt_traces(paths)) == []


def test_runs_that_generate_or_reuse_the_answers_are_compared_alike(made, tmp_path: Path) -> None:
    parts = (made.Part("teacher.logits", 22.0, 130.0, 1_500), *made.student_parts(131.0))
    requested = made.make_record("KD", 0, parts, measured=True, correct=826, lineage=made.teacher_lineage(True)[:2])
    paths = RunPaths(made.write_run(tmp_path, requested, True))
    lines = [
        {"step": 1, "attempt": 1, "mono_ns": made.FIRST_NS + second * NS, "stage": stage, "loss": 1.0}
        for second, stage in ((11, "teacher.logits"), (22 + 12, "student.train"), (22 + 24, "student.train"))
    ]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    points = curve_points(requested, paths.folder, attempt_traces(paths))
    assert [point["joules"] for point in points] == pytest.approx([65, 12 + 131 / 2, 12 + 131], rel=0.05)


def test_a_set_made_from_the_answers_is_left_out_like_the_answers(made, tmp_path: Path) -> None:
    """Whether this run filtered them or reuses the set of another run."""
    answers = made.ancestor("answers", 130.0, ("teacher.generate",), True)
    synthetic = made.ancestor("synthetic", 20.0, ("data.synthetic",), True)
    lineage = (answers, synthetic.model_copy(update={"parents": (answers.key,)}))
    stages = (made.Part("teacher.generate", 22.0, 130.0), made.Part("data.synthetic", 2.0, 20.0))
    for parts, keys, start_s in ((stages, tuple(one.key for one in lineage), 24), ((), (), 0)):
        parts = (*parts, *made.student_parts(131.0))
        record = made.make_record("synthetic", start_s, parts, measured=True, lineage=lineage, made=keys)
        paths = RunPaths(made.write_run(tmp_path, record, True))
        line = {"step": 1, "attempt": 1, "mono_ns": made.FIRST_NS + (start_s + 24) * NS, "loss": 1.0}
        paths.metrics.write_text(json.dumps({**line, "stage": "student.train"}) + "\n")
        (point,) = curve_points(record, paths.folder, attempt_traces(paths))
        assert point["joules"] == pytest.approx(131, rel=0.05)


def test_power_is_summed_by_component_over_devices_and_hosts_and_no_sum_crosses_a_gap(tmp_path: Path) -> None:
    """Two nodes with a package and two GPUs each; one GPU has a gap of two seconds."""
    paths = RunPaths(tmp_path / "run")
    for number, host in enumerate(("node1", "node2")):
        first_ns = (1_000 + 50 * number) * NS  # booted at different times
        facts = {"counted": True, "wrap_j": None, "refresh_s": 0.1, "gain_error_rel": 0.05, "facts": {}}
        gpus = [{"device": f"gpu:{card}", "component": "gpu", "name": "H200", **facts} for card in (0, 1)]
        package = {"device": "rapl:package-0", "component": "cpu", "name": "package-0", **facts}
        head = {"kind": "header", "timestamp": "2026-01-01T00:00:00+00:00", "mono_ns": first_ns, "host": host}
        head |= {"boot_id": host, "interval_s": 0.5, "wall_minus_mono_s": 0.0, "devices": [*gpus, package]}
        lines = [{**head, "missing": []}]
        for tick in range(41):
            stamp = {"mono_ns": first_ns + tick * NS // 2, "timestamp": "2026-01-01T00:00:00+00:00"}
            lines.append({"kind": "rapl", **stamp, "device": "host", "rapl": {"package-0": 30.0 * tick / 2}})
            for card in (0, 1):
                if (number, card) == (1, 1) and 20 <= tick < 24:
                    lines.append({"kind": "gap", **stamp, "device": "gpu:1", "reason": "lost"})
                else:
                    # readings of the second card are 50 ms later, as those of a real loop are
                    late = {**stamp, "mono_ns": stamp["mono_ns"] + card * NS // 20}
                    lines.append({"kind": "gpu", **late, "device": f"gpu:{card}", "power_watts": 100.0 * (card + 1)})
        file = LineFile(paths.trace(host, 1))
        file.append(*lines)
        file.close()
    opened = {"run_id": "run", "name": "run", "label": "run", "status": "running"}
    record = RunRecord(**opened, created_at="2026-01-01T00:00:00+00:00", spec={"energy": {}})
    figure = power_over_time(record, attempt_traces(paths))
    assert figure
    curves, devices = figure.spec["datasets"]["curves"], figure.spec["datasets"]["devices"]
    sums = {line: [p["w"] for p in curves if p["line"] == line] for line in {p["line"] for p in curves}}
    assert set(sums) == {"GPU, 4 devices", "CPU, 2 devices"}
    assert {round(w) for w in sums["GPU, 4 devices"]} == {600}, "never the sum of three cards"
    assert {round(w) for w in sums["CPU, 2 devices"]} == {60}
    gpu = [p for p in curves if p["line"] == "GPU, 4 devices"]
    assert not [p for p in gpu if 10.1 < p["t"] < 11.9] and {p["part"] for p in gpu} == {0, 1}
    assert {p["line"] for p in devices} == {
        f"{h} {d}" for h in ("node1", "node2") for d in ("gpu:0", "gpu:1", "rapl:package-0")
    }
    assert "sum over all devices of a component; thin lines are single devices" in figure.caption
