"""Decoding with a cache of fixed size: one step for all rows, captured as a CUDA graph, with sampling on the device.

The step reads a token of every row, writes its keys and values, samples the next token and stores it, so the host only
launches graphs. Every few steps it checks the tokens of the steps before, while the device works on the next ones: it
finds finished answers (end tokens and stop texts), and when enough rows are finished, the others move to a graph for
fewer rows. Graphs are captured when they are first needed, for the numbers of rows that `sizes_that_pay` chooses.

A decoder outlives its batch: later ones find its cache, its compiled layer and its graphs, and read the weights as they
are then. Compiled layers also serve later decoders of this process for models of the same shape.

Rows have their own lengths: the cache has one slot per row, filled from position 0, so there is no padding to mask, and
attention reads only the positions in use. A prompt is read once for all of its answers, except its last token: that is
the first token of the decoding loop, whose logits are then the only ones needed. Prompts of similar length are read
together; reading few short ones is captured by size when a size occurs again, reading many is compiled if that pays.

Shapes: P prompts, R rows (`n` per prompt), T positions of a slot, S steps, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from joulelab import clock
from joulelab.infer.generation.cache import forward_arguments
from joulelab.infer.generation.fused_layers import FusedLayers
from joulelab.infer.generation.sampler import sample_tokens
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.infer.recipes import capture_cuda_graph
from joulelab.train.optim import repeated_blocks
from joulelab.zoo.quantized_layers import quantization_of

NAME = "joulelab_decode"
_BLOCK = 64
_PROMPT_TOKENS_AT_ONCE = 32_768
# Reading fewer tokens takes as long as its launches, so it is captured, for lengths rounded up to a power of two.
_CAPTURED_PROMPT_TOKENS = 4096
_SHORTEST_PROMPT = 32
_ALIGNED = 16
# Steps between two checks by the host: few, because rows that have ended keep running until the host notices.
_CHUNK = 4
# Below this, a step takes as long with half of the rows, because it is bound by reading the weights.
_SMALLEST_BUCKET = 64
# With fewer steps left, moving rows to a smaller graph does not pay.
_MIN_STEPS_LEFT = 16
# Joules on an H200: to compile the step, and what every later step then saves, partly per row (docs/results.md).
_COMPILE_J = 1500.0
_SAVED_PER_STEP_J, _SAVED_PER_ROW_J = 0.35, 0.006
# Joules on an H200: to capture a step that is compiled, and what a row takes per step.
_CAPTURE_J, _ROW_STEP_J = 60.0, 0.002
# Part of the steps for which a batch has half of its rows, if answers end evenly over the steps.
_HALF_FINISHED = 0.25
# Prompt tokens from which compiling the reading of prompts saves more energy than it uses.
_COMPILED_PROMPT_TOKENS = 500_000
# Of the free GPU memory: logits, activations and captured graphs need the rest.
_CACHE_SHARE = 0.6
# Relative to the largest logit: above rounding in bfloat16, far below the effect of a wrong mask or position.
_SAME_LOGITS = 0.05

SetupNote = Callable[[str, int, int], None]
"""(activity, begin, end) in monotonic nanoseconds: time that is not part of generation."""
FinishedAt = Callable[[NDArray[np.int64], int, int], int | None]
"""(tokens of a row so far, first new one, end) -> index of the token that ends the answer, or None."""


class LayerSlots:
    """Keys and values of one layer as [R, T, K, D], written at each row's own position."""

    def __init__(self, key_states: Tensor, value_states: Tensor, places_R: Tensor, tokens: int) -> None:
        self.places_R = places_R
        self.rows_R = torch.arange(len(places_R), device=places_R.device)
        self.keys, self.values = (
            torch.zeros(
                len(places_R), tokens, states.shape[1], states.shape[3], dtype=states.dtype, device=states.device
            )
            for states in (key_states, value_states)
        )

    def write_prompts(self, key_states: Tensor, value_states: Tensor, slots_PN: Tensor) -> None:
        """Into several slots per prompt."""
        for slots_P in slots_PN.unbind(1):
            self.keys[slots_P, : key_states.shape[2]] = key_states.transpose(1, 2)
            self.values[slots_P, : value_states.shape[2]] = value_states.transpose(1, 2)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one token per row and return the slots of these rows."""
        rows = len(key_states)
        where = (self.rows_R[:rows], self.places_R[:rows])
        self.keys.index_put_(where, key_states.squeeze(2))
        self.values.index_put_(where, value_states.squeeze(2))
        return self.keys[:rows], self.values[:rows]


class PromptSlots:
    """The slots of one layer that prompts are written into, in place of a cache."""

    def __init__(self, slots: LayerSlots, slots_PN: Tensor) -> None:
        self.slots, self.slots_PN = slots, slots_PN

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.slots.write_prompts(key_states, value_states, self.slots_PN)
        return key_states, value_states


class SlotCache(Cache):  # type: ignore[misc]
    """One slot of `tokens` positions per row in every layer."""

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.tokens = tokens
        self.places_R = torch.zeros(rows, dtype=torch.long, device=device)
        """Position at which the next step writes."""
        self.slots: list[LayerSlots] = []
        self._prompt_slots_PN: Tensor | None = None

    @contextmanager
    def reading_prompts(self, slots_PN: Tensor) -> Iterator[None]:
        """Write prompts into these slots, several per prompt."""
        self._prompt_slots_PN = slots_PN
        try:
            yield
        finally:
            self._prompt_slots_PN = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Prompts: the given states, in their layout. Decoding: all states of the rows as [R, T, K, D]."""
        if layer_idx == len(self.slots):
            self.slots.append(LayerSlots(key_states, value_states, self.places_R, self.tokens))
        if self._prompt_slots_PN is None:
            return self.slots[layer_idx].update(key_states, value_states, layer_idx)
        self.slots[layer_idx].write_prompts(key_states, value_states, self._prompt_slots_PN)
        return key_states, value_states

    def keep(self, rows_R: Tensor) -> None:
        for layer in self.slots:
            for states in (layer.keys, layer.values):
                # The right side is copied before it is assigned, so overlapping rows are safe.
                states[: len(rows_R)] = states[rows_R]

    # transformers derives positions and masks from the length; both are passed explicitly here.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.tokens


