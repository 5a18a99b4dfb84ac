"""Windows inside a measured block: right under nesting, recursion, threads, coroutines and forks, and cheap."""

import os
import statistics
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from nvml_sim.driver import SimGpu, square

import joulelab
from joulelab.runs.measure.api import union


@pytest.fixture
def measure(tmp_path):
    def start(**energy):
        settings = {"sample_interval_s": 0.05, "gpus": "none", "estimate_cpu": True, **energy}
        return joulelab.measure("block", runs_dir=tmp_path / "runs", energy=settings)

    return start


def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(500))


def test_windows_have_joules_of_their_own_and_very_short_ones_a_labeled_share(measure):
    with measure() as m:
        for _ in range(2):
            with m.window("epoch"):
                for _ in range(6):
                    with m.window("step"):
                        busy(0.1)
                for _ in range(20):
                    with m.window("tick"):
                        busy(0.001)
        time.sleep(0.5)
    epoch, step, tick = (m.windows[name] for name in ("epoch", "step", "tick"))
    assert (epoch.way, step.way, step.count, tick.way) == ("direct", "direct", 12, "time-share")
    assert step.total_energy_j == pytest.approx(epoch.total_energy_j, rel=0.15)
    assert epoch.total_energy.half_width_j > 0
    assert (tick.share_of, tick.total_energy.method) == ("epoch", "estimated")
    assert "a share of epoch by time" in tick.total_energy.reason
    assert tick.total_energy.half_width_j > 0.9 * epoch.total_energy_j  # it could have been all of it


def test_windows_have_the_energy_that_the_whole_block_has_also_of_the_machine(measure):
    with measure(total_energy_policy="machine") as m, m.window("all"):
        time.sleep(0.5)
    window = m.windows["all"]
    assert window.way == "direct"
    assert window.total_energy_j == pytest.approx(m.energy_j, rel=0.2)
    assert window.total_energy.sources == m.figure.sources


def test_quantiles_of_windows_are_those_of_their_durations(measure):
    """Bins of 12 % gave 0.596 s as p50 and as p95 of three epochs of 0.61 s."""
    durations = []
    with measure() as m:
        for seconds in (0.105, 0.135, 0.105):
            with m.window("epoch"):
                started = time.monotonic()
                time.sleep(seconds)
                durations.append(time.monotonic() - started)
        for _ in range(3):
            with m.window("tick"):
                pass
    epoch, tick = m.windows["epoch"], m.windows["tick"]
    assert epoch.p50_s < epoch.p95_s < epoch.max_s
    # Compared with this test's own clock: on a busy machine a sleep of 0.105 s takes longer.
    assert epoch.p50_s == pytest.approx(np.quantile(durations, 0.5), abs=0.006)
    assert epoch.p95_s == pytest.approx(np.quantile(durations, 0.95), abs=0.006)
    assert tick.total_energy.errors[0].name == "time share", "a component that docs/measuring.md lists"


def test_windows_below_half_a_second_are_read_off_the_curve(nvml_sim, measure):
    """An even share of time gave 374.9 ± 1.1 J for bursts that took 959.9 J."""
    nvml_sim.gpus = [SimGpu(wave=square(0.6, 0.5, 90, 690))]
    nvml_sim.write()
    spans = []

    def power_w():
        now_ns = time.monotonic_ns()
        return nvml_sim.true_energy_j(now_ns, now_ns + 1_000_000) / 0.001

    with measure(gpus="auto", estimate_cpu=False, sample_interval_s=0.5) as m:
        time.sleep(1.0)
        for _ in range(6):
            # whenever power rises
            while power_w() > 400:
                time.sleep(0.001)
            while power_w() < 400:
                time.sleep(0.001)
            begin = time.monotonic_ns()
            with m.window("burst"):
                time.sleep(0.25)
            spans.append((begin, time.monotonic_ns()))
        time.sleep(0.5)
    burst = m.windows["burst"]
    true_j = sum(nvml_sim.true_energy_j(*span) for span in spans)
    assert burst.way == "direct"
    assert burst.total_energy_j == pytest.approx(true_j, rel=0.1)
    # On a busy machine time passes between this test's clock and the window's.
    between_s = sum(end - begin for begin, end in spans) / 1e9 - burst.total_s
    assert abs(burst.total_energy_j - true_j) <= burst.total_energy.half_width_j + 690 * between_s


