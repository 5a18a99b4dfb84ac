"""What a comparison holds: one row per method, each set against the baseline, and the runs that could not take part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from joulelab.meter.figures import EnergyFigure
from joulelab.report.compare.quality import Measure, Quality
from joulelab.report.energy_sums import Part, PartKind, RunEnergy
from joulelab.runs.record import Result, RunRecord
from joulelab.stats import Interval, PairedDifference
from joulelab.units import percent_text

Role = Literal["baseline", "method", "teacher", "inference"]


@dataclass(frozen=True)
class ComparedRun:
    """A finished run."""

    record: RunRecord
    folder: Path
    seed: int
    quality: Quality | None
    joules: RunEnergy
    parts: tuple[Part, ...]
    """What methods are compared by; `all_parts` has setup and repeated work too."""
    all_parts: tuple[Part, ...]
    devices: frozenset[str]
    """Which sensors its joules come from, each with its machine."""
    repeat: int | None = None
    """Number of this run of a measured program; each of several is compared as a run of its own."""

    @property
    def result(self) -> Result:
        """Of a run that has one; those without stand in no comparison of quality."""
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
    """For what all repeats of a measured program have in common: their setup, and all energy that was used."""
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
    """Repeats that would show a difference of this size and spread; more where the test items vary too."""

    @property
    def interval(self) -> Interval | None:
        return self.paired.difference if self.paired else self.over_seeds

    @property
    def significant(self) -> bool:
        """Between the methods: never from one training run on a side."""
        if self.paired is None:
            return self.over_seeds is not None and self.over_seeds.excludes(0.0)
        return self.paired.covers_methods and self.paired.significant

    @property
    def models_only(self) -> bool:
        """It compares trained models on test items; a side has one training run, so it says nothing about methods."""
        return self.paired is not None and not self.paired.covers_methods

    @property
    def seeds_agree(self) -> bool:
        return all(difference > 0 for difference in self.by_seed) or all(difference < 0 for difference in self.by_seed)


@dataclass(frozen=True)
class EnergyRatio:
    """Method over baseline. On the same sensors their scale errors cancel; between different ones they are inside."""

    ratio: Interval | None
    seeds: int
    """Pairs, or the smaller side's repeats where none pair."""
    reason: str = ""
    paired: bool = True
    same_devices: bool = True
    needed: int | None = None
    crowded: bool = False
    """It rests on CPU estimates made while others kept the cores busy: its interval tells of them, not of the runs."""

    @property
    def significant(self) -> bool:
        return self.ratio is not None and self.ratio.excludes(1.0) and not self.crowded


@dataclass(frozen=True)
class StageMean:
    """A stage's joules, mean over all runs of the row; `inherited` where other runs paid for all of it."""

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
    """Mean over the runs; None where they have no figure of this measure."""
    interval: Interval | None
    stages: tuple[StageMean, ...]
    own: EnergyFigure
    inherited: EnergyFigure | None
    without_teacher: EnergyFigure
    with_teacher: EnergyFigure
    """As `without_teacher`, what methods are compared by: no setup, and no repeated work unless it was asked for."""
    setup: EnergyFigure | None
    repeated: EnergyFigure | None
    """What `with_teacher` leaves out."""
    whole: EnergyFigure
    """All that was used, own and inherited."""
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
        """Work for it, done where no meter saw it: its joules with the teacher are a lower bound."""
        return tuple(dict.fromkeys(name for run in self.runs for name in run.joules.unmetered))

    @property
    def teacher_share_text(self) -> str:
        """Joules that nobody saw can only add to the teacher's share."""
        return f"{'≥ ' if self.unmetered else ''}{percent_text(self.teacher_share, 0)}"

    @property
    def seeds_text(self) -> str:
        return ", ".join(f"{run.seed}" if run.repeat is None else f"repeat {run.repeat}" for run in self.runs)


@dataclass(frozen=True)
class Comparison:
    name: str
    about: str
    baseline: str
    measure: Measure | None
    """None where no run has a quality figure: then joules alone are compared."""
    rows: tuple[Row, ...]
    incomplete: tuple[IncompleteRun, ...]
    records: tuple[RunRecord, ...]

    def row(self, label: str) -> Row | None:
        return next((row for row in self.rows if row.label == label), None)

    @property
    def methods(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.role == "method")

    @property
    def crowded(self) -> bool:
        """Some of its joules are CPU estimates made while others used the cores: who is cheaper may be their doing."""
        return any(row.with_teacher.crowded for row in self.rows)

    @property
    def about_items(self) -> bool:
        """Quality is a share of right test items, so its interval is the test set's."""
        return any(run.quality and run.quality.result.trials for row in self.rows for run in row.runs)
