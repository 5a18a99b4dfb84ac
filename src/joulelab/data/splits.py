"""Splits of a dataset: named slices such as `train[:100]`, and the split that the hash of a text gives.

A text is identified by the hash of its words. The hash alone decides whether it is for training, validation or test, so
no size, seed, subset or later addition moves a test text into a training set, of this student or of an earlier teacher.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from joulelab.errors import ConfigError

SplitName = Literal["train", "validation", "test"]
# Out of ten. A fifth for testing is more than 1,000 texts even of the 8,530 short reviews: enough to compare students.
_TRAIN_TENTHS, _VALIDATION_TENTHS = 7, 1
SYNTHETIC_SIZES = {"train": 100_000, "validation": 2_000, "test": 2_000}
"""Samples of each split of the synthetic datasets."""
_SPLIT = re.compile(r"(?P<name>\w+)(\[(?P<from>-?\d+%?)?:(?P<to>-?\d+%?)?\])?")


def text_id(text: str) -> str:
    """The hash of a text; spacing and case are ignored."""
    return hashlib.sha256(" ".join(text.split()).casefold().encode()).hexdigest()[:16]


def split_of(identity: str) -> SplitName:
    """The split of a text with this `text_id`."""
    # The end of the hash decides the split and its beginning the order within: the two must be independent.
    tenth = int(identity[-8:], 16) % 10
    if tenth < _TRAIN_TENTHS:
        return "train"
    return "validation" if tenth < _TRAIN_TENTHS + _VALIDATION_TENTHS else "test"


@dataclass(frozen=True)
class Split:
    """A split or a slice of it, in the syntax of Hugging Face datasets: `train`, `train[:100]`, `train[10%:20%]`."""

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
