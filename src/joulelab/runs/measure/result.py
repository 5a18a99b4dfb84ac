"""Result of `joulelab measure`: the program's energy, or the mean over repeats with its interval, and caveats."""

from __future__ import annotations

import math
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Literal, NoReturn

from pydantic import Field

from joulelab import clock
from joulelab.errors import EndedBySignal, JoulelabError, StorageFailed, UsageError
from joulelab.meter.figures import EnergyFigure, Frozen, Method, bound_mark, covered_percent, figure_text
from joulelab.meter.grids import Co2e, Cost, co2e_text, cost_text
from joulelab.meter.series import Gap, Trace, load_trace
from joulelab.runs.attempt import RunAttempt, create_run, error_record
from joulelab.runs.context import Progress, RunContext, SilentProgress, Stage, StopRequest
from joulelab.runs.lock import holding
from joulelab.runs.measure.program import ProcessGroup, ProgramFailed, SignalRelay, Terminal, end_all
from joulelab.runs.paths import RunPaths, storage_failure, write_json
from joulelab.runs.record import (
    Note,
    ProgramEnergy,
    RepeatSummary,
    Result,
    RunRecord,
    StageRecord,
    Status,
    flat_summary,
    program_energy,
    summarize_repeats,
)
from joulelab.runs.spec import RunSpec, check, read_mapping
from joulelab.runs.store import load_record
from joulelab.units import J_PER_KWH, duration_text, kwh_text, power_text

RUN, WARMUP = "program.run", "program.warmup"
LARGE_SPREAD = 0.05
# On an H200 (100 ms refresh) the energy of one burst varied by 20 % at 100 ms, by 4 % at 500 ms, by little from 1 s on.
REFRESHES_FOR_A_WINDOW = 10
NEXT_READING_NS = 1_000_000_000


class Repetition(Frozen):
    stage: str
    status: Status
    duration_s: float
    energy: EnergyFigure


class MeasureResult(Frozen):
    run_id: str
    folder: str
    name: str
    command: tuple[str, ...]
    status: Status
    exit_code: int
    error: str | None
    """How it ended, if it failed."""
    energy_j: float | None
    """The printed energy (mean over repeats if there are several); null if nothing was measured or estimated."""
    method: Method
    """How `energy_j` was obtained: `counter`, `integrated`, `estimated` or `missing`."""
    duration_s: float | None
    energy: EnergyFigure | None
    """Measured, else the estimate, labeled as such; with repeats, the mean and its t interval."""
    energy_kwh: float | None = None
    """`energy` in kWh, measured or estimated."""
    mean_power_w: float | None = None
    co2e: Co2e | None = None
    """CO2e of `energy`; null unless energy.grid names a grid."""
    cost: Cost | None = None
    """Cost of `energy`; null unless energy.price is set."""
    grade: str | None = None
    total_energy_j: float | None = None
    """Energy of the whole run, including warm-ups and overhead, measured or estimated."""
    repetitions: tuple[Repetition, ...] = ()
    summary: RepeatSummary | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def stage_name(kind: str, number: int, of: int) -> str:
    """`program.run` for a single run, `program.run.3` for the third of several; warm-ups are always numbered."""
    return kind if kind == RUN and of == 1 else f"{kind}.{number}"


def caveats(stages: list[StageRecord], summary: RepeatSummary | None, trace: Trace | None) -> list[str]:
    """Warnings about the reliability of the figures."""
    warnings = []
    if summary is not None and summary.spread_rel > LARGE_SPREAD:
        warnings.append(
            f"the standard deviation over repeats is {100 * summary.spread_rel:.1f} %; "
            "more --repeat, more --warmup or an idle machine reduce it"
        )
    with_energy = [stage for stage in stages if stage.best.energy_j is not None]
    refresh_s = _refresh_s(trace, with_energy[0].best) if trace is not None and with_energy else 0.0
    shortest_s = min((stage.duration_s for stage in with_energy), default=math.inf)
    if shortest_s < REFRESHES_FOR_A_WINDOW * refresh_s:
        resolution = (
            f"a sensor that refreshes every {duration_text(refresh_s)}"
            if with_energy[0].best.measured
            else f"an estimate from CPU time, which is counted in steps of {duration_text(refresh_s)}"
        )
        warnings.append(
            f"{duration_text(shortest_s)} is short for {resolution}; "
            f"the program should run for at least {duration_text(REFRESHES_FOR_A_WINDOW * refresh_s)}"
        )
    else:
        wide = [stage for stage in with_energy if _relative_half_width(stage.best) > _matters_above(stage.best)]
        cause = _why_wide(wide, trace, repeated=summary is not None) if wide else None
        bound = any(stage.best.is_lower_bound for stage in wide)
        effect = "the energy is a lower bound" if bound else "the random interval is wider than 5 % of the energy"
        warnings += [f"{effect}: {cause}"] if cause else []
    return warnings


