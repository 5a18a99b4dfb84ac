"""Generation profiled: prefill, decode and whole responses, each looped for seconds in windows of its own.

Steady state means here: decoding at a context that grows from the prompt's length to prompt plus response, repeated
from the end of the prompt without reading it again, after everything was compiled and run once. Whole responses are
measured too, so that the parts can be checked against them.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from joulelab.errors import ConfigError
from joulelab.infer.decoding import Decoder
from joulelab.infer.energy import Turn, per_inference
from joulelab.infer.figures import machine_state, row_values
from joulelab.infer.infer_config import Case, InferSpec
from joulelab.infer.memory import allocated_bytes, explained, row_memory_bytes
from joulelab.infer.precisions import autocast_of, cast_model, inference
from joulelab.infer.subject import load_architecture
from joulelab.infer.tight import Ended, stopped_words, until_tight
from joulelab.infer.timing import Latency, Round, run_round
from joulelab.runs.context import RunContext
from joulelab.train.devices import device_of
from joulelab.train.stats.window_energy import reader_of
from joulelab.train.zoo_results import start_memory_peak
from joulelab.zoo.pretrained import drawn_from

PREPARE = "model.prepare"
TRACKER = "generation"
PARTS = ("prefill", "decode", "infer")
"""Stages of a row; `infer` is whole responses."""


def run_generation(run: RunContext, spec: InferSpec) -> None:
    device = device_of(spec.device, run)
    with run.stage(PREPARE, role="setup", activity="load"):
        run.progress.say(f"loading {spec.model}")
        model: Any = load_architecture(spec.model)
        if not model.can_generate() or model.config.is_encoder_decoder:
            raise ConfigError(f"{spec.model} is no causal language model", "generate with one such as sample:smollm2")
        model.eval().requires_grad_(False).to(device)
    parts: list[_Part] = []
    for dtype in spec.dtypes:
        own = copy.deepcopy(model) if len(spec.dtypes) > 1 else model  # casting cannot be undone
        for case in _cases(spec, dtype, device):
            parts += _measure(run, spec, own, case, device)
    _tell(run, spec, parts, device)


def _cases(spec: InferSpec, dtype: Any, device: torch.device) -> list[Case]:
    modes = spec.decoding_modes(device.type == "cuda")
    return [Case(batch_size, 0, mode, dtype) for batch_size in spec.batch_sizes for mode in modes]


@dataclass
class _Part:
    """Prefill, decode or whole responses of a row."""

    name: str
    case: Case
    call: Callable[[], None]
    tokens: int
    """Generated in a call for one prompt."""
    memory_bytes: int
    rounds: list[Round] = field(default_factory=list)
    ended: Ended = ""

    @property
    def stage(self) -> str:
        return f"{self.name}.{self.case.stage.removeprefix('infer.')}"

    @property
    def turns(self) -> list[Turn]:
        return [(found.window, self.case.batch_size * found.calls) for found in self.rounds]

    @property
    def seconds(self) -> float:
        return sum(found.duration_s for found in self.rounds)


def _measure(run: RunContext, spec: InferSpec, model: Any, case: Case, device: torch.device) -> list[_Part]:
    ready = run.stage(PREPARE, again=True, role="setup", activity="load")
    with ready, inference(case.dtype), explained(case, device):
        run.progress.say(f"making {case.stage.removeprefix('infer.')} ready")
        cast_model(model, case.dtype)
        gc.collect()  # the last row's cache, which its captured step holds on to in a ring
        before = allocated_bytes(device)
        start_memory_peak(device)
        with drawn_from(spec.seed):
            prompts = torch.randint(0, model.config.vocab_size, (case.batch_size, spec.prompt_tokens))
        with autocast_of(case.dtype, device):
            decoder = Decoder(model, prompts.to(device), spec.new_tokens)
            decoder.prepare(case.mode)
            decoder.response()
        memory_bytes = row_memory_bytes(model, device, before)
    work = (
        (decoder.prefill, 0),
        (_again_and_decode(decoder), spec.new_tokens - 1),
        (decoder.response, spec.new_tokens),
    )
    parts = [_Part(name, case, call, tokens, memory_bytes) for name, (call, tokens) in zip(PARTS, work, strict=True)]

    def one_round(part: _Part, seconds: float) -> None:
        with (
            run.stage(part.stage, again=True, role="inference", activity="generate") as stage,
            inference(case.dtype),
            autocast_of(case.dtype, device),
            explained(case, device),
        ):
            before = part.rounds[-1] if part.rounds else None
            part.rounds.append(run_round(part.call, seconds, spec.usable_threads, before))
            responses = case.batch_size * sum(found.calls for found in part.rounds)
            stage.count(samples=responses, **({"tokens": responses * part.tokens} if part.tokens else {}))

    for number in range(spec.rounds):
        for part in parts if number % 2 == 0 else reversed(parts):
            one_round(part, spec.min_run_time_s / spec.rounds)
    until_tight(parts, run.meter, spec, device.type, one_round)
    for part in parts:
        part.call = _measured  # the decoder and its cache go
    return parts


def _measured() -> None:
    raise AssertionError("this row was measured already")


def _again_and_decode(decoder: Decoder) -> Callable[[], None]:
    def call() -> None:
        decoder.begin_again()
        decoder.decode()

    return call


def _tell(run: RunContext, spec: InferSpec, parts: list[_Part], device: torch.device) -> None:
    read = reader_of(run.meter, max(part.rounds[-1].end_ns for part in parts), device.type)
    for part in parts:
        energy, why_not = per_inference(part.turns, read)
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
            "stopped": stopped_words(part, spec),
            "state": machine_state(run.meter.trace_path, [found.window for found in part.rounds]),
        }
        run.meter.event("tracker", stage=part.stage, name=TRACKER, values=values)
