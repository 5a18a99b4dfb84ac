"""What is to be submitted: one run or a group, new or from an earlier folder, with its folders made last.

Everything is checked before a folder exists, so that a mistake leaves nothing behind, here as in `joulelab run`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from joulelab.cluster.jobs_file import read_jobs
from joulelab.cluster.plan import Member, has_teacher
from joulelab.cluster.waiting_runs import write_home
from joulelab.errors import UsageError
from joulelab.runs.attempt import create_run
from joulelab.runs.groups import create_group, load_group, member_paths, queue_members
from joulelab.runs.json_file import read_json, write_json
from joulelab.runs.lock import FolderLocked, holding, newest_lease
from joulelab.runs.paths import GroupPaths, RunPaths
from joulelab.runs.record import RunRecord
from joulelab.runs.spec import RunSpec, check
from joulelab.runs.store import find_folder, load_record
from joulelab.runs.yaml_text import read_mapping


@dataclass(frozen=True)
class Chosen:
    """What the user asked for: checked, and not made yet."""

    name: str
    specs: tuple[RunSpec, ...]
    about: str = ""
    baseline: str = ""
    is_group: bool = False
    sweep: bool = False
    earlier: Path | None = None
    """The folder of an earlier submission, which goes on."""
    left: tuple[Path, ...] = ()
    """There, the folders of the runs that are not done; for one that has none yet, a name that stands for it."""

    def made(self, store: Path, run_dir: Path | None = None) -> Made:
        """Its folders, queued."""
        if self.earlier is not None:
            return Made(self.earlier, self._members(_queued_again(self.earlier)))
        if not self.is_group:
            paths = create_run(store, self.specs[0], folder=run_dir)
            return Made(paths.folder, self._members([paths.folder]))
        group = create_group(
            store, self.specs, name=self.name, about=self.about, baseline=self.baseline, sweep=self.sweep
        )
        return Made(group.folder, self._members([run.folder for run in queue_members(group)]))

    def imagined(self, store: Path, run_dir: Path | None = None) -> Made:
        """The same for a dry run: names that stand for folders that will be made."""
        if self.earlier is not None:
            return Made(self.earlier, self._members(self.left))
        folder = run_dir or store / ("groups/<new group>" if self.is_group else "<new run>")
        runs = [store / f"<run {number}>" for number in range(len(self.specs))] if self.is_group else [folder]
        return Made(folder, self._members(runs))

    def _members(self, folders: Sequence[Path]) -> tuple[Member, ...]:
        return tuple(
            Member(folder.absolute(), has_teacher(spec)) for folder, spec in zip(folders, self.specs, strict=True)
        )


@dataclass(frozen=True)
class Made:
    folder: Path
    members: tuple[Member, ...]


def made_shares(store: Path, works: Sequence[Sequence[RunSpec]], home: Path) -> list[list[Path]]:
    """Runs that do shares of a teacher's work, queued; those of an earlier submission that were cut off go on."""
    jobs = read_jobs(home)
    earlier = dict.fromkeys(run for job in (jobs.jobs if jobs else ()) for run in job.runs)
    known = {run: _spec(RunPaths(store / run)) for run in earlier if (store / run / "run.json").exists()}

    def folder_of(spec: RunSpec) -> Path:
        cut_off = (RunPaths(store / run) for run, held in known.items() if held == spec)
        paths = next((run for run in cut_off if _is_left(run)), None)
        paths = _queued(paths) if paths else create_run(store, spec)
        write_home(paths.folder, home)
        return paths.folder.absolute()

    return [[folder_of(spec) for spec in shares] for shares in works]


def imagined_shares(store: Path, works: Sequence[Sequence[RunSpec]]) -> list[list[Path]]:
    return [[(store / f"<{spec.name}>").absolute() for spec in shares] for shares in works]


def seeds_of(text: str) -> tuple[int, ...]:
    """`0-3` or `0,2,5`, as Slurm writes arrays; each task has its number as its seed."""
    seeds: list[int] = []
    for piece in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        if not found:
            raise UsageError(f"--array {text}: '{piece}' is no number or range", "write 0-3 or 0,2,5: one run per seed")
        low, high = int(found.group(1)), int(found.group(2) or found.group(1))
        seeds += range(low, high + 1)
    if len(set(seeds)) < len(seeds) or not seeds:
        raise UsageError(f"--array {text} names a seed twice or none", "write 0-3 or 0,2,5: one run per seed")
    return tuple(seeds)


def again(store: Path, name: str) -> Chosen:
    """A run or group that was submitted or cut off before: what of it is not done. Nothing is written yet."""
    folder = find_folder(store, name).absolute()
    if (folder / "group.json").exists():
        group, paths = load_group(folder), GroupPaths(folder)
        runs = [member_paths(paths, member) for member in group.members]
        left = [number for number, run in enumerate(runs) if run is None or _is_left(run)]
        folders = [run.folder if (run := runs[number]) else paths.store / f"<run {number}>" for number in left]
        specs = [_spec(run) if (run := runs[number]) else check(group.members[number].spec) for number in left]
        chosen = Chosen(group.name, tuple(specs), is_group=True, earlier=folder, left=tuple(folders))
    else:
        run = RunPaths(folder)
        specs = [_spec(run)] if _is_left(run) else []
        chosen = Chosen(load_record(folder).name, tuple(specs), earlier=folder, left=(folder,))
    if not chosen.specs:
        raise UsageError(f"{folder.name} is done already; nothing is left to submit", f"joulelab show {folder.name}")
    return chosen


def _queued_again(folder: Path) -> list[Path]:
    is_group = (folder / "group.json").exists()
    runs = queue_members(GroupPaths(folder)) if is_group else [RunPaths(folder)]
    return [_queued(run).folder for run in runs if _is_left(run)]


def _spec(run: RunPaths) -> RunSpec:
    return check(read_mapping(run.config))


def _is_left(run: RunPaths) -> bool:
    """Whether the run is not done; nobody may be at work on it."""
    status = load_record(run.folder).status
    if status == "running":
        raise FolderLocked(run.folder, newest_lease(run.folder)[1])
    return status != "done"


def _queued(run: RunPaths) -> RunPaths:
    with holding(run.folder):
        record = RunRecord.model_validate(read_json(run.record))
        write_json(run.record, record.model_copy(update={"status": "queued", "error": None}))
    return run
