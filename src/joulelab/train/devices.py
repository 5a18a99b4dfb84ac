"""Devices: resolve the setting, recognize out-of-memory errors, peak memory, peak FLOP/s of known GPUs."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Mapping

import torch

from joulelab import clock
from joulelab.errors import DeviceMissing
from joulelab.runs.attempt_data import STARTUP
from joulelab.runs.context import RunContext


def require_device(name: str) -> None:
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceMissing(
            "device=cuda was requested but torch.cuda.is_available() is False",
            "set device=cpu or install a CUDA build of torch",
        )

    if name == "mps" and not torch.backends.mps.is_available():
        raise DeviceMissing(
            "device=mps was requested but torch.backends.mps.is_available() is False",
            "set device=cpu, or use a Mac with Apple silicon and torch for macOS",
        )


def resolve_device(name: str, run: RunContext) -> torch.device:
    """The device for `auto`, `cpu`, `cuda` or `mps`, initialized and noted in the run. `auto` never chooses `mps`,
    which is not tested on hardware.

    Initializing CUDA takes about a second, once per process, and is recorded as start-up.
    """
    require_device(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    run.note_device(name)
    device, begin_ns = torch.device(name), clock.now().mono_ns
    if _start_device(device):
        run.note_setup(STARTUP, begin_ns, clock.now().mono_ns)
    return device


_started_devices: set[torch.device] = set()


def _start_device(device: torch.device) -> bool:
    """Create the CUDA context and load cuBLAS; returns whether this call did so."""
    if device.type != "cuda" or device in _started_devices:
        return False
    square = torch.ones(256, 256, device=device)
    (square @ square).sum().item()
    _started_devices.add(device)
    return True


# torch has an exception class for GPU memory only; for host memory it raises RuntimeError with one of these texts.
_HOST_MEMORY_ERRORS = ("DefaultCPUAllocator", "size calculation overflowed")


def is_out_of_memory(error: BaseException | None) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _HOST_MEMORY_ERRORS)


# Peak FLOP/s from the vendor's data sheets, the denominator of model FLOPs utilization (MFU).
#
# Dense figures at boost clock: the headline of a data sheet is often twice that, for 2:4 sparse matrices. tf32, bf16
# and fp16 are tensor-core rates with fp32 accumulation; fp32 is the rate of the CUDA cores, as precision=fp32 forbids
# tf32.
_TERA = 1e12


def _dense_tflops(fp32: float, tf32: float | None, half: float | None) -> Mapping[str, float | None]:
    return {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half}


# Words of the driver's device name -> TFLOP/s. The first matching row is used, so variants precede the plain name.
# Sources: NVIDIA's data sheets of the B200 (HGX), H200, H100, A100, V100, L40S, L4, A40, A10 and T4.
_PEAKS: tuple[tuple[str, Mapping[str, float | None]], ...] = (
    ("B200", _dense_tflops(75.0, 1125.0, 2250.0)),
    ("H200 NVL", _dense_tflops(60.0, 417.5, 835.5)),
    ("H200", _dense_tflops(67.0, 494.7, 989.4)),
    ("GH200", _dense_tflops(67.0, 494.7, 989.4)),
    ("H100 NVL", _dense_tflops(60.0, 417.5, 835.5)),
    ("H100 PCIe", _dense_tflops(51.0, 378.0, 756.0)),
    ("H100", _dense_tflops(67.0, 494.7, 989.4)),
    ("A100", _dense_tflops(19.5, 156.0, 312.0)),
    ("L40S", _dense_tflops(91.6, 183.0, 362.0)),
    ("L4", _dense_tflops(30.3, 60.0, 121.0)),
    ("A40", _dense_tflops(37.4, 74.8, 149.7)),
    ("A10", _dense_tflops(31.2, 62.5, 125.0)),
    ("V100 PCIE", {"fp32": 14.0, "fp16": 112.0}),  # no tf32 or bf16 in this generation
    ("V100", {"fp32": 15.7, "fp16": 125.0}),
    ("T4", {"fp32": 8.1, "fp16": 65.0}),
)


def peak_flops(gpu_name: str, precision: str) -> float | None:
    """FLOP/s, or None for a GPU that is not in the table or does not support the precision."""
    words = set(re.split(r"[\s-]+", gpu_name.lower()))
    for card, figures in _PEAKS:
        # By whole words: `A10` must not match `A100`, and `H100 PCIe` must match before `H100`.
        if set(card.lower().split()) <= words:
            figure = figures.get(precision)
            return None if figure is None else figure * _TERA
    return None


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of allocated tensors on a GPU since `reset_peak_memory`; on a CPU the peak resident size of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
