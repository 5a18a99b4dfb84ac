"""The store: all runs and groups of one directory. Finds them by name, reads their records, compacts their traces."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from joulelab import lookup
from joulelab.errors import CorruptedFile, JoulelabError, NotFoundError, UsageError
from joulelab.meter.figures import COVERED, EnergyFigure, ErrorComponent
from joulelab.meter.recorder import ENDED_SUFFIX, REQUESTS_SUFFIX, local_lock, try_lock
from joulelab.meter.trace import SUFFIX, copy_to_parquet, read_lines
from joulelab.runs.artifacts import ELSEWHERE, RECORDED_FIELDS, Ancestor, Bill
from joulelab.runs.assemble import assemble
from joulelab.runs.attempt_data import drain_ring, idle_power
from joulelab.runs.lock import is_held, unfinished_files
from joulelab.runs.paths import GROUPS_FOLDER, RunPaths, read_json, write_json
from joulelab.runs.record import EnergyByComponent, RunRecord, StageRecord, Totals, Validity, with_bounds_of
from joulelab.runs.validity import Evidence, check_interval, with_answer


def store_root(chosen: Path | None) -> Path:
    return chosen or Path(os.environ.get("JOULELAB_RUNS", "runs"))


def run_files(store: Path) -> dict[str, os.stat_result]:
    """`stat` of every `run.json` by folder name; fast, since a store may hold many thousands."""
    files = {}
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(store) as entries:
        for entry in entries:
            with suppress(OSError):  # not a run, or removed meanwhile
                files[entry.name] = os.stat(f"{entry.path}/run.json")  # noqa: PTH116 (a Path costs more than the call)
    return files


def run_folders(store: Path) -> list[Path]:
    """Run folders, oldest first by the time stamp in their names."""
    return [store / name for name in sorted(run_files(store), key=lambda name: (age(name), name))]


def group_folders(store: Path) -> list[Path]:
    return sorted(
        (path.parent for path in (store / GROUPS_FOLDER).glob("*/group.json")), key=lambda path: age(path.name)
    )


def age(name: str) -> str:
    """Time stamp in a folder name; empty, and sorted first, for folders that users named."""
    match = re.search(r"\d{8}T\d{6}Z-[0-9a-f]{4}$", name)
    return match.group() if match else ""


def find_folder(store: Path, name: str) -> Path:
    """A run or group by path, full id, name, unique beginning or end of the id, or `last` for the latest start.

    An exact name takes precedence over a prefix: `fitnets` is not `fitnets-quick`.
    """
    path = Path(name)
    if (path / "run.json").exists() or (path / "group.json").exists():
        return Path(os.path.abspath(path))  # noqa: PTH100 (`.` and `..` have no name, and a link keeps its own)
    if "/" in name and path.is_dir():
        raise NotFoundError(
            f"{name} is a directory without run.json or group.json",
            "pass a run directory, not the store that contains it",
        )
    folders = [*run_folders(store), *group_folders(store)]
    if name == "last" and folders:
        return _group_or_run(max(folders, key=lambda folder: age(folder.name)))
    matches = [folder for folder in folders if folder.name == name]
    matches = matches or [folder for folder in folders if _run_name(folder) == name]
    if len(matches) != 1:
        matches = [folder for folder in folders if folder.name.startswith(name) or folder.name.endswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(folder.name for folder in matches[-4:])
        raise UsageError(f"'{name}' is ambiguous: {len(matches)} runs match, e.g. {names}", "use more of the id")
    if not folders:
        raise NotFoundError(f"no runs under {store.absolute()}", "set another store with --runs-dir or JOULELAB_RUNS")
    known = {folder.name: folder.name for folder in folders} | {_run_name(folder): folder.name for folder in folders}
    guess = lookup.nearest(name, known)
    newest = sorted((folder.name for folder in folders), key=age)[-3:]
    suggestion = f"did you mean '{known[guess]}'?" if guess else f"the newest are {', '.join(newest)}"
    raise NotFoundError(f"unknown run '{name}'; {suggestion}", "`joulelab runs` lists all runs")


def _group_or_run(folder: Path) -> Path:
    """The group of a run, else the run: the user started the group, whose members have later time stamps."""
    record = folder / "run.json"
    group = read_json(record).get("group") if record.exists() else None
    group_folder = folder.parent / GROUPS_FOLDER / str(group)
    return group_folder if group and (group_folder / "group.json").exists() else folder


def _run_name(folder: Path) -> str:
    """The folder name without its time stamp."""
    return folder.name.removesuffix(age(folder.name)).rstrip("-")


def load_record(folder: Path) -> RunRecord:
    """The record of a run. A run that was never closed is assembled from its trace, and its status is derived."""
    if (folder / "group.json").exists():
        raise UsageError(
            f"{folder.name} is a group; expected a single run", f"`joulelab show {folder.name}` lists its members"
        )
    record = current_record(RunPaths(folder), read_record(RunPaths(folder)))
    resolve = energy_resolver(*stores_of(folder, record.store))
    lineage = (one if one.key in record.made else resolve(one) for one in record.lineage)
    return record.model_copy(update={"lineage": tuple(lineage)})


def load_readable(folders: Sequence[Path]) -> list[tuple[Path, RunRecord]]:
    """The records of several runs. One that cannot be read is reported and skipped, unless no other one can be."""
    found: list[tuple[Path, RunRecord]] = []
    for number, folder in enumerate(folders, 1):
        try:
            found.append((folder, load_record(folder)))
        except CorruptedFile as error:
            if number == len(folders) and not found:
                raise
            print(f"unreadable: {error.message}", file=sys.stderr)
    return found


def searched_store(paths: RunPaths) -> Path:
    """The store in which a run searches for artifacts: its folder may be outside of it (`--run-dir`)."""
    return stores_of(paths.folder, read_record(paths).store)[0]


def stores_of(folder: Path, store: str | None) -> tuple[Path, ...]:
    """Stores that may hold the runs whose artifacts a run used: `store` of its record, and its parent if unpacked."""
    return (Path(store), folder.parent) if store else (folder.parent,)


def read_record(paths: RunPaths) -> RunRecord:
    """The record as last written."""
    try:
        return RunRecord.model_validate(read_json(paths.record))
    except ValidationError as error:
        raise CorruptedFile(
            f"{paths.record} does not match this version of joulelab ({error.error_count()} invalid fields)",
            "the trace of the run is not affected",
        ) from None


def current_record(paths: RunPaths, written: RunRecord) -> RunRecord:
    """The record as it is shown: assembled if it was never closed, converted to current rules if it is older."""
    if written.status != "running":
        return by_current_rules(written)
    if is_held(paths.folder):
        return assemble(paths, "running")
    written = read_record(paths)  # the process may have ended meanwhile: it writes the record before it unlocks
    return assemble(paths, "truncated") if written.status == "running" else by_current_rules(written)


def by_current_rules(record: RunRecord) -> RunRecord:
    """A record of the first release with the derived figures of this version; the energy that it states is kept.

    It divided energy of the covered time by all of the time, subtracted idle power over all of the time and without an
    interval, and graded intervals of lower bounds. `unpack --verify` checks the record as it was written.
    """
    if record.method_version > 1 or record.totals is None:
        return record
    totals, error_rel = record.totals, _idle_error_rel(record.totals)
    energy = with_bounds_of(totals.components, [stage.energy for stage in record.stages if not stage.outside_totals])
    figure, best = energy.under_policy(totals.policy), energy.best(totals.policy)
    above_idle = _above_idle(totals.figure, totals.above_idle_j, error_rel)
    updated = {
        **{name: getattr(energy, name) for name in EnergyByComponent.model_fields},
        "figure": totals.figure.model_copy(update={"lower_bound": figure.lower_bound}),
        "best": totals.best.model_copy(update={"lower_bound": best.lower_bound}),
        "above_idle": above_idle,
        "above_idle_j": above_idle and above_idle.energy_j,
    }
    return record.model_copy(
        update={
            "totals": totals.model_copy(update=updated),
            "stages": tuple(_stage_by_current_rules(stage, totals.policy, error_rel) for stage in record.stages),
            "validity": _regraded(record.validity, totals.best),
        }
    )


def _stage_by_current_rules(stage: StageRecord, policy: str, idle_error_rel: float) -> StageRecord:
    above_idle = _above_idle(stage.energy.under_policy(policy), stage.above_idle_j, idle_error_rel)
    mean_w = stage.best.mean_power_w(stage.duration_s)
    updated = {
        "mean_power_w": mean_w if stage.best.coverage < COVERED else stage.mean_power_w,
        "peak_power_w": max((w for w in (stage.peak_power_w, mean_w) if w is not None), default=None),
        "above_idle": above_idle,
        "above_idle_j": above_idle and above_idle.energy_j,
        "validity": _regraded(stage.validity, stage.best),
    }
    return stage.model_copy(update=updated)


def _idle_error_rel(totals: Totals) -> float:
    """95 % error relative to the idle power that the record subtracts, which was a mean over all its baselines."""
    idle = idle_power(totals.idle)
    if idle is None or not totals.idle_power_w:
        return 0.0
    return math.hypot(idle.half_width_w, idle.power_w - totals.idle_power_w) / totals.idle_power_w


def _above_idle(figure: EnergyFigure, stated_j: float | None, idle_error_rel: float) -> EnergyFigure | None:
    if figure.energy_j is None or stated_j is None:
        return None
    idle_j = (figure.energy_j - stated_j) * figure.coverage
    above = figure.model_copy(update={"energy_j": figure.energy_j - idle_j})
    return above.with_errors(ErrorComponent(name="idle", joules=(idle_error_rel * idle_j,), shared=True))


def _regraded(validity: Validity, figure: EnergyFigure) -> Validity:
    if not figure.is_lower_bound:
        return validity
    return with_answer(validity, "interval", check_interval(Evidence(figure=figure, window_s=0.0)))


def energy_resolver(*stores: Path) -> Callable[[Ancestor], Ancestor]:
    """A function that gives an ancestor the energy that the record of its run states, if the run is in a store.

    This makes the energy of an artifact the same everywhere. A bill may be older than the record: it is provisional
    while its run is running, and stays so if the run was killed.
    """
    made: dict[Path, dict[str, Ancestor]] = {}

    def made_in(folder: Path) -> dict[str, Ancestor]:
        if folder not in made:
            made[folder] = {}
            with suppress(JoulelabError, OSError, ValueError, KeyError):  # a run that cannot be read states nothing
                written = read_record(RunPaths(folder))
                if written.status != "running" or not is_held(folder):  # a running run has no final energy
                    record = current_record(RunPaths(folder), written)
                    made[folder] = {one.key: one for one in record.lineage if one.key in record.made}
        return made[folder]

    def resolve(ancestor: Ancestor) -> Ancestor:
        folders = (store / ancestor.made_by for store in dict.fromkeys(stores))
        for folder in () if ancestor.made_by == ELSEWHERE else folders:
            if (folder / "run.json").exists() and (recorded := made_in(folder).get(ancestor.key)):
                return ancestor.model_copy(update={name: getattr(recorded, name) for name in RECORDED_FIELDS})
        return ancestor

    return resolve


def with_recorded_energy(bill: Bill, *stores: Path) -> Bill:
    """The bill with the energy that the records of the runs state which made the artifacts."""
    resolve = energy_resolver(*stores)
    artifact = resolve(bill.artifact)
    provisional = bill.provisional and artifact is bill.artifact
    ancestry = tuple(resolve(ancestor) for ancestor in bill.ancestry)
    return bill.model_copy(update={"artifact": artifact, "ancestry": ancestry, "provisional": provisional})


# Compaction: closed traces become Parquet at the end of a run, and for old runs by `joulelab runs --compact`.
#
# The JSONL file is kept until its copy is written, synced, read back and found equal. A trace that may still be written
# is skipped: its recorder holds the lock and has written no closing line, or another process of the host is running,
# whose recorder would take over.


@dataclass(frozen=True)
class Compaction:
    """Result of compacting the traces of some runs."""

    traces: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    kept: tuple[str, ...] = ()
    """Reasons why some stay JSONL."""

    def __add__(self, other: Compaction) -> Compaction:
        return Compaction(
            self.traces + other.traces,
            self.bytes_before + other.bytes_before,
            self.bytes_after + other.bytes_after,
            self.kept + other.kept,
        )


def compact_run(paths: RunPaths, dead_before: float = 0) -> Compaction:
    """Convert the closed traces of a run to Parquet, where pyarrow is installed. Never raises: the JSONL trace is
    equally usable.

    Attempts below `dead_before` are known to have ended: their traces are final even without a closing line.
    """
    done = Compaction()
    unfinished = paths.unfinished_hosts()
    for host, attempt, path in paths.traces():
        if path.suffix == SUFFIX:
            continue
        ended = attempt < dead_before
        if not ended and (host, attempt) in unfinished:
            done += Compaction(kept=(f"{path}: another process of the run may still be recording",))
            continue
        try:
            done += _compact(path, ended)
        except (JoulelabError, OSError) as error:
            done += Compaction(kept=(f"{path}: {error}",))
    for (_, attempt), files in paths.event_files().items():
        for _, events in files if attempt < dead_before else ():
            with suppress(OSError):  # readers also read marks from the ring
                drain_ring(events)
    return done


def compact_ended(store: Path) -> Compaction:
    """Compact the traces of all runs of a store that no process is working on."""
    done = Compaction()
    for folder in run_folders(store):
        paths = RunPaths(folder)
        if all(path.suffix == SUFFIX for _, _, path in paths.traces()):
            continue
        done += compact_run(paths, 0 if is_held(folder) else math.inf)
    return done


def _compact(path: Path, ended: bool) -> Compaction:
    with _recorder_lock(path) as free:
        if not free:
            return Compaction(kept=(f"{path}: its recorder is still running",))
        if not ended and not _is_closed(path):
            return Compaction(kept=(f"{path}: no closing line",))
        before = path.stat().st_size
        copy = None
        if not lookup.absent_packages("pyarrow"):
            copy = copy_to_parquet(path, read_lines)
            path.unlink()
        for leftover in (".lock", ".wishes", REQUESTS_SUFFIX, ENDED_SUFFIX):
            path.with_suffix(leftover).unlink(missing_ok=True)
        local_lock(path).unlink(missing_ok=True)
    return Compaction() if copy is None else Compaction(1, before, copy.stat().st_size)


def _is_closed(path: Path) -> bool:
    last = None
    for last in read_lines(path):  # noqa: B007 (only the last line is needed)
        pass
    return last is not None and last.get("kind") == "end"


@contextmanager
def _recorder_lock(path: Path) -> Iterator[bool]:
    """Hold the lock of this trace's recorder, if there is one; False if a recorder holds it."""
    lock = next((file for file in (local_lock(path), path.with_suffix(".lock")) if file.exists()), None)
    if lock is None:
        yield True
        return
    descriptor = os.open(lock, os.O_RDWR)
    try:
        yield try_lock(descriptor) is not False
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Leftover:
    """Something that a crash left in the store and that no later process of the run cleans."""

    path: Path
    reason: str
    size_bytes: int
    members: tuple[str, ...] = ()
    """Run ids to take out of the group at `path`; empty if the path itself is removed."""


