"""Colours and shapes that a colour-blind reader can tell apart, on a light page and on a dark one.

The hues are those of Okabe and Ito (2008), without black and yellow, which vanish on one of the two grounds. Methods
differ in shape as well, so that no reading depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable

HUES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
# Each hue once more darker, and once more pale: a page of many stages runs out of hues before it runs out of shades.
_DARK = ("#004A75", "#A06E00", "#00634A", "#8F3E00", "#8E4B72", "#2B7FB0")
_PALE = ("#8FC1DE", "#F0CD86", "#86CDB9", "#EBB58E", "#E5BFD5", "#B4DDF6")
STAGE_HUES = (*HUES, *_DARK, *_PALE)
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
    # also what an ancestor took in several stages has one of its own: two lines of a legend never look alike
    coloured = [stage for stage in domain if stage not in _GREY_STAGES]
    colours = {stage: STAGE_HUES[place % len(STAGE_HUES)] for place, stage in enumerate(coloured)}
    return domain, [colours.get(stage, GREY) for stage in domain]
