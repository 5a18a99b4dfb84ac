"""Marks survive what kills the program that left them."""

import errno
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulelab.meter.marks import Phase, PhaseBook, RingReader, RingWriter, create_ring, remove_ring


def test_marks_come_back_in_order_with_phase_and_stage(tmp_path):
    ring = RingWriter(tmp_path / "a.ring", capacity=8)
    ring.stage = 3
    ring.write(1, 10, 20)
    ring.write(2, 30, 50)
    marks = list(RingReader(tmp_path / "a.ring").drain())
    assert [(m.phase, m.stage, m.end_ns - m.begin_ns) for m in marks] == [(1, 3, 10), (2, 3, 20)]


def test_a_reader_that_falls_behind_states_how_many_it_lost(tmp_path):
    ring = RingWriter(tmp_path / "a.ring", capacity=8)
    reader = RingReader(tmp_path / "a.ring")
    for k in range(20):
        ring.write(1, k, k + 1)
    assert len(list(reader.drain())) == 8
    assert reader.lost == 12


@settings(max_examples=60, deadline=None)
@given(bursts=st.lists(st.integers(0, 25), max_size=12))
def test_every_mark_is_read_once_and_in_order_or_counted_as_lost(tmp_path_factory, bursts):
    path = tmp_path_factory.mktemp("ring") / "a.ring"
    ring, reader = RingWriter(path, capacity=8), RingReader(path)
    written = 0
    for burst in bursts:
        lost_before = reader.lost
        for _ in range(burst):
            ring.write(1, written, written + 1)
            written += 1
        read = [mark.begin_ns for mark in reader.drain()]
        assert read == list(range(written - min(burst, 8), written))
        assert reader.lost - lost_before == max(0, burst - 8)


def test_a_recorder_that_takes_over_continues_where_the_last_one_stopped(tmp_path):
    ring = RingWriter(tmp_path / "a.ring", capacity=8)
    for k in range(21):
        ring.write(1, k, k + 1)
    later = RingReader(tmp_path / "a.ring", already_read=16)
    assert [mark.begin_ns for mark in later.drain()] == [16, 17, 18, 19, 20]
    assert later.lost == 0


def test_the_ring_has_its_room_on_the_disk_before_the_first_mark(tmp_path):
    """A mapped page that finds the disk full would end the program with SIGBUS."""
    RingWriter(tmp_path / "a.ring")
    with (tmp_path / "a.ring").open("rb") as file:
        os.fsync(file.fileno())
        found = os.fstat(file.fileno())
    assert found.st_blocks * 512 >= found.st_size


def test_marks_survive_sigkill_of_the_program(tmp_path):
    program = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from joulelab.meter.marks import Phase, RingWriter
        ring = RingWriter(Path(sys.argv[1]))
        phase = Phase(ring, 1)
        for _ in range(500):
            with phase:
                pass
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.ring")], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(RingReader(tmp_path / "a.ring").drain())) == 500


def test_phases_nest(tmp_path):
    ring = RingWriter(tmp_path / "a.ring")
    with Phase(ring, 1), Phase(ring, 2):
        pass
    inner, outer = RingReader(tmp_path / "a.ring").drain()
    assert (inner.phase, outer.phase) == (2, 1)
    assert outer.begin_ns <= inner.begin_ns <= inner.end_ns <= outer.end_ns


def test_aggregates_written_in_two_lines_add_up(tmp_path):
    ring = RingWriter(tmp_path / "a.ring")
    reader = RingReader(tmp_path / "a.ring")
    merged = PhaseBook()
    for durations in ([1_000_000, 2_000_000], [4_000_000]):
        for duration in durations:
            ring.write(1, 0, duration)
        part = PhaseBook()
        part.add_marks(reader.drain())
        merged.add_line(part.to_line(reader.read, reader.lost))
    (row,) = merged.rows.values()
    assert (row.count, round(row.sum_s, 6), row.max_s) == (3, 0.007, 0.004)
    assert abs(row.quantile_s(0.5) / 0.002 - 1) < 0.12


def test_the_quantiles_of_equal_durations_are_that_duration_also_after_a_round_trip_through_the_file():
    """The middle of its bin, 0.596 s, was below the mean."""
    book, read = PhaseBook(), PhaseBook()
    book.add_marks([(0, 610_000_000, 1, 1, 0)] * 3)
    read.add_line(book.to_line(3, 0))
    row = read.rows[1, 1]
    assert row.quantile_s(0.5) == row.quantile_s(0.95) == pytest.approx(0.61) == row.sum_s / row.count


def test_lines_without_sums_have_quantiles_in_the_middle_of_a_bin():
    book = PhaseBook()
    rows = [{"stage": 1, "phase": 1, "count": 3, "sum_s": 1.83, "max_s": 0.61, "bins": {"-5": 3}}]
    book.add_line({"kind": "phases", "marks_read": 3, "marks_lost": 0, "rows": rows})
    assert book.rows[1, 1].quantile_s(0.5) == pytest.approx(10 ** (-4.5 / 20))


def test_where_files_cannot_be_shared_by_mapping_the_ring_is_local_and_leaves_nothing(tmp_path, monkeypatch):
    """As on FUSE with direct_io; tests/attack/environments.py uses a real one."""
    real, local = mmap.mmap, tmp_path / "local"
    local.mkdir()

    def refusing(descriptor, *words, **options):
        if descriptor >= 0 and Path(f"/proc/self/fd/{descriptor}").readlink().parent == tmp_path / "store":
            raise OSError(errno.ENODEV, "No such device")
        return real(descriptor, *words, **options)

    monkeypatch.setattr("joulelab.meter.marks.mmap.mmap", refusing)
    monkeypatch.setattr(tempfile, "tempdir", str(local))
    path = tmp_path / "store" / "a.ring"
    ring = create_ring(path)
    ring.write(1, 10, 20)
    assert [mark.begin_ns for mark in RingReader(path).drain()] == [10]
    copied = tmp_path / "store" / "copied.ring"
    copied.write_bytes(path.read_bytes())
    assert [mark.end_ns for mark in RingReader(copied).drain()] == [20]
    remove_ring(path)
    assert not list(local.iterdir()) and not path.is_symlink()
