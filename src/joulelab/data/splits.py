"""Splits of a dataset: those that the user has, named slices such as `train[:100]`, and splits by the hash of a text.

Splits that the user has are kept. Where a split is missing, texts are assigned by the hash of their words: the hash
alone decides whether a text is for training, validation or test, so no size, seed, subset or later addition moves a
test text into a training set, of this student or of an earlier teacher.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, SerializerFunctionWrapHandler, model_serializer

from joulelab.errors import ConfigError
from joulelab.runs.spec import Section, user_path

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
# Words for the splits in names of files and of splits on the hub, and in split columns.
SPLIT_WORDS: Mapping[str, SplitName] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
_SPLIT_WORD = re.compile(rf"(?<![a-z])({'|'.join(sorted(SPLIT_WORDS, key=len, reverse=True))})(?![a-z])")
SYNTHETIC_SIZES = {"train": 100_000, "validation": 2_000, "test": 2_000}
"""Samples of each split of the synthetic datasets."""
_SPLIT = re.compile(r"(?P<name>\w+)(\[(?P<from>-?\d+%?)?:(?P<to>-?\d+%?)?\])?")


def text_id(text: str) -> str:
    """The hash of a text; spacing and case are ignored."""
    # 64 bits: among a million texts two different ones share an id with probability 3e-8.
    return hashlib.sha256(" ".join(text.split()).casefold().encode()).hexdigest()[:16]


@dataclass(frozen=True)
class HashShares:
    """Shares of the texts that their hash assigns to validation and test; training gets the rest."""

    # A fifth for testing is more than 1,000 texts even of the 8,530 short reviews: enough to compare students.
    validation: float = 0.1
    test: float = 0.2

    def __str__(self) -> str:
        shares = {"train": 1 - self.validation - self.test, "validation": self.validation, "test": self.test}
        return ", ".join(f"{name} {100 * share:.3g} %" for name, share in shares.items())


USUAL_SHARES = HashShares()
_PER_TENTH = 2**32 // 10


def split_of(identity: str, shares: HashShares = USUAL_SHARES) -> SplitName:
    """The split of a text with this `text_id`."""
    # The end of the hash decides the split and its beginning the order within: the two must be independent.
    fine, tenth = divmod(int(identity[-8:], 16), 10)
    place = (tenth + min(fine / _PER_TENTH, 1 - 1e-9)) / 10  # in [0, 1)
    beyond_validation = 1 - shares.test
    if place < beyond_validation - shares.validation - 1e-9:
        return "train"
    return "validation" if place < beyond_validation - 1e-9 else "test"


def split_numbers(keys: NDArray[np.uint64], shares: HashShares = USUAL_SHARES) -> NDArray[np.int64]:
    """For each text id as a number: the place of its split in `SPLITS`, the same as `split_of`."""
    fine, tenth = np.divmod((keys & np.uint64(0xFFFFFFFF)).astype(np.int64), 10)
    place = (tenth + np.minimum(fine / _PER_TENTH, 1 - 1e-9)) / 10
    beyond_validation = 1 - shares.test
    edges = np.array([beyond_validation - shares.validation - 1e-9, beyond_validation - 1e-9])
    return np.searchsorted(edges, place, side="right")


def split_word(name: str) -> SplitName | None:
    """The split that a word in the name states: `c4-validation.json.gz`, `validation_matched`, `dev`."""
    found = _SPLIT_WORD.search(name.lower())
    return SPLIT_WORDS[found[1]] if found else None


# Sizes


ALL: Literal["all"] = "all"


def parse_size(value: object) -> object:
    """`all`, a number of rows, or a share of them: 0.1 or `10 %`."""
    if isinstance(value, str):
        text = value.strip().removesuffix("%").strip()
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if value.strip() != ALL and (not value.strip().endswith("%") or not 0 < number <= 100):
            raise ValueError(f"'{value}' is not a size; expected `all`, a number of rows, or a share (0.1 or 10 %)")
        value = ALL if value.strip() == ALL or number == 100 else number / 100
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a size; expected `all`, a number of rows, or a share (0.1 or 10 %)")
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(f"{value:g} is not a share: expected more than 0 and at most 1; a number of rows is whole")
    if isinstance(value, int) and value < 1:
        raise ValueError(f"{value} rows; expected 1 or more, `all`, or a share (0.1 or 10 %)")
    return ALL if value == 1.0 and isinstance(value, float) else value


Size = Annotated[int | float | Literal["all"], BeforeValidator(parse_size)]
"""`all`, a number of rows, or a share of the rows: 0.1 or `10 %`."""


def rows_wanted(size: int | float | str, rows: int, split: str, where: str) -> int:
    """How many of the `rows` of a split; a share is one of these rows."""
    wanted = rows if size == ALL else max(1, round(size * rows)) if isinstance(size, float) else int(size)
    if wanted > rows:
        raise ConfigError(
            f"data.{split}_size={size}: {where} has only {rows:,} rows for {split}",
            f"set data.{split}_size to at most {rows:,}, or `all`",
        )
    return wanted


def hash_shares(validation: int | float | str, test: int | float | str, train: int | float | str = ALL) -> HashShares:
    """Shares in the settings decide how texts are assigned; without any, 70 %, 10 % and 20 %."""
    held_out = [
        size if isinstance(size, float) else usual
        for size, usual in ((validation, USUAL_SHARES.validation), (test, USUAL_SHARES.test))
    ]
    trained = train if isinstance(train, float) else 0.0
    if sum(held_out) + trained > 1 + 1e-9 or sum(held_out) >= 1:
        named = f"train {100 * trained:g} %, " if trained else ""
        raise ConfigError(
            f"the shares are {named}validation {100 * held_out[0]:g} %, test {100 * held_out[1]:g} %: "
            + ("more than 100 % in total" if trained else "nothing is left to train on"),
            "shares of data.train_size, data.validation_size and data.test_size must add up to 1 or less",
        )
    return HashShares(*held_out)


def duplicate_note(duplicates: int, test_rows: int) -> str | None:
    """The warning about test rows that are also training rows; None if there are none."""
    if not duplicates:
        return None
    return (
        f"{duplicates:,} of {test_rows:,} test rows ({100 * duplicates / test_rows:.3g} %) are also in the training "
        "data: quality on the test data is overestimated"
    )


# Splits that the user has


class OwnSplits(Section):
    """Where training, validation and test data are, and how a table is read. Unset settings are left out of dumps."""

    train: str | None = None
    """Training data, in place of `source`: a file, or the name of a split of `source`."""
    validation: str | None = None
    """Validation data: a file, or the name of a split of `source`; null: its own validation split, else rows held out
    from the training data by hash."""
    test: str | None = None
    """Test data, on which quality is reported: a file, or the name of a split of `source`; null: its own test split,
    else rows held out from the training data by hash."""
    text_column: str | int | None = None
    """Column with the text: its name, or its number counted from 1; null: text, content, review or sentence."""

    @model_serializer(mode="wrap")
    def _without_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Artifacts are found by their settings: those made before a setting existed must keep their key."""
        unset = {name for name in OPTIONAL if getattr(self, name, None) is None}
        return {name: value for name, value in dump(self).items() if name not in unset}

    @property
    def named_files(self) -> dict[SplitName, str]:
        """Splits that the settings name."""
        return {name: value for name in SPLITS if (value := getattr(self, name)) is not None}

    @property
    def is_own(self) -> bool:
        """Whether the data is the user's, not a sample or synthetic."""
        return is_own_data(getattr(self, "source", None), self.train) or bool(self.named_files)

    def inputs(self, what: str = "texts") -> dict[str, str]:
        """Files, folders or datasets that are read, by the name of their energy bill."""
        files = {split: name for split, name in self.named_files.items() if is_place(name)}
        source = {} if "train" in files else {what: str(getattr(self, "source", ""))}
        return {**source, **{f"{what} for {split}": name for split, name in files.items()}}


def is_place(name: str) -> bool:
    """Whether a setting names a file, folder, sample or hub dataset, not a split of the source."""
    return _SPLIT.fullmatch(name.strip()) is None or user_path(name).exists()


def all_of_own_data(values: object, *sizes: str) -> object:
    """Settings of a data section before validation: of the user's own data all rows are used unless a size is set."""
    if not isinstance(values, Mapping) or not is_own_data(values.get("source"), values.get("train")):
        return values
    return {"subset": ALL, **dict.fromkeys(sizes, ALL), **values}


def is_own_data(source: object, train: object = None) -> bool:
    """Whether the data is the user's, not a sample or synthetic; without a source it is the pipeline's default."""
    if train is not None:
        return True
    return isinstance(source, str) and not source.startswith("sample:") and source != "synthetic"


OPTIONAL = ("train", "validation", "test", "test_size", "text_column", "label_column", "split_column", "header")


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
