"""Comparison of runs: their selection by name, and one row per method with its difference from the baseline.

Runs are named by id, group or pattern, in one store or several. Runs with the same label and settings except the seed
are repeats. If runs of one label have different settings, the settings that differ become part of the label.

Differences are by seed and by test item. Quality and energy have intervals over the test set and over seeds, and
inherited energy is included. Runs that did not finish are listed separately with the energy they used.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from joulelab.errors import NotFoundError, UsageError
from joulelab.meter.figures import EnergyFigure, ErrorComponent, missing, total
from joulelab.report.compare.comparison import (
    VARIANT,
    ComparedRun,
    Comparison,
    IncompleteRun,
    Role,
    Row,
    StageMean,
    one_of_each_record,
)
from joulelab.report.compare.differences import energy_ratio, quality_difference
from joulelab.report.compare.quality import (
    Measure,
    Quality,
    common_measure,
    measure_names,
    quality_of,
    result_of,
    share_interval,
)
from joulelab.report.energy_sums import (
    Part,
    PartKind,
    all_parts,
    is_teacher,
    known_sum,
    mean_figure,
    method_parts,
    run_energy,
)
from joulelab.runs.environment import read_snapshot
from joulelab.runs.groups import GroupRecord, Member, folders_named, group_records, is_pattern, varying
from joulelab.runs.paths import GroupPaths, RunPaths
from joulelab.runs.record import RunRecord, StageRecord, StageRole, repeat_mean
from joulelab.runs.store import load_readable
from joulelab.stats import Interval, mean_t

# Energy of a method by line: one per stage or inherited artifact, mean over its runs, so that the lines add up.


Line = tuple[str, bool]
"""Its name, and whether it is a line of inherited work."""


def stage_means(runs: Sequence[ComparedRun]) -> tuple[StageMean, ...]:
    """Inherited work first, then own stages in order.

    Work that one seed did and the others inherit is one line: which of them did it is chance. A run without the work
    counts as 0 J of it; a run without any energy is in no mean. The repeats of a measured program are one line with the
    interval that `measure` prints; their setup was done once for all of them.
    """
    bills = [run.all_parts for run in runs]
    repeats = repeat_mean(*(run.record for run in one_of_each_record(runs)))
    ids = [run.record.run_id for run in runs]
    first = [ids.index(run_id) for run_id in dict.fromkeys(ids)]
    lines: dict[Line, dict[int, list[Part]]] = {}
    joined = _joined(bills)
    for place, parts in enumerate(bills):
        for part in parts if place in first else method_parts(parts):
            line = (part.stage, True) if part.inherited else (joined.get(part.stage, part.stage), part.stage in joined)
            lines.setdefault(line, {}).setdefault(place, []).append(part)
    billed = [place for place, run in enumerate(runs) if run.joules.with_teacher.energy_j is not None]
    counted = billed or range(len(runs))
    once = [place for place in counted if place in first]
    means = []
    for (name, _), by_run in lines.items():
        figure = _mean(by_run, counted if _kind(by_run) == "work" else once)
        if repeats is not None and all(part.is_repeat for parts in by_run.values() for part in parts):
            figure = repeats.energy
        means.append(StageMean(name, _all_inherited(by_run), figure, _kind(by_run)))
    return tuple(sorted(means, key=lambda mean: not mean.inherited))


def _joined(bills: Sequence[Sequence[Part]]) -> dict[str, str]:
    """Own stage -> line of the inherited work that it equals; an inherited artifact may combine several stages.

    Not if one run has both: a student's training differs from that of the student it starts from.
    """
    inherited = {part.stage: part.stages for bill in bills for part in bill if part.inherited}
    for bill in bills:
        names, own = ({part.stage for part in bill if part.inherited is paid} for paid in (True, False))
        inherited = {name: stages for name, stages in inherited.items() if name not in names or own.isdisjoint(stages)}
    return {stage: name for name, stages in inherited.items() for stage in stages} | {name: name for name in inherited}


def _kind(by_run: Mapping[int, Sequence[Part]]) -> PartKind:
    return next(iter(by_run.values()))[0].kind


def _all_inherited(by_run: Mapping[int, Sequence[Part]]) -> bool:
    return all(part.inherited for parts in by_run.values() for part in parts)


def _mean(by_run: Mapping[int, Sequence[Part]], billed: Sequence[int]) -> EnergyFigure:
    """Work that several runs share, by its key, is one measurement: its error does not average out."""
    once: dict[object, list[EnergyFigure]] = {}
    for place, parts in by_run.items():
        if place in billed:
            keys = frozenset(part.key for part in parts)
            figures = [part.figure for part in parts]
            known = figures[0] if len(figures) == 1 else known_sum(figures)
            once.setdefault(place if None in keys else keys, []).append(known)
    if not once:
        return next(iter(by_run.values()))[0].figure
    mean = total([figure for figures in once.values() for figure in figures])
    if mean.energy_j is None:
        return mean
    errors = total([figures[0].scaled(len(figures)) for figures in once.values()]).scaled(1 / len(billed)).errors
    scaled = mean.scaled(1 / len(billed)).model_copy(update={"errors": (), "half_width_j": None})
    return scaled.with_errors(*errors)


_WITH_TEACHER = attrgetter("joules.with_teacher", "joules.mixed", "joules.incomplete")
_WITHOUT_TEACHER = attrgetter("joules.without_teacher", "joules.mixed_without", "joules.incomplete_without")
Rate = Literal["samples_per_s", "j_per_sample", "tokens_per_s", "j_per_token", "mean_power_w"]


def make_row(baseline_label: str, runs: list[ComparedRun], baseline: list[ComparedRun], trained: bool = True) -> Row:
    """`trained`: some row of the comparison trained a model; rows that only use a model are not ranked against it."""
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
        setup=_mean_of_kind(records, "setup"),
        repeated=_mean_of_kind(records, "repeated"),
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
    """Whether the run measures the serving cost of a model and trains none."""
    return any(stage.role == "inference" for stage in record.stages) and training_stage(record) is None


def _interval(runs: list[ComparedRun], values: list[float]) -> Interval | None:
    """Over the test set if quality is a share of its items; else over the repeats."""
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
    """Mean over the runs; for a measured program, the mean and Student's interval that `measure` prints."""
    repeats = repeat_mean(*(run.record for run in one_of_each_record(runs)))
    if repeats is not None and not any(run.record.inherited for run in runs):
        return repeats.energy
    reused = [part for part in reused_parts(runs) if with_teacher or not part.is_teachers]
    return mean_with_reused(sums, [part.figure.half_width_j or 0.0 for part in reused])


def reused_parts(runs: Sequence[ComparedRun]) -> list[Part]:
    """Parts of the first run that all others contain too: each of them is one measurement."""
    common = set.intersection(*({part.key for part in run.parts} for run in runs)) - {None}
    return [part for part in runs[0].parts if part.key in common]


def mean_with_reused(sums: Sequence[EnergyFigure], reused_half_widths_j: Sequence[float]) -> EnergyFigure:
    """Mean of the runs' sums. The errors of n independent measurements shrink by sqrt(n) in a mean; the error of work
    that all runs reuse is the same in each sum and does not, so its missing part is added."""
    mean = mean_figure(sums)
    if mean.half_width_j is None:
        return mean
    # The mean of n sums contains the reused error h as h / sqrt(n), as if it were independent. It
    # should be h: sqrt((h / sqrt(n))^2 + (rest h)^2) = h for rest = sqrt(1 - 1/n).
    rest = math.sqrt(1 - 1 / len(sums))
    reused_j = math.hypot(*(rest * half_width_j for half_width_j in reused_half_widths_j))
    return mean.with_errors(ErrorComponent(name="reused work", joules=(reused_j,)))


def _mean_of_kind(runs: list[ComparedRun], kind: Literal["setup", "repeated"]) -> EnergyFigure | None:
    """Mean over all runs; a run without any counts as 0 J."""
    found = [figure for run in runs if (figure := getattr(run.joules, kind)) is not None]
    return total(found).scaled(1 / len(runs)) if found else None


def _teacher_share(runs: list[ComparedRun]) -> float | None:
    whole_j = [run.joules.with_teacher.energy_j for run in runs]
    if any(energy_j is None for energy_j in whole_j):
        return None
    sum_j = sum(energy_j or 0.0 for energy_j in whole_j)
    return sum(run.joules.teacher_j for run in runs) / sum_j if sum_j else None


def training_stage(record: RunRecord) -> StageRecord | None:
    """The main training: the student's (also a model without a teacher), else the teacher's."""
    return next((found for role in ("student", "teacher") if (found := last_training(record, role))), None)


