"""Break-even of a teacher: the number of students (N*), and of items served by a student in its place (T*).

Students: the teacher's energy over what its help saves on the student stages, at equal quality. Items: the energy of
making the student, its teacher excluded, over what it saves per token or sample, as measured where both were used.
Table, figure, caption, verdict and JSON all read `break_even_rows`.

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

from joulelab.meter.figures import EnergyFigure, total
from joulelab.report.compare.comparison import ComparedRun, Comparison, Row
from joulelab.report.compare.differences import CPU_CONTENTION, pairs_of
from joulelab.report.compare.method_rows import last_training, only_infers
from joulelab.report.energy_sums import NOT_METERED, Part, mixes_methods
from joulelab.report.tables.inference_rows import timed_rows
from joulelab.report.wording import listed
from joulelab.runs.paths import RunPaths, read_metrics
from joulelab.runs.record import RunRecord, StageRecord
from joulelab.stats import BreakEven, Estimate, break_even
from joulelab.units import count_text

# Activities of stages in which a finished model processes data.
_USES = ("evaluate", "infer", "generate", "serve")
_ITEMS: tuple[tuple[Literal["token", "sample"], str], ...] = (("token", "tokens_per_s"), ("sample", "samples_per_s"))


@dataclass(frozen=True)
class ServingCost:
    """Energy and time per item of one run's model; per token if tokens were counted, else per sample."""

    run: ComparedRun
    stage: StageRecord
    item: str
    energy: EnergyFigure
    """Per item."""
    s_per_item: float

    @property
    def j_per_item(self) -> float:
        return self.energy.energy_j or 0.0


def serving_costs(run: ComparedRun) -> ServingCost | None:
    """From the first inference stage; None for a run that only trained and evaluated a model: its evaluation is not
    serving (other batches, padding, and losses or metrics are computed too)."""
    return _item_costs(run, [stage for stage in run.record.stages if stage.role == "inference"])


def costs_in_use(run: ComparedRun) -> ServingCost | None:
    """From the stage in which the run's model was used, evaluations included, a student's before a teacher's: models
    that were evaluated alike can be compared with each other."""
    work = [stage for stage in run.record.stages if stage.is_method_work]
    used = [stage for stage in work if stage.role == "inference" or stage.activity in _USES]
    return _item_costs(run, sorted(used, key=lambda stage: stage.role == "teacher"))


def _item_costs(run: ComparedRun, used: Sequence[StageRecord]) -> ServingCost | None:
    timed = timed_rows(run.record)
    for stage in used:
        row = timed.get(stage.name)
        if row is not None and row.values.get("part", "infer") != "infer":
            continue  # prefill or decode alone; energy per token is that of whole responses
        if row is not None and row.energy is not None:
            tokens = row.values.get("new_tokens", 1)
            item = "token" if "new_tokens" in row.values else "sample"
            return ServingCost(run, stage, item, row.energy.gross(tokens), 1 / (tokens * row.items_per_s))
        for item, per_s in _ITEMS:
            each, rate = stage.energy_per(item), getattr(stage, per_s)
            if each is not None and each.energy_j is not None and rate:
                return ServingCost(run, stage, item, each, 1 / rate)
    return None


# What is done with a student before its last training: earlier trainings, completions and the scores of a reference.
# Validations are included: if an earlier student is inherited, its bill has them in the same figure.
_PREPARES = ("train", "validate", "score", "generate")


