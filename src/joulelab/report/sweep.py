"""A sweep's runs put together: for each configuration its speed and joules, with the spread over the repeats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulelab.meter.figures import EnergyFigure, missing
from joulelab.report.compare_rows import training_stage
from joulelab.report.joules import mean_figure, mixes_methods, run_joules
from joulelab.report.training_table import item_name, phase_clock, phase_joules, phase_times
from joulelab.report.utilisation import Utilisation, utilisation
from joulelab.runs.groups import GroupRecord
from joulelab.runs.record import RunRecord
from joulelab.stats import Interval, mean_t


@dataclass(frozen=True)
class FailedRun:
    label: str
    seed: int
    run_id: str | None
    why: str
    own: EnergyFigure


@dataclass(frozen=True)
class SweepRow:
    """One configuration; a mean with its t interval over the runs that are done."""

    label: str
    point: dict[str, Any]
    """The swept settings and their values here."""
    done: tuple[RunRecord, ...]
    asked: int
    items_per_s: Interval | None
    j_per_item: Interval | None
    lower_bound: bool
    """Whether readings are missing in a repeat: `j_per_item` is then a lower bound."""
    mean_power_w: Interval | None
    final_loss: Interval | None
    accuracy: Interval | None
    mfu: Interval | None
    peak_memory_bytes: Interval | None
    total: EnergyFigure
    mixed: bool
    """Whether some repeats were measured and others estimated: their mean is then no number to quote."""
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
    """Whose time the phases are in: the device's or the host's."""
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
    told = [record for record in records if record.status == "done"]
    return Sweep(
        name=group.name,
        about=group.about,
        axes=axes,
        item=item_name(told[0]) if told else "sample",
        clock="device" if told and all(phase_clock(record) == "device" for record in told) else "host",
        rows=tuple(rows),
        failed=_failed(group, by_id),
        records=tuple(records),
    )


def _row(label: str, point: dict[str, Any], done: list[RunRecord], asked: int, store: Path) -> SweepRow:
    stages = [stage for record in done if (stage := training_stage(record))]
    busy = [utilisation(store / record.run_id, stage) for record, stage in zip(done, stages, strict=False)]
    return SweepRow(
        label=label,
        point=point,
        done=tuple(done),
        asked=asked,
        items_per_s=_mean(stage.samples_per_s for stage in stages),
        j_per_item=_mean(stage.j_per_sample for stage in stages),
        lower_bound=any((stage.item_energy or stage.best).is_lower_bound for stage in stages),
        mean_power_w=_mean(stage.mean_power_w for stage in stages),
        final_loss=_results(done, ".final_loss"),
        accuracy=_results(done, ".accuracy"),
        mfu=_results(done, "model.train.mfu"),
        peak_memory_bytes=_results(done, "model.peak_memory_bytes"),
        total=mean_figure(run_joules(record).own for record in done) if done else missing("no run of it is done"),
        mixed=mixes_methods(stage.item_energy or stage.best for stage in stages),
        **_busy(busy),
        phase_s=_mean_by_name([phase_times(record) for record in done]),
        phase_j=_mean_by_name([{n: v["energy_j"] for n, v in phase_joules(record).items()} for record in done]),
    )


def _busy(found: Sequence[Utilisation]) -> dict[str, Interval | None]:
    return {
        "gpu_percent": _mean(one.gpu_percent for one in found),
        "cpu_percent": _mean(one.cpu_percent for one in found),
    }


def _mean(values: Iterable[float | None]) -> Interval | None:
    """Only over runs that have it; a figure that one repeat lacks is the others' mean."""
    known = [value for value in values if value is not None]
    return mean_t(known) if known else None


def _results(records: Sequence[RunRecord], ending: str) -> Interval | None:
    """Of the student where there are several: it comes last."""
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
            found.append(FailedRun(member.label, member.seed, record.run_id, why, run_joules(record).own))
    return tuple(found)
