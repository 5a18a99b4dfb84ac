"""Two processes never work on one run: kernel lock, lease, takeover by another node, readers with another clock."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from joulelab.runs import lock
from joulelab.runs.attempt import create_run, mark_running
from joulelab.runs.attempt_data import drain_ring, read_events
from joulelab.runs.lock import FolderLocked, hold, holding, is_held, newest_lease
from joulelab.runs.record import RunRecord
from joulelab.runs.spec import load_spec
from joulelab.runs.store import load_record

# A process on another node: its own host name and boot id, kernel locks that this node does not see, a shared disk.
OTHER_NODE = """
import sys, time
from pathlib import Path
from joulelab.runs import lock
lock.this_node = lambda: ({host!r}, "boot of " + {host!r})
lock.LOCK, lock._is_local = ".lock-" + {host!r}, lambda folder: False
lock.BEAT_S, lock.STALE_S, lock._POLL_S = 0.1, 1.5, 0.05
folder = Path(sys.argv[1])
try:
    with lock.holding(folder) as held:
        print("held", flush=True)
        time.sleep({seconds})
        print("lost" if held.taken_over else "kept", flush=True)
except lock.FolderLocked as refused:
    print("refused", refused.message, flush=True)
    sys.exit(2)
"""


@pytest.fixture(autouse=True)
def short_times(monkeypatch, tmp_path):
    monkeypatch.setattr(lock, "BEAT_S", 0.1)
    monkeypatch.setattr(lock, "STALE_S", 1.5)
    monkeypatch.setattr(lock, "_POLL_S", 0.05)
    monkeypatch.setenv("JOULELAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def paths(tmp_path):
    return create_run(tmp_path / "runs", load_spec("demo-kd"))


@pytest.fixture
def shared_disk(monkeypatch):
    monkeypatch.setattr(lock, "_is_local", lambda folder: False)


def node(host, folder, seconds=30.0):
    command = [sys.executable, "-c", OTHER_NODE.format(host=host, seconds=seconds), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def holder(folder):
    """A process of this machine that holds the folder until it is killed."""
    code = "import sys, time; from pathlib import Path; from joulelab.runs import lock\n"
    code += "lock.BEAT_S = 0.1; lock.hold(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith((lock.LOCK, lock.LEASE))]


def test_the_second_process_is_refused_with_who_holds_it(paths):
    first = holder(paths.folder)
    try:
        with pytest.raises(FolderLocked) as refused:
            hold(paths.folder)
        assert refused.value.exit_code == 2
        assert f"process {first.pid} on {os.uname().nodename} since 20" in refused.value.message
        assert is_held(paths.folder)
    finally:
        first.kill()
        first.wait()
    assert not is_held(paths.folder), "kill -9 frees it at once"
    with holding(paths.folder):
        assert newest_lease(paths.folder)[1].pid == os.getpid()
    assert leftovers(paths.folder) == []


@pytest.mark.slow
def test_pairs_at_random_offsets_exactly_one_holds(tmp_path):
    """Twenty pairs, each started within the time that a process needs to begin."""
    code = "import sys, time; from pathlib import Path; from joulelab.runs.lock import FolderLocked, hold\n"
    code += "time.sleep(max(0.0, float(sys.argv[2]) - time.monotonic()))\n"
    code += "try:\n    hold(Path(sys.argv[1]))\nexcept FolderLocked as e:\n    sys.exit(e.exit_code)\ntime.sleep(1.0)"
    chosen = random.Random(9)
    for number in range(20):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        begin_s = time.monotonic() + 1.5
        starts = [begin_s, begin_s + chosen.choice([0.0, 0.0, chosen.uniform(0.0, 0.5)])]
        pair = [subprocess.Popen([sys.executable, "-c", code, str(folder), str(at_s)]) for at_s in starts]
        assert sorted(process.wait(30) for process in pair) == [0, 2], f"pair {number}"


def test_a_forked_child_does_not_keep_the_lock_alive(paths):
    code = "import os, sys, time; from pathlib import Path; from joulelab.runs.lock import hold\n"
    # The child prints: only when it runs has it closed its copy of the lock.
    code += "hold(Path(sys.argv[1]))\nif os.fork() == 0:\n    print('held', flush=True); time.sleep(20); os._exit(0)\n"
    code += "time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(paths.folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not is_held(paths.folder)
        hold(paths.folder).release()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def _end_in_child(held):
    held.release()
    held.release()


def test_what_a_fork_releases_stays_held(paths):
    with holding(paths.folder) as held:
        child = multiprocessing.get_context("fork").Process(target=_end_in_child, args=(held,))
        child.start()
        child.join()
        assert is_held(paths.folder)
        assert leftovers(paths.folder)


def test_the_holder_may_take_it_again_and_other_threads_may_not(paths):
    import threading

    refused = []

    def other():
        try:
            hold(paths.folder)
        except FolderLocked as error:
            refused.append(error)

    with holding(paths.folder):
        with holding(paths.folder):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert is_held(paths.folder), "the outer one still holds it"
    assert len(refused) == 1
    assert not is_held(paths.folder)


@pytest.mark.parametrize("hours", [-24, -1, 1, 24])
def test_a_reader_with_another_wall_clock_sees_a_living_run(paths, monkeypatch, hours):
    first = holder(paths.folder)
    mark_running(paths)
    skewed = time.time
    monkeypatch.setattr(time, "time", lambda: skewed() + 3600 * hours)
    assert load_record(paths.folder).status == "running"
    first.kill()
    first.wait()
    assert load_record(paths.folder).status == "truncated"


def test_a_reader_on_another_node_follows_the_heartbeat_and_not_the_clock(paths, monkeypatch, shared_disk):
    """Neither mtime nor wall clock counts: both are a day off here, once forward and once back."""
    mark_running(paths)
    other = node("node-b", paths.folder)
    assert other.stdout.readline() == "held\n"
    skewed = time.time
    monkeypatch.setattr(time, "time", lambda: skewed() + 86_400)
    end_s = time.monotonic() + 2 * lock.STALE_S
    while time.monotonic() < end_s:
        assert load_record(paths.folder).status == "running"
        time.sleep(0.2)
    other.kill()
    other.wait()
    monkeypatch.setattr(time, "time", lambda: skewed() - 86_400)
    assert load_record(paths.folder).status == "running", "it cannot be known yet"
    time.sleep(lock.STALE_S + 0.2)
    assert load_record(paths.folder).status == "truncated"


def test_a_living_holder_on_another_node_is_not_taken_over(paths, shared_disk):
    other = node("node-b", paths.folder)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(FolderLocked, match=r"process \d+ on node-b since"):
            hold(paths.folder)
    finally:
        other.kill()
        other.wait()


def test_a_dead_node_is_taken_over_after_its_heartbeat_stood_still(paths, shared_disk):
    other = node("node-b", paths.folder)
    assert other.stdout.readline() == "held\n"
    other.kill()
    other.wait()
    began_s = time.monotonic()
    with holding(paths.folder):
        assert time.monotonic() - began_s > lock.STALE_S - 0.2
        assert newest_lease(paths.folder)[0] == 2
    assert [name for name in leftovers(paths.folder) if name.startswith(lock.LEASE)] == []


def test_of_nodes_that_wait_for_a_dead_one_exactly_one_takes_over(paths):
    dead = node("node-a", paths.folder)
    assert dead.stdout.readline() == "held\n"
    dead.kill()
    dead.wait()
    waiting = [node(name, paths.folder, seconds=3.0) for name in ("node-b", "node-c", "node-d")]
    reported = [process.communicate(timeout=60)[0].splitlines() for process in waiting]
    assert sorted(lines[0].split()[0] for lines in reported) == ["held", "refused", "refused"], reported


def test_a_holder_that_slept_and_was_taken_over_finds_out_and_stops(paths, shared_disk):
    other = node("node-b", paths.folder, seconds=4.0)
    assert other.stdout.readline() == "held\n"
    other.send_signal(signal.SIGSTOP)
    with holding(paths.folder):
        other.send_signal(signal.SIGCONT)
        assert other.communicate(timeout=30)[0] == "lost\n"
        assert is_held(paths.folder), "what it no longer owns it does not remove"
        assert newest_lease(paths.folder)[1].pid == os.getpid()


def test_a_run_that_another_node_took_over_is_not_written_by_the_old_one(play, monkeypatch):
    """The pipeline is stopped at its next stage, and the record is the new node's."""

    def story(run):
        lock._lease_path(run.paths.folder, 2).write_text("{}")  # the other node's
        time.sleep(0.5)
        with run.stage("model.train"):
            raise AssertionError("it worked on")

    with pytest.raises(FolderLocked):
        play(story)
    record = RunRecord.model_validate_json(play.paths.record.read_text())
    assert record.status == "running"
    assert not play.paths.summary.exists()


