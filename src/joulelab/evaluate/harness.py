"""Run lm-evaluation-harness on a model in memory: built-in tasks by name, or the user's task files.

The package is large and prints progress bars and warnings, so it is imported on demand and its output is shown only if
it fails.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from joulelab import lookup
from joulelab.errors import DependencyMissing, JoulelabError
from joulelab.runs.record import Result

# For metrics whose standard error has no formula (BLEU, F1); the harness's default of 100,000 takes minutes.
_BOOTSTRAP_ITERATIONS = 1_000


@dataclass(frozen=True)
class TaskFigure:
    """One metric of one task."""

    task: str
    metric: str
    value: float
    items: int
    lower_is_better: bool
    standard_error: float | None = None
    """As computed by the harness; None if it computes none."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Item id -> score, for metrics with one number per item; for paired comparisons."""

    @property
    def right_or_wrong(self) -> bool:
        return bool(self.scores) and all(score in (0.0, 1.0) for score in self.scores.values())

    def result(self) -> Result:
        """As a result of a run; a proportion if every item is right or wrong."""
        return Result(
            value=self.value,
            trials=len(self.scores) if self.right_or_wrong else None,
            successes=round(sum(self.scores.values())) if self.right_or_wrong else None,
            lower_is_better=self.lower_is_better,
            standard_error=self.standard_error,
        )


def harness_figures(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    folder: Path | None,
    limit: int | None,
    batch_size: int,
    device: torch.device,
    chat: bool = False,
) -> list[TaskFigure]:
    """All metrics of the tasks; `folder` has the user's task files, in addition to those of the package. `chat`: with
    the chat template of the tokenizer."""
    harness, kinds = import_harness()
    with _capture_output() as output:
        manager = _task_manager(kinds["manager"], tasks, folder)
        wrapped = kinds["model"](pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=str(device))
        try:
            found: Any = harness.simple_evaluate(
                model=wrapped,
                tasks=list(tasks),
                task_manager=manager,
                limit=limit,
                bootstrap_iters=_BOOTSTRAP_ITERATIONS,
                log_samples=True,
                apply_chat_template=chat,
            )
        except Exception as error:
            tail = " ".join(output.getvalue().split()[-40:])
            raise JoulelabError(
                f"lm-evaluation-harness failed: {type(error).__name__}: {error} {tail}".strip(),
                "without a network, use local task files with local data; see quality.harness_folder",
            ) from error
    return list(_figures(found))


def require_tasks(tasks: Sequence[str], folder: Path | None) -> None:
    """Check that the harness knows the tasks, before anything is trained."""
    _, kinds = import_harness()
    with _capture_output():
        _task_manager(kinds["manager"], tasks, folder)


def _figures(found: Mapping[str, Any]) -> Iterator[TaskFigure]:
    for task, values in found["results"].items():
        items = int(found.get("n-samples", {}).get(task, {}).get("effective", 0))
        better = found.get("higher_is_better", {}).get(task, {})
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or isinstance(value, str):
                continue
            name = metric if chosen == "none" else f"{metric}.{chosen}"
            error = values.get(f"{metric}_stderr,{chosen}")
            yield TaskFigure(
                task,
                name,
                float(value),
                items,
                better.get(metric) is False,
                standard_error=None if error is None or isinstance(error, str) else float(error),
                scores=_scores(found.get("samples", {}).get(task, ()), metric, chosen),
            )


def _scores(samples: Sequence[Mapping[str, Any]], metric: str, chosen: str) -> dict[str, float]:
    """By the item's number in the task; empty if the metric is not a number per item, such as a perplexity."""
    own = [sample for sample in samples if sample.get("filter", chosen) == chosen and metric in sample]
    if any(not isinstance(sample[metric], int | float) for sample in own):
        return {}
    return {str(sample["doc_id"]): float(sample[metric]) for sample in own}


def _task_manager(kind: Any, tasks: Sequence[str], folder: Path | None) -> Any:
    """Index only the user's task files if they are sufficient: indexing the package's thousands takes a while."""
    if folder is not None:
        own = kind(include_path=str(folder), include_defaults=False)
        if set(tasks) <= set(own.all_tasks):
            return own
    whole = kind(include_path=None if folder is None else str(folder))
    _require_known(tasks, whole.all_tasks)
    return whole


def _require_known(tasks: Sequence[str], known: Sequence[str]) -> None:
    for task in tasks:
        if task not in known:
            raise lookup.unknown("task of lm-evaluation-harness", task, known, "or set quality.harness_folder")


def import_harness() -> tuple[Any, dict[str, Any]]:
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DependencyMissing(
            "the tasks of lm-evaluation-harness need the package lm_eval", lookup.install_hint("lm-eval"), ["lm_eval"]
        ) from error
    return lm_eval, {"model": HFLM, "manager": TaskManager}


@contextlib.contextmanager
def _capture_output() -> Iterator[io.StringIO]:
    output, disabled = io.StringIO(), logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            yield output
    finally:
        logging.disable(disabled)
