"""Results go to stdout, at the terminal's width or, in a pipe, wide enough to keep a table whole."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType

PIPE_WIDTH = 140


def print_result(*renderables: RenderableType) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False)
    for renderable in renderables:
        console.print(renderable)
