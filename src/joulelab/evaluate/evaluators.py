"""Evaluators of a trained student that the setting `evaluators` adds to those of its pipeline.

An evaluator is a function `evaluate(student, stage)`. It returns results by name, which the record has as
`student.<evaluator>.<name>`. Its energy is billed to the stage `student.evaluate`. The built-in ones are in
`lookup.EVALUATORS`; your own is a file `./my_evaluator.py` that defines `evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from joulelab import lookup
from joulelab.errors import ConfigError
from joulelab.runs.context import Stage
from joulelab.runs.paths import write_json
from joulelab.runs.record import Result
from joulelab.runs.spec import RunSpec

GUIDE = "docs/tour.md, How to extend it, describes evaluators"
FILE = "results.json"


@dataclass(frozen=True)
class TrainedStudent:
    model: nn.Module
    """On its device."""
    data: Any
    """The prepared data, as the recipe of the pipeline returns it."""
    spec: RunSpec
    device: torch.device


Evaluator = Callable[[TrainedStudent, Stage], Mapping[str, Result | float]]


@dataclass(frozen=True)
class EvaluatorResults:
    results: dict[str, Result]

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, {name: result.model_dump(mode="json") for name, result in self.results.items()})


def load_evaluator(name: str) -> Evaluator:
    evaluate = getattr(lookup.import_file(Path(name), GUIDE), "evaluate", None) if _is_file(name) else None
    if evaluate is None and _is_file(name):
        raise ConfigError(f"{name} has no function evaluate", f"define evaluate(student, stage); {GUIDE}")
    found: Evaluator = evaluate or lookup.EVALUATORS.resolve(name)
    return found


def run_evaluator(name: str, student: TrainedStudent, stage: Stage) -> EvaluatorResults:
    found = load_evaluator(name)(student, stage)
    if not isinstance(found, Mapping) or not all(isinstance(value, Result | float | int) for value in found.values()):
        raise ConfigError(f"the evaluator {name} returned {found!r}", "expected numbers or Results by name")
    return EvaluatorResults(
        {key: value if isinstance(value, Result) else Result(value=float(value)) for key, value in found.items()}
    )


def _is_file(name: str) -> bool:
    return name.endswith(".py")


def model_size(student: TrainedStudent, stage: Stage) -> dict[str, Result | float]:
    """Number and bytes of the weights, and how many of them are 0 (pruned). Shared weights count once."""
    weights = list(student.model.parameters())
    count = sum(weight.numel() for weight in weights)
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    return {
        "parameters": float(count),
        "bytes": Result(value=sum(weight.nbytes for weight in weights), lower_is_better=True),
        "zero_share": zeros / max(1, count),
    }
