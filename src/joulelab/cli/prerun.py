"""`joulelab prerun`: a rehearsal before a long measurement, and a report on whether the machine is fit for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from joulelab.cli.options import AsJson, RunsDir

if TYPE_CHECKING:
    from joulelab.report.grid import Grid
    from joulelab.runs.prerun import PrerunReport


def prerun(
    experiment: Annotated[
        str | None, typer.Argument(help="Take the energy settings of this experiment (default: the meter's own).")
    ] = None,
    expect_gpu: Annotated[
        str | None, typer.Option("--expect-gpu", metavar="NAME", help='Every GPU must have this in its name ("H200").')
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="How many GPUs there must be.")] = None,
    min_memory_gib: Annotated[
        float | None, typer.Option("--min-memory-gib", min=0, help="Memory every GPU must have.")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=600, help="Length of the burn-in and of each idle baseline.")
    ] = 10.0,
    strict: Annotated[bool, typer.Option("--strict", help="Let warnings fail the prerun, too.")] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Idle, burn in, idle; check sampling, hardware and other processes. Exit code 4 where an assertion fails.

    Example: joulelab prerun --expect-gpu H200 --gpus 8 --min-memory-gib 130
    """
    from joulelab.cli.progress import watching
    from joulelab.meter.config import EnergyConfig
    from joulelab.runs.prerun import Expected, enforce
    from joulelab.runs.prerun import prerun as rehearse
    from joulelab.runs.store import store_root

    energy = EnergyConfig()
    if experiment is not None:
        from joulelab.runs.spec import load_spec

        energy = load_spec(experiment).energy
    print(f"prerun: idle, load, idle, {seconds:g} s each", file=sys.stderr)
    with watching() as progress:
        report = rehearse(
            store_root(runs_dir), energy, Expected(expect_gpu, gpus, min_memory_gib), seconds, progress, strict
        )
    if as_json:
        print(report.model_dump_json(indent=2))
    else:
        from joulelab.cli.console import print_result
        from joulelab.report.grid import to_rich

        print_result(to_rich(report_grid(report)))
    enforce(report)


def report_grid(report: PrerunReport) -> Grid:
    from joulelab.report.grid import make_grid

    words = {True: "ok", None: "-"}
    rows = [
        (check.name, words.get(check.ok, "FAILED" if check.required else "warning"), check.text)
        for check in report.checks
    ]
    verdict = "Fit to measure on." if report.passed else "Not fit: see what failed."
    if report.passed and report.grade == "C":
        verdict = "Nothing failed, and a measurement here is still grade C: `joulelab doctor` says why."
    return make_grid(f"Prerun {report.run_id}", "Check!|Result!|Finding", rows, verdict)
