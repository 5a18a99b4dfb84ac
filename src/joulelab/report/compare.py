"""Runs side by side: one row per method, each set against the baseline seed by seed and item by item.

Quality and energy come with what makes them comparable: intervals on the test set, the spread over seeds, the joules
that others paid for. A run that did not finish stands in a list of its own, with the joules it took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from joulelab.errors import UsageError
from joulelab.meter.figures import missing
from joulelab.report.compare_rows import make_row, only_infers
from joulelab.report.comparison import (
    ComparedRun,
    Comparison,
    IncompleteRun,
)
from joulelab.report.joules import all_parts, method_parts, run_joules
from joulelab.report.quality import Measure, Quality, common_measure, measure_names, quality_of, result_of
from joulelab.runs.groups import GroupRecord
from joulelab.runs.json_file import read_json
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord


def compare(
    group: GroupRecord,
    records: Sequence[RunRecord],
    store: Path,
    folders: Mapping[str, Path] | None = None,
    wanted: str | None = None,
    include_repeated: bool = False,
) -> Comparison:
    """One row per label that has a finished run, in the order of the group's members.

    `folders` says where runs lie that are not in the store; `wanted` names the quality that is compared.
    `include_repeated` counts work that was done again after an interruption as part of the method.
    """
    done = [record for record in records if record.status == "done"]
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


def compared_runs(
    record: RunRecord, folder: Path, measure: Measure | None, include_repeated: bool = False
) -> list[ComparedRun]:
    """One; of a program that was measured several times, one for each of these repeats."""
    repeats = [stage.repeat for stage in record.stages if stage.repeat is not None and stage.status == "done"]
    numbers = repeats if len(repeats) > 1 else [None]
    return [_compared_run(record, folder, measure, number, include_repeated) for number in numbers]


def _compared_run(
    record: RunRecord, folder: Path, measure: Measure | None, repeat: int | None, include_repeated: bool
) -> ComparedRun:
    joules = run_joules(record, repeat, include_repeated)
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
    """A GPU's name says which card it is; other sensors are told apart by host and processor."""
    if "GPU-" in source:
        return ""
    path = RunPaths(folder).environment
    processor = read_json(path).get("cpu", {}).get("model", "") if path.exists() else ""
    return f"{'/'.join(sorted({attempt.host for attempt in record.attempts}))} {processor}"


def seed_of(record: RunRecord) -> int:
    return int(record.spec.get("seed", 0))


def _incomplete(group: GroupRecord, records: Sequence[RunRecord]) -> tuple[IncompleteRun, ...]:
    found = [
        IncompleteRun(record.run_id, record.label, seed_of(record), _why_incomplete(record), run_joules(record).own)
        for record in records
        if record.status != "done"
    ]
    started = {record.run_id for record in records}
    absent = [member for member in group.members if member.run_id is None or member.run_id not in started]
    never = missing("the run has not started")
    found += [IncompleteRun(member.run_id, member.label, member.seed, "not started", never) for member in absent]
    return tuple(found)


def _why_incomplete(record: RunRecord) -> str:
    return f"{record.status}: {record.error.message}" if record.error else record.status
