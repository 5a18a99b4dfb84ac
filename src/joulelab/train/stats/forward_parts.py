"""The forward pass cut off after one of the parts it marks (`forward.teacher`, say), to be repeated alone.

An objective marks its parts as context managers. Whoever makes those can leave the pass at the end of any of them; what
came before it has then been done, and nothing after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joulelab.train.trainer import Trainer
    from joulelab.zoo.objective import PhaseMaker


class _Reached(Exception):  # the wanted end, no error
    pass


def parts_of(trainer: Trainer[Any], batch: Any) -> tuple[str, ...]:
    """In the order in which they run; none where there is nothing to tell apart."""
    seen: list[str] = []
    with _marking(trainer, seen.append):
        trainer.forward(batch)
    return tuple(seen) if len(seen) > 1 and len(set(seen)) == len(seen) else ()


def forward_until(trainer: Trainer[Any], part: str, batch: Any) -> None:
    """The forward pass up to the end of `part`."""

    def stop_there(name: str) -> None:
        if name == part:
            raise _Reached

    with _marking(trainer, stop_there), suppress(_Reached):
        trainer.forward(batch)


@contextmanager
def _marking(trainer: Trainer[Any], ended: Callable[[str], None]) -> Iterator[None]:
    """Tell of the end of every outermost part; inner ones belong to theirs."""
    depth = 0

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        nonlocal depth
        depth += 1
        try:
            yield
        finally:
            depth -= 1
        if depth == 0:
            ended(name)

    before: PhaseMaker = trainer.mark_part
    trainer.mark_part = mark
    try:
        yield
    finally:
        trainer.mark_part = before
