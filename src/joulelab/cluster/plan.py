"""The jobs of an experiment and their dependencies. Pure: nothing is written or submitted here.

    data (CPU) -> teacher (GPU) -> students (an array over members) -> evaluation -> report (CPU)

A step that is not requested is done by the job after it. `data` and `teacher` are phases of the first member that needs
them; the others reuse its artifacts, energy included. A teacher's work in shards is an array of separate runs whose
outputs the first student merges; if members need different teacher work, the arrays follow each other, because a later
one reuses the outputs of an earlier one.
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
    """A run to be planned."""

    folder: Path
    has_teacher: bool
    needs_gpu: bool = True


@dataclass(frozen=True)
class PlannedJob:
    key: str
    """Position and step, such as `02-teacher`; also the name of its files."""
    about: str
    command: str
    runs: tuple[Path, ...] = ()
    """Run directories, one per task."""
    array: bool = False
    needs_gpu: bool = True
    one_node: bool = False
    measured: bool = True
    restartable: bool = True
    after: str | None = None


def usual_steps(specs: Sequence[RunSpec], both: bool = False, shards: int = 1) -> tuple[str, ...]:
    """Default steps: separate data and teacher jobs where several runs or shards use them, a report for a group."""
    if shards > 1:
        return ("data", "teacher", "students", "report") if len(specs) > 1 else ("data", "teacher", "students")
    if both:
        return ("data", "students", "report") if len(specs) > 1 else ("data", "students")
    if len(specs) == 1:
        return ("students",)
    shared = ("data", "teacher") if any(spec.has_teacher for spec in specs) else ()
    return (*shared, "students", "report")


def read_steps(text: str) -> tuple[str, ...]:
    requested = [step.strip() for step in text.split(",") if step.strip()]
    wrong = [step for step in requested if step not in STEPS]
    if wrong:
        raise UsageError(f"unknown step '{wrong[0]}'", f"known: {', '.join(STEPS)}")
    if "students" not in requested:
        raise UsageError("--steps must contain students", "for example --steps data,students")
    return tuple(step for step in STEPS if step in requested)


def require_shards(shards: int, steps: Sequence[str]) -> None:
    if shards < 1:
        raise UsageError(f"--shards {shards}: expected 1 or more", "--shards 8 splits the teacher's work over 8 tasks")
    if shards > 1 and "teacher" not in steps:
        raise UsageError(f"--shards {shards} needs the teacher step, which --steps leaves out", "add teacher to it")


def require_ranks(spec: RunSpec, nodes: int, ranks: int) -> None:
    spec.require_ranks(nodes * ranks > 1, nodes * ranks, nodes)
    if nodes * ranks > 1 and not spec.shares_ranks:
        specs = lookup.PIPELINE_SPECS
        distributed = [name for name in specs.names() if specs.resolve(name).shares_ranks]
        raise UsageError(
            f"the pipeline '{spec.pipeline}' runs in a single process, but {nodes} x {ranks} processes were requested",
            f"use --nodes 1 --gpus 1; pipelines that run on several: {', '.join(distributed)}",
        )


def require_kept_model(spec: RunSpec, steps: Sequence[str]) -> None:
    """A separate evaluation job needs the saved model of the job before it."""
    if "evaluation" in steps and not getattr(spec, "save_model", True):
        raise UsageError(
            "a separate evaluation job needs the trained model, which this run does not save",
            "set save_model=true, or leave `evaluation` out of --steps",
        )


def plan(
    members: Sequence[Member],
    steps: Sequence[str],
    *,
    report_on: Path,
    nodes: int = 1,
    ranks: int = 1,
    shards: Sequence[Sequence[Path]] = (),
) -> tuple[PlannedJob, ...]:
    """The jobs in order, each after the one before it. `shards` has one list of runs per sharded teacher work."""
    jobs: list[PlannedJob] = []

    def add(step: str, about: str, command: str, **more: object) -> None:
        after = jobs[-1].key if jobs else None
        job = PlannedJob(f"{len(jobs) + 1:02d}-{step}", about, command, after=after, **more)  # type: ignore[arg-type]
        jobs.append(job)

    several = f" --nodes {nodes} --ranks {ranks}" if nodes * ranks > 1 else ""
    folders, many = tuple(member.folder for member in members), len(members) > 1
    if "data" in steps:
        about = "Prepare the data once for all runs."
        add("data", about, _run_command("data"), runs=folders[:1], needs_gpu=False, one_node=True)
    for tasks in shards:
        about = f"Do the teacher's work in {len(tasks)} shards; the next job merges them."
        among = f" --nodes 1 --ranks {ranks}" if ranks > 1 else ""
        add("teacher", about, _run_command(None) + among, runs=tuple(tasks), array=True, one_node=True)
    if "teacher" in steps and not shards:
        teaching = next((member.folder for member in members if member.has_teacher), folders[0])
        about = "Prepare the teacher and its outputs once for all students."
        add("teacher", about, _run_command("teacher") + several, runs=(teaching,))
    until: Phase | None = "train" if "evaluation" in steps else None
    step = "students" if any(member.has_teacher for member in members) else "run"
    if until is not None:
        about = "Train each member."
    else:
        about = "Run the remaining phases of each member." if len(jobs) or many else "Execute the run."
    on_gpu = any(member.needs_gpu for member in members)
    command = _run_command(until) + several
    add(step, about, command, runs=folders, array=many, needs_gpu=on_gpu, one_node=not on_gpu)
    if "evaluation" in steps:
        add("evaluation", "Evaluate each member.", _run_command(None), runs=folders, array=many, one_node=True)
    if "report" in steps:
        command = f"{_JOB} report {shlex.quote(str(report_on))}"
        about = "Import Slurm's accounting and write the report."
        add("report", about, command, needs_gpu=False, one_node=True, measured=False)
    return tuple(jobs)


def plan_program(folder: Path, command: Sequence[str]) -> tuple[PlannedJob, ...]:
    """One job that measures a program. Its settings are in the run directory, the command line is in the script."""
    words = f'python -m joulelab measure --run-dir "$run" -- {shlex.join(command)}'
    return (PlannedJob("01-measure", "Measure a program.", words, (folder,), one_node=True, restartable=False),)


def _run_command(until: Phase | None) -> str:
    return f'{_JOB} run "$run"' + (f" --until {until}" if until else "")
