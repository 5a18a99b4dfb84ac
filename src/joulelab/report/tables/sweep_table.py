"""Tables of a sweep: speed and energy per configuration with their spread over repeats, phases, and failed runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from joulelab.meter.figures import (
    LOWER_BOUND,
    EnergyFigure,
    amount_text,
    estimate_note,
    labeled_text,
    methods_text,
    missing,
)
from joulelab.report.compare.method_rows import training_stage, training_stage_name
from joulelab.report.compare.verdict import provenance
from joulelab.report.energy_sums import mean_figure, mixes_methods, run_energy
from joulelab.report.tables.grid import Grid, make_grid, to_rich
from joulelab.report.tables.training_table import (
    Utilization,
    item_name,
    phase_clock,
    phase_joules,
    phase_times,
    utilization,
)
from joulelab.report.wording import NOTHING
from joulelab.runs.groups import GroupRecord, short_name
from joulelab.runs.record import RunRecord
from joulelab.stats import Interval, mean_t
from joulelab.units import energy_text, percent_text, size_text, three_digits


@dataclass(frozen=True)
class FailedRun:
    label: str
    seed: int
    run_id: str | None
    why: str
    own: EnergyFigure


@dataclass(frozen=True)
class SweepRow:
    """One configuration; means with t intervals over its finished runs."""

    label: str
    point: dict[str, Any]
    """The swept settings and their values here."""
    done: tuple[RunRecord, ...]
    planned: int
    items_per_s: Interval | None
    j_per_item: Interval | None
    lower_bound: bool
    """Readings are missing in a repeat: `j_per_item` is a lower bound."""
    mean_power_w: Interval | None
    final_loss: Interval | None
    accuracy: Interval | None
    mfu: Interval | None
    peak_memory_bytes: Interval | None
    total: EnergyFigure
    mixed: bool
    """Some repeats were measured and others estimated: their mean should not be quoted."""
    gpu_percent: Interval | None
    cpu_percent: Interval | None
    phase_s: dict[str, float]
    phase_j: dict[str, float]


@dataclass(frozen=True)
class Sweep:
    name: str
    about: str
    axes: tuple[str, ...]
    item: str
    clock: str
    """Clock of the phases: `device` or `host`."""
    rows: tuple[SweepRow, ...]
    failed: tuple[FailedRun, ...]
    records: tuple[RunRecord, ...]


def read_sweep(group: GroupRecord, records: Sequence[RunRecord], store: Path) -> Sweep:
    axes = tuple(key for key in group.varying if key not in ("seed", "label"))
    points = [{key: group.varying[key][number] for key in axes} for number in range(len(group.members))]
    by_label = {member.label: point for member, point in zip(group.members, points, strict=True)}
    by_id = {record.run_id: record for record in records}
    rows = []
    for label, point in by_label.items():
        members = [member for member in group.members if member.label == label]
        started = [by_id[member.run_id] for member in members if member.run_id in by_id]
        done = [record for record in started if record.status == "done"]
        rows.append(_row(label, point, done, len(members), store))
    finished = [record for record in records if record.status == "done"]
    clocks = {phase_clock(record, training_stage_name(record)) for record in finished}
    return Sweep(
        name=group.name,
        about=group.about,
        axes=axes,
        item=item_name(finished[0]) if finished else "sample",
        clock="device" if clocks == {"device"} else "host",
        rows=tuple(rows),
        failed=_failed(group, by_id),
        records=tuple(records),
    )


def _row(label: str, point: dict[str, Any], done: list[RunRecord], planned: int, store: Path) -> SweepRow:
    stages = [stage for record in done if (stage := training_stage(record))]
    busy = [utilization(store / record.run_id, stage) for record, stage in zip(done, stages, strict=False)]
    return SweepRow(
        label=label,
        point=point,
        done=tuple(done),
        planned=planned,
        items_per_s=_mean(stage.samples_per_s for stage in stages),
        j_per_item=_mean(stage.j_per_sample for stage in stages),
        lower_bound=any((stage.item_energy or stage.best).is_lower_bound for stage in stages),
        mean_power_w=_mean(stage.mean_power_w for stage in stages),
        final_loss=_results(done, ".final_loss"),
        accuracy=_results(done, ".accuracy"),
        mfu=_results(done, "model.train.mfu"),
        peak_memory_bytes=_results(done, "model.peak_memory_bytes"),
        total=mean_figure(run_energy(record).own for record in done) if done else missing("no run of it is done"),
        mixed=mixes_methods(stage.item_energy or stage.best for stage in stages),
        **_busy(busy),
        phase_s=_mean_by_name([phase_times(record, training_stage_name(record)) for record in done]),
        phase_j=_mean_by_name([_phase_j(record) for record in done]),
    )


def _phase_j(record: RunRecord) -> dict[str, float]:
    return {name: row["energy_j"] for name, row in phase_joules(record, training_stage_name(record)).items()}


def _busy(found: Sequence[Utilization]) -> dict[str, Interval | None]:
    return {
        "gpu_percent": _mean(one.gpu_percent for one in found),
        "cpu_percent": _mean(one.cpu_percent for one in found),
    }


def _mean(values: Iterable[float | None]) -> Interval | None:
    """Over the runs that have a value."""
    known = [value for value in values if value is not None]
    return mean_t(known) if known else None


def _results(records: Sequence[RunRecord], ending: str) -> Interval | None:
    """Interval over the runs. If a run has several results with this ending, the last one counts: the student's."""
    found = [[result.value for name, result in record.results.items() if name.endswith(ending)] for record in records]
    return _mean(values[-1] for values in found if values)


