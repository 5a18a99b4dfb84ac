"""Speed and energy per pair of preference training for a student in the shape of Llama-1B.

Random weights, random tokens; every pair is a prompt of 256 tokens and two answers of 256. Several methods in one run,
each a warm-up and then an undisturbed window between two synchronizations, all but TRL through the one training loop:

    ours       joulelab's objective: figures given, the prompt computed once, the vocabulary in chunks
    live       a row for each answer, all logits in memory, and the reference computed live in every step: the plain
               implementation
    cached     the same rows and logits, the reference's figures given; not measured unless it is named
    trl        TRL's DPO trainer with its live reference, same dtype and optimizer; left out where trl is not installed
    trl-liger  the same with Liger's kernels; needs liger-kernel and a GPU

It is meant to be repeated: one layer is compiled and reused (`--compile blocks`), losses are compared on a small model,
windows are 4 s, and no method begins after `--limit-s`.

The cost per pair of `ours` and `cached` includes the reference's pass, as if every pair were trained on once; it is
also measured and printed separately. Before that, loss and gradient of `ours` are compared with the plain ones on one
batch of a small model.

Per pair, in token passes: live 4 x 1024 (forward, backward as two, reference); cached 3 x 1024; ours 3 x 768, and one
forward pass over 768 tokens for the reference.

    python benchmarks/dpo_step.py
    python benchmarks/dpo_step.py --weights bf16 --ways ours,trl,trl-liger
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import transformers
import trl_peer
from numpy.typing import NDArray
from pacing import Window, forget_peak, free, interrupt_on_sigterm, undisturbed, wait, warm_up
from torch import nn

from joulelab.data.batches import TensorBatch
from joulelab.distill.causal.models import expose_hidden_states
from joulelab.distill.preferences.pairs import Pair, PairBatches, PairLayout
from joulelab.distill.preferences.preference_loss import (
    PreferenceObjective,
    TargetLogProbabilities,
    dpo_loss,
    margins,
    write_reference,
)
from joulelab.meter.config import EnergyConfig
from joulelab.meter.integrate import component_energy
from joulelab.meter.series import load_trace
from joulelab.meter.session import Meter
from joulelab.train.bf16_weights import cast_weights
from joulelab.train.config import CompileMode, Precision, TrainingConfig
from joulelab.train.optim import BLOCKS, OFF, autocast, compile_in_place, float32_matmul_precision
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer
from joulelab.zoo.objective import ObjectiveOutput

BETA = 0.1
WAYS = ("ours", "live", "cached", "trl", "trl-liger")
LLAMA_1B = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 500_000.0,
}  # fmt: skip
TINY = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What is trained on."""

    prompt: int
    answer: int
    pairs: int
    """In a step."""
    tiny: bool

    @property
    def model(self) -> dict[str, Any]:
        return TINY if self.tiny else LLAMA_1B

    @property
    def distinct(self) -> int:
        """Pairs there are, and so the length of the reference's pass."""
        return 8 * self.pairs if self.tiny else 16 * self.pairs


@dataclass(frozen=True)
class Way:
    name: str
    precision: Precision
    compiled: CompileMode
    chunk: int
    weights: Literal["fp32", "bf16"] = "fp32"

    @property
    def shares_prompt(self) -> bool:
        return self.name == "ours"


@dataclass(frozen=True)
class Measured:
    way: Way
    pairs: int
    window_ns: Window
    loss: float
    peak_gib: float | None
    reference_pairs: int = 0
    reference_ns: Window | None = None
    step_j_per_pair: float | None = None
    reference_j_per_pair: float | None = None

    @property
    def step_s_per_pair(self) -> float:
        return (self.window_ns[1] - self.window_ns[0]) / 1e9 / self.pairs

    @property
    def reference_s_per_pair(self) -> float:
        if self.reference_ns is None:
            return 0.0
        return (self.reference_ns[1] - self.reference_ns[0]) / 1e9 / self.reference_pairs

    @property
    def pairs_per_s(self) -> float:
        """In training; the reference's pass is not in it."""
        return 1 / self.step_s_per_pair

    @property
    def pairs_per_s_with_reference(self) -> float:
        return 1 / (self.step_s_per_pair + self.reference_s_per_pair)

    @property
    def j_per_pair(self) -> float | None:
        """With the reference's pass."""
        if self.step_j_per_pair is None or (self.reference_ns is not None and self.reference_j_per_pair is None):
            return None
        return self.step_j_per_pair + (self.reference_j_per_pair or 0.0)

    def with_energy(self, trace: Any) -> Measured:
        def per(window: Window | None, pairs: int) -> float | None:
            energy_j = component_energy(trace, "gpu", [window]).energy_j if window else None
            return None if energy_j is None else energy_j / pairs

        return replace(
            self,
            step_j_per_pair=per(self.window_ns, self.pairs),
            reference_j_per_pair=per(self.reference_ns, self.reference_pairs),
        )


