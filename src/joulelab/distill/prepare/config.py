"""Settings of the steps before a distillation; importable without torch, so that a login node can check them.

The settings have the names of the original scripts' flags, so that their commands work here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from joulelab import lookup
from joulelab.data import sources
from joulelab.data.labeled_text import check_columns
from joulelab.data.masking import counts_file
from joulelab.data.splits import parse_split
from joulelab.data.text import DEFAULT_MIN_CHARS
from joulelab.data.token_store import find_store, is_pickle, open_store
from joulelab.data.tokenize import Family
from joulelab.errors import ConfigError, NotFoundError
from joulelab.runs.spec import RunSpec, user_path

_TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz")


class PrepareSpec(RunSpec):
    """What the steps have in common."""

    uses_gpu: ClassVar[bool] = False
    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers")
    """Packages without which no step can run."""

    force: bool = False
    """Replace what an earlier run wrote to the same target."""

    paths: ClassVar[tuple[str, ...]] = ()
    """Settings that are paths of the user's files or folders."""

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """With absolute paths, so that a run can be resumed from another folder."""
        named = {key: settings[key] for key in cls.paths if isinstance(settings.get(key), str) and settings[key]}
        full = {key: str(user_path(value).absolute()) for key, value in named.items()}
        return {"name": settings.get("pipeline", "prepare")} | dict(settings) | full

    @property
    def target(self) -> Path:
        """The file or folder that is written for the user."""
        raise NotImplementedError

    def require_packages(self) -> None:
        lookup.require_packages("this run", *self.requires)

    def preflight(self) -> None:
        self.require_packages()
        if self.target.exists() and not self.force:
            raise ConfigError(f"{self.target} already exists", "pass --force to replace it, or choose another path")


class DumpSpec(PrepareSpec):
    """Write a corpus to a file with one document per line."""

    paths = ("dump_file",)
    pipeline: Literal["prepare-dump"] = "prepare-dump"
    """Which pipeline runs the stages."""
    source: str
    """A file or folder (txt, jsonl, csv, parquet; also gzipped), `sample:reviews`, or a dataset on the hub."""
    split: str = "train"
    """Documents to use, in the notation of Hugging Face datasets: train, train[:1000], validation."""
    min_chars: int = Field(DEFAULT_MIN_CHARS, ge=0)
    """Shorter documents are dropped; characters are counted after whitespace is normalized."""
    max_chars: int | None = Field(None, ge=1)
    """Longer documents are dropped; null: no limit."""
    dump_file: str
    """The file to write."""

    @property
    def target(self) -> Path:
        return Path(self.dump_file)

    def preflight(self) -> None:
        super().preflight()
        parse_split(self.split)
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ConfigError(f"no document has {self.min_chars} to {self.max_chars} characters", "swap the limits")
        found = sources.parse(self.source)
        if found.kind == "sample" and sources.find_sample(found.name).kind != "labeled-text":
            raise ConfigError(f"{self.source} is a model, not text", "use sample:reviews")


class BinarizeSpec(PrepareSpec):
    """Tokenize a dump into a token store."""

    paths = ("file_path", "dump_file")
    pipeline: Literal["prepare-binarize"] = "prepare-binarize"
    """Which pipeline runs the stages."""
    file_path: str
    """A text file with one document per line, or a pickle of token ids that the original script wrote."""
    tokenizer_type: Family | None = None
    """bert, roberta or gpt2: which special tokens surround a document; null: the tokenizer's own."""
    tokenizer_name: str = "bert-base-uncased"
    """A hub id, a folder, `sample:minilm` or `sample:smollm2`."""
    dump_file: str
    """Prefix of the store's name; the tokenizer's name is appended, as in the original script."""
    workers: int | None = Field(None, ge=1)
    """Processes; null: one per core, or one for a small text. The result is the same."""

    @property
    def target(self) -> Path:
        name = Path(self.tokenizer_name).name.replace(":", "-")
        return Path(f"{self.dump_file}.{name}")

    def preflight(self) -> None:
        super().preflight()
        if not is_pickle(Path(self.file_path)):
            _require_text(Path(self.file_path))
        _require_model(self.tokenizer_name)


