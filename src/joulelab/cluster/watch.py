"""Live state of runs and jobs: runs from their directories, jobs from Slurm if it is available.

Nothing is queried on the node of a run. Figures lag by about a second and energy so far includes idle baselines; the
record is computed at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from joulelab.clock import NS
from joulelab.cluster import slurm
from joulelab.cluster.jobs import SubmittedJob, folder_of_job, home_of, read_jobs
from joulelab.cluster.slurm import AccountedJob, import_accounting
from joulelab.errors import JoulelabError
from joulelab.meter.figures import Method, relative_text
from joulelab.meter.grids import co2e_of_range, parse_grid
from joulelab.meter.health import core_use, most_contended, throttle_reasons_text
from joulelab.meter.monitor.tally import LiveTraces
from joulelab.meter.sensors.cpu import FAMILY_GAIN_ERROR_REL, KNOWN_MODEL_GAIN_ERROR_REL
from joulelab.meter.trace import NewLines
from joulelab.report.opening import Tile
from joulelab.report.tables.grid import Grid, make_grid, without_empty_columns
from joulelab.report.wording import NOTHING, grams, rate
from joulelab.runs.groups import load_group
from joulelab.runs.lock import is_held
from joulelab.runs.paths import RunPaths, read_json
from joulelab.runs.record import MEASURED_COMPONENTS, RunRecord
from joulelab.runs.store import find_folder, load_record
from joulelab.units import duration_text, energy_text, percent_text, plural, power_text, with_prefix

# Speed is averaged over the last metric lines: enough to be steady, few enough to show a change.
SPEED_LINES = 20
_TAIL_BYTES = 65_536


@dataclass(frozen=True)
class LiveDevice:
    """The latest readings of one device; None where its sensor reports nothing."""

    host: str
    device: str
    component: str
    name: str
    energy_j: float
    index: int | None = None
    """Position of a GPU on its host, as the driver counts."""
    power_w: float | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    throttling: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """`GPU 2` instead of a UUID of 36 letters, where its position is known."""
        return self.device if self.index is None else f"GPU {self.index}"

    @property
    def full_name(self) -> str:
        """Model, and the beginning of the UUID: enough to find the card in `nvidia-smi -L`."""
        return self.name if self.index is None else f"{self.name} ({self.device.partition(':')[2][:12]})"


@dataclass(frozen=True)
class BudgetUse:
    """How much of one limit of the current training is used."""

    name: str
    fraction: float
    text: str


@dataclass(frozen=True)
class LiveRun:
    run_id: str
    label: str
    status: str
    stage: str = ""
    attempt: int = 0
    hosts: tuple[str, ...] = ()
    energy_j: float | None = None
    power_w: float | None = None
    estimated: bool = False
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    fraction: float | None = None
    """Used fraction of the stage's budget."""
    loss: float | None = None
    left_s: float | None = None
    """Remaining time of the stage at its current speed."""
    left_j: float | None = None
    """Remaining energy of the stage at its current power."""
    left_co2e_g: tuple[float, float] | None = None
    """The same in grams of CO2e, low and high; None without a grid."""
    j_per_token: float | None = None
    """At the current power and speed; the record has that of the whole stage."""
    j_per_sample: float | None = None
    devices: tuple[LiveDevice, ...] = ()
    budgets: tuple[BudgetUse, ...] = ()
    contention: str = ""
    """Set while other processes compete for the CPU cores."""
    why: str = ""
    """Error of a failed run."""

    @property
    def over(self) -> bool:
        return self.status in ("done", "failed", "truncated")

    @property
    def component_powers_w(self) -> dict[str, float]:
        """Component -> latest power of all its devices on all hosts, in the order GPU, CPU, DRAM."""
        known = [(one.component, one.power_w) for one in self.devices if one.power_w is not None]
        order = [*MEASURED_COMPONENTS, *(component for component, _ in known)]
        return {
            component: sum(power_w for own, power_w in known if own == component)
            for component in dict.fromkeys(order)
            if any(own == component for own, _ in known)
        }


