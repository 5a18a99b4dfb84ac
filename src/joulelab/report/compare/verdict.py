"""A comparison in sentences: what is significant, and what is inconclusive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from joulelab.meter.figures import EnergyFigure, amount_text, estimate_note
from joulelab.meter.health import most_contended
from joulelab.report.compare.break_even_report import RowBreakEven, break_even_rows, times_text
from joulelab.report.compare.comparison import VARIANT, Comparison, EnergyRatio, QualityDifference, Row
from joulelab.report.compare.differences import SINGLE
from joulelab.report.compare.pareto import reading_sentences
from joulelab.report.compare.quality import Measure
from joulelab.report.energy_sums import Part, known_sum
from joulelab.report.tables.grid import Grid, make_grid
from joulelab.report.wording import INCONCLUSIVE, NOTHING, inconclusive, listed, p_value, ratio
from joulelab.runs.record import RunRecord
from joulelab.stats import BreakEven
from joulelab.units import energy_text, plural, three_digits

# Sentences on quality: significant differences with the evidence, others with the reason why they are inconclusive.


def quality_clause(methods: Sequence[Row], measure: Measure) -> str:
    """`response KD is more accurate (+3.7 points)`, for the headline; better ones before worse ones."""
    lacking = [row for row in methods if row.quality is None]
    if lacking:
        having = [row for row in methods if row.quality is not None]
        verb = "has" if len(lacking) == 1 else "have"
        without = f"{listed([row.label for row in lacking])} {verb} no comparable {measure.title}"
        return ", and ".join([*([quality_clause(having, measure)] if having else []), without])
    others = [row for row in methods if not row.same_data]
    if others:
        same = [row for row in methods if row.same_data]
        known = [quality_clause(same, measure)] if same else []
        return ", and ".join([*known, *_other_data_clauses(others, measure)])
    significant = [row for row in methods if row.difference and row.difference.significant]
    better = [row for row in significant if measure.sign * _mean(row.difference) > 0]
    worse = [row for row in significant if row not in better]
    if not significant:
        why = _single_runs(methods)
        if measure.name == "accuracy":
            return f"no method is significantly more or less accurate{why}"
        words = "lower or higher" if measure.lower_is_better else "higher or lower"
        return f"no method has a significantly {words} {measure.title}{why}"
    first, *rest = [rows for rows in (better, worse) if rows]
    clauses = [_difference_clause(first, measure, measure.title)]
    return ", and ".join(clauses + [_difference_clause(rows, measure, "one") for rows in rest])


def _other_data_clauses(rows: Sequence[Row], measure: Measure) -> list[str]:
    """`the held-out loss of KD cannot be compared, because the runs were evaluated on different data (...)`"""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row.difference.reason if row.difference else "", []).append(row.label)
    return [
        f"the {measure.title} of {listed(names)} cannot be compared, because {reason}"
        for reason, names in by_reason.items()
    ]


def _difference_clause(rows: Sequence[Row], measure: Measure, title: str) -> str:
    sizes = listed([measure.change(_mean(row.difference)) for row in rows])
    unit = f" {measure.difference_unit}" if measure.difference_unit else ""
    names, one = listed([row.label for row in rows]), len(rows) == 1
    rises = _mean(rows[0].difference) > 0
    if measure.name == "accuracy":
        return f"{names} {'is' if one else 'are'} {'more' if rises else 'less'} accurate ({sizes}{unit})"
    return f"{names} {'has' if one else 'have'} a {'higher' if rises else 'lower'} {title} ({sizes}{unit})"


def _single_runs(methods: Sequence[Row]) -> str:
    """Why even a large difference is not significant: one side or both have one run."""
    single = [row for row in methods if row.difference and row.difference.reason in SINGLE]
    if not single:
        return ""
    which = "" if len(single) == len(methods) else f" for {listed([row.label for row in single])}"
    return f" (at least one side{which} has a single run, which cannot show a difference between methods; add seeds)"


def _article(title: str) -> str:
    return "an" if title[:1].lower() in "aeio" or title == "F1" else "a"


def quality_sentence(row: Row, baseline: str, measure: Measure) -> str:
    difference = row.difference
    if difference is None or difference.interval is None:
        reason = difference.reason if difference else "nothing to compare with"
        if row.quality is None or (difference and not difference.comparable):
            return f"{row.label} against {baseline}: the {measure.title} cannot be compared, because {reason}."
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
    return f"{row.label} has {_article(measure.title)} {measure.title} {size} {word} than {baseline} ({evidence})."


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
    """Whether the seeds disagree in sign, or all have no difference."""
    if difference.seeds_agree:
        return ""
    return " disagree in sign" if any(difference.by_seed) else ", all equal"


def _seeds(difference: QualityDifference, measure: Measure) -> str:
    values = ", ".join(measure.change(value) for value in difference.by_seed)
    return f"seeds {values}{' points' if measure.percent else ''}"


def _mean(difference: QualityDifference | None) -> float:
    return difference.interval.value if difference and difference.interval else 0.0


# Evaluating the teacher costs energy, which is part of every bill, but no student is trained on it and another student
# does not need it again: break-even leaves it out.
_EVALUATION_NOT_COUNTED = "Teacher evaluation is not counted: no student is trained on it."


def teacher_evaluation_note(rows: Sequence[Row]) -> str:
    """For a break-even table, with a leading space; empty if no bill contains a teacher evaluation."""
    return f" {_EVALUATION_NOT_COUNTED}" if any(_teacher_evaluations(row) for row in rows) else ""


def teacher_evaluation_sentences(comparison: Comparison) -> list[str]:
    """Which rows other than the teacher's contain teacher evaluation, and how much."""
    rows = [row for row in comparison.rows if row.role != "teacher" and _teacher_evaluations(row)]
    if not rows:
        return []
    means = [_mean_figure([part.figure for part in _teacher_evaluations(row)], len(row.runs)) for row in rows]
    ends = dict.fromkeys(amount_text(end(means, key=lambda figure: figure.energy_j or 0.0)) for end in (min, max))
    names = listed([row.label for row in rows])
    return [
        f"Teacher evaluation ({' to '.join(ends)}) is included in the energy of {names} and left out of break-even "
        "counts."
    ]


