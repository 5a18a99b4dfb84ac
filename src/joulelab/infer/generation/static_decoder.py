"""Decoding with a cache of fixed size: one step for all rows, captured as a CUDA graph, with sampling on the device.

The step reads a token of every row, writes its keys and values, samples the next token and stores it, so the host only
launches graphs. Every few steps it checks the tokens of the steps before, while the device works on the next ones: it
finds finished answers (end tokens and stop texts) and gives their slots to the next prompts, so that a step always has
the same number of rows and few of them are idle (continuous batching, Yu et al., 2022).

A row's numbers do not depend on the other rows: every step has the same shape, and prompts are read in groups of one
shape for each length, rounded up to one of a few. So an answer has the same tokens in any order of the prompts, after
a resume and in a shard, as long as the number of rows is the same.

A decoder outlives its prompts: later ones find its cache, its compiled layer and its graphs, and read the weights as
they are then. Compiled layers also serve later decoders of this process for models of the same shape.

Rows have their own lengths: the cache has one slot per row, filled from position 0, so there is no padding to mask, and
attention reads only the positions in use. A prompt is read once for all of its answers, except its last token: that is
the first token of the decoding loop, whose logits are then the only ones needed.

Shapes: P prompts, R rows (`n` per prompt), T positions of a slot, S steps of an answer, C steps between two checks, H
heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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

from joulelab.data.chat.packing import head_width
from joulelab.infer.generation.cache import forward_arguments
from joulelab.infer.generation.fused_layers import FusedLayers
from joulelab.infer.generation.sampler import AnswerEnds, sample_tokens
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.infer.recipes import capture_cuda_graph
from joulelab.train.optim import repeated_blocks
from joulelab.zoo.quantized_layers import quantization_of

NAME = "joulelab_decode"
_BLOCK = 64
# Prompts are read when this share of the rows (1 / 8) has room for them, in one call of at most so many tokens, padding
# included: more of them keep the GPU busier, fewer leave fewer rows waiting. Up to the smaller number a call takes
# about as long as for one prompt, because it reads all weights, so groups of few rows are as large as these are.
_GROUP_SHARE = 8
_PROMPT_TOKENS_AT_ONCE = 16_384
_CHEAP_PROMPT_TOKENS = 512
# Prompts are rounded up, to this length at least: to a power of two, and to one of four lengths between two of them if
# there are so many prompts that the additional captures and groups that are not full cost less than the padding saved.
_SHORTEST_PROMPT = 32
_PROMPT_LENGTHS, _MANY_PROMPTS = 4, 1024
# Steps between two checks by the host: few, because rows that have ended keep running until the host notices; more
# with few rows, whose steps take as long as the check.
_STEPS_PER_CHECK, _STEPS_PER_CHECK_FEW_ROWS, _FEW_ROWS = 2, 4, 256
# Joules on an H200: to compile the step, and what every later step then saves, partly per row (docs/results.md).
_COMPILE_J = 1500.0
_SAVED_PER_STEP_J, _SAVED_PER_ROW_J = 0.35, 0.006
ENOUGH_ROWS = 1024
"""More rows take no less energy per row on an H200."""
# What compiling the reading of prompts saves, per token, layer and hidden unit: 20 and 25 nJ for 135 M and 1.7 B
# parameters.
_SAVED_PER_HIDDEN_STATE_J = 22e-9
# Fraction of the free GPU memory for the cache: logits, activations and captured graphs need the rest.
_CACHE_SHARE = 0.6
_JOINED_SHARE = 0.5
# How far logits may differ: relative to the effect of a missing token, of which rounding in bfloat16 has 0.02 to 0.12;
# or relative to the logits, if no token has an effect.
_SAME_LOGITS, _SAME_NUMBERS = 0.5, 1e-5
_CHECKED_SLOTS = 16
_OTHER_ATTENTION = "computes attention in a way that has no fixed slots"

Setup = Callable[[str], AbstractContextManager[object]]
"""Opens a stage of setup for an activity: work that is not part of generation."""
RandomNumbers = Callable[[int, int], NDArray[np.float64]]
"""(number of the prompt, number of its answer) -> one random number per token."""


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
        """Into several slots per prompt. With positions as indices, because compiled code copies the whole cache, and
        back, to write to a slice of it."""
        where = slots_PN[:, :, None], torch.arange(key_states.shape[2], device=key_states.device)
        self.keys.index_put_(where, key_states.transpose(1, 2)[:, None])
        self.values.index_put_(where, value_states.transpose(1, 2)[:, None])

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


class PromptReader:
    """Reads prompts into the slots of a cache, in groups of fixed shapes that are captured as CUDA graphs.

    A group has `sizes(length)` prompts: the largest number first, a smaller one for the rest. A group that is not full
    repeats its last prompt, which writes the same into the same slots.
    """

    def __init__(
        self,
        model: Any,
        cache: SlotCache,
        sizes: Callable[[int], Sequence[int]],
        *,
        lengths: int = 1,
        capture: Callable[[Callable[[], None]], Callable[[], Any]] | None = None,
        capture_at_once: bool = True,
        prepared: Callable[[], AbstractContextManager[None]] = nullcontext,
        layers: Callable[[Tensor], AbstractContextManager[None]] = lambda slots_PN: nullcontext(),
    ) -> None:
        """`lengths`: how many lengths of a group there are between two powers of two. `capture` None: nothing is
        captured, and groups are as large as the prompts that are given. With `capture_at_once` false, a shape is
        captured when it occurs again. `prepared` and `layers` wrap the calls of the model."""
        self._model, self._cache, self._sizes, self._lengths = model, cache, sizes, lengths
        self._capture, self._capture_at_once, self._prepared, self._layers = capture, capture_at_once, prepared, layers
        self._device = cache.places_R.device
        self._graphs: dict[tuple[int, int], tuple[Callable[[], Any], Tensor, Tensor]] = {}
        self._shapes: set[tuple[int, int]] = set()
        self._is_prompt = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device)
        self._positions_T = torch.arange(cache.tokens, device=self._device)

    def length(self, prompt: Sequence[int]) -> int:
        """Positions that reading this prompt without its last token takes."""
        if self._capture is None:
            return max(1, len(prompt) - 1)
        exact = max(1, len(prompt) - 1)
        step = max(_SHORTEST_PROMPT, _power_of_2(exact) // (2 * self._lengths))
        return min(self._cache.tokens, -(-exact // step) * step)

    def group_size(self, prompt: Sequence[int]) -> int:
        return self._sizes(self.length(prompt))[0]

    def read(self, prompts: Sequence[Sequence[int]], slots_PN: NDArray[np.int64]) -> None:
        """Fill slots with prompts without their last tokens, which the first step reads."""
        order = [place for place, prompt in enumerate(prompts) if len(prompt) > 1]
        order.sort(key=lambda place: self.length(prompts[place]))
        while order:
            length = self.length(prompts[order[-1]])
            same = [place for place in order if self._capture is None or self.length(prompts[place]) == length]
            sizes = self._sizes(length)
            some = same[-sizes[0] :]
            del order[-len(some) :]
            size = len(some)
            if self._capture is not None:
                size = min(one for one in sizes if one >= len(some))
            places = [*some, *[some[-1]] * (size - len(some))]
            ids_PT = np.zeros((size, length), dtype=np.int64)
            for row, place in enumerate(places):
                ids_PT[row, : len(prompts[place]) - 1] = prompts[place][:-1]
            self._read_group(ids_PT, slots_PN[places])

    def _read_group(self, ids_PT: NDArray[np.int64], slots_PN: NDArray[np.int64]) -> None:
        shape = ids_PT.shape[0], ids_PT.shape[1]
        ids, slots = to_device(ids_PT, self._device), to_device(slots_PN, self._device)
        graph = self._graphs.get(shape)
        if graph is not None:
            run, own_ids, own_slots = graph
            own_ids.copy_(ids)
            own_slots.copy_(slots)
            run()
        elif self._capture is not None and (self._capture_at_once or shape in self._shapes):
            with self._prepared(), self._layers(slots):
                # Reads the prompts, too: the calls before the capture are the work itself.
                self._graphs[shape] = self._capture(partial(self._forward, ids, slots)), ids, slots
        else:
            self._shapes.add(shape)
            with self._prepared():
                self._forward(ids, slots)

    def allocate(self) -> None:
        """Make the slots of all layers, which captured and compiled calls need."""
        if not self._cache.slots:
            with self._prepared():
                self._forward(*(torch.zeros(1, 1, dtype=torch.long, device=self._device) for _ in range(2)))

    def _forward(self, ids_PT: Tensor, slots_PN: Tensor) -> None:
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


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy that does not make the host wait for earlier work of the device, as one of pageable memory does."""
    source = torch.from_numpy(np.ascontiguousarray(values))
    return source.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else source.clone()


