"""Continuous batching for `joulelab serve`: requests enter and leave the running batch between two decoding steps.

Every request has a slot of the engine's cache (`generation.static_decoder`), filled from position 0. A step reads one
token of every slot up to the highest one in use, so a request that arrives waits for the current step and not for the
current answers. On a GPU the step is compiled, with the joined layers of the decoder, and captured as a CUDA graph for
each batch size that is a power of two: a server runs long enough for that to save energy. Reading prompts is captured
for a few sizes, because the running requests wait for it. Slots without a request compute a token that is discarded:
cheaper than moving the others, because reading the weights takes most of the time.

One thread owns the model. Other threads submit requests and receive tokens through queues. On a GPU the host works on
the tokens of a step while the device computes the next one, so a finished request takes part in one step too many. With
many requests, tokens are handed over several at a time: waking a thread for every token of every request takes longer
than a step of a small model.

Shapes: P prompts, R rows of the batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.data.chat.encoding import vocab_size_of
from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.generation.completions import end_ids
from joulelab.infer.generation.sampler import StopTexts, answer_random_numbers, sample_tokens
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.infer.generation.static_decoder import (
    PromptReader,
    SlotCache,
    capture_if_possible,
    check_model,
    compile_layer,
    compiled_layers,
    decode_attention,
)
from joulelab.infer.recipes import capture_cuda_graph
from joulelab.zoo.quantized_layers import quantization_of

# Prompt tokens that are read in one call, padding included: the running requests wait for it.
_PROMPT_TOKENS_AT_ONCE = 8_192
# Prompts that are read together: most arrive alone, many at the start of a load.
_PROMPT_GROUPS = (16, 4, 1)
# Requests for which every token is handed over by itself; twice as many get two at a time.
_SINGLE_TOKEN_REQUESTS = 16
_START_TIMEOUT_S = 900.0


class ServerBusy(JoulelabError):
    """As many requests wait as are accepted."""


class _ServedSlots(SlotCache):
    """On a CPU attention goes over all positions that it gets, so decoding gets only those in use."""

    positions_in_use: int | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        end = self.positions_in_use
        return (keys, values) if end is None else (keys[:, :end], values[:, :end])


class SlotBatch:
    """The model with a cache of `slots` slots: read prompts into slots, then one token of every row per step."""

    def __init__(self, model: Any, slots: int, tokens: int, words: int, compile_step: bool = False) -> None:
        """`tokens`: positions of a slot. Logits beyond the first `words` are padding of the vocabulary."""
        self._device = next(model.parameters()).device
        self._model, self._words, self.slots, self.tokens = model, words, slots, tokens
        self._cache = _ServedSlots(slots, tokens, self._device)
        self._token_R = torch.zeros(slots, dtype=torch.long, device=self._device)
        self._numbers_RT: Tensor | None = None
        self._places = [0] * slots
        self._graphs: dict[int, Callable[[], Tensor]] = {}
        self._prompts = PromptReader(
            model, self._cache, self._prompt_groups, capture=self._captured_prompts if self.is_asynchronous else None
        )
        self._compile_step = compile_step
        self.note = ""
        """For the user, after the warm-up; empty if all went well."""

    def read(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        """Fill slots with prompts without their last tokens, which the next step reads."""
        self._cache.positions_in_use = None
        self._prompts.read(prompts, np.array(slots)[:, None])
        where = torch.tensor(list(slots), device=self._device)
        self._token_R[where] = torch.tensor([prompt[-1] for prompt in prompts], device=self._device)
        self._move(slots, [len(prompt) - 1 for prompt in prompts])

    def _prompt_groups(self, length: int) -> list[int]:
        most = max(1, min(self.slots, _PROMPT_TOKENS_AT_ONCE // length))
        return [size for size in _PROMPT_GROUPS if size <= most]

    def release(self, slot: int) -> None:
        """A free slot below others stays in the batch; at position 0 it attends to one token."""
        self._places[slot] = 0
        self._cache.places_R[slot].zero_()

    def set_random_numbers(self, slot: int, prompt_tokens: int, numbers: NDArray[np.float64]) -> None:
        """For the tokens after a prompt, by the position of the token before: a step finds them on the device."""
        if self._numbers_RT is None:
            self._numbers_RT = torch.zeros(self.slots, self.tokens, dtype=torch.float64, device=self._device)
        begin = prompt_tokens - 1
        self._numbers_RT[slot, begin : begin + len(numbers)] = torch.from_numpy(numbers).to(self._device)

    def slot_index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(list(slots), device=self._device)

    def sample(self, slots_S: Tensor, logits_RV: Tensor, settings: GenerationSettings) -> None:
        """After a step: replace the most likely tokens of these slots by sampled ones."""
        assert self._numbers_RT is not None
        numbers_S = self._numbers_RT[slots_S, self._cache.places_R[slots_S] - 1]
        self._token_R[slots_S], _ = sample_tokens(logits_RV[slots_S], settings, numbers_S)

    @property
    def is_asynchronous(self) -> bool:
        return bool(self._device.type == "cuda")

    def read_tokens(self, rows: int) -> Callable[[], list[int]]:
        """The next tokens of the first `rows` slots, for the host: the returned function waits for them."""
        tokens_R = self._token_R[:rows]
        if not self.is_asynchronous:
            found: list[int] = tokens_R.tolist()
            return lambda: found
        copied = torch.empty(rows, dtype=torch.long, pin_memory=True)
        copied.copy_(tokens_R, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

        def wait() -> list[int]:
            event.synchronize()
            return copied.tolist()

        return wait

    def step(self, rows: int) -> Tensor:
        """The most likely next token of the first `rows` slots is their next input; returns the logits."""
        if self._device.type == "cuda":
            logits_RV = self._graph(rows)()
        else:
            self._cache.positions_in_use = max(self._places[:rows]) + 1
            logits_RV = self._forward(rows)
        self._places[:rows] = [min(place + 1, self.tokens - 1) for place in self._places[:rows]]
        return logits_RV[:rows]

    def warm_up(self) -> None:
        """Allocate the cache and capture the graphs before the first request."""
        self._prompts.allocate()
        if self.is_asynchronous:
            for length in sorted({self._prompts.length(range(count)) for count in range(2, self.tokens + 1)}):
                for group in self._prompt_groups(length):
                    self.read([[0] * min(length + 1, self.tokens)] * group, range(group))
        rows = self.slots
        while rows:
            self.step(rows)
            rows //= 2
        for slot in range(self.slots):
            self.release(slot)

    def _move(self, slots: Sequence[int], places: Sequence[int]) -> None:
        for slot, place in zip(slots, places, strict=True):
            self._places[slot] = place
        self._cache.places_R[torch.tensor(list(slots), device=self._device)] = torch.tensor(
            list(places), device=self._device
        )

    def _graph(self, rows: int) -> Callable[[], Tensor]:
        size = 1
        while size < rows:
            size *= 2
        size = min(size, self.slots)
        if size not in self._graphs:
            # The calls before the capture are steps that move places and tokens, which are restored.
            before = self._token_R.clone(), self._cache.places_R.clone()
            self._prompts.allocate()  # a graph must not own the cache
            self._graphs[size] = self._captured(size)
            self._token_R.copy_(before[0])
            self._cache.places_R.copy_(before[1])
        return self._graphs[size]

    def _captured(self, rows: int) -> Callable[[], Tensor]:
        if self._compile_step:
            try:
                layer = compile_layer(self._model, ("serve", self.slots, self.tokens))
                with compiled_layers(self._model, self._cache.slots, layer):
                    return capture_cuda_graph(partial(self._forward, rows))
            except (RuntimeError, ImportError) as error:  # no C compiler, a layer that the compiler does not take
                self._compile_step = False
                reason = (str(error) or type(error).__name__).splitlines()[0][:120]
                self._keep_note(f"the model is not compiled, so that a token takes more time and energy: {reason}")
        step = partial(self._forward, rows)
        return capture_if_possible(self._model, step, self._keep_note) or step

    def _captured_prompts(self, read: Callable[[], None]) -> Callable[[], Any]:
        graph = capture_if_possible(self._model, read, self._keep_note)
        if graph is None:
            read()  # otherwise the calls before the capture have done it
        return graph or read

    def _keep_note(self, text: str) -> None:
        self.note = text

    def _forward(self, rows: int) -> Tensor:
        places_R = self._cache.places_R[:rows]
        logits_RV: Tensor = self._model(
            input_ids=self._token_R[:rows, None],
            attention_mask=(places_R + 1).int().view(-1, 1, 1, 1),
            position_ids=places_R[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1, : self._words]
        self._token_R[:rows].copy_(logits_RV.argmax(-1))
        places_R.add_(1).clamp_(max=self.tokens - 1)
        return logits_RV


@dataclass(eq=False)
class ServedRequest:
    """One answer to one prompt. `events` gets lists of tokens, then a finish reason or an error."""

    ids: Sequence[int]
    settings: GenerationSettings
    number: int = 0
    """Number among the answers to one prompt; answers with different numbers differ."""
    ignore_eos: bool = False
    events: queue.SimpleQueue[list[int] | str | JoulelabError] = field(default_factory=queue.SimpleQueue)
    cancelled: bool = False
    answer: list[int] = field(default_factory=list)
    handed_over: int = 0
    """Tokens of the answer that were put into `events`."""

    def hand_over(self) -> None:
        self.events.put(self.answer[self.handed_over :])
        self.handed_over = len(self.answer)


@dataclass(frozen=True)
class _LaunchedStep:
    requests: Sequence[tuple[int, ServedRequest]]
    """(slot, request)"""
    tokens: Callable[[], list[int]]


class BatchEngine:
    """Runs the batch in a thread: `submit` from any thread, `close` at the end."""

    def __init__(self, model: Any, tokenizer: Any, *, slots: int, context: int, max_waiting: int = 256) -> None:
        """`context`: prompt and answer of a request in tokens."""
        support = check_model(model)
        if not support.slots:
            raise ConfigError(
                f"{type(model).__name__} {support.problem}, so `joulelab serve` cannot serve it",
                "serve it with vLLM or SGLang and measure that server: joulelab infer --server URL",
            )
        self.tokenizer, self.context, self.slots, self.max_waiting = tokenizer, context, slots, max_waiting
        self._model, self.vocabulary, self._end_ids = (
            model,
            vocab_size_of(tokenizer),
            frozenset(end_ids(model, tokenizer)),
        )
        on_gpu = next(model.parameters()).is_cuda
        # Kernels of a quantization library are not compiled.
        self._batch = SlotBatch(
            model, slots, context, self.vocabulary, compile_step=on_gpu and quantization_of(model) is None
        )
        self._fused = support.fused
        self._running: dict[int, ServedRequest] = {}
        self._stops: dict[int, StopTexts] = {}
        self._sampling: list[tuple[GenerationSettings, Tensor]] | None = []
        self._launched: _LaunchedStep | None = None
        self._waiting: deque[ServedRequest] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._failure: JoulelabError | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._work, name="joulelab-batch", daemon=True)

    def start(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Returns when the first request can be answered without further setup."""
        self._thread.start()
        if not self._ready.wait(timeout_s):
            raise JoulelabError(
                f"the model was not ready after {timeout_s:g} s of warm-up",
                "try a smaller --batch-size or --context; on a GPU, check with nvidia-smi that it responds",
            )
        if self._failure is not None:
            raise self._failure

    @property
    def note(self) -> str:
        return self._batch.note

    @property
    def load(self) -> tuple[int, int]:
        """Requests that are running, and waiting."""
        return len(self._running), len(self._waiting)

    def submit(self, requests: Sequence[ServedRequest]) -> None:
        """All of them or none."""
        with self._changed:
            if self._closing or self._failure is not None:
                raise self._failure or ServerBusy("the server is shutting down")
            if len(self._waiting) + len(requests) > self.max_waiting:
                raise ServerBusy(f"{len(self._waiting)} requests wait already; the limit is {self.max_waiting}")
            self._waiting.extend(requests)
            self._changed.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """End requests that are not finished with an error, then the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    @torch.no_grad()
    def _work(self) -> None:
        try:
            with decode_attention(self._model), self._fused.applied() if self._fused else nullcontext():
                self._batch.warm_up()
                self._ready.set()
                while self._admit():
                    self._step()
        except Exception as error:  # every client must get an answer, whatever happened
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else 'no message'}"
            self._failure = JoulelabError(f"generation failed: {reason}", "restart the server with a smaller batch")
        finally:
            self._ready.set()
            with self._changed:
                ended = self._failure or ServerBusy("the server is shutting down")
                for request in [*self._running.values(), *self._waiting]:
                    request.events.put(ended)
                self._running.clear()
                self._waiting.clear()

    def _admit(self) -> bool:
        """Move waiting requests into free slots, lowest first; block while there is nothing to do."""
        for slot in [slot for slot, request in self._running.items() if request.cancelled]:
            self._remove(slot)
        with self._changed:
            while not self._running and not self._waiting and not self._closing:
                self._changed.wait()
            if self._closing:
                return False
            free = [slot for slot in range(self.slots) if slot not in self._running]
            admitted: dict[int, ServedRequest] = {}
            while free and self._waiting:
                request = self._waiting.popleft()
                if not request.cancelled:
                    admitted[free.pop(0)] = request
            self._running |= admitted
        for slot, request in admitted.items():
            self._stops[slot] = StopTexts(self.tokenizer, request.settings.stop)
            if request.settings.do_sample:
                # Derived from seed and prompt only, so they do not depend on the batch.
                numbers = answer_random_numbers(request.settings, request.ids, request.number)
                self._batch.set_random_numbers(slot, len(request.ids), numbers)
        if admitted:
            self._sampling = None
            self._batch.read([request.ids for request in admitted.values()], list(admitted))
        return True

    def _step(self) -> None:
        launched = self._launch() if self._running else None
        if self._batch.is_asynchronous:
            launched, self._launched = self._launched, launched
        if launched is not None:
            self._collect(launched)

    def _launch(self) -> _LaunchedStep:
        rows = max(self._running) + 1
        logits_RV = self._batch.step(rows)
        if self._sampling is None:
            self._sampling = self._sampling_groups()
        for settings, slots_S in self._sampling:
            self._batch.sample(slots_S, logits_RV, settings)
        return _LaunchedStep(list(self._running.items()), self._batch.read_tokens(rows))

    def _collect(self, step: _LaunchedStep) -> None:
        tokens, at_once = step.tokens(), -(-len(step.requests) // _SINGLE_TOKEN_REQUESTS)
        for slot, request in step.requests:
            if self._running.get(slot) is not request:  # it ended while the step was under way
                continue
            request.answer.append(tokens[slot])
            reason = self._finish_reason(slot, request)
            # The first token at once: people wait for it.
            if reason or request.handed_over == 0 or len(request.answer) - request.handed_over >= at_once:
                request.hand_over()
            if reason:
                request.events.put(reason)
                self._remove(slot)

    def _sampling_groups(self) -> list[tuple[GenerationSettings, Tensor]]:
        """Rows with equal settings are sampled together."""
        groups: dict[tuple[float, float, int], list[int]] = {}
        for slot, request in self._running.items():
            chosen = request.settings
            if chosen.do_sample:
                groups.setdefault((chosen.temperature, chosen.top_p, chosen.top_k), []).append(slot)
        return [(self._running[slots[0]].settings, self._batch.slot_index(slots)) for slots in groups.values()]

    def _finish_reason(self, slot: int, request: ServedRequest) -> str:
        token = request.answer[-1]
        if token in self._end_ids and not request.ignore_eos:
            return "stop"
        if request.settings.stop and self._stops[slot].reached(request.answer):
            return "stop"
        return "length" if len(request.answer) >= request.settings.max_new_tokens else ""

    def _remove(self, slot: int) -> None:
        del self._running[slot]
        self._stops.pop(slot, None)
        self._sampling = None
        self._batch.release(slot)
