"""What every stage of the language-model pipelines uses: the run, its tokenizer, its teacher and its rows."""

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
from joulelab.infer.generation.completions import Prompt
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import RunContext
from joulelab.zoo.pretrained import load_causal_lm, load_tokenizer, weights_identity

Split = Literal["train", "validation", "test"]
TRAIN: Literal["train"] = "train"
VALIDATION: Literal["validation"] = "validation"
TEST: Literal["test"] = "test"


@dataclass(frozen=True)
class CausalContext:
    runner: Runner[CausalSpec]
    prompts: list[tuple[Prompt, str | None]] = field(default_factory=list)
    """Found once for the stages that generate, judge and filter: it takes a pass of the tokenizer over all texts."""
    unigram_losses: dict[str, float] = field(default_factory=dict)
    """Key of the data -> held-out loss of guessing by token frequency."""
    _loaded: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def run(self) -> RunContext:
        return self.runner.run

    @property
    def spec(self) -> CausalSpec:
        return self.runner.spec

    @property
    def device(self) -> torch.device:
        return self.runner.device

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
    def vocabulary(self) -> int:
        """Size of the tokenizer's vocabulary; a model's may be padded beyond it."""
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
        """On the device, frozen, with `hidden_only`. A loaded one is reused: loading takes time and energy."""
        name = self.spec.teacher.model
        if name not in self._loaded:
            model: nn.Module = load_causal_lm(name).to(self.device, self.teacher_precision)
            self._loaded[name] = expose_hidden_states(model.eval().requires_grad_(False))
        return self._loaded[name]

    def release_teacher(self) -> None:
        """Free its memory for the student's training."""
        self._loaded.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def documents(self, data: Artifact, split: Split) -> DocumentStore:
        return DocumentStore.open(data.folder / split)

    def rows(self, data: Artifact, split: Split) -> PackedRows:
        """Documents packed into rows; the same rows for every seed, so that a teacher's cache serves all students."""
        return pack(self.documents(data, split), self.spec.data.row_length, seed=0)
