"""Settings of the steps before a distillation; importable without torch, so a login node can check them.

The flags of the old scripts are the names of the settings, so that a command which worked there is understood here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from joulelab.data import samples, sources
from joulelab.data.masking import counts_file
from joulelab.data.splits import parse_split
from joulelab.data.text import DEFAULT_MIN_CHARS
from joulelab.data.token_store import find_store, open_store
from joulelab.data.tokenize import Family
from joulelab.errors import ConfigError, DependencyMissing, NotFoundError
from joulelab.runs.spec import RunSpec

_TABLES = (".jsonl", ".json", ".csv", ".parquet", ".gz")


class PrepareSpec(RunSpec):
    """What the steps have in common."""

    force: bool = False
    """Replace what an earlier run has written under the same name."""

    paths: ClassVar[tuple[str, ...]] = ()
    """The settings that name files or folders of the user's."""

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Paths in full, so that a run can be resumed from another folder."""
        named = {key: settings[key] for key in cls.paths if isinstance(settings.get(key), str) and settings[key]}
        full = {key: str(Path(value).expanduser().absolute()) for key, value in named.items()}
        return {"name": settings.get("pipeline", "prepare")} | dict(settings) | full

    @property
    def target(self) -> Path:
        """What is written for the user."""
        raise NotImplementedError

    def preflight(self) -> None:
        if self.target.exists() and not self.force:
            raise ConfigError(f"{self.target} exists already", "--force replaces it; or name another")


class DumpSpec(PrepareSpec):
    """A corpus to a file with one document per line."""

    paths = ("dump_file",)
    pipeline: Literal["prepare-dump"] = "prepare-dump"
    """Which pipeline runs the stages."""
    source: str
    """A file or folder (txt, jsonl, csv, parquet; also gzipped), `sample:reviews`, or a dataset on the hub."""
    split: str = "train"
    """Which documents, as Hugging Face datasets writes it: train, train[:1000], validation."""
    min_chars: int = Field(DEFAULT_MIN_CHARS, ge=0)
    """Shorter documents are dropped; characters are counted after whitespace is normalised."""
    max_chars: int | None = Field(None, ge=1)
    """Longer documents are dropped; null: none."""
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
        if found.kind == "sample" and samples.find(found.name).kind != "labeled-text":
            raise ConfigError(f"{self.source} is a model, not text", "use sample:reviews")


class BinarizeSpec(PrepareSpec):
    """A dump to a store of ids."""

    paths = ("file_path", "dump_file")
    pipeline: Literal["prepare-binarize"] = "prepare-binarize"
    """Which pipeline runs the stages."""
    file_path: str
    """A text file with one document per line."""
    tokenizer_type: Family | None = None
    """bert, roberta or gpt2: which special tokens stand around a document; null: what the tokenizer is."""
    tokenizer_name: str = "bert-base-uncased"
    """A hub id, a folder, `sample:minilm` or `sample:smollm2`."""
    dump_file: str
    """Beginning of the store's name; the tokenizer's name is put behind it, as the old script did."""
    workers: int | None = Field(None, ge=1)
    """Processes; null: one per core, or one for a small text. The bytes written are the same."""

    @property
    def target(self) -> Path:
        name = Path(self.tokenizer_name).name.replace(":", "-")
        return Path(f"{self.dump_file}.{name}")

    def preflight(self) -> None:
        super().preflight()
        _require("transformers", "tokenizers")
        _require_text(Path(self.file_path))
        _require_model(self.tokenizer_name)


class TokenCountsSpec(PrepareSpec):
    """How often each id occurs in a store."""

    paths = ("data_file", "token_counts_dump")
    pipeline: Literal["prepare-token-counts"] = "prepare-token-counts"
    """Which pipeline runs the stages."""
    data_file: str
    """A store of ids; NAME.pickle, as the old script wrote it, means the store NAME."""
    token_counts_dump: str
    """The file to write: .npy, or .json; NAME.pickle means NAME.npy."""
    vocab_size: int | None = Field(None, ge=1)
    """Ids the model has, where they are more than the tokenizer's."""

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
    """A student out of a teacher's layers."""

    paths = ("dump_checkpoint",)
    pipeline: Literal["prepare-extract-student"] = "prepare-extract-student"
    """Which pipeline runs the stages."""
    model_type: Family | None = None
    """bert, roberta or gpt2; null: what the teacher is."""
    model_name: str
    """The teacher: a hub id, a folder or a sample."""
    dump_checkpoint: str
    """The folder to write, in Hugging Face format."""
    layers: tuple[int, ...] | None = None
    """Which layers, counted from 0, in the student's order; null: half of them (of 12: 0, 2, 4, 7, 9, 11)."""
    vocab_transform: bool = True
    """Take the dense layer before the vocabulary too; false draws it from the seed. GPT-2 has none."""

    @property
    def target(self) -> Path:
        return Path(self.dump_checkpoint)

    def preflight(self) -> None:
        super().preflight()
        _require("torch", "transformers")
        _require_model(self.model_name)


def _require(*packages: str) -> None:
    absent = [name for name in packages if find_spec(name) is None]
    if absent:
        raise DependencyMissing(f"this step needs {' and '.join(absent)}", 'pip install "joulelab[train]"')


def _require_text(file: Path) -> None:
    if not file.is_file():
        raise NotFoundError(f"there is no file {file}", "`joulelab prepare dump` makes one out of a corpus")
    if file.stat().st_size == 0:
        raise ConfigError(f"{file} is empty", "`joulelab prepare dump` makes one out of a corpus")
    if file.suffix.lower() in _TABLES:
        raise ConfigError(f"{file} is not plain text", f"first: joulelab prepare dump {file} --dump_file dump.txt")


def _require_model(name: str) -> None:
    found = sources.parse(name)
    if found.kind == "sample" and samples.find(found.name).kind == "labeled-text":
        raise ConfigError(f"{name} is text, not a model", "use sample:minilm or sample:smollm2")
