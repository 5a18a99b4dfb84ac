"""Speed and energy per token of distilling BERT-base into DistilBERT, compared with the original implementation.

Both models have random weights; rows are full (128 tokens), so every position is a token. Responses at all tokens,
masks and hidden states (alpha_ce 5, alpha_mlm 2, alpha_cos 1). Four methods in one run, each a warm-up and then an
undisturbed window between two synchronizations:

    old            batches of 5, fp32, eager, all logits in memory, a step every 50 batches
    materialized   large batches, bf16, both models compiled, plain PyTorch losses: all logits in memory
    one-graph      the same with the losses compiled into the student's graph: the best that a compiler does with it
    chunked        the same batches through joulelab's objective: no full tensor of logits exists

Before that, loss and gradients of the chunked losses are compared with the plain ones on one batch.
About 620 MFLOP a token; bf16 matrix products of an H200 reach some 790 TFLOP/s, so the floor is near 1.3 M tokens/s.

    python benchmarks/distilbert_step.py --batch-size 256 --chunk 8192 --compile default --seconds 10
"""

from __future__ import annotations

import argparse
import json
import tempfile
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import transformers
from pacing import TokenSpeed, forget_peak, free, interrupt_on_sigterm, undisturbed, warm_up
from torch import nn

from joulelab.data.token_store import write_store
from joulelab.distill.distilbert.config import LmDistillation
from joulelab.distill.distilbert.data import Limits, LmBatch, LmBatches, LmTask, MaskRecipe, cut_sequences, pack_rows
from joulelab.distill.distilbert.objective import FrozenTeacher, LmObjective, Scales, plain_loss, ready
from joulelab.meter.config import EnergyConfig
from joulelab.meter.series import load_trace
from joulelab.meter.session import Meter
from joulelab.train.config import CompileMode, Precision, TrainingConfig
from joulelab.train.optim import autocast, compile_in_place, float32_matmul_precision
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer
from joulelab.zoo.objective import ObjectiveOutput

TERMS = LmDistillation(alpha_ce=5.0, alpha_mlm=2.0, alpha_cos=1.0)
TOKENS = 128
SPECIALS = {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103}


@dataclass(frozen=True)
class Way:
    name: str
    batch_size: int
    precision: Precision
    compiled: CompileMode
    chunk: int
    """0: all logits in memory."""
    accumulate: int = 1
    is_one_graph: bool = False
    """Whether models and losses are compiled together."""
    matmul: Literal["precision", "fp8"] = "precision"
    """Of the student's products; the teacher computes in `precision`."""

    @property
    def about(self) -> str:
        logits = f"chunks of {self.chunk}" if self.chunk else "all logits"
        products = " fp8 products" if self.matmul == "fp8" else ""
        return f"{self.batch_size} x {TOKENS} {self.precision}{products} compile={self.compiled} {logits}: "


class MaterialisedObjective:
    """The plain loss in the loop."""

    def __init__(self, teacher: nn.Module, scales: Scales, is_one_graph: bool) -> None:
        self._teacher, self._scales, self.is_one_graph = teacher, scales, is_one_graph

    def __call__(self, model: nn.Module, batch: LmBatch, phase: Any) -> ObjectiveOutput:
        return ObjectiveOutput(plain_loss(model, self._teacher, batch, self._scales), batch.count)

    def modules(self) -> dict[str, nn.Module]:
        return {}

    def after_step(self, model: nn.Module) -> None: ...


def make_models(tiny: bool, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """(student, teacher); initialized on the device, which is fast."""
    torch.manual_seed(0)
    bert = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 128}
    distil = {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128}
    with device:
        teacher = transformers.BertForMaskedLM(transformers.BertConfig(**(bert if tiny else {})))
        student = transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**(distil if tiny else {})))
    return ready(student, unpadded=True).to(device), ready(teacher, unpadded=True).to(device)


def make_batches(folder: Path, batch_size: int) -> tuple[LmBatches, Scales]:
    """Full rows of random tokens through the pipeline's masking: the host's work is part of the window."""
    random = np.random.default_rng(0)
    rows = (random.integers(1000, 30522, size=TOKENS) for _ in range(max(4096, 4 * batch_size)))
    store = write_store(folder, rows, vocab_size=30522, specials=SPECIALS, tokenizer="random words")
    weights_V = np.ones(30522)
    weights_V[list(SPECIALS.values())] = 0.0
    task = LmTask(MaskRecipe(0.15, 0.8, 0.1, SPECIALS["mask"], weights_V), TERMS.everywhere, SPECIALS["pad"])
    cut = cut_sequences(store, np.arange(len(store)), Limits(TOKENS, 11, 0.5))
    batches = LmBatches(pack_rows(cut, TOKENS), task, batch_size, seed=0)
    return batches, Scales.of(TERMS, task.targets_share(batches.lengths))


