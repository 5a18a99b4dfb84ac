"""Training speed and energy per token of a student in the shape of Llama-3.2-1B, Llama-2-7B or Llama-2-13B, or of the
30M student of `compare-small`: on tokens, on a teacher's cached distributions, and with a live teacher in the shape of
Llama-3.1-8B (30M: SmolLM2-135M); next to adapters and to TRL.

All weights are random and all rows are full (8 x 1024; 4 x 1024 for 13B, 32 x 512 for 30M), so every position is a
token. Each method is a warm-up and then an undisturbed window between two synchronizations:

    sft        cross-entropy of the tokens
    kd-cache   the same and the forward KL to cached teacher outputs (rs50); the teacher's pass is measured separately
    kd-live    the same with the teacher's forward pass in every step
    lora       sft with adapters (rank 16) instead of all weights; needs peft
    trl        sft with TRL, in the same dtype, batch and optimizer; needs trl
    trl-liger  the same with Liger's kernels; needs liger-kernel and a GPU

A method whose package is absent is left out, and the output says so. 7B and 13B have bf16 weights and Adafactor unless
the options say otherwise, 30M and 1B have fp32 weights and AdamW.

A token of the 1B student is about 7.4 GFLOP (three times two for each of 1.24 billion parameters), so at the 790
TFLOP/s that bf16 products reach on an H200 the floor is near 107 k tokens/s; one of the live teacher adds 16 GFLOP.
The chunked loss and its gradient are first compared with plain cross-entropy.

    python benchmarks/causal_step.py --compile default --seconds 15
    python benchmarks/causal_step.py --student 1b --weights bf16 --ways sft,trl,trl-liger --seconds 10
    python benchmarks/causal_step.py --student 7b --ways sft,kd-cache,lora,trl,trl-liger --seconds 10
    python benchmarks/causal_step.py --student 13b --ways sft,lora --seconds 10
    python benchmarks/causal_step.py --student 30m --ways sft,kd-cache --compile off --seconds 5
    python benchmarks/causal_step.py --tiny --compile off --teacher-compile off --seconds 1
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
import trl_peer
from pacing import TokenSpeed, forget_peak, free, interrupt_on_sigterm, peak_gib, undisturbed, wait, warm_up
from torch import nn
from trl_peer import PeerSettings, sft_window

from joulelab.data.chat.encoding import DocumentList, EncodedDocument
from joulelab.data.chat.packing import PackedRows, pack, training_batches, use_packed_attention
from joulelab.distill.causal.config import SHAPES, Lora, Shape
from joulelab.distill.causal.models import add_lora, expose_hidden_states, lm_head_weight, random_student
from joulelab.distill.causal.objective import TokenObjective
from joulelab.distill.logit_cache.cache_store import LogitCache
from joulelab.distill.logit_cache.kd_loss import KdLoss
from joulelab.distill.logit_cache.teacher_outputs import DistillationBatches, LiveTeacher, write_cache
from joulelab.meter.config import EnergyConfig
from joulelab.meter.series import load_trace
from joulelab.meter.session import Meter
from joulelab.train.config import CompileMode, Optimizer, Precision, TrainingConfig
from joulelab.train.optim import float32_matmul_precision
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer

WORDS_TAKEN = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)
WAYS = ("sft", "kd-cache", "kd-live", "lora", "trl", "trl-liger")
DEFAULT_WAYS = WAYS[:3]


@dataclass(frozen=True)
class Size:
    student: Shape
    teacher: Shape
    words: int
    rows: int
    row_length: int
    batch_size: int


SMOLLM2 = Shape(width=576, layers=30, heads=9, key_value_heads=3, inner_width=1536)
FULL = {
    "30m": Size(SHAPES["30m"], SMOLLM2, 49_152, rows=256, row_length=512, batch_size=32),
    "1b": Size(SHAPES["1b"], SHAPES["8b"], 128_256, rows=256, row_length=1024, batch_size=8),
    "7b": Size(SHAPES["7b"], SHAPES["8b"], 32_000, rows=128, row_length=1024, batch_size=8),
    "13b": Size(SHAPES["13b"], SHAPES["8b"], 32_000, rows=128, row_length=1024, batch_size=4),
}
TINY = Size(SHAPES["nano"], SHAPES["nano"], 512, rows=16, row_length=64, batch_size=4)


def make_model(shape: Shape, words: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Initialized on the device, which is fast."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            torch.manual_seed(seed)
            return expose_hidden_states(random_student(shape, words, WORDS_TAKEN, seed)).to(device)
    finally:
        torch.set_default_dtype(usual)


def make_rows(size: Size) -> PackedRows:
    random = np.random.default_rng(0)
    trained = np.arange(size.row_length) > 0
    rows = [EncodedDocument(random.integers(10, size.words, size.row_length), trained.copy()) for _ in range(size.rows)]
    return pack(DocumentList(rows), size.row_length, seed=0)


class Stand:
    """What all methods share; the teacher is loaded only while its outputs are computed."""

    def __init__(self, size: Size, options: argparse.Namespace, place: Path, device: torch.device) -> None:
        self.size, self.options, self.place, self.device = size, options, place, device
        self.rows = make_rows(size)
        self.half = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.adjacent: list[TokenSpeed] = []
        """Work that a method depends on: the teacher's pass over the rows."""

    def teacher(self) -> LiveTeacher:
        model = make_model(self.size.teacher, self.size.words, self.device, self.half, seed=1)
        return LiveTeacher(model.eval().requires_grad_(False), compile_mode=self.options.teacher_compile)

    def student(self) -> nn.Module:
        dtype = torch.bfloat16 if self.options.weights == "bf16" else torch.float32
        return make_model(self.size.student, self.size.words, self.device, dtype)

    def pass_over(self, who: str, tokens: int, begin_ns: int) -> None:
        wait(self.device)
        self.adjacent.append(TokenSpeed(who, "", tokens, (begin_ns, time.monotonic_ns()), peak_gib()))
        print(self.adjacent[-1], flush=True)

    def cache(self) -> LogitCache:
        """The teacher's outputs for all rows."""
        teacher, folder = self.teacher(), self.place / "cache"
        manifest = teacher.manifest("rs50", 1.0, name="random teacher", weights="random", tokenizer="random words")
        some = [self.rows.documents.document(number) for number in range(self.size.batch_size)]
        first = pack(DocumentList(some), self.size.row_length, seed=0)  # one batch of the usual shape, to compile it
        quiet = {"batch_size": self.size.batch_size, "chunk": self.options.chunk, "tick": lambda rows, tokens: None}
        write_cache(self.place / "warm", teacher, first, manifest, compile_mode=self.options.compile, **quiet)
        begin_ns = time.monotonic_ns()
        write_cache(folder, teacher, self.rows, manifest, compile_mode=self.options.compile, **quiet)
        self.pass_over("teacher", self.rows.tokens, begin_ns)
        kept = LogitCache.open(folder)
        print(f"cache: {kept.bytes_per_token:.1f} bytes a token", flush=True)
        return kept


