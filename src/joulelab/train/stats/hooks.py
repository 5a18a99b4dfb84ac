"""Hooks around every phase of the loop. A tracker is one class that overrides what it wants to see.

The loop calls `start_*` and `stop_*` around train, step, input (waiting for the next batch), forward, backward,
optimiser step, checkpoint, and aside (what interrupts the training: an evaluation, a tracker's own measurement). By
default each of them calls `start(phase)` or `stop(phase)`, which do nothing: a tracker that treats phases alike
overrides those two, one that cares for a single phase overrides its pair.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from joulelab import lookup
from joulelab.errors import ConfigError, NotFoundError
from joulelab.zoo.objective import PhaseMaker
from joulelab.zoo.registry import is_file

if TYPE_CHECKING:
    from joulelab.meter.session import Meter
    from joulelab.train.trainer import Trainer


PHASES = ("train", "step", "input", "forward", "backward", "optimiser_step", "checkpoint", "aside")


@dataclass(frozen=True)
class TrackerContext:
    """What a tracker may use, given to it before training starts."""

    trainer: Trainer[Any]
    device: torch.device
    stage: str = "train"
    """Where the loop's own joules go; a tracker's own work belongs into a stage named after it."""
    folder: Path | None = None
    """Where it may write files; None where the loop runs without a run folder."""
    meter: Meter | None = None
    """The run's own meter, where there is one."""
    aside: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()
    """`with bench.aside(f"{bench.stage}.phases"):` bills what a tracker computes for itself to a stage of its own."""
    say: Callable[[str], None] = lambda text: None
    """A line for whoever watches."""
    result: Callable[[str, dict[str, Any]], None] = lambda name, values: None
    """A finding that belongs into the run's record, under the tracker's name."""


class TrainerStats:
    """Every hook, doing nothing."""

    def attach(self, bench: TrackerContext) -> None:
        """Called once, before training starts."""

    def start(self, phase: str) -> None: ...

    def stop(self, phase: str) -> None: ...

    def start_train(self) -> None:
        self.start("train")

    def stop_train(self) -> None:
        self.stop("train")

    def start_step(self) -> None:
        self.start("step")

    def stop_step(self) -> None:
        self.stop("step")

    def start_input(self) -> None:
        self.start("input")

    def stop_input(self) -> None:
        self.stop("input")

    def start_forward(self) -> None:
        self.start("forward")

    def stop_forward(self) -> None:
        self.stop("forward")

    def start_backward(self) -> None:
        self.start("backward")

    def stop_backward(self) -> None:
        self.stop("backward")

    def start_optimiser_step(self) -> None:
        self.start("optimiser_step")

    def stop_optimiser_step(self) -> None:
        self.stop("optimiser_step")

    def start_checkpoint(self) -> None:
        self.start("checkpoint")

    def stop_checkpoint(self) -> None:
        self.stop("checkpoint")

    def start_aside(self) -> None:
        self.start("aside")

    def stop_aside(self) -> None:
        self.stop("aside")

    def log_loss(self, loss: float) -> None:
        """The mean loss since the last call, every `log_every_steps` steps."""

    def log_step(self, step: int) -> None:
        """After every optimiser step."""

    def log_stats(self) -> str:
        """What the tracker has to say at the end of training; may be empty."""
        return ""


class NoOpStats(TrainerStats):
    """Tracks nothing: what the others are compared with."""


class StatsList(TrainerStats):
    """Several trackers at once; they stop in the reverse order of their start, so that they nest."""

    def __init__(self, members: Sequence[TrainerStats]) -> None:
        self._members = tuple(members)
        self._starts = {phase: _bound_hooks(members, f"start_{phase}") for phase in PHASES}
        self._stops = {phase: _bound_hooks(members[::-1], f"stop_{phase}") for phase in PHASES}

    def attach(self, bench: TrackerContext) -> None:
        for member in self._members:
            member.attach(bench)

    def start(self, phase: str) -> None:
        for hook in self._starts[phase]:
            hook()

    def stop(self, phase: str) -> None:
        for hook in self._stops[phase]:
            hook()

    def log_loss(self, loss: float) -> None:
        for member in self._members:
            member.log_loss(loss)

    def log_step(self, step: int) -> None:
        for member in self._members:
            member.log_step(step)

    def log_stats(self) -> str:
        return "\n\n".join(text for member in self._members if (text := member.log_stats()))


