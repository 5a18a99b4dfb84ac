"""Break-even of a teacher: after how many students, and after how many items that a student serves in its place.

Students: the teacher's energy over what its help saves on the student stages, at equal quality. Items: the energy of
making the student beyond its teacher over what it uses less than the teacher per token or sample, as measured where
both were used. Table, figure, caption, verdict and JSON all read `paybacks`.

Students are hardly ever equally good after equal tokens. Where held-out loss was evaluated during training, the better
student is charged up to where it was as good as the worse one at its end. Otherwise both are charged in full, and a
student that is significantly worse does not break even, because it never reaches the baseline's quality.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from joulelab.meter.figures import EnergyFigure
from joulelab.meter.trace import read_lines
from joulelab.report.compare.comparison import ComparedRun, Comparison, Row
from joulelab.report.compare.differences import CROWDED, pairs_of
from joulelab.report.compare.method_rows import only_infers
from joulelab.report.energy_sums import NOT_METERED, Part, mixes_methods
from joulelab.report.tables.inference_rows import timed_rows
from joulelab.report.wording import listed
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord, StageRecord
from joulelab.stats import BreakEven, Estimate, break_even
from joulelab.units import count_text

# What a model costs when it is used: the stages in which a finished model ran on data, one item at a time or many.


_USES = ("evaluate", "infer", "generate", "serve")
_ITEMS: tuple[tuple[Literal["token", "sample"], str], ...] = (("token", "tokens_per_s"), ("sample", "samples_per_s"))


@dataclass(frozen=True)
class ServingCost:
    """One run's model at work; per token where tokens were counted, else per sample."""

    run: ComparedRun
    stage: StageRecord
    item: str
    energy: EnergyFigure
    """Of one item."""
    s_per_item: float

    @property
    def j_per_item(self) -> float:
        return self.energy.energy_j or 0.0


def serving_costs(run: ComparedRun) -> ServingCost | None:
    """The stage in which the run's own model worked: a student's before a teacher's."""
    work = [stage for stage in run.record.stages if stage.is_method_work]
    used = [stage for stage in work if stage.role == "inference" or stage.activity in _USES]
    used.sort(key=lambda stage: stage.role == "teacher")
    timed = timed_rows(run.record)
    for stage in used:
        row = timed.get(stage.name)
        if row is not None and row.energy is not None:
            tokens = row.values.get("new_tokens", 1)
            item = "token" if "new_tokens" in row.values else "sample"
            return ServingCost(run, stage, item, row.energy.gross(tokens), 1 / (tokens * row.items_per_s))
        for item, per_s in _ITEMS:
            each, rate = stage.energy_per(item), getattr(stage, per_s)
            if each is not None and each.energy_j is not None and rate:
                return ServingCost(run, stage, item, each, 1 / rate)
    return None


# How a language student's held-out loss fell while it took its joules.


TRAIN = "student.train"
# The looks at the SFT student too: where another run paid for it, they stand on its bill under one figure.
_BEFORE = ("student.sft", "student.sft-validate", "student.reference")


@dataclass(frozen=True)
class LossCurve:
    """One student's way: looks at held-out loss by the share of its last training that was done."""

    shares: tuple[float, ...]
    losses: tuple[float, ...]
    before_j: float
    train_j: float

    @classmethod
    def of(cls, run: ComparedRun) -> LossCurve | None:
        stage, steps = run.record.stage(TRAIN), run.record.results.get(f"{TRAIN}.steps")
        if stage is None or stage.best.energy_j is None or steps is None:
            return None
        looks = {
            int(line["step"]): float(line["held_out_loss"])
            for line in read_lines(RunPaths(run.folder).metrics)
            if "held_out_loss" in line and line.get("stage") == "student.validate"
        }
        if not looks:
            return None
        order = sorted(looks)
        before_j = sum(part.figure.energy_j or 0.0 for part in run.parts if is_before(part))
        return cls(
            tuple(step / steps.value for step in order), tuple(looks[step] for step in order), before_j,
            stage.best.energy_j,
        )  # fmt: skip

    @property
    def final(self) -> float:
        return self.losses[-1]

    @property
    def whole_j(self) -> float:
        return self.before_j + self.train_j

    @property
    def first_look_j(self) -> float:
        return self.before_j + self.shares[0] * self.train_j

    def charged_to(self, loss: float) -> float | None:
        """One that ends worse than at its first look, as students of preferences do, is charged for all of it: its end
        is what was made."""
        found = self.joules_to(loss)
        return self.whole_j if found is None and loss == self.final else found

    def joules_to(self, loss: float) -> float | None:
        """To the first look, or point between two, that is as good; None where that was before the first look."""
        if loss > self.losses[0]:
            return None
        lowest = np.minimum.accumulate(self.losses)
        share = float(np.interp(-loss, -lowest, self.shares))
        return self.before_j + share * self.train_j