def make_trainer(stand: Stand, way: str, cache: LogitCache | None) -> SimpleTrainer[Any]:
    options, size = stand.options, stand.size
    student = stand.student()
    if way == "lora":
        student = add_lora(student, Lora(), seed=0).model
    attention = use_packed_attention(student)
    batches: Any = training_batches(stand.rows, size.batch_size, seed=0)
    loss = KdLoss(0.5 if way.startswith("kd") else 1.0, chunk=options.chunk, compile_mode=options.compile)
    reported: Callable[[Any], Any] | None = None
    if way == "kd-cache":
        assert cache is not None
        batches, reported = DistillationBatches(batches, cache), lambda batch: batch.targets
    elif way == "kd-live":
        reported = stand.teacher().targets
    objective = TokenObjective(student, attention, loss, reported)
    config = TrainingConfig(
        epochs=None, max_steps=10**9, batch_size=size.batch_size, precision=options.precision, compile=options.compile,
        learning_rate=1e-5, prefetch=4, weights=options.weights, rounding=options.rounding,
        moments=options.moments, optimizer=options.optimizer, activation_checkpointing=options.checkpoint_activations,
        matmul=options.matmul,
    )  # fmt: skip
    return SimpleTrainer(student, batches, objective, config, NoOpStats())


def measure_peer(stand: Stand, liger: bool) -> TokenSpeed:
    options, size = stand.options, stand.size
    model = stand.student()
    # TRL's loss and Liger's patches belong to transformers' class, which `hidden_only` extends.
    model.__class__ = transformers.LlamaForCausalLM
    rows = [stand.rows.documents.document(number).ids for number in range(size.rows)]
    settings = PeerSettings(
        batch_size=size.batch_size, optimizer=options.optimizer, half=options.precision == "bf16",
        checkpointing=options.checkpoint_activations, compiled=options.trl_compile, liger=liger,
        seconds=options.seconds,
    )  # fmt: skip
    found = sft_window(model, rows, settings)
    tokens = found.steps * size.batch_size * size.row_length
    return TokenSpeed("trl-liger" if liger else "trl", "", tokens, found.window_ns, found.peak_gib, found.loss)


