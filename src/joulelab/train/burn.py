"""A load for calibration and burn-in: matrix products on all GPUs visible to torch, else one busy CPU core.

Runs as a separate program (`python -m joulelab.train.burn SECONDS`): the meter does not import a framework, and polling
a sensor must not share an interpreter with the loop that launches kernels. Prints JSON lines with a description of the
load and its begin and end on the monotonic clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

# Large enough to saturate any current GPU; 3 x 8192^2 in bf16 is 0.4 GB.
SIDE = 8192
PRODUCTS_PER_STEP = 8


def main() -> None:
    seconds = float(sys.argv[1])
    what, step, synchronize = _gpu_load() or _cpu_load()
    _print_json(load=what, begin_ns=time.monotonic_ns())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        step()
    synchronize()
    _print_json(end_ns=time.monotonic_ns())


def _print_json(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _gpu_load() -> tuple[str, Callable[[], object], Callable[[], object]] | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    kind = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    gpus = range(torch.cuda.device_count())
    factors = [[torch.randn(SIDE, SIDE, device=f"cuda:{gpu}", dtype=kind) for _ in range(2)] for gpu in gpus]
    products = [torch.empty_like(a) for a, _ in factors]

    def synchronize() -> None:
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    def step() -> None:
        """Launches are asynchronous, so one thread keeps every GPU busy."""
        for (a, b), out in zip(factors, products, strict=True):
            for _ in range(PRODUCTS_PER_STEP):
                torch.mm(a, b, out=out)
        synchronize()  # limits how long kernels run on after the end

    step()
    what = f"torch {torch.__version__}, {SIDE} x {SIDE} products in {str(kind).removeprefix('torch.')}"
    return f"{what} on {_count_names([torch.cuda.get_device_name(gpu) for gpu in gpus])}", step, synchronize


def _count_names(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" if len(names) > 1 else name for name in dict.fromkeys(names))


def _cpu_load() -> tuple[str, Callable[[], object], Callable[[], object]]:
    return "a busy loop on one CPU core", lambda: sum(range(20_000)), lambda: None


if __name__ == "__main__":
    main()