class RunWatcher:
    """Polls one run directory."""

    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder)
        self._traces = LiveTraces()
        self._events: dict[Path, _OpenStages] = {}

    def poll(self) -> LiveRun:
        record = RunRecord.model_validate(read_json(self.paths.record))
        status = record.status
        if status == "running" and not is_held(self.paths.folder):
            record = RunRecord.model_validate(read_json(self.paths.record))  # it may have ended since
            status = "truncated" if record.status == "running" else record.status
        if status != "running":
            return _ended(record, status)
        closed = max((attempt.number for attempt in record.attempts), default=0)
        present = [(host, number, path) for host, number, path in self.paths.traces() if number > closed]
        reading = self._traces.read(path for _, _, path in present)
        before_j = record.totals.best.energy_j if record.totals else None
        lines = last_lines(self.paths.metrics)
        speed = read_speed(lines)
        stage, role = self._stage(present)
        left_j = speed.left_s * reading.power_w if speed.left_s is not None and reading.power_w else None
        return LiveRun(
            run_id=record.run_id,
            label=record.label,
            status=status,
            stage=stage,
            attempt=max((number for _, number, _ in present), default=closed),
            hosts=tuple(sorted({host for host, _, _ in present})),
            energy_j=_sum(before_j, reading.energy_j),
            power_w=reading.power_w,
            estimated=reading.estimated,
            tokens_per_s=speed.tokens_per_s,
            samples_per_s=speed.samples_per_s,
            fraction=speed.fraction,
            loss=speed.loss,
            left_s=speed.left_s,
            left_j=left_j,
            left_co2e_g=_co2e_g(left_j, record.spec.get("energy", {}), reading.estimated),
            j_per_token=_per(reading.power_w, speed.tokens_per_s),
            j_per_sample=_per(reading.power_w, speed.samples_per_s),
            devices=self._devices(present, reading.estimated),
            budgets=budget_uses(record.spec, role, stage, lines),
            contention=self._contention(present),
        )

    def _devices(self, present: Sequence[tuple[str, int, Path]], estimated: bool) -> tuple[LiveDevice, ...]:
        return tuple(
            LiveDevice(
                host=host,
                device=tally.device.device,
                component=tally.device.component,
                name=tally.device.name,
                energy_j=tally.energy_j,
                index=tally.device.facts.get("gpu_index"),
                power_w=tally.power_w,
                utilization_percent=tally.latest.get("gpu_utilization_percent"),
                temperature_c=tally.latest.get("temperature_C"),
                sm_clock_mhz=tally.latest.get("sm_clock_MHz"),
                throttling=throttle_reasons_text(tally.latest.get("throttle_reasons")),
            )
            for host, _, path in present
            for tally in self._traces.trace(path).devices(estimated)
        )

    def _contention(self, present: Sequence[tuple[str, int, Path]]) -> str:
        """CPU contention on the most contended host over about the last second."""
        lines = [self._traces.trace(path).cores for _, _, path in present]
        worst = most_contended([core_use(line) for line in lines if line])
        return worst.text if worst is not None and worst.contended else ""

    def _stage(self, present: Sequence[tuple[str, int, Path]]) -> tuple[str, str]:
        """The stage that rank 0 started last, and its role."""
        files = self.paths.event_files()
        found = [files[host, number][0] for host, number, _ in present if files.get((host, number))]
        if not found:
            return "", ""
        path = min(found)[1]
        return self._events.setdefault(path, _OpenStages(path)).latest()


class _OpenStages:
    """Follows the stage marks of one process."""

    def __init__(self, path: Path) -> None:
        self._lines = NewLines(path)
        self._open: dict[str, str] = {}

    def latest(self) -> tuple[str, str]:
        for line in self._lines.read():
            if line.get("kind") == "stage":
                self._open.pop(line["stage"], None)
                if line["edge"] == "begin":
                    self._open[line["stage"]] = line.get("role", "")
        return list(self._open.items())[-1] if self._open else ("between stages", "")


def _per(power_w: float | None, items_per_s: float | None) -> float | None:
    return power_w / items_per_s if power_w and items_per_s else None


def _co2e_g(energy_j: float | None, energy: Mapping[str, Any], estimated: bool) -> tuple[float, float] | None:
    if energy_j is None:
        return None
    grid = parse_grid(str(energy.get("grid", "none")))
    method: Method = "estimated" if estimated else "counter"
    found = co2e_of_range((energy_j, energy_j), method, grid, energy.get("pue"))
    return (found.co2e_g_low, found.co2e_g_high) if found else None


