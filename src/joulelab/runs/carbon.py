"""CO2e of an energy figure, as a range over the uncertainty of the energy and of the grid.

Reported only if `energy.grid` names a grid. The low end combines the low ends of energy and grid factor, the high end
both high ends; the energy's range is its random 95 % half-width plus the sensor's gain error. PUE (overhead of the
data center) gives separate figures and is never included in the first ones.
"""

from __future__ import annotations

from joulelab.meter.figures import EnergyFigure, Frozen, Method
from joulelab.meter.grids import GridFactor
from joulelab.units import J_PER_KWH


class Co2e(Frozen):
    co2e_g_low: float
    co2e_g_high: float
    with_pue_co2e_g_low: float | None = None
    with_pue_co2e_g_high: float | None = None
    method: Method
    """Method of the energy figure: CO2e of an estimate is an estimate."""


def energy_range_j(figure: EnergyFigure) -> tuple[float, float] | None:
    """Low and high end in joules: random interval and gain error, both at their worst."""
    if figure.energy_j is None:
        return None
    random_j, gain = figure.half_width_j or 0.0, figure.gain_error_rel or 0.0
    low = max(0.0, figure.energy_j - random_j) * max(0.0, 1 - gain)
    return low, (figure.energy_j + random_j) * (1 + gain)


def co2e(figure: EnergyFigure, grid: GridFactor | None, pue: float | None) -> Co2e | None:
    """None without a grid or without energy; no default is assumed for either."""
    energy = energy_range_j(figure)
    if grid is None or energy is None:
        return None
    low = energy[0] / J_PER_KWH * grid.low_g_per_kwh
    high = energy[1] / J_PER_KWH * grid.high_g_per_kwh
    return Co2e(
        co2e_g_low=low,
        co2e_g_high=high,
        with_pue_co2e_g_low=None if pue is None else low * pue,
        with_pue_co2e_g_high=None if pue is None else high * pue,
        method=figure.method,
    )
