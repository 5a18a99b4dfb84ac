"""Quality where less is better: a language model's loss on held-out tokens, its table, its words.

All seeds are asked the same tokens, so the seeds are the sample: a difference is resolved where the interval over
paired seeds leaves 0 out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from joulelab.report.compare import AccuracyDifference, Comparison, Row, accuracy_interval
from joulelab.report.grid import Grid, make_grid
from joulelab.report.wording import NOTHING, accuracy, listed
from joulelab.runs.record import Result
from joulelab.stats import Interval

LOSS_TITLE = "Validation loss (nats per token)"


def quality_text(result: Result, with_interval: bool = True) -> str:
    """`81.2 % [80.0, 82.3]`, or `3.214 nats` for a loss."""
    if result.lower_is_better:
        return f"{result.value:.3f} nats"
    return accuracy(result.value, accuracy_interval(result.value, result.trials) if with_interval else None)


def loss_grid(comparison: Comparison) -> Grid:
    rows = [
        (
            row.label,
            ", ".join(str(run.seed) for run in row.runs),
            _with_ends(row.interval, ".3f") if row.interval else f"{row.accuracy:.3f}",
            ", ".join(f"{run.accuracy.value:.3f}" for run in row.runs),
            *_difference_cells(row.difference),
        )
        for row in comparison.rows
    ]
    note = (
        "Loss: mean over seeds with its 95 % t interval; less is better. "
        f"Difference: to {comparison.baseline}, paired by seed, on the same held-out tokens."
    )
    titles = "Method|Seeds!|Loss, nats/token>|By seed>|Difference, nats>|Resolved!"
    return make_grid("Quality", titles, rows, note)


def loss_clause(methods: Sequence[Row]) -> str:
    resolved = [row for row in methods if row.difference and row.difference.resolved]
    for rows, word in (
        ([r for r in resolved if _mean(r) < 0], "lower"),
        ([r for r in resolved if _mean(r) > 0], "higher"),
    ):
        if rows:
            verb = "has" if len(rows) == 1 else "have"
            sizes = listed([f"{_mean(row):+.3f}" for row in rows])
            return f"{listed([row.label for row in rows])} {verb} a {word} validation loss ({sizes} nats)"
    return "no method has a resolvably lower or higher validation loss"


def loss_sentence(row: Row, baseline: str) -> str:
    difference = row.difference
    if difference is None or difference.over_seeds is None:
        reason = difference.reason if difference else "nothing to compare with"
        return f"{row.label} against {baseline}: validation loss not resolved: {reason}."
    seeds = "seeds " + ", ".join(f"{value:+.3f}" for value in difference.by_seed)
    if not difference.resolved:
        why = difference.reason or f"95 % interval {_ends(difference.over_seeds)}"
        return (
            f"{row.label} against {baseline}: validation loss not resolved: "
            f"difference {difference.over_seeds.value:+.3f} nats, {why}; {seeds}."
        )
    word = "lower" if difference.over_seeds.value < 0 else "higher"
    return (
        f"{row.label} has a validation loss {abs(difference.over_seeds.value):.3f} nats {word} than {baseline} "
        f"(95 % interval {_ends(difference.over_seeds)}; {seeds})."
    )


def _difference_cells(difference: AccuracyDifference | None) -> tuple[str, str]:
    if difference is None:
        return "baseline", NOTHING
    if difference.over_seeds is None:
        return NOTHING, "unpaired"
    one_seed = math.isinf(difference.over_seeds.high)
    return _with_ends(difference.over_seeds, "+.3f"), "yes" if difference.resolved else "one seed" if one_seed else "no"


def _mean(row: Row) -> float:
    return row.difference.over_seeds.value if row.difference and row.difference.over_seeds else 0.0


def _with_ends(interval: Interval, form: str) -> str:
    """One seed has no interval to show."""
    if math.isinf(interval.high):
        return f"{interval.value:{form}}"
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def _ends(interval: Interval) -> str:
    return f"[{interval.low:+.3f}, {interval.high:+.3f}]"