def is_before(part: Part) -> bool:
    """Work before the last training: the SFT student's (whoever paid for it) and the reference's."""
    return not part.shared and any(stage in _BEFORE for stage in part.stages)


_HELD_OUT_LOSS = "clm_loss"
_TWO_METHODS = "what was spent once is measured and what is saved each time estimated, or the other way round"


@dataclass(frozen=True)
class StudentCosts:
    """Energy of the student stages up to a quality that both sides reached: one value per pair, or per run."""

    base_j: tuple[float, ...]
    own_j: tuple[float, ...]
    paired: bool
    quality: str
    """What is known about the quality at which they are compared, in words."""
    loss: float | None = None
    """The held-out loss that both reached, mean over the pairs; None where both are charged in full."""
    base_at_most: bool = False
    """The baseline was as good at its first evaluation already: `base_j` is an upper bound."""
    never: str = ""
    """Why no number of students breaks even, whatever the energy saved."""

    @property
    def reach_equal_quality(self) -> bool:
        return self.base_at_most or not self.never

    @property
    def saved(self) -> Estimate:
        if self.paired:
            return Estimate.of_repeats([base - own for base, own in zip(self.base_j, self.own_j, strict=True)])
        return Estimate.of_repeats(self.base_j) - Estimate.of_repeats(self.own_j)


@dataclass(frozen=True)
class RowBreakEven:
    """One method's answer; `found` is None where there is nothing to compute it from, and `reason` says what."""

    label: str
    against: str
    """The baseline, or the model that the student replaces."""
    each: str
    """`student`, `token` or `sample`."""
    found: BreakEven | None
    reason: str = ""
    quality: str = ""
    beyond: bool = False
    """The baseline had a teacher too: only what this one's took more has to come back."""
    costs: StudentCosts | None = None

    @property
    def answer(self) -> str:
        if self.found is None:
            return "unknown"
        if not self.found.pays_back:
            return "does not break even"
        return "at once" if not self.found.count else f"{times_text(self.found.count, self.each)} {self.each}s"


def break_even_rows(comparison: Comparison) -> tuple[RowBreakEven, ...]:
    """For every method that had a teacher."""
    taught = taught_rows(comparison)
    baseline = comparison.row(comparison.baseline)
    found = [_by_students(row, baseline, comparison) for row in taught]
    teacher = next((row for row in comparison.rows if row.role == "teacher"), None)
    if teacher is not None:
        found += [_by_items(row, teacher, comparison) for row in taught]
    return tuple(found)


def taught_rows(comparison: Comparison) -> list[Row]:
    """Methods that trained a student with a teacher's help; a run that only uses a model has its ancestors too."""
    trained = [row for row in comparison.methods if any(not part.inherited for part in student_parts(row.runs[0]))]
    return [row for row in trained if was_taught(row) or row.unmetered]


def was_taught(row: Row) -> bool:
    """A teacher that was only examined beside it has helped nobody."""
    return bool(row.teacher_share) and any(teacher_parts(run) for run in row.runs)


def student_parts(run: ComparedRun) -> list[Part]:
    """Also what another run paid for: a student that goes on from an earlier one took that one's training too."""
    return [part for part in run.parts if part.is_students]


def teacher_parts(run: ComparedRun) -> list[Part]:
    """What the teacher did for its students; how good it is was asked for the comparison's sake."""
    return [part for part in run.parts if part.shared and not part.is_teacher_evaluation]


def _by_students(row: Row, baseline: Row | None, comparison: Comparison) -> RowBreakEven:
    costs = student_costs(row, baseline, comparison)
    beyond = baseline is not None and was_taught(baseline)
    if baseline is None or isinstance(costs, str):
        return RowBreakEven(row.label, comparison.baseline, "student", None, str(costs), "", beyond)
    spent, saved = teacher_beyond(row, baseline), costs.saved
    if costs.never:
        found = BreakEven(spent, saved, None, math.inf, math.inf, costs.never)
    else:
        found = break_even(spent, saved, "a student")
    return RowBreakEven(row.label, comparison.baseline, "student", found, "", costs.quality, beyond, costs)


