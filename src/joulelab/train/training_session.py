"""The loop inside a run: its stage, its checkpoints, its trackers, its budget, and what the record learns from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from joulelab import clock
from joulelab.data.batches import BatchSource
from joulelab.errors import ConfigError, OutOfMemory
from joulelab.meter.monitor.telemetry import FILE_NAME, Telemetry
from joulelab.meter.trace import read_lines
from joulelab.runs.context import RunContext, Stage
from joulelab.runs.execute import current_rank
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import Result
from joulelab.runs.store import find_folder
from joulelab.train.budget import BudgetReading, Position, wait_for_energy_reading
from joulelab.train.checkpoint import CheckpointFolder, Checkpoints
from joulelab.train.config import TrainingConfig, TrainingRunSpec
from joulelab.train.devices import is_out_of_memory
from joulelab.train.optim import track_compilations
from joulelab.train.parallel import SINGLE_RANK, Ranks
from joulelab.train.stats.hooks import MeterStats, StatsList, TrackerContext, load_tracker
from joulelab.train.trainer import SimpleTrainer, StepReport, TrainerCallbacks
from joulelab.units import energy_text
from joulelab.zoo.objective import Objective


class EvaluationPoint(NamedTuple):
    """When the loop evaluates the model on held-out data."""

    step: int
    evaluations: int
    """Evaluations of this training so far, this one and those of earlier attempts included."""
    stage: Stage
    """The stage it is billed to, which counts the items of all evaluations."""


@dataclass(frozen=True)
class TrainingJob:
    """One training in one stage: the model, what it is trained on, and how."""

    stage: str
    role: str
    """Whose training it is: `teacher` or `student`."""
    model: nn.Module
    """On its device."""
    batches: BatchSource[Any]
    objective: Objective[Any]
    config: TrainingConfig
    seed: int
    evaluate: Callable[[EvaluationPoint], float] | None = None
    """Held-out loss, without a stage of its own around it."""
    evaluate_stage: str = ""
    evaluate_activity: str = "evaluate"
    """`validate` where that stage holds only evaluations during training."""
    ranks: Ranks = SINGLE_RANK
    loss_name: str = ""
    """What the loss is made of, for whoever watches: the numbers of two objectives are not to be compared."""


@dataclass(frozen=True)
class TrainingOutcome:
    loss: float
    position: Position
    told: str
    """What the trackers had to say."""


def train_in_run(run: RunContext, task: TrainingJob) -> TrainingOutcome:
    return _Session(run, task).train()


class _Session:
    def __init__(self, run: RunContext, task: TrainingJob) -> None:
        self.run = run
        self.task = task
        self.checkpoints = self._make_checkpoints()
        self.step = 0
        self.began_ns = 0
        self.trainer: SimpleTrainer[Any] | None = None
        self.telemetry_every = run.spec.telemetry_every if isinstance(run.spec, TrainingRunSpec) else None
        self.telemetry = Telemetry(run.paths.folder / FILE_NAME, self.telemetry_every or 0, run.spec.energy.gpus)

    def train(self) -> TrainingOutcome:
        run, task = self.run, self.task
        torch.manual_seed(task.seed + task.ranks.rank)
        compiling = track_compilations(task.config.compile, run.note_setup, self._budget_paused)
        with self._rows(), compiling, self._training_stage() as stage, _explain_out_of_memory(task):
            self.began_ns = clock.now().mono_ns
            trainer = self.trainer = self._trainer(stage)
            trainer.stats.attach(self._bench(trainer))
            run.progress.stage(task.stage, trainer.total_steps)
            loss = trainer.train()
        self._tell_overshoot(trainer)
        told = trainer.stats.log_stats()  # may wait for the recorder, which is nobody's training
        run.result(f"{task.stage}.final_loss", Result(value=loss))
        run.result(f"{task.stage}.steps", Result(value=float(trainer.position.step)))
        self.checkpoints.clear()
        if told:
            run.progress.say(told)
        return TrainingOutcome(loss, trainer.position, told)

    def _budget_paused(self) -> AbstractContextManager[object]:
        return nullcontext() if self.trainer is None else self.trainer.budget.paused()

    def _training_stage(self) -> AbstractContextManager[Stage]:
        return self.run.stage(self.task.stage, role=self.task.role, activity="train")

    def _rows(self) -> AbstractContextManager[object]:
        """Telemetry where it was asked for, written by one rank; as long as it is not entered it does nothing."""
        return nullcontext() if self.telemetry_every is None or current_rank().is_worker else self.telemetry

    def _trainer(self, stage: Stage) -> SimpleTrainer[Any]:
        run, task = self.run, self.task
        trackers = [load_tracker(name) for name in task.config.stats]
        surroundings = TrainerCallbacks(
            checkpoints=self.checkpoints,
            phase=run.meter.phase,
            check_stop=run.stop.check,
            report=self._report,
            advance=lambda position: self._advance(stage, position),
            saved=lambda position: stage.checkpointed(position.step),
            resumed=lambda position: self._resumed(stage, position),
            warmed_up=lambda began, position: self._warmed_up(stage, began, position),
            evaluate=self._evaluate if task.evaluate else None,
            energy_j=self._energy(),
            budget_look=lambda step, fraction: run.log(step, stage=task.stage, budget_fraction=fraction),
            replayed_looks=self._replayed(),
            warn=run.warn,
            ranks=task.ranks,
        )
        stats = StatsList([MeterStats(run.meter.phase), *trackers])
        return SimpleTrainer(task.model, task.batches, task.objective, task.config, stats, surroundings)

    def _resumed(self, stage: Stage, position: Position) -> None:
        """Start-up of a second attempt is setup: all from the stage's begin to here."""
        stage.resumed(position.step)
        self.run.note_setup("load", self.began_ns, clock.now().mono_ns)

    def _warmed_up(self, stage: Stage, began: Position, position: Position) -> None:
        self.run.note_setup("warmup", self.began_ns, clock.now().mono_ns)
        stage.count_as_setup(samples=position.samples - began.samples, tokens=position.tokens - began.tokens)

    def _make_checkpoints(self) -> Checkpoints:
        folder = self.run.paths.checkpoints / self.task.stage
        if self.task.ranks.world == 1:
            return CheckpointFolder(folder)
        from joulelab.train.sharding_fsdp import ShardedCheckpoints  # torch.distributed, seconds to import

        return ShardedCheckpoints(folder, self.task.ranks)

    def _bench(self, trainer: SimpleTrainer[Any]) -> TrackerContext:
        return TrackerContext(
            trainer=trainer,
            device=trainer.device,
            folder=self.run.paths.folder / "stats",
            meter=self.run.meter,
            stage=self.task.stage,
            aside=lambda name: self._aside(name, "setup", "profile"),
            say=self.run.progress.say,
            result=self._note,
        )

    def _note(self, name: str, values: dict[str, Any]) -> None:
        self.run.meter.event("tracker", stage=self.task.stage, name=name, values=values)

    @contextmanager
    def _aside(self, name: str, role: str, activity: str) -> Iterator[Stage]:
        """Something else in between; who watches is told when training goes on, so that later losses are seen too."""
        with self.run.stage(name, again=True, role=role, activity=activity) as stage:
            yield stage
        if self.trainer is not None and not self.trainer.over:
            self.run.progress.stage(self.task.stage, self.trainer.total_steps)

    def _tell_overshoot(self, trainer: SimpleTrainer[Any]) -> None:
        """Report by how much the budget was passed: a step is never cut in two."""
        limit_j, over_j = self.task.config.max_energy_j, trainer.budget.overshoot_j
        if limit_j is None or over_j <= 0:
            return
        name = f"{self.task.stage}.budget_overshoot_j"
        self.run.result(name, Result(value=over_j))
        self.run.progress.say(
            f"{self.task.stage}: the budget of {energy_text(limit_j)} was passed by about {energy_text(over_j)} "
            f"({100 * over_j / limit_j:.0f} %) by the live reading: training ends after a whole step. The energy in "
            "the record is computed from the whole trace and may differ"
        )

    def _evaluate(self) -> float:
        every = self.task.config.evaluate_every_steps
        assert self.task.evaluate is not None and every is not None
        with self._aside(self.task.evaluate_stage, self.task.role, self.task.evaluate_activity) as stage:
            held_out = self.task.evaluate(EvaluationPoint(self.step, -(-self.step // every), stage))
        self.run.log(self.step, stage=self.task.evaluate_stage, held_out_loss=held_out)
        self.telemetry.log_once()
        return held_out

    def _energy(self) -> Callable[[], float | None]:
        """Joules of this attempt's training, for a joule budget; demands a sensor where there is such a budget."""
        config = self.task.config
        if config.max_energy_j is None:
            return lambda: None
        live = self.run.meter.live()
        wait_for_energy_reading(self.run, live, config)
        return lambda: live.read_now(config.budget_counts_estimates)

    def _replayed(self) -> list[BudgetReading] | None:
        name = self.task.config.replay_budget_of
        if name is None:
            return None
        folder = find_folder(self.run.store, name)
        looks = _budget_readings(read_lines(RunPaths(folder).metrics), self.task.stage)
        if not looks:
            raise ConfigError(
                f"{folder.name} noted no budget of time or joules for {self.task.stage}",
                "name a run that was trained with max_time_s or max_energy_j",
            )
        return looks

    def _report(self, report: StepReport) -> None:
        self.run.log(
            report.position.step,
            stage=self.task.stage,
            loss=report.loss,
            learning_rate=report.learning_rate,
            fraction=report.fraction,
            samples=report.position.samples,
            tokens=report.position.tokens,
            **{f"loss.{name}": value for name, value in report.parts.items()},
        )
        name = f"loss ({self.task.loss_name})" if self.task.loss_name else "loss"
        self.run.progress.advance(report.position.step, f"{name} {report.loss:.4f} by step {report.position.step}")

    def _advance(self, stage: Stage, position: Position) -> None:
        self.step = position.step
        stage.count(samples=position.samples, tokens=position.tokens)
        self.run.progress.advance(position.step)
        self.telemetry.step(position.step)


def _budget_readings(lines: Iterable[dict[str, Any]], stage: str) -> list[BudgetReading]:
    found = {
        line["step"]: line["budget_fraction"]
        for line in lines
        if line.get("stage") == stage and "budget_fraction" in line
    }
    return sorted(found.items())


class _explain_out_of_memory:  # noqa: N801  # reads as a word in a `with`
    """Out of memory is the user's to fix, so the error names ways to fix it."""

    def __init__(self, task: TrainingJob) -> None:
        self._task = task

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if is_out_of_memory(error):
            whose = "the GPU's memory" if isinstance(error, torch.OutOfMemoryError) else "this machine's memory"
            raise OutOfMemory(
                f"{self._task.stage} does not fit into {whose} with micro-batches of {self._task.config.batch_size}",
                "lower batch_size and raise accumulate by the same factor (the same gradient), or set precision=bf16, "
                "activation_checkpointing=true or optimizer=adafactor",
            ) from error
