"""A closed trace becomes Parquet and says the same; until that is certain the JSONL stays."""

import fcntl
import gzip
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from joulelab.errors import JoulelabError
from joulelab.meter.config import EnergyConfig
from joulelab.meter.health import load_health
from joulelab.meter.recorder import STANDBY_S
from joulelab.meter.series import load_trace
from joulelab.meter.session import Meter
from joulelab.meter.trace import copy_to_parquet, read_header, read_lines, read_readings, write_parquet
from joulelab.runs.assemble import assemble
from joulelab.runs.attempt import RunAttempt
from joulelab.runs.context import SilentProgress, StopRequest
from joulelab.runs.paths import RunPaths
from joulelab.runs.spec import check
from joulelab.runs.store import compact_ended, compact_run, read_record

RECORDED = Path(__file__).parent.parent / "meter" / "recorded" / "h200-square-waves.jsonl.gz"
DEVICES = [
    {"device": name, "component": component, "name": name, "counted": True, "facts": facts, **more}
    for name, component, facts, more in (
        ("gpu:A", "gpu", {}, {}),
        ("gpu:B", "gpu", {}, {}),
        ("rapl:package-0", "cpu", {"max_gap_s": 60.0}, {"wrap_j": 100.0}),
        ("apple:cpu", "cpu", {}, {}),
        ("estimate", "cpu_estimate", {"w_per_thread": 2.0}, {}),
    )
]
HEADER = {"kind": "header", "mono_ns": 10, "interval_s": 0.5, "devices": DEVICES[:4], "missing": []}
# Every kind of line, with what makes copying hard: nulls, whole numbers among others, NaN, texts of all sorts.
PLACE = {"wall_us": 9, "wall_us_mono_ns": 9999}
LINES = [
    HEADER,
    {"kind": "devices", "mono_ns": 15, "devices": DEVICES},
    {
        "kind": "gpu",
        "mono_ns": 20,
        "device": "gpu:A",
        "power_watts": 100,
        "energy_counter_j": 5.5,
        "sm_clock_MHz": None,
    },
    {"kind": "gpu", "mono_ns": 21, "device": "gpu:B", "power_watts": 90.5, "throttle_names": ["power", "ö\ud800"]},
    {"kind": "gpu", "mono_ns": 30, "device": "gpu:A", "energy_counter_j": 7, "counter_mono_ns": 29, "late_s": 0.7},
    {"kind": "samples", "device": "gpu:A", "sample_us": [5, 3, 4], "sample_mw": [2, 1, 9], **PLACE},
    {"kind": "samples", "device": "gpu:A", "sample_us": [], "sample_mw": [], **PLACE},
    {"kind": "rapl", "mono_ns": 40, "device": "host", "rapl": {"package-0": 99.0, "dram": 1}},
    {"kind": "rapl", "mono_ns": 41, "device": "host", "rapl": {"package-0": 3.0}},
    {"kind": "counters", "mono_ns": 42, "device": "host", "counters_j": {"apple:cpu": 1.25}},
    {"kind": "estimate", "mono_ns": 43, "device": "estimate", "busy_thread_s": 0.25},
    {"kind": "host", "mono_ns": 44, "device": "host", "other": float("nan"), "rest": "x", "misfit": 1},
    {"kind": "gap", "mono_ns": 45, "device": "gpu:B", "reason": "lost"},
    {"kind": "warning", "mono_ns": 46, "device": "gpu:A", "text": "somebody else"},
    {**HEADER, "mono_ns": 50},
    {"kind": "end", "mono_ns": 60, "reason": "stop"},
]


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def same_trace(one, other):
    assert (one.header, one.gaps, one.missing) == (other.header, other.gaps, other.missing)
    assert (one.first_ns, one.last_ns, one.ended) == (other.first_ns, other.last_ns, other.ended)
    for left, right in zip(one.devices, other.devices, strict=True):
        for name in ("counter_ns", "counter_j", "power_ns", "power_w", "samples_ns", "samples_w"):
            assert np.array_equal(getattr(left, name), getattr(right, name)), (left.device, name)


def test_every_kind_of_line_comes_back_and_gives_the_same_arrays(tmp_path):
    jsonl = write(tmp_path / "h.1.jsonl", LINES)
    parquet = copy_to_parquet(jsonl, read_lines)
    assert not read_readings(parquet).misfit  # so the arrays below come from the columns
    for line, copy in zip(LINES, read_lines(parquet), strict=True):
        assert line == copy or line["kind"] == "host"  # with its NaN, which equals nothing
    assert read_header(parquet) == HEADER
    same_trace(load_trace(jsonl), load_trace(parquet))
    assert load_health(jsonl) == load_health(parquet)


def test_a_word_where_a_number_belongs_is_kept_and_read_line_by_line(tmp_path):
    jsonl = write(tmp_path / "h.1.jsonl", [HEADER, {"kind": "host", "mono_ns": 20, "gpu_index": "zero"}, *LINES[2:5]])
    parquet = copy_to_parquet(jsonl, read_lines)
    assert list(read_lines(parquet))[1]["gpu_index"] == "zero"
    same_trace(load_trace(jsonl), load_trace(parquet))


def test_an_h200s_trace_is_smaller_by_far_and_gives_the_same_arrays(tmp_path):
    jsonl = tmp_path / "h.1.jsonl"
    jsonl.write_bytes(gzip.decompress(RECORDED.read_bytes()))
    parquet = copy_to_parquet(jsonl, read_lines)
    assert parquet.stat().st_size < jsonl.stat().st_size / 4
    same_trace(load_trace(jsonl), load_trace(parquet))


