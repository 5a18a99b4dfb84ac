"""Groups: several runs that belong together (a comparison, repeats, a sweep), each of them a normal run."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from joulelab import clock
from joulelab.errors import ConfigError, CorruptedFile, NotFoundError, UsageError, refuse_all
from joulelab.meter.figures import Frozen
from joulelab.runs.attempt import create_run
from joulelab.runs.context import Progress
from joulelab.runs.execute import execute
from joulelab.runs.lock import FolderLocked, holding, is_held, newest_lease
from joulelab.runs.paths import GROUPS_FOLDER, GroupPaths, RunPaths, make_folder, read_json, write_json
from joulelab.runs.record import RunRecord
from joulelab.runs.spec import (
    Checks,
    RunSpec,
    Section,
    check,
    explain,
    in_current_names,
    merge,
    nest,
    overlay,
    read_experiment,
    refuse_unused,
    still_describes,
)
from joulelab.runs.store import find_folder, load_readable, load_record, run_folders, stores_of

_KEYS = (
    "a group has about, baseline and members; a member has experiment, seeds and overrides (a label goes into "
    "overrides); see `joulelab run demo --dry-run`"
)


class MemberSpec(Section):
    """One experiment of the group, run once per seed."""

    experiment: str
    """Name of an experiment, or a YAML file; a relative path is resolved against the group's file first."""
    seeds: tuple[int, ...] = (0,)
    """One run per seed."""
    overrides: dict[str, Any] = {}
    """Settings that differ from the experiment's file."""


class GroupSpec(Section):
    """An experiment file with `members` is a group."""

    name: str
    """Name of the group."""
    about: str = ""
    """One sentence on what is compared."""
    members: tuple[MemberSpec, ...]
    """The runs, in order; later ones reuse artifacts of earlier ones."""
    baseline: str
    """Label of the method that the others are compared with."""


class Member(Frozen):
    label: str
    seed: int
    experiment: str
    spec: dict[str, Any]
    run_id: str | None = None


class GroupRecord(Frozen):
    schema_version: int = 1
    group_id: str
    name: str
    about: str
    baseline: str = ""
    """Label that the others are compared with; empty for a sweep, which has no baseline."""
    sweep: bool = False
    """Members are one experiment under several settings, distinguished by `label`; seeds are repeats."""
    created_at: str
    members: tuple[Member, ...]
    varying: dict[str, list[Any]]
    """Settings that differ between members, with the values they take."""

    @property
    def compares_inference(self) -> bool:
        """Whether it is a group of `joulelab infer` with several models."""
        return self.sweep and all(member.spec.get("pipeline") == "infer" for member in self.members)


def is_group(settings: Mapping[str, Any]) -> bool:
    return "members" in settings


def check_group(
    settings: Mapping[str, Any],
    overrides: Mapping[str, Any],
    checks: Checks = lambda spec: (),
    quick_checks: Checks | None = None,
) -> tuple[GroupSpec, list[RunSpec]]:
    """The group and the specs of its members. Settings, with the `quick_checks` of a member with wrong ones, and then
    `checks` of every member together with the baseline, are checked before anything starts; all problems are one error.
    """
    try:
        group = GroupSpec.model_validate_json(json.dumps(settings, default=str))
    except ValidationError as error:
        raise explain(error, GroupSpec, _KEYS) from None
    runs = [(member, seed) for member in group.members for seed in member.seeds]
    specs: list[RunSpec] = refuse_all(
        partial(_member_spec, member, seed, overrides, quick_checks or checks) for member, seed in runs
    )
    if not specs:
        raise ConfigError(f"group {group.name} has no members")
    whole = [partial(_require_baseline, group, specs), partial(refuse_unused, overrides, specs)]
    refuse_all([*whole, *(found for spec in specs for found in checks(spec))])
    settings_of = [merge(read_experiment(member.experiment), member.overrides) for member in group.members]
    if not all(still_describes(one, in_current_names(overrides, one.get("pipeline"))) for one in settings_of):
        group = group.model_copy(update={"about": ""})
    return group, specs


def _member_spec(member: MemberSpec, seed: int, overrides: Mapping[str, Any], checks: Checks) -> RunSpec:
    merged = merge(merge(read_experiment(member.experiment), member.overrides), overrides)
    return check(merge(merged, {"seed": seed}), checks)


def _require_baseline(group: GroupSpec, specs: Sequence[RunSpec]) -> None:
    labels = list(dict.fromkeys(label_of(spec) for spec in specs))
    if group.baseline not in labels:
        raise ConfigError(
            f"baseline: no member of group {group.name} has the label '{group.baseline}'",
            f"labels: {', '.join(labels)}; nothing was started",
        )


