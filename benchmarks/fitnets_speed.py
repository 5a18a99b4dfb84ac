"""Samples per second and energy per sample of feature distillation: effect of the cache, bf16 and the compiler.

BERT-base is distilled into a DistilBERT-shaped student (random weights, random tokens, 256 a sample; responses and
features of the penultimate layers), in one run on one GPU:

    a  the loop of the old script: fp32, a live teacher in every step, plain AdamW, batches of 32; and the same with
       our batch size, to separate its effect
    b  ours with a cached teacher: bf16, compiled; building the cache is timed too and divided over 3 epochs
    c  ours with a live teacher: bf16, compiled

Each is warmed up, then runs an undisturbed window between two synchronizations; joules come from the meter's trace.
One sample of (b) costs a student's step and a third of a teacher's forward pass, and both are in its figures.

    python benchmarks/fitnets_speed.py --seconds 15
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pacing import wait
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, DistilBertConfig
from transformers import DistilBertForSequenceClassification as DistilBert

from joulelab.data.batches import Batch
from joulelab.distill.classify.config import DistillConfig
from joulelab.distill.classify.data import CachedTeacher
from joulelab.distill.classify.objective import (
    ClassifyObjective,
    LiveTeacher,
    TeacherSource,
    TextForward,
    freeze_teacher,
    make_connector,
)
from joulelab.meter.config import EnergyConfig
from joulelab.meter.integrate import component_energy
from joulelab.meter.series import load_trace
from joulelab.meter.session import Meter
from joulelab.train.config import TrainingConfig
from joulelab.train.optim import autocast, float32_matmul_precision
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer

VOCABULARY, CLASSES, TEXTS, EPOCHS = 30_522, 2, 4096, 3
T_LAYER = S_LAYER = -2
DISTILL = DistillConfig(alpha=0.5, temperature=2.0, feat_beta=1.0, t_layer=T_LAYER, s_layer=S_LAYER, feat_pool="cls")
TEACHER_FORWARD, STUDENT_FORWARD = TextForward(T_LAYER, "cls"), TextForward(S_LAYER, "cls")

Window = tuple[int, int]


@dataclass(frozen=True)
class Measured:
    """One window: how many samples went through it, and its joules once the trace is closed."""

    what: str
    batch_size: int
    samples: int
    window_ns: Window
    energy_j: float | None = None

    @property
    def seconds(self) -> float:
        return (self.window_ns[1] - self.window_ns[0]) / 1e9

    @property
    def s_per_sample(self) -> float:
        return self.seconds / self.samples

    @property
    def j_per_sample(self) -> float | None:
        return None if self.energy_j is None else self.energy_j / self.samples


@dataclass(frozen=True)
class Row:
    """A way of training, with everything a sample of it costs."""

    name: str
    samples_per_s: float
    j_per_sample: float | None


class RandomTexts:
    """Batches of full length, drawn once: what is measured is the models, not the reading of files."""

    def __init__(self, batch_size: int, tokens: int, texts: int = TEXTS) -> None:
        random = np.random.default_rng(0)
        self._ids = torch.from_numpy(random.integers(1000, VOCABULARY, size=(texts, tokens)))
        self._labels = torch.from_numpy(random.integers(0, CLASSES, size=texts))
        self._size, self._tokens = batch_size, tokens

    @property
    def batches_per_epoch(self) -> int:
        return len(self._labels) // self._size

    def at(self, epoch: int, index: int) -> Batch:
        rows = np.arange(index * self._size, (index + 1) * self._size)
        ids = self._ids[rows]
        return Batch(ids, torch.ones_like(ids), self._labels[rows], rows, ids.numel())


def make_teacher(tokens: int, small: bool) -> nn.Module:
    shape = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2} if small else {}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=max(512, tokens), **shape)
    torch.manual_seed(0)
    model: nn.Module = BertForSequenceClassification(config)
    return model


def make_student(tokens: int, small: bool) -> nn.Module:
    shape = {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 256} if small else {}
    torch.manual_seed(1)
    model: nn.Module = DistilBert(
        DistilBertConfig(vocab_size=VOCABULARY, max_position_embeddings=max(512, tokens), **shape)
    )
    return model


def timed(what: str, batch_size: int, step: Callable[[], None], seconds: float, device: torch.device) -> Measured:
    """Warm until compiling and the allocator have settled, then as many steps as fit."""
    for _ in range(5):
        step()
    wait(device)
    settle = time.monotonic() + min(2.0, seconds)
    while time.monotonic() < settle:
        step()
        wait(device)
    steps, begin_ns = 0, time.monotonic_ns()
    while time.monotonic_ns() - begin_ns < seconds * 1e9:
        for _ in range(4):  # a few steps ahead of the GPU, as a loop that does not look at every loss
            step()
        steps += 4
        wait(device)
    return Measured(what, batch_size, steps * batch_size, (begin_ns, time.monotonic_ns()))


def old_loop(options: Any, device: torch.device, batch_size: int) -> Measured:
    """As the old script had it: both models in fp32, the teacher under no_grad in every step, three plain losses."""
    teacher = make_teacher(options.tokens, options.tiny).to(device).eval()
    student = make_student(options.tokens, options.tiny).to(device).train()
    texts = RandomTexts(batch_size, options.tokens)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-5)
    number = 0

    def step() -> None:
        nonlocal number
        batch = texts.at(0, number % texts.batches_per_epoch).to(device)
        number += 1
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "output_hidden_states": True}
        with torch.no_grad():
            reported = teacher(**inputs)
        own = student(**inputs)
        loss = old_loss(own, reported, batch.labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with float32_matmul_precision("fp32"):
        return timed("fp32, live teacher, plain loop", batch_size, step, options.seconds, device)


def old_loss(own: Any, reported: Any, labels: torch.Tensor) -> torch.Tensor:
    hard = functional.cross_entropy(own.logits, labels)
    soft = functional.kl_div(
        functional.log_softmax(own.logits / 2, dim=-1),
        functional.softmax(reported.logits / 2, dim=-1),
        reduction="batchmean",
    )
    features = functional.mse_loss(own.hidden_states[S_LAYER][:, 0], reported.hidden_states[T_LAYER][:, 0])
    return 0.5 * hard + 0.5 * 4 * soft + features


def our_loop(what: str, teacher: TeacherSource, options: Any, device: torch.device) -> Measured:
    """The project's own loop and objective; only what the run around it would do (stages, checkpoints) is left out."""
    student = make_student(options.tokens, options.tiny).to(device)
    width = 64 if options.tiny else 768
    objective = ClassifyObjective(DISTILL, STUDENT_FORWARD, teacher, make_connector(width, width).to(device))
    config = TrainingConfig(
        epochs=None, max_steps=10**9, batch_size=options.batch_size, precision="bf16", compile=options.compile,
        prefetch=4,
    )  # fmt: skip
    texts = RandomTexts(options.batch_size, options.tokens)
    trainer = SimpleTrainer(student, texts, objective, config, NoOpStats())
    trainer.trained.train()
    with float32_matmul_precision("bf16"):
        found = timed(what, options.batch_size, trainer.step, options.seconds, device)
    trainer.close()
    return found