def _bound_hooks(members: Sequence[TrainerStats], name: str) -> list[Callable[[], None]]:
    return [getattr(member, name) for member in members]


# Trackers by the name a user writes: one of ours, or a Python file of the user's own that holds one.


GUIDE = "docs/add-a-tracker.md shows a whole one"


def load_tracker(name: str) -> TrainerStats:
    """The tracker behind `simple`, or the only one in `./my_tracker.py`."""
    if is_file(name):
        return _instantiate(name, _only_tracker(Path(name).expanduser()))
    if name not in lookup.TRAINER_STATS.names() and Path(f"{name}.py").is_file():
        raise NotFoundError(f"unknown trainer stats '{name}'", f"for your own file write ./{name}.py")
    tracker: TrainerStats = lookup.TRAINER_STATS.resolve(name)()
    return tracker


def _instantiate(name: str, kind: type[TrainerStats]) -> TrainerStats:
    try:
        return kind()
    except TypeError as error:
        raise ConfigError(f"{kind.__name__} in {name} cannot be made without arguments: {error}", GUIDE) from error


def _only_tracker(path: Path) -> type[TrainerStats]:
    if not path.is_file():
        raise NotFoundError(f"there is no file {path.absolute()}", "name one of our trackers or a .py file of yours")
    if path.suffix != ".py":
        raise NotFoundError(f"{path} is not a Python file", f"a tracker is a class in a .py file; {GUIDE}")
    module = lookup.import_file(path.resolve(), GUIDE)
    kinds: list[type] = [value for value in vars(module).values() if isinstance(value, type)]
    found = [kind for kind in kinds if issubclass(kind, TrainerStats) and kind.__module__ == module.__name__]
    if not found:
        raise ConfigError(f"{path} holds no tracker", f"write one class that extends TrainerStats; {GUIDE}")
    if len(found) > 1:
        names = " and ".join(kind.__name__ for kind in found)
        raise ConfigError(f"{path} holds several trackers: {names}", "put each into a file of its own")
    return found[0]


# The meter's own tracker: every run has it.


class MeterStats(TrainerStats):
    """Leaves the phases as marks for our own recorder; about a microsecond each."""

    def __init__(self, phase: PhaseMaker) -> None:
        self._phases = {name: phase(name) for name in PHASES}

    def start(self, phase: str) -> None:
        self._phases[phase].__enter__()

    def stop(self, phase: str) -> None:
        self._phases[phase].__exit__(None, None, None)


# What synchronising costs: a tracker that waits for the device at every hook and measures nothing.
#
# A GPU runs behind the program that feeds it. Whoever waits for it at every phase, to time it from the host, empties
# its queue each time; on models that are bound by launches or by the loader that has cost 30 % and more.


def device_synchronizer(device: torch.device) -> Callable[[], None]:
    """Call it to wait until the device has done all it was given; a CPU is never behind."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


class NoOpSyncStats(TrainerStats):
    """Waits for the device at the begin and the end of every phase."""

    def attach(self, bench: TrackerContext) -> None:
        self._wait = device_synchronizer(bench.device)

    def start(self, phase: str) -> None:
        self._wait()

    def stop(self, phase: str) -> None:
        self._wait()


# Files of trackers: beside those of an earlier attempt or another stage, never over them.


def unused_path(folder: Path, stem: str, suffix: str) -> Path:
    """`phases.csv`, or `phases_2.csv` where that is taken; made at once, as ranks may ask at the same moment."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / (f"{stem}{suffix}" if number == 1 else f"{stem}_{number}{suffix}")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers do not end")


class CsvFile:
    """A table that grows row by row. Rows reach the disk in blocks, or when `flush` asks for it."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path = path
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerow(names)

    def add(self, row: Iterable[object]) -> None:
        self._writer.writerow(row)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class LossFile:
    """`losses.csv`: the step and the mean loss since the line before."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else CsvFile(unused_path(folder, "losses", ".csv"), ("step", "loss"))
        self.step = 0

    def add(self, loss: float) -> None:
        if self._file is not None:
            self._file.add((self.step, loss))
            self._file.flush()  # these are few, and what a killed run is asked for first

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
