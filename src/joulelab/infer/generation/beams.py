"""Beam search by transformers' own engine, given left-padded prompts; what stands behind an answer's end is cut off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from joulelab.infer.generation.decoding import Draft, Ends
from joulelab.infer.generation.key_values import PaddedPrompts
from joulelab.infer.generation.settings import GenerationSettings


@torch.no_grad()
def search(
    model: Any,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    end_ids: Sequence[int],
    ends: Ends,
    device: torch.device,
    words: int,
) -> list[Draft]:
    """The `settings.n` best beams of each prompt, best first; of the vocabulary's first `words` rows."""
    padded = PaddedPrompts.of(prompts, device)
    begin = padded.ids_PT.shape[1]
    found = model.generate(
        input_ids=padded.ids_PT,
        attention_mask=padded.mask_PT,
        generation_config=_configuration(settings, end_ids, range(words, model.config.vocab_size)),
        stopping_criteria=[_stops(ends, begin)] if settings.stop else None,
    )
    told = model.compute_transition_scores(found.sequences, found.scores, found.beam_indices, normalize_logits=False)
    steps_used = (found.beam_indices >= 0).sum(-1).tolist()
    rows = zip(found.sequences[:, begin:].tolist(), told.tolist(), steps_used, strict=True)
    return [_draft(ids[:used], logs[:used], settings) for ids, logs, used in rows]


def _configuration(settings: GenerationSettings, end_ids: Sequence[int], padding: Sequence[int]) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        num_beams=settings.num_beams,
        num_return_sequences=settings.n,
        do_sample=False,
        eos_token_id=list(end_ids) or None,
        pad_token_id=end_ids[0] if end_ids else 0,
        suppress_tokens=list(padding) or None,
        return_dict_in_generate=True,
        output_scores=True,
    )


def _stops(ends: Ends, begin: int) -> Any:
    """Beam by beam; transformers' own stop texts do not work with every tokenizer."""

    def criteria(ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([ends(row[begin:]) for row in ids.tolist()], device=ids.device)

    return criteria


def _draft(ids: list[int], logs: list[float], settings: GenerationSettings) -> Draft:
    """A beam ends with its closing token or with a stop text; one that used all its tokens may have been cut off."""
    return Draft(ids, sum(logs), None if len(ids) == settings.max_new_tokens else "stop")
