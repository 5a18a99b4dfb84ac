"""joulelab: train, distil and profile models, and know what every stage cost in joules.

Importing this package is cheap on purpose: no numpy, no torch, no sensor is touched until something asks for it.

    with joulelab.measure("name") as m:      # any block of code becomes a run
        with m.window("step"):
            ...
    m.energy_j, m.figure, m.windows["step"]

    @joulelab.measured("name")               # every call of a function
    joulelab.telemetry("distill_power.csv")  # a CSV row per GPU whenever a loop asks
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Name -> "module:object", imported when first asked for. By text, so that no room depends on another through here.
_EXPORTS = {
    "measure": "joulelab.runs.measure.api:measure",
    "measured": "joulelab.runs.measure.api:measured",
    "telemetry": "joulelab.meter.monitor.telemetry:telemetry",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'joulelab' has no attribute '{name}'")
    module, _, attribute = _EXPORTS[name].partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
