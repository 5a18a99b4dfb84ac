"""What a student can learn from, as settings: distributions, answers, preferences; importable without torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from joulelab.distill.logit_cache.codecs import codec_named
from joulelab.distill.logit_cache.manifest import refuse_use
from joulelab.errors import JoulelabError
from joulelab.infer.generation.settings import CacheKind, GenerationSettings
from joulelab.runs.spec import Section


class Distillation(Section):
    """loss = alpha CE + (1 - alpha) T^2 KL, over the positions that are trained on."""

    alpha: float = Field(0.5, ge=0, le=1)
    """Weight of the data's own tokens; 0 listens to the teacher alone. In `self`, 1 is plain further training."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Of the teacher's and the student's distributions."""
    teacher: Literal["cached", "live"] = "cached"
    """Let the teacher answer once for all epochs and students, or anew in every step."""
    codec: str = "rs50"
    """How its distributions are kept: rs50 (50 draws, unbiased, some 40 bytes a token), hybrid32 (the 32 likeliest and
    draws from the rest), topkK-renorm, -ghost or -gold (the K likeliest, biased), hidden (exact, large)."""
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    """Which divergence; all but forward need exact distributions: codec hidden, or a live teacher."""
    begin_anew: bool = False
    """In `self`: draw a new student, and let the SFT student be its teacher alone; else it goes on from there."""

    @property
    def loss_name(self) -> str:
        """`CE + KL`, with the terms that have a weight."""
        said = {"forward": "KL", "reverse": "reverse KL", "jsd": "JSD"}[self.divergence]
        return " + ".join(["CE"] * (self.alpha > 0) + [said] * (self.alpha < 1))

    @property
    def kept_temperature(self) -> float:
        """Of what a cache keeps; hidden states have none, so that one cache of them serves all temperatures."""
        return 1.0 if codec_named(self.codec).is_exact else self.temperature

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        try:
            codec_named(self.codec)
            if self.teacher == "cached":
                refuse_use(self.codec, self.temperature, self.temperature, self.divergence)
        except JoulelabError as error:
            raise ValueError(f"{error.message}; {error.hint}") from None
        return self


class Generation(Section):
    """Prompts, how they are answered, and which answers are kept."""

    prompts: int = Field(1000, ge=1)
    """Prompts that are answered, taken from the training documents."""
    prompt_tokens: int = Field(256, ge=1)
    """Longer prompts are left out; of a plain text, so many tokens are its prompt."""
    answer: GenerationSettings = GenerationSettings()
    """How answers are decoded; `n` of them to each prompt. Its seed is its own, so that all students share them."""
    cache: CacheKind = "auto"
    """What the teacher keeps of what it has read. `growing`: rows that are done leave the batch. `fixed`: one size for
    all steps, captured as a CUDA graph; quicker for a small teacher, and it may take more joules. `auto`: `fixed` on a
    GPU where there are steps enough."""
    chain_of_thought: bool = False
    """Ask for the reasoning before the answer."""
    min_tokens: int = Field(4, ge=0)
    """Shorter answers are dropped, and counted."""
    max_tokens: int | None = Field(None, ge=1)
    """Longer answers are dropped, and counted."""
    keep_truncated: bool = False
    """Keep answers that were cut at max_new_tokens. Without it they are dropped and counted: they end nowhere."""
    keep_duplicates: bool = False
    """Keep answers whose words were said before."""
    min_score: float | None = Field(None, allow_inf_nan=False)
    """Drop answers that the judge of `preferences` scores below this."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"answers of at least {self.min_tokens} and at most {self.max_tokens} tokens do not exist")
        if self.cache != "auto" and self.answer.num_beams > 1:
            raise ValueError("generation.cache changes nothing with num_beams > 1: beams have a cache of their own")
        return self


class Preferences(Section):
    """Pairs of a better and a worse answer, and the loss that prefers the better one."""

    candidates_from: Literal["teacher", "start"] = "teacher"
    """Who writes the answers: the teacher, or the SFT student that training starts from."""
    judge: Literal["likelihood", "rubric", "rule"] = "likelihood"
    """By the teacher's mean log-likelihood a token, by its grade on a rubric, or by a rule."""
    rubric: str = "Grade the answer: is it correct, complete and to the point? 1 is useless, 5 is excellent."
    """What a judging model is asked."""
    rule: Literal["ends", "exact-answer"] = "ends"
    """Answers that came to their end are better than those cut off; or: those with the data's own final answer are."""
    tie_margin: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Answers whose scores differ by no more than this make no pair; ties are counted."""
    loss: Literal["dpo", "ipo", "ipo-sum", "length-normalised"] = "dpo"
    """DPO; IPO, whose margin is bounded, over mean log-ratios per token as in TRL, or over their sums as in the paper
    (`ipo-sum`); or DPO over mean log-ratios per token."""
    beta: float = Field(0.1, gt=0, allow_inf_nan=False)
    """How far the policy may leave its reference: small is far."""
    shared_prompt: bool = True
    """Compute the prompt of a pair once for both answers; false is for models whose attention takes no mask of ours."""

    @property
    def loss_name(self) -> str:
        return {"dpo": "DPO", "ipo": "IPO", "ipo-sum": "IPO over sums", "length-normalised": "length-normalised DPO"}[
            self.loss
        ]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.rubric.strip():
            raise ValueError("rubric: it is empty; write what makes an answer good")
        return self
