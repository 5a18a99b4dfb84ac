"""How the figures of an inference read in tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from joulelab.infer.energy import PerInference
from joulelab.meter.figure_text import amount_text, coverage_text
from joulelab.meter.figures import COVERED
from joulelab.report.wording import NOTHING


def energy_cell(energy: PerInference | None, items: float = 1.0, net: bool = False) -> str:
    """Energy of one item: `213 mJ ±0.8 %`; with the coverage where readings are missing, which the interval covers."""
    if energy is None:
        return NOTHING if net else "missing"
    figure = energy.net(items) if net else energy.gross(items)
    covered = f" ({coverage_text(energy.coverage)})" if figure and energy.coverage < COVERED else ""
    return amount_text(figure) + covered


def where_text(values: Mapping[str, Any]) -> str:
    threads = values["threads"]
    return "GPU" if values["device"] == "cuda" else f"CPU, {threads} thread{'s' if threads != 1 else ''}"
