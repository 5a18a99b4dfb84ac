"""Settings of text generation. Importable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from joulelab.runs.spec import Section

CacheKind = Literal["auto", "growing", "fixed"]
PADDED_PROMPTS = 32
"""Prompts in a batch that is padded and ends with its longest answer."""


class GenerationSettings(Section):
    """Greedy decoding unless sampling or beam search is enabled. Settings without effect are rejected."""

    max_new_tokens: int = Field(256, ge=1)
    """Maximum tokens per answer; one that is not finished by then has `finish_reason` length."""
    do_sample: bool = False
    """Sample each token from the model's distribution; false decodes greedily or with beams."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Softmax temperature: below 1 sharper, above 1 flatter."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: sample from the most likely tokens whose probabilities add up to this value."""
    top_k: int = Field(0, ge=0)
    """Sample from this many most likely tokens; 0: from all."""
    num_beams: int = Field(1, ge=1)
    """Width of the beam search; 1: no beam search."""
    n: int = Field(1, ge=1)
    """Answers per prompt; more than one requires sampling or at least as many beams."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, in addition to the model's end-of-text token; excluded from the answer."""
    seed: int = Field(0, ge=0)
    """Sampling depends only on this seed, the prompt and the answer's number, not on the batch or a resume."""

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        shaped = self.temperature != 1 or self.top_p != 1 or self.top_k != 0
        return (
            (shaped and not self.do_sample, "temperature, top_p and top_k have no effect without do_sample=true"),
            (self.do_sample and self.num_beams > 1, "do_sample cannot be combined with num_beams > 1"),
            (
                self.n > 1 and not self.do_sample and self.num_beams < self.n,
                f"n={self.n} answers without sampling would be identical; set do_sample=true or num_beams={self.n}",
            ),
            ("" in self.stop, "an empty stop text would end every answer before it begins"),
        )
