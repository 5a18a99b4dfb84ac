"""Energy per item, gross and above idle, from windows in which nothing else ran.

Gross is the energy of the windows over the items in them; net subtracts the idle power over the same time. The 95 %
interval is the widest of three, because each covers a different error:

- the meter's own uncertainty (refresh and sampling);
- the spread of the power of one-second segments, which includes the meter's noise and the GPU's drift;
- the spread of the energy per item between rounds, which also includes the variation of the latency.

Idle power is not a single number (a GPU whose clocks have not dropped yet draws half as much again), so half the
difference of the baselines before and after the load is part of its uncertainty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from joulelab.meter.figures import COVERED, EnergyFigure, Frozen, Method
from joulelab.runs.attempt_data import IdlePower
from joulelab.stats import mean_t

Window = tuple[int, int]
ItemWindow = tuple[Window, float]
"""A window and the items in it."""
Reader = Callable[[Sequence[Window]], EnergyFigure]
# Ten refreshes of a GPU's energy counter.
SEGMENT_S = 1.0
_NS = 1e9


class ItemEnergy(Frozen):
    """Energy of one item: an image, a sequence, a token."""

    gross_j: float
    gross_half_width_j: float
    net_j: float | None = None
    """None if no idle baseline was measured."""
    net_half_width_j: float | None = None
    power_w: float
    idle_power_w: float | None = None
    method: Method
    gain_error_rel: float | None = None
    coverage: float = 1.0
    """Fraction of the windows with readings."""
    sources: tuple[str, ...] = ()
    """Devices whose energy this is; empty in older records."""

    @property
    def relative(self) -> float:
        return self.gross_half_width_j / abs(self.gross_j) if self.gross_j else math.inf

    @property
    def estimated(self) -> bool:
        return self.method == "estimated"

    def gross(self, items: float = 1.0) -> EnergyFigure:
        """As an energy figure, divided by `items`, such as the tokens of a response."""
        return self._figure(self.gross_j, self.gross_half_width_j).scaled(1 / items)

    def net(self, items: float = 1.0) -> EnergyFigure | None:
        if self.net_j is None or self.net_half_width_j is None:
            return None
        return self._figure(self.net_j, self.net_half_width_j).scaled(1 / items)

    def _figure(self, energy_j: float, half_width_j: float) -> EnergyFigure:
        return EnergyFigure(
            energy_j=energy_j,
            half_width_j=half_width_j,
            method=self.method,
            gain_error_rel=self.gain_error_rel,
            sources=self.sources,
        )

    def above(self, idle: IdlePower) -> ItemEnergy:
        """With net energy: idle power over the time of one item is subtracted."""
        # Time per item of the timed windows, from the same figures as the energy: subtracting idle
        # power over any other time, such as a median latency, would leave part of the idle energy
        # in.
        item_s = self.gross_j / self.power_w if self.power_w else 0.0
        return self.model_copy(
            update={
                "net_j": self.gross_j - idle.power_w * item_s,
                # Gross and idle were measured at different times, so their errors are independent.
                "net_half_width_j": math.hypot(self.gross_half_width_j, idle.half_width_w * item_s),
                "idle_power_w": idle.power_w,
            }
        )


def energy_per_item(item_windows: Sequence[ItemWindow], read: Reader) -> tuple[ItemEnergy | None, str]:
    """Gross energy per item, or None and the reason."""
    windows, items = [window for window, _ in item_windows], sum(count for _, count in item_windows)
    figure = read(windows)
    if figure.energy_j is None or not items:
        return None, f"{figure.reason or 'nothing was measured'}" + (f" ({figure.fix})" if figure.fix else "")
    duration_s = sum(end - begin for begin, end in windows) / _NS
    power_w = figure.mean_power_w(duration_s) or 0.0
    own = (figure.half_width_j or 0.0) / max(abs(figure.energy_j), 1e-12)
    # The widest and not their root sum of squares: the three contain each other's causes, so adding
    # them would count noise twice.
    relative = max(own, _spread_of_segments(windows, read), _spread_of_windows(item_windows, read))
    if figure.coverage < COVERED and not any(error.name == "missing time" for error in figure.errors):
        # Without a known power limit of the device: gaps may have used no energy, or twice the mean.
        relative = math.hypot(relative, (1 - figure.coverage) / max(figure.coverage, 1e-9))
    item_s = duration_s / items
    gross_j = power_w * item_s
    half_j = relative * gross_j
    found = ItemEnergy(
        gross_j=gross_j,
        gross_half_width_j=half_j,
        power_w=power_w,
        method=figure.method,
        gain_error_rel=figure.gain_error_rel,
        coverage=figure.coverage,
        sources=figure.sources,
    )
    return found, ""


def _spread_of_segments(windows: Sequence[Window], read: Reader) -> float:
    return _spread([mean_power_w(segment, read) for window in windows for segment in split_window(window)])


def _spread_of_windows(item_windows: Sequence[ItemWindow], read: Reader) -> float:
    return _spread([item_energy_j(item_window, read) for item_window in item_windows if split_window(item_window[0])])


def _spread(found: Sequence[float | None]) -> float:
    """Relative 95 % half-width of the mean; 0 for fewer than three values."""
    values = [value for value in found if value is not None]
    if len(values) < 3:
        return 0.0
    interval = mean_t(values)
    return (interval.high - interval.value) / abs(interval.value) if interval.value else 0.0


def split_window(window: Window) -> list[Window]:
    """Equal segments of at least a second."""
    count = int((window[1] - window[0]) / _NS / SEGMENT_S)
    # Integer arithmetic: segments tile the window exactly, and their energies add up to the
    # window's.
    edges = [window[0] + (window[1] - window[0]) * number // max(count, 1) for number in range(count + 1)]
    return list(pairwise(edges))


def mean_power_w(window: Window, read: Reader) -> float | None:
    """None if the trace does not cover the window."""
    figure = read([window])
    if figure.energy_j is None or figure.coverage < 0.98:
        return None
    return figure.energy_j / ((window[1] - window[0]) / _NS)


def item_energy_j(item_window: ItemWindow, read: Reader) -> float | None:
    """None if the trace does not cover the window."""
    (begin, end), items = item_window
    power_w = mean_power_w((begin, end), read)
    return None if power_w is None or not items else power_w * (end - begin) / _NS / items
