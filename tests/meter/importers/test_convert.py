"""Logs as runs and traces, by hand."""

import json
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from made_logs import dmon

from joulelab.clock import NS
from joulelab.errors import UsageError
from joulelab.meter.importers import convert
from joulelab.meter.importers.convert import (
    _run_log,
    _text,
    _trace_in,
    counter_shift_ns,
    merged,
    placed_stages,
    power_run,
    read_folder,
    read_log,
    read_power_log,
    stated,
    write_stated_trace,
    write_trace,
)
from joulelab.meter.importers.power_log import (
    DeviceLog,
    PowerLog,
    ReportedEnergy,
    RunLog,
    Source,
    StageLog,
    TimeRule,
    UnusableLog,
)
from joulelab.meter.importers.stage_records import FORMAT_STAGE
from joulelab.meter.series import load_trace


def device(name="gpu:0", component="gpu", times=(100.0, 101.0, 102.0), counted=True, index=None, **columns):
    source = Source(name, "card", component, counted=counted, index=index)
    return DeviceLog(source, np.array(times), {one: np.array(values) for one, values in columns.items()})


def log_of(*devices, has_wall=True):
    return PowerLog("test log", "a clock", has_wall, devices, notes=("a note",))


def stage(name="train", duration_s=2.0, started_s=None, **fields):
    return StageLog(name=name, role="student", activity="train", duration_s=duration_s, started_s=started_s, **fields)


def run_of(*stages, name="run", file="log.json"):
    return RunLog(name, "test", "a clock", stages, (Path(file),), ("note",))


def test_a_power_log_is_a_run_from_its_first_reading_to_its_last():
    log = log_of(device(power_watts=[5.0, 5.0, 5.0]), device("gpu:1", times=(101.0, 107.5), power_watts=[1.0, 1.0]))
    (found,) = power_run(log, Path("x"), "name").stages
    assert (found.duration_s, found.started_s, found.power) == (7.5, 100.0, log)
    assert power_run(log_of(has_wall=False), Path("x"), "name").stages[0].started_s is None
    assert power_run(log_of(), Path("x"), "name").stages[0].duration_s == 0.0


def test_runs_are_merged_in_the_order_of_time_with_unique_names():
    both = merged([run_of(stage(started_s=50.0), stage("eval", started_s=70.0)), run_of(stage(started_s=20.0))], "all")
    assert [(one.name, one.started_s) for one in both.stages] == [("train", 20.0), ("train-2", 50.0), ("eval", 70.0)]
    assert (both.files, both.notes, both.format) == ((Path("log.json"),), ("note",), "test")
    unknown = merged([run_of(stage(started_s=50.0)), run_of(stage()), run_of(stage(started_s=1.0))], "all")
    assert [(one.name, one.started_s) for one in unknown.stages] == [
        ("train", 50.0),
        ("train-2", None),
        ("train-3", 1.0),
    ]


def test_merged_power_logs_have_the_names_of_their_files():
    logs = [power_run(log_of(device(power_watts=[5.0] * 3)), Path(f"{name}.csv"), name) for name in ("a", "b")]
    assert [one.name for one in merged(logs, "both").stages] == ["a", "b"]
    again = power_run(log_of(device(power_watts=[7.0] * 3)), Path("other/a.csv"), "a")
    assert [one.name for one in merged([logs[0], again], "both").stages] == ["a", "a-2"]


def test_stages_at_the_same_time_are_named_because_their_energy_may_be_counted_twice():
    first, second, later = stage("a", 10.0, 100.0), stage("b", 10.0, 107.0), stage("c", 10.0, 115.5)
    assert merged([run_of(first), run_of(second), run_of(later)], "all").notes == (
        "a and b overlap by 3 s: if both are of the same devices, their energy is counted twice",
        "note",
    )
    assert merged([run_of(first), run_of(stage("b", 10.0))], "all").notes == ("note",)


def test_stages_follow_each_other_from_one_second_on():
    run = run_of(stage(duration_s=2.0), stage("eval", duration_s=0.0), stage("last", duration_s=0.5))
    places = [(begin, end) for begin, end, _ in placed_stages(run)]
    assert places == [(NS, 3 * NS), (3 * NS, 3 * NS + 1), (3 * NS + 1, int(3.5 * NS) + 1)]


