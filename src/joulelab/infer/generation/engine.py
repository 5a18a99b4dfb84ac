"""Generation with a model in this process: greedy, sampled, or beam search.

Greedy and sampled decoding is our own loop, because a resumed run must generate the same text as an uninterrupted one;
beam search is that of transformers. Every row ends on its own, and finished rows leave the batch if the cache allows
it.

Shapes: R rows, one per answer of each prompt; V vocabulary; S steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.data.chat.encoding import vocab_size_of
from joulelab.errors import ConfigError, OutOfMemory
from joulelab.infer.generation.cache import (
    CachedDecoder,
    GrowingCacheDecoder,
    PaddedPrompts,
)
from joulelab.infer.generation.completions import (
    Completion,
    FinishReason,
    Prompt,
    encode_prompts,
    end_ids,
    truncate_at_stop,
)
from joulelab.infer.generation.sampler import AnswerEnds, StopTexts, answer_random_numbers, sample_tokens
from joulelab.infer.generation.settings import PADDED_PROMPTS, CacheKind, GenerationSettings
from joulelab.infer.generation.static_decoder import (
    ENOUGH_ROWS,
    ModelSupport,
    Setup,
    StaticDecoder,
    check_model,
    compiling_pays,
    compiling_prompts_pays,
    rows_that_fit,
)
from joulelab.zoo.quantized_layers import quantization_of

StopCheck = Callable[[list[int]], bool]


@dataclass
class PartialCompletion:
    """An answer during decoding."""

    ids: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def append(self, token: int, log_probability: float, ends: StopCheck, limit: int) -> None:
        self.ids.append(token)
        self.log_probabilities.append(log_probability)
        if ends(self.ids):
            self.finish_reason = "stop"
        elif len(self.ids) == limit:
            self.finish_reason = "length"


@torch.no_grad()
def decode_batch(
    reader: CachedDecoder,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    ends: StopCheck,
    device: torch.device,
    words: int | None = None,
) -> list[PartialCompletion]:
    """Greedy or sampled decoding; `settings.n` completions per prompt, in order. Logits beyond the first `words` are
    padding of the vocabulary."""
    completions = [PartialCompletion() for _ in range(len(prompts) * settings.n)]
    numbers_RS = _random_numbers(prompts, settings)
    numbers_SR = None if numbers_RS is None else torch.from_numpy(numbers_RS.T.copy()).to(device)
    rows = list(range(len(completions)))  # completion of each row of the batch
    logits_RV = reader.begin(PaddedPrompts.of(prompts, device), settings.n)
    for step in range(settings.max_new_tokens):
        numbers_R = None if numbers_SR is None else numbers_SR[step, rows]
        tokens_R, logs_R = sample_tokens(logits_RV[:, :words], settings, numbers_R)
        for row, token, log_probability in zip(rows, tokens_R.tolist(), logs_R.tolist(), strict=True):
            if completions[row].finish_reason is None:
                completions[row].append(token, log_probability, ends, settings.max_new_tokens)
        active = [place for place, row in enumerate(rows) if completions[row].finish_reason is None]
        if not active:
            break
        # Dropping rows copies the cache of the others, so it waits until half of them are finished.
        if 2 * len(active) <= len(rows):
            kept_R = torch.tensor(active, device=device)
            if reader.keep(kept_R):
                rows, tokens_R = [rows[place] for place in active], tokens_R[kept_R]
        logits_RV = reader.step(tokens_R)
    return completions


def _random_numbers(prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> NDArray[np.float64] | None:
    """[R, S]."""
    if not settings.do_sample:
        return None
    return np.stack(
        [answer_random_numbers(settings, prompt, answer) for prompt in prompts for answer in range(settings.n)]
    )


@torch.no_grad()
def beam_search(
    model: Any,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    end_ids: Sequence[int],
    ends: StopCheck,
    device: torch.device,
    words: int,
) -> list[PartialCompletion]:
    """The `settings.n` best beams of each prompt, best first, over the first `words` tokens of the vocabulary."""
    padded = PaddedPrompts.of(prompts, device)
    begin = padded.ids_PT.shape[1]
    found = model.generate(
        input_ids=padded.ids_PT,
        attention_mask=padded.mask_PT,
        generation_config=_beam_config(settings, end_ids, range(words, model.config.vocab_size)),
        stopping_criteria=[_stopping_criteria(ends, begin)] if settings.stop else None,
    )
    scores = model.compute_transition_scores(found.sequences, found.scores, found.beam_indices, normalize_logits=False)
    steps_used = (found.beam_indices >= 0).sum(-1).tolist()
    rows = zip(found.sequences[:, begin:].tolist(), scores.tolist(), steps_used, strict=True)
    return [_beam_completion(ids[:used], logs[:used], settings) for ids, logs, used in rows]


def _beam_config(settings: GenerationSettings, end_ids: Sequence[int], padding: Sequence[int]) -> Any:
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


def _stopping_criteria(ends: StopCheck, begin: int) -> Any:
    """Stop texts per beam; those of transformers do not work with every tokenizer."""

    def criteria(ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([ends(row[begin:]) for row in ids.tolist()], device=ids.device)

    return criteria


def _beam_completion(ids: list[int], logs: list[float], settings: GenerationSettings) -> PartialCompletion:
    """A beam shorter than the limit ended with an end token or stop text; a full one may be truncated."""
    return PartialCompletion(ids, logs, None if len(ids) == settings.max_new_tokens else "stop")


# Capturing a step takes less than a second and saves about 30 ms per step of a small model.
_STATIC_CACHE_MIN_STEPS = 32


@dataclass
class _KeptDecoder:
    """What generators of one model share."""

    support: ModelSupport | None = None
    decoder: StaticDecoder | None = None


class TransformersGenerator:
    """Generator for a transformers model. Answers come in the order of the prompts."""

    energy_gap: str | None = None

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: GenerationSettings,
        *,
        identity: str,
        batch_size: int | None = None,
        cache: CacheKind = "auto",
        compile_step: bool | None = None,
        whole: Sequence[Prompt] = (),
        passes: float = 1.0,
        log_probabilities: bool = False,
        setup: Setup = lambda activity: nullcontext(),
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`model` is on its device, in its precision. `batch_size`: prompts that are answered at once. None: on a GPU
        as many as fit, for up to the number of answers beyond which a token takes no less energy; fewer where a batch
        ends with its longest answer. `compile_step` None: if that saves energy for the work at hand.
        `log_probabilities` keeps those of each token. Compilations and captures are inside of `setup(activity)`; `note`
        remarks for the user.

        Decoders are kept: a later call with prompts that fit reuses the captured steps, and reads the weights as they
        are then, so a model that is trained between calls generates with its new weights.

        `whole`: all prompts of the work, if `generate` gets a part of them (after a resume, or a shard). Shapes are
        chosen for these: floating-point results depend slightly on shapes, and a part must generate the same text.
        `passes`: how often they are answered, so that what pays over all of the work is compiled.
        """
        self.settings, self.identity, self.prompts_at_once = settings, identity, batch_size or PADDED_PROMPTS
        self._model, self._tokenizer, self._cache, self._passes = model, tokenizer, cache, passes
        self._whole = encode_prompts(tokenizer, whole)
        self._compile_step, self._setup, self._note = compile_step, setup, note
        self._log_probabilities = log_probabilities
        self._kept = _KeptDecoder()
        self._device = next(model.parameters()).device
        self._most_rows = self.prompts_at_once * settings.n
        if batch_size is None and self._device.type == "cuda":
            self._most_rows = ENOUGH_ROWS
        self._end_ids = end_ids(model, tokenizer)
        self._words = vocab_size_of(tokenizer)
        self._stops = StopTexts(tokenizer, settings.stop)
        self._answer_ends = AnswerEnds(self._end_ids, self._stops)

    def renewed(self, seed: int, identity: str) -> TransformersGenerator:
        """The same for other random numbers or changed weights; both share decoder, compiled layers and graphs."""
        other = copy.copy(self)
        other.settings, other.identity = self.settings.model_copy(update={"seed": seed}), identity
        return other

    def release_decoder(self) -> None:
        """Free the memory of its cache; the next call makes another."""
        self._kept.decoder = None

    @property
    def cache_bytes(self) -> int:
        """Size of the cache of the decoder that is kept; 0 if there is none."""
        return 0 if self._kept.decoder is None else self._kept.decoder.cache_bytes

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[list[Completion]]:
        encoded = encode_prompts(self._tokenizer, prompts)
        longest = max((len(prompt) for prompt in encoded), default=0)
        require_positions(self._model.config, longest, self.settings.max_new_tokens)
        with _explain_out_of_memory(longest, self.settings):
            reader = self._reader(self._whole or encoded)
            if isinstance(reader, StaticDecoder):
                found = self._decode_static(reader, encoded)
            else:
                found = self._decode(reader, encoded)
            for prompt, completions in zip(encoded, found, strict=True):
                yield [self._to_completion(completion, len(prompt)) for completion in completions]

    def _decode(
        self, reader: CachedDecoder | None, encoded: Sequence[Sequence[int]]
    ) -> Iterator[list[PartialCompletion]]:
        n = self.settings.n
        for start in range(0, len(encoded), self.prompts_at_once):
            batch = encoded[start : start + self.prompts_at_once]
            with self._eval_mode():
                if reader is not None:
                    found = decode_batch(reader, batch, self.settings, self._ends, self._device, self._words)
                else:
                    found = beam_search(
                        self._model, batch, self.settings, self._end_ids, self._ends, self._device, self._words
                    )
            yield from (found[place * n : (place + 1) * n] for place in range(len(batch)))

    def _decode_static(
        self, decoder: StaticDecoder, encoded: Sequence[Sequence[int]]
    ) -> Iterator[list[PartialCompletion]]:
        """In the order of the prompts; an answer waits for those before it."""
        settings = self.settings
        n, limit = settings.n, settings.max_new_tokens

        def numbers(prompt: int, answer: int) -> NDArray[np.float64]:
            return answer_random_numbers(settings, encoded[prompt], answer)

        ended: dict[int, PartialCompletion] = {}
        given = 0
        for number, tokens, logs in decoder.decode(encoded, numbers if settings.do_sample else None, self._answer_ends):
            reason: FinishReason | None = None if len(tokens) == limit else "stop"
            ended[number] = PartialCompletion(tokens.tolist(), logs.tolist(), reason)
            while all(place in ended for place in range(given, given + n)):
                yield [ended.pop(place) for place in range(given, given + n)]
                given += n

    def _reader(self, encoded: Sequence[Sequence[int]]) -> CachedDecoder | StaticDecoder | None:
        """For these prompts; None: beam search, which has its own cache."""
        if self.settings.num_beams > 1:
            return None
        n, new_tokens = self.settings.n, self.settings.max_new_tokens
        tokens = max((len(prompt) for prompt in encoded), default=0) + new_tokens
        on_gpu, answers = self._device.type == "cuda", len(encoded) * n
        kept = self._kept.decoder
        if kept is not None and tokens <= kept.tokens and self._rows(answers) <= kept.capacity:
            return kept
        self._kept.decoder = kept = None  # frees its cache before the next one is allocated
        if on_gpu and self._cache != "growing":
            self._fit_into_memory(tokens)
        batches = math.ceil(self._passes * math.ceil(len(encoded) / self.prompts_at_once))
        is_long = new_tokens * batches >= _STATIC_CACHE_MIN_STEPS
        if self._cache == "growing" or (self._cache == "auto" and not (on_gpu and is_long)):
            return GrowingCacheDecoder(self._model)
        support = self._supported()
        if not support.slots:
            return GrowingCacheDecoder(self._model)
        if support.fused is not None:
            self._fit_into_memory(tokens)  # again: joined weights are copies
        rows = self._rows(answers)
        steps = new_tokens * math.ceil(self._passes * math.ceil(answers / max(1, rows)))
        compile_step = self._compile_step
        if compile_step is None:  # what compiling saves was measured without quantized layers
            compile_step = quantization_of(self._model) is None and compiling_pays(rows, steps)
        prompt_tokens = round(self._passes * sum(map(len, encoded)))
        self._kept.decoder = StaticDecoder(
            self._model,
            rows,
            tokens,
            self.settings,
            words=self._words,
            prompts=round(self._passes * len(encoded)),
            compile_step=compile_step and on_gpu,
            compile_prompts=compile_step and on_gpu and compiling_prompts_pays(self._model, prompt_tokens),
            fused=support.fused,
            setup=self._setup,
            note=self._note,
        )
        return self._kept.decoder

    def _fit_into_memory(self, tokens: int) -> None:
        torch.cuda.empty_cache()  # what only torch's allocator holds is free, too
        fit = rows_that_fit(self._model, tokens)
        self._most_rows = min(self._most_rows, fit)
        self.prompts_at_once = max(1, min(self.prompts_at_once, fit // self.settings.n))

    def _rows(self, answers: int) -> int:
        n = self.settings.n
        return min(answers, max(1, self._most_rows // n) * n)

    def _supported(self) -> ModelSupport:
        """Checked once: that takes several forward passes."""
        if self._kept.support is None:
            with self._setup("capture"), self._eval_mode():
                self._kept.support = check_model(self._model)
            if not self._kept.support.slots:
                name, problem = type(self._model).__name__, self._kept.support.problem
                text = f"{name} {problem}, so it cannot use a cache of fixed size"
                if self._cache == "fixed":
                    raise ConfigError(text, "use cache='growing'")
                self._note(f"{text}; it generates with a cache that grows, which takes more time and energy on a GPU")
        return self._kept.support

    def _ends(self, ids: list[int]) -> bool:
        return ids[-1] in self._end_ids or self._stops.reached(ids)

    def _to_completion(self, completion: PartialCompletion, prompt_tokens: int) -> Completion:
        text = truncate_at_stop(self._tokenizer.decode(completion.ids, skip_special_tokens=True), self.settings.stop)
        reason = completion.finish_reason or ("stop" if self._ends(completion.ids) else "length")
        logs = completion.log_probabilities
        return Completion(
            text, tuple(completion.ids), reason, len(completion.ids), math.fsum(logs), prompt_tokens,
            log_probabilities=tuple(logs) if self._log_probabilities else (),
        )  # fmt: skip

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Evaluation mode; restores the training mode afterwards."""
        was_training = self._model.training
        self._model.eval()
        try:
            yield
        finally:
            self._model.train(was_training)


def require_positions(config: Any, longest: int, new_tokens: int) -> None:
    """Refuse prompts that do not fit into the model with their answers."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and longest + new_tokens > limit:
        raise ConfigError(
            f"a prompt of {longest} tokens and {new_tokens} new ones do not fit into the model's {limit} positions",
            "shorten the prompts or lower max_new_tokens",
        )


@contextmanager
def _explain_out_of_memory(longest: int, settings: GenerationSettings) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemory(
            f"generation ran out of GPU memory: prompts of up to {longest} tokens, {settings.n} answers each of up to "
            f"{settings.max_new_tokens} tokens",
            "use a smaller batch (generation.batch_size), fewer answers per prompt or fewer new tokens",
        ) from error
