"""`Trainer(callbacks=[JoulelabCallback("name")])`: the training becomes a run of ours, and its joules go into the logs.

Stages are `model.train` and `model.evaluate`. The Trainer announces an evaluation by `control.should_evaluate` at the
end of a step or epoch and its end by `on_evaluate`, so the training stage is suspended between the two. Saving a
checkpoint has no beginning that a callback could see; it stays within the training. TRL's SFTTrainer and DPOTrainer are
Trainers and need nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from joulelab.errors import DependencyMissing
from joulelab.integrations.training_run import EVALUATE, TRAIN, TrainingRun, measure_settings
from joulelab.meter.config import EnergyConfig
from joulelab.runs.record import RunRecord

if TYPE_CHECKING:
    TrainerCallback: Any = object
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise DependencyMissing(f"transformers cannot be imported ({error})", "pip install 'joulelab[train]'") from None


class JoulelabCallback(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Measures `trainer.train()` on the first process of the first node; the other ranks leave it to that one.

    `record` and `folder` are there afterwards. A training that raises leaves no word to callbacks: its run is closed
    as failed when the interpreter ends, at the next `train()`, or at once where the callback is used as
    `with JoulelabCallback("name") as callback:` around the training.
    """

    def __init__(
        self,
        name: str = "train",
        *,
        energy: EnergyConfig | Mapping[str, Any] | None = None,
        estimate_cpu: bool | None = None,
        runs_dir: str | Path | None = None,
    ) -> None:
        self._spec = measure_settings(name, energy, estimate_cpu)
        self._runs_dir = runs_dir
        self._run: TrainingRun | None = None
        self._samples = _SampleCount()

    def __enter__(self) -> JoulelabCallback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._run is not None:
            self._run.close(error)

    @property
    def record(self) -> RunRecord | None:
        return None if self._run is None else self._run.record

    @property
    def folder(self) -> Path | None:
        return None if self._run is None else self._run.folder

    def _going(self) -> TrainingRun | None:
        return self._run if self._run is not None and self._run.record is None else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if (left_open := self._going()) is not None:
            left_open.close(RuntimeError("the training ended with an error that callbacks are not told"))
        self._samples = _SampleCount.of(args, kwargs.get("train_dataloader"))
        self._run = TrainingRun(self._spec, self._runs_dir)
        self._run.enter(TRAIN)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (run := self._going()) is not None:
            run.leave(EVALUATE)  # announced and then not held
            run.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (run := self._going()) is not None:
            run.end_step()
            run.count(**self._counts(state))
            self._announced(run, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (run := self._going()) is not None:
            self._announced(run, control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation nobody announced, as when another callback asked for it after us: a batch late, but apart."""
        if (run := self._going()) is not None and run.is_in(TRAIN):
            run.enter(EVALUATE)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if (run := self._going()) is not None:
            run.leave(EVALUATE)
            run.results(metrics or {})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Adds the joules to what callbacks after us see and to the Trainer's own history."""
        if (run := self._going()) is None or logs is None:
            return
        if "num_tokens" in logs:  # TRL counts tokens itself
            run.count(tokens=int(logs["num_tokens"]))
        energy = run.energy_now()
        logs.update(energy)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(energy)
        run.log(state.global_step, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (run := self._going()) is not None:
            run.count(**self._counts(state))
            run.close()

    def _announced(self, run: TrainingRun, control: Any) -> None:
        if control.should_evaluate:
            run.enter(EVALUATE)

    def _counts(self, state: Any) -> dict[str, int]:
        counts = {"samples": self._samples.after(state.global_step), "steps": int(state.global_step)}
        if state.num_input_tokens_seen:  # needs include_num_input_tokens_seen=True in the TrainingArguments
            counts["tokens"] = int(state.num_input_tokens_seen)
        return counts


class _SampleCount:
    """Samples after so many optimiser steps: whole batches, except the short last one of every epoch."""

    def __init__(self, per_step: int = 0, per_epoch: int | None = None) -> None:
        self._per_step = per_step
        self._per_epoch = per_epoch

    @classmethod
    def of(cls, args: Any, loader: Any) -> _SampleCount:
        per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        try:
            per_epoch = len(loader.dataset)
        except (AttributeError, TypeError):  # an endless or unsized dataset
            return cls(per_step)
        if args.dataloader_drop_last:
            per_epoch -= per_epoch % (args.train_batch_size * args.world_size)
        return cls(per_step, per_epoch)

    def after(self, steps: int) -> int:
        if not self._per_epoch or not self._per_step:
            return self._per_step * steps
        epochs, rest = divmod(steps, math.ceil(self._per_epoch / self._per_step))
        return epochs * self._per_epoch + min(rest * self._per_step, self._per_epoch)
