"""Sentences that say what the statistics say, and "not resolved" where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from joulelab.meter.figures import EnergyFigure
from joulelab.report.compare import Comparison, EnergyRatio, Row
from joulelab.report.losses import loss_clause, loss_sentence
from joulelab.report.wording import listed, p_value, points, points_interval, ratio
from joulelab.runs.record import RunRecord
from joulelab.units import percent_text, three_digits

# The meter's note on an estimate shouts this word; it is the text that tells model and uncertainty.
_ESTIMATE_MARK = "ESTIMATED"


@dataclass(frozen=True)
class Verdict:
    headline: str
    sentences: tuple[str, ...]
    provenance: tuple[str, ...]
    """How the joules were obtained, where that is less than a measurement; empty where all were measured."""


def verdict(comparison: Comparison) -> Verdict:
    sentence = loss_sentence if comparison.is_about_loss else accuracy_sentence
    pairs = [
        (sentence(row, comparison.baseline), energy_sentence(row, comparison.baseline)) for row in comparison.methods
    ]
    sentences = [text for pair in pairs for text in pair]
    return Verdict(
        headline=headline(comparison),
        sentences=(*sentences, *_caveats(comparison)),
        provenance=provenance(comparison.records),
    )


def headline(comparison: Comparison) -> str:
    methods = comparison.methods
    if comparison.row(comparison.baseline) is None:
        return f"No comparison: the baseline {comparison.baseline} has no finished run."
    if not methods:
        return f"No comparison: only {comparison.baseline} has finished runs."
    clause = loss_clause if comparison.is_about_loss else _quality_clause
    return f"Against {comparison.baseline}, {clause(methods)}; {_cost_clause(methods)}."


def _quality_clause(methods: Sequence[Row]) -> str:
    better = [row for row in methods if row.difference and row.difference.resolved and _gain_of(row) > 0]
    worse = [row for row in methods if row.difference and row.difference.resolved and _gain_of(row) < 0]
    for rows, word in ((better, "more"), (worse, "less")):
        if rows:
            verb = "is" if len(rows) == 1 else "are"
            gains = listed([points(_gain_of(row)) for row in rows])
            return f"{listed([row.label for row in rows])} {verb} {word} accurate ({gains} points)"
    return "no method is resolvably more or less accurate"


def _gain_of(row: Row) -> float:
    return row.difference.paired.difference.value if row.difference and row.difference.paired else 0.0


def _cost_clause(methods: Sequence[Row]) -> str:
    ratios = [row.full_ratio.ratio for row in methods if row.full_ratio and row.full_ratio.resolved]
    values = sorted(interval.value for interval in ratios if interval)
    if len(values) < len(methods):
        return "what it costs in joules with the teacher included is not resolved for every method"
    span = f"{three_digits(values[0])}x"
    if len(values) > 1:
        span += f" to {three_digits(values[-1])}x"
    return f"with the teacher included {'it costs' if len(methods) == 1 else 'the methods cost'} {span} the joules"


def accuracy_sentence(row: Row, baseline: str) -> str:
    difference = row.difference
    if difference is None or difference.paired is None:
        reason = difference.reason if difference else "nothing to compare with"
        seeds = f" (seeds {_seeds(difference.by_seed)})" if difference and difference.by_seed else ""
        return f"{row.label} against {baseline}: accuracy not resolved{seeds}: {reason}."
    paired = difference.paired
    interval = f"95 % interval {points_interval(paired.difference)}"
    seeds = f"seeds {_seeds(difference.by_seed)}"
    if not difference.resolved:
        return (
            f"{row.label} against {baseline}: accuracy not resolved: "
            f"difference {points(paired.difference.value)} points, {interval}, "
            f"McNemar {p_value(paired.p_value)}; {seeds}{'' if difference.seeds_agree else ' disagree in sign'}."
        )
    word = "more" if paired.difference.value > 0 else "less"
    size = f"{100 * abs(paired.difference.value):.1f}"
    return (
        f"{row.label} is {size} points {word} accurate than {baseline} "
        f"(McNemar {p_value(paired.p_value)}; {interval}; {seeds})."
    )


def _seeds(differences: Sequence[float]) -> str:
    return ", ".join(points(difference) for difference in differences) + " points"


def energy_sentence(row: Row, baseline: str) -> str:
    share = f"; the teacher is {percent_text(row.teacher_share, 0)} of that bill" if row.teacher_share else ""
    return (
        f"{row.label} takes {_multiple(row.own_ratio)} the joules of {baseline} in its own stages "
        f"and {_multiple(row.full_ratio)} with the teacher included{share}."
    )


def _multiple(found: EnergyRatio | None) -> str:
    if found is None or found.ratio is None:
        return f"an unknown multiple of ({found.reason if found else 'no baseline'})"
    if found.resolved:
        return ratio(found.ratio)
    why = "not resolved from 1x" if found.seeds > 1 else "not resolved: one seed tells no spread"
    return f"{ratio(found.ratio)} ({why})"


def _caveats(comparison: Comparison) -> list[str]:
    texts = []
    if comparison.incomplete:
        names = listed([f"{run.label} seed {run.seed} ({run.why})" for run in comparison.incomplete])
        texts.append(f"Not in the comparison because incomplete: {names}.")
    unknown = list(dict.fromkeys(name for row in comparison.rows for name in row.unknown))
    if unknown:
        texts.append(f"In no bill, because nobody measured it here: what {listed(unknown)} took to make.")
    hosts = {attempt.host for record in comparison.records for attempt in record.attempts}
    if len(hosts) > 1:
        texts.append(
            f"The runs ran on {len(hosts)} hosts: scale errors of different sensors do not cancel in the ratios."
        )
    return texts


def provenance(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """Where tables show estimates: the meter's own words on model and uncertainty, each once."""
    estimated = [record for record in records if record.totals and record.totals.best.method == "estimated"]
    notes = [note.text for record in estimated for note in record.validity.notes if _ESTIMATE_MARK in note.text]
    if estimated and not notes:
        notes = [_plain_warning([record.totals.best for record in estimated if record.totals])]
    texts = [text[:1].upper() + text[1:].rstrip(".") + "." for text in dict.fromkeys(notes)]
    if estimated and len(estimated) < len(records):
        texts.append(f"This holds for {len(estimated)} of {len(records)} runs.")
    return tuple(texts)


def _plain_warning(figures: Sequence[EnergyFigure]) -> str:
    worst = max((figure.gain_error_rel or 0.0 for figure in figures), default=0.0)
    scale = f"; the scale may be off by ±{100 * worst:.0f} %" if worst else ""
    return f"joules are {_ESTIMATE_MARK}, not measured{scale}"