def test_readings_as_stated_energy():
    """5 W for 2 s and a counter that rises by 8 J; a device that is not counted is left out."""
    power = log_of(
        device(power_watts=[5.0, 5.0, 5.0]),
        device("gpu:1", power_watts=[5.0, 5.0, 5.0], energy_counter_j=[0.0, 4.0, 8.0]),
        device("gpu:2", counted=False, power_watts=[500.0, 500.0, 500.0]),
        device("rapl:0", "cpu", energy_counter_j=[1.0, 2.0, 4.0]),
        device("x", "cpu", power_watts=[np.nan, np.nan, np.nan], energy_counter_j=[0.0, 1.0, 1.0]),
    )
    found = stated(stage(power=power, energies=(ReportedEnergy("codecarbon", 1.0, "estimated"),)))
    assert found.power is None
    assert [(one.component, one.energy_j, one.method) for one in found.energies] == [
        ("codecarbon", 1.0, "estimated"), ("gpu", 18.0, "integrated"), ("cpu", 4.0, "counter"),
    ]  # fmt: skip
    plain = stage()
    assert stated(plain) is plain


def test_a_trace_of_stated_energy(tmp_path):
    file = tmp_path / "log.json"
    file.write_text("{}")
    energies = (ReportedEnergy("gpu", 9.0, "integrated", peak_w=50.0), ReportedEnergy("codecarbon", 1.0, "estimated"))
    write_stated_trace(run_of(stage(started_s=500.0, energies=energies), file=file), tmp_path / "out.jsonl")
    trace = load_trace(tmp_path / "out.jsonl")
    (found,) = trace.devices
    assert (found.component, found.method, trace.ended) == ("gpu", "integrated", True)
    assert found.counted and found.facts["reported"] is True
    (cell,) = found.reported
    assert (cell.begin_ns, cell.end_ns, cell.energy_j, cell.peak_w) == (NS, 3 * NS, 9.0, 50.0)
    assert [one.component for one in trace.missing] == ["cpu"] and trace.offset_s == 499.0
    assert trace.header["imported"]["has_wall"] is True and "files" not in trace.header["imported"]


