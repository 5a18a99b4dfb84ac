"""The table of a comparison's quality: each method's figure with its interval, and its difference to the baseline."""

from __future__ import annotations

from joulelab.report.comparison import Comparison, QualityDifference, Row
from joulelab.report.grid import Grid, make_grid
from joulelab.report.quality import Measure
from joulelab.report.wording import NOTHING, all_equal, p_value
from joulelab.stats import Interval


def quality_grid(comparison: Comparison) -> Grid | None:
    """None where no run has a figure to show."""
    measure, items = comparison.measure, comparison.about_items
    if measure is None:
        return None
    rows = [
        (
            row.label,
            row.seeds_text,
            _value(row, measure),
            _by_seed(row, measure),
            *_cells(row.difference, measure, items),
        )
        for row in comparison.rows
    ]
    title, unit = ("Loss", "nats/token") if measure.unit == "nats" else (_capital(measure.title), measure.unit)
    heading = f"{title}, {unit}" if unit else title
    by_seed = f"By seed, {unit}" if measure.percent else "By seed"
    difference = f"Difference, {measure.difference_unit}" if measure.difference_unit else "Difference"
    columns = ["Method", "Seeds!", f"{heading}>", f"{by_seed}>", f"{difference}>", *(["p>"] * items), "Significant!"]
    return make_grid("Quality", "|".join(columns), rows, _note(comparison, measure, title))


def _note(comparison: Comparison, measure: Measure, title: str) -> str:
    if not comparison.about_items:
        less = " less is better." if measure.lower_is_better else ""
        tokens = ", on the same held-out tokens" if measure.unit == "nats" else ""
        return (
            f"{title}: mean over seeds with its 95 % t interval;{less or ' more is better.'} "
            f"Difference: to {comparison.baseline}, paired by seed where seeds pair{tokens}."
        )
    trials = sorted({run.result.trials or 0 for row in comparison.rows for run in row.runs if run.quality})
    note = (
        f"{title}: mean over seeds with Wilson's 95 % interval on {' / '.join(map(str, trials))} test items. "
        f"Difference: to {comparison.baseline}, paired by item, with a 95 % interval over items and training seeds."
    )
    differences = [row.difference for row in comparison.rows if row.difference]
    if any(difference.models_only for difference in differences):
        note += " Models only: exact McNemar test; one training run on a side says nothing about the methods."
    if any(difference.paired is None for difference in differences):
        note += " Unpaired: there are no predictions to pair."
    return note


def _value(row: Row, measure: Measure) -> str:
    if row.quality is None:
        return NOTHING
    if same := equal_repeats(row):
        return f"{measure.number(row.quality)} {same}"
    return (
        _with_ends(Interval(row.quality, row.interval.low, row.interval.high), measure)
        if row.interval
        else (measure.number(row.quality))
    )


def equal_repeats(row: Row) -> str:
    """Where the repeats are the sample and all say the same; a share's interval is its test set's."""
    found = [run.result for run in row.runs if run.quality]
    return "" if any(result.trials for result in found) else all_equal([result.value for result in found])


def _with_ends(interval: Interval, measure: Measure) -> str:
    """One seed has no interval to show."""
    text = measure.number(interval.value)
    return f"{text} [{measure.number(interval.low)}, {measure.number(interval.high)}]" if interval.bounded else text


def _by_seed(row: Row, measure: Measure) -> str:
    return ", ".join(measure.number(run.result.value) for run in row.runs if run.quality) or NOTHING


def _cells(difference: QualityDifference | None, measure: Measure, items: bool) -> tuple[str, ...]:
    nothing = (NOTHING,) * items
    if difference is None:
        return "baseline", *nothing, NOTHING
    found = difference.interval
    if found is None:
        mean = sum(difference.by_seed) / len(difference.by_seed) if difference.by_seed else None
        return NOTHING if mean is None else measure.change(mean), *nothing, "unpaired"
    ends = f" {measure.change_interval(found)}" if found.bounded else ""
    p = (p_value(difference.paired.p_value),) if difference.paired else nothing
    return f"{measure.change(found.value)}{ends}", *p, _significance(difference)


def _significance(difference: QualityDifference) -> str:
    if difference.significant:
        return "yes"
    if difference.models_only:
        return "models only" if difference.paired and difference.paired.significant else "no"
    return "no" if difference.interval and difference.interval.bounded else "one seed"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
