"""A group's runs side by side: one row per method, each set against the baseline seed by seed and item by item.

Quality and energy come with what makes them comparable: intervals on the test set, the spread over seeds, the joules
that others paid for. A run that did not finish stands in a list of its own, with the joules it took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from joulelab.meter.figures import EnergyFigure, missing, total
from joulelab.report.joules import RunJoules, ancestor_figure, mean_figure, mixes_methods, run_joules
from joulelab.report.predictions import paired_difference
from joulelab.runs.groups import GroupRecord
from joulelab.runs.record import Result, RunRecord
from joulelab.stats import Interval, PairedDifference, mean_t, ratio_paired, wilson

Role = Literal["baseline", "method", "teacher"]
TRAINING_STAGES = ("model.train", "student.train", "teacher.train")
SIGNIFICANT = 0.05
LOSSES = tuple(f"{who}.{what}_loss" for who in ("student", "teacher") for what in ("mlm", "clm"))
"""What a comparison is about where no accuracy was measured: nats per held-out token, less is better."""


@dataclass(frozen=True)
class ComparedRun:
    """A finished run with a quality figure."""

    record: RunRecord
    seed: int
    accuracy: Result
    """Or the loss, where `lower_is_better`."""
    joules: RunJoules

    @property
    def interval(self) -> Interval | None:
        return accuracy_interval(self.accuracy.value, self.accuracy.trials)


@dataclass(frozen=True)
class IncompleteRun:
    run_id: str | None
    label: str
    seed: int
    why: str
    own: EnergyFigure


@dataclass(frozen=True)
class AccuracyDifference:
    """Method minus baseline. `paired` needs both sides' predictions; `by_seed` only their accuracies.

    Losses have no items that are right or wrong: `over_seeds` is the interval of their differences over the seeds."""

    paired: PairedDifference | None
    by_seed: tuple[float, ...]
    reason: str = ""
    over_seeds: Interval | None = None

    @property
    def resolved(self) -> bool:
        """Significant on the items, and every seed on the same side: one lucky seed does not make a method better."""
        if self.over_seeds is not None:
            return self.over_seeds.excludes(0.0) and self.seeds_agree
        return self.paired is not None and self.paired.p_value < SIGNIFICANT and self.seeds_agree

    @property
    def seeds_agree(self) -> bool:
        return all(difference > 0 for difference in self.by_seed) or all(difference < 0 for difference in self.by_seed)


@dataclass(frozen=True)
class EnergyRatio:
    """Method over baseline, paired by seed. Gain errors are left out: on the same machine they cancel."""

    ratio: Interval | None
    seeds: int
    reason: str = ""

    @property
    def resolved(self) -> bool:
        return self.ratio is not None and self.ratio.excludes(1.0)


@dataclass(frozen=True)
class StageMean:
    """A stage's joules, mean over the runs that have it; `inherited` where another run paid for it."""

    name: str
    inherited: bool
    figure: EnergyFigure


@dataclass(frozen=True)
class Row:
    label: str
    role: Role
    runs: tuple[ComparedRun, ...]
    accuracy: float
    interval: Interval | None
    stages: tuple[StageMean, ...]
    own: EnergyFigure
    inherited: EnergyFigure | None
    with_teacher: EnergyFigure
    mixed: bool
    teacher_share: float | None
    samples_per_s: float | None
    j_per_sample: float | None
    unknown: tuple[str, ...]
    difference: AccuracyDifference | None
    """None for the baseline itself."""
    own_ratio: EnergyRatio | None
    full_ratio: EnergyRatio | None


@dataclass(frozen=True)
class Comparison:
    name: str
    about: str
    baseline: str
    rows: tuple[Row, ...]
    incomplete: tuple[IncompleteRun, ...]
    records: tuple[RunRecord, ...]

    def row(self, label: str) -> Row | None:
        return next((row for row in self.rows if row.label == label), None)

    @property
    def methods(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.role == "method")

    @property
    def is_about_loss(self) -> bool:
        """Quality is a loss, of which less is better; else an accuracy."""
        return any(run.accuracy.lower_is_better for row in self.rows for run in row.runs)