def training_stage_name(record: RunRecord) -> str:
    stage = training_stage(record)
    return stage.name if stage else ""


def last_training(record: RunRecord, role: StageRole) -> StageRecord | None:
    """Earlier trainings of the same model, such as SFT before distillation, only prepare the last one."""
    trained = [stage for stage in record.stages if (stage.role, stage.activity) == (role, "train")]
    return next((stage for stage in reversed(trained) if stage.is_method_work), None)


def training_energy(runs: Sequence[ComparedRun], item: Literal["sample", "token"]) -> EnergyFigure | None:
    """Energy per item, mean over the runs' main training stages; None if no run counted items."""
    stages = [training_stage(run.record) for run in runs]
    found = [figure for stage in stages if stage and (figure := stage.energy_per(item)) is not None]
    return mean_figure(found) if found else None


def training_mean(runs: list[ComparedRun] | tuple[ComparedRun, ...], what: Rate) -> float | None:
    """Mean over the runs' main training stage."""
    stages = [training_stage(run.record) for run in runs]
    values = [float(value) for stage in stages if stage and (value := getattr(stage, what)) is not None]
    return sum(values) / len(values) if values else None


def compare(
    group: GroupRecord,
    records: Sequence[RunRecord],
    store: Path,
    folders: Mapping[str, Path] | None = None,
    wanted: str | None = None,
    include_repeated: bool = False,
) -> Comparison:
    """One row per label that has a finished run, in the order of the group's members.

    `folders` has the directories of runs outside the store; `wanted` names the quality metric to compare.
    `include_repeated` counts work repeated after an interruption as part of the method.
    """
    others = not_methods(records)
    done = [record for record in records if record.status == "done" and record.run_id not in others]
    measure = common_measure(done, wanted)
    if wanted is not None and measure is None:
        known = ", ".join(measure_names(done)) or "none"
        raise UsageError(f"no run has a result named '{wanted}'", f"results of these runs: {known}")
    finished: dict[str, list[ComparedRun]] = {}
    for record in done:
        folder = (folders or {}).get(record.run_id, store / record.run_id)
        finished.setdefault(record.label, []).extend(compared_runs(record, folder, measure, include_repeated))
    baseline = finished.get(group.baseline, [])
    labels = list(dict.fromkeys([*(member.label for member in group.members), *finished]))
    trained = any(not only_infers(record) for record in done)
    return Comparison(
        name=group.name,
        about=group.about,
        baseline=group.baseline,
        measure=measure,
        rows=tuple(
            make_row(group.baseline, finished[label], baseline, trained) for label in labels if label in finished
        ),
        incomplete=_incomplete(group, records),
        records=tuple(records),
    )


def not_methods(records: Sequence[RunRecord]) -> dict[str, str]:
    """Id -> reason, of runs that are no method: serving runs among others, and runs that did a part of the work for
    others: shards, and runs that ended before there was a model. If all runs are of the last kind, they are compared
    by energy."""
    parts = {record.run_id: record.part_of_work for record in records if record.part_of_work}
    alike = len(parts) == len(records)
    found = {
        run_id: f"part of the work of other runs: {part}"
        for run_id, part in parts.items()
        if part.startswith("shard ") or not alike
    }
    serving = [record.run_id for record in records if is_serving(record)]
    if len(serving) < len(records):
        found |= dict.fromkeys(serving, "a serving run is no method")
    return found


def is_serving(record: RunRecord) -> bool:
    """Whether the run put a load on a server: its energy is that of a load whose length the user chose."""
    return record.spec.get("pipeline") == "serving"


def is_about_inference(group: GroupRecord) -> bool:
    """Whether a group's runs measured inference or loads on servers: they have tables by row, and no ratios of energy,
    which follows from how long they were measured."""
    loads = [member.spec.get("pipeline") == "serving" for member in group.members]
    return group.compares_inference or (group.group_id != AD_HOC and bool(loads) and all(loads))


def compared_runs(
    record: RunRecord, folder: Path, measure: Measure | None, include_repeated: bool = False
) -> list[ComparedRun]:
    """One, or one per repeat of a measured program."""
    repeats = [stage.repeat for stage in record.stages if stage.repeat is not None and stage.status == "done"]
    numbers = repeats if len(repeats) > 1 else [None]
    return [_compared_run(record, folder, measure, number, include_repeated) for number in numbers]


