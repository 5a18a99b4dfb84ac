"""How the figures of an inference read: a value no finer than its doubt, in a unit that needs no exponent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_UNITS = ((1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"))


def energy_unit(energies_j: Iterable[float]) -> tuple[float, str]:
    """For a column: the unit in which its smallest value is at least 1. An image takes mJ on a GPU, J on a CPU."""
    least = min((abs(energy) for energy in energies_j if energy), default=1.0)
    # up to 10 J still reads well in mJ, and that is what latencies in ms are set beside
    return next(((factor, unit) for factor, unit in _UNITS if least >= factor * (10 if unit == "J" else 1)), _UNITS[-1])


def plus_minus(value: float, half_width: float) -> str:
    """`213.4 ± 1.8`: the doubt has two digits, and the value no more places than the doubt."""
    if not half_width:
        return f"{value:.4g} ± 0"
    places = max(0, 1 - math.floor(math.log10(half_width)))
    return f"{value:.{places}f} ± {half_width:.{places}f}"


def with_doubt(energy_j: float, half_width_j: float) -> str:
    """`213.4 ± 1.8 mJ`"""
    factor, unit = energy_unit([max(abs(energy_j), half_width_j)])
    return f"{plus_minus(energy_j / factor, half_width_j / factor)} {unit}"


def where_text(values: Mapping[str, Any]) -> str:
    threads = values["threads"]
    return "GPU" if values["device"] == "cuda" else f"CPU, {threads} thread{'s' if threads != 1 else ''}"
