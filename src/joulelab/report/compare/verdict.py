"""A comparison in sentences: what is significant, and what is inconclusive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from joulelab.meter.figures import EnergyFigure, amount_text, estimate_note
from joulelab.meter.health import most_contended
from joulelab.report.compare.break_even_report import RowBreakEven, break_even_rows, times_text
from joulelab.report.compare.comparison import Comparison, EnergyRatio, QualityDifference, Row
from joulelab.report.compare.pareto import reading_sentences
from joulelab.report.compare.quality import Measure
from joulelab.report.energy_sums import Part, known_sum
from joulelab.report.tables.grid import Grid, make_grid
from joulelab.report.wording import INCONCLUSIVE, NOTHING, inconclusive, listed, p_value, ratio
from joulelab.runs.record import RunRecord
from joulelab.stats import BreakEven
from joulelab.units import energy_text, three_digits

# Quality differences in words: significant with the evidence, or inconclusive with the reason.


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


# The teacher's exam: how good it is was asked for the comparison's sake, and teaches nobody.
#
# It is in the bills, because somebody spent it, and in no break-even, because the next student does not ask again.


_NOT_PAID_BACK = "The teacher's exam is not counted: it tells how good the teacher is, and helps no student."


def teacher_evaluation_note(rows: Sequence[Row]) -> str:
    """For a table of paybacks, with a space before it; empty where no bill has an exam in it."""
    return f" {_NOT_PAID_BACK}" if any(_teacher_evaluations(row) for row in rows) else ""


def teacher_evaluation_sentences(comparison: Comparison) -> list[str]:
    """In whose bills it is, and how much of them; the teacher's own row is about the teacher."""
    rows = [row for row in comparison.rows if row.role != "teacher" and _teacher_evaluations(row)]
    if not rows:
        return []
    means = [_mean_figure([part.figure for part in _teacher_evaluations(row)], len(row.runs)) for row in rows]
    ends = dict.fromkeys(amount_text(end(means, key=lambda figure: figure.energy_j or 0.0)) for end in (min, max))
    whose = f"{'bill' if len(rows) == 1 else 'bills'} of {listed([row.label for row in rows])}"
    return [
        f"The teacher's exam ({' to '.join(ends)}) is in the {whose}: it was asked for the comparison's sake, and is "
        "in no break-even count."
    ]


def _teacher_evaluations(row: Row) -> list[Part]:
    parts = [part for run in row.runs for part in run.parts]
    return [part for part in parts if part.is_teacher_evaluation and part.figure.energy_j is not None]


def _mean_figure(figures: Sequence[EnergyFigure], runs: int) -> EnergyFigure:
    """Of what is often one measurement that all runs share: its error does not average out."""
    summed = known_sum(figures)
    half_width_j = sum(figure.half_width_j or 0.0 for figure in figures)
    return summed.with_interval(summed.energy_j or 0.0, half_width_j).scaled(1 / runs)


# Break-even in words: a sentence for the verdict, and a table.


# A number of students or items with an interval wider than this factor carries no information.
_WIDEST = 100.0


def count_interval(found: BreakEven, each: str) -> str:
    if math.isinf(found.low):
        return NOTHING
    if found.low == 0 and math.isinf(found.high):
        return "not bounded"
    if found.count and found.high > _WIDEST * found.low:
        return INCONCLUSIVE
    high = "no upper end" if math.isinf(found.high) else times_text(found.high, each)
    return f"{times_text(found.low, each)} to {high}"


def break_even_sentence(one: RowBreakEven) -> str:
    goal = _goal(one)
    if one.found is None:
        return f"{goal}: break-even cannot be computed: {one.reason}."
    if one.found.count == 0:
        return f"{goal} breaks even at once: {one.found.reason}."
    if one.found.pays_back:
        return f"{goal} breaks even after {one.answer} [{count_interval(one.found, one.each)}]{_quality(one)}."
    if math.isinf(one.found.saved.standard_error) and min(one.found.saved.value, one.found.spent.value) > 0:
        by_these = times_text(one.found.spent.value / one.found.saved.value, one.each)
        reason = f"{one.found.reason}; the point estimate is {by_these} {one.each}s"
        return f"{goal} does not break even as far as these runs show: {reason}{_quality(one)}."
    open_end = one.found.low if math.isfinite(one.found.low) and one.found.low > 1 else None
    could = ""
    if open_end:
        could = f"; the data allow break-even after {times_text(open_end, one.each)} {one.each}s or more"
    return f"{goal} does not break even: {one.found.reason}{could}{_quality(one)}."


def _goal(one: RowBreakEven) -> str:
    if one.each != "student":
        return f"{one.label} in place of {one.against}"
    if not one.beyond:
        return f"The teacher of {one.label}"
    if one.found is not None and one.found.spent.value < 0:
        return f"The teacher of {one.label}, which took less than that of {one.against},"
    return f"What the teacher of {one.label} took beyond that of {one.against}"


def _quality(one: RowBreakEven) -> str:
    """At which quality; or, for items, where what is saved on each was measured."""
    beside = one.quality or one.reason.split(";")[0]
    return f" ({beside})" if beside else ""


def break_even_grid(comparison: Comparison) -> Grid | None:
    found = break_even_rows(comparison)
    if not found:
        return None
    rows = [
        (
            one.label,
            one.against,
            energy_text(one.found.spent.value) if one.found else NOTHING,
            energy_text(one.found.saved.value) if one.found else NOTHING,
            one.answer,
            count_interval(one.found, one.each) if one.found else NOTHING,
        )
        for one in found
    ]
    remarks = dict.fromkeys(one.reason for one in found if one.reason)
    beyond = f" beyond that of {comparison.baseline}'s" if any(one.beyond for one in found) else ""
    note = (
        f"Students: the teacher's energy{beyond} over what its help saves on the student stages ({_at_equal(found)}). "
        "Tokens or samples: the energy of making the student beyond its teacher over what it saves per item in use. "
        "Interval: Fieller's, 95 %; where the saving is not significantly above 0 it has no upper end, and the result "
        "is that it does not break even."
        + teacher_evaluation_note([row for row in comparison.rows if row.role != "teacher"])
        + "".join(f" {remark[:1].upper()}{remark[1:]}." for remark in remarks)
    )
    if doubt := estimate_note(row.with_teacher for row in comparison.rows):
        note += f" {doubt}"
    return make_grid("Break-even", "Method|Against|Spent\nonce>|Saved by\neach>|Breaks even after|95 %!", rows, note)


def _at_equal(found: Sequence[RowBreakEven]) -> str:
    if any(one.costs and one.costs.loss is not None for one in found):
        return "up to equal held-out loss"
    return "students that are significantly worse do not break even"


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
            *(break_even_sentence(one) for one in break_even_rows(comparison) if one.found),
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
    texts += teacher_evaluation_sentences(comparison)
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
