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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.config import Case, InferSpec, Prompt, gguf_file, read_prompts
from joulelab.infer.energy import ItemWindow, energy_per_item
from joulelab.infer.generation.cache import PaddedPrompts, rewind_cache
from joulelab.infer.generation.completions import encode_prompt
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
from joulelab.zoo.pretrained import import_transformers, load_tokenizer, seeded_init
from joulelab.zoo.quantization import is_quantized

_BLOCK = 64
_CHECKED_STEPS = 4


class Decoder:
    """A causal language model with one or several batches of prompts; every response has the same number of tokens.

    Batches take turns, one per prefill. The cache has room for the longest of them, so a decoding step is the same work
    for all.
    """

    def __init__(self, model: Any, prompts: Tensor | Sequence[PaddedPrompts], new_tokens: int) -> None:
        self._model = model
        if isinstance(prompts, Tensor):
            prompts = [PaddedPrompts(prompts, torch.ones_like(prompts))]
        self._batches = list(prompts)
        self._turn = 0
        rows = self._batches[0].ids_PT.shape[0]
        longest = max(batch.ids_PT.shape[1] for batch in self._batches)
        self.new_tokens = new_tokens
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and longest + new_tokens > limit:
            raise ConfigError(
                f"{longest} prompt tokens and {new_tokens} new ones do not fit into {limit} positions",
                "lower --prompt-tokens or --new-tokens",
            )
        # Rounded up, so that runs with slightly different lengths have the same shapes and kernels.
        size = -(-(longest + new_tokens) // _BLOCK) * _BLOCK
        device = self._batches[0].ids_PT.device
        self._cache = import_transformers().StaticCache(config=model.config, max_cache_len=size)
        # Future positions are unmasked: the causal mask hides them. Only the padding of another batch changes the mask.
        self._mask_BT = torch.ones(rows, size, dtype=torch.long, device=device)
        self._token_B1 = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._place_B1 = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._one_step: Callable[[], Any] = self._step
        for written in (self._token_B1, self._place_B1, self._mask_BT):
            torch._dynamo.mark_static_address(written)  # lets a compiled step write to it from a CUDA graph
        self.prefill()

    def prefill(self) -> None:
        """Read the next batch of prompts and compute the first token of each response."""
        self._batch = self._batches[self._turn % len(self._batches)]
        self._turn += 1
        rewind_cache(self._cache, 0)
        if len(self._batches) > 1 or not self._batch.is_full:
            self._mask_BT.fill_(1)
            self._mask_BT[:, : self._batch.ids_PT.shape[1]].copy_(self._batch.mask_PT)
        self._read(self._batch.ids_PT, self._batch.positions_PT)
        self._place_B1.copy_(self._batch.lengths_P1)

    def rewind_to_prompt(self) -> None:
        """Return to the end of the prompt. The token to continue from is arbitrary; it does not change the work."""
        rewind_cache(self._cache, self._batch.ids_PT.shape[1])
        self._place_B1.copy_(self._batch.lengths_P1)

    def decode(self) -> None:
        """All tokens of a response except the first, which prefill computes."""
        # No end-of-text check: every row generates the same number of tokens, so that joules per token are
        # comparable.
        for _ in range(self.new_tokens - 1):
            self._one_step()

    def response(self) -> None:
        self.prefill()
        self.decode()

    def prepare(self, mode: str) -> None:
        """`compiled` and `cuda-graph` apply to the decoding step; prefill stays eager."""
        if mode == "eager":
            return
        # Greedy tokens are compared and not logits: a captured step that reads a stale position
        # repeats tokens, which shows within a few steps, while rounding rarely changes an argmax.
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
        """Tokens of the first steps after the prompts of the first batch."""
        self._turn = 0
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


def prompt_lengths(model: str, prompts: Sequence[Prompt]) -> list[int]:
    """Tokens of each prompt, with the model's chat template for conversations."""
    return [len(ids) for ids in prompt_ids(model, prompts)]


def prompt_ids(model: str, prompts: Sequence[Prompt]) -> list[list[int]]:
    tokenizer = load_tokenizer(model)
    return [encode_prompt(tokenizer, cast(Any, prompt)) for prompt in prompts]


@dataclass(frozen=True)
class PromptFile:
    """Tokenized prompts, cut into batches in the order of the file."""

    path: str
    ids: list[list[int]]

    def batches(self, size: int, device: torch.device) -> list[PaddedPrompts]:
        """The last batch is filled up with prompts from the beginning of the file."""
        # A smaller last batch would mix two batch sizes in one row of the table.
        count = -(-len(self.ids) // size)
        rows = [[self.ids[place % len(self.ids)] for place in range(b * size, (b + 1) * size)] for b in range(count)]
        return [PaddedPrompts.of(batch, device) for batch in rows]

    @property
    def mean_tokens(self) -> float:
        return sum(map(len, self.ids)) / len(self.ids)

    def facts(self, batch_size: int, calls: int) -> dict[str, Any]:
        lengths = [len(ids) for ids in self.ids]
        batches = -(-len(self.ids) // batch_size)
        return {
            "file": Path(self.path).name,
            "count": len(lengths),
            "shortest": min(lengths),
            "longest": max(lengths),
            "batches": batches,
            "batches_measured": min(batches, calls),
            "repeated": batches * batch_size - len(lengths),
        }


def run_generation(run: RunContext, spec: InferSpec) -> None:
    device = resolve_device(spec.device, run)
    prompts = None
    with run.stage(PREPARE, role="setup", activity="load"):
        if spec.prompts:
            prompts = PromptFile(spec.prompts, prompt_ids(spec.model, read_prompts(Path(spec.prompts))))
        run.progress.write(f"loading {spec.model}")
        model: Any = load_architecture(spec.model)
        if not model.can_generate() or model.config.is_encoder_decoder:
            raise ConfigError(f"{spec.model} is not a causal language model", "use one such as sample:smollm2")
        model.eval().requires_grad_(False).to(device)
    parts: list[_GenerationPhase] = []
    for dtype in spec.dtypes:
        own = copy.deepcopy(model) if len(spec.dtypes) > 1 else model  # casting cannot be undone
        for case in _cases(spec, dtype, device):
            parts += _measure(run, spec, own, case, device, prompts)
    _record_results(run, spec, parts, device, prompts)


def _cases(spec: InferSpec, dtype: Any, device: torch.device) -> list[Case]:
    modes = spec.decoding_modes(device.type == "cuda", dtype)
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


def _measure(
    run: RunContext, spec: InferSpec, model: Any, case: Case, device: torch.device, prompts: PromptFile | None
) -> list[_GenerationPhase]:
    ready = run.stage(PREPARE, again=True, role="setup", activity="load")
    with ready, inference_context(case.dtype), explain_out_of_memory(case, device):
        run.progress.write(f"preparing {case.stage.removeprefix('infer.')}")
        cast_model(model, case.dtype)
        gc.collect()  # frees the last row's cache, which its captured step references in a cycle
        before = allocated_bytes(device)
        reset_peak_memory(device)
        words = model.config.get_text_config().vocab_size
        with seeded_init(spec.seed):
            random_BT = torch.randint(0, words, (case.batch_size, spec.prompt_tokens))
        read = random_BT.to(device) if prompts is None else prompts.batches(case.batch_size, device)
        with autocast_context(case.dtype, device):
            decoder = Decoder(model, read, spec.new_tokens)
            try:
                decoder.prepare(case.mode)
            except (RuntimeError, JoulelabError) as error:
                # The kernels of a quantization library may not be capturable; only what was asked for is an error.
                if not is_quantized(case.dtype) or spec.modes:
                    raise
                reason = (str(error) or type(error).__name__).splitlines()[0][:120]
                run.note(f"{case.dtype}: decoding runs eagerly, because mode {case.mode} failed: {reason}")
                case = replace(case, mode="eager")
                decoder = Decoder(model, read, spec.new_tokens)
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

    # Order reversed in every other round: a linear drift of clocks or temperature then cancels between the phases.
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


def _record_results(
    run: RunContext, spec: InferSpec, parts: list[_GenerationPhase], device: torch.device, prompts: PromptFile | None
) -> None:
    # Once the meter has seen the end of the last round; reading earlier would miss the counter's last refresh.
    read = energy_reader(run.meter, max(part.rounds[-1].end_ns for part in parts), device.type)
    for part in parts:
        energy, why_not = energy_per_item(part.item_windows, read)
        item = "response" if part.name == "infer" else part.name
        values = row_values(part.case, item, part.case.batch_size, Latency.of(part.rounds), part.rounds, read)
        values |= {
            "part": part.name,
            "prompt_tokens": spec.prompt_tokens if prompts is None else round(prompts.mean_tokens, 1),
            "new_tokens": spec.new_tokens,
            "energy": None if energy is None else energy.model_dump(),
            "why_no_energy": why_not,
            "memory_bytes": part.memory_bytes,
            "device": device.type,
            "dequantized": gguf_file(spec.model) is not None,
            "threads": spec.usable_threads,
            "stopped": stop_reason_text(part, spec),
            "state": machine_state(run.meter.trace_path, [found.window for found in part.rounds]),
        }
        if prompts is not None:
            values["prompts"] = prompts.facts(part.case.batch_size, sum(found.calls for found in part.rounds))
        run.meter.event("tracker", stage=part.stage, name=TRACKER, values=values)
