"""When a counter reading is of, on the time axis of the 20 ms samples; and by how much the samples lag.

A GPU's energy counter is refreshed every 100 ms, so a reading is the energy at the last refresh before it: its age
is between 0 and one refresh period. A sample is the mean power up to some milliseconds before its stamp: the lag.
Both are unknown and both move energy between neighboring windows.

They show in the data. For a phase of the refresh clock and a lag, the counter's steps must equal the samples' integral
between the same moments. Readings whose ages differ (the recorder reads out of step with the refresh, `nvml.py`) then
single out the phase, and with it the lag. The refresh clock of an H200 kept its phase within 3 ms over 100 s, so it is
fitted per `CHUNK` of readings; the lag belongs to the driver and is one number for all cards of a trace.

The posterior is evaluated on a grid. Where the data say little (a short trace, readings in step with the refresh) the
prior remains: a lag between 0 and 20 ms. All times are relative to the counter: if the counter itself follows the load
late, this cannot show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]

SAMPLE_S = 0.02
LAG_PRIOR_S = (0.0, 0.02)
LAG_PRIOR_TAIL_S = 0.003
LAGS_S = np.arange(-0.010, 0.0301, 0.001)
PHASES = 50
CHUNK = 256
ROWS_AT_ONCE = 32
# Half a step of the phase's grid and some jitter of the clock.
CLOSE_S = 0.0015
# Chunks that the lag is estimated from; more would add little and take long for a day's trace.
LAG_CHUNKS = 4
BLOCK = 16
# Residuals have heavier tails than normal, and a Student likelihood is not led by them.
STUDENT_DF = 5.0
# The model is nearly right, not exact, so the evidence of many readings must not grow without limit: n of them weigh as
# COARSE_READINGS / (COARSE_READINGS + n), the coarsened posterior of Miller and Dunson (Robust Bayesian inference via
# coarsening, JASA 2019). This number, TEMPER and TIME_MODEL_SD_S are set by simulation (scripts/audit_intervals.py).
COARSE_READINGS = 12.0
# Weight of a reading whose step is nearly the same for every lag (a whole number of waves between two refreshes). Its
# residuals still differ between lags, by the noise of the samples at both ends: an error in the regressor (Fuller,
# Measurement Error Models), which a likelihood of the steps takes for evidence.
TEMPER = 0.3
# A step depends on the lag if its variance over LAGS_S is more than ten times what noise alone causes: that of a random
# walk over two samples, 2 / 6 of a sample's variance at each end, which is 1.8 times the `unsure_j2` of the likelihood.
INFORMATIVE = 18.0
# A value is of any moment in its call (standard deviation: length / sqrt(12)); this is added for delays around the call
# and half a step of the phase's grid.
READ_JITTER_SD_S = 0.001
# Error of the times that is in neither lag nor phase, such as calls that take the value late on average.
TIME_MODEL_SD_S = 0.0005
# Samples agree with the counter within 1 to 2 % on the cards tried; another card's may agree less well.
SCALE = 0.99
SCALE_SD = 0.02


@dataclass(frozen=True)
class Lag:
    """Lag of the samples behind the counter: mean and 95 % half-width."""

    mean_s: float
    half_width_s: float


@dataclass(frozen=True, eq=False)
class Evidence:
    """One card's samples and counter readings, in seconds on the samples' time axis.

    `steps_j` is what the counter rose by between each two readings, NaN where samples do not cover that time.
    """

    edges_s: Floats
    cell_j: Floats
    shape_j: Floats
    """Per cell: 95 % half-width of the joules up to somewhere inside it."""
    read_s: Floats
    steps_j: Floats
    call_s: Floats
    """Per reading: how long the call took."""
    refresh_s: float

    @cached_property
    def _integral_j(self) -> Floats:
        return np.concatenate([[0.0], np.cumsum(self.cell_j)])

    def integral_at(self, moments_s: Floats) -> Floats:
        found: Floats = np.interp(moments_s, self.edges_s, self._integral_j)
        return found

    def chunks(self) -> Rows:
        """[chunk, reading]: numbers of readings, about `CHUNK` in a row; rows overlap by one where needed."""
        number = max(1, round(len(self.read_s) / CHUNK))
        length = -(-len(self.read_s) // number)
        starts = np.linspace(0, len(self.read_s) - length, number).astype(int)
        return starts[:, None] + np.arange(length)

    def moments(self, rows: Rows, lags_s: Floats) -> tuple[Floats, Floats, Floats]:
        """[phase, row, reading] -> the time on the samples' axis that the reading is of, the integral up to it; sides.

        `rows` numbers the readings of each case, `lags_s` is the lag that each case assumes. The call to read takes
        milliseconds, and when in it the value was taken is unknown. A reading that close to a refresh may be from the
        other side of it, a whole period off. The sides are chosen that leave the smallest differences between the
        counter's steps and the samples': the cheapest path through the readings (Viterbi).

        The third value is [phase, row], the log-probability of the chosen sides. A phase that needs many readings from
        the other side, or one from far on the other side, is unlikely. If sides were free, every phase within half a
        call would fit equally well, and more readings would not narrow it.
        """
        phases = (np.arange(PHASES) + 0.5) / PHASES * self.refresh_s
        read_s, close_s = self.read_s[rows], self.call_s[rows] / 2 + CLOSE_S
        # For a refresh clock with this phase, the time since its last tick before the reading.
        age = (read_s[None] - phases[:, None, None]) % self.refresh_s
        moments = read_s[None] - age + lags_s[None, :, None]
        integral = self.integral_at(moments)
        side_s = np.where(age < close_s, -self.refresh_s, np.where(age > self.refresh_s - close_s, self.refresh_s, 0.0))
        close = side_s != 0
        if not close.any():
            return moments, integral, np.zeros(moments.shape[:2])
        other, other_integral = moments + side_s, integral.copy()
        other_integral[close] = self.integral_at(other[close])
        chosen = _cheapest_sides(self.steps_j[rows[:, :-1]], integral, other_integral)
        # a logistic distribution of the read moment, for tails heavier than normal
        sd_s = np.hypot(self.call_s[rows] / math.sqrt(12), READ_JITTER_SD_S)
        log_odds = math.pi / math.sqrt(3) * np.minimum(age, self.refresh_s - age) / sd_s
        sides = np.where(close, -np.logaddexp(0.0, np.where(chosen, log_odds, -log_odds)), 0.0).sum(axis=-1)
        return np.where(chosen, other, moments), np.where(chosen, other_integral, integral), sides

    def log_likelihood(
        self, rows: Rows, moments: Floats, integral: Floats, sides: Floats, same_readings: bool = False
    ) -> Floats:
        """[phase, row] -> Student likelihood of the counter's steps at reduced weight, given the samples' integral.

        The scale between the two is free in each block of readings, with the usual ratio as its prior: it changes a
        little with the load. The variance is the same for all phases, and for all rows that are cases of the same
        readings: otherwise the times with the least uncertainty would win, whatever the residuals. `same_readings`: the
        rows are the same readings at each of `LAGS_S`, and readings that depend on the lag have more weight.
        """
        steps_j = self.steps_j[rows[:, :-1]]
        usable = np.isfinite(steps_j)
        steps_j = np.where(usable, steps_j, 0.0)
        sampled_j = np.where(usable, np.diff(integral, axis=-1), 0.0)
        # a mean over the phases, for which a few of them are enough
        cell = np.clip(np.searchsorted(self.edges_s, moments[::5], side="right") - 1, 0, len(self.cell_j) - 1)
        shape_j2 = (self.shape_j[cell] / 1.96) ** 2
        unsure_j2 = (shape_j2[..., 1:] + shape_j2[..., :-1]).mean(axis=0)
        floor_j = 0.002 * max(float(np.median(np.abs(steps_j[usable]))) if usable.any() else 0.0, 1e-9)
        residuals = np.concatenate(
            [
                _residuals(steps_j[:, k : k + BLOCK], sampled_j[..., k : k + BLOCK], floor_j)
                for k in range(0, steps_j.shape[1], BLOCK)
            ],
            axis=-1,
        )
        size, number = np.sort(np.where(usable, np.abs(residuals), np.inf), axis=-1), usable.sum(axis=-1)
        # the median of the usable ones, which the sort has put first
        # The median absolute residual over 0.6745 estimates the standard deviation of a normal
        # distribution, and one outlier, such as a misread refresh, does not change it.
        spread = np.take_along_axis(size, np.maximum(number - 1, 0)[None, :, None] // 2, axis=-1)[..., 0] / 0.6745
        sigma_j = np.maximum(np.where(number > 0, spread.min(axis=0), 0.0), floor_j)
        if same_readings:
            unsure_j2, sigma_j = unsure_j2.mean(axis=0, keepdims=True), sigma_j.min(keepdims=True)
        variance = sigma_j[:, None] ** 2 + unsure_j2
        # Minus the logarithm of Student's density without its constant: a residual of ten standard
        # deviations costs 9 nats instead of 50, so that one bad reading does not decide the phase.
        terms = (STUDENT_DF + 1) / 2 * np.log1p(residuals**2 / variance / STUDENT_DF)
        terms = np.where(usable, terms, 0.0)
        likelihood: Floats = sides - TEMPER * terms.sum(axis=-1)
        if same_readings:
            best = int(likelihood.max(axis=1).argmax())
            informative = sampled_j[best].var(axis=0) > INFORMATIVE * unsure_j2[0] + floor_j**2
            weight = COARSE_READINGS / (COARSE_READINGS + float(informative.sum()))
            likelihood = sides - weight * (terms @ np.where(informative, 1.0, TEMPER))
        return likelihood


def _cheapest_sides(steps_j: Floats, integral: Floats, other: Floats) -> NDArray[np.bool_]:
    """[phase, row, reading] -> whether the other side of the refresh fits the counter's steps better."""
    usable = np.isfinite(steps_j)
    steps_j = np.where(usable, steps_j, 0.0)
    rises_j = np.where(usable, np.diff(integral, axis=-1), 0.0).sum(axis=-1)
    scale = steps_j.sum(axis=-1) / np.maximum(rises_j, 1e-9)
    scale = np.clip(scale, SCALE - 2 * SCALE_SD, SCALE + 2 * SCALE_SD)
    sides = np.stack([integral, other]) * scale[..., None]
    cost = np.zeros((2, *integral.shape[:2]))
    came_from = np.zeros((integral.shape[-1], 2, *integral.shape[:2]), dtype=bool)
    for k in range(1, integral.shape[-1]):
        # [to, from, phase, row]; a step that cannot be compared costs nothing
        misfit = np.abs(steps_j[:, k - 1] - (sides[:, None, ..., k] - sides[None, :, ..., k - 1])) * usable[:, k - 1]
        paths = cost[None] + misfit
        came_from[k] = paths[:, 1] < paths[:, 0]
        cost = paths.min(axis=1)
    chosen = np.zeros(integral.shape, dtype=bool)
    state = cost[1] < cost[0]
    for k in range(integral.shape[-1] - 1, -1, -1):
        chosen[..., k] = state
        state = np.where(state, came_from[k, 1], came_from[k, 0])
    return chosen


