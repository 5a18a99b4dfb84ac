"""Predictions of text and image classifiers on a held-out set, per item for paired comparisons, and their quality.

Shapes: B batch, N items, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from joulelab.data.batches import Rows, TensorBatch, iterate_in_order
from joulelab.data.tokenized_text import TokenizedSet
from joulelab.runs.record import Result
from joulelab.stats import wilson

BINS = 15  # as in Guo et al. (2017), so that figures are comparable with published ones


def expected_calibration_error(
    probabilities_NC: NDArray[np.floating[Any]], labels_N: NDArray[np.int64], bins: int = BINS
) -> float:
    """Expected calibration error (Guo et al., 2017): predictions are binned by the probability of the predicted class;
    the mean over predictions of |accuracy - mean probability| of their bin."""
    sure_N = probabilities_NC.max(axis=1).astype(np.float64)
    right_N = probabilities_NC.argmax(axis=1) == labels_N
    # Bins are (0, 1/bins], (1/bins, 2/bins], ...: probability 1 belongs to the last bin.
    bin_N = np.clip(np.ceil(sure_N * bins).astype(np.int64) - 1, 0, bins - 1)
    # Sums and not means per bin: n_k |accuracy_k - confidence_k| / n is the weighted mean of the
    # definition, and empty bins need no special case.
    off_K = np.bincount(bin_N, right_N, bins) - np.bincount(bin_N, sure_N, bins)
    return float(np.abs(off_K).sum() / max(1, len(labels_N)))


PREDICTIONS = "predictions.npz"
_EPS = 1e-12


@dataclass(frozen=True, eq=False)
class Predictions:
    ids: NDArray[np.str_]
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    probabilities: NDArray[np.float32] | None = None
    """[N, C]; None in files of earlier versions."""

    def accuracy(self) -> Result:
        right = int((self.labels == self.predicted).sum())
        return Result(value=right / len(self.labels), trials=len(self.labels), successes=right)

    def macro_f1(self) -> Result:
        """Unweighted mean of F1 over the classes."""
        # Classes that are predicted but never occur count as well: their F1 is 0.
        classes = range(1 + int(max(self.labels.max(), self.predicted.max())))
        return Result(value=float(np.mean([self._f1(number) for number in classes])))

    def _f1(self, number: int) -> float:
        predicted, true = self.predicted == number, self.labels == number
        both = int(predicted.sum() + true.sum())
        return 2 * int((predicted & true).sum()) / both if both else 1.0  # a class that neither occurs nor is predicted

    def calibration_error(self) -> Result | None:
        if self.probabilities is None:
            return None
        return Result(value=expected_calibration_error(self.probabilities, self.labels))

    def loss(self) -> float:
        """Mean negative log-likelihood of the labels."""
        assert self.probabilities is not None
        chosen = self.probabilities[np.arange(len(self.labels)), self.labels]
        # Probabilities are stored in float32, where an unlikely label may have rounded to 0.
        return float(-np.log(np.maximum(chosen, _EPS)).mean())

    def agreement(self, other: Predictions) -> Result:
        """Fraction of common items with the same prediction, right or wrong."""
        theirs = dict(zip(other.ids.tolist(), other.predicted.tolist(), strict=True))
        pairs = zip(self.ids.tolist(), self.predicted.tolist(), strict=True)
        same = [theirs[item] == mine for item, mine in pairs if item in theirs]
        return Result(value=sum(same) / max(1, len(same)), trials=len(same), successes=sum(same))

    def save(self, folder: Path) -> None:
        arrays = {"ids": self.ids, "labels": self.labels, "predicted": self.predicted}
        if self.probabilities is not None:
            arrays["probabilities"] = self.probabilities
        np.savez(folder / PREDICTIONS, **arrays)  # type: ignore[arg-type]  # numpy types its flags, not its arrays


def load_predictions(folder: Path) -> Predictions:
    with np.load(folder / PREDICTIONS, allow_pickle=False) as arrays:
        probabilities = arrays.get("probabilities")
        return Predictions(arrays["ids"], arrays["labels"], arrays["predicted"], probabilities)


def quality_results(found: Predictions, teacher: Predictions | None = None) -> dict[str, Result]:
    """Quality of a classifier by metric name; with a teacher's predictions also relative to the teacher."""
    figures = {"accuracy": found.accuracy(), "macro_f1": found.macro_f1()}
    calibration = found.calibration_error()
    if calibration is not None:
        figures["calibration_error"] = calibration
    if teacher is not None:
        figures["agreement"] = found.agreement(teacher)
        figures["over_teacher"] = Result(value=found.accuracy().value / max(_EPS, teacher.accuracy().value))
    return figures


