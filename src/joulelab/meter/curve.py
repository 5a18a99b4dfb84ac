"""Energy as a function of time for one device: the best curve that counter, samples and polled power allow together.

A curve is a row of cells, each with its joules. Inside a cell the energy is taken as even; how wrong that can be is the
edge error of a window that begins or ends there. Cells that nobody saw are marked unknown and lower the coverage. So
are those in which the counter fell, because it was set back: what it had counted until then is lost.

With counter and 20 ms samples the curve has the samples' shape and the counter's scale. The counter is read late by an
unknown part of its refresh period, so single readings are not knots of the curve: they set one scale for the whole
trace and a slow correction, averaged over `TREND_S`. On a simulated H200 this places windows of 10 s within 1 % and 95
of 100 windows of 1 s within 1.5 %; with knots at every reading that was 3.6 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from joulelab.clock import NS

Floats = NDArray[np.float64]
Stamps = NDArray[np.int64]

# Of the driver's buffer, measured on an H200: a step of power reaches half its height in the samples 17 ms later and
# all of it after about 40 ms, as if a sample told the mean of 20 ms that ended about 10 ms before its stamp.
SAMPLE_S = 0.02
SAMPLE_LAG_S = 0.01
SAMPLE_LAG_ERROR_S = 0.01
# Samples agree with the counter within about 1 % (always a little higher); another card's may agree less well.
SAMPLE_SCALE = 0.99
SAMPLE_SCALE_ERROR = 0.02
SAMPLES_HOLE_S = 0.05
TREND_S = 5.0
# Polled power further apart than this many usual steps has a hole in it.
HOLE_FACTOR = 3.0
_NEIGHBOURS = 3


@dataclass(frozen=True, eq=False)
class EnergyCurve:
    edges_s: Floats
    """Borders of the cells, ascending, in seconds after `origin_ns`."""
    cell_j: Floats
    known: NDArray[np.bool_]
    origin_ns: int
    edge_error_j: Floats
    """Per cell: 95 % half-width of placing an edge in the middle of it."""
    even_error_j: Floats
    """Per cell: further half-width that does not shrink towards the cell's borders."""
    noise_j: float = 0.0
    """95 % half-width of the slow correction, for windows of `TREND_S` and more; shorter ones have their share."""
    scale_error_rel: float = 0.0
    """95 % half-width of the scale where it had to be assumed, as for traces of a few seconds."""

    def energy(self, start_ns: int, end_ns: int) -> tuple[float, float, float]:
        """Joules of a window, their random 95 % half-width, and the seconds of the window that were seen."""
        start, end = ((stamp - self.origin_ns) / NS for stamp in (start_ns, end_ns))
        energy_j = float(np.diff(np.interp([start, end], self.edges_s, self._cumulative(self.cell_j)))[0])
        seen_s = float(np.diff(np.interp([start, end], self.edges_s, self._cumulative(self._known_s())))[0])
        trend_j = self.noise_j * min(1.0, (end - start) / TREND_S)
        parts = [self._edge_j(start), self._edge_j(end), trend_j, self.scale_error_rel * energy_j]
        return energy_j, math.sqrt(sum(part**2 for part in parts)), seen_s

    def _known_s(self) -> Floats:
        return np.where(self.known, np.diff(self.edges_s), 0.0)

    @staticmethod
    def _cumulative(values: Floats) -> Floats:
        return np.concatenate([[0.0], np.cumsum(values)])

    def _edge_j(self, moment_s: float) -> float:
        if not self.edges_s[0] < moment_s < self.edges_s[-1]:
            return 0.0
        cell = int(np.searchsorted(self.edges_s, moment_s, side="right")) - 1
        share = (moment_s - self.edges_s[cell]) / (self.edges_s[cell + 1] - self.edges_s[cell])
        middle = 2 * min(share, 1 - share) * float(self.edge_error_j[cell])
        return math.hypot(middle, float(self.even_error_j[cell]))


def counter_curve(
    counter_ns: Stamps, counter_j: Floats, refresh_s: float, max_gap_s: float | None, tick_j: float = 0.0
) -> EnergyCurve:
    """Cells between readings. A reading is late by up to one refresh.

    A gap in which a wrap may hide is unknown, and so is a step in which the counter fell. `tick_j` is the counter's
    smallest step, where that is large enough to matter.
    """
    origin = int(counter_ns[0])
    edges = (counter_ns - origin) / NS - refresh_s / 2
    steps_s, steps_j = np.diff(edges), np.diff(counter_j)
    known = (steps_s <= (max_gap_s or math.inf)) & (steps_j >= 0)
    cell_j = np.where(known, steps_j, 0.0)
    latch_j = 1.96 * refresh_s / math.sqrt(12) * cell_j / np.maximum(steps_s, 1e-9)
    return EnergyCurve(edges, cell_j, known, origin, cell_j / 2, np.hypot(latch_j, tick_j))


