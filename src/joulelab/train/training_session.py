"""Runs the training loop inside a run: connects it to a stage, checkpoints, trackers, a budget and the run's record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from joulelab import clock
from joulelab.data.batches import BatchSource
from joulelab.errors import ConfigError, OutOfMemory
from joulelab.meter.monitor.telemetry import FILE_NAME, Telemetry
from joulelab.runs.context import RunContext, Stage
from joulelab.runs.execute import current_rank
from joulelab.runs.paths import RunPaths, read_metrics
from joulelab.runs.record import Result
from joulelab.runs.store import find_folder
from joulelab.train.budget import BudgetReading, Position, wait_for_energy_reading
from joulelab.train.checkpoint import CheckpointFolder, Checkpoints
from joulelab.train.config import TrainingConfig, TrainingRunSpec
from joulelab.train.devices import is_out_of_memory
from joulelab.train.optim import track_compilations
from joulelab.train.parallel import SINGLE_RANK, Ranks, has_process_group
from joulelab.train.stats.hooks import GuardedStats, MeterStats, StatsList, TrackerContext, load_tracker
from joulelab.train.trainer import SimpleTrainer, StepPreparation, StepReport, TrainerCallbacks
from joulelab.units import energy_text
from joulelab.zoo.objective import Objective


class EvaluationPoint(NamedTuple):
    """One evaluation on held-out data during training."""

    step: int
    evaluations: int
    """Evaluations so far, including this one and those of earlier attempts."""
    stage: Stage
    """The stage it is billed to; counts the items of all evaluations."""


StageOpener = Callable[[str, str, str], AbstractContextManager[Stage]]
"""(name, role, activity) -> a stage that suspends the training's; opened again, it gets another segment."""


@dataclass(frozen=True)
class TrainingJob:
    """One training in one stage: model, data, objective and settings."""

    stage: str
    role: str
    """`teacher` or `student`."""
    model: nn.Module
    """Already on its device."""
    batches: BatchSource[Any]
    objective: Objective[Any]
    config: TrainingConfig
    seed: int
    evaluate: Callable[[EvaluationPoint], float] | None = None
    """Computes the held-out loss; called inside the evaluation stage."""
    evaluate_stage: str = ""
    evaluate_activity: str = "evaluate"
    """`validate` if that stage has only evaluations during training."""
    ranks: Ranks = SINGLE_RANK
    loss_name: str = ""
    """Shown with the loss on the console, because losses of different objectives are not comparable."""
    preparation: Callable[[StageOpener], StepPreparation] | None = None
    """Makes the work between steps that this training needs; it opens its stages with what it is given."""
    trainer: type[SimpleTrainer[Any]] = SimpleTrainer
    """The loop; a user's subclass may replace its forward, backward or optimizer step."""


@dataclass(frozen=True)
class TrainingOutcome:
    loss: float
    position: Position
    tracker_report: str
    """Summaries of all trackers."""
    budget_energy_j: float | None = None
    """What the training used of its energy budget, by the live reading; None without such a budget."""


def require_replayed(run: RunContext, *trainings: TrainingConfig) -> None:
    """Raise if a run whose budget is to be replayed does not exist, before any work."""
    for training in trainings:
        if training.replay_budget_of is not None:
            _replayed_folder(run, training.replay_budget_of)


def _replayed_folder(run: RunContext, name: str) -> Path:
    folder = find_folder(run.store, name)
    if folder == run.paths.folder:
        raise ConfigError(
            f"replay_budget_of={name} is this run itself", "name the run to replay by its id; `joulelab runs` lists all"
        )
    return folder


def train_in_run(run: RunContext, job: TrainingJob) -> TrainingOutcome:
    return _Session(run, job).train()


