"""Profile text generation: prefill (reading the prompt), decode (token by token) and whole responses.

All use a static key-value cache, so that a decoding step has a fixed shape and can be compiled or captured as one CUDA
graph. The step also takes the argmax and writes the token where the next step reads it, so the host does nothing
between two tokens. After a response the cache is rewound to the end of the prompt, which is still in it: decoding can
be repeated without another prefill.

Steady state means: decoding while the context grows from the prompt to prompt plus response, after everything was
compiled and run once. Whole responses are measured too, to check the sum of the parts.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.config import Case, InferSpec
from joulelab.infer.energy import ItemWindow, energy_per_item
from joulelab.infer.generation.cache import rewind_cache
from joulelab.infer.recipes import autocast_context, capture_cuda_graph, cast_model, inference_context
from joulelab.infer.timing import (
    Latency,
    Round,
    StopReason,
    machine_state,
    row_values,
    run_round,
    run_until_ci,
    stop_reason_text,
)
from joulelab.infer.workload import allocated_bytes, explain_out_of_memory, load_architecture, row_memory_bytes
from joulelab.runs.context import RunContext
from joulelab.train.devices import reset_peak_memory, resolve_device
from joulelab.train.stats.step_energy import energy_reader
from joulelab.zoo.pretrained import import_transformers, seeded_init

_BLOCK = 64
_CHECKED_STEPS = 4


class Decoder:
    """A causal language model with prompts of one length; every response has the same number of tokens."""

    def __init__(self, model: Any, prompts_BT: Tensor, new_tokens: int) -> None:
        self._model = model
        self._prompts_BT = prompts_BT
        rows, self.prompt_tokens = prompts_BT.shape
        self.new_tokens = new_tokens
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and self.prompt_tokens + new_tokens > limit:
            raise ConfigError(
                f"{self.prompt_tokens} prompt tokens and {new_tokens} new ones do not fit into {limit} positions",
                "lower --prompt-tokens or --new-tokens",
            )
        size = -(-(self.prompt_tokens + new_tokens) // _BLOCK) * _BLOCK
        device = prompts_BT.device
        self._cache = import_transformers().StaticCache(config=model.config, max_cache_len=size)
        # Future positions are unmasked: the causal mask hides them, so this mask never changes.
        self._mask_BT = torch.ones(rows, size, dtype=torch.long, device=device)
        self._prompt_places_BT = torch.arange(self.prompt_tokens, device=device).expand(rows, -1)
        self._token_B1 = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._place_B1 = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._one_step: Callable[[], Any] = self._step
        for written in (self._token_B1, self._place_B1, self._mask_BT):
            torch._dynamo.mark_static_address(written)  # lets a compiled step write to it from a CUDA graph
        self.prefill()

    def prefill(self) -> None:
        """Read the prompts and compute the first token of each response."""
        rewind_cache(self._cache, 0)
        self._read(self._prompts_BT, self._prompt_places_BT)
        self._place_B1.fill_(self.prompt_tokens)

    def rewind_to_prompt(self) -> None:
        """Return to the end of the prompt. The token to continue from is arbitrary; it does not change the work."""
        rewind_cache(self._cache, self.prompt_tokens)
        self._place_B1.fill_(self.prompt_tokens)

    def decode(self) -> None:
        """All tokens of a response except the first, which prefill computes."""
        for _ in range(self.new_tokens - 1):
            self._one_step()

    def response(self) -> None:
        self.prefill()
        self.decode()

    def prepare(self, mode: str) -> None:
        """`compiled` and `cuda-graph` apply to the decoding step; prefill stays eager."""
        if mode == "eager":
            return
        expected = self._tokens(_CHECKED_STEPS)
        self._one_step = self._compiled() if mode == "compiled" else self._graphed()
        if self._tokens(_CHECKED_STEPS) != expected:
            raise JoulelabError(
                f"decoding with mode {mode} gives different tokens than eager decoding",
                "this model or transformers version keeps the cache position on the host; use --mode eager",
            )

    def _compiled(self) -> Callable[[], Any]:
        mode = "reduce-overhead" if self._token_B1.is_cuda else None
        step: Callable[[], Any] = torch.compile(self._step, mode=mode, dynamic=False)
        return step

    def _graphed(self) -> Callable[[], Any]:
        self.rewind_to_prompt()
        return capture_cuda_graph(self._step)

    def _tokens(self, steps: int) -> list[int]:
        """Tokens of the first steps after the prompt."""
        self.prefill()
        found = []
        for _ in range(steps):
            self._one_step()
            found += self._token_B1.flatten().tolist()
        return found

    def _step(self) -> None:
        self._read(self._token_B1, self._place_B1)
        self._place_B1.add_(1)

    def _read(self, ids_BT: Tensor, places_BT: Tensor) -> None:
        logits_BV = self._model(
            input_ids=ids_BT,
            attention_mask=self._mask_BT,
            position_ids=places_BT,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        self._token_B1.copy_(logits_BV.argmax(-1, keepdim=True))


PREPARE = "model.prepare"
TRACKER = "generation"
PARTS = ("prefill", "decode", "infer")
"""Stages of a row; `infer` is whole responses."""


def run_generation(run: RunContext, spec: InferSpec) -> None:
    device = resolve_device(spec.device, run)
    with run.stage(PREPARE, role="setup", activity="load"):
        run.progress.write(f"loading {spec.model}")
        model: Any = load_architecture(spec.model)
        if not model.can_generate() or model.config.is_encoder_decoder:
            raise ConfigError(f"{spec.model} is not a causal language model", "use one such as sample:smollm2")
        model.eval().requires_grad_(False).to(device)
    parts: list[_GenerationPhase] = []
    for dtype in spec.dtypes:
        own = copy.deepcopy(model) if len(spec.dtypes) > 1 else model  # casting cannot be undone
        for case in _cases(spec, dtype, device):
            parts += _measure(run, spec, own, case, device)
    _record_results(run, spec, parts, device)


def _cases(spec: InferSpec, dtype: Any, device: torch.device) -> list[Case]:
    modes = spec.decoding_modes(device.type == "cuda")
    return [Case(batch_size, 0, mode, dtype) for batch_size in spec.batch_sizes for mode in modes]


@dataclass
class _GenerationPhase:
    """Prefill, decode or whole responses of a row, with its measurements."""

    name: str
    case: Case
    call: Callable[[], None]
    tokens: int
    """Generated per call and prompt."""
    memory_bytes: int
    rounds: list[Round] = field(default_factory=list)
    stop_reason: StopReason = ""

    @property
    def stage(self) -> str:
        return f"{self.name}.{self.case.stage.removeprefix('infer.')}"

    @property
    def item_windows(self) -> list[ItemWindow]:
        return [(found.window, self.case.batch_size * found.calls) for found in self.rounds]

    @property
    def seconds(self) -> float:
        return sum(found.duration_s for found in self.rounds)


def _measure(run: RunContext, spec: InferSpec, model: Any, case: Case, device: torch.device) -> list[_GenerationPhase]:
    ready = run.stage(PREPARE, again=True, role="setup", activity="load")
    with ready, inference_context(case.dtype), explain_out_of_memory(case, device):
        run.progress.write(f"preparing {case.stage.removeprefix('infer.')}")
        cast_model(model, case.dtype)
        gc.collect()  # frees the last row's cache, which its captured step references in a cycle
        before = allocated_bytes(device)
        reset_peak_memory(device)
        with seeded_init(spec.seed):
            prompts = torch.randint(0, model.config.vocab_size, (case.batch_size, spec.prompt_tokens))
        with autocast_context(case.dtype, device):
            decoder = Decoder(model, prompts.to(device), spec.new_tokens)
            decoder.prepare(case.mode)
            decoder.response()
        memory_bytes = row_memory_bytes(model, device, before)
    work = (
        (decoder.prefill, 0),
        (_rewind_and_decode(decoder), spec.new_tokens - 1),
        (decoder.response, spec.new_tokens),
    )
    parts = [
        _GenerationPhase(name, case, call, tokens, memory_bytes)
        for name, (call, tokens) in zip(PARTS, work, strict=True)
    ]

    def one_round(part: _GenerationPhase, seconds: float) -> None:
        with (
            run.stage(part.stage, again=True, role="inference", activity="generate") as stage,
            inference_context(case.dtype),
            autocast_context(case.dtype, device),
            explain_out_of_memory(case, device),
        ):
            before = part.rounds[-1] if part.rounds else None
            part.rounds.append(run_round(part.call, seconds, spec.usable_threads, before))
            responses = case.batch_size * sum(found.calls for found in part.rounds)
            stage.count(samples=responses, **({"tokens": responses * part.tokens} if part.tokens else {}))

    for number in range(spec.rounds):
        for part in parts if number % 2 == 0 else reversed(parts):
            one_round(part, spec.min_run_time_s / spec.rounds)
    run_until_ci(parts, run.meter, spec, device.type, one_round)
    for part in parts:
        part.call = _released  # releases the decoder and its cache
    return parts


def _released() -> None:
    raise AssertionError("this row is already measured")


def _rewind_and_decode(decoder: Decoder) -> Callable[[], None]:
    def call() -> None:
        decoder.rewind_to_prompt()
        decoder.decode()

    return call


def _record_results(run: RunContext, spec: InferSpec, parts: list[_GenerationPhase], device: torch.device) -> None:
    read = energy_reader(run.meter, max(part.rounds[-1].end_ns for part in parts), device.type)
    for part in parts:
        energy, why_not = energy_per_item(part.item_windows, read)
        item = "response" if part.name == "infer" else part.name
        values = row_values(part.case, item, part.case.batch_size, Latency.of(part.rounds), part.rounds, read)
        values |= {
            "part": part.name,
            "prompt_tokens": spec.prompt_tokens,
            "new_tokens": spec.new_tokens,
            "energy": None if energy is None else energy.model_dump(),
            "why_no_energy": why_not,
            "memory_bytes": part.memory_bytes,
            "device": device.type,
            "threads": spec.usable_threads,
            "stopped": stop_reason_text(part, spec),
            "state": machine_state(run.meter.trace_path, [found.window for found in part.rounds]),
        }
        run.meter.event("tracker", stage=part.stage, name=TRACKER, values=values)
