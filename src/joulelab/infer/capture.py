"""Kernels that are launched together: what a call does on the GPU, recorded once and replayed from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_WARM_UP_CALLS = 3


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` as one CUDA graph, whose output every replay writes over.

    It is called a few times before; what it changes, the caller sets back. All it reads must stay where it is: the
    graph knows addresses alone, so it holds on to `run` and to what that keeps.
    """
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # libraries make their plans here, which capturing would not allow
        for _ in range(_WARM_UP_CALLS):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()

    def replay(_kept: Callable[[], Any] = run) -> Any:
        graph.replay()
        return output

    return replay
