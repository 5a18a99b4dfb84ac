"""`Trainer(callbacks=[JoulelabCallback("name")])`: records the training as a run and adds its energy to the logs.

Stages are `model.train` and `model.evaluate`. The Trainer announces an evaluation by `control.should_evaluate` at the
end of a step or epoch and reports its end by `on_evaluate`; the training stage is suspended in between. The Trainer has
no hook before a checkpoint is saved, so saving counts as training. TRL's SFTTrainer and DPOTrainer are Trainers and
need nothing more; their work before `train()` (tokenization, precomputed DPO reference) is not in the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from joulelab.errors import DependencyMissing
from joulelab.integrations.training_run import EVALUATE, TRAIN, TrainingCallback, TrainingRun

if TYPE_CHECKING:
    TrainerCallback: Any = object
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise DependencyMissing(f"transformers cannot be imported ({error})", "pip install 'joulelab[train]'") from None


class JoulelabCallback(TrainingCallback, TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Measures `trainer.train()` on the first process of the first node; the other ranks record nothing.

    `record` and `folder` are set afterwards. If training raises, the Trainer does not notify callbacks: the run is
    closed as failed at interpreter exit, at the next `train()`, or immediately if the training runs inside
    `with JoulelabCallback("name") as callback:`.
    """

    _counts: _TrainingCounts

    def __enter__(self) -> JoulelabCallback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._run is not None:
            self._run.close(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if (left_open := self._open_run()) is not None:
            left_open.close(RuntimeError("the training raised; the Trainer does not pass its exceptions to callbacks"))
        self._counts = _TrainingCounts(_SampleCount.of(args, kwargs.get("train_dataloader")), state)
        run = self._begin()
        run.enter(TRAIN)
        if args.eval_on_start:
            run.enter(EVALUATE)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (run := self._open_run()) is not None:
            run.leave(EVALUATE)  # in case it was announced and then skipped
            run.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (run := self._open_run()) is not None:
            run.end_step()
            run.count(**self._counts.since_start(state))
            self._enter_announced_evaluation(run, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (run := self._open_run()) is not None:
            self._enter_announced_evaluation(run, control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detects an evaluation that was not announced, e.g. one that a later callback requested, one batch late."""
        if (run := self._open_run()) is not None and run.is_in(TRAIN):
            run.enter(EVALUATE)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if (run := self._open_run()) is not None:
            run.leave(EVALUATE)
            run.results(metrics or {})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Adds the energy to the Trainer's history and to what later callbacks receive."""
        if (run := self._open_run()) is None or logs is None:
            return
        tokens = logs.get("num_tokens", logs.get("eval_num_tokens"))  # TRL's count of training tokens so far
        if tokens is not None:
            run.count(tokens=int(tokens))
        energy = run.energy_now()
        logs.update(energy)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(energy)
        run.log(state.global_step, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (run := self._open_run()) is not None:
            run.count(**self._counts.since_start(state))
            run.close()

    def _enter_announced_evaluation(self, run: TrainingRun, control: Any) -> None:
        if control.should_evaluate:
            run.enter(EVALUATE)


class _TrainingCounts:
    """Counts of this run alone: a training resumed from a checkpoint starts at the counts of an earlier run."""

    def __init__(self, samples: _SampleCount, state: Any) -> None:
        self._samples = samples
        self._steps_before = int(state.global_step)
        self._tokens_before = int(state.num_input_tokens_seen)

    def since_start(self, state: Any) -> dict[str, int]:
        before, now = self._steps_before, int(state.global_step)
        counts = {"samples": self._samples.after(now) - self._samples.after(before), "steps": now - before}
        tokens = int(state.num_input_tokens_seen) - self._tokens_before
        # only with include_num_input_tokens_seen in the TrainingArguments
        return {**counts, "tokens": tokens} if tokens else counts


class _SampleCount:
    """Samples after a number of optimizer steps: full batches, except the last one of every epoch."""

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
