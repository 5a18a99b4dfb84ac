"""What a training is summed up by, beside its time and joules: speed, first loss, share of the GPU's peak, memory."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from joulelab.clock import NS
from joulelab.meter.trace import read_lines
from joulelab.train.peak_flops import peak_flops
from joulelab.zoo.paper_cost import PaperCost


@dataclass(frozen=True)
class Speed:
    first_loss: float | None
    items_per_s: float | None
    """Median over the stretches between two lines of metrics: compiling, evaluating and saving fall out of it."""


def read_speed(metrics: Path, stage: str) -> Speed:
    lines = [line for line in read_lines(metrics) if line.get("stage") == stage and "loss" in line]
    return Speed(float(lines[0]["loss"]) if lines else None, _typical_rate(lines))


def _typical_rate(lines: Sequence[dict[str, Any]]) -> float | None:
    stretches = [(a, b) for a, b in pairwise(lines) if a["attempt"] == b["attempt"] and b["mono_ns"] > a["mono_ns"]]
    rates = [(b["samples"] - a["samples"]) * NS / (b["mono_ns"] - a["mono_ns"]) for a, b in stretches]
    return statistics.median(rates) if rates else None


def share_of_peak(cost: PaperCost, speed: Speed, gpu_name: str, precision: str, gpus: int) -> tuple[float | None, str]:
    """Model FLOPs utilisation: FLOPs on paper per second over the data sheet's peak; or why it is not known."""
    peak = peak_flops(gpu_name, precision)
    if peak is None:
        return None, f"no peak of the {gpu_name} in {precision} is known here (train/peak_flops.py)"
    if cost.training_flops is None:
        return None, f"FLOPs not counted: {cost.how}"
    if speed.items_per_s is None:
        return None, "too few steps to tell a speed"
    return cost.training_flops * speed.items_per_s / (gpus * peak), ""


def numbers_of(model: nn.Module, precision: str) -> str:
    """What its matrix products are computed in: weights kept in half precision need no autocast to be."""
    kept = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    largest = max(model.parameters(), key=lambda parameter: parameter.numel())
    return kept.get(largest.dtype, precision)


def start_memory_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Of tensors on a GPU since `start_memory_peak`; on a CPU the most the whole process has ever held."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the kernel tells KiB