def _residuals(steps_j: Floats, sampled_j: Floats, sigma_j: float) -> Floats:
    # Ridge regression of the counter's steps on the samples' through the origin, shrunk to `SCALE`:
    # the posterior mean for a normal prior of standard deviation `SCALE_SD`.
    prior = (sigma_j / SCALE_SD) ** 2
    scale = ((sampled_j * steps_j).sum(axis=-1) + prior * SCALE) / ((sampled_j**2).sum(axis=-1) + prior)
    residuals: Floats = steps_j - scale[..., None] * sampled_j
    return residuals


def lag_log_likelihood(evidence: Evidence) -> Floats:
    """Log-likelihood of each of `LAGS_S`, from the readings of one card."""
    found, chunks = np.zeros(len(LAGS_S)), evidence.chunks()
    for number in np.unique(np.linspace(0, len(chunks) - 1, LAG_CHUNKS).astype(int)):
        rows = np.repeat(chunks[number : number + 1], len(LAGS_S), axis=0)
        likelihood = evidence.log_likelihood(rows, *evidence.moments(rows, LAGS_S), same_readings=True)
        # log(mean(exp)) over the phases: the phase is a nuisance parameter with a uniform prior and
        # is integrated out. The maximum is subtracted, because exp underflows below -745.
        top = likelihood.max(axis=0)
        found += np.log(np.exp(likelihood - top).mean(axis=0)) + top
    return found


