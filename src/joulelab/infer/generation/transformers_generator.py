"""Answers from a model in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from joulelab.data.chat.encoding import vocab_size_of
from joulelab.errors import ConfigError, OutOfMemory
from joulelab.infer.generation import beams
from joulelab.infer.generation.answers import Answer, Prompt
from joulelab.infer.generation.decoding import Draft, decode
from joulelab.infer.generation.key_values import FixedReader, GrowingReader, Reader, takes_fixed_shapes
from joulelab.infer.generation.prompts import cut_at_stop, encode_prompt, end_ids
from joulelab.infer.generation.settings import CacheKind, GenerationSettings
from joulelab.infer.generation.stops import StopTexts

# Capturing a step takes a second or two, and a step of a small model saves some 20 ms by it; rows that are done stay.
_FIXED_PAYS_FROM_STEPS = 200


class TransformersGenerator:
    """Batches are cut from the prompts in their order, so the same list gives the same batches after a resume."""

    energy_gap: str | None = None

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: GenerationSettings,
        *,
        identity: str,
        batch_size: int = 16,
        cache: CacheKind = "auto",
        whole: Sequence[Prompt] = (),
    ) -> None:
        """`model` stands on its device, in its precision; `batch_size` counts prompts.

        `whole`: all prompts of the work, where `generate` may get a part, after a resume or of a share: shapes are
        chosen for these, as numbers depend a little on them, and a part is to say what the whole would.
        """
        self.settings, self.identity, self.prompts_at_once = settings, identity, batch_size
        self._model, self._tokenizer, self._cache, self._whole = model, tokenizer, cache, whole
        self._device = next(model.parameters()).device
        self._end_ids = end_ids(model, tokenizer)
        self._words = vocab_size_of(tokenizer)
        self._stops = StopTexts(tokenizer, settings.stop)

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[list[Answer]]:
        encoded = [encode_prompt(self._tokenizer, prompt) for prompt in prompts]
        self._require_room(encoded)
        reader = self._reader([encode_prompt(self._tokenizer, prompt) for prompt in self._whole] or encoded)
        for start in range(0, len(encoded), self.prompts_at_once):
            batch = encoded[start : start + self.prompts_at_once]
            with self._still(), _explained(self.prompts_at_once):
                drafts = self._drafts(reader, batch)
            for number, prompt in enumerate(batch):
                own = drafts[number * self.settings.n : (number + 1) * self.settings.n]
                yield [self._answer(draft, len(prompt)) for draft in own]

    def _drafts(self, reader: Reader | None, batch: Sequence[Sequence[int]]) -> list[Draft]:
        if reader is None:
            return beams.search(self._model, batch, self.settings, self._end_ids, self._ends, self._device, self._words)
        return decode(reader, batch, self.settings, self._ends, self._device, self._words)

    def _reader(self, encoded: Sequence[Sequence[int]]) -> Reader | None:
        if self.settings.num_beams > 1:
            return None
        batches = -(-len(encoded) // self.prompts_at_once)
        pays = self._device.type == "cuda" and batches * self.settings.max_new_tokens >= _FIXED_PAYS_FROM_STEPS
        if self._cache == "growing" or (self._cache == "auto" and not (pays and takes_fixed_shapes(self._model))):
            return GrowingReader(self._model)
        if not takes_fixed_shapes(self._model):
            raise ConfigError(
                f"{type(self._model).__name__} does not attend to all that came before, so its cache has no fixed size",
                "use cache='growing'",
            )
        longest = max((len(prompt) for prompt in encoded), default=0) + self.settings.max_new_tokens
        rows = min(len(encoded), self.prompts_at_once) * self.settings.n
        return FixedReader(self._model, rows, longest, self._device)

    def _ends(self, ids: list[int]) -> bool:
        return ids[-1] in self._end_ids or self._stops.reached(ids)

    def _answer(self, draft: Draft, prompt_tokens: int) -> Answer:
        text = cut_at_stop(self._tokenizer.decode(draft.ids, skip_special_tokens=True), self.settings.stop)
        reason = draft.finish_reason or ("stop" if self._ends(draft.ids) else "length")
        return Answer(text, tuple(draft.ids), reason, len(draft.ids), draft.log_probability_sum, prompt_tokens)

    def _require_room(self, encoded: Sequence[Sequence[int]]) -> None:
        limit = getattr(self._model.config, "max_position_embeddings", None)
        longest = max((len(prompt) for prompt in encoded), default=0)
        if limit is not None and longest + self.settings.max_new_tokens > limit:
            raise ConfigError(
                f"a prompt of {longest} tokens and {self.settings.max_new_tokens} new ones do not fit into the "
                f"model's {limit} positions",
                "shorten the prompts or set max_new_tokens lower",
            )

    @contextmanager
    def _still(self) -> Iterator[None]:
        """Dropout off, and on again for whoever trains the model."""
        was_training = self._model.training
        self._model.eval()
        try:
            yield
        finally:
            self._model.train(was_training)


@contextmanager
def _explained(batch_size: int) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{batch_size} prompts at a time do not fit into the GPU's memory",
            "generate with a smaller batch, fewer answers per prompt or fewer new tokens",
        ) from error