@dataclass(frozen=True)
class _LaunchedSteps:
    """Some steps that the device works on."""

    answers_R: NDArray[np.int64]
    """Number of the answer in each slot at the launch; -1: none."""
    tokens_RC: Tensor
    logs_RC: Tensor
    event: Any
    """Complete when the tensors are; None: they are already."""


class StaticDecoder:
    """Greedy or sampled decoding of any number of answers, `rows` of them at a time."""

    def __init__(
        self,
        model: Any,
        rows: int,
        tokens: int,
        settings: GenerationSettings,
        *,
        words: int | None = None,
        prompts: int = 0,
        compile_step: bool = False,
        compile_prompts: bool = False,
        fused: FusedLayers | None = None,
        setup: Setup = lambda activity: nullcontext(),
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`rows`: a multiple of `settings.n`. `tokens`: length of the longest prompt plus its answer. Logits beyond the
        first `words` are padding of the vocabulary. `prompts`: how many it will read, if that is known. Compiling
        and capturing happen inside of `setup(activity)`; `note` gets remarks for the user."""
        device = next(model.parameters()).device
        self._model, self._settings, self._words, self._device = model, settings, words, device
        self._steps = settings.max_new_tokens
        per_check = _STEPS_PER_CHECK if rows >= _FEW_ROWS else _STEPS_PER_CHECK_FEW_ROWS
        self._per_check = min(per_check, self._steps)
        self.capacity, self.tokens = rows, -(-tokens // _BLOCK) * _BLOCK
        self._cache = SlotCache(rows, self.tokens, device)
        self._token_R = torch.zeros(rows, dtype=torch.long, device=device)
        self._step_R = torch.zeros(rows, dtype=torch.long, device=device)
        self._numbers_RS = torch.zeros(rows, self._steps, dtype=torch.float64, device=device)
        self._tokens_RC = torch.zeros(rows, self._per_check, dtype=torch.long, device=device)
        self._logs_RC = torch.zeros(rows, self._per_check, dtype=torch.float32, device=device)
        self._column_1 = torch.zeros(1, dtype=torch.long, device=device)
        self._run: Callable[[], Any] | None = None
        self._compile_step, self._compile_prompts = compile_step, compile_prompts
        self._setup, self._note = setup, note
        self._can_capture = device.type == "cuda"
        self._fused = fused
        self._sample: Any = sample_tokens
        if compile_step:
            sampling = settings.model_dump(include={"do_sample", "temperature", "top_p", "top_k"})
            self._sample = compile_copy(sample_tokens, (*sampling.items(), words, model.dtype, device))
        self._prompts = PromptReader(
            model,
            self._cache,
            lambda length: [prompts_at_once(length, rows // settings.n)],
            lengths=_PROMPT_LENGTHS if prompts >= _MANY_PROMPTS else 1,
            capture=self._captured_prompts if self._can_capture else None,
            capture_at_once=compile_step,
            prepared=self._prepared_model,
            layers=self._prompt_layers,
        )

    @property
    def cache_bytes(self) -> int:
        return sum(states.nbytes for layer in self._cache.slots for states in (layer.keys, layer.values))

    @torch.no_grad()
    def decode(
        self, prompts: Sequence[Sequence[int]], numbers: RandomNumbers | None, ends: AnswerEnds
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float32]]]:
        """As answers end: their number (answers to a prompt are adjacent), their tokens up to the end, and the
        log-probabilities of these."""
        if self._fused is not None:
            self._fused.refresh()
        self._prompts.allocate()
        self._cache.places_R.zero_()
        self._column_1.zero_()
        waiting = self._by_length(prompts)
        answers_R = np.full(self.capacity, -1)
        lengths_R = np.zeros(self.capacity, dtype=np.int64)
        # What the last check reads may go beyond the end of an answer.
        tokens_RS = np.zeros((self.capacity, self._steps + self._per_check), dtype=np.int64)
        logs_RS = np.zeros(tokens_RS.shape, dtype=np.float32)
        launched: _LaunchedSteps | None = None
        while True:
            # The device works on the last launched steps while the host prepares and launches the next ones. It works
            # on those while the host processes the results of the steps before, and the caller takes the answers.
            for some, slots_PN in self._groups_with_room(waiting, prompts, answers_R):
                self._begin([prompts[place] for place in some], some, numbers, slots_PN)
                answers_R[slots_PN] = np.array(some)[:, None] * self._settings.n + np.arange(self._settings.n)
                lengths_R[slots_PN] = 0
            begun = self._launch(answers_R) if (answers_R >= 0).any() else None
            if launched is not None:
                for row, end in self._ended(launched, answers_R, lengths_R, tokens_RS, logs_RS, ends):
                    answer, answers_R[row] = int(answers_R[row]), -1
                    yield answer, tokens_RS[row, :end].copy(), logs_RS[row, :end].copy()
                if not any(waiting.values()):
                    self._idle(np.flatnonzero(answers_R < 0))
            elif begun is None:
                return
            launched = begun

    def _by_length(self, prompts: Sequence[Sequence[int]]) -> dict[int, deque[int]]:
        """Numbers of the prompts that can be read together: on a GPU those of one length, rounded up."""
        found: dict[int, deque[int]] = defaultdict(deque)
        for place, prompt in enumerate(prompts):
            found[self._prompts.length(prompt) if self._can_capture else 0].append(place)
        return found

    def _groups_with_room(
        self, waiting: Mapping[int, deque[int]], prompts: Sequence[Sequence[int]], answers_R: NDArray[np.int64]
    ) -> Iterator[tuple[list[int], NDArray[np.int64]]]:
        """Prompts that are read together, and the slots of their answers; the group of the first prompt comes first,
        because answers are given in the order of the prompts."""
        n = self._settings.n
        free = deque(np.flatnonzero(answers_R < 0).tolist())
        while any(waiting.values()):
            queue = min((one for one in waiting.values() if one), key=lambda one: one[0])
            size = min(len(queue), self._prompts.group_size(prompts[queue[0]]))
            # Without captured groups any number of prompts costs the same per prompt.
            enough = max(1, min(size, self.capacity // n // _GROUP_SHARE)) if self._can_capture else 1
            if len(free) // n < enough:
                return
            size = min(size, len(free) // n)
            some = [queue.popleft() for _ in range(size)]
            yield some, np.array([[free.popleft() for _ in range(n)] for _ in some])

    def _begin(
        self,
        prompts: Sequence[Sequence[int]],
        numbers_of_prompts: Sequence[int],
        numbers: RandomNumbers | None,
        slots_PN: NDArray[np.int64],
    ) -> None:
        n = self._settings.n
        self._prompts.read(prompts, slots_PN)
        # Slot, last token and position of it, in one copy.
        rows = np.stack(
            [
                slots_PN.flatten(),
                np.repeat([prompt[-1] for prompt in prompts], n),
                np.repeat([len(prompt) - 1 for prompt in prompts], n),
            ]
        )
        slots_A, tokens_A, places_A = to_device(rows, self._device)
        self._token_R[slots_A] = tokens_A
        self._cache.places_R[slots_A] = places_A
        self._step_R[slots_A] = 0
        if numbers is not None:
            drawn_AS = np.stack([numbers(prompt, answer) for prompt in numbers_of_prompts for answer in range(n)])
            self._numbers_RS[slots_A] = to_device(drawn_AS, self._device)

    def _idle(self, rows: NDArray[np.int64]) -> None:
        """At position 0 an unused row attends to one token."""
        if len(rows):
            self._cache.places_R[to_device(rows, self._device)] = 0

    def _launch(self, answers_R: NDArray[np.int64]) -> _LaunchedSteps:
        rows = self.capacity if self._can_capture else int(np.flatnonzero(answers_R >= 0)[-1]) + 1
        run = self._step(rows)
        for _ in range(self._per_check):
            run()
        parts = [self._tokens_RC[:rows], self._logs_RC[:rows]]
        event = None
        if self._device.type == "cuda":
            copies = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
            for copy, part in zip(copies, parts, strict=True):
                copy.copy_(part, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        else:
            copies = [part.clone() for part in parts]
        return _LaunchedSteps(answers_R[:rows].copy(), copies[0], copies[1], event)

    def _ended(
        self,
        launched: _LaunchedSteps,
        answers_R: NDArray[np.int64],
        lengths_R: NDArray[np.int64],
        tokens_RS: NDArray[np.int64],
        logs_RS: NDArray[np.float32],
        ends: AnswerEnds,
    ) -> Iterator[tuple[int, int]]:
        """(row, length) of every answer that has ended with these steps."""
        if launched.event is not None:
            launched.event.synchronize()
        before_R = launched.answers_R
        # Rows whose answer ended in the steps before these have run on, maybe with another answer by now.
        rows = np.flatnonzero((before_R >= 0) & (before_R == answers_R[: len(before_R)]))
        begins = lengths_R[rows]
        columns_RC = begins[:, None] + np.arange(self._per_check)
        new_RC = launched.tokens_RC.numpy()[rows]
        tokens_RS[rows[:, None], columns_RC] = new_RC
        logs_RS[rows[:, None], columns_RC] = launched.logs_RC.numpy()[rows]
        lengths_R[rows] += self._per_check
        may_end_R = ends.may_end(new_RC).any(1) | (lengths_R[rows] >= self._steps)
        for row, begin in zip(rows[may_end_R].tolist(), begins[may_end_R].tolist(), strict=True):
            last = ends.first(tokens_RS[row], begin, min(begin + self._per_check, self._steps))
            if last is not None or lengths_R[row] >= self._steps:
                yield row, self._steps if last is None else last + 1

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

    def _step(self, rows: int) -> Callable[[], Any]:
        if not self._can_capture:
            return partial(self._eager, partial(self._decode_one, rows))
        if self._run is None:
            self._run = self._captured_step(partial(self._decode_one, rows))
        return self._run

    def _eager(self, run: Callable[[], None]) -> None:
        with self._prepared_model(), self._step_layers():
            run()

    @property
    def _layer_variant(self) -> Hashable:
        return self.capacity, self.tokens, self._fused is not None

    def _step_layers(self) -> AbstractContextManager[None]:
        if not self._compile_step:
            return nullcontext()
        return compiled_layers(self._model, self._cache.slots, compile_layer(self._model, self._layer_variant))

    def _prompt_layers(self, slots_PN: Tensor) -> AbstractContextManager[None]:
        if not self._compile_prompts:
            return nullcontext()
        slots = [PromptSlots(layer, slots_PN) for layer in self._cache.slots]
        return compiled_layers(self._model, slots, compile_layer(self._model, self._layer_variant, dynamic=True))

    def _captured_step(self, step: Callable[[], None]) -> Callable[[], Any]:
        # The calls before the capture are steps: they move places and tokens, which are restored. What they write into
        # the cache is behind each row's length and will be overwritten.
        state = (self._token_R, self._cache.places_R, self._step_R, self._column_1)
        before = [part.clone() for part in state]
        with self._setup("compile" if self._compile_step else "capture"):
            with self._prepared_model(), self._step_layers():
                run = self._capture(step)
            for part, value in zip(state, before, strict=True):
                part.copy_(value)
            torch.cuda.synchronize()
        return run

    def _captured_prompts(self, read: Callable[[], None]) -> Callable[[], Any]:
        with self._setup("compile" if self._compile_prompts else "capture"):
            run = self._capture(read)
            if not self._can_capture:
                read()  # otherwise the calls before the capture have done it
            torch.cuda.synchronize()
        return run

    def _capture(self, run: Callable[[], None]) -> Callable[[], Any]:
        graph = capture_if_possible(self._model, run, self._note) if self._can_capture else None
        self._can_capture = graph is not None
        return graph or partial(self._eager, run)

    def _decode_one(self, rows: int) -> None:
        places_R, step_R = self._cache.places_R[:rows], self._step_R[:rows]
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
            numbers_R = self._numbers_RS[:rows].gather(1, step_R[:, None]).squeeze(1)
        tokens_R, logs_R = self._sample(logits_RV, self._settings, numbers_R)
        self._tokens_RC[:rows].index_copy_(1, self._column_1, tokens_R[:, None])
        self._logs_RC[:rows].index_copy_(1, self._column_1, logs_R[:, None])
        self._token_R[:rows].copy_(tokens_R)
        # Finished rows keep running until the host notices; the clamps keep them inside their slots.
        places_R.add_(1).clamp_(max=self._cache.tokens - 1)
        step_R.add_(1).clamp_(max=self._steps - 1)
        self._column_1.add_(1).remainder_(self._per_check)


def prompts_at_once(length: int, most: int) -> int:
    """Prompts of this length that are read together, if `most` prompts have room."""
    wanted = max(most // _GROUP_SHARE, min(most, _CHEAP_PROMPT_TOKENS // length))
    wanted = max(1, min(wanted, _PROMPT_TOKENS_AT_ONCE // length))
    return 1 << (wanted.bit_length() - 1)


def compiling_pays(rows: int, steps: int) -> bool:
    return steps * (_SAVED_PER_STEP_J + rows * _SAVED_PER_ROW_J) > _COMPILE_J


def capture_if_possible(model: Any, run: Callable[[], Any], note: Callable[[str], None]) -> Callable[[], Any] | None:
    """As a CUDA graph. None, with a note, for kernels of a quantization library that wait for the host, which a graph
    cannot contain; without graphs they give the same tokens more slowly."""
    try:
        return capture_cuda_graph(run)
    except RuntimeError as error:
        kind = quantization_of(model)
        if kind is None:
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        note(f"{kind}: generation runs without CUDA graphs, because its kernels cannot be captured: {reason}")
        return None


def compiling_prompts_pays(model: Any, tokens: int) -> bool:
    config = model.config.get_text_config()
    return bool(tokens * config.num_hidden_layers * config.hidden_size * _SAVED_PER_HIDDEN_STATE_J > _COMPILE_J)


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def rows_that_fit(model: Any, tokens: int) -> int:
    """How many slots of this length fit into the free memory of the model's GPU: a multiple of 64, so that small
    differences in free memory do not change the shapes of a run that is resumed."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = head_width(config) or config.hidden_size
    parameter = next(model.parameters())
    # Keys and values of every layer; a slot is rounded up to whole blocks.
    slot_bytes = 2 * config.num_hidden_layers * heads * size * parameter.element_size() * (tokens + _BLOCK)
    free_bytes, _ = torch.cuda.mem_get_info(parameter.device)
    rows = max(1, int(_CACHE_SHARE * free_bytes / slot_bytes))
    return rows - rows % 64 if rows > 64 else rows


@dataclass(frozen=True)
class ModelSupport:
    """What of this module a model can be used with."""

    slots: bool
    fused: FusedLayers | None = None
    problem: str = ""
    """Why it cannot be used with slots."""


def check_model(model: Any) -> ModelSupport:
    """Full attention in all layers through the attention interface of transformers, and the same logits as without; on
    a GPU with joined layers if these give the same logits, too."""
    config = model.config.get_text_config()  # of a model that also reads images: the settings of its language model
    if quantization_of(model) == "int8":
        return ModelSupport(False, problem="has int8 weights, whose products depend on the other rows of a batch")
    # A window is longer than the prompts that are compared below.
    slides = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if slides or set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return ModelSupport(False, problem="does not use full attention in all layers")
    named = {"attention_mask", "position_ids", "logits_to_keep"} <= forward_arguments(model)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    if not named or capped or not getattr(model, "_supports_sdpa", False):
        return ModelSupport(False, problem=_OTHER_ATTENTION)
    if (getattr(config, "max_position_embeddings", None) or _CHECKED_SLOTS) < _CHECKED_SLOTS:
        return ModelSupport(False, problem=f"has a context of fewer than {_CHECKED_SLOTS} tokens")
    if next(model.parameters()).is_cuda and _joining_fits(model):
        fused = FusedLayers(model)
        # A kernel that cannot be compiled for this GPU may raise anything; the layers of the model always work.
        with suppress(Exception):
            if fused.present and _same_logits(model, fused):
                return ModelSupport(True, fused)
    try:
        return ModelSupport(_same_logits(model), problem="computes other logits with fixed slots than without")
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, NotImplementedError):
        return ModelSupport(False, problem=_OTHER_ATTENTION)


