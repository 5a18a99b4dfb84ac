"""Trackers written for the course's interface work unchanged, and a tracker that fails does not end the training."""

from pathlib import Path

import pytest

from joulelab.errors import ConfigError
from joulelab.runs.store import load_record
from joulelab.train.stats.hooks import load_tracker

BASE = """
from abc import ABC, abstractmethod

class TrainerStats(ABC):
    @abstractmethod
    def start_train(self): ...
    @abstractmethod
    def stop_train(self): ...
    @abstractmethod
    def start_step(self): ...
    @abstractmethod
    def log_step(self): ...
    @abstractmethod
    def log_stats(self): ...
"""
MINE = """
import course_stats.base as base

class Counting(base.TrainerStats):
    def __init__(self, device):
        self.device, self.calls = device, {}
    def _count(self, name):
        self.calls[name] = self.calls.get(name, 0) + 1
    def start_train(self): self._count("start_train")
    def stop_train(self): self._count("stop_train")
    def start_step(self): self._count("start_step")
    def stop_step(self): self._count("stop_step")
    def start_forward(self): self._count("start_forward")
    def stop_forward(self): pass
    def start_backward(self): pass
    def stop_backward(self): pass
    def start_optimizer_step(self): self._count("start_optimizer_step")
    def stop_optimizer_step(self): pass
    def start_save_checkpoint(self): self._count("start_save_checkpoint")
    def stop_save_checkpoint(self): pass
    def log_loss(self, loss): self._count(f"loss of {loss.ndim} dimensions")
    def log_step(self): self._count("log_step")
    def log_stats(self):
        open("calls.txt", "w").write(f"{self.device} {sorted(self.calls.items())}")
"""
TRAIN = ["train", "gpt2", "--size", "tiny", "--max_steps", 3, "--estimate-cpu", "--device", "cpu", "energy.gpus=none"]


@pytest.fixture
def course():
    """A project as the course has it, in the current directory."""
    Path("course_stats").mkdir()
    Path("course_stats/__init__.py").write_text("")
    Path("course_stats/base.py").write_text(BASE)
    Path("course_stats/counting.py").write_text(MINE)
    return "./course_stats/counting.py"


def run_of(tmp_path):
    (path,) = (tmp_path / "store").glob("*/run.json")
    return load_record(path.parent)


def test_a_tracker_of_the_course_gets_its_hooks(course, joulelab, tmp_path):
    code, _, err = joulelab(*TRAIN, "--trainer_stats", course, "training.log_every_steps=1")
    assert code == 0, err
    calls = Path("calls.txt").read_text()
    assert calls.startswith("cpu ")
    for expected in ("('start_train', 1)", "('stop_train', 1)", "('start_step', 3)", "('log_step', 3)"):
        assert expected in calls
    assert "('start_optimizer_step', 3)" in calls and "loss of 0 dimensions" in calls


@pytest.mark.parametrize("hook", ["attach", "start_step", "stop_forward", "log_step", "log_stats"])
def test_a_tracker_that_fails_is_disabled_with_a_warning(joulelab, tmp_path, hook):
    arguments = {"attach": "self, context", "log_step": "self, step"}.get(hook, "self")
    Path("mine.py").write_text(
        "from joulelab.train.stats.hooks import TrainerStats\n"
        f"class Mine(TrainerStats):\n    def {hook}({arguments}):\n        raise RuntimeError('broken')\n"
    )
    code, _, err = joulelab(*TRAIN, "--train_stats", "./mine.py,simple")
    assert code == 0, err
    record = run_of(tmp_path)
    assert record.status == "done"
    warnings = [note.text for note in record.validity.notes if note.level == "warning"]
    found = [text for text in warnings if f"mine.py failed in {hook} and is disabled" in text]
    assert len(found) == 1 and "RuntimeError: broken" in found[0]
    assert any("simple" in by_tracker for by_tracker in record.findings.values()), "the other tracker goes on"


def test_a_step_hook_without_the_step_is_called_too(joulelab):
    Path("mine.py").write_text(
        "from joulelab.train.stats.hooks import TrainerStats\n"
        "class Mine(TrainerStats):\n    steps = 0\n    def log_step(self):\n        self.steps += 1\n"
        "    def log_stats(self):\n        open('steps.txt', 'w').write(str(self.steps))\n        return ''\n"
    )
    code, _, err = joulelab(*TRAIN, "--train_stats", "./mine.py")
    assert code == 0, err
    assert Path("steps.txt").read_text() == "3"


def test_constructor_arguments_that_are_not_known_are_refused(course):
    file = Path("course_stats/counting.py")
    file.write_text(MINE.replace("def __init__(self, device):", "def __init__(self, device, folder):"))
    with pytest.raises(ConfigError, match="requires the constructor arguments device, folder"):
        load_tracker(str(file))