# A process that starts now has its folder before its record, and its temporary file before the rename.
_SETTLED_S = 600.0
_STAMPED = re.compile(r".+-\d{8}T\d{6}Z-[0-9a-f]{4}")


def find_leftovers(store: Path) -> list[Leftover]:
    """Folders without a record, temporary files, corrupted checkpoints and group members whose run is gone.

    Only names that joulelab gives are considered, and nothing that a process holds or that is younger than ten minutes.
    Runs with a record are never listed: their energy was spent.
    """
    found = []
    groups = store / GROUPS_FOLDER
    for folder, record in [
        *((path, "run.json") for path in _entries(store)),
        *((path, "group.json") for path in _entries(groups)),
    ]:
        if folder.is_dir() and _STAMPED.fullmatch(folder.name) and not (folder / record).exists():
            found.append(_leftover(folder, f"has no {record}"))
        elif folder.name.startswith(".") and (folder.name.endswith(".tmp") or _STAMPED.fullmatch(folder.name[1:])):
            found.append(_leftover(folder, "unfinished file"))
    for folder in run_folders(store):
        if not is_held(folder):
            found += [_leftover(path, "unfinished file") for path in unfinished_files(folder)]
            found += [_leftover(path, "corrupted checkpoint") for path in folder.glob("checkpoints/*/step-*.corrupted")]
    for folder in group_folders(store):
        with suppress(JoulelabError, OSError):
            members = [
                str(run)
                for member in read_json(folder / "group.json", members=list)["members"]
                if isinstance(member, dict) and (run := member.get("run_id"))
            ]
            gone = tuple(run for run in members if not (store / run / "run.json").exists())
            if gone and len(gone) == len(members):
                found.append(_leftover(folder, "group whose runs are all gone"))
            elif gone:
                found.append(Leftover(folder, f"group with {len(gone)} of {len(members)} runs gone", 0, gone))
    return [one for one in found if _is_settled(one.path)]


def _entries(folder: Path) -> list[Path]:
    """What this user can read: in a shared store others may have private runs."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.is_dir() or os.access(path, os.R_OK | os.X_OK))


def _leftover(path: Path, reason: str) -> Leftover:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return Leftover(path, reason, sum(file.lstat().st_size for file in files))


def _is_settled(path: Path) -> bool:
    try:
        newest_s = max(file.lstat().st_mtime for file in (path, *(path.rglob("*") if path.is_dir() else ())))
    except OSError:
        return False  # another process is removing it
    return time.time() - newest_s > _SETTLED_S and not (path.is_dir() and is_held(path))


def remove_leftover(leftover: Leftover) -> None:
    path = leftover.path
    if leftover.members:
        record = read_json(path / "group.json")
        for member in record["members"]:
            if isinstance(member, dict) and member.get("run_id") in leftover.members:
                member["run_id"] = None  # `run --resume` starts it again
        write_json(path / "group.json", record)
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
