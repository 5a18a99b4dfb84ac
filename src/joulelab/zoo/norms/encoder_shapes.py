"""Sizes of the encoders by name; importable without a framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Norm = Literal["pre-ln", "pre-rms", "pre-crms", "post-ln", "none"]
NORMS: tuple[Norm, ...] = ("pre-ln", "pre-rms", "pre-crms", "post-ln", "none")


@dataclass(frozen=True)
class EncoderShape:
    """A transformer encoder with a classifying head."""

    name: str
    kind: Literal["image", "text"]
    width: int
    """Width of the residual stream."""
    layers: int
    heads: int
    norm: Norm
    """As published: DeiT normalizes before each branch, BERT after it."""
    eps: float
    classes: int
    parameters: int
    """Counted; a test builds the model and compares."""
    side: int = 224
    patch: int = 16
    vocabulary: int = 30522
    positions: int = 512
    head_width: int = 64
    hub_id: str = ""

    @property
    def inner(self) -> int:
        """Width of all attention heads together."""
        return self.heads * self.head_width

    @property
    def hidden(self) -> int:
        return 4 * self.inner

    @property
    def patches(self) -> int:
        return (self.side // self.patch) ** 2

    @property
    def item(self) -> str:
        return "image" if self.kind == "image" else "sequence"


def _deit(letter: str, heads: int, parameters: int, word: str) -> EncoderShape:
    return EncoderShape(
        name=f"deit-{letter}",
        kind="image",
        width=64 * heads,
        layers=12,
        heads=heads,
        norm="pre-ln",
        eps=1e-6,
        classes=1000,
        parameters=parameters,
        hub_id=f"facebook/deit-{word}-patch16-224",
    )


def _bert(letter: str, layers: int, heads: int, parameters: int, word: str) -> EncoderShape:
    return EncoderShape(
        name=f"bert-{letter}",
        kind="text",
        width=64 * heads,
        layers=layers,
        heads=heads,
        norm="post-ln",
        eps=1e-12,
        classes=2,
        parameters=parameters,
        hub_id=f"google-bert/bert-{word}-uncased",
    )


SHAPES: dict[str, EncoderShape] = {
    shape.name: shape
    for shape in (
        _deit("t", 3, 5_717_416, "tiny"),
        _deit("s", 6, 22_050_664, "small"),
        _deit("b", 12, 86_567_656, "base"),
        _bert("b", 12, 12, 109_483_778, "base"),
        _bert("l", 24, 16, 335_143_938, "large"),
    )
}