class RandomPairs:
    def __init__(self, shape: Shape) -> None:
        random = np.random.default_rng(0)
        sizes = (shape.prompt, shape.answer, shape.answer)
        self._pairs = [
            Pair(*(random.integers(1, shape.model["vocab_size"], size=size) for size in sizes))
            for _ in range(shape.distinct)
        ]
        self.lengths: NDArray[np.int64] = np.tile(np.array(sizes, np.int64), (shape.distinct, 1))

    def __len__(self) -> int:
        return len(self._pairs)

    def pair(self, number: int) -> Pair:
        return self._pairs[number]


def plain_logs(model: nn.Module, batch: TensorBatch) -> torch.Tensor:
    """[pairs, 2] from all logits at once: the plain implementation."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    targets = batch["input_ids"][:, 1:]
    logs = torch.log_softmax(logits.float(), -1).gather(-1, targets[..., None]).squeeze(-1)
    answers = (batch["segments"][:, 1:] > 0).float()
    return (logs * answers).sum(-1).view(-1, 2)


class PlainObjective:
    """DPO over whole logits; a live reference, or figures of it in the batch."""

    is_one_graph = True

    def __init__(self, live: nn.Module | None) -> None:
        self._live = None if live is None else live.eval().requires_grad_(False)

    def __call__(self, model: nn.Module, batch: TensorBatch, phase: Any) -> ObjectiveOutput:
        if self._live is None:
            reference = batch["reference"]
        else:
            with torch.no_grad():
                reference = plain_logs(self._live, batch)
        return ObjectiveOutput(dpo_loss(margins(plain_logs(model, batch), reference), BETA), batch.count)

    def modules(self) -> dict[str, nn.Module]:
        return {}

    def after_step(self, model: nn.Module) -> None: ...


def make_model(shape: Shape, device: torch.device, weights: str = "fp32") -> nn.Module:
    """Initialized on the device, which is fast."""
    torch.manual_seed(0)
    positions = shape.prompt + 2 * shape.answer + 64
    config = transformers.LlamaConfig(tie_word_embeddings=True, max_position_embeddings=positions, **shape.model)
    with device:
        model: nn.Module = transformers.LlamaForCausalLM(config)
    return expose_hidden_states(cast_weights(model, torch.bfloat16) if weights == "bf16" else model)


def make_trainer(
    way: Way, shape: Shape, folder: Path, device: torch.device
) -> tuple[SimpleTrainer[TensorBatch], Window | None]:
    """With the time in which the reference's figures were made, where the way has such a pass."""
    model, pairs = make_model(shape, device, way.weights), RandomPairs(shape)
    how = TargetLogProbabilities(way.chunk, compile_mode=way.compiled)
    rows = PairLayout(shared_prompt=way.shares_prompt)
    objective: Any
    reference, window = None, None
    if way.name == "live":
        objective = PlainObjective(copy.deepcopy(model))
    else:
        called: Any = model
        if way.compiled == BLOCKS:
            compile_in_place(model, BLOCKS)
        elif way.compiled != OFF:
            called = torch.compile(model)
        arguments: dict[str, Any] = {
            "batch_size": shape.pairs,
            "log_probabilities": how,
            "precision": way.precision,
            "layout": rows,
            "called": called,
        }
        warm = FirstPairs(pairs, 3 * shape.pairs)
        write_reference(folder / "warm.jsonl", "start", model, warm, **arguments)
        wait(device)
        begin_ns = time.monotonic_ns()
        reference = write_reference(folder / "reference.jsonl", "start", model, pairs, **arguments)
        wait(device)
        window = (begin_ns, time.monotonic_ns())
        objective = PreferenceObjective(model, "dpo", BETA, how) if way.name == "ours" else PlainObjective(None)
    config = TrainingConfig(
        epochs=None, max_steps=10**9, batch_size=shape.pairs, precision=way.precision, compile=way.compiled,
        learning_rate=1e-6, prefetch=4, weights=way.weights,
    )  # fmt: skip
    batches = PairBatches(pairs, shape.pairs, 0, reference, rows)
    return SimpleTrainer(model, batches, objective, config, NoOpStats()), window