@lru_cache(maxsize=64)
def compile_copy(function: Any, variant: Hashable, **options: Any) -> Any:
    """Compile a copy of a function for each `variant`, once per process: torch keeps at most eight variants of a
    function and silently runs further ones without compiling them."""
    code = function.__code__.replace()  # variants are kept with the code object
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(copied, **options)


def compile_layer(model: Any, variant: Hashable, **options: Any) -> Any:
    """The forward method that all layers share, with those of other models of the same shape."""
    layer = repeated_blocks(model)[0]
    shapes = tuple((name, tuple(weight.shape), weight.dtype) for name, weight in layer.named_parameters())
    return compile_copy(type(layer).forward, (shapes, next(model.parameters()).device, variant), **options)


@contextmanager
def compiled_layers(model: Any, slots: Sequence[LayerSlots | PromptSlots], forward: Any) -> Iterator[None]:
    """One compiled layer for all of them: each gets the slots of its own layer, so its number does not matter."""
    layers = repeated_blocks(model)
    numbered = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    numbers = [module.layer_idx for module in numbered]
    # The layer number would be a constant of the compiled graph, and every layer would be compiled for itself.
    for layer, own in zip(layers, slots, strict=True):
        layer.forward = partial(_forward_with_slots, forward, layer, own)
    for module in numbered:
        module.layer_idx = 0
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
        for module, number in zip(numbered, numbers, strict=True):
            module.layer_idx = number


def _forward_with_slots(forward: Any, layer: Any, slots: LayerSlots | PromptSlots, *args: Any, **kwargs: Any) -> Any:
    return forward(layer, *args, **{**kwargs, "past_key_values": slots})