class TokenCountsSpec(PrepareSpec):
    """Count the occurrences of each id in a token store."""

    paths = ("data_file", "token_counts_dump")
    pipeline: Literal["prepare-token-counts"] = "prepare-token-counts"
    """Which pipeline runs the stages."""
    data_file: str
    """A store of ids; NAME.pickle, as the original script wrote it, means the store NAME."""
    token_counts_dump: str
    """The file to write: .npy, or .json; NAME.pickle means NAME.npy."""
    vocab_size: int | None = Field(None, ge=1)
    """Size of the model's vocabulary, if larger than the tokenizer's."""

    @property
    def target(self) -> Path:
        return counts_file(Path(self.token_counts_dump))

    @property
    def store(self) -> Path:
        return find_store(Path(self.data_file))

    def preflight(self) -> None:
        super().preflight()
        open_store(self.store)


class ExtractStudentSpec(PrepareSpec):
    """Extract a student from a teacher's layers."""

    paths = ("dump_checkpoint",)
    pipeline: Literal["prepare-extract-student"] = "prepare-extract-student"
    """Which pipeline runs the stages."""
    model_type: Family | None = None
    """bert, roberta or gpt2; null: the teacher's type."""
    model_name: str
    """The teacher: a hub id, a folder or a sample."""
    dump_checkpoint: str
    """The folder to write, in Hugging Face format; NAME.pth, as the original script wrote it, means the folder NAME."""
    layers: tuple[int, ...] | None = None
    """Which layers, counted from 0, in the student's order; null: half of them (of 12: 0, 2, 4, 7, 9, 11)."""
    vocab_transform: bool = True
    """Also copy the dense layer of the language head; false initializes it from the seed. GPT-2 has none."""

    @property
    def target(self) -> Path:
        """The original wrote a file NAME.pth; a model in Hugging Face format is a folder, NAME."""
        path = Path(self.dump_checkpoint)
        return path.with_suffix("") if path.suffix in (".pth", ".pt", ".bin") else path

    def preflight(self) -> None:
        super().preflight()
        _require_model(self.model_name)


class PrepareReviewsSpec(PrepareSpec):
    """Tokenize labeled reviews into splits that any framework can read."""

    paths = ("out_dir",)
    pipeline: Literal["prepare-reviews"] = "prepare-reviews"
    """Which pipeline runs the stages."""
    source: str = "fancyzhx/amazon_polarity"
    """A dataset on the hub, a CSV, JSONL or Parquet file, a folder, or `sample:reviews`."""
    subset: str = "all"
    """For sample:reviews: short, long or all; for a dataset on the hub: its configuration."""
    tokenizer: str = "bert-base-uncased"
    """Tokenizer: a hub id, a folder or `sample:minilm`."""
    max_length: int = Field(256, ge=8)
    """Longer reviews are truncated to this many tokens."""
    limit_train: int | None = Field(None, ge=1)
    """Maximum reviews to train on; null: all."""
    limit_eval: int | None = Field(None, ge=1)
    """Maximum reviews for validation, and for test; null: all."""
    class_names: tuple[str, ...] = ()
    """Names of the labels, lowest first; needed for numeric labels that do not start at 0."""
    batch_size: int = Field(1000, ge=1)
    """Reviews per call of the tokenizer; the result does not depend on it."""
    save_format: Literal["hf", "parquet", "jsonl", "pt"] = "hf"
    """A folder of Hugging Face datasets, or per split a Parquet or JSONL file or padded torch tensors (pt)."""
    out_dir: str = "data/reviews"
    """The folder to write."""

    @property
    def target(self) -> Path:
        return Path(self.out_dir)

    def preflight(self) -> None:
        super().preflight()
        check_columns(self.source, self.subset)
        sources.parse(self.tokenizer)


def _require_text(file: Path) -> None:
    if not file.is_file():
        raise NotFoundError(f"there is no file {file}", "`joulelab prepare dump` writes one from a corpus")
    if file.stat().st_size == 0:
        raise ConfigError(f"{file} is empty", "`joulelab prepare dump` writes one from a corpus")
    if file.suffix.lower() in _TABLES:
        raise ConfigError(f"{file} is not plain text", f"first: joulelab prepare dump {file} --dump_file dump.txt")


def _require_model(name: str) -> None:
    found = sources.parse(name)
    if found.kind == "sample" and sources.find_sample(found.name).kind == "labeled-text":
        raise ConfigError(f"{name} is text, not a model", "use sample:minilm or sample:smollm2")