def _compared_run(
    record: RunRecord, folder: Path, measure: Measure | None, repeat: int | None, include_repeated: bool
) -> ComparedRun:
    joules = run_energy(record, repeat, include_repeated)
    parts = all_parts(record, repeat)
    return ComparedRun(
        record=record,
        folder=folder,
        seed=seed_of(record),
        quality=_quality(record, measure),
        joules=joules,
        parts=method_parts(parts, include_repeated),
        all_parts=parts,
        repeat=repeat,
        devices=frozenset(f"{_machine(record, folder, source)} {source}" for source in joules.own.sources),
    )


def _quality(record: RunRecord, measure: Measure | None) -> Quality | None:
    if measure is None:
        return None
    found = quality_of(record, measure)
    result = found.result if found else result_of(record, measure)
    return Quality(measure, result) if result else None


def _machine(record: RunRecord, folder: Path, source: str) -> str:
    """A GPU's UUID identifies the card; other sensors are identified by host and processor."""
    if "GPU-" in source:
        return ""
    processor = read_snapshot(RunPaths(folder)).get("cpu", {}).get("model", "")
    return f"{'/'.join(sorted({attempt.host for attempt in record.attempts}))} {processor}"


def seed_of(record: RunRecord) -> int:
    return int(record.spec.get("seed", 0))


def _incomplete(group: GroupRecord, records: Sequence[RunRecord]) -> tuple[IncompleteRun, ...]:
    others = not_methods(records)
    found = [
        IncompleteRun(record.run_id, record.label, seed_of(record), _why_incomplete(record, others), record.best_energy)
        for record in records
        if record.status != "done" or record.run_id in others
    ]
    started = {record.run_id for record in records}
    absent = [member for member in group.members if member.run_id is None or member.run_id not in started]
    never = missing("the run has not started")
    found += [IncompleteRun(member.run_id, member.label, member.seed, "not started", never) for member in absent]
    return tuple(found)


def _why_incomplete(record: RunRecord, others: Mapping[str, str]) -> str:
    if record.status == "done":
        return others[record.run_id]
    return f"{record.status}: {record.error.message}" if record.error else record.status


# With more differences than this, labels have variant numbers; the section "What differs" lists the settings.
_MOST_IN_A_LABEL = 2
# Settings that distinguish repeats or name a run, and do not change the method.
_NOT_A_METHOD = ("seed", "label", "energy.", "device", "repeat", "warmup")


AD_HOC = "comparison"
"""Id of the group of runs that were named together."""


@dataclass(frozen=True)
class Selection:
    """A group as it is, or an ad hoc group of the named runs."""

    group: GroupRecord
    records: tuple[RunRecord, ...]
    folders: dict[str, Path]
    place: Path | None
    """Directory of the single run or group, where its report is written; None for several."""
    named: frozenset[str] = frozenset()
    """Ids of the runs that were named one by one, not by a pattern or their group."""

    def comparison(self, store: Path, wanted: str | None = None, include_repeated: bool = False) -> Comparison:
        """A run that is no method is listed as not compared; it is refused if it was named, or if there is nothing
        else."""
        others = not_methods(self.records)
        nothing_else = self.group.group_id == AD_HOC and len(others) == len(self.records)
        only_serving = all(map(is_serving, self.records))
        for record in self.records:
            refused = record.run_id in others and (record.run_id in self.named or nothing_else)
            if is_serving(record) and (refused or only_serving):
                raise UsageError(
                    f"{record.run_id} is a serving run: its energy is that of a load whose length was chosen, so a "
                    "ratio to other runs has no meaning; expected runs that trained or evaluated a model",
                    f"its table: joulelab show {record.run_id}",
                )
            if refused:
                raise UsageError(
                    f"{record.run_id} is a part of the work of other runs ({record.part_of_work}); expected runs that "
                    "trained a model",
                    "name the runs that used it: their energy includes it",
                )
        return compare(self.group, self.records, store, self.folders, wanted, include_repeated)