def majority_share(predicted: Predictions) -> float:
    """Accuracy of always predicting the most frequent class."""
    return float(np.bincount(predicted.labels).max() / len(predicted.labels))


def chance_note(predicted: Predictions, who: str, split: str = "test") -> str | None:
    """A warning if a classifier is not significantly better than the majority class, else None: the 95 % binomial
    interval of its accuracy (Wilson) reaches down to the share of that class."""
    accuracy, chance = predicted.accuracy(), majority_share(predicted)
    interval = wilson(accuracy.successes or 0, len(predicted.labels))
    if interval.low > chance:
        return None
    return (
        f"the {who} is at chance level: {accuracy.successes} of {accuracy.trials} {split} samples correct "
        f"({100 * accuracy.value:.1f} %, 95 % interval {100 * interval.low:.1f} to {100 * interval.high:.1f} %); "
        f"always predicting the most frequent class gives {100 * chance:.1f} %"
    )


@torch.inference_mode()
def predict(
    model: nn.Module, dataset: TokenizedSet, batch_size: int, device: torch.device, tick: Callable[[int, int], None]
) -> Predictions:
    """Run the whole set. `tick(samples, tokens)` is called with the progress and may raise to stop."""
    model.eval()
    by_batch: list[NDArray[np.float32]] = []
    rows: list[NDArray[np.int64]] = []
    samples, tokens = 0, 0
    for batch in iterate_in_order(dataset, batch_size):
        on_device = batch.to(device)
        logits_BC = model(input_ids=on_device.input_ids, attention_mask=on_device.attention_mask).logits
        by_batch.append(logits_BC.float().softmax(dim=-1).cpu().numpy())
        rows.append(batch.rows)
        samples, tokens = samples + batch.samples, tokens + batch.tokens
        tick(samples, tokens)
    # Batches need not have the order of the set.
    probabilities_NC = np.concatenate(by_batch)[np.argsort(np.concatenate(rows))]
    labels_N = np.asarray(dataset.labels, dtype=np.int64)
    return Predictions(np.array(dataset.ids), labels_N, probabilities_NC.argmax(axis=1), probabilities_NC)


_HELD_OUT_SEED = 0  # synthetic images are random; held-out ones are the same in every evaluation


class HeldOutImages(Protocol):
    @property
    def rows(self) -> Rows: ...

    def batch(self, rows: Rows, draw: int) -> TensorBatch: ...


@torch.inference_mode()
def predict_images(model: nn.Module, images: HeldOutImages, device: torch.device, batch_size: int = 128) -> Predictions:
    model.eval()
    labels, probabilities = [], []
    for start in range(0, len(images.rows), batch_size):
        rows = images.rows[start : start + batch_size]
        batch = images.batch(rows, _HELD_OUT_SEED + start).to(device)
        logits_BC = model(pixel_values=batch["pixels"]).logits
        labels.append(batch["labels"].cpu().numpy())
        probabilities.append(logits_BC.float().softmax(dim=-1).cpu().numpy())
    probabilities_NC = np.concatenate(probabilities)
    ids = np.array([str(row) for row in images.rows])
    return Predictions(ids, np.concatenate(labels), probabilities_NC.argmax(axis=1), probabilities_NC)
