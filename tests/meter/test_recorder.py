"""The recorder as a real child process: what it writes, and what it survives."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from joulelab.meter.calibrate import burning
from joulelab.meter.config import EnergyConfig
from joulelab.meter.integrate import component_energy
from joulelab.meter.recorder import Recorder, ended_recorders_s, local_lock, trace_lines
from joulelab.meter.sampling import SensorReader
from joulelab.meter.sensors.processes import is_recorder
from joulelab.meter.series import load_trace
from joulelab.meter.session import Meter
from joulelab.meter.trace import read_lines


def meter_in(folder, **config):
    return Meter(folder / "trace.jsonl", folder / "events.jsonl", EnergyConfig(**config))


def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(500))


def test_it_records_until_it_is_stopped_and_closes_the_trace(tmp_path, rapl_tree):
    meter = meter_in(tmp_path, rapl_root=str(rapl_tree), sample_interval_s=0.05)
    meter.start()
    begin = time.monotonic_ns()
    for joule in range(1, 21):
        (rapl_tree / "intel-rapl:0" / "energy_uj").write_text(str(joule * 1_000_000))
        time.sleep(0.05)
    end = time.monotonic_ns()
    meter.stop()
    trace = load_trace(tmp_path / "trace.jsonl")
    assert trace.ended
    figure = component_energy(trace, "cpu", [(begin, end)])
    assert figure.method == "counter"
    assert figure.energy_j == pytest.approx(20, abs=1.5)


def test_cpu_time_of_the_program_is_counted_and_the_recorder_s_own_is_not(tmp_path):
    meter = meter_in(tmp_path, estimate_cpu=True, gpus="none", sample_interval_s=0.1)
    meter.start()
    begin = time.monotonic_ns()
    busy(1.0)
    end = time.monotonic_ns()
    meter.stop()
    trace = load_trace(tmp_path / "trace.jsonl")
    (series,) = trace.devices
    figure = component_energy(trace, "cpu_estimate", [(begin, end)])
    assert figure.energy_j / series.facts["w_per_thread"] == pytest.approx(1.0, abs=0.15)


def test_a_program_that_sleeps_has_an_interval_of_a_clock_tick_and_not_of_nothing(tmp_path):
    meter = meter_in(tmp_path, estimate_cpu=True, gpus="none", sample_interval_s=0.1)
    meter.start()
    begin = time.monotonic_ns()
    time.sleep(0.5)
    end = time.monotonic_ns()
    meter.stop()
    trace = load_trace(tmp_path / "trace.jsonl")
    figure = component_energy(trace, "cpu_estimate", [(begin, end)])
    assert figure.half_width_j >= 0.01 * trace.devices[0].facts["w_per_thread"]


def test_so_far_grows_while_the_program_runs(tmp_path):
    meter = meter_in(tmp_path, estimate_cpu=True, gpus="none", sample_interval_s=0.05)
    meter.start()
    busy(0.4)
    time.sleep(0.2)
    early = meter.so_far()["cpu_estimate"].energy_j
    busy(0.4)
    time.sleep(0.2)
    late = meter.so_far()["cpu_estimate"].energy_j
    meter.stop()
    assert 0 < early < late


def test_a_library_that_prints_and_fails_at_import_does_not_stop_the_recorder(tmp_path, monkeypatch):
    """As amdsmi does where its shared object is missing."""
    (tmp_path / "amdsmi.py").write_text("print('Unable to find the library')\nraise KeyError('libamd_smi.so')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    meter = meter_in(tmp_path, sample_interval_s=0.05)
    meter.start()
    meter.stop()
    trace = load_trace(tmp_path / "trace.jsonl")
    assert trace.ended
    assert any("libamd_smi.so" in gone.reason for gone in trace.missing)


def test_the_cadence_does_not_drift(tmp_path):
    meter = meter_in(tmp_path, gpus="none", sample_interval_s=0.1)
    meter.start()
    time.sleep(2.0)
    meter.stop()
    stamps = [line["mono_ns"] for line in read_lines(tmp_path / "trace.jsonl") if line["kind"] == "host"]
    first = stamps[1]
    offsets = [((stamp - first) / 1e9 + 0.05) % 0.1 - 0.05 for stamp in stamps[1:-1]]
    assert sorted(abs(offset) for offset in offsets)[len(offsets) // 2] < 0.02


def test_a_sensor_that_fails_leaves_a_gap_and_is_read_again(tmp_path, rapl_tree):
    counter = rapl_tree / "intel-rapl:0" / "energy_uj"
    meter = meter_in(tmp_path, rapl_root=str(rapl_tree), sample_interval_s=0.05)
    meter.start()
    begin = time.monotonic_ns()
    time.sleep(0.2)
    counter.write_text("broken")
    time.sleep(0.3)
    counter.write_text("8000000")
    time.sleep(0.2)
    end = time.monotonic_ns()
    meter.stop()
    trace = load_trace(tmp_path / "trace.jsonl")
    assert {gap.device for gap in trace.gaps} == {"rapl"}
    assert component_energy(trace, "cpu", [(begin, end)]).energy_j == pytest.approx(8.0)


PROGRAM = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from joulelab.meter.config import EnergyConfig
    from joulelab.meter.session import Meter
    folder = Path(sys.argv[1])
    meter = Meter(folder / "trace.jsonl", folder / "events.jsonl", EnergyConfig(estimate_cpu=True, gpus="none"))
    meter.start()
    phase = meter.phase("work")
    print("started", flush=True)
    while True:
        with phase:
            sum(range(1000))
    """
)