def student_costs(row: Row, baseline: Row | None, comparison: Comparison) -> StudentCosts | str:
    """What students of both sides use up to equal quality; or the reason why that is unknown."""
    if baseline is None:
        return "the baseline has no finished run"
    if row.unmetered or baseline.unmetered:
        return NOT_METERED
    at_equal_loss = _has_courses(row, baseline, comparison)
    parts = _training_parts if at_equal_loss else student_parts
    figures = [part.figure for run in (*row.runs, *baseline.runs) for part in parts(run)]
    if mixes_methods(figures):
        return "one side is measured and the other estimated"
    figures += [part.figure for run in (*row.runs, *baseline.runs) for part in teacher_parts(run)]
    if mixes_methods(figures):
        return _TWO_METHODS
    if any(figure.crowded for figure in figures):
        return CROWDED
    if at_equal_loss:
        return _costs_to_equal_loss(row, baseline)
    return _costs_in_full(row, baseline, comparison)


def _costs_in_full(row: Row, baseline: Row, comparison: Comparison) -> StudentCosts | str:
    quality, worse = _quality_words(row, comparison)
    pairs = pairs_of(row.runs, baseline.runs)
    theirs, ours = zip(*pairs, strict=True) if pairs else (baseline.runs, row.runs)
    base_j, own_j = (tuple(_sum_j(student_parts(run)) for run in side) for side in (theirs, ours))
    if not all(base_j) or not all(own_j):
        return "energy of the student stages is missing"
    never = "its students are significantly worse than the baseline's" if worse else ""
    return StudentCosts(base_j, own_j, bool(pairs), quality, never=never)


def _training_parts(run: ComparedRun) -> list[Part]:
    return [part for part in run.parts if part.stage == TRAIN or is_before(part)]


def _has_courses(row: Row, baseline: Row, comparison: Comparison) -> bool:
    """Both sides' held-out loss was evaluated during training, and it is what the comparison is about."""
    if comparison.measure is None or comparison.measure.name != _HELD_OUT_LOSS:
        return False
    pairs = pairs_of(row.runs, baseline.runs)
    return bool(pairs) and len(_courses(pairs)) == len(pairs)


def _courses(pairs: Sequence[tuple[ComparedRun, ComparedRun]]) -> list[tuple[LossCurve, LossCurve]]:
    """Baseline and method, of the pairs whose loss was evaluated during training."""
    both = [(LossCurve.of(base), LossCurve.of(own)) for base, own in pairs]
    return [(base, own) for base, own in both if base is not None and own is not None]


def _costs_to_equal_loss(row: Row, baseline: Row) -> StudentCosts | str:
    courses = _courses(pairs_of(row.runs, baseline.runs))
    losses = [max(base.final, own.final) for base, own in courses]
    loss = sum(losses) / len(losses)
    quality = f"at equal held-out loss, {loss:.3f} nats"
    charged = [(base.charged_to(one), own.charged_to(one)) for (base, own), one in zip(courses, losses, strict=True)]
    known = [(base_j, own_j) for base_j, own_j in charged if base_j is not None and own_j is not None]
    if len(known) == len(courses):
        base_j, own_j = zip(*known, strict=True)
        return StudentCosts(base_j, own_j, True, quality, loss)
    # A baseline that was as good at its first evaluation used at most the energy up to there. A student that used more
    # saves nothing, whatever the loss in between was.
    bounds = [(base.first_look_j, own.whole_j) for base, own in courses if own.final > base.losses[0]]
    if len(bounds) == len(courses) and all(own_j > base_j for base_j, own_j in bounds):
        base_j, own_j = zip(*bounds, strict=True)
        never = f"{baseline.label} reached that loss at its first evaluation, with less energy"
        return StudentCosts(base_j, own_j, True, quality, loss, base_at_most=True, never=never)
    return "neither side's evaluations reach the other's held-out loss"


def teacher_beyond(row: Row, baseline: Row) -> Estimate:
    """What the teacher took, less what the baseline's took where that had one: both would be spent again.

    What both had from one teacher was measured once, and its doubt cancels: it stands on neither side.
    """
    if not was_taught(baseline):
        return _once(row.runs, teacher_parts)
    keys = [{part.key for part in teacher_parts(run)} for run in (*row.runs, *baseline.runs)]
    common = set.intersection(*keys) - {None}

    def apart(run: ComparedRun) -> list[Part]:
        return [part for part in teacher_parts(run) if part.key not in common]

    return _once(row.runs, apart) - _once(baseline.runs, apart)


def _sum_j(parts: Sequence[Part]) -> float:
    return sum(part.figure.energy_j or 0.0 for part in parts)