def cached_loop(options: Any, device: torch.device) -> tuple[Measured, Measured]:
    """The cache's making, and training from it."""
    model = freeze_teacher(make_teacher(options.tokens, options.tiny), device, "bf16", options.compile)
    texts = RandomTexts(options.batch_size, options.tokens)
    width = 64 if options.tiny else 768
    logits, features = np.zeros((TEXTS, CLASSES), np.float32), np.zeros((TEXTS, width), np.float32)
    number = 0

    @torch.inference_mode()
    def cache_batch() -> None:
        nonlocal number
        batch = texts.at(0, number % texts.batches_per_epoch)
        number += 1
        with autocast("bf16", device):
            output = TEACHER_FORWARD(model, batch.to(device), True)
        assert output.features is not None
        logits[batch.rows], features[batch.rows] = output.logits_BC.float().cpu(), output.features.float().cpu()

    making = timed("making the cache", options.batch_size, cache_batch, options.seconds, device)
    training = our_loop("training from the cache", CachedTeacher(logits, features), options, device)
    return making, training


def live_loop(options: Any, device: torch.device) -> Measured:
    model = freeze_teacher(make_teacher(options.tokens, options.tiny), device, "bf16", options.compile)
    return our_loop(
        f"c: bf16, compile={options.compile}, live teacher", LiveTeacher(model, TEACHER_FORWARD), options, device
    )


def rows_of(
    compiled: str, old: Measured, large: Measured, making: Measured, training: Measured, live: Measured
) -> list[Row]:
    seconds = training.s_per_sample + making.s_per_sample / EPOCHS
    joules = None
    if training.j_per_sample is not None and making.j_per_sample is not None:
        joules = training.j_per_sample + making.j_per_sample / EPOCHS
    return [
        Row(f"a: {old.what}, batches of {old.batch_size}", 1 / old.s_per_sample, old.j_per_sample),
        Row(f"   {large.what}, batches of {large.batch_size}", 1 / large.s_per_sample, large.j_per_sample),
        Row(f"b: bf16, compile={compiled}, cached teacher (its making over {EPOCHS} epochs)", 1 / seconds, joules),
        Row(live.what, 1 / live.s_per_sample, live.j_per_sample),
    ]


def output_text(row: Row, first: Row) -> str:
    speed = f"{row.samples_per_s:9.1f} samples/s ({row.samples_per_s / first.samples_per_s:5.2f}x)"
    if row.j_per_sample is None or first.j_per_sample is None:
        return f"{row.name:72} {speed}   joules missing"
    return f"{row.name:72} {speed}   {row.j_per_sample:8.4f} J/sample ({row.j_per_sample / first.j_per_sample:6.3f}x)"


def with_joules(found: list[Measured], trace: Path) -> list[Measured]:
    """From the whole trace, once the recorder has closed it."""
    loaded = load_trace(trace)
    return [replace(one, energy_j=component_energy(loaded, "gpu", [one.window_ns]).energy_j) for one in found]


def measured(options: Any, device: torch.device) -> list[Measured]:
    found: list[Measured] = []
    ways: list[Callable[[], list[Measured]]] = [
        lambda: [old_loop(options, device, options.old_batch_size)],
        lambda: [old_loop(options, device, options.batch_size)],
        lambda: [*cached_loop(options, device)],
        lambda: [live_loop(options, device)],
    ]
    for measure in ways:
        found += measure()
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of each undisturbed window")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=256, help="of our loops")
    parser.add_argument("--old-batch-size", type=int, default=32, help="of the old script's, whose default this is")
    parser.add_argument("--compile", default="default", help="off, default, reduce-overhead or max-autotune")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script on a CPU")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if not torch.cuda.is_available() and not options.tiny:
        sys.exit("this benchmark needs a GPU (or --tiny)")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        meter = Meter(trace, Path(folder) / "events.jsonl", EnergyConfig())
        meter.start()
        try:
            found = measured(options, device)
        finally:
            meter.stop()
        found = with_joules(found, trace)
    rows = rows_of(options.compile, *found)
    for row in rows:
        print(output_text(row, rows[0]))
    summary = {"rows": [asdict(row) for row in rows], "windows": [asdict(one) for one in found]}
    print(json.dumps({"benchmark": "fitnets_speed", **vars(options), **summary}))


if __name__ == "__main__":
    main()
