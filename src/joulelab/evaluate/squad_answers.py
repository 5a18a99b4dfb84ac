"""A model's answers to every question of a set: its scores over all windows, and the best texts found in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from joulelab.data.squad.questions import Question
from joulelab.data.squad.windows import SquadFeatures, iterate_in_order, model_inputs, takes_token_types
from joulelab.evaluate.squad_spans import Candidates, ScoredWindow, SearchLimits, find_candidates

Tick = Callable[[int, int], None]
Scores = NDArray[np.float32]
"""Start and end logit of every token of the set, in the order of its flat arrays."""


@torch.inference_mode()
def score_tokens(
    model: nn.Module, features: SquadFeatures, batch_size: int, device: torch.device, tick: Tick
) -> Scores:
    """Run the whole set; `tick(samples, tokens)` is told how far it is and may end it."""
    model.eval()
    types = takes_token_types(model)
    scores = np.empty((features.tokens_total, 2), dtype=np.float32)
    samples, tokens = 0, 0
    for rows, batch in iterate_in_order(features, batch_size):
        output = model(**model_inputs(batch.to(device), types))
        found = torch.stack([output.start_logits, output.end_logits], dim=-1).float().cpu().numpy()
        for place, row in enumerate(rows):
            part = features.span(int(row))
            scores[part] = found[place, : part.stop - part.start]
        samples, tokens = samples + batch.samples, tokens + batch.tokens
        tick(samples, tokens)
    return scores


def find_answers(
    features: SquadFeatures, questions: Sequence[Question], scores: Scores, limits: SearchLimits
) -> list[Candidates]:
    """One entry per question, in their order."""
    windows: list[list[ScoredWindow]] = [[] for _ in questions]
    for row, number in enumerate(features.question_of):
        part = features.span(row)
        window = ScoredWindow(
            scores[part, 0], scores[part, 1], features.characters[part], int(features.first_tokens[row])
        )
        windows[int(number)].append(window)
    return [find_candidates(seen, question.context, limits) for seen, question in zip(windows, questions, strict=True)]
