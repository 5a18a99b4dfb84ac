"""A number out of a cell that may hold a unit, or one of the many ways of saying that there is none."""

from __future__ import annotations

import math
import re
from typing import Any

_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%/]*)\s*$")


def number(cell: Any) -> float | None:
    """43.2, '43.20 W' and '17 %' are numbers; '[N/A]', '-', 'nan' and nothing are None."""
    if isinstance(cell, bool) or cell is None:
        return None
    if isinstance(cell, int | float):
        return float(cell) if math.isfinite(cell) else None
    match = _NUMBER.match(str(cell))
    return float(match[1]) if match else None