def _teacher_evaluations(row: Row) -> list[Part]:
    parts = [part for run in row.runs for part in run.parts]
    return [part for part in parts if part.is_teacher_evaluation and part.figure.energy_j is not None]


def _mean_figure(figures: Sequence[EnergyFigure], runs: int) -> EnergyFigure:
    """Mean of what is often one measurement that all runs share: its error does not average out."""
    summed = known_sum(figures)
    half_width_j = sum(figure.half_width_j or 0.0 for figure in figures)
    return summed.with_interval(summed.energy_j or 0.0, half_width_j).scaled(1 / runs)


# A number of students or items with an interval wider than this factor carries no information.
_WIDEST = 100.0


def count_interval(found: BreakEven, each: str) -> str:
    if math.isinf(found.low):
        return NOTHING
    if found.low == 0 and math.isinf(found.high):
        return "not bounded"
    if found.count and found.high > _WIDEST * found.low:
        return INCONCLUSIVE
    high = "no upper bound" if math.isinf(found.high) else times_text(found.high, each)
    return f"{times_text(found.low, each)} to {high}"


def break_even_sentence(one: RowBreakEven) -> str:
    goal = _goal(one)
    if one.found is None:
        return f"{goal}: break-even cannot be computed: {one.reason}."
    if one.found.count == 0:
        return f"{goal} breaks even immediately: {one.found.reason}."
    if one.found.breaks_even:
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
        return f"The teacher of {one.label}, which used less energy than that of {one.against},"
    return f"The additional energy of the teacher of {one.label} over that of {one.against}"