def _mean_by_name(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}


def _failed(group: GroupRecord, by_id: dict[str, RunRecord]) -> tuple[FailedRun, ...]:
    found = []
    for member in group.members:
        record = by_id.get(member.run_id or "")
        if record is None:
            found.append(FailedRun(member.label, member.seed, None, "not started", missing("the run has not started")))
        elif record.status != "done":
            why = f"{record.status}: {record.error.message.splitlines()[0]}" if record.error else record.status
            found.append(FailedRun(member.label, member.seed, record.run_id, why, run_energy(record).own))
    return tuple(found)


Text_of = Callable[[float], str]
_WIDE = "wide interval"
_PHASES = ("input", "forward", "backward", "optimizer_step")


def sweep_view(sweep: Sweep) -> RenderableType:
    lines: list[RenderableType] = [Text(f"! {text}") for text in provenance(sweep.records)]
    lines += [to_rich(grid) for grid in sweep_grids(sweep)]
    return Group(*lines, Text(sweep_headline(sweep), style="bold"))


def sweep_grids(sweep: Sweep) -> tuple[Grid, ...]:
    grids = [configuration_grid(sweep), results_grid(sweep)]
    if any(row.phase_s or row.phase_j for row in sweep.rows):
        grids.append(phase_grid(sweep))
    if sweep.failed:
        grids.append(failed_grid(sweep))
    return tuple(grids)


def configuration_grid(sweep: Sweep) -> Grid:
    rows = [
        (
            *_point_cells(sweep, row),
            f"{len(row.done)}/{row.planned}",
            interval_text(row.items_per_s, three_digits),
            item_energy_text(row) + (" mixed" if row.mixed else ""),
            interval_text(row.mean_power_w, three_digits),
        )
        for row in sweep.rows
    ]
    titles = f"{_point_titles(sweep)}|Runs>|{sweep.item}s/s>|J per {sweep.item}>|Mean W>"
    note = "Of the training stage. Mean over the runs [95 % t interval over repeats]; one run alone has no interval."
    if doubt := estimate_note(_figures(sweep)):
        note += f" {doubt}"
    note += f" {LOWER_BOUND}." if any(row.lower_bound for row in sweep.rows) else ""
    shown = [interval for row in sweep.rows for interval in (row.items_per_s, row.j_per_item, row.mean_power_w)]
    if any(map(_is_wide, filter(None, shown))):
        note += f" {_WIDE.capitalize()}: the repeats are too few, or scatter too much, for one that excludes 0."
    return make_grid(f"Sweep {sweep.name} ({methods_text(_figures(sweep))})", titles, rows, note)


def results_grid(sweep: Sweep) -> Grid:
    """Further results; empty columns are left out."""
    columns: list[tuple[str, Callable[[SweepRow], str]]] = [
        ("Whole run>", lambda row: amount_text(row.total) if row.done else NOTHING),
        ("Final loss>", lambda row: interval_text(row.final_loss, lambda v: f"{v:.4g}")),
        ("Accuracy>", lambda row: interval_text(row.accuracy, percent_text)),
        ("MFU>", lambda row: interval_text(row.mfu, percent_text)),
        (
            "Peak memory>",
            lambda row: NOTHING if row.peak_memory_bytes is None else size_text(row.peak_memory_bytes.value),
        ),
        ("GPU busy>", lambda row: interval_text(row.gpu_percent, _percent)),
        ("CPU busy>", lambda row: interval_text(row.cpu_percent, _percent)),
    ]
    kept = [(title, cell) for title, cell in columns if any(cell(row) != NOTHING for row in sweep.rows)]
    rows = [(*_point_cells(sweep, row), *(cell(row) for _, cell in kept)) for row in sweep.rows]
    titles = "|".join([_point_titles(sweep), *(title for title, _ in kept)])
    busy = any("busy" in title for title, _ in kept)
    note = "Busy: share of time in which a kernel runs on the GPU; share of all CPU threads." if busy else ""
    return make_grid("Further results", titles, rows, note)


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def phase_grid(sweep: Sweep) -> Grid:
    rows = [(*_point_cells(sweep, row), *(_phase_cell(row, name) for name in _PHASES)) for row in sweep.rows]
    titles = "|".join([_point_titles(sweep), *(f"{name.replace('_', ' ')}>" for name in _PHASES)])
    note = "Phases are recorded by the trackers `simple` (time) and `energy` (energy)."
    return make_grid(f"Phases of a step: ms of {sweep.clock} time, J", titles, rows, note)


