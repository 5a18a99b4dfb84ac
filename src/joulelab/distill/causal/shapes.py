"""Sizes of students that are drawn rather than loaded, in the shape of Llama; data only, to be read without torch.

Embeddings are tied. With SmolLM2's 49,152 words most of a small student is its vocabulary: 7.9 of 9.9 million
parameters.
"""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    width: int
    layers: int
    heads: int
    key_value_heads: int
    inner_width: int
    """Of the feed-forward layers."""


SHAPES = {
    "nano": Shape(width=32, layers=2, heads=2, key_value_heads=1, inner_width=64),
    "10m": Shape(width=160, layers=6, heads=5, key_value_heads=5, inner_width=480),
    "30m": Shape(width=320, layers=10, heads=5, key_value_heads=5, inner_width=960),
    # Llama-3.2-1B's
    "1b": Shape(width=2048, layers=16, heads=32, key_value_heads=8, inner_width=8192),
    # Llama-3.1-8B's, as a teacher of benchmarks
    "8b": Shape(width=4096, layers=32, heads=32, key_value_heads=8, inner_width=14336),
}