def budget_uses(
    spec: Mapping[str, Any], role: str, stage: str, lines: Sequence[Mapping[str, Any]]
) -> tuple[BudgetUse, ...]:
    """The limits of the current training, as its last lines of metrics state their use."""
    own = [line for line in lines if line.get("stage") == stage]
    teacher = spec.get("teacher")
    owner = teacher if role == "teacher" and isinstance(teacher, Mapping) else spec
    limits = owner.get("training") or {}
    if not own or not isinstance(limits, Mapping):
        return ()
    found = []
    for name, key, limit in (("steps", "step", "max_steps"), ("tokens", "tokens", "max_tokens")):
        if limits.get(limit) and (used := own[-1].get(key)) is not None:
            found.append(BudgetUse(name, used / limits[limit], f"{used:,} of {limits[limit]:,}"))
    # Clock and meter are read together: their lines state the fraction of the limit that is closer to its end.
    spent = next((line["budget_fraction"] for line in reversed(own) if "budget_fraction" in line), None)
    texts = {"max_time_s": duration_text, "max_energy_j": energy_text}
    metered = {key: limits[key] for key in texts if limits.get(key)}
    if spent is not None and len(metered) == 1:
        ((key, limit),) = metered.items()
        name = "energy" if key == "max_energy_j" else "time"
        found.append(BudgetUse(name, spent, f"{texts[key](spent * limit)} of {texts[key](limit)}"))
    elif spent is not None and metered:
        both = " or ".join(texts[key](limit) for key, limit in metered.items())
        found.append(BudgetUse("time or energy", spent, f"{percent_text(spent, 0)} of {both}"))
    fraction = next((line["fraction"] for line in reversed(own) if line.get("fraction") is not None), None)
    if not found and limits.get("epochs") and fraction is not None:
        epochs = float(limits["epochs"])
        found.append(BudgetUse("epochs", fraction, f"{fraction * epochs:.2f} of {epochs:g}"))
    return tuple(found)


def _ended(record: RunRecord, status: str) -> LiveRun:
    energy = record.best_energy
    return LiveRun(
        run_id=record.run_id,
        label=record.label,
        status=status,
        attempt=max((attempt.number for attempt in record.attempts), default=0),
        hosts=tuple(sorted({attempt.host for attempt in record.attempts})),
        energy_j=energy.energy_j,
        estimated=energy.method == "estimated",
        why=record.error.message if record.error else "",
    )


@dataclass(frozen=True)
class Speed:
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    fraction: float | None = None
    loss: float | None = None
    left_s: float | None = None


def read_speed(lines: Sequence[dict[str, Any]]) -> Speed:
    """Speed from the last lines of one stage in one attempt, which share a monotonic clock and have no gap."""
    logged = [line for line in lines if "loss" in line]
    if not logged:
        return Speed()
    last = logged[-1]
    same = [line for line in logged if (line.get("stage"), line["attempt"]) == (last.get("stage"), last["attempt"])]
    first = same[-SPEED_LINES:][0]
    span_s = (last["mono_ns"] - first["mono_ns"]) / NS
    fraction = last.get("fraction")
    if span_s <= 0:
        return Speed(fraction=fraction, loss=last["loss"])
    advance = fraction - first["fraction"] if fraction is not None and "fraction" in first else 0.0
    return Speed(
        tokens_per_s=_rate(first, last, "tokens", span_s),
        samples_per_s=_rate(first, last, "samples", span_s),
        fraction=fraction,
        loss=last["loss"],
        left_s=max(0.0, 1.0 - fraction) * span_s / advance if fraction is not None and advance > 0 else None,
    )


def _rate(first: dict[str, Any], last: dict[str, Any], what: str, span_s: float) -> float | None:
    rise = last.get(what, 0) - first.get(what, 0)
    return rise / span_s if rise > 0 else None