class FirstPairs:
    """So that compiling and the allocator have settled before the pass that is measured."""

    def __init__(self, pairs: RandomPairs, count: int) -> None:
        self.lengths, self.pair = pairs.lengths[:count], pairs.pair

    def __len__(self) -> int:
        return len(self.lengths)


def measure_peer(way: Way, shape: Shape, seconds: float, device: torch.device) -> Measured:
    model, pairs = make_model(shape, device, way.weights), RandomPairs(shape)
    model.__class__ = transformers.LlamaForCausalLM  # without `hidden_only`: Liger patches transformers' class
    rows = [(pair.prompt, pair.chosen, pair.rejected) for pair in map(pairs.pair, range(len(pairs)))]
    settings = trl_peer.PeerSettings(
        batch_size=shape.pairs, optimizer="adamw", half=way.precision == "bf16", checkpointing=False, compiled=False,
        liger=way.name == "trl-liger", seconds=seconds,
    )  # fmt: skip
    found = trl_peer.dpo_window(model, rows, BETA, settings)
    return Measured(way, found.steps * shape.pairs, found.window_ns, found.loss, found.peak_gib, 0, None)


def measure(way: Way, shape: Shape, folder: Path, seconds: float, device: torch.device) -> Measured:
    if way.name.startswith("trl"):
        return measure_peer(way, shape, seconds, device)
    forget_peak()
    with float32_matmul_precision(way.precision):
        trainer, reference_ns = make_trainer(way, shape, folder, device)
        trainer.model.train()
        first = warm_up(trainer, device)
        if not math.isclose(first, math.log(2), abs_tol=0.02):
            print(f"{way.name}: the first loss is {first:.4f} and not ln 2", flush=True)
        found = undisturbed(trainer, device, seconds)
    distinct = shape.distinct if reference_ns else 0
    return Measured(way, found.samples, found.window_ns, found.loss, found.peak_gib, distinct, reference_ns)


def equality(way: Way, shape: Shape, device: torch.device) -> dict[str, float]:
    """Relative distance of our loss and gradient from the plain fp32 ones, in fp32 and in the way's numbers."""
    shape = replace(shape, pairs=2, tiny=True)
    model, live = make_model(shape, device), make_model(shape, device)
    with torch.no_grad():  # a policy that has left its reference, or there would be no margin to compare
        for parameter in live.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))
    pairs = RandomPairs(shape)
    some = [pairs.pair(number) for number in range(2)]
    apart = PairLayout(shared_prompt=False).batch(some).to(device)
    shared = PairLayout().batch(some).to(device)
    with float32_matmul_precision("fp32"):
        exact = PlainObjective(live)(model, apart, None).loss_sum
        expected = torch.autograd.grad(exact, list(model.parameters()))
    found: dict[str, float] = {}
    objective = PreferenceObjective(model, "dpo", BETA, TargetLogProbabilities(way.chunk), live_reference=live)
    for precision in dict.fromkeys(("fp32", way.precision)):
        with float32_matmul_precision(precision), autocast(precision, device):
            loss = objective(model, shared, torch.profiler.record_function).loss_sum
        own = torch.autograd.grad(loss, list(model.parameters()))
        distance = torch.stack([(one - other).norm() for one, other in zip(own, expected, strict=True)]).norm()
        length = torch.stack([other.norm() for other in expected]).norm()
        found[f"loss_{precision}"] = abs(float(loss.detach()) / float(exact.detach()) - 1)
        found[f"gradient_{precision}"] = float(distance / length)
    return found


def output_text(found: Measured) -> str:
    way = found.way
    joules = "joules missing"
    if found.j_per_pair is not None:
        joules = f"{found.j_per_pair:.2f} J/pair ({found.reference_j_per_pair or 0:.2f} of it the reference's pass)"
    memory = "" if found.peak_gib is None else f", peak {found.peak_gib:.1f} GiB"
    return (
        f"{way.name:7} {way.precision} compile={way.compiled}: {found.pairs_per_s:,.1f} pairs/s in training, "
        f"{found.pairs_per_s_with_reference:,.1f} with the reference's pass, {joules}{memory}, loss {found.loss:.4f}"
    )


