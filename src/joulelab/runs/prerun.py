"""`joulelab prerun`: checks whether this machine is ready for a measurement: idle, burn-in, sampling, hardware.

The prerun is itself a run (folder, trace, record), with `prerun.json` next to its record. What the user asserted about
the hardware must hold, or the exit code is 4; all other failures are warnings unless `strict`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from joulelab.clock import NS
from joulelab.errors import EndedBySignal, InvalidMeasurement
from joulelab.meter.calibrate import burning
from joulelab.meter.config import EnergyConfig
from joulelab.meter.figures import Frozen
from joulelab.meter.health import Health, load_health, throttle_shares
from joulelab.runs import environment
from joulelab.runs.attempt import idle
from joulelab.runs.context import Progress, RunContext, StopRequest
from joulelab.runs.measure.result import MeasuredRun, MeasureSpec
from joulelab.runs.paths import storage_failure, write_json
from joulelab.runs.record import IdleBaseline, RunRecord, StageRecord, Status
from joulelab.runs.spec import HardwareAssertions
from joulelab.units import duration_text, power_text

BURN_STAGE = "prerun.burn"
BUSY_PERCENT = 50.0
"""Large matrix products keep a GPU at 100 %; below this it had other work or none."""
# A reading is on time up to this many typical intervals after the previous one.
LATE_STEPS = 1.5
KEPT_SHARE = 0.95


class PrerunCheck(Frozen):
    name: str
    ok: bool | None
    """None if it cannot be checked on this machine."""
    required: bool
    """Whether a failure fails the prerun."""
    text: str


class PrerunReport(Frozen):
    run_id: str
    folder: str
    passed: bool
    checks: tuple[PrerunCheck, ...]
    load: str
    grade: str | None
    idle: tuple[IdleBaseline, ...]


def prerun(
    store: Path,
    energy: EnergyConfig,
    expected: HardwareAssertions,
    seconds: float,
    progress: Progress,
    strict: bool = False,
    folder: Path | None = None,
) -> PrerunReport:
    """Idle for `seconds`, burn in for `seconds`, idle again; then evaluate the recording. `folder` is the run's."""
    spec = MeasureSpec(name="prerun", label="prerun", energy=energy, command=("joulelab", "prerun"))
    with StopRequest() as stop:
        measured = MeasuredRun(store, spec, stop, progress, folder)
        status: Status = "failed"
        error: BaseException | None = None
        load = "none"
        try:
            run = measured.begin()
            idle(run, "idle.before", seconds)
            with burning(seconds) as burn, run.stage(BURN_STAGE, round(seconds), role="setup", activity="burn"):
                load = burn.what
                _watch(run, seconds)
            idle(run, "idle.after", seconds)
            status = "done"
        except EndedBySignal as ended:
            status, error = "truncated", ended
        except BaseException as failure:
            error = storage_failure(failure, measured.paths.folder) or failure
        record = measured.end(status, error)
    if error is not None:
        raise error
    report = judge(record, measured.paths.folder, health_of(measured), environment.gpus(), expected, load, strict)
    write_json(measured.paths.folder / "prerun.json", report)
    return report


