"""Trackers of the training loop: the hooks they implement, how they are loaded, and the files they write.

The loop enters `stats.phase(name)` around train, step, input (waiting for the next batch), forward, backward, optimizer
step, checkpoint and aside (work that interrupts training: an evaluation, a tracker's own measurement). That calls
`start_<name>` and `stop_<name>`, which by default call `start(name)` and `stop(name)`, which do nothing. A tracker that
treats all phases alike overrides the last two; one that needs a single phase overrides its pair.
"""

from __future__ import annotations

import csv
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from joulelab import lookup
from joulelab.errors import ConfigError, JoulelabError, NotFoundError
from joulelab.runs.spec import user_path
from joulelab.zoo.objective import PhaseMaker
from joulelab.zoo.registry import is_file

if TYPE_CHECKING:
    from joulelab.meter.session import Meter
    from joulelab.train.trainer import Trainer


PHASES = ("train", "step", "input", "forward", "backward", "optimizer_step", "checkpoint", "aside")


@dataclass(frozen=True)
class TrackerContext:
    """What a tracker may use."""

    trainer: Trainer[Any]
    device: torch.device
    stage: str = "train"
    """Stage that the training is billed to."""
    folder: Path | None = None
    """Folder for the tracker's files; None if the loop runs outside a run."""
    meter: Meter | None = None
    """The run's meter, if there is one."""
    earlier_attempts: Sequence[tuple[Path, Path]] = ()
    """Event file and trace of each process of the run's earlier attempts, the newest first."""
    grid: str = "none"
    """Electricity grid of the run, for emissions (`energy.grid`)."""
    aside: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()
    """`with context.aside(f"{context.stage}.phases"):` bills the tracker's own work to that stage."""
    write: Callable[[str], None] = lambda text: None
    """Print a line to the console."""
    result: Callable[[str, dict[str, Any]], None] = lambda name, values: None
    """Store values in the run's record, under the tracker's name."""

    @property
    def say(self) -> Callable[[str], None]:
        """The former name of `write`, which users' own trackers may still call."""
        return self.write


Bench = TrackerContext  # its former name, which users' own trackers may still import