def ratios(found: list[Measured]) -> dict[str, float]:
    """Ours against the others, each the larger the better."""
    by_name = {one.way.name: one for one in found}
    made: dict[str, float] = {}
    new = by_name.get("ours")
    for name, other in by_name.items():
        if new is None or other is new:
            continue
        made[f"speed_over_{name}"] = new.pairs_per_s / other.pairs_per_s
        made[f"speed_over_{name}_with_reference"] = new.pairs_per_s_with_reference / other.pairs_per_s_with_reference
        if new.j_per_pair and other.j_per_pair:
            made[f"joules_of_{name}_over_ours"] = other.j_per_pair / new.j_per_pair
        if new.peak_gib and other.peak_gib:
            made[f"memory_of_{name}_over_ours"] = other.peak_gib / new.peak_gib
    return made


def as_json(found: Measured, shape: Shape) -> dict[str, Any]:
    plain_tokens = 2 * (shape.prompt + shape.answer)
    return {
        **asdict(found),
        "pairs_per_s": found.pairs_per_s,
        "pairs_per_s_with_reference": found.pairs_per_s_with_reference,
        "j_per_pair": found.j_per_pair,
        "tokens_per_s_as_separate_rows": found.pairs_per_s * plain_tokens,
    }


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8, help="pairs in a step")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--chunk", type=int, default=4096, help="answer tokens whose logits are projected at a time")
    parser.add_argument("--compile", default="blocks", choices=get_args(CompileMode))
    parser.add_argument("--precision", default="bf16", choices=get_args(Precision))
    parser.add_argument("--weights", default="fp32", choices=("fp32", "bf16"), help="dtype of the weights")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of each undisturbed window")
    parser.add_argument("--ways", default="ours,live,trl-liger,trl", help=f"by commas: {', '.join(WAYS)}")
    parser.add_argument("--limit-s", type=float, default=80.0, help="no method begins after this many seconds")
    parser.add_argument("--tiny", action="store_true", help="a small model and vocabulary, to try the script on a CPU")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    began_s = time.monotonic()
    interrupt_on_sigterm()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.weights == "fp32":
        options.precision = "fp32"
    names = options.ways.split(",")
    if set(names) - set(WAYS):
        raise SystemExit(f"unknown ways: {', '.join(sorted(set(names) - set(WAYS)))}; known: {', '.join(WAYS)}")
    for name in [name for name in names if name.startswith("trl")]:
        reason = trl_peer.why_absent(liger=name == "trl-liger")
        if reason is not None:
            print(f"{name}: left out, {reason}", flush=True)
            names.remove(name)
    shape = Shape(options.prompt, options.completion, options.pairs, options.tiny)
    ways = [Way(name, options.precision, options.compile, options.chunk, options.weights) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        apart = equality(ways[0], shape, device)
        print("relative distance from the plain fp32 loss:", {name: f"{value:.1e}" for name, value in apart.items()})
        meter = Meter(place / "trace.jsonl", place / "events.jsonl", EnergyConfig())
        meter.start()
        found = []
        for way in ways:
            if time.monotonic() - began_s > options.limit_s:
                print(f"{way.name}: left out, {options.limit_s:.0f} s have passed (--limit-s)", flush=True)
                continue
            (place / way.name).mkdir()
            try:
                found.append(measure(way, shape, place / way.name, options.seconds, device))
                print(output_text(found[-1]), flush=True)
            except KeyboardInterrupt:  # report the energy of what was measured so far
                break
            except Exception:  # a failing method does not affect the others
                print(f"{way.name}: FAILED\n{traceback.format_exc(limit=-4)}", flush=True)
            free()
        meter.stop()
        trace = load_trace(place / "trace.jsonl")
    found = [one.with_energy(trace) for one in found]
    print("\nwith their joules:")
    for one in found:
        print(output_text(one))
    print({name: round(value, 2) for name, value in ratios(found).items()})
    printed_json = [as_json(one, shape) for one in found]
    print(json.dumps({"benchmark": "dpo_step", "equality": apart, "ratios": ratios(found), "ways": printed_json}))


if __name__ == "__main__":
    main()
