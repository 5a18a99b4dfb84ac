"""A comparison in sentences: what is significant, and what is inconclusive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from joulelab.meter.figures import EnergyFigure
from joulelab.meter.health import most_contended
from joulelab.report.comparison import Comparison, EnergyRatio, Row
from joulelab.report.exam import exam_sentences
from joulelab.report.pareto import reading_sentences
from joulelab.report.payback import paybacks
from joulelab.report.payback_words import payback_sentence
from joulelab.report.quality_words import quality_clause, quality_sentence
from joulelab.report.wording import inconclusive, listed, ratio
from joulelab.runs.record import RunRecord
from joulelab.units import three_digits

# The meter's note on an estimate shouts this word; it is the text that tells model and uncertainty.
_ESTIMATE_MARK = "ESTIMATED"
TRAINING_LOSS = (
    "A training loss is each method's own objective on what it was trained with: where the objectives differ, lower is "
    "not better, and no such loss says how good a model is. Compare a held-out figure."
)


@dataclass(frozen=True)
class Verdict:
    headline: str
    sentences: tuple[str, ...]
    provenance: tuple[str, ...]
    """How the joules were obtained, where that is less than a measurement; empty where all were measured."""


def verdict(comparison: Comparison) -> Verdict:
    sentences: list[str] = []
    for row in comparison.methods:
        if comparison.measure:
            sentences.append(quality_sentence(row, comparison.baseline, comparison.measure))
        sentences.append(energy_sentence(row, comparison.baseline))
    return Verdict(
        headline=headline(comparison),
        sentences=(
            *sentences,
            *reading_sentences(comparison),
            *(payback_sentence(one) for one in paybacks(comparison) if one.found),
            *_caveats(comparison),
        ),
        provenance=provenance(comparison.records),
    )


def headline(comparison: Comparison) -> str:
    methods = comparison.methods
    if comparison.row(comparison.baseline) is None:
        return f"No comparison: the baseline {comparison.baseline} has no finished run."
    if not methods:
        return f"No comparison: only {comparison.baseline} has finished runs."
    if comparison.measure is None:
        return f"Against {comparison.baseline}, {_cost_clause(methods)}."
    clause = quality_clause(methods, comparison.measure)
    return f"Against {comparison.baseline}, {clause}; {_cost_clause(methods)}."


def _cost_clause(methods: Sequence[Row]) -> str:
    ratios = [row.full_ratio.ratio for row in methods if row.full_ratio and row.full_ratio.significant]
    values = sorted(interval.value for interval in ratios if interval)
    teacher = any(row.teacher_share for row in methods)
    if not any(one and one.ratio for row in methods for one in (row.student_ratio, row.full_ratio)):
        return "there are no joules to compare"
    if len(values) < len(methods):
        with_teacher = " with the teacher included" if teacher else ""
        return f"what it costs in joules{with_teacher} is inconclusive for some methods"
    span = " to ".join(dict.fromkeys(f"{three_digits(value)}x" for value in (values[0], values[-1])))
    subject = "with the teacher included " if teacher else ""
    return f"{subject}{'it costs' if len(methods) == 1 else 'the methods cost'} {span} the joules"


def energy_sentence(row: Row, baseline: str) -> str:
    found = [one for one in (row.student_ratio, row.full_ratio) if one]
    if not any(one.ratio for one in found):
        why = found[0].reason if found else "no baseline"
        return f"The joules of {row.label} cannot be set against those of {baseline}: {why}."
    if row.student_ratio == row.full_ratio:
        return f"{row.label} takes {_multiple(row.full_ratio)} the joules of {baseline}."
    share = f"; the teacher is {row.teacher_share_text} of that bill" if row.teacher_share else ""
    return (
        f"{row.label} takes {_multiple(row.student_ratio)} the joules of {baseline} without the teacher's work "
        f"and {_multiple(row.full_ratio)} with it{share}."
    )


def _multiple(found: EnergyRatio | None) -> str:
    if found is None or found.ratio is None:
        return f"an unknown multiple of ({found.reason if found else 'no baseline'})"
    if found.crowded:
        return f"{ratio(found.ratio)}, inconclusive ({found.reason}),"
    return (
        ratio(found.ratio) if found.significant else f"{ratio(found.ratio)}, {inconclusive(found.seeds, found.needed)},"
    )


def _caveats(comparison: Comparison) -> list[str]:
    texts = []
    if comparison.incomplete:
        names = listed([f"{run.label} seed {run.seed} ({run.why})" for run in comparison.incomplete])
        texts.append(f"Not in the comparison because incomplete: {names}.")
    if comparison.measure and comparison.measure.of_training:
        texts.append(TRAINING_LOSS)
    texts += crowd_sentences(comparison)
    unmetered = list(dict.fromkeys(name for row in comparison.rows for name in row.unmetered))
    if unmetered:
        texts.append(f"Lower bounds are marked ≥: no meter of the runs saw {listed(unmetered)}.")
    unknown = list(dict.fromkeys(name for row in comparison.rows for name in row.unknown if name not in unmetered))
    if unknown:
        texts.append(f"In no bill, because nobody measured it here: what {listed(unknown)} took to make.")
    texts += exam_sentences(comparison)
    apart = [row.label for row in comparison.methods if row.full_ratio and not row.full_ratio.same_devices]
    if apart:
        texts.append(
            f"Other sensors than those of {comparison.baseline} measured {listed(apart)}: their scale errors do not "
            "cancel, and are inside the intervals of the ratios."
        )
    return texts


def crowd_sentences(comparison: Comparison) -> list[str]:
    """Whose stages ran while others kept the cores busy: what they took says more about the others than about them."""
    words = []
    for row in comparison.rows:
        stages = [stage for run in row.runs for stage in run.record.stages if not stage.outside_totals]
        crowded = [stage for stage in stages if stage.core_use and stage.core_use.contended]
        worst = most_contended([stage.core_use for stage in crowded])
        if worst is not None:
            names = ", ".join(dict.fromkeys(stage.name for stage in crowded))
            words.append(f"{row.label} ({names}: up to {worst.others_cores:.2g} of {worst.cores})")
    if not words:
        return []
    return [
        f"Others used the CPU cores while these ran: {listed(words)}. Times and CPU estimates of that are not "
        "comparable; run it again while nothing else runs."
    ]


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
    scale = f", ±{100 * worst:.0f} %" if worst else ""
    return f"joules are {_ESTIMATE_MARK}, not measured{scale}"