def started_program(folder):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert program.stdout.readline().strip() == b"started"
    return program


def recorder_of(folder):
    return json.loads((folder / "trace.jsonl").read_text().splitlines()[0])["pid"]


def wait_gone(pid, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_killing_the_program_leaves_a_closed_trace_and_no_orphan(tmp_path):
    program = started_program(tmp_path)
    time.sleep(1.2)
    killed_ns = time.monotonic_ns()
    os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    assert wait_gone(recorder_of(tmp_path))
    trace = load_trace(tmp_path / "trace.jsonl")
    assert trace.ended
    assert abs(trace.last_ns - killed_ns) < 1e9


def test_killing_both_loses_at_most_a_second_and_keeps_the_marks(tmp_path):
    program = started_program(tmp_path)
    time.sleep(1.7)
    recorder = recorder_of(tmp_path)
    killed_ns = time.monotonic_ns()
    os.kill(recorder, signal.SIGKILL)
    os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    trace = load_trace(tmp_path / "trace.jsonl")
    assert not trace.ended
    assert 0 <= killed_ns - trace.last_ns < 1e9
    assert (tmp_path / "events.ring").exists()


def test_signals_meant_for_the_program_do_not_end_the_recorder(tmp_path):
    meter = meter_in(tmp_path, gpus="none", sample_interval_s=0.05)
    meter.start()
    recorder = recorder_of(tmp_path)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(recorder, signum)
    time.sleep(0.3)
    assert psutil.pid_exists(recorder)
    meter.stop()
    assert load_trace(tmp_path / "trace.jsonl").ended


def test_a_killed_recorder_is_replaced_and_the_loss_is_reported(tmp_path, rapl_tree):
    counter = rapl_tree / "intel-rapl:0" / "energy_uj"
    meter = meter_in(tmp_path, gpus="none", rapl_root=str(rapl_tree), sample_interval_s=0.1)
    meter.start()
    begin = time.monotonic_ns()
    with meter.phase("work"):
        time.sleep(0.3)
    os.kill(recorder_of(tmp_path), signal.SIGKILL)
    counter.write_text("30000000")  # spent while nobody was looking
    with meter.phase("work"):
        while sum(line["kind"] == "header" for line in read_lines(tmp_path / "trace.jsonl")) < 2:
            time.sleep(0.05)
        time.sleep(0.5)
    end = time.monotonic_ns()
    meter.stop()
    events = list(read_lines(tmp_path / "events.jsonl"))
    assert [line["text"] for line in events if line["kind"] == "warning"] == [
        "the recorder was killed and started again; readings paused meanwhile"
    ]
    trace = load_trace(tmp_path / "trace.jsonl")
    assert trace.ended
    assert [gap.device for gap in trace.gaps] == ["recorder"]
    assert component_energy(trace, "cpu", [(begin, end)]).energy_j == pytest.approx(30.0)
    marks = sum(row["count"] for line in events if line["kind"] == "phases" for row in line["rows"])
    assert marks == 2


def test_a_recorder_that_is_killed_just_before_the_end_is_not_replaced_by_one_that_stays(tmp_path, monkeypatch):
    meter = meter_in(tmp_path, gpus="none")
    meter.start()
    drained, replacing = meter._marks_drained, threading.Event()

    def slowly():
        replacing.set()
        time.sleep(0.5)
        return drained()

    monkeypatch.setattr(meter, "_marks_drained", slowly)
    meter._recorder.kill()
    assert replacing.wait(10)
    meter.stop()
    assert not meter.is_open
    assert not [child for child in psutil.Process().children() if is_recorder(child)]


RANK = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from joulelab.meter.config import EnergyConfig
    from joulelab.meter.session import Meter
    folder, rank, root, seconds = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    config = EnergyConfig(gpus="none", rapl_root=root, sample_interval_s=0.1)
    meter = Meter(folder / "trace.jsonl", folder / f"events.{rank}.jsonl", config)
    meter.start()
    with meter.phase("work"):
        time.sleep(seconds)
    meter.stop()
    """
)


@pytest.mark.slow
def test_eight_ranks_on_a_host_have_one_recorder_and_the_host_is_counted_once(tmp_path, rapl_tree):
    counter = rapl_tree / "intel-rapl:0" / "energy_uj"
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), str(k), str(rapl_tree), str(2 + k / 4)])
        for k in range(8)
    ]
    joules = 0
    while any(rank.poll() is None for rank in ranks):
        joules += 1
        counter.write_text(str(joules * 1_000_000))
        time.sleep(0.1)
    assert [rank.returncode for rank in ranks] == [0] * 8
    lines = list(read_lines(tmp_path / "trace.jsonl"))
    trace = load_trace(tmp_path / "trace.jsonl")
    assert trace.ended
    stamps = [line["mono_ns"] for line in lines if line["kind"] == "rapl"]
    assert len(stamps) == pytest.approx((stamps[-1] - stamps[0]) / 1e8, rel=0.35)  # one recorder's cadence, not eight
    measured = component_energy(trace, "cpu", [(stamps[0], stamps[-1])])
    written = [line["rapl"]["package-0"] for line in lines if line["kind"] == "rapl"]
    assert measured.energy_j == pytest.approx(written[-1] - written[0], rel=1e-3)
    assert all(list(read_lines(tmp_path / f"events.{k}.jsonl"))[-1]["rows"][0]["count"] == 1 for k in range(8))


def test_a_full_disk_loses_lines_and_not_the_joules(tmp_path, rapl_tree):
    """The recorder's file size limit stands in for the disk; lifting it makes room again."""
    counter = rapl_tree / "intel-rapl:0" / "energy_uj"
    meter = meter_in(tmp_path, gpus="none", rapl_root=str(rapl_tree), sample_interval_s=0.05)
    meter.start()
    begin = time.monotonic_ns()
    time.sleep(0.3)
    recorder = recorder_of(tmp_path)
    size = (tmp_path / "trace.jsonl").stat().st_size
    hard = resource.prlimit(recorder, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(recorder, resource.RLIMIT_FSIZE, (size + 40, hard))
    counter.write_text("12000000")
    time.sleep(0.5)
    resource.prlimit(recorder, resource.RLIMIT_FSIZE, (hard, hard))
    time.sleep(0.3)
    end = time.monotonic_ns()
    meter.stop()
    trace = load_trace(tmp_path / "trace.jsonl")
    assert trace.ended
    assert [gap.device for gap in trace.gaps] == ["trace"]
    assert "lines could not be written" in trace.gaps[0].reason
    assert component_energy(trace, "cpu", [(begin, end)]).energy_j == pytest.approx(12.0)


def test_a_step_of_the_wall_clock_changes_no_joule(tmp_path, rapl_tree):
    """Every line's wall time moved by an hour half-way: energy is computed on the monotonic clock alone."""
    meter = meter_in(tmp_path, gpus="none", rapl_root=str(rapl_tree), sample_interval_s=0.05)
    meter.start()
    begin = time.monotonic_ns()
    for joule in range(1, 11):
        (rapl_tree / "intel-rapl:0" / "energy_uj").write_text(str(joule * 1_000_000))
        time.sleep(0.05)
    end = time.monotonic_ns()
    meter.stop()
    path = tmp_path / "trace.jsonl"
    straight = component_energy(load_trace(path), "cpu", [(begin, end)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[len(lines) // 2 :]:
        line["timestamp"] = "2020-01-01T00:00:00+00:00"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert component_energy(load_trace(path), "cpu", [(begin, end)]) == straight


def test_a_recorder_that_was_replaced_bills_none_of_its_cpu_time_to_the_program(tmp_path):
    """The program sleeps while its recorder is killed five times; starting one takes some tenths of a CPU second."""
    meter = meter_in(tmp_path, gpus="none", estimate_cpu=True, sample_interval_s=0.05)
    meter.start()
    for number in range(2, 7):
        time.sleep(0.2)
        next(child for child in psutil.Process().children() if is_recorder(child)).kill()
        while sum(line["kind"] == "header" for line in read_lines(tmp_path / "trace.jsonl")) < number:
            time.sleep(0.05)
    meter.stop()
    busy_s = [line["busy_thread_s"] for line in read_lines(tmp_path / "trace.jsonl") if line["kind"] == "estimate"]
    recorders_s = sum(ended_recorders_s(tmp_path / "trace.jsonl").values())
    assert recorders_s > 0.5
    assert busy_s[-1] - busy_s[0] < 0.3 * recorders_s


def test_a_sensor_that_hangs_leaves_a_gap(monkeypatch):
    """A driver that hung for 4 s left no trace of it."""
    monkeypatch.setattr("joulelab.meter.recorder.HUNG_S", 0.05)

    class Slow:
        interval_s = 0.01

        def read(self):
            time.sleep(0.1)
            return [{"kind": "gpu", "device": "gpu:A"}]

    lines = trace_lines(SensorReader("nvml", Slow).read())
    assert [line["kind"] for line in lines] == ["gpu", "gap"]
    assert lines[1]["reason"].startswith("did not answer for 0.1")


def test_a_reading_that_fails_because_the_program_died_is_no_gap():
    """After `kill -9`, `show` warned: readings failed (NoSuchProcess: process PID not found)."""

    class OfProcesses:
        interval_s = 0.5

        def read(self):
            raise psutil.NoSuchProcess(1234)

    for program, kinds in ((os.getppid(), ["gap"]), (-1, [])):
        written = []
        recorder = SimpleNamespace(_job=SimpleNamespace(pid=program), _append=written.extend)
        Recorder._take(recorder, [SensorReader("cores", OfProcesses).read()])
        assert [line["kind"] for line in written] == kinds


def test_files_of_the_user_that_have_the_names_of_modules_are_not_imported(tmp_path, monkeypatch):
    for name in ("statistics", "torch"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the user')")
    monkeypatch.chdir(tmp_path)
    meter = meter_in(tmp_path, gpus="none")
    meter.start()
    meter.stop()
    assert load_trace(tmp_path / "trace.jsonl").ended
    with burning(0.1) as load:
        assert load.what


WITHOUT_LOCKS = """
import errno, fcntl, os

lock = fcntl.flock


def flock(descriptor, operation):
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith("trace.lock"):
        raise OSError(errno.ENOSYS, "Function not implemented")
    lock(descriptor, operation)


fcntl.flock = flock
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are read from /proc")
def test_on_a_file_system_without_locks_one_of_two_recorders_records(tmp_path, monkeypatch, rapl_tree):
    """Lustre mounted without `flock` answers ENOSYS."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LOCKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    trace = tmp_path / "trace.jsonl"
    meters = [
        Meter(trace, tmp_path / f"events.{rank}.jsonl", EnergyConfig(rapl_root=str(rapl_tree))) for rank in (0, 1)
    ]
    for meter in meters:
        meter.start()
    for meter in meters:
        meter.stop()
    kinds = [line["kind"] for line in read_lines(trace)]
    assert kinds.count("header") == kinds.count("end") >= 1 and kinds[:2].count("header") == 1
    local_lock(trace).unlink()