def test_a_trace_of_readings(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("x")
    gpu = device(times=(100.0, 101.0, 102.0, 110.0), index=3, power_watts=[5.0, np.nan, 5.0, 6.0],
                 energy_counter_j=[np.nan, 7.0, np.nan, np.nan], temperature_C=[40.0, 41.0, 42.0, 43.0])  # fmt: skip
    cpu = device("rapl:package-0", "cpu", energy_counter_j=[1.0, 2.0, 4.0])
    estimate = device("e", "cpu_estimate", energy_counter_j=[1.0, 2.0, 4.0])
    log = log_of(gpu, cpu, estimate)
    write_trace(log, file, tmp_path / "out.jsonl")
    trace = load_trace(tmp_path / "out.jsonl")
    found, package = trace.devices
    assert (list(found.power_ns), list(found.power_w)) == ([NS, 3 * NS, 11 * NS], [5.0, 5.0, 6.0])
    assert (list(found.counter_ns), list(found.counter_j)) == ([2 * NS], [7.0])
    assert (list(package.counter_ns), list(package.counter_j)) == ([NS, 2 * NS, 3 * NS], [1.0, 2.0, 4.0])
    assert (found.facts, found.gain_error_rel, found.refresh_s) == ({"gpu_index": 3}, 0.05, 5.0)
    assert package.refresh_s == 0.1 and trace.interval_s == 5.0 and trace.missing == () and trace.offset_s == 99.0
    holed = device(times=(0.0, 1.0, 2.0, 9.0), power_watts=[5.0, 5.0, 5.0, 5.0])
    write_trace(log_of(holed, has_wall=False), file, tmp_path / "gap.jsonl")
    trace = load_trace(tmp_path / "gap.jsonl")
    assert [(one.mono_ns, one.reason) for one in trace.gaps] == [(3 * NS, "no reading for 7.0 s in the imported log")]
    assert trace.devices[0].facts == {} and "timestamp" not in trace.header and trace.offset_s == 0.0
    write_trace(log_of(holed), file, tmp_path / "filled.jsonl", interpolate_gaps=True)
    trace = load_trace(tmp_path / "filled.jsonl")
    assert trace.devices[0].facts["interpolate_gaps"] is True and trace.header["mono_ns"] == NS
    assert trace.gaps == () and trace.devices[0].facts["reason"] == "7.0 s without readings are interpolated"


def test_readings_of_counters_alone_cover_time_that_begins_half_a_refresh_earlier():
    counter = device(energy_counter_j=[0.0, 4.0, 8.0])
    assert counter_shift_ns(log_of(counter)) == 50_000_000
    assert counter_shift_ns(log_of(counter, device(power_watts=[5.0, 5.0, 5.0]))) == counter_shift_ns(log_of()) == 0
    assert counter_shift_ns(log_of(counter, device("e", "cpu_estimate", power_watts=[5.0] * 3))) == 50_000_000
    two = device(energy_counter_j=[0.0, 4.0, np.nan])
    one = device(energy_counter_j=[0.0, np.nan, np.nan])
    assert (counter_shift_ns(log_of(two)), counter_shift_ns(log_of(one))) == (50_000_000, 0)


def write_stage(path, name, start, energy_j=10.0, **fields):
    path.parent.mkdir(exist_ok=True)
    plain = {"stage_id": name, "start_time": start, "duration_seconds": 5.0, "gpu_energy_joules": energy_j}
    path.write_text(json.dumps({**plain, **fields}))
    return plain


def test_a_folder_has_each_stage_once(tmp_path):
    """a: a record and its power log; b: a snapshot and its power log; c: a summary that has a's stage, and its own."""
    record = write_stage(tmp_path / "a" / "stage.json", "train", 100.0)
    dmon(tmp_path / "a" / "gpu.log", [[50.0, 50.0, 50.0]])
    write_stage(tmp_path / "b" / "snapshot.json", "other", 300.0, snapshot=True)
    dmon(tmp_path / "b" / "gpu.log", [[60.0, 60.0, 60.0]])
    write_stage(tmp_path / "d" / "stage.json", "alone", 500.0)
    runs, notes = read_folder(tmp_path, TimeRule())
    assert [(run.name, run.stages[0].power is not None) for run in runs] == [
        ("train", False), ("alone", False), ("b", True),
    ]  # fmt: skip
    assert notes == [f"{tmp_path / 'a' / 'gpu.log'}: readings of a stage whose record is next to it; not counted again"]
    (tmp_path / "c").mkdir()
    stages = {"train": record, "eval": {**record, "stage_id": "eval", "start_time": 200.0}}
    (tmp_path / "c" / "summary.json").write_text(json.dumps({"stages": stages}))
    runs, _ = read_folder(tmp_path, TimeRule())
    assert [[stage.name for stage in run.stages] for run in runs] == [["train", "eval"], ["alone"], ["log"]]


def test_a_summary_of_one_stage_is_that_stage(tmp_path):
    record = write_stage(tmp_path / "a" / "stage.json", "train", 100.0)
    (tmp_path / "summary.json").write_text(json.dumps({"stages": {"train": record}, "experiment_name": "x"}))
    runs, notes = read_folder(tmp_path, TimeRule("UTC"))
    assert [[stage.name for stage in run.stages] for run in runs] == [["train"]] and notes == []
    assert {path.name for run in runs for path in run.files} <= {"stage.json", "summary.json"}


def test_a_folder_without_a_log_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(UnusableLog, match="contains no log"):
        read_folder(tmp_path, TimeRule())
    dmon(tmp_path / "gpu.log", [[50.0, 50.0, 50.0]])
    (run,), notes = read_folder(tmp_path, TimeRule())
    assert run.name == tmp_path.name and notes == []


def test_lines_of_a_trace_have_the_times_of_the_log(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("x")
    write_trace(log_of(device(power_watts=[5.0, 5.0, 5.0])), file, tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    times = [datetime.fromisoformat(line["timestamp"]).timestamp() for line in lines]
    assert times == pytest.approx([100.0, 100.0, 101.0, 102.0, 102.0])
    files = (file, tmp_path / "out.jsonl")
    run = RunLog("run", "test", "a clock", (stage(energies=(ReportedEnergy("gpu", 9.0, "integrated"),)),), files, ())
    write_stated_trace(run, tmp_path / "two.jsonl")
    assert load_trace(tmp_path / "two.jsonl").header["imported"]["files"] == [str(one) for one in files]


def write_codecarbon(path, kwh=0.001):
    path.parent.mkdir(exist_ok=True)
    columns = "timestamp,project_name,run_id,duration,emissions,energy_consumed,cpu_energy,gpu_energy,ram_energy"
    path.write_text(f"{columns}\n2026-01-01T00:00:00,p,r1,60,0.1,{kwh},{kwh},0,0\n")
    return path


def refusal(read, *given):
    with pytest.raises(UnusableLog) as refused:
        read(*given)
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_a_log_without_readings_states_its_format_and_what_was_wrong_with_it(tmp_path):
    log, record = tmp_path / "log.csv", tmp_path / "summary.json"
    log.write_text("timestamp,gpu_index,power_watts\nnever,0,5.0\n")
    assert refusal(read_log, log, TimeRule()).endswith(
        "contains no reading (1 records have no readable time and were skipped)"
    )
    record.write_text('{"stage_id": "train", "gpu_energy_joules": 0}')
    assert refusal(read_log, record, TimeRule()).startswith(f"{record} (stage records) contains no reading")
    log.write_text("timestamp,gpu_index,power_watts\n")
    assert refusal(read_log, log, TimeRule()).endswith("contains no reading")


def test_totals_are_refused_where_power_over_time_is_needed(tmp_path):
    write_stage(tmp_path / "stage.json", "train", 100.0)
    of_stages = refusal(read_power_log, tmp_path / "stage.json", TimeRule(), "a plot")
    assert "contains totals of whole stages; a plot needs power over time" in of_stages
    of_runs = refusal(read_power_log, write_codecarbon(tmp_path / "emissions.csv"), TimeRule(), "a plot")
    assert "contains CodeCarbon's totals of whole runs" in of_runs


def test_a_run_of_several_stages_has_the_name_of_the_experiment(tmp_path):
    named, other = stage(facts={"experiment_name": "distill"}), stage("eval", facts={"experiment_name": "wrong"})
    assert [_run_log(tmp_path, "x", stages, []).name for stages in ([named, other], [named], [stage(), other])] == [
        "distill", "train", "train",
    ]  # fmt: skip
    record = write_stage(tmp_path / "a" / "stage.json", "train", 100.0)
    stages = {"train": record, "eval": {**record, "stage_id": "eval", "start_time": 200.0}}
    (tmp_path / "summary.json").write_text(json.dumps({"stages": stages, "experiment_name": "distill"}))
    assert [run.name for run in read_log(tmp_path / "summary.json", TimeRule())] == ["distill"]


def test_a_folder_is_searched_for_files_with_the_endings_of_logs(tmp_path, monkeypatch):
    dmon(tmp_path / "gpu.log", [[50.0, 50.0, 50.0]])
    dmon(tmp_path / "gpu.log.bak", [[50.0, 50.0, 50.0]])
    (tmp_path / "folder.csv").mkdir()
    assert len(read_folder(tmp_path, TimeRule())[0]) == 1
    monkeypatch.setattr(convert, "_MOST_FILES", 1)
    assert len(read_folder(tmp_path, TimeRule())[0]) == 1
    dmon(tmp_path / "second.log", [[50.0, 50.0, 50.0]])
    with pytest.raises(UsageError, match="contains 2 possible log files; expected at most 1"):
        read_folder(tmp_path, TimeRule())


def test_json_files_of_models_are_not_read_and_logs_may_be_large(tmp_path, monkeypatch):
    write_stage(tmp_path / "stage.json", "train", 100.0)
    monkeypatch.setattr(convert, "_LARGEST_JSON_BYTES", (tmp_path / "stage.json").stat().st_size)
    write_stage(tmp_path / "large.json", "larger", 200.0)
    (tmp_path / "other").mkdir()
    dmon(tmp_path / "other" / "gpu.log", [[50.0] * 9])
    assert [run.name for run in read_folder(tmp_path, TimeRule())[0]] == ["train", "other"]


def test_a_snapshot_counts_unless_a_power_log_is_next_to_it(tmp_path):
    write_stage(tmp_path / "a" / "snapshot.json", "train", 300.0, snapshot=True)
    write_codecarbon(tmp_path / "a" / "emissions.csv")
    (tmp_path / "b").mkdir()
    dmon(tmp_path / "b" / "gpu.log", [[60.0, 60.0, 60.0]])
    assert [run.name for run in read_folder(tmp_path, TimeRule())[0]][0::2] == ["train", "b"]


def test_a_summary_of_one_stage_is_read_as_a_stage(tmp_path):
    record = write_stage(tmp_path / "a" / "stage.json", "train", 100.0)
    (tmp_path / "a" / "stage.json").unlink()
    (tmp_path / "summary.json").write_text(json.dumps({"stages": {"train": record}, "experiment_name": "x"}))
    (run,), _ = read_folder(tmp_path, TimeRule())
    assert run.format == FORMAT_STAGE


def test_codecarbon_counts_where_no_stage_states_its_energy(tmp_path):
    file = write_codecarbon(tmp_path / "emissions.csv")
    (run,), notes = read_folder(tmp_path, TimeRule("UTC"))
    assert run.stages[0].energies[0].energy_j == pytest.approx(3600) and notes == []
    write_stage(tmp_path / "a" / "stage.json", "train", 100.0)
    assert len(read_folder(tmp_path, TimeRule("UTC"))[0]) == 2
    write_stage(tmp_path / "a" / "stage.json", "train", 100.0, total_codecarbon_energy_kwh=0.001)
    runs, notes = read_folder(tmp_path, TimeRule("UTC"))
    assert len(runs) == 1 and notes == [f"{file}: CodeCarbon's figures are in the stage records already"]


def test_a_stage_may_start_at_second_0():
    assert [one.started_s for one in merged([run_of(stage(started_s=0.5), stage(started_s=0.0))], "all").stages] == [
        0,
        0.5,
    ]


def test_the_trace_of_a_run_is_found_if_there_is_only_one(tmp_path):
    with pytest.raises(UsageError, match="is a folder but not a run with a trace"):
        _trace_in(tmp_path)
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "host-1.jsonl").write_text("")
    assert _trace_in(tmp_path) == tmp_path / "trace" / "host-1.jsonl"
    (tmp_path / "trace" / "host-2.jsonl").write_text("")
    with pytest.raises(UsageError, match="a run with 2 traces"):
        _trace_in(tmp_path)


def test_control_characters_are_replaced_in_json_strings_and_in_text(tmp_path):
    file = tmp_path / "log"
    for written, shown in (('{"a": "\\u001b[31m"}', '{"a": "\ufffd[31m"}'), ("a \\u001b \x1b", "a \\u001b \ufffd")):
        file.write_text(written)
        assert _text(file) == shown


def test_what_a_log_does_not_state_has_a_usual_value(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("x")
    write_trace(log_of(device(energy_counter_j=[0.0, 4.0, 8.0])), file, tmp_path / "counter.jsonl")
    assert load_trace(tmp_path / "counter.jsonl").interval_s == 1.0
    write_trace(log_of(device(times=(100.0,), power_watts=[5.0])), file, tmp_path / "single.jsonl")
    assert load_trace(tmp_path / "single.jsonl").devices[0].refresh_s == 0.1
    energies = (ReportedEnergy("gpu", 9.0, "integrated"),)
    write_stated_trace(run_of(stage(energies=energies), file=file), tmp_path / "stated.jsonl")
    assert load_trace(tmp_path / "stated.jsonl").interval_s == 1.0


def test_a_line_has_the_index_of_its_gpu_and_the_time_of_its_counter_if_they_are_known(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("x")
    both = device(index=3, power_watts=[5.0, 5.0, np.nan], energy_counter_j=[np.nan, 4.0, np.nan])
    write_trace(log_of(both, device("gpu:1", times=(105.0,), power_watts=[5.0])), file, tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line.get("gpu_index"), line.get("counter_mono_ns")) for line in lines if line["kind"] == "gpu"] == [
        (3, None), (3, 2 * NS), (None, None),
    ]  # fmt: skip