def _matters_above(figure: EnergyFigure) -> float:
    """Relative random error from which it is worth a warning: next to ±70 % of an estimate's scale, 6 % is not."""
    if figure.measured or figure.is_lower_bound:
        return LARGE_SPREAD
    return max(LARGE_SPREAD, figure.gain_error_rel or 0.0)


def _relative_half_width(figure: EnergyFigure) -> float:
    return (figure.half_width_j or 0.0) / abs(figure.energy_j) if figure.energy_j else 0.0


def _why_wide(stages: list[StageRecord], trace: Trace | None, repeated: bool) -> str | None:
    """The cause of a wide interval and the remedy: measuring longer reduces only the sampling error.

    None if it is the sampling error of repeats: their mean has an interval of its own, which contains it.
    """
    gaps = trace.gaps if trace is not None else ()
    faults = [
        gap.reason for stage in stages for gap in gaps if _concerns(gap, stage.best.sources) and _during(gap, stage)
    ]
    if faults:
        return f"{'; '.join(dict.fromkeys(faults))}; repeat the measurement"
    causes = [error for stage in stages for error in stage.best.error_components]
    if max(causes, key=lambda error: error.half_width_j).name == "missing time":
        covered = min(stage.best.coverage for stage in stages)
        return f"the sensor was read during only {covered_percent(covered)} of the time; repeat the measurement"
    if repeated:
        return None
    return (
        "readings are too far apart to resolve the start and the end of the program; "
        "measure longer, or set a smaller --interval"
    )


def _concerns(gap: Gap, sources: tuple[str, ...]) -> bool:
    """A sensor with several domains fails as a whole: `rapl` for `rapl:package-0`."""
    return any(source == gap.device or source.startswith(f"{gap.device}:") for source in sources)


def _during(gap: Gap, stage: StageRecord) -> bool:
    """A fault is detected at the next reading, which may come after the stage."""
    return any(part.start_ns <= gap.mono_ns <= part.end_ns + NEXT_READING_NS for part in stage.segments)


def _refresh_s(trace: Trace, figure: EnergyFigure) -> float:
    return max((series.refresh_s for series in trace.devices if series.device in figure.sources), default=0.0)


def conclude(record: RunRecord, paths: RunPaths) -> RunRecord:
    """The record with the mean over repeats among its results and the caveats among its notes."""
    stages = record.repetitions
    summary = summarize_repeats(stages)
    traces = paths.traces()
    texts = caveats(stages, summary, load_trace(traces[-1][2]) if traces else None)
    results = dict(record.results)
    if summary is not None:
        results |= {
            "program.run.mean_j": Result(value=summary.mean_j),
            "program.run.spread_percent": Result(value=100 * summary.spread_rel),
        }
    notes = tuple(Note(level="warning", text=text) for text in texts)
    return record.with_notes(notes).model_copy(update={"results": results})


def with_former_results(record: RunRecord, stated: RunRecord) -> RunRecord:
    """With the interval of the mean among the results if `stated` has it, as versions before 2026-11-17 wrote it."""
    summary = summarize_repeats(record.repetitions)
    if summary is None:
        return record
    former = {"program.run.mean_low_j": summary.low_j, "program.run.mean_high_j": summary.high_j}
    own = {name: Result(value=value) for name, value in former.items() if name in stated.results}
    return record.model_copy(update={"results": {**record.results, **own}})