def attend(
    module: Any,
    query_RHTD: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a prompt to itself, or of one token to the slot of its row. In place of a mask, decoding passes the
    lengths of the rows: transformers hands a four-dimensional mask to attention unchanged."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if attention_mask.dtype == torch.bool:
        read: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_RHTD, key, value, None, scaling=scaling, is_causal=True
        )
        return read
    lengths_R = attention_mask.flatten()
    _, positions, heads_kv, _ = key.shape
    if _kernel_takes(query_RHTD, key, value):
        from joulelab.infer.generation.decode_kernel import attend_slots

        size = query_RHTD.shape[-1]
        scale = size**-0.5 if scaling is None else scaling
        attended_RHD = attend_slots(query_RHTD.squeeze(2).contiguous(), key, value, lengths_R, scale)
        return attended_RHD[:, None], None
    groups = query_RHTD.shape[1] // heads_kv
    # Without the kernel (CPU, fp32, unusual head sizes) a mask gives the same result more slowly.
    seen_R11T = torch.arange(positions, device=key.device) < lengths_R[:, None, None, None]
    attended_RH1D = F.scaled_dot_product_attention(
        query_RHTD,
        repeat_kv(key.transpose(1, 2), groups),
        repeat_kv(value.transpose(1, 2), groups),
        attn_mask=seen_R11T,
        scale=scaling,
    )
    return attended_RH1D.transpose(1, 2), None


def _kernel_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    shapes = size == value.shape[-1] and size in (16, 32, 64, 128, 256) and query.shape[1] // key.shape[2] <= 16
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and shapes