def _once(runs: Sequence[ComparedRun], of: Callable[[ComparedRun], list[Part]]) -> Estimate:
    """Work that all repeats share was measured once: its interval is the sensor's. Otherwise the repeats tell."""
    sums = [_sum_j(of(run)) for run in runs]
    if max(sums) - min(sums) > 1e-9 * max(sums):
        return Estimate.of_repeats(sums)
    half_widths = [part.figure.half_width_j or 0.0 for part in of(runs[0])]
    return Estimate.of_half_width(sums[0], math.hypot(*half_widths))


def _by_items(row: Row, teacher: Row, comparison: Comparison) -> RowBreakEven:
    ours, theirs = _used_alike(row, teacher, comparison)
    each = ours[0].item if ours else "item"
    if not ours:
        return RowBreakEven(
            row.label, teacher.label, each, None, "there is no run in which both models were used alike"
        )
    if mixes_methods(one.energy for one in (*ours, *theirs)):
        return RowBreakEven(row.label, teacher.label, each, None, "one side is measured and the other estimated")
    if row.unmetered:
        return RowBreakEven(row.label, teacher.label, each, None, NOT_METERED)
    figures = [one.energy for one in (*ours, *theirs)]
    figures += [part.figure for run in row.runs for part in _beyond_the_teacher(run)]
    if mixes_methods(figures):
        return RowBreakEven(row.label, teacher.label, each, None, _TWO_METHODS)
    if any(figure.crowded for figure in figures):
        return RowBreakEven(row.label, teacher.label, each, None, CROWDED)
    extra = _once(row.runs, _beyond_the_teacher)
    saved = _per_item(theirs) - _per_item(ours)
    stages = listed(list(dict.fromkeys(one.stage.name for one in (*theirs, *ours))))
    single = "; one run tells no spread, so its interval is the sensor's alone" if 1 in (len(ours), len(theirs)) else ""
    found = break_even(extra, saved, f"a {each}")
    return RowBreakEven(row.label, teacher.label, each, found, f"measured in {stages}{single}")


def _used_alike(row: Row, teacher: Row, comparison: Comparison) -> tuple[list[ServingCost], list[ServingCost]]:
    """Both models at work on the same kind of item: in inference runs where both have some, else in evaluations."""
    for ways in ([_inference_runs(one, comparison) for one in (row, teacher)], [row.runs, teacher.runs]):
        ours, theirs = ([one for run in runs if (one := serving_costs(run))] for runs in ways)
        if ours and theirs and len({_way(one) for one in (*ours, *theirs)}) == 1:
            return ours, theirs
    return [], []


def _way(one: ServingCost) -> tuple[str, str]:
    """An inference's stage is named after batch, length, mode and numbers; evaluations are all of one way."""
    return one.item, one.stage.name if one.stage.role == "inference" else ""


def _inference_runs(row: Row, comparison: Comparison) -> list[ComparedRun]:
    """Of the very models that the row's runs made."""
    ids = {run.record.run_id for run in row.runs}
    others = [run for other in comparison.rows if other is not row for run in other.runs]
    return [run for run in others if only_infers(run.record) and ids & _makers_of_what_it_used(run.record)]


def _makers_of_what_it_used(record: RunRecord) -> set[str]:
    """Of the artefacts it took itself: a student's teacher is among its ancestors, and was not what ran."""
    parents = {parent for ancestor in record.lineage for parent in ancestor.parents}
    return {ancestor.made_by for ancestor in record.lineage if ancestor.key not in parents}


def _beyond_the_teacher(run: ComparedRun) -> list[Part]:
    """What the student took while its teacher existed already: its own stages, and the teacher's work for it."""
    own_or_lent = [part for part in run.parts if not part.inherited or part.shared]
    return [part for part in own_or_lent if not part.makes_the_teacher and not part.is_teacher_evaluation]


def _per_item(found: Sequence[ServingCost]) -> Estimate:
    """Over repeats; a single run has its sensor's interval."""
    if len(found) > 1:
        return Estimate.of_repeats([one.j_per_item for one in found])
    return Estimate.of_half_width(found[0].j_per_item, found[0].energy.half_width_j or 0.0)


def _quality_words(row: Row, comparison: Comparison) -> tuple[str, bool]:
    """At which quality the students are compared, and whether these are significantly worse than the baseline's."""
    difference, measure = row.difference, comparison.measure
    if measure is None or difference is None or difference.interval is None:
        return "quality unknown", False
    if not difference.significant:
        return "no significant difference in quality", False
    better = measure.sign * difference.interval.value > 0
    size = f"{measure.change(difference.interval.value)} {measure.difference_unit}".strip()
    return f"at {'higher' if better else 'lower'} quality, {size}", not better


def times_text(value: float, each: str) -> str:
    if each == "student" and value < 100:
        return f"{value:.1f}" if value >= 1 or not value else f"{value:.2f}"
    return count_text(value)