@dataclass(frozen=True)
class LossCurve:
    """Held-out loss of one student against the share of its last training that was done."""

    shares: tuple[float, ...]
    losses: tuple[float, ...]
    before_j: float
    train_j: float
    """Validations, completions that the student writes during it and their scores included."""

    @classmethod
    def of(cls, run: ComparedRun) -> LossCurve | None:
        stage, validation = _last_training(run)
        steps = run.record.results.get(f"{stage.name}.steps") if stage else None
        if stage is None or validation is None or stage.best.energy_j is None or steps is None:
            return None
        evaluations = {
            int(line["step"]): float(line["held_out_loss"])
            for line in read_metrics(RunPaths(run.folder).metrics)
            if "held_out_loss" in line and line.get("stage") == validation.name
        }
        if not evaluations:
            return None
        if start := run.record.results.get(_START_LOSS):
            evaluations[0] = start.value
        order = sorted(evaluations)
        before_j = sum(part.figure.energy_j or 0.0 for part in _parts_before(run))
        train_j = stage.best.energy_j + sum(one.best.energy_j or 0.0 for one in _during_training(run))
        shares = tuple(step / steps.value for step in order)
        return cls(shares, tuple(evaluations[step] for step in order), before_j, train_j)

    @property
    def final(self) -> float:
        return self.losses[-1]

    @property
    def whole_j(self) -> float:
        return self.before_j + self.train_j

    @property
    def first_evaluation_j(self) -> float:
        return self.before_j + self.shares[0] * self.train_j

    def charged_to(self, loss: float) -> float | None:
        """Like `joules_to`; a student that ends worse than at its first evaluation, as with preference training, is
        charged in full for its final loss."""
        found = self.joules_to(loss)
        return self.whole_j if found is None and loss == self.final else found

    def joules_to(self, loss: float) -> float | None:
        """Energy up to the first evaluation, or point between two, that is as good; None if the first one is better."""
        if loss > self.losses[0]:
            return None
        # A loss that rises again has been reached before: the running minimum makes the curve
        # monotone, which np.interp needs, and charges a student up to its first time at that loss.
        lowest = np.minimum.accumulate(self.losses)
        # Energy is taken as proportional to the steps of a training, and loss as linear between two
        # evaluations. Loss curves are convex, so linear interpolation charges a student slightly
        # too much, on both sides alike.
        share = float(np.interp(-loss, -lowest, self.shares))
        return self.before_j + share * self.train_j

    def loss_at(self, joules: float) -> float | None:
        """Loss when the student had used this energy; None before its first evaluation."""
        energies = [self.before_j + share * self.train_j for share in self.shares]
        return None if joules < energies[0] else float(np.interp(joules, energies, self.losses))


def _last_training(run: ComparedRun) -> tuple[StageRecord | None, StageRecord | None]:
    """The student's last training and its validation, which began after it."""
    stage = last_training(run.record, "student")
    later = run.record.stages[stage.number :] if stage else ()
    return stage, next((found for found in later if (found.role, found.activity) == ("student", "validate")), None)


def _during_training(run: ComparedRun) -> list[StageRecord]:
    """What accompanies the student's last training: validations, and on-policy completions and their scores."""
    stage, validation = _last_training(run)
    later = run.record.stages[stage.number :] if stage else ()
    return [
        one
        for one in later
        if one is validation or (one.role, one.activity) == ("student", "generate") or one.kind.is_for_one_student
    ]


def _parts_before(run: ComparedRun) -> list[Part]:
    """Work before the last training: the SFT student's (own or inherited) and the reference's."""
    last = [stage.name for stage in (*_last_training(run), *_during_training(run)) if stage]
    return [
        part
        for part in run.parts
        if (part.inherited or part.stage not in last)
        and (part.is_for_one_student or (part.is_students and any(one.activity in _PREPARES for one in part.kinds)))
    ]


_HELD_OUT_LOSS = "clm_loss"
_START_LOSS = f"student.start.{_HELD_OUT_LOSS}"
_TWO_METHODS = "either the energy spent once or the energy saved each time is measured, and the other is estimated"


@dataclass(frozen=True)
class StudentCosts:
    """Energy of the student stages up to a quality that both sides reached: one value per pair, or per run."""

    base_j: tuple[float, ...]
    own_j: tuple[float, ...]
    paired: bool
    quality: str
    """The quality at which they are compared, as text."""
    loss: float | None = None
    """The held-out loss that both reached, mean over the pairs; None if both are charged in full."""
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
    """Break-even of one method; `found` is None if it cannot be computed, with the `reason`."""

    label: str
    against: str
    """The baseline, or the model that the student replaces."""
    each: str
    """`student`, `token` or `sample`."""
    found: BreakEven | None
    reason: str = ""
    quality: str = ""
    beyond: bool = False
    """The baseline had a teacher too: only the additional energy of this one has to be saved."""
    costs: StudentCosts | None = None
    measured_in: str = ""
    """Stages in which the energy per item was measured."""

    @property
    def answer(self) -> str:
        if self.found is None:
            return "unknown"
        if not self.found.breaks_even:
            return "does not break even"
        return "immediately" if not self.found.count else f"{times_text(self.found.count, self.each)} {self.each}s"


def break_even_rows(comparison: Comparison) -> tuple[RowBreakEven, ...]:
    """For every method that had a teacher."""
    with_teacher = rows_with_teacher(comparison)
    baseline = comparison.row(comparison.baseline)
    found = [_by_students(row, baseline, comparison) for row in with_teacher]
    teacher = next((row for row in comparison.rows if row.role == "teacher"), None)
    if teacher is not None:
        found += [_by_items(row, teacher, comparison) for row in with_teacher]
    return tuple(found)


def rows_with_teacher(comparison: Comparison) -> list[Row]:
    """Methods that trained a student with a teacher; runs that only use a model have the same ancestors."""
    trained = [row for row in comparison.methods if any(not part.inherited for part in student_parts(row.runs[0]))]
    return [row for row in trained if had_teacher(row) or row.unmetered]


def had_teacher(row: Row) -> bool:
    """Whether a teacher helped it; one that was only evaluated did not."""
    helped = (part for run in row.runs for part in run.parts if part.is_teachers and not part.is_teacher_evaluation)
    return bool(row.teacher_share) and any(helped)


def student_parts(run: ComparedRun) -> list[Part]:
    return [part for part in run.parts if part.is_student_stage]


def teacher_parts(run: ComparedRun) -> list[Part]:
    """The teacher's work and data made from it, which its students share, without its evaluation."""
    return [part for part in run.parts if part.shared and not part.is_teacher_evaluation]


def _by_students(row: Row, baseline: Row | None, comparison: Comparison) -> RowBreakEven:
    costs = student_costs(row, baseline, comparison)
    beyond = baseline is not None and had_teacher(baseline)
    if baseline is None or isinstance(costs, str):
        return RowBreakEven(row.label, comparison.baseline, "student", None, str(costs), "", beyond)
    spent, saved = teacher_beyond(row, baseline), costs.saved
    if costs.never:
        found = BreakEven(spent, saved, None, math.inf, math.inf, costs.never)
    else:
        found = break_even(spent, saved, "a student")
    return RowBreakEven(row.label, comparison.baseline, "student", found, "", costs.quality, beyond, costs)


def student_costs(row: Row, baseline: Row | None, comparison: Comparison) -> StudentCosts | str:
    """Energy of the students of both sides up to equal quality; or the reason why it is unknown."""
    if baseline is None:
        return "the baseline has no finished run"
    if row.unmetered or baseline.unmetered:
        return NOT_METERED
    if row.difference and not row.difference.comparable:
        return row.difference.reason
    at_equal_loss = _have_loss_curves(row, baseline, comparison)
    parts = _training_parts if at_equal_loss else student_parts
    figures = [part.figure for run in (*row.runs, *baseline.runs) for part in parts(run)]
    if mixes_methods(figures):
        return "one side is measured and the other estimated"
    figures += [part.figure for run in (*row.runs, *baseline.runs) for part in teacher_parts(run)]
    if mixes_methods(figures):
        return _TWO_METHODS
    if any(figure.cpu_contention for figure in figures):
        return CPU_CONTENTION
    if at_equal_loss:
        return _costs_to_equal_loss(row, baseline)
    return _costs_in_full(row, baseline, comparison)


def _costs_in_full(row: Row, baseline: Row, comparison: Comparison) -> StudentCosts | str:
    quality, worse = _quality_text(row, comparison)
    pairs = pairs_of(row.runs, baseline.runs)
    theirs, ours = zip(*pairs, strict=True) if pairs else (baseline.runs, row.runs)
    base_j, own_j = (tuple(_sum_j(student_parts(run)) for run in side) for side in (theirs, ours))
    if not all(base_j) or not all(own_j):
        return "energy of the student stages is missing"
    never = "its students are significantly worse than the baseline's" if worse else ""
    return StudentCosts(base_j, own_j, bool(pairs), quality, never=never)


def _training_parts(run: ComparedRun) -> list[Part]:
    stage, _ = _last_training(run)
    names = [one.name for one in (stage, *_during_training(run)) if one]
    own = [part for part in run.parts if part.stage in names and not part.inherited]
    return [*own, *_parts_before(run)]