def _watch(run: RunContext, seconds: float) -> None:
    """Wait while the load runs, checking for stop requests."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run.stop.check()
        time.sleep(0.1)
        run.progress.advance(round(seconds - (end - time.monotonic())))


def health_of(measured: MeasuredRun) -> Health:
    return load_health(measured.paths.traces()[-1][2])


def judge(
    record: RunRecord,
    folder: Path,
    health: Health,
    gpus: Sequence[dict[str, Any]],
    expected: HardwareAssertions,
    load: str,
    strict: bool = False,
) -> PrerunReport:
    """Evaluate all checks on the recording; pure, so that a recorded prerun can be evaluated again."""
    baselines = record.totals.idle if record.totals else ()
    burn = record.stage(BURN_STAGE)
    checks = [
        *hardware_checks(gpus, expected),
        *(_warning("idle", *answer, strict) for answer in idle_checks(baselines)),
        _warning("burn-in", *burn_check(burn, baselines, load, health), strict),
        _warning("throttling", *throttling_check(health, burn), strict),
        _warning("sampling", *sampling_check(health), strict),
        _warning("other processes", *other_processes_check(health, gpus), strict),
    ]
    passed = not any(check.ok is False and check.required for check in checks)
    return PrerunReport(
        run_id=record.run_id,
        folder=str(folder),
        passed=passed,
        checks=tuple(checks),
        load=load,
        grade=record.validity.grade,
        idle=baselines,
    )


def enforce(report: PrerunReport) -> None:
    failed = [check.text for check in report.checks if check.ok is False and check.required]
    if failed:
        raise InvalidMeasurement(f"prerun failed: {'; '.join(failed)}", f"its record: joulelab show {report.run_id}")


Answer = tuple[bool | None, str]


def _warning(name: str, ok: bool | None, text: str, strict: bool) -> PrerunCheck:
    return PrerunCheck(name=name, ok=ok, required=strict, text=text)


def hardware_checks(gpus: Sequence[dict[str, Any]], expected: HardwareAssertions) -> list[PrerunCheck]:
    """One check per assertion; without assertions the hardware is only reported."""
    names = [str(gpu.get("name", "?")) for gpu in gpus]
    answers = environment.hardware_answers(gpus, expected)
    if not answers:
        return [PrerunCheck(name="hardware", ok=None, required=False, text=", ".join(names) or "no NVIDIA GPU")]
    return [PrerunCheck(name=name, ok=ok, required=True, text=text) for name, ok, text in answers]


def idle_checks(baselines: Sequence[IdleBaseline]) -> list[Answer]:
    if not baselines:
        return [(None, "no sensor measures power, so idle power is unknown")]
    return [(baseline.stable, _idle_text(baseline)) for baseline in baselines]


def _idle_text(baseline: IdleBaseline) -> str:
    clocks = "" if baseline.sm_clock_MHz is None else f" at {baseline.sm_clock_MHz:.0f} MHz"
    spread = "" if baseline.spread_rel is None else f", spread {100 * baseline.spread_rel:.1f} %"
    drift = "" if baseline.drift_rel is None else f", drift {100 * baseline.drift_rel:+.1f} %"
    return f"{baseline.stage}: {power_text(baseline.power_w)}{clocks}{spread}{drift}"


def burn_check(burn: StageRecord | None, baselines: Sequence[IdleBaseline], load: str, health: Health) -> Answer:
    if burn is None:
        return False, "the load did not run"
    text = f"{load} for {duration_text(burn.duration_s)}"
    if burn.energy_j is None:
        return None, f"{text}; power was not measured"
    idle_w = min((baseline.power_w for baseline in baselines), default=0.0)
    mean_w = burn.mean_power_w or 0.0
    text = f"{text}: {power_text(mean_w)}, idle {power_text(idle_w)}"
    unloaded = _unloaded_gpus(health, burn)
    if unloaded:
        return False, f"{text}; metered, but not under load: {', '.join(unloaded)}"
    return mean_w > 1.1 * idle_w, text


def _unloaded_gpus(health: Health, burn: StageRecord) -> list[str]:
    """GPUs that were never busy during the burn-in, even if others raised the total power."""
    most: dict[str, float] = {}
    for state in health.during([(part.start_ns, part.end_ns) for part in burn.segments]):
        if state.utilization_percent is not None:
            most[state.device] = max(state.utilization_percent, most.get(state.device, 0.0))
    return [device for device, percent in most.items() if percent < BUSY_PERCENT]


def throttling_check(health: Health, burn: StageRecord | None) -> Answer:
    states = health.during([(s.start_ns, s.end_ns) for s in burn.segments]) if burn else []
    if not states:
        return None, "no GPU"
    shares = throttle_shares(states)
    listed = ", ".join(f"{reason} {100 * share:.0f} % of the burn-in" for reason, share in shares.items())
    thermal = any("slowdown" in reason or "brake" in reason for reason in shares)
    return not thermal, listed or "none during the burn-in"


def sampling_check(health: Health) -> Answer:
    """Whether readings were on time: the share of intervals up to 1.5 times the median, for every sensor."""
    worst: tuple[float, str] | None = None
    for sensor, stamps in health.ticks.items():
        steps = [(later - earlier) / NS for earlier, later in pairwise(stamps)]
        if len(steps) < 4:
            continue
        typical = sorted(steps)[len(steps) // 2]
        kept = sum(step <= LATE_STEPS * typical for step in steps) / len(steps)
        text = (
            f"{sensor}: {100 * kept:.0f} % of {len(steps)} readings on time ({typical:.3g} s), longest interval "
            f"{max(steps):.3g} s"
        )
        if worst is None or kept < worst[0]:
            worst = (kept, text)
    if worst is None:
        return False, "too few readings were recorded"
    late = f"; {len(health.late_s)} were late by more than a full interval" if health.late_s else ""
    return worst[0] >= KEPT_SHARE, worst[1] + late


def other_processes_check(health: Health, gpus: Sequence[dict[str, Any]]) -> Answer:
    if not gpus:
        return None, "no GPU"
    others = list(dict.fromkeys(text for _, text in health.warnings if "process" in text))
    return not others, "; ".join(others) or "none on the GPUs"
