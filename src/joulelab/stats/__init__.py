"""Intervals, tests and break-even counts from a handful of numbers: pure functions over numpy."""

from joulelab.stats.break_even import (
    BreakEven,
    Estimate,
    break_even,
    break_even_students,
    break_even_tokens,
    fieller_interval,
)
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
    t_cdf,
    t_quantile,
    widened_ratio,
    wilson,
)
from joulelab.stats.paired_items import PairedDifference, accuracy_difference

__all__ = [
    "BOOTSTRAP_FROM",
    "Z95",
    "BreakEven",
    "Estimate",
    "Interval",
    "PairedDifference",
    "accuracy_difference",
    "break_even",
    "break_even_students",
    "break_even_tokens",
    "difference_of_means",
    "fieller_interval",
    "mean_bootstrap",
    "mean_interval",
    "mean_t",
    "ratio_paired",
    "ratio_unpaired",
    "repeats_for",
    "repeats_needed",
    "t_cdf",
    "t_quantile",
    "widened_ratio",
    "wilson",
]