def measure(stand: Stand, way: str, cache: LogitCache | None) -> TokenSpeed:
    if way.startswith("trl"):
        return measure_peer(stand, liger=way == "trl-liger")
    trainer = make_trainer(stand, way, cache)
    trainer.model.train()
    forget_peak()
    with float32_matmul_precision(stand.options.precision):
        warm_up(trainer, stand.device)
        found = undisturbed(trainer, stand.device, stand.options.seconds)
    return TokenSpeed(way, "", found.tokens, found.window_ns, found.peak_gib, found.loss)


def equality(device: torch.device) -> dict[str, float]:
    """Relative distance of the chunked loss and its gradients from plain cross-entropy, in fp32 and a small model."""
    stand = Stand(TINY, argparse.Namespace(chunk=32, compile="off", weights="fp32"), Path(), device)
    student = stand.student()
    attention, batch = use_packed_attention(student), training_batches(stand.rows, 4, 0).at(0, 0).to(device)
    logits = student(**attention.inputs(batch)).logits
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum")
    exact = torch.autograd.grad(plain, list(student.parameters()))
    hidden = student(**attention.inputs(batch), hidden_only=True)
    sums = KdLoss(1.0, chunk=32)(hidden, lm_head_weight(student), None, batch.labels, count=batch.count)
    own = torch.autograd.grad(sums.loss, list(student.parameters()))
    apart = torch.stack([(a - b).norm() for a, b in zip(own, exact, strict=True)]).norm()
    length = torch.stack([b.norm() for b in exact]).norm()
    distance = (sums.loss.detach() - plain.detach()).abs() / plain.detach()
    return {"loss": float(distance), "gradient": float(apart / length)}


def ratios(found: list[TokenSpeed]) -> dict[str, float]:
    """Each the larger the better for the first one named."""
    by_way = {one.way: one for one in found}
    pairs = [("kd-cache", "kd-live"), ("kd-cache", "sft"), ("sft", "lora"), ("sft", "trl"), ("sft", "trl-liger")]
    made: dict[str, float] = {}
    for name, other in pairs:
        if name not in by_way or other not in by_way:
            continue
        ours, theirs = by_way[name], by_way[other]
        made[f"speed_{name}_over_{other}"] = ours.tokens_per_s / theirs.tokens_per_s
        if ours.mj_per_token and theirs.mj_per_token:
            made[f"joules_{other}_over_{name}"] = theirs.mj_per_token / ours.mj_per_token
        if ours.peak_gib and theirs.peak_gib:
            made[f"memory_{other}_over_{name}"] = theirs.peak_gib / ours.peak_gib
    return made