def label_of(spec: RunSpec) -> str:
    """Name of the run's method in comparisons."""
    return spec.label or spec.name


def create_group(
    store: Path, specs: Sequence[RunSpec], *, name: str, about: str = "", baseline: str = "", sweep: bool = False
) -> GroupPaths:
    """Create the group's folder; the runs of its members are created when they start."""
    paths = GroupPaths(make_folder(store / GROUPS_FOLDER, name))
    members = [
        Member(label=label_of(spec), seed=spec.seed, experiment=spec.name, spec=spec.model_dump(mode="json"))
        for spec in specs
    ]
    record = GroupRecord(
        group_id=paths.group_id,
        name=name,
        about=about,
        baseline=baseline,
        sweep=sweep,
        created_at=clock.iso(clock.now().wall_s),
        members=tuple(members),
        varying=varying([member.spec for member in members]),
    )
    write_json(paths.record, record)
    return paths


def varying(specs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    flat = [_flatten(spec) for spec in specs]
    keys = sorted({key for spec in flat for key in spec} - {"about", "name", "tags"})
    values = {key: [spec.get(key) for spec in flat] for key in keys}
    return {key: listed for key, listed in values.items() if any(value != listed[0] for value in listed)}


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def load_group(folder: Path) -> GroupRecord:
    try:
        return GroupRecord.model_validate(read_json(GroupPaths(folder).record))
    except ValidationError as error:
        raise CorruptedFile(
            f"{folder}/group.json does not match this version: {error.error_count()} invalid fields",
            "restore it from a backup; its runs are not affected",
        ) from None


def group_yaml(group: GroupRecord) -> str:
    """The group as an experiment file in its folder: `joulelab run group.yaml` runs it again.

    A member that was started refers to the settings of its run, relative to the file; another one to its experiment.
    """
    members: list[dict[str, Any]] = []
    for member in group.members:
        named: dict[str, Any] = {"experiment": f"../../{member.run_id}/config.yaml"}
        if member.run_id is None:
            overrides = {key: value for key, value in member.spec.items() if key not in ("name", "about", "seed")}
            named = {"experiment": member.experiment, "overrides": overrides}
        members.append({**named, "seeds": [member.seed]})
    baseline = group.baseline or group.members[0].label
    settings = {"name": group.name, "about": group.about, "baseline": baseline, "members": members}
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


RunMember = Callable[[RunPaths], RunRecord]


def execute_group(paths: GroupPaths, progress: Progress, run_member: RunMember | None = None) -> list[RunRecord]:
    """Run every member that is not done, in order; an interrupted member is resumed.

    `run_member` replaces running it in this process. The first failure ends the group.
    """
    with holding(paths.folder):
        return _execute_members(paths, progress, run_member)


def _execute_members(paths: GroupPaths, progress: Progress, run_member: RunMember | None) -> list[RunRecord]:
    run_here: RunMember = run_member or (lambda run: execute(run, progress))
    group = load_group(paths.folder)
    records = []
    for number, member in enumerate(group.members):
        run = member_paths(paths, member)
        record = load_record(run.folder) if run is not None else None
        if record is not None and record.status == "done":
            records.append(record)
            continue
        if run is not None and is_held(run.folder):
            raise FolderLocked(run.folder, newest_lease(run.folder)[1])
        if run is None:
            group, run = _with_run(paths, group, number)
        progress.write(f"[{number + 1}/{len(group.members)}] {member.label}, seed {member.seed}")
        records.append(run_here(run))
    return records


def queue_members(paths: GroupPaths) -> list[RunPaths]:
    """Create the folders of all members in advance: the jobs of an array start them concurrently, in any order."""
    runs = []
    with holding(paths.folder):
        group = load_group(paths.folder)
        for number, member in enumerate(group.members):
            run = member_paths(paths, member)
            if run is None:
                group, run = _with_run(paths, group, number)
            runs.append(run)
    return runs


def _with_run(paths: GroupPaths, group: GroupRecord, number: int) -> tuple[GroupRecord, RunPaths]:
    """Create the run of one member; returns the updated group and the run."""
    member = group.members[number]
    run = create_run(paths.store, check(member.spec), group.group_id)
    members = list(group.members)
    members[number] = member.model_copy(update={"run_id": run.run_id})
    updated = group.model_copy(update={"members": tuple(members)})
    write_json(paths.record, updated)
    return updated, run


def member_paths(group: GroupPaths, member: Member) -> RunPaths | None:
    """None for a member that has not started."""
    if member.run_id is None or not (group.store / member.run_id / "run.json").exists():
        return None
    return RunPaths(group.store / member.run_id)


def group_records(folder: Path) -> tuple[GroupRecord, list[RunRecord]]:
    """The group and the records of those members that have started."""
    group = load_group(folder)
    started = [member_paths(GroupPaths(folder), member) for member in group.members]
    found = load_readable([paths.folder for paths in started if paths is not None])
    return group, [record for _, record in found]


# Runs as named on a command line: ids, parts of ids, folders, `last`, patterns; a group stands for all its members.


def is_pattern(name: str) -> bool:
    """Shell wildcards, unless a run folder has exactly that name."""
    named = any((Path(name) / record).exists() for record in ("run.json", "group.json"))
    return not named and any(mark in name for mark in "*?[")


def folders_named(store: Path, name: str) -> list[Path]:
    """The run or group of that name, or all runs that match a pattern: 'demo-kd-*'."""
    if not is_pattern(name):
        return [find_folder(store, name)]
    matches = [folder for folder in run_folders(store) if fnmatch.fnmatch(folder.name, name)]
    if not matches:
        raise NotFoundError(f"no run matches '{name}' under {store.absolute()}", "`joulelab runs` lists all runs")
    return matches


def run_folders_of(store: Path, names: Sequence[str]) -> list[Path]:
    """Every named run, directly or through its group, once, in the order of the names."""
    runs: dict[Path, Path] = {}  # by folder without links: a run outside the store (`--run-dir`) is a link in it
    for folder in (folder for name in names for folder in folders_named(store, name)):
        if not (folder / "group.json").exists():
            runs.setdefault(folder.resolve(), folder)
            continue
        members = [GroupPaths(folder).store / member.run_id for member in load_group(folder).members if member.run_id]
        started = [member for member in members if (member / "run.json").exists()]
        if not started:
            raise UsageError(f"no run of group {folder.name} is in the store", "name a run")
        for member in started:
            runs.setdefault(member.resolve(), member)
    return list(runs.values())


def group_folders_of(store: Path, names: Sequence[str]) -> list[Path]:
    folders = (folder for name in names for folder in folders_named(store, name))
    return [folder for folder in dict.fromkeys(folders) if (folder / "group.json").exists()]


def with_ancestors(folders: Sequence[Path]) -> list[Path]:
    """The runs, and recursively the runs of the same store whose artifacts they used."""
    found = dict.fromkeys(folders)
    waiting = list(folders)
    while waiting:
        folder = waiting.pop()
        record = load_record(folder)
        for ancestor, store in product(record.inherited, stores_of(folder, record.store)):
            maker = store / ancestor.made_by
            if maker not in found and (maker / "run.json").exists():
                found[maker] = None
                waiting.append(maker)
    return list(found)


Axes = Mapping[str, Sequence[Any]]
"""key.path -> the values it takes."""


def sweep_specs(settings: Mapping[str, Any], axes: Axes, repeats: int) -> list[RunSpec]:
    """The members of a sweep in the order in which they run.

    All configurations once, then all again with the next seed: drift over hours (temperature, other jobs) then affects
    every configuration equally, and an interrupted sweep has complete rounds.
    """
    if repeats < 1:
        raise UsageError(f"--repeats {repeats}; expected at least 1", "each repeat has its own seed")
    _require_distinct(axes)
    first = settings.get("seed", 0)
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [
        check(_member(settings, point, first + number if isinstance(first, int) else first))
        for number in range(repeats)
        for point in points
    ]


def _member(settings: Mapping[str, Any], point: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    member = merge(settings, {"seed": seed, "label": point_label(point)} if point else {"seed": seed})
    chosen: dict[str, Any] = {}
    for key, value in point.items():
        chosen = overlay(chosen, nest(key, value))
    return overlay(member, in_current_names(chosen, chosen.get("pipeline", member.get("pipeline"))))


def point_label(point: Mapping[str, Any]) -> str:
    """`batch_size=8, precision=bf16`"""
    return ", ".join(f"{short_name(key, point)}={value}" for key, value in point.items())


def short_name(key: str, keys: Mapping[str, Any] | Sequence[str]) -> str:
    """The last part of a setting's name if it is unique among the keys."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def _require_distinct(axes: Axes) -> None:
    for key, values in axes.items():
        if key == "seed":
            raise UsageError(
                "seed cannot be an axis: repeats differ in their seed", "use --repeats N, and --seed for the first seed"
            )
        repeated = [value for number, value in enumerate(values) if value in values[:number]]
        if repeated:
            raise ConfigError(f"{key}: the value {repeated[0]} is given twice", "use --repeats N for repeats")