def result_of(record: RunRecord, folder: Path, exit_code: int) -> MeasureResult:
    stages = record.repetitions
    program = program_energy(record)
    energy = program.energy if program else None
    shown = record.best_energy
    successful = [stage for stage in stages if stage.status == "done"] or stages
    return MeasureResult(
        run_id=record.run_id,
        folder=str(folder),
        name=record.name,
        command=tuple(record.spec.get("command", ())),
        status=record.status,
        exit_code=exit_code,
        error=record.error.message if record.error else None,
        energy_j=shown.energy_j,
        method=shown.method,
        duration_s=sum(stage.duration_s for stage in successful) / len(successful) if successful else None,
        energy=energy,
        energy_kwh=energy.energy_j / J_PER_KWH if energy and energy.energy_j is not None else None,
        mean_power_w=program.energy.mean_power_w(program.duration_s) if program else None,
        co2e=record.best_co2e,
        cost=record.best_cost,
        grade=record.validity.grade,
        total_energy_j=record.totals.best.energy_j if record.totals else None,
        repetitions=tuple(
            Repetition(stage=stage.name, status=stage.status, duration_s=stage.duration_s, energy=stage.best)
            for stage in stages
        ),
        summary=summarize_repeats(stages),
        warnings=tuple(note.text for note in record.validity.notes if note.level == "warning"),
        notes=tuple(note.text for note in record.validity.notes if note.level == "info"),
    )


# The answer as text: one line that `measure`, `show`, print(m), the callbacks and the notebook have in common.


def answer_text(record: RunRecord) -> str:
    """`146 J ±70 %, estimated; 4.06e-05 kWh; mean 12.3 W; 11.9 s`, then CO2e and cost if requested."""
    energy, duration_s = record.best_energy, record.best_duration_s
    if energy.energy_j is None:
        return f"energy {figure_text(energy)}; {duration_text(duration_s)}"
    bound = bound_mark(energy)
    derived = [bound + kwh_text(energy.energy_j), f"mean {power_text(energy.mean_power_w(duration_s))}"]
    # nothing follows from an energy below the resolution
    parts = [figure_text(energy), *([] if energy.is_unresolved else derived), duration_text(duration_s)]
    emissions, costs = record.best_co2e, record.best_cost
    if emissions is not None and record.totals is not None and record.totals.grid is not None:
        parts.append(f"{co2e_text(emissions, energy.is_lower_bound)} (grid {record.totals.grid.name})")
    if costs is not None:
        parts.append(cost_text(costs, energy.is_lower_bound))
    return "; ".join(parts)


def repeats_text(program: ProgramEnergy) -> str:
    """What the figure is a mean of. The ± of an estimate is that of its scale, not of the repeats."""
    interval = "Student's t interval, " if program.energy.measured and not program.energy.is_lower_bound else ""
    return f"mean of {program.count} repeats, {interval}standard deviation {100 * program.spread_rel:.1f} %"


def answer_line(record: RunRecord) -> str:
    """The whole answer: name, how it ended if it failed, energy and what follows from it, repeats, grade."""
    program = program_energy(record)
    ended = f"{record.status}: {record.error.message}; " if record.error else ""
    parts = [f"{record.name}: {ended}{answer_text(record)}"]
    if program is not None and program.count > 1:
        parts.append(repeats_text(program))
    if record.validity.grade and record.best_energy.energy_j is not None:
        parts.append(f"grade {record.validity.grade}")
    return "; ".join(parts)


def scope_note(record: RunRecord) -> str:
    """Why an estimate is far below those of other tools; empty for measured energy."""
    if record.best_energy.method != "estimated" or record.policy not in ("measured", "gpu_only"):
        return ""
    return (
        "only this program's CPU time is counted; tools that add constants for memory or count the whole machine "
        "report much more (--scope machine)"
    )


def warnings_of(record: RunRecord) -> list[str]:
    return [note.text for note in record.validity.notes if note.level == "warning"]


