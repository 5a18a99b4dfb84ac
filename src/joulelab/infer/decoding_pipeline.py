"""Generation profiled: prefill, decode and whole responses, each looped for seconds in windows of its own.

Steady state means here: decoding at a context that grows from the prompt's length to prompt plus response, repeated
from the end of the prompt without reading it again, after everything was compiled and run once. Whole responses are
measured too, so that the parts can be checked against them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from joulelab.errors import ConfigError
from joulelab.infer.decoding import Decoder
from joulelab.infer.energy import per_inference
from joulelab.infer.figures import machine_state, row_values
from joulelab.infer.infer_config import Case, InferSpec
from joulelab.infer.places import device_of
from joulelab.infer.precisions import autocast_of, cast_model, inference
from joulelab.infer.subject import load_architecture
from joulelab.infer.timing import Latency, Round, run_round
from joulelab.runs.context import RunContext
from joulelab.train.stats.window_energy import reader_of
from joulelab.train.zoo_results import peak_memory_bytes, start_memory_peak
from joulelab.zoo.pretrained import drawn_from

PREPARE = "model.prepare"
TRACKER = "generation"
PARTS = ("prefill", "decode", "infer")
"""Stages of a row; `infer` is whole responses."""


def run_generation(run: RunContext, spec: InferSpec) -> None:
    device = device_of(spec.device)
    with run.stage(PREPARE):
        run.progress.say(f"loading {spec.model}")
        model: Any = load_architecture(spec.model)
        if not hasattr(model, "lm_head") and not hasattr(model, "get_output_embeddings"):
            raise ConfigError(f"{spec.model} is no causal language model", "generate with one such as sample:smollm2")
        model.eval().requires_grad_(False).to(device)
    rows = []
    for dtype in spec.dtypes:
        own = copy.deepcopy(model) if len(spec.dtypes) > 1 else model  # casting cannot be undone
        rows += [_measure(run, spec, own, case, device) for case in _cases(spec, dtype)]
    _tell(run, spec, rows, device)


def _cases(spec: InferSpec, dtype: Any) -> list[Case]:
    return [Case(batch_size, 0, mode, dtype) for batch_size in spec.batch_sizes for mode in spec.modes]


class _Row:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.rounds: dict[str, list[Round]] = {part: [] for part in PARTS}
        self.memory_bytes = 0

    def stage(self, part: str) -> str:
        return f"{part}.{self.case.stage.removeprefix('infer.')}"


def _measure(run: RunContext, spec: InferSpec, model: Any, case: Case, device: torch.device) -> _Row:
    row = _Row(case)
    with run.stage(PREPARE, again=True), inference(case.dtype):
        run.progress.say(f"making {row.stage('infer').removeprefix('infer.')} ready")
        cast_model(model, case.dtype)
        start_memory_peak(device)
        with drawn_from(spec.seed):
            prompts = torch.randint(0, model.config.vocab_size, (case.batch_size, spec.prompt_tokens))
        with autocast_of(case.dtype, device):
            decoder = Decoder(model, prompts.to(device), spec.new_tokens)
            decoder.prepare(case.mode)
            decoder.response()
        row.memory_bytes = peak_memory_bytes(device)
    work: dict[str, tuple[Callable[[], None], int]] = {
        "prefill": (decoder.prefill, 0),
        "decode": (_again_and_decode(decoder), spec.new_tokens - 1),
        "infer": (decoder.response, spec.new_tokens),
    }
    for number in range(spec.rounds):
        for part in PARTS if number % 2 == 0 else reversed(PARTS):
            call, tokens = work[part]
            seconds = spec.min_run_time_s / spec.rounds
            with (
                run.stage(row.stage(part), again=True) as stage,
                inference(case.dtype),
                autocast_of(case.dtype, device),
            ):
                before = row.rounds[part][-1] if row.rounds[part] else None
                row.rounds[part].append(run_round(call, seconds, spec.usable_threads, before))
                calls = sum(found.calls for found in row.rounds[part])
                counts = {"samples": calls * case.batch_size, "tokens": calls * case.batch_size * tokens}
                stage.count(**{name: count for name, count in counts.items() if count})
    return row


def _again_and_decode(decoder: Decoder) -> Callable[[], None]:
    def call() -> None:
        decoder.begin_again()
        decoder.decode()

    return call


def _tell(run: RunContext, spec: InferSpec, rows: list[_Row], device: torch.device) -> None:
    read = reader_of(run.meter, max(row.rounds[part][-1].end_ns for row in rows for part in PARTS))
    for row in rows:
        for part in PARTS:
            rounds, batch = row.rounds[part], row.case.batch_size
            energy, why_not = per_inference([(found.window, batch * found.calls) for found in rounds], read)
            item = "response" if part == "infer" else part
            values = row_values(row.case, item, batch, Latency.of(rounds), rounds, read)
            values |= {
                "part": part,
                "prompt_tokens": spec.prompt_tokens,
                "new_tokens": spec.new_tokens,
                "energy": None if energy is None else energy.model_dump(),
                "why_no_energy": why_not,
                "memory_bytes": row.memory_bytes,
                "device": device.type,
                "threads": spec.usable_threads,
                "state": machine_state(run.meter.trace_path, [found.window for found in rounds]),
            }
            run.meter.event("tracker", stage=row.stage(part), name=TRACKER, values=values)
