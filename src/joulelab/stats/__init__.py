"""Intervals, tests and break-even counts from a handful of numbers: pure functions over numpy."""

from joulelab.stats.intervals import (
    BOOTSTRAP_FROM,
    Z95,
    Interval,
    difference_of_means,
    mean_bootstrap,
    mean_interval,
    mean_t,
    ratio_paired,
    ratio_unpaired,
    repeats_for,
    repeats_needed,
    widened_ratio,
    wilson,
)
from joulelab.stats.paired_items import PairedDifference, accuracy_difference
from joulelab.stats.payback import Estimate, Payback, fieller_interval, payback, payback_students, payback_tokens
from joulelab.stats.student_t import t_cdf, t_quantile

__all__ = [
    "BOOTSTRAP_FROM",
    "Z95",
    "Estimate",
    "Interval",
    "PairedDifference",
    "Payback",
    "accuracy_difference",
    "difference_of_means",
    "fieller_interval",
    "mean_bootstrap",
    "mean_interval",
    "mean_t",
    "payback",
    "payback_students",
    "payback_tokens",
    "ratio_paired",
    "ratio_unpaired",
    "repeats_for",
    "repeats_needed",
    "t_cdf",
    "t_quantile",
    "widened_ratio",
    "wilson",
]