def _phase_cell(row: SweepRow, name: str) -> str:
    parts = [f"{1000 * row.phase_s[name]:.2f} ms"] if name in row.phase_s else []
    parts += [energy_text(row.phase_j[name])] if name in row.phase_j else []
    return ", ".join(parts) or NOTHING


def failed_grid(sweep: Sweep) -> Grid:
    rows = [(run.label, str(run.seed), run.run_id or NOTHING, run.why, labeled_text(run.own)) for run in sweep.failed]
    titles = "Configuration|Seed>|Run!|Why|Energy used"
    return make_grid("Runs that did not finish (not in the table)", titles, rows)


def sweep_headline(sweep: Sweep) -> str:
    known = [row for row in sweep.rows if row.j_per_item is not None and row.items_per_s is not None]
    if not known:
        return "No configuration has energy per item; the fastest is " + _fastest(sweep) + "."
    cheapest = min(known, key=lambda row: row.j_per_item.value if row.j_per_item else math.inf)
    rest = [row for row in known if row is not cheapest]
    words = f"Lowest energy per {sweep.item}: {cheapest.label} ({item_energy_text(cheapest)})"
    if not rest:
        return f"{words}."
    second = min(rest, key=lambda row: row.j_per_item.value if row.j_per_item else math.inf)
    apart = not cheapest.lower_bound and _apart(cheapest.j_per_item, second.j_per_item)
    words += "; distinguishable from" if apart else "; not distinguishable from"
    return f"{words} the next, {second.label}. Fastest: {_fastest(sweep)}."


def _apart(one: Interval | None, other: Interval | None) -> bool:
    """Whether the intervals do not overlap, which is stricter than a test of the difference."""
    # Two 95 % intervals that just touch belong to a difference at about p = 0.006, so this calls
    # fewer configurations distinguishable than a test would.
    return one is not None and other is not None and (one.high < other.low or other.high < one.low)


def _fastest(sweep: Sweep) -> str:
    fast = [row for row in sweep.rows if row.items_per_s is not None]
    if not fast:
        return "unknown"
    best = max(fast, key=lambda row: row.items_per_s.value if row.items_per_s else 0.0)
    return f"{best.label} ({interval_text(best.items_per_s, three_digits, f' {sweep.item}s/s')})"


def item_energy_text(row: SweepRow) -> str:
    """A lower bound has no interval: the spread over repeats does not cover missing readings."""
    if row.lower_bound and row.j_per_item is not None:
        return f"≥ {energy_text(row.j_per_item.value)}"
    return interval_text(row.j_per_item, energy_text)


def interval_text(interval: Interval | None, text: Text_of, unit: str = "") -> str:
    """`634 [554, 713]`; `unit` is added once, for a `text` without it."""
    if interval is None:
        return NOTHING
    if not math.isfinite(interval.high) or interval.low == interval.high:
        return f"{text(interval.value)}{unit}"
    if _is_wide(interval):
        return f"{text(interval.value)}{unit}, {_WIDE}"
    return f"{text(interval.value)} [{text(interval.low)}, {text(interval.high)}]{unit}"


def _is_wide(interval: Interval) -> bool:
    """With few scattered repeats a t interval reaches below 0, which is impossible for these quantities."""
    return math.isfinite(interval.high) and interval.low <= 0 and interval.low != interval.high


def _figures(sweep: Sweep) -> list[EnergyFigure]:
    stages = [stage for row in sweep.rows for record in row.done if (stage := training_stage(record))]
    return [stage.item_energy or stage.best for stage in stages]


def _point_titles(sweep: Sweep) -> str:
    return "|".join(f"{short_name(key, sweep.axes)}!" for key in sweep.axes) or "Configuration!"


def _point_cells(sweep: Sweep, row: SweepRow) -> tuple[str, ...]:
    return tuple(str(row.point[key]) for key in sweep.axes) or (row.label,)


def sweep_data(sweep: Sweep) -> dict[str, Any]:
    """As plain data for `--json`; an unbounded end of an interval is null."""
    rows = [
        {
            **{name: _plain(value) for name, value in vars(row).items() if name not in ("done", "total")},
            "runs": [{"run_id": record.run_id, "seed": record.spec.get("seed", 0)} for record in row.done],
            "total": row.total.model_dump(mode="json"),
        }
        for row in sweep.rows
    ]
    failed = [{**vars(run), "own": run.own.model_dump(mode="json")} for run in sweep.failed]
    return {"schema_version": 1, "name": sweep.name, "item": sweep.item, "configurations": rows, "failed": failed}


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return {name: number if math.isfinite(number) else None for name, number in asdict(value).items()}
    return value
