"""A load to calibrate and burn in with: matrix products on all GPUs that torch sees, else a busy CPU core.

Runs as a program of its own (`python -m joulelab.train.burn SECONDS`), so that the meter, which knows no framework, can
start it by name, and so that polling a sensor and feeding the GPU do not share an interpreter. Says in JSON lines on
standard output what it is and, on the monotonic clock, when the load began and ended.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

# Large enough to fill any current card; 3 x 8192^2 in bf16 is 0.4 GB.
SIDE = 8192
PRODUCTS_PER_STEP = 8


def main() -> None:
    seconds = float(sys.argv[1])
    what, step, settle = _gpu_load() or _cpu_load()
    _print_json(load=what, begin_ns=time.monotonic_ns())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        step()
    settle()
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
    cards = range(torch.cuda.device_count())
    factors = [[torch.randn(SIDE, SIDE, device=f"cuda:{card}", dtype=kind) for _ in range(2)] for card in cards]
    products = [torch.empty_like(a) for a, _ in factors]

    def settle() -> None:
        for card in cards:
            torch.cuda.synchronize(card)

    def step() -> None:
        """Products are only queued, so one thread keeps every card busy."""
        for (a, b), out in zip(factors, products, strict=True):
            for _ in range(PRODUCTS_PER_STEP):
                torch.mm(a, b, out=out)
        settle()  # bounds how long the load goes on after its end

    step()
    what = f"torch {torch.__version__}, {SIDE} x {SIDE} products in {str(kind).removeprefix('torch.')}"
    return f"{what} on {_count_names([torch.cuda.get_device_name(card) for card in cards])}", step, settle


def _count_names(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" if len(names) > 1 else name for name in dict.fromkeys(names))


def _cpu_load() -> tuple[str, Callable[[], object], Callable[[], object]]:
    return "a busy loop on one CPU core", lambda: sum(range(20_000)), lambda: None


if __name__ == "__main__":
    main()
