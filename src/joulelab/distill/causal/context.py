"""What every stage of the language-model pipelines works with: the run, its settings, tokenizer, device, data."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from joulelab.data.chat.encoding import DocumentStore, tokenizer_sha256, vocab_size_of
from joulelab.data.chat.packing import PackedRows, pack
from joulelab.data.chat.templates import read_template
from joulelab.distill.causal.config import CausalSpec
from joulelab.distill.causal.models import expose_hidden_states
from joulelab.distill.runner import Runner
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import Prompt
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import RunContext
from joulelab.runs.sharding import Shard
from joulelab.train.devices import resolve_device
from joulelab.train.parallel import SINGLE_RANK, Ranks
from joulelab.zoo.pretrained import load_causal_lm, load_tokenizer, weights_identity

Split = Literal["train", "test"]
TRAIN: Literal["train"] = "train"
TEST: Literal["test"] = "test"


@dataclass(frozen=True)
class CausalContext:
    run: RunContext
    spec: CausalSpec
    ranks: Ranks = SINGLE_RANK
    prompts: list[tuple[Prompt, str | None]] = field(default_factory=list)
    """Found once for the stages that generate, judge and choose: all texts go through the tokenizer for it."""
    guessing: dict[str, float] = field(default_factory=dict)
    """Key of the data -> what guessing by word frequency loses on its held-out tokens."""
    _loaded: dict[str, nn.Module] = field(default_factory=dict)

    @cached_property
    def runner(self) -> Runner[CausalSpec]:
        return Runner(self.run, self.ranks)

    @cached_property
    def device(self) -> torch.device:
        return resolve_device(self.spec.device, self.run)

    @cached_property
    def tokenizer(self) -> Any:
        tokenizer, template = load_tokenizer(self.spec.tokenizer), self.spec.data.template
        if template is not None:  # the student is saved with it
            tokenizer.chat_template = read_template(Path(template))
        return tokenizer

    @cached_property
    def tokenizer_identity(self) -> str:
        return tokenizer_sha256(self.tokenizer)

    @cached_property
    def words(self) -> int:
        """Of the tokenizer; a model's vocabulary may be padded beyond."""
        return vocab_size_of(self.tokenizer)

    @cached_property
    def teacher_identity(self) -> str:
        return weights_identity(self.spec.teacher.model)

    @property
    def teacher_precision(self) -> torch.dtype:
        chosen = self.spec.teacher.precision
        half = chosen == "bf16" or (chosen == "auto" and self.device.type == "cuda")
        return torch.bfloat16 if half else torch.float32

    def load_teacher(self) -> nn.Module:
        """On the device, frozen, opened for losses; it must read the same tokens as the student. One that is there
        already is not read again: that takes time and joules."""
        name = self.spec.teacher.model
        if name not in self._loaded:
            self._require_its_words()
            model: nn.Module = load_causal_lm(name).to(self.device, self.teacher_precision)
            self._loaded[name] = expose_hidden_states(model.eval().requires_grad_(False))
        return self._loaded[name]

    def release_teacher(self) -> None:
        """Its memory is the student's while that is trained."""
        self._loaded.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _require_its_words(self) -> None:
        name = self.spec.teacher.model
        if name != self.spec.tokenizer and tokenizer_sha256(load_tokenizer(name)) != self.tokenizer_identity:
            if load_tokenizer(name).get_vocab() == self.tokenizer.get_vocab():
                return  # another template or normaliser, and the same ids
            raise ConfigError(
                f"{self.spec.tokenizer} and the teacher {name} have different tokenizers: the same id is another word",
                "name a teacher and a student of one family, or draw a student with student.size",
            )

    @property
    def share(self) -> Shard | None:
        """Of the teacher's work, where this run does only a share."""
        return None if self.spec.shard is None else Shard.parse(self.spec.shard)

    def documents(self, data: Artifact, split: Split) -> DocumentStore:
        return DocumentStore.open(data.folder / split)

    def rows(self, data: Artifact, split: Split) -> PackedRows:
        """Documents packed into rows; the same rows for every seed, so that a teacher's cache serves all students."""
        return pack(self.documents(data, split), self.spec.data.row_length, seed=0)

    def kept_work(self, name: str) -> Path:
        """A folder that outlives an interrupted attempt, for stages that go on where they stopped."""
        folder = self.run.paths.checkpoints / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder
