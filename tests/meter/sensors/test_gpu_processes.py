"""Whose process is on the GPU: the program's own, another rank of its launch, or a stranger."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from joulelab.meter.sensors.processes import is_ours

RANK = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}


@pytest.fixture
def start():
    programs = []

    def start(**environ):
        program = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"PATH": os.environ["PATH"], **environ}
        )
        programs.append(program)
        while not Path(f"/proc/{program.pid}/environ").read_bytes():  # empty for a moment while a program is loaded
            time.sleep(0.01)
        return program.pid

    yield start
    for program in programs:
        program.communicate(b"\n")


def test_the_program_its_children_and_the_recorder_are_ours(start):
    assert is_ours(start(), os.getpid())
    assert is_ours(os.getpid(), 1)


def test_ranks_of_one_launch_belong_together(start):
    first, second = start(**RANK, RANK="0"), start(**RANK, RANK="1")
    assert is_ours(second, first)
    assert not is_ours(start(**RANK, RANK="0"), first)  # two programs in one shell that exported a rank
    assert not is_ours(start(MASTER_ADDR="node7", MASTER_PORT="29501", RANK="1"), first)


def test_siblings_and_the_unseen_are_strangers(start):
    assert not is_ours(start(), start())
    assert not is_ours(4_000_000, os.getpid())