def why_absent(way: str) -> str | None:
    if way == "lora" and importlib.util.find_spec("peft") is None:
        return "peft is not installed"
    return trl_peer.why_absent(liger=way == "trl-liger") if way.startswith("trl") else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", type=int, default=4096, help="positions whose logits exist at a time")
    parser.add_argument("--compile", default="default", choices=get_args(CompileMode))
    parser.add_argument(
        "--teacher-compile",
        default="blocks",
        choices=get_args(CompileMode),
        help="the same for the teacher's forward pass",
    )
    parser.add_argument("--precision", default="bf16", choices=get_args(Precision))
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of each undisturbed window")
    parser.add_argument("--ways", default=",".join(DEFAULT_WAYS), help=f"by commas: {', '.join(WAYS)}")
    parser.add_argument("--student", default="1b", choices=tuple(FULL), help="shape of the student")
    parser.add_argument("--weights", choices=("fp32", "bf16"), help="dtype of the student's weights")
    parser.add_argument("--rounding", default="stochastic", choices=("stochastic", "kahan"), help="of bf16 weights")
    parser.add_argument("--moments", default="fp32", choices=("fp32", "bf16"), help="of AdamW, with bf16 weights")
    parser.add_argument("--matmul", default="precision", choices=("precision", "fp8"), help="of linear layers")
    parser.add_argument("--optimizer", choices=get_args(Optimizer))
    parser.add_argument("--batch-size", type=int, help="rows of a step; 8, for 13B 4, for 30M 32")
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--trl-compile", action="store_true", help="torch_compile=True in TRL")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script on a CPU")
    options = parser.parse_args()
    interrupt_on_sigterm()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    large = options.student in ("7b", "13b")
    options.weights = options.weights or ("bf16" if large else "fp32")
    options.optimizer = options.optimizer or ("adafactor" if large else "adamw")
    if device.type == "cpu" and options.weights == "fp32":
        options.precision = "fp32"
    unknown = set(options.ways.split(",")) - set(WAYS)
    if unknown:
        parser.error(f"unknown ways: {', '.join(sorted(unknown))}; known: {', '.join(WAYS)}")
    wanted = [way for way in WAYS if way in options.ways.split(",")]
    for way in [way for way in wanted if why_absent(way)]:
        print(f"{way}: left out, {why_absent(way)}", flush=True)
        wanted.remove(way)
    size = TINY if options.tiny else FULL[options.student]
    size = replace(size, batch_size=options.batch_size or size.batch_size)
    print(
        f"student {options.student}, {options.weights} weights, {options.optimizer}, batch {size.batch_size}, "
        f"products in {options.precision if options.matmul == 'precision' else options.matmul}",
        flush=True,
    )
    apart = equality(device)
    print("relative distance from plain cross-entropy:", {name: f"{value:.1e}" for name, value in apart.items()})
    found: list[TokenSpeed] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        stand = Stand(size, options, place, device)
        meter = Meter(place / "trace.jsonl", place / "events.jsonl", EnergyConfig())
        meter.start()
        cache: LogitCache | None = None
        for way in wanted:
            try:
                if way == "kd-cache":
                    cache = stand.cache()
                    free()
                found.append(measure(stand, way, cache))
                print(found[-1], flush=True)
            except KeyboardInterrupt:  # report the energy of what was measured so far
                break
            except Exception:  # a failing method does not affect the others
                print(f"{way}: FAILED\n{traceback.format_exc(limit=-4)}", flush=True)
            free()
        found += stand.adjacent
        meter.stop()
        trace = load_trace(place / "trace.jsonl")
    found = [one.with_energy(trace) for one in found]
    print("\nwith their joules:")
    for one in found:
        print(one)
    print({name: round(value, 2) for name, value in ratios(found).items()})
    ways = [one.data() for one in found]
    print(json.dumps({"benchmark": "causal_step", "equality": apart, "ratios": ratios(found), "ways": ways}))


if __name__ == "__main__":
    main()