def last_lines(path: Path) -> list[dict[str, Any]]:
    """The last lines of a JSONL file, read from its end because it may be large."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - _TAIL_BYTES)
        file.seek(start)
        raw = file.read().split(b"\n")
    whole = raw[1:-1] if start else raw[:-1]
    found = []
    for line in whole:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _sum(before_j: float | None, now_j: float | None) -> float | None:
    return None if before_j is None and now_j is None else (before_j or 0.0) + (now_j or 0.0)


UNKNOWN = "UNKNOWN"
"""State of a job where Slurm cannot be queried, for example on a machine without it."""


@dataclass(frozen=True)
class JobLine:
    """A job, or a task of an array."""

    key: str
    job_id: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class WatchedJobs:
    name: str
    runs: tuple[LiveRun, ...]
    jobs: tuple[JobLine, ...] = ()

    @property
    def over(self) -> bool:
        """A queued run counts as over if no job is left to start it; without Slurm this is unknown."""
        states = {job.state for job in self.jobs}
        if not states.isdisjoint(slurm.ALIVE):
            return False
        return all(run.over or (run.status == "queued" and UNKNOWN not in states) for run in self.runs)

    @property
    def succeeded(self) -> bool:
        return all(run.status == "done" for run in self.runs)

    def data(self) -> dict[str, Any]:
        runs, jobs = [asdict(run) for run in self.runs], [asdict(job) for job in self.jobs]
        return {"name": self.name, "over": self.over, "runs": runs, "jobs": jobs}


class Watcher:
    """Polls a run, a group, or the runs of a job."""

    def __init__(self, store: Path, name: str) -> None:
        self.folder = find_watched(store, name)
        self._home = home_of(self.folder)
        self._whole = self.folder == self._home
        """False for a run that was submitted together with others."""
        self._runs: dict[str, RunWatcher] = {}
        self._killed: dict[str, LiveRun] = {}

    def poll(self) -> WatchedJobs:
        folders = self._run_folders()
        for folder in folders:
            self._runs.setdefault(folder.name, RunWatcher(folder))
        runs = tuple(self._with_energy(folder, self._runs[folder.name].poll()) for folder in folders)
        return WatchedJobs(self.folder.name, runs, self._jobs())

    def _with_energy(self, folder: Path, run: LiveRun) -> LiveRun:
        """With the energy of a killed run, which is in its trace only; it is computed once."""
        if run.status != "truncated" or run.energy_j is not None:
            self._killed.pop(folder.name, None)
            return run
        if folder.name not in self._killed:
            self._killed[folder.name] = _ended(load_record(folder), run.status)
        return self._killed[folder.name]

    def accounts(self) -> tuple[AccountedJob, ...]:
        """Energy of the finished jobs from Slurm's accounting, also stored in the directory."""
        return import_accounting(self._home)

    def _run_folders(self) -> list[Path]:
        """Runs with shards of the teacher's work, then the run or the members of the group."""
        store, found = self.folder.absolute().parent, [self.folder.absolute()]
        if (self.folder / "group.json").exists():
            store, members = store.parent, load_group(self.folder).members
            found = [store / member.run_id for member in members if member.run_id is not None]
        jobs = read_jobs(self._home) if self._whole else None
        submitted = [store / run for job in (jobs.jobs if jobs else ()) for run in job.runs]
        sharded = [folder for folder in dict.fromkeys(submitted) if folder not in found]
        return [folder for folder in (*sharded, *found) if (folder / "run.json").exists()]

    def _jobs(self) -> tuple[JobLine, ...]:
        jobs = self._submitted()
        try:
            known = slurm.states([job.job_id for job in jobs])
        except JoulelabError as error:  # the runs can be watched without Slurm
            return tuple(JobLine(job.key, job.job_id, UNKNOWN, error.message) for job in jobs)
        lines = []
        for job in jobs:
            own = [state for state in known.values() if self._concerns(job, state.job_id)]
            lines += [JobLine(job.key, state.job_id, state.state, state.reason) for state in own]
            if not own:
                lines.append(JobLine(job.key, job.job_id, "NOT_FOUND", "no longer known to Slurm"))
        return tuple(lines)

    def _submitted(self) -> list[SubmittedJob]:
        """All jobs of the run or group; for a run submitted with others only those that execute it."""
        jobs = read_jobs(self._home)
        return [job for job in (jobs.jobs if jobs else ()) if self._whole or self.folder.name in job.runs]

    def _concerns(self, job: SubmittedJob, job_id: str) -> bool:
        if self._whole:
            return job_id.partition("_")[0] == job.job_id
        return job.executes(self.folder.name, job_id)


def find_watched(store: Path, name: str) -> Path:
    """The directory of a run or group; a name of digits only is a job id."""
    if name.replace("_", "").isdigit() and not (store / name).exists():
        return folder_of_job(store, name)
    found = find_folder(store, name)
    return home_of(found) if name == "last" else found  # runs and group of a chain have the same timestamp


def watch_line(watched: WatchedJobs) -> str:
    """`demo-...: 3 of 7 runs done, 1 running`"""
    statuses = [run.status for run in watched.runs]
    others = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses) if status != "done"]
    done = f"{statuses.count('done')} of {plural(len(statuses), 'run')} done"
    return f"{watched.name}: {', '.join([done, *others])}"


def watch_grids(watched: WatchedJobs) -> tuple[Grid, ...]:
    grids = [_runs_grid(watched)]
    if watched.jobs:
        rows = [(job.key, job.job_id, job.state, job.reason or NOTHING) for job in watched.jobs]
        grids.append(without_empty_columns(make_grid("Jobs", "Job!|Id!|State!|Reason", rows)))
    return tuple(grids)


