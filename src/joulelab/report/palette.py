"""Colours and shapes that a colour-blind reader can tell apart, on a light page and on a dark one.

The hues are those of Okabe and Ito (2008), without black and yellow, which vanish on one of the two grounds. Methods
differ in shape as well, so that no reading depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable

HUES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
GREY = "#8A8F98"
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
# Neither is work that anyone set out to do, so neither takes a hue away from a stage.
_GREY_STAGES = ("run.overhead", "idle.before", "idle.after")


def label_scales(labels: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Domain, colours and shapes; with more methods than hues the two cycles still give distinct pairs."""
    domain = list(dict.fromkeys(labels))
    colours = [HUES[i % len(HUES)] for i in range(len(domain))]
    return domain, colours, [SHAPES[i % len(SHAPES)] for i in range(len(domain))]


def stage_scale(stages: Iterable[str]) -> tuple[list[str], list[str]]:
    """Domain and colours; a stage has the same colour in every figure of a page that is given the same stages."""
    domain = sorted(dict.fromkeys(stages), key=lambda stage: stage in _GREY_STAGES)
    coloured = [stage for stage in domain if stage not in _GREY_STAGES]
    return domain, [HUES[coloured.index(s) % len(HUES)] if s in coloured else GREY for s in domain]
