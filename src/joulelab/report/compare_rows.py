"""One method's row: means over its runs, where its joules went, and how it differs from the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

from joulelab.meter.figures import EnergyFigure, ErrorComponent, total
from joulelab.report.comparison import ComparedRun, Role, Row, one_of_each_record
from joulelab.report.differences import energy_ratio, quality_difference
from joulelab.report.joules import is_teacher, mean_figure
from joulelab.report.quality import share_interval
from joulelab.report.stage_means import stage_means
from joulelab.runs.measure_result import repeat_mean
from joulelab.runs.record import RunRecord, StageRecord
from joulelab.stats import Interval, mean_t

TRAINING_STAGES = ("model.train", "student.train", "teacher.train")
_WITH_TEACHER = attrgetter("with_teacher", "mixed", "incomplete")
_WITHOUT_TEACHER = attrgetter("without_teacher", "mixed_without", "incomplete_without")
Rate = Literal["samples_per_s", "j_per_sample", "tokens_per_s", "j_per_token", "mean_power_w"]


def make_row(baseline_label: str, runs: list[ComparedRun], baseline: list[ComparedRun], trained: bool = True) -> Row:
    """`trained`: some row of the comparison trained a model; one that only uses a model is then no rival of it."""
    label = runs[0].record.label
    own = label == baseline_label
    role: Role = "baseline" if own else "teacher" if is_teacher(runs[0].record) else "method"
    if role == "method" and trained and only_infers(runs[0].record):
        role = "inference"
    values = [run.quality.result.value for run in runs if run.quality]
    records = one_of_each_record(runs)
    return Row(
        label=label,
        role=role,
        runs=tuple(runs),
        quality=sum(values) / len(values) if values else None,
        interval=_interval(runs, values),
        stages=stage_means(runs),
        own=mean_figure(run.joules.own for run in records),
        inherited=_mean_inherited(runs),
        without_teacher=_mean_sum(runs, [run.joules.without_teacher for run in runs], with_teacher=False),
        with_teacher=_mean_sum(runs, [run.joules.with_teacher for run in runs], with_teacher=True),
        setup=_mean_apart(records, "setup"),
        repeated=_mean_apart(records, "repeated"),
        whole=mean_figure(run.joules.whole for run in records),
        mixed=any(run.joules.mixed for run in runs),
        mixed_without=any(run.joules.mixed_without for run in runs),
        teacher_share=_teacher_share(runs),
        samples_per_s=training_mean(runs, "samples_per_s"),
        j_per_sample=training_mean(runs, "j_per_sample"),
        unknown=tuple(dict.fromkeys(name for run in runs for name in run.joules.unknown)),
        difference=None if own else quality_difference(runs, baseline),
        student_ratio=None if own else energy_ratio(runs, baseline, _WITHOUT_TEACHER),
        full_ratio=None if own else energy_ratio(runs, baseline, _WITH_TEACHER),
    )


def only_infers(record: RunRecord) -> bool:
    """A run that tells what a model costs in use."""
    return any(stage.role == "inference" for stage in record.stages) and training_stage(record) is None


def _interval(runs: list[ComparedRun], values: list[float]) -> Interval | None:
    """Of the test set where quality is a share of its items; else over the repeats."""
    if not values:
        return None
    trials = next((run.quality.result.trials for run in runs if run.quality), None)
    return share_interval(sum(values) / len(values), trials) if trials else mean_t(values)


def _share_ancestors(runs: list[ComparedRun]) -> bool:
    return len({frozenset(ancestor.key for ancestor in run.record.inherited) for run in runs}) == 1


def _mean_inherited(runs: list[ComparedRun]) -> EnergyFigure | None:
    found = [run.joules.inherited for run in runs if run.joules.inherited is not None]
    if not found or _share_ancestors(runs):
        return found[0] if found else None
    return mean_figure(found)


def _mean_sum(runs: list[ComparedRun], sums: Sequence[EnergyFigure], with_teacher: bool) -> EnergyFigure:
    """What all repeats use, made by one of them or by another run, was measured once: repeats make it no surer.

    Of a measured program it is what `measure` states: the mean with Student's interval over the repeats.
    """
    repeats = repeat_mean(*(run.record for run in one_of_each_record(runs)))
    if repeats is not None and not any(run.record.inherited for run in runs):
        return repeats.energy
    mean = mean_figure(sums)
    if mean.half_width_j is None:
        return mean
    by_run = [[part for part in run.parts if with_teacher or not part.shared] for run in runs]
    common = set.intersection(*({part.key for part in parts} for parts in by_run)) - {None}
    doubts_j = [part.figure.half_width_j or 0.0 for part in by_run[0] if part.key in common]
    # n independent doubts shrink to a nth of their square in the mean, and one that all share does not
    rest = math.sqrt(1 - 1 / len(runs))
    shared_j = math.hypot(*(rest * doubt_j for doubt_j in doubts_j))
    return mean.with_errors(ErrorComponent(name="reused work", joules=(shared_j,)))


def _mean_apart(runs: list[ComparedRun], kind: Literal["setup", "repeated"]) -> EnergyFigure | None:
    """Mean over all runs; one without any counts as 0 J."""
    found = [figure for run in runs if (figure := getattr(run.joules, kind)) is not None]
    return total(found).scaled(1 / len(runs)) if found else None


def _teacher_share(runs: list[ComparedRun]) -> float | None:
    whole_j = [run.joules.with_teacher.energy_j for run in runs]
    if any(energy_j is None for energy_j in whole_j):
        return None
    sum_j = sum(energy_j or 0.0 for energy_j in whole_j)
    return sum(run.joules.teacher_j for run in runs) / sum_j if sum_j else None


def training_stage(record: RunRecord) -> StageRecord | None:
    return next((found for name in TRAINING_STAGES if (found := record.stage(name))), None)


def training_energy(runs: Sequence[ComparedRun], item: Literal["sample", "token"]) -> EnergyFigure | None:
    """Energy of one item, mean over the runs' main training stage; None where no run counted items."""
    stages = [training_stage(run.record) for run in runs]
    found = [figure for stage in stages if stage and (figure := stage.energy_per(item)) is not None]
    return mean_figure(found) if found else None


def training_mean(runs: list[ComparedRun] | tuple[ComparedRun, ...], what: Rate) -> float | None:
    """Mean over the runs' main training stage."""
    stages = [training_stage(run.record) for run in runs]
    values = [float(value) for stage in stages if stage and (value := getattr(stage, what)) is not None]
    return sum(values) / len(values) if values else None
