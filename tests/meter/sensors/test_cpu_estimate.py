"""The CPU estimate: whose time it counts, by which watts, and what asking costs."""

import os
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import cpu, processes
from joulelab.meter.sensors.cpu import TABLE, CpuEstimateSensor, machine_busy_s, row_for
from joulelab.meter.sensors.processes import BusyTime, ProcessTree, children_of

PARENT = textwrap.dedent(
    """
    import subprocess, sys, threading, time
    burn = '''import time
    end = time.process_time() + 0.3
    while time.process_time() < end: pass
    print(flush=True); input()'''
    children = []
    def start():
        for _ in range(2):
            child = [sys.executable, "-c", burn]
            children.append(subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        time.sleep(60)
    threading.Thread(target=start, daemon=True).start()
    while len(children) < 2: time.sleep(0.01)
    for child in children: child.stdout.readline()
    print("burned", flush=True); input()
    for child in children: child.communicate(b"\\n")
    print("waited", flush=True); input()
    """
)


@pytest.fixture
def family(monkeypatch):
    """A program whose two children, started by another thread than its first, have burned 0.3 s each."""
    monkeypatch.setattr(processes, "RESCAN_SHARE", 1e9)
    program = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # its children end with their input
        start_new_session=True,
    )
    assert program.stdout.readline() == b"burned\n"
    yield program
    program.kill()
    program.wait()


def tell(program):
    program.stdin.write(b"\n")
    program.stdin.flush()
    return program.stdout.readline()


def test_children_of_every_thread_are_found_without_scanning_the_machine(family, monkeypatch):
    monkeypatch.setattr(psutil, "process_iter", lambda *_: pytest.fail("all processes were scanned"))
    assert sorted(children_of(family.pid)) == sorted(child.pid for child in psutil.Process(family.pid).children())
    assert len(ProcessTree(family.pid).members()) == 3


def test_a_kernel_without_the_list_of_children_is_served_the_slow_way(family, monkeypatch):
    monkeypatch.setattr(processes, "children_of", lambda pid: None)
    assert len(ProcessTree(family.pid).members()) == 3


def test_a_program_that_ended_has_a_tree_still(family):
    """A measured server that ends must not end the readings of the other processes."""
    tree = ProcessTree(family.pid)
    before = {process.pid for process in tree.members()}
    family.kill()
    family.wait()
    assert {process.pid for process in tree.members()} == before


def test_a_large_tree_is_walked_more_rarely(monkeypatch):
    tree = ProcessTree(os.getpid())
    clock = iter([100.0, 100.05, 140.0, 151.0, 151.0])
    cpu_clock = iter([1.0, 1.05, 2.0, 2.0])
    monkeypatch.setattr(processes.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(processes.time, "thread_time", lambda: next(cpu_clock))
    monkeypatch.setattr(processes, "children_of", lambda pid: [])
    walks = []
    monkeypatch.setattr(tree, "_found", lambda children: walks.append(1) or [])
    for _ in range(3):  # a walk of 50 ms, at a thousandth of a core, is good for 50 s
        tree.members()
    assert len(walks) == 2


def test_a_child_that_starts_after_a_slow_walk_is_seen_at_the_next_reading(monkeypatch):
    """A first walk of 4 ms delayed the next one by 4 s: the program showed 0 W, then all of its energy at once."""
    monkeypatch.setattr(processes, "RESCAN_SHARE", 1e-12)
    tree = ProcessTree(os.getpid())
    before = tree.members()
    child = subprocess.Popen(["sleep", "30"])
    try:
        assert child.pid in [process.pid for process in tree.members()]
        assert child.pid not in [process.pid for process in before]
    finally:
        child.kill()
        child.wait()


def test_time_of_children_counts_while_they_live_and_after_they_were_waited_for(family):
    busy = BusyTime(family.pid)
    living_s = busy.seconds()
    # Two children burn 0.3 s each; the kernel rounds user and system time of each process down to 10 ms.
    assert living_s >= 0.6 - 6 * 0.01
    assert tell(family) == b"waited\n"
    assert living_s <= busy.seconds() < living_s + 0.3


def test_a_child_no_one_waits_for_leaves_its_time_behind(monkeypatch):
    busy = BusyTime(os.getpid())
    sums = iter([10.0, 110.0, 12.0, 13.0, 15.0])
    monkeypatch.setattr(busy, "_sum", lambda: next(sums))
    # 100 s vanish with a daemon: held once in case it was only being waited for, then kept for good
    assert [busy.seconds() for _ in range(5)] == [10.0, 110.0, 110.0, 110.0, 112.0]


def test_a_child_caught_between_two_readings_is_not_counted_twice(monkeypatch):
    busy = BusyTime(os.getpid())
    sums = iter([10.0, 8.0, 10.5, 11.0])
    monkeypatch.setattr(busy, "_sum", lambda: next(sums))
    assert [busy.seconds() for _ in range(4)] == [10.0, 10.0, 10.5, 11.0]


def test_ranks_of_one_launch_count_together_and_a_stranger_does_not():
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    launch = {**os.environ, "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", burn], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for env in ({**launch, "RANK": "0"}, {**launch, "RANK": "1"}, {**launch, "MASTER_PORT": "2", "RANK": "1"})
    ]
    for rank in ranks:
        rank.stdout.readline()
    sensor = CpuEstimateSensor(EnergyConfig(), ranks[0].pid)
    sensor.open()
    (line,) = sensor.read()
    for rank in ranks:
        rank.communicate("\n")
    assert 0.55 <= line["busy_thread_s"] < 0.85  # CPU time is counted in ticks of 10 ms


