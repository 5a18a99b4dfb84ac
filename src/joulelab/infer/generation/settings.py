"""How answers are decoded, as a user writes it; importable without torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from joulelab.runs.spec import Section

CacheKind = Literal["auto", "growing", "fixed"]


class GenerationSettings(Section):
    """Greedy unless sampling or beams are asked for. A setting that would change nothing is refused."""

    max_new_tokens: int = Field(256, ge=1)
    """Tokens an answer may have; one that is not finished by then ends with `finish_reason` length."""
    do_sample: bool = False
    """Draw each token from the model's distribution; false takes the likeliest one, or beams."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Of the distribution drawn from: below 1 sharper, above 1 flatter."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the likeliest tokens that together have this probability."""
    top_k: int = Field(0, ge=0)
    """Draw from this many likeliest tokens; 0: from all."""
    num_beams: int = Field(1, ge=1)
    """Beam search of this width; 1: none."""
    n: int = Field(1, ge=1)
    """Answers per prompt; more than one needs sampling, or as many beams."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, beside the model's own end of text; they do not become part of it."""
    seed: int = Field(0, ge=0)
    """Every draw is a function of this seed, the prompt and the answer's number: neither the batch nor a resume
    changes what is drawn."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for holds, reason in self._contradictions():
            if holds:
                raise ValueError(reason)
        return self

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        shaped = self.temperature != 1 or self.top_p != 1 or self.top_k != 0
        return (
            (shaped and not self.do_sample, "temperature, top_p and top_k change nothing without do_sample=true"),
            (self.do_sample and self.num_beams > 1, "do_sample with num_beams > 1: beams are searched, not drawn"),
            (
                self.n > 1 and not self.do_sample and self.num_beams < self.n,
                f"n={self.n} answers without sampling would all be the same; set do_sample=true or num_beams={self.n}",
            ),
            ("" in self.stop, "an empty stop text would end every answer before it begins"),
        )
