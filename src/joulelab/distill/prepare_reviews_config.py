"""Settings of `joulelab prepare reviews`; importable without torch, so a login node can check them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from joulelab.data import sources
from joulelab.data.text import check_source
from joulelab.distill.classify_config import require_frameworks
from joulelab.distill.prepare_config import PrepareSpec


class PrepareReviewsSpec(PrepareSpec):
    """Labelled reviews to tokenised parts that any framework reads."""

    paths = ("out_dir",)
    pipeline: Literal["prepare-reviews"] = "prepare-reviews"
    """Which pipeline runs the stages."""
    source: str = "fancyzhx/amazon_polarity"
    """A dataset on the hub, a CSV, JSONL or Parquet file, a folder, or `sample:reviews`."""
    subset: str = "all"
    """Of sample:reviews: short, long or all; of a dataset on the hub: its configuration."""
    tokenizer: str = "bert-base-uncased"
    """Whose tokens: a hub id, a folder or `sample:minilm`."""
    max_length: int = Field(256, ge=8)
    """Longer reviews are cut here, in tokens."""
    limit_train: int | None = Field(None, ge=1)
    """At most so many to train on; nothing: all."""
    limit_eval: int | None = Field(None, ge=1)
    """At most so many for validation, and for test; nothing: all."""
    class_names: tuple[str, ...] = ()
    """What the labels mean, lowest first; needed where they are numbers that do not begin at 0."""
    save_format: Literal["hf", "parquet", "jsonl"] = "hf"
    """A folder of Hugging Face datasets, or a Parquet or JSONL file per part."""
    out_dir: str = "data/reviews"
    """The folder to write."""

    @property
    def target(self) -> Path:
        return Path(self.out_dir)

    def preflight(self) -> None:
        super().preflight()
        require_frameworks()
        check_source(self.source, self.subset)
        sources.parse(self.tokenizer)