def answer_block(record: RunRecord, folder: Path) -> str:
    """The answer, then warnings and the run directory, one line each: print(m) and the end of a callback's training."""
    warnings = [f"  warning: {text}" for text in warnings_of(record)]
    return "\n".join([answer_line(record), *warnings, f"  run directory: {folder}"])


# `joulelab measure`: opens a run, runs the program as often as requested, closes the run and returns the result.
#
# `MeasuredRun` is also the run of the Python API and of the callbacks: in all three the work is code that no pipeline
# describes, so begin and end are two calls. Folder, record and summary are the same as for any run.


class MeasureSpec(RunSpec):
    """Settings of `joulelab measure`, the Python API and the callbacks."""

    pipeline: Literal["measure"] = "measure"
    """Always `measure`."""
    command: tuple[str, ...] = ()
    """The command line, with secrets redacted; empty if Python code was measured."""
    repeat: int = Field(1, ge=1, le=100_000)
    """Number of measured runs."""
    warmup: int = Field(0, ge=0, le=100_000)
    """Number of runs before that; their energy is in the total but not in the mean."""


def not_restartable() -> UsageError:
    """The folder has only a redacted command, and no code of a `with` block: neither can be restarted from it."""
    return UsageError(
        "a measured program cannot be restarted from its run directory", "run `joulelab measure -- COMMAND` again"
    )


def refuse(run: RunContext) -> NoReturn:
    raise not_restartable()


class RecordLost(JoulelabError):
    """The program has ended and its record was not written; `measure` exits with the program's code."""

    def __init__(self, problem: BaseException, folder: Path, exit_code: int) -> None:
        reason = _why_lost(problem, folder)
        ended = f"the program ended with exit code {exit_code}"
        super().__init__(f"{ended}, but its measurement was not recorded: {reason.message}", reason.hint)
        self.exit_code = exit_code


def _why_lost(problem: BaseException, folder: Path) -> JoulelabError:
    known = storage_failure(problem, folder) or problem
    if isinstance(known, JoulelabError):
        return known
    if not isinstance(known, OSError | MemoryError):  # a bug, which keeps its traceback
        with suppress(OSError):
            traceback.print_exception(known)
    return JoulelabError(f"{type(known).__name__}: {known}")


class MeasuredRun:
    """An attempt of a new run whose work is the user's own code."""

    def __init__(
        self,
        store: Path,
        spec: MeasureSpec,
        stop: StopRequest | None = None,
        progress: Progress | None = None,
        folder: Path | None = None,
    ) -> None:
        """`folder` is chosen by the user; a run that is already queued there is started."""
        self.spec = spec
        queued = folder is not None and (folder / "run.json").exists()
        self.paths = RunPaths(folder) if folder is not None and queued else create_run(store, spec, folder=folder)
        self._attempt = RunAttempt(self.paths, spec, stop or StopRequest(), progress or SilentProgress())
        self.begin = self._attempt.begin
        self.end = self._attempt.end

    @property
    def is_own(self) -> bool:
        return self._attempt.is_own

    def end_or_warn(self, status: Status, error: BaseException | None = None) -> RunRecord:
        """As `end`, for code of the user that has done its work: a problem with the record is printed, not raised, and
        the returned record is a failed one without stages."""
        try:
            return self.end(status, error)
        except Exception as problem:
            reason = _why_lost(problem, self.paths.folder)
            lost = JoulelabError(f"the measurement was not recorded: {reason.message}", reason.hint)
            with suppress(OSError):
                print(f"joulelab: error: {lost.message}", file=sys.stderr, flush=True)
            return RunRecord(
                run_id=self.paths.run_id,
                name=self.spec.name,
                label=self.spec.label or self.spec.name,
                status="failed",
                created_at=clock.iso(clock.now().wall_s),
                spec=self.spec.model_dump(mode="json"),
                error=error_record(lost),
            )

    def amend(self, record: RunRecord) -> RunRecord:
        """Write the record again with results that depend on the final figures (the mean over repeats)."""
        with holding(self.paths.folder):
            write_json(self.paths.record, record)
            write_json(self.paths.summary, flat_summary(record))
        return record