def estimate_lag(log_likelihoods: Sequence[Floats]) -> Lag:
    """One lag for all cards of a driver."""
    low, high = LAG_PRIOR_S
    outside = np.maximum(0.0, np.maximum(low - LAGS_S, LAGS_S - high))
    # Independent cards: their log-likelihoods add. The prior is flat inside `LAG_PRIOR_S` with
    # normal tails.
    posterior = sum(log_likelihoods, -0.5 * (outside / LAG_PRIOR_TAIL_S) ** 2)
    weight = np.exp(posterior - posterior.max())
    weight /= weight.sum()
    mean_s = float(weight @ LAGS_S)
    variance = float(weight @ (LAGS_S - mean_s) ** 2) + TIME_MODEL_SD_S**2
    return Lag(mean_s, 1.96 * math.sqrt(variance))


@dataclass(frozen=True, eq=False)
class Alignment:
    """Every reading on the samples' time axis."""

    at_s: Floats
    sd_s: Floats
    """Per reading: standard deviation of its time against the other readings'."""
    common_sd_s: float
    """Standard deviation of what moves all of them together."""

    def only(self, chosen: NDArray[np.bool_]) -> Alignment:
        return Alignment(self.at_s[chosen], self.sd_s[chosen], self.common_sd_s)


def align(evidence: Evidence, lag: Lag) -> Alignment:
    """The readings' times, chunk by chunk, each with the refresh phases that fit it."""
    chunks = evidence.chunks()
    at_s, sd_s = np.zeros(len(evidence.read_s)), np.zeros(len(evidence.read_s))
    common_s2 = TIME_MODEL_SD_S**2
    for rows in np.array_split(chunks, -(-len(chunks) // ROWS_AT_ONCE)):
        moments, integral, sides = evidence.moments(rows, np.full(len(rows), lag.mean_s))
        likelihood = evidence.log_likelihood(rows, moments, integral, sides)
        weight = np.exp(likelihood - likelihood.max(axis=0))
        weight /= weight.sum(axis=0)
        # Posterior mean over the phases. A reading whose time is nearly the same for all likely
        # phases is well placed even if the phase is not.
        mean = np.einsum("pr,prk->rk", weight, moments)
        common = moments.mean(axis=-1)
        common_mean = (weight * common).sum(axis=0)
        # The spread is split in two: what moves all readings of a chunk together is a common error
        # of all anchors, the rest an independent one of each. Treated as independent, the common
        # part would wrongly average out over long windows.
        relative = moments - common[..., None] - (mean - common_mean[:, None])
        at_s[rows] = mean
        sd_s[rows] = np.sqrt(np.einsum("pr,prk->rk", weight, relative**2))
        spread_s2 = (weight * (common - common_mean) ** 2).sum(axis=0)
        common_s2 = max(common_s2, float(spread_s2.max()) + TIME_MODEL_SD_S**2)
    return Alignment(at_s, sd_s, math.sqrt(common_s2))