def _have_loss_curves(row: Row, baseline: Row, comparison: Comparison) -> bool:
    """Both sides' held-out loss was evaluated during training, and it is what the comparison is about."""
    if comparison.measure is None or comparison.measure.name != _HELD_OUT_LOSS or not row.same_data:
        return False
    pairs = pairs_of(row.runs, baseline.runs)
    return bool(pairs) and len(_loss_curves(pairs)) == len(pairs)


def _loss_curves(pairs: Sequence[tuple[ComparedRun, ComparedRun]]) -> list[tuple[LossCurve, LossCurve]]:
    """Baseline and method, of the pairs whose loss was evaluated during training."""
    both = [(LossCurve.of(base), LossCurve.of(own)) for base, own in pairs]
    return [(base, own) for base, own in both if base is not None and own is not None]


def _costs_to_equal_loss(row: Row, baseline: Row) -> StudentCosts | str:
    curves = _loss_curves(pairs_of(row.runs, baseline.runs))
    # Per pair the worse of the two final losses, the only one that both have reached.
    losses = [max(base.final, own.final) for base, own in curves]
    loss = sum(losses) / len(losses)
    quality = f"at equal held-out loss, {loss:.3f} nats"
    charged = [(base.charged_to(one), own.charged_to(one)) for (base, own), one in zip(curves, losses, strict=True)]
    known = [(base_j, own_j) for base_j, own_j in charged if base_j is not None and own_j is not None]
    if len(known) == len(curves):
        base_j, own_j = zip(*known, strict=True)
        return StudentCosts(base_j, own_j, True, quality, loss)
    # A baseline that was as good at its first evaluation used at most the energy up to there. A student that used more
    # saves nothing, whatever the loss in between was.
    bounds = [(base.first_evaluation_j, own.whole_j) for base, own in curves if own.final > base.losses[0]]
    if len(bounds) == len(curves) and all(own_j > base_j for base_j, own_j in bounds):
        base_j, own_j = zip(*bounds, strict=True)
        never = f"{baseline.label} reached that loss at its first evaluation, with less energy"
        return StudentCosts(base_j, own_j, True, quality, loss, base_at_most=True, never=never)
    return "neither side's evaluations reach the other's held-out loss"


@dataclass(frozen=True)
class EqualEnergy:
    """Held-out losses of two methods at the energy that the cheaper of two students used: one value per pair."""

    energies_j: tuple[float, ...]
    losses: tuple[float, ...]
    baseline_losses: tuple[float, ...]


def at_equal_energy(row: Row, baseline: Row, comparison: Comparison) -> EqualEnergy | None:
    """From the student stages alone. None if a student had not been evaluated by then."""
    if not _have_loss_curves(row, baseline, comparison):
        return None
    curves = _loss_curves(pairs_of(row.runs, baseline.runs))
    energies = tuple(min(base.whole_j, own.whole_j) for base, own in curves)
    both = [(own.loss_at(j), base.loss_at(j)) for (base, own), j in zip(curves, energies, strict=True)]
    known = [(loss, base) for loss, base in both if loss is not None and base is not None]
    if len(known) < len(curves):
        return None
    losses, baseline_losses = zip(*known, strict=True)
    return EqualEnergy(energies, losses, baseline_losses)


def teacher_beyond(row: Row, baseline: Row) -> Estimate:
    """The teacher's energy, minus that of the baseline's teacher if it has one.

    Work that both reuse from one teacher was measured once: it cancels with its error and is on neither side.
    """
    if not had_teacher(baseline):
        return _once(row.runs, teacher_parts)
    keys = [{part.key for part in teacher_parts(run)} for run in (*row.runs, *baseline.runs)]
    common = set.intersection(*keys) - {None}

    def not_common(run: ComparedRun) -> list[Part]:
        return [part for part in teacher_parts(run) if part.key not in common]

    return _once(row.runs, not_common) - _once(baseline.runs, not_common)


def _sum_j(parts: Sequence[Part]) -> float:
    return sum(part.figure.energy_j or 0.0 for part in parts)