def test_a_run_ends_with_a_parquet_trace_from_which_its_record_follows(folder):
    paths = RunPaths(folder)
    assert [path.suffix for _, _, path in paths.traces()] == [".parquet"]
    assert paths.next_attempt() == 2
    record = read_record(paths)
    assert assemble(paths, "done").totals == record.totals
    assert record.totals.best.energy_j > 0


def test_a_run_that_continues_adds_a_trace_and_keeps_the_joules_of_the_first(folder):
    paths = RunPaths(folder)
    first = read_record(paths)
    attempt = RunAttempt(paths, check(first.spec), StopRequest(), SilentProgress())
    with attempt.begin().stage("model.more"):
        assert [path.suffix for _, _, path in paths.traces()] == [".parquet", ".jsonl"]
    record = attempt.end("done")
    assert [path.suffix for _, _, path in paths.traces()] == [".parquet", ".parquet"]
    assert [row.number for row in record.attempts] == [1, 2]
    assert record.attempts[0].energy == first.attempts[0].energy
    assert record.stage("model.train").energy == first.stage("model.train").energy


def closed(folder, lines=LINES):
    """The run's trace as it was before it was closed: JSONL."""
    paths = RunPaths(folder)
    for _, _, path in paths.traces():
        path.unlink()
    return paths, write(paths.trace("node", 1), lines)


def test_a_copy_that_differs_is_thrown_away(folder, monkeypatch):
    paths, jsonl = closed(folder)
    without_last = lambda path, lines: write_parquet(path, list(lines)[:-1])  # noqa: E731
    monkeypatch.setattr("joulelab.meter.trace.write_parquet", without_last)
    (why,) = compact_run(paths).kept
    assert "differs after conversion" in why
    assert [path.name for path in jsonl.parent.iterdir() if path.suffix != ".lock"] == [jsonl.name]


def test_a_trace_that_may_still_grow_is_left_alone(folder, store):
    paths, jsonl = closed(folder, LINES[:-1])
    assert "no closing line" in compact_run(paths).kept[0]
    lock = os.open(jsonl.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "still running" in compact_run(paths, dead_before=2).kept[0]
    os.close(lock)
    old = jsonl.stat().st_mtime - 10_000
    os.utime(jsonl, (old, old))  # of another machine, and long silent: nobody will write the closing line
    done = compact_ended(store)
    assert (done.traces, done.kept, jsonl.exists()) == (1, (), False)
    assert compact_ended(store).traces == 0


def test_ranks_of_a_host_share_a_trace_that_becomes_parquet_when_the_last_has_ended(tmp_path):
    paths = RunPaths(tmp_path)
    config = EnergyConfig(gpus="none", estimate_cpu=True, sample_interval_s=0.1)
    first, second = (Meter(paths.trace("node", 1), paths.events("node", rank, 1), config) for rank in (0, 1))
    first.start()
    second.start()
    first.stop()  # its recorder wrote a closing line; the other one takes over
    assert "another process" in compact_run(paths).kept[0]
    time.sleep(2 * STANDBY_S)
    assert "still running" in compact_run(paths, dead_before=2).kept[0]
    second.stop()
    assert compact_run(paths).traces == 1
    ((_, _, path),) = paths.traces()
    assert [line["kind"] for line in read_lines(path)].count("end") == 2


def test_a_recorder_that_starts_after_the_copy_continues_the_whole_trace(folder):
    paths = RunPaths(folder)
    ((host, attempt, parquet),) = paths.traces()
    before = list(read_lines(parquet))
    late = Meter(paths.trace(host, attempt), paths.events(host, 1, attempt), EnergyConfig(gpus="none"))
    late.start()
    late.stop()
    ((_, _, path),) = paths.traces()
    assert path.suffix == ".jsonl"
    after = list(read_lines(path))
    assert after[: len(before)] == before
    assert [line["kind"] for line in after[len(before) :]][:1] == ["header"]
    assert compact_run(paths).traces == 1


def test_every_host_of_a_run_is_looked_at_by_itself(tmp_path):
    paths = RunPaths(tmp_path)
    for host in ("node1", "node2.rack"):
        write(paths.trace(host, 1), LINES)
        write(paths.events(host, 0, 1), [])
    ring = paths.events("node2.rack", 0, 1).with_suffix(".ring")
    ring.touch()
    assert "node2.rack.1.jsonl: another process" in compact_run(paths).kept[0]
    assert [path.name for _, _, path in paths.traces()] == ["node1.1.parquet", "node2.rack.1.jsonl"]
    ring.unlink()
    assert compact_run(paths).traces == 1


def test_a_killed_attempts_trace_is_copied_when_the_next_one_ends(folder):
    paths, jsonl = closed(folder, LINES[:-1])
    paths.events("node", 0, 1).with_suffix(".ring").touch()
    assert "another process" in compact_run(paths).kept[0]
    assert compact_run(paths, dead_before=2).traces == 1
    assert not jsonl.exists()


def test_after_a_crash_between_copy_and_removal_the_next_look_finishes_it(folder):
    paths, jsonl = closed(folder)
    copy_to_parquet(jsonl, read_lines)
    assert [path for _, _, path in paths.traces()] == [jsonl]
    before = load_trace(jsonl)
    assert compact_run(paths).traces == 1
    same_trace(before, load_trace(jsonl))  # whoever still has the old name is led to the copy
    assert read_header(jsonl) == HEADER
    assert [path.suffix for _, _, path in paths.traces()] == [".parquet"]


@pytest.mark.parametrize("content", [b"", b"PAR1 no", b"{}"])
def test_a_damaged_parquet_trace_is_named(tmp_path, content):
    path = tmp_path / "h.1.parquet"
    path.write_bytes(content)
    with pytest.raises(JoulelabError, match=r"h\.1\.parquet cannot be read"):
        load_trace(path)