def _runs_grid(watched: WatchedJobs) -> Grid:
    estimated = any(run.estimated for run in watched.runs)
    scale = f"±{relative_text(KNOWN_MODEL_GAIN_ERROR_REL)} to ±{relative_text(FAMILY_GAIN_ERROR_REL)}"
    note = f"Estimated from CPU time ({scale}); not measured by a sensor." if estimated else ""
    reasons = [f"{run.run_id}: {run.why}" for run in watched.runs if run.why]
    notes = "\n".join([*reasons, note]).strip()
    if len(watched.runs) == 1 and watched.runs[0].status == "running":
        return make_grid(watched.name, "Reading|Now", live_rows(watched.runs[0]), notes)
    rows = [_cells(run) for run in watched.runs]
    energy = "So far" if any(run.status == "running" for run in watched.runs) else "Energy"
    titles = f"Run|Status|Loss>|Power>|{energy}>|Done>|Left>"
    return without_empty_columns(make_grid(watched.name, titles, rows, notes))


def live_rows(run: LiveRun) -> list[tuple[str, str]]:
    """Everything that is known about a running run, as lines of a terminal or a notebook."""
    rows = [("Run", f"{run.label}: {run.status}"), ("Energy so far", energy_text_of(run))]
    rows += [(tile.title, f"{tile.value} ({tile.remark})" if tile.remark else tile.value) for tile in now_tiles(run)]
    rows += [(f"Budget: {use.name}", f"{use.text} ({percent_text(use.fraction, 0)})") for use in run.budgets]
    return rows + [("Warning", text) for text in flags(run)]


def now_tiles(live: LiveRun) -> tuple[Tile, ...]:
    """The latest readings; a value that is not known has no tile."""
    estimated = "estimated" if live.estimated else ""
    tiles = [Tile("Stage", live.stage or live.status, f"attempt {live.attempt}" if live.attempt > 1 else "")]
    if live.power_w is not None:
        tiles.append(Tile("Power now", power_text(live.power_w), estimated or components_text(live)))
    for item, per_s, each in (
        ("token", live.tokens_per_s, live.j_per_token),
        ("sample", live.samples_per_s, live.j_per_sample),
    ):
        if per_s:
            energy = f"{with_prefix(each, 'J')} per {item}" if each is not None else ""
            tiles.append(
                Tile(f"{item.capitalize()}s per second", rate(per_s, ""), ", ".join(filter(None, [energy, estimated])))
            )
            break
    if live.loss is not None:
        tiles.append(Tile("Loss", f"{live.loss:.4f}"))
    if live.left_s is not None:
        left = [energy_text(live.left_j)] if live.left_j is not None else []
        if live.left_co2e_g is not None:
            left.append(grams(*live.left_co2e_g))
        remark = ", ".join(filter(None, [*left, estimated if left else ""]))
        tiles.append(Tile("Left in this stage", duration_text(live.left_s), remark))
    return tuple(tiles)


def flags(live: LiveRun) -> list[str]:
    """What makes the measurement doubtful at this moment, as sentences."""
    found = [
        f"Throttling of {device_title(live, device)}: {', '.join(device.throttling)}."
        for device in live.devices
        if device.throttling
    ]
    if live.contention:
        found.append(f"CPU contention now: {live.contention}.")
    return found


def device_title(live: LiveRun, device: LiveDevice) -> str:
    return f"{device.host} {device.title}" if len(live.hosts) > 1 else device.title


def components_text(run: LiveRun) -> str:
    """`GPU 2331 W, CPU 277 W`; empty if there is one component only."""
    powers = run.component_powers_w
    return ", ".join(f"{name.upper()} {power_text(watts)}" for name, watts in powers.items()) if len(powers) > 1 else ""


def energy_text_of(run: LiveRun) -> str:
    """Without an interval, which would need the whole trace."""
    if run.energy_j is None:
        return NOTHING
    return f"{energy_text(run.energy_j)}, estimated" if run.estimated else energy_text(run.energy_j)


def _cells(run: LiveRun) -> tuple[str, ...]:
    """A running run shows its stage as its status, so that a terminal of 80 columns folds little."""
    return (
        run.run_id,
        (run.stage or run.status) if run.status == "running" else run.status,
        NOTHING if run.loss is None else f"{run.loss:.4f}",
        NOTHING if run.power_w is None else power_text(run.power_w),
        energy_text_of(run),
        percent_text(run.fraction, 0) if run.fraction is not None else NOTHING,
        NOTHING if run.left_s is None else duration_text(run.left_s),
    )