def how_it_ended(error: BaseException | None) -> tuple[Status, BaseException | None]:
    """Status and recorded error for an exception of user code: Ctrl-C truncates a run, `sys.exit(0)` is a success."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "done", None
    if isinstance(error, KeyboardInterrupt):
        return "truncated", EndedBySignal(signal.SIGINT)
    return ("truncated" if isinstance(error, EndedBySignal) else "failed"), error


def leave(stage: AbstractContextManager[Stage], error: BaseException | None) -> None:
    """Close a stage without re-raising `error`, which is already propagating."""
    if error is None:
        stage.__exit__(None, None, None)
        return
    try:
        stage.__exit__(type(error), error, error.__traceback__)
    except BaseException as raised:
        if raised is not error:
            raise


def queued_spec(folder: Path, requested: MeasureSpec) -> MeasureSpec:
    """The settings of the run that is queued in `folder`, for the same program; anything else there is refused."""
    status = load_record(folder).status
    spec = check(read_mapping(RunPaths(folder).config))
    if not isinstance(spec, MeasureSpec) or spec.command != requested.command:
        raise UsageError(f"{folder} contains another run", "choose another directory")
    if status != "queued":
        raise UsageError(f"the run in {folder} has already started (status {status})", "choose another directory")
    plain = check({"pipeline": spec.pipeline, "name": requested.name, "command": requested.command})
    if requested != plain:
        raise UsageError(
            f"{folder} contains a queued run, whose settings are fixed", "leave out all options except --run-dir"
        )
    return spec


def measure_program(
    store: Path,
    spec: MeasureSpec,
    executable: str,
    command: Sequence[str],
    progress: Progress,
    folder: Path | None = None,
) -> MeasureResult:
    """Run the program under the meter. The run is recorded however it ends, and the result has its exit code.

    `command` is the real command line; the spec has it without secrets.
    """
    stop, terminal = StopRequest(), Terminal()
    relay = SignalRelay(stop, terminal.present)
    relay.listen()
    measured = MeasuredRun(store, spec, stop, progress, folder)
    group = ProcessGroup(relay, terminal)
    error: BaseException | None = None
    status: Status = "done"
    try:
        run = measured.begin(spec.command)
        with group:
            run_all(run, spec, group, executable, command)
    except EndedBySignal as ended:
        status, error = "truncated", ended
    except BaseException as failure:
        status, error = "failed", storage_failure(failure, measured.paths.folder) or failure
    # None: a program did not run to its end because of a problem of ours
    exit_code: int | None = 0 if group.ended_well == spec.warmup + spec.repeat else None
    if isinstance(error, EndedBySignal | ProgramFailed):
        exit_code = error.exit_code
    try:
        record = measured.end(status, error)
        record = measured.amend(conclude(record, measured.paths))
        relay.ignore_signals()
        if error is not None and (isinstance(error, StorageFailed) or not isinstance(error, JoulelabError)):
            raise error
        return result_of(record, measured.paths.folder, error.exit_code if error else 0)
    except Exception as problem:
        if exit_code is None:
            raise (error or problem) from None
        raise RecordLost(problem, measured.paths.folder, exit_code) from problem


def run_all(run: RunContext, spec: MeasureSpec, group: ProcessGroup, executable: str, command: Sequence[str]) -> None:
    """Warm-ups, then repeats, each in its own stage; stops at the first failure."""
    try:
        for number in range(1, spec.warmup + 1):
            with run.stage(stage_name(WARMUP, number, spec.warmup), role="setup", activity="warmup"):
                group.run(executable, command).check(run.stop.signum)
        for number in range(1, spec.repeat + 1):
            with run.stage(stage_name(RUN, number, spec.repeat), role="student", activity="run", repeat=number):
                group.run(executable, command).check(run.stop.signum)
    except EndedBySignal:
        end_all(group.left_over())
        raise
    finally:
        if left := group.left_over():
            run.warn(
                f"processes of the program are still running: pid {', '.join(str(p.pid) for p in left[:5])}"
                f"{' and others' if len(left) > 5 else ''}; their energy from now on is not recorded"
            )