@contextmanager
def decode_attention(model: Any) -> Iterator[None]:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class StaticDecoder:
    """Greedy or sampled decoding of batches of at most `rows` answers."""

    def __init__(
        self,
        model: Any,
        rows: int,
        tokens: int,
        settings: GenerationSettings,
        *,
        words: int | None = None,
        sizes: Sequence[int] | None = None,
        compile_step: bool = False,
        compile_prompts: bool = False,
        fused: FusedLayers | None = None,
        note_setup: SetupNote = lambda activity, begin_ns, end_ns: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`tokens`: length of the longest prompt plus its answer. Logits beyond the first `words` are padding of the
        vocabulary. `sizes`: numbers of rows that a step may have, `rows` among them; None: all halves of it.
        `note_setup` gets the times of compilations and captures, `note` remarks for the user."""
        device = next(model.parameters()).device
        self._model, self._settings, self._words, self._device = model, settings, words, device
        self._steps = settings.max_new_tokens
        self.capacity, self.tokens = rows, -(-tokens // _BLOCK) * _BLOCK
        self._sizes = sorted(_halves(rows) if sizes is None else sizes)
        self._cache = SlotCache(rows, self.tokens, device)
        self._token_R = torch.zeros(rows, dtype=torch.long, device=device)
        self._numbers_RS = torch.zeros(rows, self._steps, dtype=torch.float64, device=device)
        self._tokens_RS = torch.zeros(rows, self._steps, dtype=torch.long, device=device)
        self._logs_RS = torch.zeros(rows, self._steps, dtype=torch.float32, device=device)
        self._step_1 = torch.zeros(1, dtype=torch.long, device=device)
        self._run: dict[int, Callable[[], Any]] = {}
        self._prompt_graphs: dict[tuple[int, int], tuple[Callable[[], Any], Tensor, Tensor]] = {}
        self._prompt_shapes: set[tuple[int, int]] = set()
        self._compile_step, self._compile_prompts = compile_step, compile_prompts
        self._note_setup, self._note = note_setup, note
        self._can_capture = device.type == "cuda"
        self._fused = fused
        self._prompt_layer: Any = None
        self._is_prompt = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        self._positions_T = torch.arange(self.tokens, device=device)
        self._sample: Any = sample_tokens
        if compile_step:
            sampling = settings.model_dump(include={"do_sample", "temperature", "top_p", "top_k"})
            self._sample = compile_copy(sample_tokens, (*sampling.items(), words, model.dtype, device))

    @property
    def cache_bytes(self) -> int:
        return sum(states.nbytes for layer in self._cache.slots for states in (layer.keys, layer.values))

    def read_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Fill the slots with the prompts without their last tokens, which the first step reads."""
        n = self._settings.n
        order = sorted(
            (place for place, prompt in enumerate(prompts) if len(prompt) > 1), key=lambda i: len(prompts[i])
        )
        while order:
            longest = len(prompts[order[-1]]) - 1
            some = [order.pop() for _ in range(min(len(order), max(1, _PROMPT_TOKENS_AT_ONCE // longest)))]
            self._read([prompts[place][:-1] for place in some], torch.tensor(some)[:, None] * n + torch.arange(n))

    def _read(self, prompts: Sequence[Sequence[int]], slots_PN: Tensor) -> None:
        longest = len(prompts[0])
        if not self._can_capture or len(prompts) * longest > _CAPTURED_PROMPT_TOKENS:
            # Kernels read 16 bytes at once where lengths allow it.
            ids_PT = _padded(prompts, -(-longest // _ALIGNED) * _ALIGNED).to(self._device)
            self._read_now(ids_PT, slots_PN.to(self._device))
            return
        rows, length = _power_of_2(len(prompts)), min(self.tokens, max(_SHORTEST_PROMPT, _power_of_2(longest)))
        # Rows are filled up with copies of the last prompt, which write the same into the same slots.
        slots_PN = torch.cat([slots_PN, slots_PN[-1:].expand(rows - len(prompts), -1)]).to(self._device)
        ids_PT = _padded([*prompts, *[prompts[-1]] * (rows - len(prompts))], length).to(self._device)
        graph = self._prompt_graphs.get((rows, length))
        if graph is not None:
            run, ids, slots = graph
            ids.copy_(ids_PT)
            slots.copy_(slots_PN)
            run()
        elif self._compile_step or (rows, length) in self._prompt_shapes:
            begin_ns = clock.now().mono_ns
            with self._prepared_model():
                # Reads the prompts, too: the calls before the capture are the work itself.
                run = self._capture(partial(self._forward_prompts, ids_PT, slots_PN))
            self._prompt_graphs[rows, length] = run, ids_PT, slots_PN
            torch.cuda.synchronize()
            self._note_setup("capture", begin_ns, clock.now().mono_ns)
        else:
            self._prompt_shapes.add((rows, length))
            self._read_now(ids_PT, slots_PN)

    def _read_now(self, ids_PT: Tensor, slots_PN: Tensor) -> None:
        with self._prepared_model():
            # The first batch allocates the slots, which a compiled layer then writes.
            if not (self._compile_prompts and self._cache.slots):
                self._forward_prompts(ids_PT, slots_PN)
                return
            begin_ns, is_first = clock.now().mono_ns, self._prompt_layer is None
            if is_first:
                self._prompt_layer = compile_layer(self._model, self._layer_variant, dynamic=True)
            slots = [PromptSlots(layer, slots_PN) for layer in self._cache.slots]
            with compiled_layers(self._model, slots, self._prompt_layer):
                self._forward_prompts(ids_PT, slots_PN)
            if is_first:
                torch.cuda.synchronize()
                self._note_setup("compile", begin_ns, clock.now().mono_ns)

    def _forward_prompts(self, ids_PT: Tensor, slots_PN: Tensor) -> None:
        """Padding is on the right here: causal attention never looks at it, and a slot is filled from position 0."""
        rows, length = ids_PT.shape
        with self._cache.reading_prompts(slots_PN):
            self._model(
                input_ids=ids_PT,
                attention_mask=self._is_prompt,
                position_ids=self._positions_T[:length].expand(rows, -1),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )

    @contextmanager
    def _prepared_model(self) -> Iterator[None]:
        """In evaluation mode, with attention to slots and joined layers. Replaying a captured step needs none of it."""
        was_training = self._model.training
        if was_training:
            self._model.eval()
        try:
            with decode_attention(self._model), self._fused.applied() if self._fused else nullcontext():
                yield
        finally:
            if was_training:
                self._model.train()

    @torch.no_grad()
    def decode(
        self, prompts: Sequence[Sequence[int]], numbers_RS: NDArray[np.float64] | None, finished_at: FinishedAt
    ) -> tuple[list[NDArray[np.int64]], list[NDArray[np.float32]]]:
        """Tokens of every answer up to its end, and their log-probabilities."""
        n = self._settings.n
        live = len(prompts) * n
        if self._fused is not None:
            self._fused.refresh()
        self.read_prompts(prompts)
        bucket = self._bucket(live)
        lasts = torch.tensor([prompt[-1] for prompt in prompts]).repeat_interleave(n)
        places = torch.tensor([len(prompt) - 1 for prompt in prompts]).repeat_interleave(n)
        self._cache.places_R.zero_()
        self._token_R[:live] = lasts.to(self._device)
        self._cache.places_R[:live] = places.to(self._device)
        if numbers_RS is not None:
            self._numbers_RS[:live] = torch.from_numpy(numbers_RS).to(self._device)
        self._step_1.zero_()
        tokens_RS = np.zeros((live, self._steps), dtype=np.int64)
        logs_RS = np.zeros((live, self._steps), dtype=np.float32)
        ends = np.full(live, self._steps)
        rows = np.arange(live)  # answer of each row; rows beyond its length are padding of the bucket
        active = np.ones(live, dtype=bool)
        waiting: tuple[NDArray[np.int64], int, int, Tensor, Tensor, Any] | None = None
        step = 0
        while step < self._steps or waiting is not None:
            begun = None
            if step < self._steps and active.any():
                end = min(step + _CHUNK, self._steps)
                run = self._graph(bucket)
                for _ in range(step, end):
                    run()
                # Results of this chunk are read by the host while the device works on the next one.
                begun = (rows, step, end, *self._to_host(len(rows), step, end))
                step = end
            if waiting is not None:
                self._collect(waiting, tokens_RS, logs_RS, ends, active, finished_at)
            elif begun is None:
                break
            waiting = begun
            if step < self._steps and waiting is not None:
                rows, bucket = self._shrink(rows, active, bucket, step)
        answers = [tokens[:end].copy() for tokens, end in zip(tokens_RS, ends, strict=True)]
        return answers, [logs[:end].copy() for logs, end in zip(logs_RS, ends, strict=True)]

    def _to_host(self, rows: int, step: int, end: int) -> tuple[Tensor, Tensor, Any]:
        """Copies that are complete when the event is; the device does not wait for them."""
        parts = [self._tokens_RS[:rows, step:end], self._logs_RS[:rows, step:end]]
        if self._device.type != "cuda":
            return parts[0].clone(), parts[1].clone(), None
        copies = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
        for copy, part in zip(copies, parts, strict=True):
            copy.copy_(part, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return copies[0], copies[1], event

    def _collect(
        self,
        waiting: tuple[NDArray[np.int64], int, int, Tensor, Tensor, Any],
        tokens_RS: NDArray[np.int64],
        logs_RS: NDArray[np.float32],
        ends: NDArray[np.int64],
        active: NDArray[np.bool_],
        finished_at: FinishedAt,
    ) -> None:
        rows, begin, end, tokens, logs, event = waiting
        if event is not None:
            event.synchronize()
        tokens_RS[rows, begin:end] = tokens.numpy()
        logs_RS[rows, begin:end] = logs.numpy()
        for row in rows[active[rows]]:
            last = finished_at(tokens_RS[row], begin, end)
            if last is not None:
                ends[row], active[row] = last + 1, False

    def _shrink(
        self, rows: NDArray[np.int64], active: NDArray[np.bool_], bucket: int, step: int
    ) -> tuple[NDArray[np.int64], int]:
        kept = np.flatnonzero(active[rows])
        smaller = self._bucket(len(kept))
        if smaller >= bucket or self._steps - step < _MIN_STEPS_LEFT or not len(kept):
            return rows, bucket
        places = torch.from_numpy(kept).to(self._device)
        self._cache.keep(places)
        for state in (self._token_R, self._numbers_RS, self._cache.places_R):
            state[: len(kept)] = state[places]
        return rows[kept], smaller

    def _bucket(self, rows: int) -> int:
        """The smallest size that is large enough."""
        return next(size for size in self._sizes if size >= rows)

    def _graph(self, bucket: int) -> Callable[[], Any]:
        if bucket not in self._run:
            step = partial(self._decode_one, bucket)
            self._run[bucket] = self._captured(step) if self._can_capture else partial(self._eager, step)
        return self._run[bucket]

    def _eager(self, step: Callable[[], None]) -> None:
        with self._prepared_model(), self._step_layers():
            step()

    @property
    def _layer_variant(self) -> Hashable:
        return self.capacity, self.tokens, self._fused is not None

    @contextmanager
    def _step_layers(self) -> Iterator[None]:
        """The first size is compiled as it is. If another one is needed, torch compiles once more, for any number of
        rows, which then serves all further sizes."""
        # Without slots there is nothing to compile for: the first call allocates them.
        if not (self._compile_step and self._cache.slots):
            yield
            return
        with compiled_layers(self._model, self._cache.slots, compile_layer(self._model, self._layer_variant)):
            yield

    def _captured(self, step: Callable[[], None]) -> Callable[[], Any]:
        begin_ns = clock.now().mono_ns
        # The calls before the capture are steps: they move places and tokens, which are restored. What they write into
        # the cache is behind each row's length and will be overwritten.
        state = (self._token_R, self._cache.places_R, self._step_1, self._tokens_RS, self._logs_RS)
        before = [part.clone() for part in state]
        with self._prepared_model():
            if not self._cache.slots:
                step()  # allocates the slots
            with self._step_layers():
                run = self._capture(step)
        for part, value in zip(state, before, strict=True):
            part.copy_(value)
        torch.cuda.synchronize()
        self._note_setup("compile" if self._compile_step else "capture", begin_ns, clock.now().mono_ns)
        return run

    def _capture(self, run: Callable[[], None]) -> Callable[[], Any]:
        """Kernels of a quantization library may wait for the host, which a graph cannot contain; without graphs they
        give the same tokens more slowly."""
        try:
            return capture_cuda_graph(run)
        except RuntimeError as error:
            kind = quantization_of(self._model)
            if kind is None:
                raise
            self._can_capture = False
            reason = (str(error) or type(error).__name__).splitlines()[0][:120]
            self._note(f"{kind}: generation runs without CUDA graphs, because its kernels cannot be captured: {reason}")
            return partial(self._eager, run)

    def _decode_one(self, rows: int) -> None:
        places_R = self._cache.places_R[:rows]
        logits_RV = self._model(
            input_ids=self._token_R[:rows, None],
            attention_mask=(places_R + 1).int().view(-1, 1, 1, 1),
            position_ids=places_R[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1, : self._words]
        numbers_R = None
        if self._settings.do_sample:
            numbers_R = self._numbers_RS[:rows].index_select(1, self._step_1).squeeze(1)
        tokens_R, logs_R = self._sample(logits_RV, self._settings, numbers_R)
        self._tokens_RS[:rows].index_copy_(1, self._step_1, tokens_R[:, None])
        self._logs_RS[:rows].index_copy_(1, self._step_1, logs_R[:, None])
        self._token_R[:rows].copy_(tokens_R)
        # Finished rows keep running until the host removes them; the clamp keeps them inside their slots.
        places_R.add_(1).clamp_(max=self._cache.tokens - 1)
        self._step_1.add_(1).clamp_(max=self._steps - 1)


def compiling_pays(rows: int, steps: int) -> bool:
    return steps * (_SAVED_PER_STEP_J + rows * _SAVED_PER_ROW_J) > _COMPILE_J


def compiling_prompts_pays(tokens: int) -> bool:
    return tokens >= _COMPILED_PROMPT_TOKENS


def sizes_that_pay(rows: int, new_tokens: int, batches: int, compiled: bool) -> list[int]:
    """Numbers of rows to capture the step for: all, and the halves of it that save more energy, with answers that end
    early, than capturing uses. By the plan of the whole work only, not by what has ended already: a resume or a shard
    must have the same shapes, because floating-point results depend slightly on them."""
    sizes, cost_j = [rows], _COMPILE_J if compiled else _CAPTURE_J
    for size in _halves(rows)[1:]:
        if (sizes[-1] - size) * _ROW_STEP_J * new_tokens * _HALF_FINISHED * batches > cost_j:
            sizes.append(size)
            cost_j = _CAPTURE_J  # compiled for any number of rows by now
    return sizes


def _halves(rows: int) -> list[int]:
    sizes = [rows]
    while sizes[-1] // 2 >= _SMALLEST_BUCKET:
        sizes.append(sizes[-1] // 2)
    return sizes


def _padded(prompts: Sequence[Sequence[int]], length: int) -> Tensor:
    ids_PT = torch.zeros(len(prompts), length, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids_PT[row, : len(prompt)] = torch.tensor(prompt)
    return ids_PT


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def rows_that_fit(model: Any, tokens: int) -> int:
    """How many slots of this length fit into the free memory of the model's GPU."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameter = next(model.parameters())
    # Keys and values of every layer; a slot is rounded up to whole blocks.
    slot_bytes = 2 * config.num_hidden_layers * heads * size * parameter.element_size() * (tokens + _BLOCK)
    free_bytes, _ = torch.cuda.mem_get_info(parameter.device)
    return int(_CACHE_SHARE * free_bytes / slot_bytes)


@dataclass(frozen=True)
class ModelSupport:
    """What of this module a model can be used with."""

    slots: bool
    fused: FusedLayers | None = None


def check_model(model: Any) -> ModelSupport:
    """Full attention in all layers through the attention interface of transformers, and the same logits as without; on
    a GPU with joined layers if these give the same logits, too."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    named = {"attention_mask", "position_ids", "logits_to_keep"} <= forward_arguments(model)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if set(kinds) != {"full_attention"} or not named or capped or not getattr(model, "_supports_sdpa", False):
        return ModelSupport(False)
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        return ModelSupport(False)
    if next(model.parameters()).is_cuda:
        fused = FusedLayers(model)
        # A kernel that cannot be compiled for this GPU may raise anything; the layers of the model always work.
        with suppress(Exception):
            if fused.present and _same_logits(model, fused):
                return ModelSupport(True, fused)
    try:
        return ModelSupport(_same_logits(model))
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, NotImplementedError):
        return ModelSupport(False)  # a model with custom attention


@torch.no_grad()
def _same_logits(model: Any, fused: FusedLayers | None = None) -> bool:
    """Checked on two prompts of different length."""
    device = next(model.parameters()).device
    size = min(model.config.get_text_config().vocab_size, 50)
    # Different lengths show wrong masks and positions, which rows of equal length would hide.
    prompts = [[place % size for place in range(1, 8)], [3 % size, 2 % size, 1 % size]]
    found: list[Tensor] = []

    def keep(logits_RV: Tensor, settings: Any, numbers: Any) -> tuple[Tensor, Tensor]:
        found.append(logits_RV.float())
        tokens_R = logits_RV.argmax(-1)
        return tokens_R, tokens_R.float()

    decoder = StaticDecoder(model, len(prompts), 16, GenerationSettings(max_new_tokens=1), fused=fused)
    decoder._sample = keep
    decoder.read_prompts(prompts)
    decoder._token_R.copy_(torch.tensor([prompt[-1] for prompt in prompts]))
    decoder._cache.places_R.copy_(torch.tensor([len(prompt) - 1 for prompt in prompts]))
    decoder._eager(partial(decoder._decode_one, len(prompts)))
    for prompt, logits_V in zip(prompts, found[0], strict=True):
        expected_V = model(torch.tensor([prompt], device=device), use_cache=False).logits[0, -1].float()
        if (logits_V - expected_V).abs().max() > _SAME_LOGITS * expected_V.abs().max():
            return False
    return True