def _joining_fits(model: Any) -> bool:
    """Joined layers have copies of two thirds of the weights. A large model needs the memory for its cache, and its
    products take so long that joining them saves little."""
    own_bytes = sum(weight.nbytes for weight in model.parameters())
    free_bytes, _ = torch.cuda.mem_get_info(next(model.parameters()).device)
    return bool(own_bytes <= _JOINED_SHARE * free_bytes)


@torch.no_grad()
def _same_logits(model: Any, fused: FusedLayers | None = None) -> bool:
    """Checked on two prompts of different length. A wrong mask changes logits at least as much as a missing token, and
    rounding far less, whatever the size of the logits."""
    words = model.config.get_text_config().vocab_size
    # Different lengths show wrong masks and positions, which rows of equal length would hide. The tokens come from the
    # whole vocabulary: the first ones are often special tokens, whose huge activations are rounded coarsely.
    prompts = [[words * place // 11 for place in places] for places in ((1, 2, 3, 4, 5, 6, 7), (9, 8, 10))]
    found: list[Tensor] = []

    def keep(logits_RV: Tensor, settings: Any, numbers: Any) -> tuple[Tensor, Tensor]:
        found.append(logits_RV.float())
        tokens_R = logits_RV.argmax(-1)
        return tokens_R, tokens_R.float()

    decoder = StaticDecoder(model, len(prompts), _CHECKED_SLOTS, GenerationSettings(max_new_tokens=1), fused=fused)
    decoder._sample, decoder._can_capture = keep, False
    for _ in decoder.decode(prompts, None, AnswerEnds((), None)):
        pass
    for prompt, logits_V in zip(prompts, found[0], strict=True):
        expected_V = _last_logits(model, [prompt])[0]
        without_KV = _last_logits(model, [prompt[:place] + prompt[place + 1 :] for place in range(len(prompt) - 1)])
        effect = (without_KV - expected_V).norm(dim=-1).min()
        rounding = torch.maximum(_SAME_LOGITS * effect, _SAME_NUMBERS * expected_V.norm())
        if not (logits_V - expected_V).norm() <= rounding:  # also if they are not numbers
            return False
    return True


def _last_logits(model: Any, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Logits after each of several prompts of one length, without a cache."""
    ids = torch.tensor(prompts, device=next(model.parameters()).device)
    return model(ids, use_cache=False).logits[:, -1].float()  # type: ignore[no-any-return]