def test_an_earlier_boot_of_this_machine_is_dead_at_once(paths, monkeypatch):
    first = holder(paths.folder)
    first.kill()
    first.wait()
    monkeypatch.setattr(lock, "this_node", lambda: (os.uname().nodename, "a later boot"))
    began_s = time.monotonic()
    assert not is_held(paths.folder)
    with holding(paths.folder):
        assert time.monotonic() - began_s < 1.0


def test_without_kernel_locks_the_lease_decides(paths, monkeypatch):
    """As on Lustre without the option flock."""
    monkeypatch.setattr(lock, "_try_lock", lambda descriptor: None)
    monkeypatch.setattr(lock, "_is_locked", lambda path: None)
    first = holder(paths.folder)
    with pytest.raises(FolderLocked):
        hold(paths.folder)
    first.kill()
    first.wait()
    assert not is_held(paths.folder), "its process is gone from this node"
    hold(paths.folder).release()


def test_the_next_process_removes_what_a_crash_left(paths):
    first = holder(paths.folder)
    first.kill()
    first.wait()
    unfinished = [paths.folder / name for name in (".run.json.123.tmp", "checkpoints/model.train/step-000000004.tmp")]
    for path in unfinished:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    (paths.folder / "mine.tmp").write_text("the user's")
    hold(paths.folder).release()
    assert not any(path.exists() for path in unfinished)
    assert (paths.folder / "mine.tmp").exists()
    assert leftovers(paths.folder) == []


def test_marks_left_in_a_ring_move_into_the_events(tmp_path):
    from joulelab.meter.marks import RingWriter
    from joulelab.meter.trace import LineFile, header

    events = tmp_path / "node.0.1.jsonl"
    LineFile(events).append(header(), {"kind": "name", "of": "phase", "number": 1, "name": "step"})
    ring = RingWriter(events.with_suffix(".ring"))
    for number in range(5):
        ring.write(1, number * 1000, number * 1000 + 500)
    ring.close()
    before = read_events(events).phases["", "step"].count
    drain_ring(events)
    assert not events.with_suffix(".ring").exists()
    assert read_events(events).phases["", "step"].count == before == 5


def test_readers_of_a_running_run_never_make_a_start_fail(tmp_path):
    """They ask for the lock and take none."""
    folder = tmp_path / "run"
    folder.mkdir()
    code = "import sys; from pathlib import Path; from joulelab.runs.lock import is_held\n"
    code += "print('reading', flush=True)\nwhile True: is_held(Path(sys.argv[1]))"
    reader = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout.readline() == "reading\n"
        for _ in range(200):
            hold(folder).release()
    finally:
        reader.kill()
        reader.wait()