def compare(group: GroupRecord, records: Sequence[RunRecord], store: Path) -> Comparison:
    """One row per label that has a finished run, in the order of the group's members."""
    finished: dict[str, list[ComparedRun]] = {}
    for record in records:
        run = compared_run(record)
        if run is not None:
            finished.setdefault(record.label, []).append(run)
    baseline = finished.get(group.baseline, [])
    labels = list(dict.fromkeys([*(member.label for member in group.members), *finished]))
    return Comparison(
        name=group.name,
        about=group.about,
        baseline=group.baseline,
        rows=tuple(_row(group.baseline, finished[label], baseline, store) for label in labels if label in finished),
        incomplete=_incomplete(group, records),
        records=tuple(records),
    )


def compared_run(record: RunRecord) -> ComparedRun | None:
    accuracy = quality(record)
    if record.status != "done" or accuracy is None:
        return None
    return ComparedRun(record, seed_of(record), accuracy, run_joules(record))


def quality(record: RunRecord) -> Result | None:
    """The accuracy a comparison is about: the student's, else the teacher's, else any; else a language model's loss."""
    accuracies = [name for name in record.results if name.endswith("accuracy")]
    names = ["student.accuracy", "teacher.accuracy", *accuracies, *LOSSES]
    return next((record.results[name] for name in names if name in record.results), None)


def seed_of(record: RunRecord) -> int:
    return int(record.spec.get("seed", 0))


def accuracy_interval(share: float, trials: int | None) -> Interval | None:
    """The interval of the test set: its items are a sample, however many seeds were trained."""
    return wilson(share * trials, trials) if trials else None


def is_teacher(record: RunRecord) -> bool:
    """A run that prepares what students learn from and trains none itself."""
    names = [stage.name for stage in record.stages]
    return any(name.startswith("teacher.") for name in names) and not any(name.startswith("student.") for name in names)


def _row(baseline_label: str, runs: list[ComparedRun], baseline: list[ComparedRun], store: Path) -> Row:
    label = runs[0].record.label
    share = sum(run.accuracy.value for run in runs) / len(runs)
    own = label == baseline_label
    role: Role = "baseline" if own else "teacher" if is_teacher(runs[0].record) else "method"
    own_mean, inherited = mean_figure(run.joules.own for run in runs), _mean_inherited(runs)
    return Row(
        label=label,
        role=role,
        runs=tuple(runs),
        accuracy=share,
        interval=_interval(share, runs),
        stages=_stages(runs),
        own=own_mean,
        inherited=inherited,
        with_teacher=_mean_with_teacher(runs, own_mean, inherited),
        mixed=any(run.joules.mixed for run in runs),
        teacher_share=_teacher_share(runs),
        samples_per_s=_training_mean(runs, "samples_per_s"),
        j_per_sample=_training_mean(runs, "j_per_sample"),
        unknown=tuple(dict.fromkeys(name for run in runs for name in run.joules.unknown)),
        difference=None if own else _difference(runs, baseline, store),
        own_ratio=None if own else _ratio(runs, baseline, lambda joules: joules.own),
        full_ratio=None if own else _ratio(runs, baseline, lambda joules: joules.with_teacher),
    )


def _interval(mean: float, runs: list[ComparedRun]) -> Interval | None:
    if runs[0].accuracy.lower_is_better:
        return mean_t([run.accuracy.value for run in runs])
    return accuracy_interval(mean, runs[0].accuracy.trials)


def _stages(runs: list[ComparedRun]) -> tuple[StageMean, ...]:
    """Inherited stages first, as they came first, then the run's own in order; idle baselines belong to no bill."""
    inherited: dict[str, dict[str, EnergyFigure]] = {}
    own: dict[str, list[EnergyFigure]] = {}
    for run in runs:
        for ancestor in run.record.inherited:
            name = " + ".join(ancestor.stages) or ancestor.name
            # by key: an ancestor that all seeds share is one measurement, and repeating it makes it no surer
            inherited.setdefault(name, {})[ancestor.key] = ancestor_figure(ancestor, run.record.policy)
        for stage in run.record.stages:
            if not stage.outside_totals:
                own.setdefault(stage.name, []).append(stage.best)
    return (
        *(StageMean(name, True, mean_figure(parts.values())) for name, parts in inherited.items()),
        *(StageMean(name, False, mean_figure(parts)) for name, parts in own.items()),
    )


def _share_ancestors(runs: list[ComparedRun]) -> bool:
    return len({frozenset(ancestor.key for ancestor in run.record.inherited) for run in runs}) == 1