class _Session:
    def __init__(self, run: RunContext, job: TrainingJob) -> None:
        self.run = run
        self.job = job
        self.checkpoints = self._make_checkpoints()
        self.step = 0
        self.start_ns = 0
        self.is_warm = False
        self.trainer: SimpleTrainer[Any] | None = None
        self.telemetry_every = run.spec.telemetry_every if isinstance(run.spec, TrainingRunSpec) else None
        self.telemetry = Telemetry(run.paths.folder / FILE_NAME, self.telemetry_every or 0, run.spec.energy.gpus)

    def train(self) -> TrainingOutcome:
        run, job = self.run, self.job
        # Ranks differ in dropout; equal seeds would apply the same masks to different samples.
        # Initial weights were set before, from the run's seed alone.
        torch.manual_seed(job.seed + job.ranks.rank)
        compiling = track_compilations(job.config.compile, run.note_setup, self._budget_paused)
        with self._telemetry(), compiling, self._training_stage() as stage, _explain_out_of_memory(job):
            self.start_ns = clock.now().mono_ns
            trainer = self.trainer = self._make_trainer(stage)
            trainer.stats.attach(self._tracker_context(trainer))
            run.progress.stage(job.stage, trainer.total_steps)
            loss = trainer.train()
        self._report_overshoot(trainer)
        tracker_report = trainer.stats.log_stats()  # outside the stage: it may wait for the recorder
        run.result(f"{job.stage}.final_loss", Result(value=loss))
        run.result(f"{job.stage}.steps", Result(value=float(trainer.position.step)))
        self.checkpoints.release()
        run.when_made(self.checkpoints.clear)  # a kill while the model is saved must not cost the whole training
        if tracker_report:
            run.progress.write(tracker_report)
        limit_j, used_j = job.config.max_energy_j, None
        if limit_j is not None:  # of all ranks the reading of the first, by which the training ended
            used_j = job.ranks.of_first([limit_j + trainer.budget.overshoot_j])[0]
        return TrainingOutcome(loss, trainer.position, tracker_report, used_j)

    def _budget_paused(self) -> AbstractContextManager[object]:
        return nullcontext() if self.trainer is None else self.trainer.budget.paused()

    def _training_stage(self) -> AbstractContextManager[Stage]:
        return self.run.stage(self.job.stage, role=self.job.role, activity="train")

    def _telemetry(self) -> AbstractContextManager[object]:
        """Telemetry if it is enabled, written by the first rank. Its methods do nothing unless it is entered."""
        return nullcontext() if self.telemetry_every is None or current_rank().is_worker else self.telemetry

    def _make_trainer(self, stage: Stage) -> SimpleTrainer[Any]:
        run, job = self.run, self.job
        trackers = [GuardedStats(load_tracker(name), name, run.warn) for name in job.config.stats]
        callbacks = TrainerCallbacks(
            checkpoints=self.checkpoints,
            phase=run.meter.phase,
            check_stop=run.stop.check,
            on_log=self._on_log,
            on_step=lambda position: self._on_step(stage, position),
            on_checkpoint=lambda position: stage.checkpointed(position.step),
            on_resume=lambda position: self._on_resume(stage, position),
            on_warmup=lambda before, after: self._on_warmup(stage, before, after),
            evaluate=self._evaluate if job.evaluate else None,
            energy_j=self._energy_reader(),
            on_budget_reading=lambda step, fraction: run.log(step, stage=job.stage, budget_fraction=fraction),
            replayed_readings=self._readings_to_replay(),
            warn=run.warn,
            ranks=job.ranks,
            preparation=job.preparation(self._preparation_stage) if job.preparation else None,
        )
        stats = StatsList([MeterStats(run.meter.phase), *trackers])
        return job.trainer(job.model, job.batches, job.objective, job.config, stats, callbacks)

    def _on_resume(self, stage: Stage, position: Position) -> None:
        """Loading a checkpoint, from the start of the stage to here, is setup."""
        stage.resumed(position.step)
        assert self.trainer is not None
        self.run.progress.stage(self.job.stage, self.trainer.total_steps)  # on other ranks the rest has other steps
        self.run.note_setup("load", self.start_ns, clock.now().mono_ns)

    def _on_warmup(self, stage: Stage, before: Position, after: Position) -> None:
        self.run.note_setup("warmup", self.start_ns, clock.now().mono_ns)
        self.is_warm = True
        stage.count_as_setup(samples=after.samples - before.samples, tokens=after.tokens - before.tokens)

    def _make_checkpoints(self) -> Checkpoints:
        folder = self.run.paths.checkpoints / self.job.stage
        if not has_process_group():
            if any(folder.glob("step-*[0-9]/.metadata")):
                raise ConfigError(
                    f"the checkpoints of {self.job.stage} were written by several ranks",
                    "resume under torchrun, with any number of ranks: torchrun --nproc-per-node 1 -m joulelab run "
                    f"--resume {self.run.paths.run_id}",
                )
            return CheckpointFolder(folder, self.job.config.keep_checkpoints)
        if any(folder.glob("step-*.pt")):
            raise ConfigError(
                f"the checkpoints of {self.job.stage} were written by a single process",
                f"resume without torchrun: joulelab run --resume {self.run.paths.run_id}",
            )
        from joulelab.train.sharding_fsdp import ShardedCheckpoints  # torch.distributed, seconds to import

        return ShardedCheckpoints(folder, self.job.ranks, self.job.config.keep_checkpoints)

    def _tracker_context(self, trainer: SimpleTrainer[Any]) -> TrackerContext:
        return TrackerContext(
            trainer=trainer,
            device=trainer.device,
            folder=self.run.paths.folder / "stats",
            meter=self.run.meter,
            earlier_attempts=self.run.paths.attempts_before(self.run.meter.trace_path),
            grid=self.run.spec.energy.grid,
            stage=self.job.stage,
            aside=lambda name: self._other_stage(name, "setup", "profile"),
            write=self.run.progress.write,
            result=self._record_tracker_result,
        )

    def _record_tracker_result(self, name: str, values: dict[str, Any]) -> None:
        self.run.meter.event("tracker", stage=self.job.stage, name=name, values=values)

    @contextmanager
    def _other_stage(self, name: str, role: str, activity: str) -> Iterator[Stage]:
        """A stage that suspends training. Afterwards the console shows the training stage again."""
        with self.run.stage(name, again=True, role=role, activity=activity) as stage:
            yield stage
        if self.trainer is not None and not self.trainer.finished:
            self.run.progress.stage(self.job.stage, self.trainer.total_steps)

    @contextmanager
    def _preparation_stage(self, name: str, role: str, activity: str) -> Iterator[Stage]:
        """Before the first step the training's own setup is noted in two parts, around this stage."""
        if not self.is_warm:
            self.run.note_setup("warmup", self.start_ns, clock.now().mono_ns)
        with self._other_stage(name, role, activity) as stage:
            yield stage
        if not self.is_warm:
            self.start_ns = clock.now().mono_ns

    def _report_overshoot(self, trainer: SimpleTrainer[Any]) -> None:
        """Report the energy beyond the budget: training stops only after a whole step."""
        limit_j, over_j = self.job.config.max_energy_j, trainer.budget.overshoot_j
        if limit_j is None or over_j <= 0:
            return
        name = f"{self.job.stage}.budget_overshoot_j"
        self.run.result(name, Result(value=over_j))
        self.run.progress.write(
            f"{self.job.stage}: the budget of {energy_text(limit_j)} was exceeded by about {energy_text(over_j)} "
            f"({100 * over_j / limit_j:.0f} %) by the live reading: training stops after a whole step. The energy in "
            "the record is computed from the complete trace and may differ"
        )

    def _evaluate(self) -> float:
        every = self.job.config.evaluate_every_steps
        assert self.job.evaluate is not None and every is not None
        with self._other_stage(self.job.evaluate_stage, self.job.role, self.job.evaluate_activity) as stage:
            held_out = self.job.evaluate(EvaluationPoint(self.step, -(-self.step // every), stage))
        self.run.log(self.step, stage=self.job.evaluate_stage, held_out_loss=held_out)
        self.telemetry.log_once()
        return held_out

    def _energy_reader(self) -> Callable[[], float | None]:
        """Reads the energy so far, for an energy budget; raises if such a budget is set and no sensor reports."""
        config = self.job.config
        if config.max_energy_j is None:
            return lambda: None
        live = self.run.meter.live()
        wait_for_energy_reading(self.run, live, config)
        return lambda: live.read_now(config.budget_counts_estimates)

    def _readings_to_replay(self) -> list[BudgetReading] | None:
        config = self.job.config
        name = config.replay_budget_of
        if name is None:
            return None
        folder = _replayed_folder(self.run, name)
        readings = _budget_readings(read_metrics(RunPaths(folder).metrics), self.job.stage)
        if not readings:
            raise ConfigError(
                f"{folder.name} has no time or energy budget readings for {self.job.stage}",
                "choose a run that was trained with max_time_s or max_energy_j",
            )
        if readings[-1][1] < 1 and not any((config.epochs, config.max_steps, config.max_tokens)):
            raise ConfigError(
                f"{folder.name} had spent {100 * readings[-1][1]:.0f} % of its budget when it ended, so that its "
                "readings do not end a training",
                "choose a run that was not interrupted, or set another limit, such as max_steps",
            )
        return readings

    def _on_log(self, report: StepReport) -> None:
        self.run.log(
            report.position.step,
            stage=self.job.stage,
            loss=report.loss,
            learning_rate=report.learning_rate,
            fraction=report.fraction,
            samples=report.position.samples,
            tokens=report.position.tokens,
            **{f"loss.{name}": value for name, value in report.parts.items()},
        )
        name = f"loss ({self.job.loss_name})" if self.job.loss_name else "loss"
        self.run.progress.advance(report.position.step, f"{name} {report.loss:.4f} by step {report.position.step}")

    def _on_step(self, stage: Stage, position: Position) -> None:
        self.step = position.step
        stage.count(samples=position.samples, tokens=position.tokens)
        self.run.progress.advance(position.step)
        self.telemetry.step(position.step)


def _budget_readings(lines: Iterable[dict[str, Any]], stage: str) -> list[BudgetReading]:
    readings = {
        line["step"]: line["budget_fraction"]
        for line in lines
        if line.get("stage") == stage and "budget_fraction" in line
    }
    return sorted(readings.items())


@contextmanager
def _explain_out_of_memory(job: TrainingJob) -> Iterator[None]:
    """Turn a failed allocation into an error that names settings which need less memory."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        memory = "GPU memory" if isinstance(error, torch.OutOfMemoryError) else "this machine's memory"
        raise OutOfMemory(
            f"{job.stage} does not fit into {memory} with micro-batches of {job.config.batch_size}",
            "lower batch_size and raise accumulate by the same factor (same gradient), or set precision=bf16, "
            "activation_checkpointing=true, weights=bf16 or optimizer=adafactor",
        ) from error