def _once(runs: Sequence[ComparedRun], of: Callable[[ComparedRun], list[Part]]) -> Estimate:
    """Work that all repeats share was measured once and has the sensor's interval; otherwise the repeats give it."""
    sums = [_sum_j(of(run)) for run in runs]
    # Equal to all printed digits: the runs reuse one artifact, and n copies of one measurement are
    # not n measurements.
    if max(sums) - min(sums) > 1e-9 * max(sums):
        return Estimate.of_repeats(sums)
    return Estimate.of_half_width(sums[0], total(part.figure for part in of(runs[0])).half_width_j or 0.0)


def _by_items(row: Row, teacher: Row, comparison: Comparison) -> RowBreakEven:
    ours, theirs = _serving_costs(row, teacher, comparison)
    each = ours[0].item if ours else "item"
    if not ours:
        return RowBreakEven(row.label, teacher.label, each, None, "no run used both models in the same way")
    if mixes_methods(one.energy for one in (*ours, *theirs)):
        return RowBreakEven(row.label, teacher.label, each, None, "one side is measured and the other estimated")
    if row.unmetered:
        return RowBreakEven(row.label, teacher.label, each, None, NOT_METERED)
    figures = [one.energy for one in (*ours, *theirs)]
    figures += [part.figure for run in row.runs for part in _beyond_the_teacher(run)]
    if mixes_methods(figures):
        return RowBreakEven(row.label, teacher.label, each, None, _TWO_METHODS)
    if any(figure.cpu_contention for figure in figures):
        return RowBreakEven(row.label, teacher.label, each, None, CPU_CONTENTION)
    extra = _once(row.runs, _beyond_the_teacher)
    saved = _per_item(theirs) - _per_item(ours)
    stages = listed(list(dict.fromkeys(one.stage.name for one in (*theirs, *ours))))
    single = (
        "a single run has no spread, so its interval includes only the sensor's uncertainty"
        if 1 in (len(ours), len(theirs))
        else ""
    )
    found = break_even(extra, saved, f"a {each}")
    return RowBreakEven(row.label, teacher.label, each, found, single, measured_in=f"measured in {stages}")


def _serving_costs(row: Row, teacher: Row, comparison: Comparison) -> tuple[list[ServingCost], list[ServingCost]]:
    """Both models on the same kind of item: in inference runs if both have some, else in evaluations."""
    for ways in ([_inference_runs(one, comparison) for one in (row, teacher)], [row.runs, teacher.runs]):
        ours, theirs = ([one for run in runs if (one := costs_in_use(run))] for runs in ways)
        if ours and theirs and len({_way_of_use(one) for one in (*ours, *theirs)}) == 1:
            return ours, theirs
    return [], []


def _way_of_use(one: ServingCost) -> tuple[str, str]:
    """Inference stages of different batch, length, mode or dtype have different names; evaluations are all alike."""
    return one.item, one.stage.name if one.stage.role == "inference" else ""


def _inference_runs(row: Row, comparison: Comparison) -> list[ComparedRun]:
    """Inference runs of the models that the row's runs made."""
    ids = {run.record.run_id for run in row.runs}
    others = [run for other in comparison.rows if other is not row for run in other.runs]
    return [run for run in others if only_infers(run.record) and ids & _makers_of_what_it_used(run.record)]


def _makers_of_what_it_used(record: RunRecord) -> set[str]:
    """Runs that made the artifacts it used directly: a student's teacher is an ancestor too, but was not run."""
    parents = {parent for ancestor in record.lineage for parent in ancestor.parents}
    return {ancestor.made_by for ancestor in record.lineage if ancestor.key not in parents}


def _beyond_the_teacher(run: ComparedRun) -> list[Part]:
    """The student stages and the teacher's work for it, without making the teacher, whichever run did them."""
    return [part for part in (*student_parts(run), *teacher_parts(run)) if not part.makes_the_teacher]


def _per_item(found: Sequence[ServingCost]) -> Estimate:
    """Mean over repeats; a single run has the sensor's interval."""
    if len(found) > 1:
        return Estimate.of_repeats([one.j_per_item for one in found])
    return Estimate.of_half_width(found[0].j_per_item, found[0].energy.half_width_j or 0.0)


def _quality_text(row: Row, comparison: Comparison) -> tuple[str, bool]:
    """The quality at which the students are compared, and whether they are significantly worse than the baseline's."""
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