def _mean_inherited(runs: list[ComparedRun]) -> EnergyFigure | None:
    found = [run.joules.inherited for run in runs if run.joules.inherited is not None]
    if not found or _share_ancestors(runs):
        return found[0] if found else None
    return mean_figure(found)


def _mean_with_teacher(runs: list[ComparedRun], own: EnergyFigure, inherited: EnergyFigure | None) -> EnergyFigure:
    if own.energy_j is None or not _share_ancestors(runs):
        return mean_figure(run.joules.with_teacher for run in runs)
    return own if inherited is None or inherited.energy_j is None else total([own, inherited])


def _teacher_share(runs: list[ComparedRun]) -> float | None:
    whole_j = [run.joules.with_teacher.energy_j for run in runs]
    if any(energy_j is None for energy_j in whole_j):
        return None
    sum_j = sum(energy_j or 0.0 for energy_j in whole_j)
    return sum(run.joules.teacher_j for run in runs) / sum_j if sum_j else None


def _training_mean(runs: list[ComparedRun], what: Literal["samples_per_s", "j_per_sample"]) -> float | None:
    """Mean over the runs' main training stage."""
    values = []
    for run in runs:
        stage = next((found for name in TRAINING_STAGES if (found := run.record.stage(name))), None)
        value = getattr(stage, what) if stage else None
        if value is not None:
            values.append(float(value))
    return sum(values) / len(values) if values else None


def _pairs(runs: list[ComparedRun], baseline: list[ComparedRun]) -> list[tuple[ComparedRun, ComparedRun]]:
    """(baseline, method) of equal seed."""
    by_seed = {run.seed: run for run in baseline}
    return [(by_seed[run.seed], run) for run in runs if run.seed in by_seed]


def _difference(runs: list[ComparedRun], baseline: list[ComparedRun], store: Path) -> AccuracyDifference:
    pairs = _pairs(runs, baseline)
    if not pairs:
        return AccuracyDifference(None, (), _no_pairs(baseline))
    by_seed = tuple(method.accuracy.value - base.accuracy.value for base, method in pairs)
    if runs[0].accuracy.lower_is_better:
        reason = "" if len(by_seed) > 1 else "one seed tells no spread"
        return AccuracyDifference(None, by_seed, reason, over_seeds=mean_t(by_seed))
    paired = paired_difference([(store / base.record.run_id, store / method.record.run_id) for base, method in pairs])
    reason = "" if paired else "the predictions to pair item by item are missing"
    return AccuracyDifference(paired, by_seed, reason)


def _no_pairs(baseline: list[ComparedRun]) -> str:
    return "no seed in common with the baseline" if baseline else "the baseline has no finished run"


def _ratio(
    runs: list[ComparedRun], baseline: list[ComparedRun], of: Callable[[RunJoules], EnergyFigure]
) -> EnergyRatio:
    pairs = _pairs(runs, baseline)
    if not pairs:
        return EnergyRatio(None, 0, _no_pairs(baseline))
    figures = [(of(base.joules), of(method.joules)) for base, method in pairs]
    if mixes_methods(figure for pair in figures for figure in pair):
        return EnergyRatio(None, len(pairs), "one side is measured and the other estimated")
    joules = [(base.energy_j, method.energy_j) for base, method in figures]
    positive = [(base, method) for base, method in joules if base and method and base > 0 and method > 0]
    if len(positive) < len(pairs):
        return EnergyRatio(None, len(pairs), "joules are missing")
    return EnergyRatio(ratio_paired([m for _, m in positive], [b for b, _ in positive]), len(pairs))


def _incomplete(group: GroupRecord, records: Sequence[RunRecord]) -> tuple[IncompleteRun, ...]:
    found = [
        IncompleteRun(record.run_id, record.label, seed_of(record), _why_incomplete(record), run_joules(record).own)
        for record in records
        if compared_run(record) is None
    ]
    started = {record.run_id for record in records}
    absent = [member for member in group.members if member.run_id is None or member.run_id not in started]
    never = missing("the run has not started")
    found += [IncompleteRun(member.run_id, member.label, member.seed, "not started", never) for member in absent]
    return tuple(found)


def _why_incomplete(record: RunRecord) -> str:
    if record.status == "done":
        return "done, but without an accuracy or a loss"
    return f"{record.status}: {record.error.message}" if record.error else record.status