def _quality(one: RowBreakEven) -> str:
    """The quality at which students are compared; for items, the stages in which the saving was measured."""
    remark = one.quality or one.measured_in
    return f" ({remark})" if remark else ""


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
    remarks = dict.fromkeys(text for one in found if (text := "; ".join(filter(None, [one.measured_in, one.reason]))))
    beyond = f" beyond that of {comparison.baseline}'s" if any(one.beyond for one in found) else ""
    note = (
        f"Students: the teacher's energy{beyond} divided by what it saves on the student stages ({_at_equal(found)}). "
        "Tokens or samples: the energy of making the student, its teacher excluded, divided by what it saves per item "
        "in use. Interval: Fieller's, 95 %; if the saving is not significantly above 0, it has no upper bound and the "
        "result is `does not break even`."
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


# Words of the warning in the record of a run whose classifier is at chance level.
_CHANCE = " is at chance level"
# Word of the meter's note on an estimate, which states model and uncertainty.
_ESTIMATE_MARK = "ESTIMATED"
TRAINING_LOSS = (
    "A training loss is each method's own objective on its training data: if the objectives differ, lower is not "
    "better, and the loss does not measure the quality of a model. Compare a held-out metric."
)


@dataclass(frozen=True)
class Verdict:
    headline: str
    sentences: tuple[str, ...]
    provenance: tuple[str, ...]
    """How estimated energies were obtained; empty if all were measured."""


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


def short_verdict(comparison: Comparison, warning: str = "") -> tuple[str, ...]:
    """At most three sentences: the headline, the strongest reason to doubt it, and what follows from it.

    `warning`: a reason that the comparison does not know, as of different hardware.
    """
    doubts = [warning, _brief_doubt(comparison)]
    found = break_even_rows(comparison)
    breaks_even = [break_even_sentence(one) for one in found if one.found and one.found.breaks_even]
    readings = [*breaks_even, *reading_sentences(comparison)]
    chosen = [next((text for text in texts if text), "") for texts in (doubts, readings)]
    return (headline(comparison), *(text for text in chosen if text))


def _brief_doubt(comparison: Comparison) -> str:
    if contention_sentences(comparison):
        return "CPU contention: timings and CPU estimates are unreliable; rerun on an idle machine."
    if comparison.incomplete:
        return f"Not in the comparison because incomplete: {plural(len(comparison.incomplete), 'run')}."
    return estimate_note(row.with_teacher for row in comparison.rows)


def headline(comparison: Comparison) -> str:
    methods = comparison.methods
    baseline = comparison.row(comparison.baseline)
    if baseline is None:
        return f"No comparison: the baseline {comparison.baseline} has no finished run."
    if not methods:
        return f"No comparison: {comparison.baseline} is the only method with finished runs; a comparison needs two."
    if comparison.measure is None:
        return f"Compared with {comparison.baseline}, {_cost_clause(methods)}."
    clause = quality_clause(methods, comparison.measure)
    if baseline.quality is None:
        clause = f"which has no comparable {comparison.measure.title}, quality cannot be compared"
    return f"Compared with {comparison.baseline}, {clause}; {_cost_clause(methods)}."


def _cost_clause(methods: Sequence[Row]) -> str:
    ratios = [row.full_ratio.ratio for row in methods if row.full_ratio and row.full_ratio.significant]
    values = sorted(interval.value for interval in ratios if interval)
    teacher = any(row.teacher_share for row in methods)
    if not any(one and one.ratio for row in methods for one in (row.student_ratio, row.full_ratio)):
        reasons = {row.full_ratio.reason for row in methods if row.full_ratio and row.full_ratio.reason}
        return "there is no energy ratio" + (f": {reasons.pop()}" if len(reasons) == 1 else "")
    if len(values) < len(methods):
        with_teacher = ", teacher included," if teacher else ""
        which = "" if len(methods) == 1 else " for some methods" if values else " for all methods"
        return f"the energy ratio{with_teacher} is inconclusive{which}"
    span = " to ".join(dict.fromkeys(f"{three_digits(value)}x" for value in (values[0], values[-1])))
    subject = "including the teacher, " if teacher else ""
    return f"{subject}{'it uses' if len(methods) == 1 else 'the methods use'} {span} the energy"


def energy_sentence(row: Row, baseline: str) -> str:
    found = [one for one in (row.student_ratio, row.full_ratio) if one]
    if not any(one.ratio for one in found):
        why = found[0].reason if found else "no baseline"
        return f"Energy of {row.label} cannot be compared with that of {baseline}: {why}."
    if row.student_ratio == row.full_ratio:
        only = row.full_ratio
        assert only is not None and only.ratio is not None
        doubt = "" if only.significant else f": {_doubt(only)}"
        return f"{row.label} uses {ratio(only.ratio)} the energy of {baseline}{doubt}."
    share = f"; the teacher is {row.teacher_share_text} of that" if row.teacher_share else ""
    return (
        f"{row.label} uses {_multiple(row.student_ratio)} the energy of {baseline} without the teacher's work "
        f"and {_multiple(row.full_ratio)} with it{share}."
    )


def _multiple(found: EnergyRatio | None) -> str:
    if found is None or found.ratio is None:
        return f"an unknown multiple of ({found.reason if found else 'no baseline'})"
    return ratio(found.ratio) if found.significant else f"{ratio(found.ratio)}, {_doubt(found)},"


def _doubt(found: EnergyRatio) -> str:
    return f"inconclusive ({found.reason})" if found.contended else inconclusive(found.seeds, found.needed)


def _caveats(comparison: Comparison) -> list[str]:
    texts = []
    if comparison.incomplete:
        names = listed([f"{run.label} seed {run.seed} ({run.why})" for run in comparison.incomplete])
        texts.append(f"Not in the comparison because incomplete: {names}.")
    if comparison.measure and comparison.measure.of_training:
        texts.append(TRAINING_LOSS)
    numbered = [row.label for row in comparison.rows if VARIANT in row.label]
    if numbered:
        texts.append(f"{listed(numbered)} differ in several settings, listed in `compare -v` and `report`.")
    texts += [*chance_sentences(comparison), *contention_sentences(comparison)]
    unmetered = list(dict.fromkeys(name for row in comparison.rows for name in row.unmetered))
    if unmetered:
        texts.append(f"Lower bounds are marked ≥; not metered: {listed(unmetered)}.")
    unknown = list(dict.fromkeys(name for row in comparison.rows for name in row.unknown if name not in unmetered))
    if unknown:
        texts.append(f"Not included (energy unknown): {listed(unknown)}.")
    texts += teacher_evaluation_sentences(comparison)
    live = [row.label for row in comparison.rows if row.teacher_share and row.role != "teacher" and _teaches_live(row)]
    if live:
        texts.append(
            f"The teacher of {listed(live)} computes during the student's training: energy without the teacher "
            "includes these passes, which cannot be separated, and the teacher's share does not."
        )
    other_sensors = [row.label for row in comparison.methods if row.full_ratio and not row.full_ratio.same_devices]
    if other_sensors:
        texts.append(
            f"Measured with sensors other than those of {comparison.baseline}: {listed(other_sensors)}. The "
            "intervals of their ratios include the gain errors of both."
        )
    return texts


def _teaches_live(row: Row) -> bool:
    """Whether a teacher computes inside the stages of the student's training."""
    specs = [run.record.spec for run in row.runs]
    return any(
        spec.get("pipeline") in ("distilbert", "squad") or (spec.get("distill") or {}).get("teacher") == "live"
        for spec in specs
    )


def chance_sentences(comparison: Comparison) -> list[str]:
    """Rows with a model that is not significantly better than always predicting the most frequent class."""
    found: dict[str, list[str]] = {}
    for row in comparison.rows:
        models: dict[str, list[str]] = {}
        for run in row.runs:
            for note in run.record.validity.notes:
                who, mark, rest = note.text.partition(_CHANCE)
                if mark:
                    metric = rest.partition(":")[0]
                    models.setdefault(metric, []).append(f"{who.removeprefix('the ')}, seed {run.seed}")
        for metric, names in models.items():
            is_all = len(names) == len(row.runs) > 1
            found.setdefault(metric, []).append(row.label if is_all else f"{row.label} ({', '.join(names)})")
    return [
        f"At chance level{metric} (not significantly better than always predicting the most frequent class): "
        f"{'all methods' if labels == [row.label for row in comparison.rows] else '; '.join(labels)}."
        for metric, labels in found.items()
    ]


def contention_sentences(comparison: Comparison) -> list[str]:
    """Stages that ran under CPU contention."""
    texts = []
    for row in comparison.rows:
        stages = [stage for run in row.runs for stage in run.record.stages if not stage.outside_totals]
        contended = [stage for stage in stages if stage.core_use and stage.core_use.contended]
        worst = most_contended([stage.core_use for stage in contended])
        if worst is not None:
            names = ", ".join(dict.fromkeys(stage.name for stage in contended))
            texts.append(f"{row.label} ({names}: up to {worst.others_cores:.2g} of {worst.cores} cores)")
    if not texts:
        return []
    return [
        f"CPU contention: other processes used the cores during {listed(texts)}. Timings and CPU estimates are "
        "unreliable; rerun on an idle machine."
    ]


def provenance(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """If tables show estimates: the meter's notes on model and uncertainty, each once."""
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
    return f"energy is {_ESTIMATE_MARK}, not measured{scale}"
