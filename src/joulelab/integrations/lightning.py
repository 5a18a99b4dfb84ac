"""`Trainer(callbacks=[JoulelabLightningCallback("name")])`: records a Lightning fit as a run.

Stages are `model.train` and `model.evaluate`; validation during the fit, including the sanity check before it, suspends
the training stage. Works with `lightning` and with `pytorch_lightning`, whichever is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from joulelab.errors import DependencyMissing
from joulelab.integrations.training_run import EVALUATE, TRAIN, TrainingCallback

if TYPE_CHECKING:
    Callback: Any = object
else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        try:
            from pytorch_lightning.callbacks import Callback
        except ImportError as error:
            raise DependencyMissing(f"Lightning cannot be imported ({error})", "pip install lightning") from None


class JoulelabLightningCallback(TrainingCallback, Callback):  # type: ignore[misc]  # Lightning is untyped here
    """Measures `trainer.fit()` on the first process; `record` and `folder` are set afterwards."""

    _default_name = "fit"
    _samples = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self._samples = 0
            self._begin()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if (run := self._open_run()) is not None:
            run.enter(TRAIN)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (run := self._open_run()) is not None:
            run.begin_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (run := self._open_run()) is not None:
            run.end_step()
            self._samples += batch_size(batch) * trainer.world_size
            run.count(samples=self._samples, steps=int(trainer.global_step))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if (run := self._open_run()) is not None:
            run.end_step()
            run.enter(EVALUATE)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if (run := self._open_run()) is not None:
            run.leave(EVALUATE)
            if not trainer.sanity_checking:
                values = numbers(trainer.callback_metrics)
                run.results(values)
                run.log(int(trainer.global_step), {**values, **run.energy_now()})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if (run := self._open_run()) is not None:
            energy = run.energy_now()
            run.log(int(trainer.global_step), {**numbers(trainer.callback_metrics), **energy})
            for name, value in energy.items():
                self.log(name, value, rank_zero_only=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if (run := self._open_run()) is not None:
            run.leave(TRAIN)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if (run := self._open_run()) is not None:
            run.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if (run := self._open_run()) is not None:
            run.close(exception)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Lightning stores metrics as tensors of one element."""
    return {name: float(value) for name, value in metrics.items()}


def batch_size(batch: Any) -> int:
    """Rows of the first tensor in the batch; 0 if there is none."""
    if hasattr(batch, "shape"):
        return int(batch.shape[0]) if len(batch.shape) else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((size for part in parts if (size := batch_size(part))), 0)
