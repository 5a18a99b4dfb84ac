"""joulelab: train, distill and profile models, and report the energy of every stage in joules.

Importing this package is cheap: numpy, torch and the sensors are loaded on first use.

    with joulelab.measure("name") as m:      # any block of code becomes a run
        with m.window("step"):
            ...
    m.energy_j, m.figure, m.windows["step"]
    print(m)                                 # energy, uncertainty, grade, warnings and run directory

    @joulelab.measured("name")               # every call of a function
    joulelab.telemetry("distill_power.csv")  # a CSV row per GPU on every call
    joulelab.load("last").to_pandas("stages")  # finished runs as tables; load_runs("demo-*") for several
    joulelab.live()                          # in a notebook: the current run, live
    %load_ext joulelab                       # in a notebook: %%joulelab measures a cell
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that users' code is checked against the types of what is imported on first use
    from joulelab.integrations.notebook import load_ipython_extension as load_ipython_extension
    from joulelab.meter.monitor.telemetry import telemetry as telemetry
    from joulelab.runs.load import load as load
    from joulelab.runs.load import load_runs as load_runs
    from joulelab.runs.measure.api import measure as measure
    from joulelab.runs.measure.api import measured as measured
    from joulelab.ui.notebook_live import live as live

__version__ = "0.2.0.dev0"

# Name -> "module:object", imported on first use. Strings, so that no package depends on another through this module.
_EXPORTS = {
    "measure": "joulelab.runs.measure.api:measure",
    "measured": "joulelab.runs.measure.api:measured",
    "telemetry": "joulelab.meter.monitor.telemetry:telemetry",
    "load": "joulelab.runs.load:load",
    "load_runs": "joulelab.runs.load:load_runs",
    "live": "joulelab.ui.notebook_live:live",
    "load_ipython_extension": "joulelab.integrations.notebook:load_ipython_extension",
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
