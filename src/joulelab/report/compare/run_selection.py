"""The runs of a comparison, selected by names of runs, groups or patterns, from one store or several.

Runs with the same label and settings except the seed are repeats. If runs of one label have different settings, the
settings that differ become part of the label.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulelab.errors import NotFoundError, UsageError
from joulelab.report.compare.comparison import Comparison
from joulelab.report.compare.method_rows import compare
from joulelab.runs.groups import GroupRecord, Member, folders_named, group_records, varying
from joulelab.runs.paths import GroupPaths
from joulelab.runs.record import RunRecord
from joulelab.runs.store import load_readable

# With more differences than this, labels have variant numbers; the section "What differs" lists the settings.
_MOST_IN_A_LABEL = 2
# Settings that distinguish repeats or name a run, and do not change the method.
_NOT_A_METHOD = ("seed", "label", "energy.", "device", "repeat", "warmup")


@dataclass(frozen=True)
class Selection:
    """A group as it is, or an ad hoc group of the named runs."""

    group: GroupRecord
    records: tuple[RunRecord, ...]
    folders: dict[str, Path]
    place: Path | None
    """Directory of the single run or group, where its report is written; None for several."""

    def comparison(self, store: Path, wanted: str | None = None, include_repeated: bool = False) -> Comparison:
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
    return _with_baseline(selection, baseline)


def _whole_group(folder: Path) -> Selection:
    group, records = group_records(folder)
    store = GroupPaths(folder).store
    return Selection(group, tuple(records), {record.run_id: store / record.run_id for record in records}, folder)


def _ad_hoc_group(
    loaded: Sequence[tuple[RunRecord, Path]], groups: Sequence[GroupRecord], place: Path | None
) -> Selection:
    records = _with_distinct_labels([record for record, _ in loaded])
    labels = list(dict.fromkeys(record.label for record in records))
    known = [group.baseline for group in groups if group.baseline in labels]
    members = [
        Member(label=r.label, seed=int(r.spec.get("seed", 0)), experiment=r.name, spec=r.spec, run_id=r.run_id)
        for r in records
    ]
    group = GroupRecord(
        group_id="comparison",
        name=" vs ".join(labels) if len(labels) <= 3 else f"{len(labels)} methods compared",
        about="",
        baseline=known[0] if known else labels[0],
        created_at=max(record.created_at for record in records),
        members=tuple(members),
        varying=varying([member.spec for member in members]),
    )
    folders = {record.run_id: folder for record, (_, folder) in zip(records, loaded, strict=True)}
    return Selection(group, tuple(records), folders, place)


def _with_distinct_labels(records: Sequence[RunRecord]) -> list[RunRecord]:
    added = {id(record): "" for record in records}
    for label in dict.fromkeys(record.label for record in records):
        namesakes = [record for record in records if record.label == label]
        found = varying([record.spec for record in namesakes])
        differing = {key: values for key, values in found.items() if _changes_method(key, values)}
        settings = [
            tuple((key, _value(values[place])) for key, values in differing.items()) for place in range(len(namesakes))
        ]
        variants = list(dict.fromkeys(settings))
        for record, setting in zip(namesakes, settings, strict=True):
            if len(differing) <= _MOST_IN_A_LABEL:
                added[id(record)] = "".join(f", {key}={value}" for key, value in setting)
            else:
                added[id(record)] = f", variant {variants.index(setting) + 1}"
    return [
        record.model_copy(update={"label": record.label + added[id(record)]}) if added[id(record)] else record
        for record in records
    ]


def _changes_method(key: str, values: Sequence[Any]) -> bool:
    """A setting that older records lack is not a difference between methods."""
    known = [value for value in values if value is not None]
    return not key.startswith(_NOT_A_METHOD) and any(value != known[0] for value in known)


def _value(value: Any) -> str:
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
    group = selection.group.model_copy(update={"baseline": match})
    return Selection(group, records, selection.folders, selection.place)