def make_trainer(way: Way, folder: Path, tiny: bool, device: torch.device) -> SimpleTrainer[LmBatch]:
    student, teacher = make_models(tiny, device)
    batches, scales = make_batches(folder, way.batch_size)
    objective: Any
    if way.chunk:
        frozen = FrozenTeacher(teacher, torch.bfloat16 if way.precision == "bf16" else None)
        compile_in_place(frozen.model, way.compiled)
        objective = LmObjective(student, frozen, scales, way.chunk, way.compiled)
    else:
        if not way.is_one_graph:
            compile_in_place(teacher, way.compiled)
        objective = MaterialisedObjective(teacher.eval().requires_grad_(False), scales, way.is_one_graph)
    config = TrainingConfig(
        epochs=None, max_steps=10**9, batch_size=way.batch_size, accumulate=way.accumulate, precision=way.precision,
        matmul=way.matmul, compile=way.compiled, learning_rate=1e-5, prefetch=4,
    )  # fmt: skip
    return SimpleTrainer(student, batches, objective, config, NoOpStats())


def measure(way: Way, folder: Path, tiny: bool, seconds: float, device: torch.device) -> TokenSpeed:
    trainer = make_trainer(way, folder, tiny, device)
    trainer.model.train()
    forget_peak()
    with float32_matmul_precision(way.precision):
        warm_up(trainer, device)
        found = undisturbed(trainer, device, seconds)
    return TokenSpeed(way.name, way.about, found.tokens, found.window_ns, found.peak_gib, found.loss)


def equality(way: Way, folder: Path, tiny: bool, device: torch.device) -> dict[str, float]:
    """Relative distance of the chunked loss and gradient from the plain fp32 ones, in fp32 and in the way's numbers."""
    batches, scales = make_batches(folder, 2 if tiny else 32)
    batch = batches.at(0, 0).to(device)
    found: dict[str, float] = {}
    for precision in ("fp32", way.precision):
        found |= distance(replace(way, precision=precision), batch, scales, tiny, device)
    return found


def distance(way: Way, batch: LmBatch, scales: Scales, tiny: bool, device: torch.device) -> dict[str, float]:
    student, teacher = make_models(tiny, device)
    student.eval()
    teacher.eval()
    with float32_matmul_precision("fp32"):
        exact, expected = gradient(student, plain_loss(student, teacher, batch, scales))
    frozen = FrozenTeacher(teacher, torch.bfloat16 if way.precision == "bf16" else None)
    objective = LmObjective(student, frozen, scales, way.chunk, way.compiled)
    with float32_matmul_precision(way.precision), autocast(way.precision, device):
        output = objective(student, batch, torch.profiler.record_function)
        loss, own = gradient(student, output.loss_sum)
    apart = torch.stack([(a - b).norm() for a, b in zip(own, expected, strict=True)]).norm()
    length = torch.stack([b.norm() for b in expected]).norm()
    return {
        f"loss_{way.precision}": abs(loss - exact) / exact,
        f"gradient_{way.precision}": float(apart / length),
    }


def gradient(model: nn.Module, loss: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    return float(loss.detach()), list(torch.autograd.grad(loss, list(model.parameters())))


def ratios(found: list[TokenSpeed]) -> dict[str, float]:
    """Chunked against the others: speed, joules and memory, each the larger the better."""
    by_name = {one.way: one for one in found}
    made: dict[str, float] = {}
    new = by_name.get("chunked")
    for name, other in by_name.items():
        if new is None or other is new:
            continue
        made[f"speed_over_{name}"] = new.tokens_per_s / other.tokens_per_s
        if new.mj_per_token and other.mj_per_token:
            made[f"joules_of_{name}_over_chunked"] = other.mj_per_token / new.mj_per_token
        if new.peak_gib and other.peak_gib:
            made[f"memory_of_{name}_over_chunked"] = other.peak_gib / new.peak_gib
    return made


def ways_of(options: argparse.Namespace) -> list[Way]:
    every = [
        Way("old", 5, "fp32", "off", 0, accumulate=2 if options.tiny else 50),
        Way("materialized", options.batch_size, options.precision, options.compile, 0),
        Way("one-graph", options.batch_size, options.precision, options.compile, 0, is_one_graph=True),
        Way("chunked", options.batch_size, options.precision, options.compile, options.chunk, matmul=options.matmul),
    ]
    wanted = ["materialized" if name == "materialised" else name for name in options.ways.split(",")]  # old spelling
    return [way for way in every if way.name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=256, help="rows of 128 tokens")
    parser.add_argument("--chunk", type=int, default=8192, help="positions whose logits exist at a time")
    parser.add_argument("--compile", default="default", choices=get_args(CompileMode))
    parser.add_argument("--precision", default="bf16", choices=get_args(Precision), help="of all methods except `old`")
    parser.add_argument("--matmul", default="precision", choices=("precision", "fp8"), help="products of `chunked`")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each undisturbed window")
    parser.add_argument("--ways", default="old,materialized,one-graph,chunked", help="by commas")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script on a CPU")
    options = parser.parse_args()
    interrupt_on_sigterm()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        apart = equality(ways_of(options)[-1], place / "equality", options.tiny, device)
        print("relative distance from the plain fp32 loss:", {name: f"{value:.1e}" for name, value in apart.items()})
        meter = Meter(place / "trace.jsonl", place / "events.jsonl", EnergyConfig())
        meter.start()
        found = []
        for way in ways_of(options):
            try:
                found.append(measure(way, place / way.name, options.tiny, options.seconds, device))
                print(found[-1], flush=True)
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
        print(one)
    print({name: round(value, 2) for name, value in ratios(found).items()})
    ways = [one.data() for one in found]
    print(json.dumps({"benchmark": "distilbert_step", "equality": apart, "ratios": ratios(found), "ways": ways}))


if __name__ == "__main__":
    main()