def select(store: Path, names: Sequence[str], baseline: str | None = None) -> Selection:
    found = [folder for name in names for folder in folders_named(store, name)]
    folders = list(dict.fromkeys(found))
    if len(folders) == 1 and GroupPaths(folders[0]).record.exists():
        return _with_baseline(_whole_group(folders[0]), baseline)
    groups: list[GroupRecord] = []
    loaded: list[tuple[RunRecord, Path]] = []
    for name in names:
        matching = folders_named(store, name)
        for folder in [folder for folder in matching if GroupPaths(folder).record.exists()]:
            group, records = group_records(folder)
            groups.append(group)
            loaded += [(record, GroupPaths(folder).store / record.run_id) for record in records]
        runs = [folder for folder in matching if not GroupPaths(folder).record.exists()]
        loaded += [(record, folder) for folder, record in load_readable(runs)]
    unique = {record.run_id: (record, folder) for record, folder in loaded}
    if not unique:
        raise NotFoundError("none of these groups has a run yet", "`joulelab runs` lists runs and groups")
    selection = _ad_hoc_group(list(unique.values()), groups, folders[0] if len(folders) == 1 else None)
    named = frozenset(folder.name for name in names if not is_pattern(name) for folder in folders_named(store, name))
    return _with_baseline(replace(selection, named=named), baseline)


def _whole_group(folder: Path) -> Selection:
    group, records = group_records(folder)
    store = GroupPaths(folder).store
    return Selection(group, tuple(records), {record.run_id: store / record.run_id for record in records}, folder)


def _ad_hoc_group(
    loaded: Sequence[tuple[RunRecord, Path]], groups: Sequence[GroupRecord], place: Path | None
) -> Selection:
    no_methods = not_methods([record for record, _ in loaded])
    others = [record for record, _ in loaded if record.run_id in no_methods]
    compared = _with_distinct_labels([record for record, _ in loaded if record.run_id not in no_methods]) or others
    labels = list(dict.fromkeys(record.label for record in compared))
    known = [group.baseline for group in groups if group.baseline in labels]
    members = [
        Member(label=r.label, seed=int(r.spec.get("seed", 0)), experiment=r.name, spec=r.spec, run_id=r.run_id)
        for r in compared
    ]
    group = GroupRecord(
        group_id=AD_HOC,
        name=" vs ".join(labels) if len(labels) <= 3 else f"{len(labels)} methods compared",
        about="",
        baseline=known[0] if known else labels[0],
        created_at=max(record.created_at for record, _ in loaded),
        members=tuple(members),
        varying=varying([member.spec for member in members]),
    )
    records = tuple({record.run_id: record for record in (*compared, *others)}.values())
    return Selection(group, records, {record.run_id: folder for record, folder in loaded}, place)


def _with_distinct_labels(records: Sequence[RunRecord]) -> list[RunRecord]:
    added = {id(record): "" for record in records}
    for label in dict.fromkeys(record.label for record in records):
        namesakes = [record for record in records if record.label == label]
        found = varying([record.spec for record in namesakes])
        differing = {key: values for key, values in found.items() if _changes_method(key, values)}
        settings = [
            tuple((key, _value(key, values[place])) for key, values in differing.items())
            for place in range(len(namesakes))
        ]
        variants = list(dict.fromkeys(settings))
        for record, setting in zip(namesakes, settings, strict=True):
            if len(differing) <= _MOST_IN_A_LABEL:
                added[id(record)] = "".join(f", {key}={value}" for key, value in setting)
            else:
                added[id(record)] = f"{VARIANT}{variants.index(setting) + 1}"
    return [
        record.model_copy(update={"label": record.label + added[id(record)]}) if added[id(record)] else record
        for record in records
    ]


def _changes_method(key: str, values: Sequence[Any]) -> bool:
    """A setting that older records lack is not a difference between methods."""
    known = [value for value in values if value is not None]
    return not key.startswith(_NOT_A_METHOD) and any(value != known[0] for value in known)


def _value(key: str, value: Any) -> str:
    if key == "command" and value:
        return shlex.join(value)  # of `joulelab measure`, as it was typed
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _with_baseline(selection: Selection, baseline: str | None) -> Selection:
    """By label, or by the id of one of its runs."""
    if baseline is None:
        return selection
    records = selection.records
    match = next((r.label for r in records if baseline in (r.label, r.run_id) or r.run_id.endswith(baseline)), None)
    if match is None:
        labels = ", ".join(dict.fromkeys(record.label for record in records))
        raise UsageError(f"no run is labeled '{baseline}'", f"labels here: {labels}")
    return replace(selection, group=selection.group.model_copy(update={"baseline": match}))
