"""Which jobs an experiment becomes, and which waits for which. Pure: nothing is written or submitted here.

    data (CPU) -> teacher (GPU) -> students (an array over members) -> evaluation -> report (CPU)

Only what was asked for has a job of its own; the job after it does the rest. `data` and `teacher` are parts of the
first member that needs them: the others find its artefacts in the store, with their bill. A teacher's work in shards is
an array of runs of their own, whose shares the first student joins; where members need different work of a teacher, one
array after the other, as a later one finds what an earlier one made.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from joulelab import lookup
from joulelab.errors import UsageError
from joulelab.runs.phases import Phase
from joulelab.runs.spec import RunSpec

STEPS = ("data", "teacher", "students", "evaluation", "report")
_JOB = "python -m joulelab.cluster"


@dataclass(frozen=True)
class Member:
    """A run as a plan sees it."""

    folder: Path
    has_teacher: bool


@dataclass(frozen=True)
class PlannedJob:
    key: str
    """`02-teacher`: its place and what it does; its files are called so."""
    about: str
    command: str
    runs: tuple[Path, ...] = ()
    """The run folders it works on, one per task."""
    array: bool = False
    needs_gpu: bool = True
    one_node: bool = False
    after: str | None = None


def usual_steps(specs: Sequence[RunSpec], both: bool = False, shards: int = 1) -> tuple[str, ...]:
    """Where a job of its own pays: a teacher for several students or in shards, data for several runs, a report for a
    group."""
    if shards > 1:
        return ("data", "teacher", "students", "report") if len(specs) > 1 else ("data", "teacher", "students")
    if both:
        return ("data", "students", "report") if len(specs) > 1 else ("data", "students")
    if len(specs) == 1:
        return ("students",)
    shared = ("data", "teacher") if any(spec.has_teacher for spec in specs) else ()
    return (*shared, "students", "report")


def read_steps(text: str) -> tuple[str, ...]:
    asked = [step.strip() for step in text.split(",") if step.strip()]
    wrong = [step for step in asked if step not in STEPS]
    if wrong:
        raise UsageError(f"'{wrong[0]}' is no step", f"the steps are {', '.join(STEPS)}")
    if "students" not in asked:
        raise UsageError("--steps leaves out the students", "they are what the others are for")
    return tuple(step for step in STEPS if step in asked)


def require_shards(shards: int, steps: Sequence[str]) -> None:
    if shards < 1:
        raise UsageError(f"--shards {shards}: expected 1 or more", "--shards 8 splits the teacher's work over 8 tasks")
    if shards > 1 and "teacher" not in steps:
        raise UsageError(f"--shards {shards} splits the teacher's step, and --steps leaves it out", "add teacher to it")


def require_ranks(spec: RunSpec, nodes: int, ranks: int) -> None:
    if nodes * ranks > 1 and not spec.shares_ranks:
        specs = lookup.PIPELINE_SPECS
        distributed = [name for name in specs.names() if specs.resolve(name).shares_ranks]
        raise UsageError(
            f"the pipeline '{spec.pipeline}' runs in a single process, but {nodes} x {ranks} processes were requested",
            f"use --nodes 1 --gpus 1; pipelines that run on several: {', '.join(distributed)}",
        )


def require_kept_model(spec: RunSpec, steps: Sequence[str]) -> None:
    """An evaluation in a job of its own needs the model of the job before it."""
    if "evaluation" in steps and not getattr(spec, "save_model", True):
        raise UsageError(
            "an evaluation in a job of its own needs the trained model, and this run keeps none",
            "save_model=true, or leave `evaluation` out of --steps",
        )


def plan(
    members: Sequence[Member],
    steps: Sequence[str],
    *,
    report_on: Path,
    nodes: int = 1,
    ranks: int = 1,
    shares: Sequence[Sequence[Path]] = (),
) -> tuple[PlannedJob, ...]:
    """The jobs in order, each after the one before it. `shares` are the runs that do a teacher's work in shards, a row
    for each piece of such work."""
    jobs: list[PlannedJob] = []

    def add(step: str, about: str, command: str, **more: object) -> None:
        after = jobs[-1].key if jobs else None
        job = PlannedJob(f"{len(jobs) + 1:02d}-{step}", about, command, after=after, **more)  # type: ignore[arg-type]
        jobs.append(job)

    several = f" --nodes {nodes} --ranks {ranks}" if nodes * ranks > 1 else ""
    folders, many = tuple(member.folder for member in members), len(members) > 1
    if "data" in steps:
        about = "Prepare the data, once for all runs."
        add("data", about, _run_part("data"), runs=folders[:1], needs_gpu=False, one_node=True)
    for tasks in shares:
        about = f"The teacher's work in {len(tasks)} shards; whoever comes after joins them."
        among = f" --nodes 1 --ranks {ranks}" if ranks > 1 else ""
        add("teacher", about, _run_part(None) + among, runs=tuple(tasks), array=True, one_node=True)
    if "teacher" in steps and not shares:
        taught = next((member.folder for member in members if member.has_teacher), folders[0])
        about = "Make the teacher and what it says, once for all students."
        add("teacher", about, _run_part("teacher") + several, runs=(taught,))
    part: Phase | None = "train" if "evaluation" in steps else None
    about = "Run what is left of each member." if part is None else "Train each member."
    add("students", about, _run_part(part) + several, runs=folders, array=many)
    if "evaluation" in steps:
        add("evaluation", "Evaluate each member.", _run_part(None), runs=folders, array=many, one_node=True)
    if "report" in steps:
        command = f"{_JOB} report {shlex.quote(str(report_on))}"
        add("report", "Take in Slurm's accounting and write the report.", command, needs_gpu=False, one_node=True)
    return tuple(jobs)


def _run_part(part: Phase | None) -> str:
    return f'{_JOB} run "$run"' + (f" --part {part}" if part else "")
