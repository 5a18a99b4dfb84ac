"""One batch of prompts decoded token by token; every row ends on its own, and rows that are done cost nothing more.

Shapes: R rows, one for each answer of each prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from joulelab.infer.generation.answers import FinishReason
from joulelab.infer.generation.key_values import PaddedPrompts, Reader
from joulelab.infer.generation.sampling import choose, own_numbers
from joulelab.infer.generation.settings import GenerationSettings

Ends = Callable[[list[int]], bool]


@dataclass
class Draft:
    """An answer in the making."""

    ids: list[int] = field(default_factory=list)
    log_probability_sum: float = 0.0
    finish_reason: FinishReason | None = None

    def take(self, token: int, log_probability: float, ends: Ends, limit: int) -> None:
        self.ids.append(token)
        self.log_probability_sum += log_probability
        if ends(self.ids):
            self.finish_reason = "stop"
        elif len(self.ids) == limit:
            self.finish_reason = "length"


@torch.no_grad()
def decode(
    reader: Reader,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    ends: Ends,
    device: torch.device,
    words: int | None = None,
) -> list[Draft]:
    """Greedy or sampled, `settings.n` drafts for each prompt, in order. Rows of the vocabulary beyond `words` are
    padding, and no token."""
    drafts = [Draft() for _ in range(len(prompts) * settings.n)]
    numbers_SR = _numbers(prompts, settings, device)
    rows = list(range(len(drafts)))  # whose tokens the reader's rows are
    logits_RV = reader.begin(PaddedPrompts.of(prompts, device), settings.n)
    for step in range(settings.max_new_tokens):
        numbers_R = None if numbers_SR is None else numbers_SR[step, rows]
        tokens_R, logs_R = choose(logits_RV[:, :words], settings, numbers_R)
        for row, token, log_probability in zip(rows, tokens_R.tolist(), logs_R.tolist(), strict=True):
            if drafts[row].finish_reason is None:
                drafts[row].take(token, log_probability, ends, settings.max_new_tokens)
        going = [place for place, row in enumerate(rows) if drafts[row].finish_reason is None]
        if not going:
            break
        # leaving costs a copy of the rows that stay, so it waits until half of them are done
        if 2 * len(going) <= len(rows):
            kept_R = torch.tensor(going, device=device)
            if reader.keep(kept_R):
                rows, tokens_R = [rows[place] for place in going], tokens_R[kept_R]
        logits_RV = reader.step(tokens_R)
    return drafts


def _numbers(
    prompts: Sequence[Sequence[int]], settings: GenerationSettings, device: torch.device
) -> torch.Tensor | None:
    if not settings.do_sample:
        return None
    rows = [own_numbers(settings, prompt, answer) for prompt in prompts for answer in range(settings.n)]
    return torch.from_numpy(np.stack(rows, axis=1)).to(device)
