"""lm-evaluation-harness over a model that is in memory already: its tasks by name, or task files of one's own.

It is a large package with habits (progress bars, warnings, a git call), so it is imported only when asked for, and what
it says goes nowhere unless it fails.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from joulelab import lookup
from joulelab.errors import DependencyMissing, JoulelabError


@dataclass(frozen=True)
class TaskFigure:
    """One metric of one task."""

    task: str
    metric: str
    value: float
    items: int
    lower_is_better: bool


def harness_figures(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    folder: Path | None,
    limit: int | None,
    batch_size: int,
    device: torch.device,
) -> list[TaskFigure]:
    """All metrics of the named tasks; `folder` holds task files of one's own, beside those the package brings."""
    harness, kinds = import_harness()
    with _silent() as said:
        manager = _manager(kinds["manager"], tasks, folder)
        wrapped = kinds["model"](pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=str(device))
        try:
            found: Any = harness.simple_evaluate(
                model=wrapped,
                tasks=list(tasks),
                task_manager=manager,
                limit=limit,
                bootstrap_iters=0,
                log_samples=False,
            )
        except Exception as error:
            tail = " ".join(said.getvalue().split()[-40:])
            raise JoulelabError(
                f"lm-evaluation-harness failed: {type(error).__name__}: {error} {tail}".strip(),
                "without a network, name local task files with local data; see quality.harness_folder",
            ) from error
    return list(_figures(found))


def require_tasks(tasks: Sequence[str], folder: Path | None) -> None:
    """That the harness knows them, before anything is trained that they are to be asked of."""
    _, kinds = import_harness()
    with _silent():
        _manager(kinds["manager"], tasks, folder)


def _figures(found: Mapping[str, Any]) -> Iterator[TaskFigure]:
    for task, values in found["results"].items():
        items = int(found.get("n-samples", {}).get(task, {}).get("effective", 0))
        better = found.get("higher_is_better", {}).get(task, {})
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or isinstance(value, str):
                continue
            name = metric if chosen == "none" else f"{metric}.{chosen}"
            yield TaskFigure(task, name, float(value), items, better.get(metric) is False)


def _manager(kind: Any, tasks: Sequence[str], folder: Path | None) -> Any:
    """Of one's own task files alone where they are all that is asked for: the package's thousands take a while."""
    if folder is not None:
        own = kind(include_path=str(folder), include_defaults=False)
        if set(tasks) <= set(own.all_tasks):
            return own
    whole = kind(include_path=None if folder is None else str(folder))
    _require(tasks, whole.all_tasks)
    return whole


def _require(tasks: Sequence[str], known: Sequence[str]) -> None:
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
            "the tasks of lm-evaluation-harness need the package lm_eval", 'pip install "joulelab[lm-eval]"'
        ) from error
    return lm_eval, {"model": HFLM, "manager": TaskManager}


@contextlib.contextmanager
def _silent() -> Iterator[io.StringIO]:
    said, disabled = io.StringIO(), logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            yield said
    finally:
        logging.disable(disabled)
