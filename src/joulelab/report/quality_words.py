"""Quality differences in words: significant with the evidence, or inconclusive with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from joulelab.report.comparison import QualityDifference, Row
from joulelab.report.quality import Measure
from joulelab.report.wording import listed, p_value


def quality_clause(methods: Sequence[Row], measure: Measure) -> str:
    """`response KD is more accurate (+3.7 points)`, for the headline; better ones before worse ones."""
    significant = [row for row in methods if row.difference and row.difference.significant]
    better = [row for row in significant if measure.sign * _mean(row.difference) > 0]
    rows = better or significant
    if not rows:
        if measure.name == "accuracy":
            return "no method is significantly more or less accurate"
        words = "lower or higher" if measure.lower_is_better else "higher or lower"
        return f"no method has a significantly {words} {measure.title}"
    sizes = listed([measure.change(_mean(row.difference)) for row in rows])
    unit = f" {measure.difference_unit}" if measure.difference_unit else ""
    names, one = listed([row.label for row in rows]), len(rows) == 1
    rises = _mean(rows[0].difference) > 0
    if measure.name == "accuracy":
        return f"{names} {'is' if one else 'are'} {'more' if rises else 'less'} accurate ({sizes}{unit})"
    return f"{names} {'has' if one else 'have'} a {'higher' if rises else 'lower'} {measure.title} ({sizes}{unit})"


def _article(title: str) -> str:
    return "an" if title[:1].lower() in "aeio" or title == "F1" else "a"


def quality_sentence(row: Row, baseline: str, measure: Measure) -> str:
    difference = row.difference
    if difference is None or difference.interval is None:
        reason = difference.reason if difference else "nothing to compare with"
        seeds = f" ({_seeds(difference, measure)})" if difference and difference.by_seed else ""
        return f"{row.label} against {baseline}: {measure.title} inconclusive{seeds}: {reason}."
    found, unit = difference.interval, f" {measure.difference_unit}" if measure.difference_unit else ""
    evidence = _evidence(difference, measure)
    if difference.paired and difference.models_only:
        differ = "differ" if difference.paired.significant else "do not differ significantly"
        return (
            f"{row.label} against {baseline}: {measure.title} inconclusive for the methods, because "
            f"{difference.reason}; these models {differ}: {measure.change(found.value)}{unit}, {evidence}."
        )
    if not difference.significant:
        return (
            f"{row.label} against {baseline}: {measure.title} inconclusive: "
            f"difference {measure.change(found.value)}{unit}, {evidence}."
        )
    size = f"{measure.change(abs(found.value)).lstrip('+')}{unit}"
    if measure.name == "accuracy":
        return f"{row.label} is {size} {'more' if found.value > 0 else 'less'} accurate than {baseline} ({evidence})."
    word = "higher" if found.value > 0 else "lower"
    told = f"{_article(measure.title)} {measure.title} {size} {word}"
    return f"{row.label} has {told} than {baseline} ({evidence})."


def _evidence(difference: QualityDifference, measure: Measure) -> str:
    """`95 % interval [+2.1, +5.3], p = 0.012; seeds +3.6, +3.8 points`"""
    parts = []
    if difference.interval and difference.interval.bounded:
        parts.append(f"95 % interval {measure.change_interval(difference.interval)}")
    if difference.paired:
        test = "exact McNemar " if difference.models_only else ""
        parts.append(f"{test}{p_value(difference.paired.p_value)}")
        if not difference.significant and (difference.needed or 0) > difference.paired.runs:
            parts.append(f"would need at least {difference.needed} seeds")
    elif not difference.significant:
        if difference.reason:
            parts.append(difference.reason)
        elif difference.needed:
            parts.append(f"would need about {difference.needed} seeds")
    many = len(difference.by_seed) > 1
    seeds = f"; {_seeds(difference, measure)}{_discord(difference)}" if many else ""
    return ", ".join(parts) + seeds


def _discord(difference: QualityDifference) -> str:
    """Signs that differ say that nothing is known yet; no difference at all says a lot."""
    if difference.seeds_agree:
        return ""
    return " disagree in sign" if any(difference.by_seed) else ", the same in every one"


def _seeds(difference: QualityDifference, measure: Measure) -> str:
    values = ", ".join(measure.change(value) for value in difference.by_seed)
    return f"seeds {values}{' points' if measure.percent else ''}"


def _mean(difference: QualityDifference | None) -> float:
    return difference.interval.value if difference and difference.interval else 0.0