def polled_curve(power_ns: Stamps, power_w: Floats) -> EnergyCurve:
    """Trapezoids between polls; holes are not filled in."""
    origin = int(power_ns[0])
    edges = (power_ns - origin) / NS
    steps_s = np.diff(edges)
    known = steps_s <= HOLE_FACTOR * float(np.median(steps_s))
    cell_j = np.where(known, (power_w[1:] + power_w[:-1]) / 2 * steps_s, 0.0)
    # what happens between two polls is unseen; the spread of the polls tells how much that can be
    spread_j = 1.96 * float(np.std(power_w)) * math.sqrt(float(np.median(steps_s)) * TREND_S)
    return EnergyCurve(edges, cell_j, known, origin, cell_j / 2, np.zeros_like(cell_j), noise_j=spread_j)


def sample_curve(samples_ns: Stamps, samples_w: Floats) -> EnergyCurve:
    """The 20 ms samples alone, where no counter gives their scale."""
    origin = int(samples_ns[0])
    edges, cell_j, known = _sample_cells(origin, samples_ns, samples_w)
    return _with_sample_errors(edges, cell_j, known, origin, 0.0, 2 * SAMPLE_SCALE_ERROR)


def shaped_curve(
    samples_ns: Stamps, samples_w: Floats, counter_ns: Stamps, counter_j: Floats, refresh_s: float
) -> EnergyCurve:
    """The samples' shape at the counter's scale. Where the counter was set back the samples alone carry the curve."""
    origin = int(samples_ns[0])
    edges, cell_j, known = _sample_cells(origin, samples_ns, samples_w)
    read_s = (counter_ns - origin) / NS - refresh_s / 2
    edges, cell_j, known = _fill_holes(edges, cell_j, known, read_s, counter_j)
    inside = (read_s >= edges[0]) & (read_s <= edges[-1])
    read_s, counter_j = read_s[inside], counter_j[inside]
    if len(read_s) < 2:
        return _with_sample_errors(edges, cell_j, known, origin, 0.0, 2 * SAMPLE_SCALE_ERROR)
    scale, scale_error = _scale(edges, cell_j, read_s, counter_j, refresh_s)
    cell_j = cell_j * scale
    correction, noise_j = _slow_correction(edges, cell_j, read_s, counter_j)
    seen = known | _counted(edges, read_s, counter_j)
    cell_j = np.where(seen, cell_j + np.diff(correction), 0.0)
    return _with_sample_errors(edges, cell_j, seen, origin, noise_j, scale_error)


def _counted(edges: Floats, read_s: Floats, counter_j: Floats) -> NDArray[np.bool_]:
    """Per cell: whether its middle lies between two readings of a counter that was not set back meanwhile."""
    rising = np.concatenate([[False], np.diff(counter_j) >= 0, [False]])
    counted: NDArray[np.bool_] = rising[np.searchsorted(read_s, (edges[1:] + edges[:-1]) / 2)]
    return counted


def _sample_cells(origin: int, samples_ns: Stamps, samples_w: Floats) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """One cell per sample, and one for every hole between samples."""
    ends = (samples_ns - origin) / NS - SAMPLE_LAG_S
    gaps = np.diff(ends)
    holes = gaps > SAMPLES_HOLE_S
    widths = np.concatenate([[SAMPLE_S], np.where(holes, SAMPLE_S, gaps)])
    places = np.flatnonzero(holes) + 1
    edges = np.concatenate([[ends[0] - SAMPLE_S], np.insert(ends, places, ends[places] - SAMPLE_S)])
    cell_j = np.insert(samples_w * widths, places, 0.0)
    known = np.insert(np.ones(len(ends), dtype=bool), places, False)
    return edges, cell_j, known


