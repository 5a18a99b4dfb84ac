"""Data model of a comparison: one row per method with its differences from the baseline, and the incomplete runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from joulelab.meter.figures import EnergyFigure
from joulelab.report.compare.quality import AGREEMENT, Measure, Quality
from joulelab.report.energy_sums import Part, PartKind, RunEnergy
from joulelab.runs.record import Result, RunRecord
from joulelab.stats import Interval, PairedDifference, mean_t
from joulelab.units import percent_text

Role = Literal["baseline", "method", "teacher", "inference"]


VARIANT = ", variant "
"""In labels of methods that differ in more settings than a label can name."""


@dataclass(frozen=True)
class ComparedRun:
    """A finished run."""

    record: RunRecord
    folder: Path
    seed: int
    quality: Quality | None
    joules: RunEnergy
    parts: tuple[Part, ...]
    """The parts that comparisons count; `all_parts` also has setup and repeated work."""
    all_parts: tuple[Part, ...]
    devices: frozenset[str]
    """Sensors of its energy, each with its machine."""
    repeat: int | None = None
    """Number of this repeat of a measured program; repeats are compared like runs."""

    @property
    def result(self) -> Result:
        """Only for runs with a quality value."""
        assert self.quality is not None
        return self.quality.result


def run_name(run: ComparedRun, among: Sequence[ComparedRun]) -> str:
    """`response KD, seed 1`; repeats of one seed also have the end of their id."""
    if run.repeat is not None:
        return f"{run.record.label}, repeat {run.repeat} ({run.record.run_id[-4:]})"
    name = f"{run.record.label}, seed {run.seed}"
    twins = [other for other in among if other.record.label == run.record.label and other.seed == run.seed]
    return name if len(twins) == 1 else f"{name} ({run.record.run_id[-4:]})"


def one_of_each_record(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """One run per record: repeats of a measured program have their setup and total energy in common."""
    first: dict[str, ComparedRun] = {}
    for run in runs:
        first.setdefault(run.record.run_id, run)
    return list(first.values())


@dataclass(frozen=True)
class IncompleteRun:
    run_id: str | None
    label: str
    seed: int
    why: str
    own: EnergyFigure


@dataclass(frozen=True)
class QualityDifference:
    """Method minus baseline. `paired` is item by item and needs both sides' predictions; its interval is over items
    and training seeds.

    Figures without right and wrong items, as losses, have the repeats as their sample: `over_seeds` is the interval of
    their difference, paired by seed where seeds pair.
    """

    paired: PairedDifference | None
    by_seed: tuple[float, ...]
    reason: str = ""
    over_seeds: Interval | None = None
    needed: int | None = None
    """Repeats needed to show a difference of this size and spread; more if the test items vary too."""
    comparable: bool = True
    """False if both sides were evaluated on different data, with the `reason`; then there is no difference."""

    @property
    def interval(self) -> Interval | None:
        return self.paired.difference if self.paired else self.over_seeds

    @property
    def significant(self) -> bool:
        """A difference between methods is never significant with a single training run on one side."""
        if self.paired is None:
            return self.over_seeds is not None and self.over_seeds.excludes(0.0)
        return self.paired.covers_methods and self.paired.significant

    @property
    def models_only(self) -> bool:
        """It compares trained models on test items, not methods: one side has a single training run."""
        return self.paired is not None and not self.paired.covers_methods

    @property
    def seeds_agree(self) -> bool:
        return all(difference > 0 for difference in self.by_seed) or all(difference < 0 for difference in self.by_seed)


@dataclass(frozen=True)
class EnergyRatio:
    """Method over baseline. Gain errors cancel on the same sensors and are part of the interval on different ones."""

    ratio: Interval | None
    seeds: int
    """Pairs, or the smaller side's repeats where none pair."""
    reason: str = ""
    paired: bool = True
    same_devices: bool = True
    needed: int | None = None
    contended: bool = False
    """It uses CPU estimates made under CPU contention: the interval reflects other processes, not the runs."""

    @property
    def significant(self) -> bool:
        return self.ratio is not None and self.ratio.excludes(1.0) and not self.contended


@dataclass(frozen=True)
class StageMean:
    """A stage's energy, mean over all runs of the row; `inherited` if all of it is."""

    name: str
    inherited: bool
    figure: EnergyFigure
    kind: PartKind = "work"


@dataclass(frozen=True)
class Row:
    label: str
    role: Role
    runs: tuple[ComparedRun, ...]
    quality: float | None
    """Mean over the runs; None if they have no value of this measure."""
    interval: Interval | None
    stages: tuple[StageMean, ...]
    own: EnergyFigure
    inherited: EnergyFigure | None
    without_teacher: EnergyFigure
    with_teacher: EnergyFigure
    """Like `without_teacher`, for comparisons: no setup, and no repeated work unless requested."""
    setup: EnergyFigure | None
    repeated: EnergyFigure | None
    """Not included in `with_teacher`."""
    whole: EnergyFigure
    """Everything used, own and inherited."""
    mixed: bool
    mixed_without: bool
    teacher_share: float | None
    samples_per_s: float | None
    j_per_sample: float | None
    unknown: tuple[str, ...]
    difference: QualityDifference | None
    """None for the baseline itself."""
    student_ratio: EnergyRatio | None
    """Without the teacher's work, on either side."""
    full_ratio: EnergyRatio | None

    def counts(self, stage: StageMean) -> bool:
        """Whether `with_teacher` has this stage in it."""
        return stage.kind == "work" or (stage.kind == "repeated" and self.repeated is None)

    @property
    def unmetered(self) -> tuple[str, ...]:
        """Unmetered work for it: energy with the teacher is a lower bound."""
        return tuple(dict.fromkeys(name for run in self.runs for name in run.joules.unmetered))

    @property
    def teacher_share_text(self) -> str:
        """Unmetered work can only increase the teacher's share."""
        return f"{'≥ ' if self.unmetered else ''}{percent_text(self.teacher_share, 0)}"

    @property
    def agreement(self) -> Interval | None:
        """Share of predictions that equal the teacher's, mean over the runs; None if none was evaluated against it."""
        values = [run.record.results[AGREEMENT].value for run in self.runs if AGREEMENT in run.record.results]
        if not values:
            return None
        # Equal seeds say nothing about the spread, as does a single one.
        return mean_t(values if len(set(values)) > 1 else values[:1])

    @property
    def same_data(self) -> bool:
        """Evaluated on the same data as the baseline, as far as the records show."""
        return self.difference is None or self.difference.comparable

    @property
    def seeds_text(self) -> str:
        return ", ".join(f"{run.seed}" if run.repeat is None else f"repeat {run.repeat}" for run in self.runs)


@dataclass(frozen=True)
class Comparison:
    name: str
    about: str
    baseline: str
    measure: Measure | None
    """None if no run has a quality value; then only energy is compared."""
    rows: tuple[Row, ...]
    incomplete: tuple[IncompleteRun, ...]
    records: tuple[RunRecord, ...]

    def row(self, label: str) -> Row | None:
        return next((row for row in self.rows if row.label == label), None)

    @property
    def methods(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.role == "method")

    @property
    def contended(self) -> bool:
        """Some energy is a CPU estimate made under CPU contention, so the order of the methods is unreliable."""
        return any(row.with_teacher.cpu_contention for row in self.rows)

    @property
    def about_items(self) -> bool:
        """Quality is the share of correct test items, so its interval comes from the test set."""
        return any(run.quality and run.quality.result.trials for row in self.rows for run in row.runs)
