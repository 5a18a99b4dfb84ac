"""Energy as a function of time for one device: the best curve that counter, samples and polled power allow together.

A curve is a row of cells, each with its joules, and a model of its errors. Every segment of time takes the best signal
that it has: 20 ms samples at the counter's scale, the counter alone where samples are missing, samples alone where the
counter was set back or jumped. The curve never loses joules that the counter recorded. Time that no signal covers is
marked unknown.

How counter and samples are joined (`joined_curve`):

- `alignment.py` places each counter reading on the time axis of the samples.
- Counter minus scaled samples is a random walk: the samples' noise adds up, and their scale drifts with the load. Each
  reading observes it with an independent error (how old the counter's value was). This is the local-level model of time
  series (Durbin and Koopman, Time Series Analysis by State Space Methods, ch. 2). Its two variances come from the
  autocovariance of the differences nearby; its smoother is a two-sided exponential kernel.
- Between two readings the error is a Brownian bridge: pinned at both, largest in the middle. Windows that cover the
  fraction p of an interval have the variance W p (1 - p) there, so windows that tile a run have no error inside it.

Errors are 95 % half-widths by cause (`figures.ErrorComponent`), computed for a whole set of windows at once, because
the edges of adjacent windows cancel and the lag of the samples moves all edges together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from joulelab.clock import NS
from joulelab.meter.alignment import SAMPLE_S, SCALE, SCALE_SD, Evidence, Lag, align
from joulelab.meter.figures import ErrorComponent, ErrorName

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Stamps = NDArray[np.int64]

Z95 = 1.96
SAMPLES_HOLE_S = 0.05
# 95 % half-width at an edge inside a sample, as a fraction of the fluctuation from sample to sample. Derived from
# simulated waves of about 20 ms, which samples of 20 ms hardly show.
FAST_CHANGE = 0.85
FLUCTUATION_BLOCK = 60
# A difference of two samples above this many standard deviations is the edge of a wave.
NO_EDGE = 5.0
_HALF_NORMAL = ([math.erf(z / math.sqrt(2)) for z in np.arange(0, 3, 0.05)], np.arange(0, 3, 0.05))
# Fraction of the refresh period: a reading that is less certain than this may be from either side of a refresh.
AMBIGUOUS = 0.1
STEP_REL = 0.1
# How far the scale of the samples may differ between an interval and those around it.
BROKEN_SCALE_SD = 0.005
# The walk of counter minus samples is estimated as if so many more differences of the usual size had been seen.
PRIOR_DIFFERENCES = 4
# On an H200, counter minus samples moves by 0.2 to 0.4 % of a second's energy in one second, and with the square root
# of time over longer times. Used until there are enough readings to estimate it.
WALK_REL_PER_SQRT_S = 0.003
# Scale and noise of the samples are taken from so many intervals before and after: they change with the load.
NEARBY = 8
# Polled power further apart than this many usual steps has a hole in it.
HOLE_FACTOR = 3.0
# The lag's error is evaluated at these multiples of its 95 % half-width; power may go up and down within it.
LAG_SCENARIOS = (-1.0, -2 / 3, -1 / 3, 1 / 3, 2 / 3, 1.0)
_KERNEL_END = 1e-3
FEW_ANCHORS = 64
# Keeps the walk strictly ascending, so that it can be inverted.
_TINY_J2_PER_S = 1e-12


@dataclass(frozen=True, eq=False)
class Anchors:
    """Counter readings that pin a curve: where they are and how far the curve may be off there."""

    at_s: Floats
    sd_j: Floats
    """Per reading: standard deviation of the curve at it."""
    read_sd_j: Floats
    """Per reading: the same from when within the call it was taken, where that matters."""
    correlation: float
    """Between the errors of two neighbors, from smoothing; further apart it falls off geometrically."""
    common_j: Floats
    """Per reading: how far the curve moves there if all readings are a standard deviation later than assumed."""
    broken: Bools
    """Per interval: the counter was set back or jumped, so its readings say nothing about this interval."""


@dataclass(frozen=True, eq=False)
class EnergyCurve:
    edges_s: Floats
    """Borders of the cells, ascending, in seconds after `origin_ns`."""
    cell_j: Floats
    known: Bools
    origin_ns: int
    walk_j2: Floats
    """Per cell: variance of its joules before the anchors pin them."""
    sampled: Bools
    """Per cell: whether it is one sample, or a part of one."""
    shape_j: Floats
    """Per cell: 95 % half-width of the joules up to somewhere inside it, taken as even."""
    anchors: Anchors | None = None
    scale_sd_rel: float = 0.0
    """Standard deviation of the scale where no pair of anchors pins it."""
    pinned_s: tuple[float, float] = (0.0, 0.0)
    """Between these times anchors pin the scale."""
    lag_error_s: float = 0.0
    """95 % half-width of the lag of the samples, which is the same for all cards of a driver."""
    limit_w: float | None = None
    """The most power the device can draw, which bounds what happened in unknown time."""

    def energy(self, windows: Sequence[tuple[int, int]]) -> tuple[float, tuple[ErrorComponent, ...], float]:
        """Joules of disjoint windows, their errors by cause, and the seconds that were covered."""
        spans_s = self._spans_s(windows)
        energy_j = self._joules(spans_s)
        covered_s = float(np.diff(np.interp(spans_s, self.edges_s, self._known_s)).sum())
        missing_s = float(np.diff(spans_s).sum()) - covered_s
        missing_s = missing_s if missing_s > 1e-9 else 0.0  # less is rounding
        latch_j2, read_j2, walk_j2 = self._variances(spans_s)
        # Only the energy outside the anchors has the scale's own error; between two anchors the
        # counter fixes the sum.
        scale_j = self.scale_sd_rel * (energy_j - self._joules(np.clip(spans_s, *self.pinned_s)))
        causes: list[tuple[ErrorName, tuple[float, ...]]] = [
            ("counter latch", (Z95 * math.sqrt(latch_j2),)),
            ("read time", (Z95 * math.sqrt(read_j2),)),
            # Walk and scale are independent causes of the same name: both are how samples differ
            # from the counter.
            ("scale", (Z95 * math.hypot(math.sqrt(walk_j2), scale_j),)),
            ("shape", (self._shape_error_j(spans_s),)),
            ("sample lag", self._lag_errors_j(spans_s, energy_j)),
            ("missing time", (missing_s * self.limit_w if self.limit_w else 0.0,)),
        ]
        errors = tuple(
            ErrorComponent(name=name, joules=joules, shared=name in ("sample lag", "missing time"))
            for name, joules in causes
            if any(joules)
        )
        return energy_j, errors, covered_s

    def joules(self, windows: Sequence[tuple[int, int]]) -> float:
        """The joules alone; the errors take most of the time of `energy`."""
        return self._joules(self._spans_s(windows))

    def _spans_s(self, windows: Sequence[tuple[int, int]]) -> Floats:
        # Integer nanoseconds are subtracted before the conversion: a monotonic stamp of a machine
        # that has been up for months has no room for nanoseconds in a double.
        spans_s: Floats = np.sort((np.array(windows, dtype=np.int64).reshape(-1, 2) - self.origin_ns) / NS, axis=0)
        return spans_s

    @cached_property
    def _energy_j(self) -> Floats:
        return cumulative(self.cell_j)

    @cached_property
    def _known_s(self) -> Floats:
        return cumulative(np.where(self.known, np.diff(self.edges_s), 0.0))

    @cached_property
    def _walk_j2(self) -> Floats:
        return cumulative(self.walk_j2 + _TINY_J2_PER_S * np.diff(self.edges_s))

    @cached_property
    def _knots_j2(self) -> Floats:
        """The walk up to each anchor."""
        at_s = np.zeros(0) if self.anchors is None else self.anchors.at_s
        found: Floats = np.interp(at_s, self.edges_s, self._walk_j2)
        return found

    def _joules(self, spans_s: Floats) -> float:
        return float(np.diff(np.interp(spans_s, self.edges_s, self._energy_j)).sum())

    def _lag_errors_j(self, spans_s: Floats, energy_j: float) -> tuple[float, ...]:
        """How the figure changes if the lag is off, beyond what noise of the samples explains, for `LAG_SCENARIOS`.

        Shifted windows contain other samples, whose noise differs. That noise is part of the walk already, and it is
        independent between cards, which the lag is not.
        """
        edges_s = self._open_edges(spans_s)
        cell = np.clip(np.searchsorted(self.edges_s, edges_s, side="right") - 1, 0, len(self.cell_j) - 1)
        width_s = self.edges_s[cell + 1] - self.edges_s[cell]
        walk_w2 = np.where(self.sampled[cell], self.walk_j2[cell] / width_s, 0.0).reshape(-1, 2).sum(axis=1)
        length_s = np.diff(edges_s.reshape(-1, 2)).ravel()
        found = []
        for scenario in LAG_SCENARIOS:
            shift_s = scenario * self.lag_error_s
            moved_j = self._joules(spans_s + shift_s) - energy_j
            exchanged_s = np.minimum(abs(shift_s), length_s)
            # of a part f of a sample the variance is f^2 of the whole one's
            noise_j2 = float(np.sum(walk_w2 * exchanged_s * np.minimum(1.0, exchanged_s / SAMPLE_S)))
            # Signed, so that the shift of all windows in the same direction cancels between
            # adjacent windows and adds up between cards that run in step.
            found.append(math.copysign(math.sqrt(max(0.0, moved_j**2 - Z95**2 * noise_j2)), moved_j))
        return tuple(found)

    @staticmethod
    def _open_edges(spans_s: Floats) -> Floats:
        """Where windows begin and end, in turn; what two windows share is no edge."""
        moments, count = np.unique(spans_s, return_counts=True)
        found: Floats = moments[count == 1]
        return found

    def _shape_error_j(self, spans_s: Floats) -> float:
        """An edge inside a cell splits its joules."""
        moments = self._open_edges(spans_s)
        moments = moments[(moments > self.edges_s[0]) & (moments < self.edges_s[-1])]
        cell = np.searchsorted(self.edges_s, moments, side="right") - 1
        fraction = (moments - self.edges_s[cell]) / (self.edges_s[cell + 1] - self.edges_s[cell])
        # An edge at the border of a cell splits nothing. A quarter into it the uncertainty is as
        # large as in the middle: where in the 20 ms the power changed is unknown.
        near_middle = np.minimum(1.0, 4 * np.minimum(fraction, 1 - fraction))
        return float(np.sqrt(np.sum((near_middle * self.shape_j[cell]) ** 2)))

    def _variances(self, spans_s: Floats) -> tuple[float, float, float]:
        """From the anchors' refresh, from the time they took to read, and from the random walk between them."""
        spans = np.interp(spans_s, self.edges_s, self._walk_j2)
        covered = cumulative(np.diff(spans, axis=1).ravel())
        within_j2 = self._within_cells_j2(spans_s)
        if self.anchors is None or len(self.anchors.at_s) < 2:
            return 0.0, 0.0, max(0.0, float(covered[-1]) - within_j2)
        knots = self._knots_j2
        # how much of the walk the windows cover up to each anchor: it rises inside a window and rests between two
        up_to = np.interp(knots, spans.ravel(), np.repeat(covered, 2)[1:-1])
        inside, width = np.diff(up_to), np.maximum(np.diff(knots), 1e-300)
        # A window that covers the fraction p of a bridge of variance W has the variance W p (1 -
        # p): 0 for p = 0 and p = 1, W / 4 in the middle.
        part = np.where(self.anchors.broken, 0.0, inside / width)
        walk_j2 = np.where(self.anchors.broken, inside, width * part * (1 - part)).sum()
        outside_j2 = covered[-1] - inside.sum()
        # Window energy = sum over intervals of p_k (A_{k+1} - A_k) = sum over anchors of (p_{k-1} -
        # p_k) A_k: anchors inside a covered segment cancel, and only those at its ends contribute
        # their error.
        use = np.diff(np.concatenate([[0.0], part, [0.0]]))
        latch_j2 = _correlated_j2(use * self.anchors.sd_j, self.anchors.correlation)
        # A common shift of all anchors is one random variable, so its effects add up before
        # squaring.
        latch_j2 += float(use @ self.anchors.common_j) ** 2
        read_j2 = float(np.sum((use * self.anchors.read_sd_j) ** 2))
        return latch_j2, read_j2, max(0.0, float(walk_j2 + outside_j2) - within_j2)

    def _within_cells_j2(self, spans_s: Floats) -> float:
        """What the walk counts too much: a part f of a sample has f^2 of its variance, not f."""
        inside = spans_s[(spans_s > self.edges_s[0]) & (spans_s < self.edges_s[-1])]
        cells = np.unique(np.searchsorted(self.edges_s, inside, side="right") - 1)
        cells = cells[self.sampled[cells]]
        begins, ends = self.edges_s[cells], self.edges_s[cells + 1]
        up_to = np.repeat(cumulative(np.diff(spans_s, axis=1).ravel()), 2)[1:-1]
        covered_s = np.interp(ends, spans_s.ravel(), up_to) - np.interp(begins, spans_s.ravel(), up_to)
        part = covered_s / (ends - begins)
        return float(np.sum(self.walk_j2[cells] * part * (1 - part)))