def _fill_holes(
    edges: Floats, cell_j: Floats, known: NDArray[np.bool_], read_s: Floats, counter_j: Floats
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Where samples are missing the counter went on counting: its readings cut the hole into cells of their own."""
    if known.all() or len(read_s) < 2:
        return edges, cell_j, known
    place = np.clip(np.searchsorted(edges, read_s) - 1, 0, len(known) - 1)
    cuts = read_s[~known[place] & (read_s > edges[0]) & (read_s < edges[-1])]
    finer = np.unique(np.concatenate([edges, cuts]))
    old = np.clip(np.searchsorted(edges, (finer[1:] + finer[:-1]) / 2) - 1, 0, len(known) - 1)
    rises_j = np.maximum(np.diff(counter_j), 0.0)
    by_counter = np.diff(np.interp(finer, read_s, EnergyCurve._cumulative(rises_j))) / SAMPLE_SCALE
    return finer, np.where(known[old], cell_j[old], by_counter), known[old]


def _scale(edges: Floats, cell_j: Floats, read_s: Floats, counter_j: Floats, refresh_s: float) -> tuple[float, float]:
    """Counter over samples for the whole trace, leaning on the usual ratio where the trace is short."""
    rises_j = np.diff(counter_j)
    rising = rises_j >= 0
    by_samples = float(_by_samples(edges, cell_j, read_s)[rising].sum())
    by_counter = float(rises_j[rising].sum())
    length_s = max(float(np.diff(read_s)[rising].sum()), 1e-9)
    if by_samples <= 0 or by_counter <= 0:
        return SAMPLE_SCALE, 2 * SAMPLE_SCALE_ERROR
    pieces = 1 + int((~rising).sum())
    error = refresh_s * math.sqrt(pieces / 6) / length_s
    weight = SAMPLE_SCALE_ERROR**2 / (SAMPLE_SCALE_ERROR**2 + error**2)
    scale = weight * by_counter / by_samples + (1 - weight) * SAMPLE_SCALE
    return scale, 1.96 * math.sqrt(1 - weight) * SAMPLE_SCALE_ERROR if length_s < TREND_S else 0.0


def _by_samples(edges: Floats, cell_j: Floats, read_s: Floats) -> Floats:
    """The samples' joules between each two readings of the counter."""
    return np.diff(np.interp(read_s, edges, EnergyCurve._cumulative(cell_j)))


def _slow_correction(edges: Floats, cell_j: Floats, read_s: Floats, counter_j: Floats) -> tuple[Floats, float]:
    """Counter minus samples, averaged over `TREND_S` at a time: drift stays, the latch's jitter goes.

    A step in which the counter was set back says nothing; there the two count as agreeing.
    """
    rises_j, sampled_j = np.diff(counter_j), _by_samples(edges, cell_j, read_s)
    rest = EnergyCurve._cumulative(np.where(rises_j >= 0, rises_j - sampled_j, 0.0))
    bins = max(1, round(float(read_s[-1] - read_s[0]) / TREND_S))
    number = np.minimum(((read_s - read_s[0]) / (read_s[-1] - read_s[0]) * bins).astype(int), bins - 1)
    counts = np.maximum(np.bincount(number, minlength=bins), 1)
    centres = np.bincount(number, read_s, bins) / counts
    means = np.bincount(number, rest, bins) / counts
    filled = np.bincount(number, minlength=bins) > 0
    centres, means, counts = centres[filled], means[filled], counts[filled]
    jitter_j = float(np.std(rest - np.interp(read_s, centres, means))) if len(rest) > 2 else 0.0
    latch_j = 1.96 * math.sqrt(2) * jitter_j / math.sqrt(float(np.median(counts)))
    # the samples' scale changes a little with the load; where in a stretch it changed is not known
    drift_j = 1.96 * float(np.std(np.diff(means))) / math.sqrt(2) if len(means) > 2 else 0.0
    return np.interp(edges, centres, means), math.hypot(latch_j, drift_j)


def _with_sample_errors(
    edges: Floats, cell_j: Floats, known: NDArray[np.bool_], origin: int, noise_j: float, scale_error: float
) -> EnergyCurve:
    """An edge is uncertain by half a sample, and by the lag's error times the change of power around it."""
    watts = cell_j / np.maximum(np.diff(edges), 1e-9)
    window = np.lib.stride_tricks.sliding_window_view(np.pad(watts, _NEIGHBOURS, mode="edge"), 2 * _NEIGHBOURS + 1)
    lag_j = SAMPLE_LAG_ERROR_S * (window.max(axis=1) - window.min(axis=1))
    half_j = np.minimum(np.abs(cell_j), SAMPLE_S * np.abs(watts)) / 2
    return EnergyCurve(
        edges,
        cell_j,
        known,
        origin,
        # inside a hole the placement is as uncertain as the hole is long
        edge_error_j=np.where(np.diff(edges) > SAMPLES_HOLE_S, np.abs(cell_j) / 2, 0.0),
        even_error_j=np.hypot(half_j, lag_j),
        noise_j=noise_j,
        scale_error_rel=scale_error,
    )