class TrainerStats:
    """All hooks, doing nothing."""

    def __init_subclass__(cls) -> None:
        """Hooks under the name of an earlier release still work in users' own trackers."""
        super().__init_subclass__()
        for edge in ("start", "stop"):
            if (hook := vars(cls).get(f"{edge}_optimiser_step")) is not None:
                setattr(cls, f"{edge}_optimizer_step", hook)
                notice = f"{cls.__name__}: {edge}_optimiser_step is now called {edge}_optimizer_step"
                print(f"joulelab: {notice}; the old name is accepted for one more release", file=sys.stderr)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Call the hooks of a phase around a block. An exception ends the training, so `stop` is not called then."""
        getattr(self, f"start_{name}")()
        yield
        getattr(self, f"stop_{name}")()

    def attach(self, context: TrackerContext) -> None:
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

    def start_optimizer_step(self) -> None:
        self.start("optimizer_step")

    def stop_optimizer_step(self) -> None:
        self.stop("optimizer_step")

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
        """Called after every optimizer step."""

    def log_stats(self) -> str:
        """Summary of the tracker at the end of training; may be empty."""
        return ""


class NoOpStats(TrainerStats):
    """Tracks nothing; the baseline for the cost of the other trackers."""


class StatsList(TrainerStats):
    """Several trackers at once. They stop in reverse order, so that they nest."""

    def __init__(self, members: Sequence[TrainerStats]) -> None:
        self._members = tuple(members)
        self._starts = {phase: _bound_hooks(members, f"start_{phase}") for phase in PHASES}
        self._stops = {phase: _bound_hooks(members[::-1], f"stop_{phase}") for phase in PHASES}

    def attach(self, context: TrackerContext) -> None:
        for member in self._members:
            member.attach(context)

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


class GuardedStats(TrainerStats):
    """A tracker that is disabled with a warning if one of its hooks raises: the training and its energy are kept.

    Errors that joulelab itself reports (a missing package, a wrong setting) end the run as before.
    """

    def __init__(self, member: TrainerStats, name: str, warn: Callable[[str], None]) -> None:
        self._member, self._name, self._warn = member, name, warn
        self._disabled = False
        # trackers of earlier releases and of the course define log_step without the number of the step
        self._log_step = member.log_step if _takes_argument(member.log_step) else lambda step: member.log_step()  # type: ignore[call-arg]

    def _call(self, hook: str, *arguments: Any) -> Any:
        if self._disabled:
            return None
        try:
            return (self._log_step if hook == "log_step" else getattr(self._member, hook))(*arguments)
        except JoulelabError:
            raise
        except Exception as error:
            self._disabled = True
            self._warn(f"tracker {self._name} failed in {hook} and is disabled: {type(error).__name__}: {error}")
            return None

    def attach(self, context: TrackerContext) -> None:
        self._call("attach", context)

    def start(self, phase: str) -> None:
        self._call(f"start_{phase}")

    def stop(self, phase: str) -> None:
        self._call(f"stop_{phase}")

    def log_loss(self, loss: float) -> None:
        self._call("log_loss", loss)

    def log_step(self, step: int) -> None:
        self._call("log_step", step)

    def log_stats(self) -> str:
        return self._call("log_stats") or ""


def _takes_argument(hook: Callable[..., Any]) -> bool:
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    return any(one.kind in kinds for one in inspect.signature(hook).parameters.values())


class CourseStats(TrainerStats):
    """A tracker written for the course's interface, which knows no `attach` and names some hooks differently.

    Its `log_loss` gets a tensor, its `log_step` no argument, and its checkpoint hooks are `start_save_checkpoint` and
    `stop_save_checkpoint`. A constructor with the argument `device` gets the device of the training.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        needed = [
            name
            for name, one in inspect.signature(kind).parameters.items()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
        if needed not in ([], ["device"]):
            raise ConfigError(
                f"{kind.__name__} requires the constructor arguments {', '.join(needed)}",
                "give them defaults, or use device",
            )
        self._with_device = bool(needed)
        self._tracker: Any = None

    def attach(self, context: TrackerContext) -> None:
        self._tracker = self._kind(context.device) if self._with_device else self._kind()

    def _edge(self, edge: str, phase: str) -> None:
        for name in _COURSE_HOOKS.get(phase, (phase,)):
            if (hook := getattr(self._tracker, f"{edge}_{name}", None)) is not None:
                hook()
                return

    def start(self, phase: str) -> None:
        self._edge("start", phase)

    def stop(self, phase: str) -> None:
        self._edge("stop", phase)

    def log_loss(self, loss: float) -> None:
        if hasattr(self._tracker, "log_loss"):
            self._tracker.log_loss(torch.tensor(loss))

    def log_step(self, step: int) -> None:
        if hasattr(self._tracker, "log_step"):
            self._tracker.log_step(*([step] if _takes_argument(self._tracker.log_step) else []))

    def log_stats(self) -> str:
        """The course's trackers print their summary themselves."""
        return str(self._tracker.log_stats() or "")


_COURSE_HOOKS = {
    "checkpoint": ("save_checkpoint", "checkpoint"),
    "optimizer_step": ("optimizer_step", "optimiser_step"),
    "input": ("data_transfer", "input"),
}


def _is_course_tracker(kind: type) -> bool:
    """By its hooks: the course's own base class is not installed here."""
    return all(callable(getattr(kind, name, None)) for name in ("start_train", "stop_train", "start_step", "log_stats"))


def _bound_hooks(members: Sequence[TrainerStats], name: str) -> list[Callable[[], None]]:
    return [getattr(member, name) for member in members]


GUIDE = "docs/add-a-tracker.md has a complete example"


def load_tracker(name: str) -> TrainerStats:
    """A built-in tracker such as `simple`, or the one in a user's file `./my_tracker.py`."""
    if is_file(name):
        kind = _only_tracker(user_path(name))
        return _instantiate(name, kind) if issubclass(kind, TrainerStats) else CourseStats(kind)
    if name not in lookup.TRAINER_STATS.names() and Path(f"{name}.py").is_file():
        raise NotFoundError(f"unknown trainer stats '{name}'", f"for your own file write ./{name}.py")
    tracker: TrainerStats = lookup.TRAINER_STATS.resolve(name)()
    return tracker


def _instantiate(name: str, kind: type[TrainerStats]) -> TrainerStats:
    try:
        return kind()
    except TypeError as error:
        raise ConfigError(f"{kind.__name__} in {name} requires constructor arguments: {error}", GUIDE) from error


def _only_tracker(path: Path) -> type:
    if not path.is_file():
        raise NotFoundError(f"there is no file {path.absolute()}", "pass a built-in tracker or the path of a .py file")
    if path.suffix != ".py":
        raise NotFoundError(f"{path} is not a Python file", f"a tracker is a class in a .py file; {GUIDE}")
    here = str(Path.cwd())
    if here not in sys.path:  # a tracker of the course imports its base class from the project's folder
        sys.path.append(here)
    module = lookup.import_file(path.resolve(), GUIDE)
    kinds: list[type] = [value for value in vars(module).values() if isinstance(value, type)]
    own = [kind for kind in kinds if kind.__module__ == module.__name__]
    found = [kind for kind in own if issubclass(kind, TrainerStats) or _is_course_tracker(kind)]
    found = [kind for kind in found if not inspect.isabstract(kind)]
    if not found:
        raise ConfigError(f"{path} defines no tracker", f"define one subclass of TrainerStats; {GUIDE}")
    if len(found) > 1:
        names = " and ".join(kind.__name__ for kind in found)
        raise ConfigError(f"{path} defines several trackers: {names}", "put each into a separate file")
    return found[0]


class MeterStats(TrainerStats):
    """Writes the phases as marks for the run's recorder, about a microsecond each. Every run has this tracker."""

    def __init__(self, phase: PhaseMaker) -> None:
        self._phases = {name: phase(name) for name in PHASES}

    def start(self, phase: str) -> None:
        self._phases[phase].__enter__()

    def stop(self, phase: str) -> None:
        self._phases[phase].__exit__(None, None, None)


def device_synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits until all queued kernels are done; on a CPU it does nothing."""
    if device.type == "mps":
        return torch.mps.synchronize
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


class NoOpSyncStats(TrainerStats):
    """Synchronizes with the device at both ends of every phase and measures nothing: shows what synchronizing costs.

    Kernels run asynchronously, behind the program that launches them. Timing every phase from the host empties the
    queue each time; for models that are bound by launches or by the data loader this has cost 30 % and more.
    """

    def attach(self, context: TrackerContext) -> None:
        self._wait = device_synchronizer(context.device)

    def start(self, phase: str) -> None:
        self._wait()

    def stop(self, phase: str) -> None:
        self._wait()


def unused_path(folder: Path, stem: str, suffix: str) -> Path:
    """`phases.csv`, or `phases_2.csv` if an earlier attempt or another stage wrote the first. The file is created at
    once, because ranks may ask for it at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / (f"{stem}{suffix}" if number == 1 else f"{stem}_{number}{suffix}")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")


class CsvFile:
    """A table written row by row, buffered until `flush`."""

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
    """`losses.csv`: step, and mean loss since the previous row."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else CsvFile(unused_path(folder, "losses", ".csv"), ("step", "loss"))
        self.step = 0

    def add(self, loss: float) -> None:
        if self._file is not None:
            self._file.add((self.step, loss))
            self._file.flush()  # rows are few, and a killed run should have them

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