def cumulative(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


def _correlated_j2(weight: Floats, ratio: float) -> float:
    """Variance of a sum of errors of standard deviation 1 whose correlation is ratio^distance."""
    if ratio <= 0:
        return float(weight @ weight)
    places = np.flatnonzero(weight)
    if len(places) > FEW_ANCHORS:
        return max(0.0, float(weight @ _convolve(weight, ratio)))
    # one window uses four anchors, also where the trace of a day has 80,000
    distance = np.abs(places[:, None] - places)
    return max(0.0, float(weight[places] @ (ratio**distance) @ weight[places]))


def _convolve(values: Floats, ratio: float) -> Floats:
    """Sum of the values around each, weighted by ratio^distance."""
    # ratio^distance is below `_KERNEL_END` beyond this: a kernel of hundreds of terms instead of
    # the whole trace.
    reach = min(len(values) - 1, math.ceil(math.log(_KERNEL_END) / math.log(ratio)))
    kernel = ratio ** np.abs(np.arange(-reach, reach + 1))
    found: Floats = np.convolve(values, kernel)[reach : reach + len(values)]
    return found


def counter_curve(readings: Readings, limit_w: float | None, tick_j: float = 0.0) -> EnergyCurve:
    """Cells between readings, each reading as old as half a refresh on average.

    `tick_j` is the counter's smallest step, where that is large enough to matter.
    """
    origin = int(readings.at_ns[0])
    edges = (readings.at_ns - origin) / NS - readings.refresh_s / 2
    cell_j = np.where(readings.known, np.diff(readings.joules), 0.0)
    power_w = _power_around(edges, cell_j)
    # The age of a value is uniform over one refresh: standard deviation refresh / sqrt(12) in time,
    # times the power in joules.
    sd_j = np.hypot(readings.refresh_s / math.sqrt(12) * power_w, tick_j / Z95)
    read_sd_j = readings.call_s / math.sqrt(12) * power_w
    return EnergyCurve(
        edges,
        cell_j,
        readings.known,
        origin,
        walk_j2=_walk_of_unknown_shape(cell_j, np.diff(edges), limit_w),
        sampled=np.zeros(len(cell_j), dtype=bool),
        shape_j=np.zeros(len(cell_j)),
        anchors=Anchors(edges, sd_j, read_sd_j, 0.0, np.zeros(len(edges)), ~readings.known),
        pinned_s=(float(edges[0]), float(edges[-1])),
        limit_w=limit_w,
    )


def _walk_of_unknown_shape(cell_j: Floats, cell_s: Floats, limit_w: float | None) -> Floats:
    """The variance W of a cell of which only the joules are known.

    Up to its middle lie at most what the device can draw in half of the time, at least what the other half leaves: a
    range of half-width m. Loads that switch between two levels are at its ends as often as inside, so the variance is
    taken as m^2 / 2, and W as four times that, the value of a Brownian bridge in its middle.
    """
    most_j = np.abs(cell_j) if limit_w is None else np.minimum(np.abs(cell_j), limit_w * cell_s / 2)
    half_range_j = np.clip(most_j - np.abs(cell_j) / 2, 0.0, np.abs(cell_j) / 2)
    walk_j2: Floats = 2 * half_range_j**2
    return walk_j2


def polled_curve(
    power_ns: Stamps, power_w: Floats, limit_w: float | None, interpolate_gaps: bool = False
) -> EnergyCurve:
    """Trapezoids between polls; holes are filled in only on request, with the error of unseen time."""
    origin = int(power_ns[0])
    edges = (power_ns - origin) / NS
    steps_s = np.diff(edges)
    known = (steps_s <= HOLE_FACTOR * float(np.median(steps_s))) | interpolate_gaps
    # Trapezoidal rule. Its error is what the power did between two polls and not the rule's own,
    # which is why a higher-order rule would gain nothing.
    cell_j = np.where(known, (power_w[1:] + power_w[:-1]) / 2 * steps_s, 0.0)
    # what happens between two polls is unseen; the spread of the polls shows how much that can be
    walk_j2 = np.where(known, (float(np.std(power_w)) * steps_s) ** 2, 0.0)
    sampled, shape_j = np.zeros(len(cell_j), dtype=bool), np.zeros(len(cell_j))
    return EnergyCurve(edges, cell_j, known, origin, walk_j2, sampled, shape_j, limit_w=limit_w)


def stated_curve(cells: Sequence[tuple[int, int, float]]) -> EnergyCurve:
    """(begin, end, joules) of disjoint times whose energy another program stated; its errors are not known."""
    origin = min(begin for begin, _, _ in cells)
    edges, joules, known = [origin], list[float](), list[bool]()
    for begin, end, energy_j in sorted(cells):
        if begin > edges[-1]:
            edges, joules, known = [*edges, begin], [*joules, 0.0], [*known, False]
        edges, joules, known = [*edges, end], [*joules, energy_j], [*known, True]
    edges_s = (np.array(edges, dtype=np.int64) - origin) / NS
    nothing = np.zeros(len(joules))
    flags = np.array(known, dtype=bool)
    return EnergyCurve(edges_s, np.array(joules), flags, origin, nothing, np.zeros(len(joules), dtype=bool), nothing)


@dataclass(frozen=True, eq=False)
class Cells:
    """The 20 ms samples as cells on their own time axis, with one more for every hole between them."""

    origin_ns: int
    edges_s: Floats
    cell_j: Floats
    sampled: Bools
    shape_j: Floats
    """Per cell: 95 % half-width of the joules up to somewhere inside it, taken as even; 0 in a hole."""

    @property
    def noise_j2(self) -> Floats:
        """Per cell: energy squared by time, which the variance of the samples' noise is proportional to."""
        return self.cell_j**2 / np.maximum(np.diff(self.edges_s), 1e-9)

    def energy_at(self, moments_s: Floats) -> Floats:
        found: Floats = np.interp(moments_s, self.edges_s, cumulative(self.cell_j))
        return found


def sample_cells(samples_ns: Stamps, samples_w: Floats) -> Cells:
    """A sample is the mean since the one before it; after a hole, of the 20 ms before its stamp."""
    origin_ns = int(samples_ns[0])
    ends = (samples_ns - origin_ns) / NS
    gaps = np.diff(ends)
    holes = gaps > SAMPLES_HOLE_S
    places = np.flatnonzero(holes) + 1
    edges = np.concatenate([[ends[0] - SAMPLE_S], np.insert(ends, places, ends[places] - SAMPLE_S)])
    watts, sampled = np.insert(samples_w, places, 0.0), np.insert(np.ones(len(ends), dtype=bool), places, False)
    shape_j = np.where(sampled, FAST_CHANGE * fluctuation_w(watts) * np.diff(edges), 0.0)
    return _with_steps(origin_ns, edges, watts, sampled, shape_j)


def fluctuation_w(watts: Floats) -> Floats:
    """Standard deviation of power from one sample to the next, in proportion to power, per block of samples.

    What changes within 20 ms cannot be seen, but it also makes neighboring samples differ. A low quantile of the
    differences leaves out the edges of a slower wave. A wave of few samples per period has many edges, so the quantile
    is taken among the differences that are not much larger than it.
    """
    count = -(-len(watts) // FLUCTUATION_BLOCK) * FLUCTUATION_BLOCK
    padded = np.pad(watts, (1, count - len(watts)), mode="edge")
    changes = np.abs(np.diff(padded)) / np.maximum((padded[1:] + padded[:-1]) / 2, 1e-9)
    changes = changes.reshape(-1, FLUCTUATION_BLOCK)
    place = FLUCTUATION_BLOCK // 10
    quantile = np.partition(changes, place, axis=1)[:, place]
    # The 10 % quantile of |x - y| for independent normal x and y of standard deviation s is 0.178
    # s. A low quantile, because the largest differences of a block are edges of a wave and not
    # noise.
    deviation = quantile / _quantile_of_difference(np.full(len(quantile), 0.1))
    for _ in range(2):
        # If the fraction 1 - level of the differences are edges, the 10 % quantile of all is the 10
        # % / level quantile of the rest. Two rounds, because the first estimate decides what an
        # edge is.
        level = np.mean(changes <= NO_EDGE * deviation[:, None], axis=1)
        deviation = quantile / _quantile_of_difference(0.1 / np.maximum(level, 0.2))
    found: Floats = np.repeat(deviation, FLUCTUATION_BLOCK)[: len(watts)] * watts
    return found


def _quantile_of_difference(rate: Floats) -> Floats:
    """Quantile of |x - y| for normal x and y of standard deviation 1."""
    found: Floats = math.sqrt(2) * np.interp(rate, *_HALF_NORMAL)
    return found


def _with_steps(origin_ns: int, edges: Floats, watts: Floats, sampled: Bools, shape_j: Floats) -> Cells:
    """A sample between two clearly different levels is a step from one to the other: cut where its mean puts the step.

    Spread evenly it would err in the same direction on all cards that run in step.
    """
    around = np.pad(watts, 1, mode="edge")
    before, after = around[:-2], around[2:]
    whole = np.pad(sampled, 1, mode="edge")
    differ = np.abs(after - before) > STEP_REL * np.maximum(np.abs(before), np.abs(after))
    places = np.flatnonzero(differ & whole[:-2] & whole[2:] & sampled)
    # mean = fraction x before + (1 - fraction) x after, solved for the fraction of the sample
    # before the step. Its joules do not change, only where in the 20 ms they are.
    fraction = (watts - after)[places] / (before - after)[places]
    between = (fraction > 0.01) & (fraction < 0.99)
    places, fraction = places[between], fraction[between]
    widths = np.diff(edges)
    cell_j, step_s = watts * widths, widths[places]
    cell_j[places] = before[places] * fraction * step_s
    # flags and shape are the same on both sides of a step
    return Cells(
        origin_ns=origin_ns,
        edges_s=np.insert(edges, places + 1, edges[places] + fraction * step_s),
        cell_j=np.insert(cell_j, places + 1, after[places] * (1 - fraction) * step_s),
        sampled=np.insert(sampled, places, True),
        shape_j=np.insert(shape_j, places, shape_j[places]),
    )


def sample_curve(cells: Cells, lag: Lag, limit_w: float | None) -> EnergyCurve:
    """The 20 ms samples alone, where no counter gives their scale."""
    return EnergyCurve(
        cells.edges_s - lag.mean_s,
        cells.cell_j,
        cells.sampled,
        cells.origin_ns,
        walk_j2=WALK_REL_PER_SQRT_S**2 * cells.noise_j2,
        sampled=cells.sampled,
        shape_j=cells.shape_j,
        scale_sd_rel=SCALE_SD,
        lag_error_s=lag.half_width_s,
        limit_w=limit_w,
    )


@dataclass(frozen=True, eq=False)
class Readings:
    """Counter readings: when, how many joules, over which intervals the counter can be trusted, how exact each is."""

    at_ns: Stamps
    joules: Floats
    known: Bools
    """Per interval between two readings."""
    call_s: Floats
    """Per reading: how long the call took; the value is of some moment in it."""
    refresh_s: float

    def only(self, chosen: Bools) -> Readings:
        """Without some readings; an interval is known if all the intervals that it joins are."""
        kept = np.flatnonzero(chosen)
        unknown = cumulative((~self.known).astype(float))
        known = np.diff(unknown[kept]) == 0
        return Readings(self.at_ns[kept], self.joules[kept], known, self.call_s[kept], self.refresh_s)

    def compared_with(self, cells: Cells) -> Evidence:
        """Readings and samples together; the counter's steps count where samples cover all of their time."""
        read_s = (self.at_ns - cells.origin_ns) / NS
        begin, end = read_s[:-1] - self.refresh_s, read_s[1:] + SAMPLES_HOLE_S
        missing_s = cumulative(np.where(cells.sampled, 0.0, np.diff(cells.edges_s)))
        missing = np.interp(end, cells.edges_s, missing_s) - np.interp(begin, cells.edges_s, missing_s)
        covered = (begin >= cells.edges_s[0]) & (end <= cells.edges_s[-1]) & (missing <= 0) & self.known
        steps_j = np.where(covered, np.diff(self.joules), np.nan)
        return Evidence(cells.edges_s, cells.cell_j, cells.shape_j, read_s, steps_j, self.call_s, self.refresh_s)


def joined_curve(cells: Cells, readings: Readings, lag: Lag, limit_w: float | None) -> EnergyCurve:
    """The samples' shape at the counter's scale; the counter alone where samples are missing, and the reverse."""
    origin = cells.origin_ns
    evidence = readings.compared_with(cells)
    alignment = align(evidence, lag)
    # a reading that may be from either side of a refresh would bend the curve; its neighbors are enough
    clear = alignment.sd_s <= AMBIGUOUS * readings.refresh_s
    if not clear.all() and clear.sum() >= 3:
        readings, alignment = readings.only(clear), alignment.only(clear)
        evidence = readings.compared_with(cells)
    # Times of neighboring readings may cross by less than their errors; interpolation needs them
    # strictly ascending.
    at_s = np.maximum.accumulate(alignment.at_s) + 1e-9 * np.arange(len(alignment.at_s))
    timing_s = alignment.sd_s
    steps_j, compared = evidence.steps_j, np.isfinite(evidence.steps_j)
    counted_j = np.where(readings.known, np.diff(readings.joules), 0.0)
    noise = _SampleNoise.of(cells, at_s, timing_s, steps_j)
    cells = _with_counter_cells(cells, at_s, counted_j, noise.scale)
    sampled_j2 = noise.walk_rel2[_interval_of(cells.edges_s, at_s)] * cells.noise_j2
    unknown_shape_j2 = _walk_of_unknown_shape(cells.cell_j, np.diff(cells.edges_s), limit_w)
    walk_j2 = np.where(cells.sampled, sampled_j2, unknown_shape_j2) + _TINY_J2_PER_S * np.diff(cells.edges_s)
    # what the counter adds to the cells between each two readings, smoothed over readings that samples connect
    rest = cumulative(np.where(readings.known, counted_j - np.diff(cells.energy_at(at_s)), 0.0))
    smooth = _smooth(rest, compared, noise.correlation)
    walk = cumulative(walk_j2)
    # Interpolated in the walk's variance and not in time: between two readings the expected
    # correction of a Brownian bridge is proportional to the variance passed, so noisy cells take
    # more of it than quiet ones.
    correction = np.interp(walk, np.interp(at_s, cells.edges_s, walk), smooth)
    known = cells.sampled | _between_known(cells.edges_s, at_s, readings.known)
    # an interval over which the counter says nothing has the samples' joules at the scale of the intervals around it
    broken_j = np.where(~_between_known(cells.edges_s, at_s, readings.known) & cells.sampled, cells.cell_j, 0.0)
    interval = _interval_of(cells.edges_s, at_s)
    walk_j2 = walk_j2 + BROKEN_SCALE_SD**2 * broken_j * np.bincount(interval, broken_j)[interval]
    linked = np.concatenate([[False], compared]) | np.concatenate([compared, [False]])
    sd_j = np.where(linked, noise.anchor_sd_j, timing_s * _power_around(at_s, counted_j))
    power_w = (cells.energy_at(at_s + SAMPLE_S / 4) - cells.energy_at(at_s - SAMPLE_S / 4)) / (SAMPLE_S / 2)
    common_j = alignment.common_sd_s * _smooth(power_w, compared, noise.correlation)
    return EnergyCurve(
        cells.edges_s - lag.mean_s,
        np.where(known, cells.cell_j + np.diff(correction), 0.0),
        known,
        origin,
        walk_j2=walk_j2,
        sampled=cells.sampled,
        # the samples' own noise also makes neighbors differ, and is in the walk already
        shape_j=np.sqrt(np.maximum(cells.shape_j**2 - FAST_CHANGE**2 * walk_j2, 0.0)),
        # a counter that is refreshed now and then gives the same value wherever in the call it is read
        anchors=Anchors(at_s - lag.mean_s, sd_j, np.zeros(len(at_s)), noise.correlation, common_j, ~readings.known),
        scale_sd_rel=noise.scale_sd,
        pinned_s=_pinned_s(at_s - lag.mean_s, noise.correlation),
        lag_error_s=lag.half_width_s,
        limit_w=limit_w,
    )


def _pinned_s(at_s: Floats, correlation: float) -> tuple[float, float]:
    """Between which times readings pin the scale.

    Near the ends of the trace the smoother has readings on one side only; that many of them do not count.
    """
    reach = math.floor(correlation / (1 - correlation))
    ends = (reach, -1 - reach) if len(at_s) > 2 * reach + 1 else (0, 0)
    return float(at_s[ends[0]]), float(at_s[ends[1]])


@dataclass(frozen=True, eq=False)
class _SampleNoise:
    """How samples and counter differ, per interval between two readings: it changes with the load.

    On an H200 the samples of most loads are within 2 % of the counter, and 10 to 14 % below it for a 20 ms square wave.
    """

    scale: Floats
    scale_sd: float
    walk_rel2: Floats
    """Variance of the walk in a second, relative to the squared energy of that second."""
    anchor_sd_j: Floats
    """Per reading."""
    correlation: float

    @classmethod
    def of(cls, cells: Cells, at_s: Floats, timing_s: Floats, steps_j: Floats) -> _SampleNoise:
        compared = np.isfinite(steps_j)
        counted_j = np.where(compared, steps_j, 0.0)
        sampled_j = np.where(compared, np.diff(cells.energy_at(at_s)), 0.0)
        intervals = len(steps_j)
        if counted_j.sum() <= 0 or sampled_j.sum() <= 0:
            walk_rel2 = np.full(intervals, WALK_REL_PER_SQRT_S**2)
            return cls(np.full(intervals, SCALE), SCALE_SD, walk_rel2, np.zeros(intervals + 1), 0.0)
        noise_j2 = np.where(compared, np.diff(np.interp(at_s, cells.edges_s, cumulative(cells.noise_j2))), 0.0)
        number, near_noise_j2 = _nearby(compared.astype(float)), np.maximum(_nearby(noise_j2), 1e-12)
        # noise of the samples would make neighbors differ: where they do not, there is none
        fluctuation_rel2 = (cells.shape_j / FAST_CHANGE) ** 2 / np.maximum(cells.noise_j2, 1e-12)
        usual_rel2 = min(WALK_REL_PER_SQRT_S**2, float(np.median(fluctuation_rel2[cells.sampled])))
        timing_j2 = (timing_s[1:] ** 2 + timing_s[:-1] ** 2) / 2 * (counted_j / np.diff(at_s)) ** 2
        cell = np.clip(np.searchsorted(cells.edges_s, at_s) - 1, 0, len(cells.shape_j) - 1)
        inside_j2 = (cells.shape_j[cell][1:] ** 2 + cells.shape_j[cell][:-1] ** 2) / 2 / Z95**2
        reading_j2 = _nearby(np.where(compared, timing_j2 + inside_j2, 0.0)) / np.maximum(number, 1)
        by_counter, by_samples = float(counted_j.sum()), float(sampled_j.sum())
        count, spread_j2 = int(compared.sum()), usual_rel2 * float(noise_j2.sum())
        # A line through n + 1 equally spaced readings with error s has the slope variance 12 s^2 /
        # n^3 per spacing squared (least squares), hence 12 s^2 / n for the energy of n intervals;
        # plus the noise of the samples.
        scale_var = 12 * float(reading_j2.mean()) / (count + 1) / by_counter**2 + 1.2 * spread_j2 / by_samples**2
        # Posterior mean of a normal prior (SCALE, SCALE_SD) and a normal observation: a short trace
        # keeps the usual ratio of other cards, a long one its own.
        weight = SCALE_SD**2 / (SCALE_SD**2 + scale_var)
        overall = weight * by_counter / by_samples + (1 - weight) * SCALE
        near_j = np.maximum(_nearby(sampled_j), 1e-9)
        near_var = (2 * reading_j2 + usual_rel2 * near_noise_j2) / near_j**2
        near_weight = np.where(number >= 4, SCALE_SD**2 / (SCALE_SD**2 + near_var), 0.0)
        scale = near_weight * _nearby(counted_j) / near_j + (1 - near_weight) * overall
        # the differences vary by the walk and by twice the reading errors, which alone correlate neighbors
        differences = counted_j - scale * sampled_j
        variance = _nearby(differences**2) / np.maximum(number - 1, 1)
        # A late reading makes one difference larger and the next one smaller, so neighbors have the
        # covariance -s^2, while the increments of the walk are independent: the reduced form of the
        # local-level model (Harvey, 1989, ch. 2).
        products = np.append(differences[1:] * differences[:-1], 0.0)
        seen_j2 = -_nearby(products) / np.maximum(number, 1) - 2 * variance / np.sqrt(np.maximum(number, 1))
        reading_j2 = np.where(number >= 5, np.maximum(reading_j2, seen_j2), reading_j2)
        # Each difference contains two reading errors. What is left is the walk; at least a quarter,
        # because the estimate of the reading errors is itself uncertain.
        seen_rel2 = np.maximum(variance - 2 * reading_j2, variance / 4) * number / near_noise_j2
        seen = np.where(number >= 5, number - 1, 0.0)
        walk_rel2 = (PRIOR_DIFFERENCES * usual_rel2 + seen * seen_rel2) / (PRIOR_DIFFERENCES + seen)
        # Student's t instead of the normal distribution, for a variance from so few differences
        walk_rel2 = np.where(seen > 0, walk_rel2 * (1 + 2 / (PRIOR_DIFFERENCES + seen)), WALK_REL_PER_SQRT_S**2)
        # where the load changes, so may the scale, and where in the interval is unknown
        place = np.arange(intervals)
        later, earlier = np.minimum(place + NEARBY, intervals - 1), np.maximum(place - NEARBY, 0)
        change_j = np.where(number >= 2 * NEARBY, np.abs(scale[later] - scale[earlier]) / 2, 0.0) * sampled_j
        walk_rel2 += np.where(compared, change_j**2 / np.maximum(noise_j2, 1e-12), 0.0)
        ratios = walk_rel2 * near_noise_j2 / np.maximum(number, 1) / np.maximum(reading_j2, 1e-12)
        # where the walk is fast, readings must not be smoothed; where it is slow, smoothing gains little
        # q = walk variance / reading variance, the signal-to-noise ratio of the local-level model.
        ratio = max(float(np.quantile(ratios[compared], 0.9)), 1e-9)
        # The smoother's weights fall off as r^distance with r + 1/r = 2 + q (Durbin and Koopman,
        # 2.11: the steady-state smoother), hence the root of r^2 - (2 + q) r + 1. 0.98 averages
        # over 50 readings at most.
        correlation = min(0.98, (ratio + 2 - math.sqrt(ratio**2 + 4 * ratio)) / 2)
        # Weights (1 - r) / (1 + r) r^|k| sum to 1. The variance of the smoothed level is the
        # reading variance times the weight of the reading itself.
        anchor_sd_j = np.sqrt(reading_j2 * (1 - correlation) / (1 + correlation))
        at_readings = (np.append(anchor_sd_j[0], anchor_sd_j) + np.append(anchor_sd_j, anchor_sd_j[-1])) / 2
        return cls(scale, SCALE_SD * math.sqrt(1 - weight), walk_rel2, at_readings, correlation)


def _nearby(values: Floats) -> Floats:
    """Sum over each value and up to `NEARBY` neighbors on both sides."""
    sums, place = cumulative(values), np.arange(len(values))
    found: Floats = sums[np.minimum(place + NEARBY + 1, len(values))] - sums[np.maximum(place - NEARBY, 0)]
    return found


def _interval_of(edges_s: Floats, at_s: Floats) -> NDArray[np.intp]:
    """Per cell: in which interval between two readings its middle is, the nearest one for those outside."""
    middle = (edges_s[1:] + edges_s[:-1]) / 2
    return np.clip(np.searchsorted(at_s, middle) - 1, 0, len(at_s) - 2)


def _with_counter_cells(cells: Cells, at_s: Floats, counted_j: Floats, interval_scale: Floats) -> Cells:
    """Samples at the counter's scale. Holes, and time before and after the samples, are cut by the readings in them."""
    more = (int(at_s[0] < cells.edges_s[0]), int(at_s[-1] > cells.edges_s[-1]))
    outer = np.concatenate([[at_s[0]] * more[0], cells.edges_s, [at_s[-1]] * more[1]])
    sampled, cell_j = np.pad(cells.sampled, more), np.pad(cells.cell_j, more)
    place = np.minimum(np.searchsorted(outer, at_s, side="right"), len(sampled)) - 1
    finer = np.unique(np.concatenate([outer, at_s[~sampled[place]]]))
    old = np.minimum(np.searchsorted(outer, (finer[1:] + finer[:-1]) / 2, side="right"), len(sampled)) - 1
    by_counter = np.diff(np.interp(finer, at_s, cumulative(counted_j)))
    scale = interval_scale[_interval_of(finer, at_s)]
    shape_j = scale * np.pad(cells.shape_j, more)[old]
    cell_j = np.where(sampled[old], scale * cell_j[old], by_counter)
    return Cells(cells.origin_ns, finer, cell_j, sampled[old], shape_j)


def _between_known(edges_s: Floats, at_s: Floats, known: Bools) -> Bools:
    """Per cell: whether its middle is between two readings over which the counter can be trusted."""
    between = np.concatenate([[False], known, [False]])
    found: Bools = between[np.searchsorted(at_s, (edges_s[1:] + edges_s[:-1]) / 2)]
    return found


def _power_around(at_s: Floats, counted_j: Floats) -> Floats:
    watts = counted_j / np.maximum(np.diff(at_s), 1e-9)
    found: Floats = np.maximum(np.concatenate([watts[:1], watts]), np.concatenate([watts, watts[-1:]]))
    return found


def _smooth(rest: Floats, compared: Bools, correlation: float) -> Floats:
    """Two-sided exponential smoothing within runs of readings that samples connect."""
    if correlation <= 0:
        return rest
    found = rest.copy()
    cuts = np.flatnonzero(~compared) + 1
    for piece in np.split(np.arange(len(rest)), cuts):
        if len(piece) > 1:
            found[piece] = _convolve(rest[piece], correlation) / _convolve(np.ones(len(piece)), correlation)
    return found