def test_the_machine_s_busy_time_is_listed_separately_on_request():
    before = machine_busy_s()
    sensor = CpuEstimateSensor(EnergyConfig(estimate_machine=True), os.getpid())
    program, machine = sensor.open()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    lines = sensor.read()
    assert (program.counted, machine.counted, machine.facts["node_wide"]) == (True, False, True)
    assert [line["device"] for line in lines] == [program.device, machine.device]
    assert lines[1]["busy_thread_s"] - before > 0.15


def test_the_model_is_cited_wide_and_has_no_constant_in_it():
    (device,) = CpuEstimateSensor(EnergyConfig(), os.getpid()).open()
    assert device.gain_error_rel >= 0.5
    assert device.facts["source"]
    assert row_for("AMD EPYC 9654 96-Core Processor").source == "AMD product page EPYC 9654"
    assert row_for("Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz").rated_w == 150


@pytest.mark.parametrize("family_name", ["EPYC", "Xeon"])
def test_a_hidden_model_gets_the_middle_of_its_family(family_name):
    made = [row for row in TABLE if row.threads > 1 and family_name in row.source]
    watts = [row.rated_w / row.threads for row in made]
    assert min(watts) < row_for(family_name).rated_w < max(watts)
    assert f"({min(watts):.1f} to {max(watts):.1f} W per thread)" in row_for(family_name).source


def test_the_whole_table_s_range_is_stated_right():
    watts = [row.rated_w / row.threads for row in TABLE if row.threads > 1]
    assert f"({min(watts):.1f} to {max(watts):.1f} W per thread)" in cpu.UNKNOWN.source


BURN = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass\n"


def test_every_recorder_is_left_out_also_after_it_was_waited_for(tmp_path):
    """Of a program that measures with joulelab itself: its recorder is neither work while it lives nor afterwards."""
    (tmp_path / "recorder.py").write_text(BURN.format(seconds=0.5) + "print(flush=True)\ninput()\n")
    recorder = f"import sys, runpy; runpy.run_path({str(tmp_path / 'recorder.py')!r})"
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {recorder!r}, 'joulelab.meter.recorder'],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(flush=True); input(); child.communicate(b'x\\n'); print(flush=True); input()"
    )
    program = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    program.stdout.readline()
    busy = BusyTime(program.pid)
    alive_s = busy.seconds()
    assert alive_s < 0.3, "the recorder's half second is not the program's"
    assert tell(program) == b"\n"
    times = psutil.Process(program.pid).cpu_times()
    assert times.children_user + times.children_system > 0.4, "the kernel counts it as the program's now"
    assert [busy.seconds() for _ in range(3)][-1] < alive_s + 0.2
    program.communicate(b"\n")


def test_a_pid_that_was_named_and_does_not_exist_is_reported_once():
    ended = subprocess.Popen(["true"])
    ended.wait()
    sensor = CpuEstimateSensor(EnergyConfig(processes=f"{os.getpid()},{ended.pid}"), os.getpid())
    sensor.open()
    warned = [line["text"] for _ in range(2) for line in sensor.read() if line["kind"] == "warning"]
    assert warned == [f"there is no pid {ended.pid}, so its CPU time, which was requested, is not in the estimate"]