def test_a_window_inside_itself_counts_once_as_the_outermost(measure):
    def recurse(m, depth):
        with m.window("recursion"):
            time.sleep(0.02)
            if depth:
                recurse(m, depth - 1)

    with measure() as m:
        begin_s = time.monotonic()
        recurse(m, 4)
        took_s = time.monotonic() - begin_s
    assert m.windows["recursion"].count == 1
    assert 0.1 <= m.windows["recursion"].total_s <= took_s + 0.001  # the sum of all five would be three times as long


def test_no_mark_is_lost_when_many_threads_write_at_once(measure):
    def work():
        for _ in range(2000):
            with window, m.window("inner"):
                pass

    with measure() as m:
        window = m.window("outer")
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert m.windows["outer"].count == m.windows["inner"].count == 12_000
    assert m.windows["outer"].way == "none"
    assert "overlapping" in m.windows["outer"].total_energy.reason
    assert not any("lost" in note.text for note in m.record.validity.notes)


def test_joules_of_overlapping_threads_count_once(measure):
    def work():
        with m.window("part"):
            time.sleep(0.7)

    with measure() as m:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        busy(0.3)
        for thread in threads:
            thread.join()
    part = m.windows["part"]
    assert (part.count, part.way) == (3, "direct")
    assert part.total_s == pytest.approx(2.1, abs=0.3)
    assert part.total_energy_j <= m.energy_j * 1.001
    assert "overlapped" in part.total_energy.reason


def test_overlaps_are_joined():
    assert union([(0, 10), (5, 20), (30, 40), (32, 35)]) == [(0, 20), (30, 40)]


def test_an_exception_closes_its_windows_and_later_ones_nest_right(measure):
    with measure() as m:
        with pytest.raises(ValueError), m.window("outer"), m.window("broken"):
            raise ValueError
        with m.window("after"):
            pass
    assert {name: window.count for name, window in m.windows.items()} == {"outer": 1, "broken": 1, "after": 1}


def test_windows_after_the_end_and_in_forked_children_do_nothing(measure):
    with measure() as m:
        with m.window("step"):
            pass
        child = os.fork()
        if child == 0:
            with m.window("step"), m.window("new in the child"):
                pass
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    with m.window("step"), m.window("late"):
        pass
    assert {name: window.count for name, window in m.windows.items()} == {"step": 1}


def test_times_of_windows_survive_a_kill(tmp_path):
    code = textwrap.dedent(
        """
        import os, signal, sys, joulelab
        with joulelab.measure("killed", runs_dir=sys.argv[1], energy={"gpus": "none"}) as m:
            for _ in range(500):
                with m.window("step"):
                    pass
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    from joulelab.runs.store import load_record

    (folder,) = tmp_path.glob("killed-*")
    time.sleep(0.3)
    record = load_record(folder)
    assert record.status == "truncated"
    assert record.stage("program.run").phases["step"].count == 500


def test_begin_and_end_take_a_few_microseconds(measure):
    with measure() as m:
        took = []
        for _ in range(20_000):
            begin = time.perf_counter_ns()
            with m.window("step"):
                pass
            took.append(time.perf_counter_ns() - begin)
    # 1.7 us on the machine this was written on; the goal is 5, and a shared CI machine gets some room
    assert statistics.median(took) < 10_000


def test_a_windows_figures_are_labeled_as_sums_or_as_means(measure):
    with measure() as m:
        for _ in range(4):
            with m.window("step"):
                busy(0.05)
    step = m.windows["step"]
    assert step.mean_s == pytest.approx(step.total_s / 4)
    assert step.mean_energy_j == pytest.approx(step.total_energy_j / 4)
    assert step.mean_energy.half_width_j == pytest.approx(step.total_energy.half_width_j / 4)
    assert str(step).startswith("step: 4 windows; each (mean) ") and "; together " in str(step)
    with pytest.warns(DeprecationWarning, match="window.energy_j is now window.total_energy_j"):
        assert step.energy_j == step.total_energy_j
