"""Splits of a dataset: slices such as `train[:100]` or `train[10%:20%]`, in the syntax of Hugging Face datasets."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from joulelab.errors import ConfigError

SYNTHETIC_SIZES = {"train": 100_000, "validation": 2_000, "test": 2_000}
"""Samples of each split of the synthetic datasets."""
_SPLIT = re.compile(r"(?P<name>\w+)(\[(?P<from>-?\d+%?)?:(?P<to>-?\d+%?)?\])?")


@dataclass(frozen=True)
class Split:
    name: str
    start: str = ""
    stop: str = ""

    def rows(self, total: int) -> NDArray[np.int64]:
        """The rows of the split in a set of `total` samples."""
        chosen = np.arange(total)[slice(_edge(self.start, total), _edge(self.stop, total))]
        if not len(chosen):
            raise ConfigError(f"the split {self} has none of the {total} samples", "use a slice such as train[:100]")
        return chosen.astype(np.int64)

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]" if self.start or self.stop else self.name


def parse_split(text: str) -> Split:
    found = _SPLIT.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            f"'{text}' is not a split", "write for example train, train[:100], train[10%:20%] or validation[-50:]"
        )
    return Split(found["name"], found["from"] or "", found["to"] or "")


def _edge(text: str, total: int) -> int | None:
    if not text:
        return None
    return round(total * int(text[:-1]) / 100) if text.endswith("%") else int(text)
