"""What a page opens with: tiles (energy, kWh, CO2e, time, quality, grade) and a verdict of at most three sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from joulelab.meter.figures import (
    EnergyFigure,
    amount_text,
    bound_mark,
    estimate_note,
    gain_text,
    labeled_text,
    method_text,
)
from joulelab.meter.grids import Co2e, GridFactor, co2e
from joulelab.meter.health import most_contended
from joulelab.report.compare.comparison import Comparison
from joulelab.report.compare.quality import quality_of
from joulelab.report.energy_sums import mixes_methods, run_energy
from joulelab.report.tables.bill_tables import EnergyBill, group_bill
from joulelab.report.tables.inference_rows import best_row, rows_in_use
from joulelab.report.wording import grams, listed
from joulelab.runs.groups import GroupRecord
from joulelab.runs.record import RunRecord, program_energy
from joulelab.units import J_PER_WH, duration_text, energy_text, kwh_text, percent_text, plural, power_text, with_prefix

MOST_SENTENCES = 3


@dataclass(frozen=True)
class Tile:
    title: str
    value: str
    remark: str = ""


def run_tiles(record: RunRecord) -> tuple[Tile, ...]:
    """Tiles of a run: energy of its own stages; for a measured program, the mean over its repeats without overhead."""
    totals, program, quality = record.totals, program_energy(record), quality_of(record)
    if totals is None:
        return (Tile("Energy", "missing", "nothing was recorded"), Tile("Status", record.status))
    figure, duration_s = record.best_energy, record.best_duration_s
    emitted = co2e(figure, totals.grid, totals.pue)
    mean = f"mean of {program.count} repeats" if program and program.count > 1 else ""
    power = power_text(figure.mean_power_w(duration_s)) if figure.energy_j is not None else ""
    setting = "measure with --grid FR" if program else "set energy.grid=FR"
    tiles = [*energy_tiles(figure, mean), _co2e_tile(figure, emitted, totals.grid, setting)]
    tiles.append(Tile("Time", duration_text(duration_s), f"mean power {power}" if power else ""))
    if quality is not None:
        value, _, interval = quality.text().partition(" [")
        tiles.append(Tile(quality.measure.heading, value, f"95 % interval [{interval}" if interval else ""))
    tiles += _inference_tiles(record)
    tiles.append(_grade_tile([record]))
    return tuple(tiles)


def energy_tiles(figure: EnergyFigure, remark: str = "", mixed: bool = False) -> list[Tile]:
    if figure.energy_j is None:
        return [Tile("Energy", "missing", "no sensor worked; reasons under How it was measured")]
    how = ", ".join(filter(None, [method_text(figure, mixed), gain_text([figure]), remark]))
    kwh, wh = kwh_text(figure.energy_j), with_prefix(figure.energy_j / J_PER_WH, "Wh")
    # below a thousandth of a kWh, its digits would need an exponent
    texts = (kwh, wh) if figure.energy_j >= J_PER_WH else (wh, "")
    electricity = (f"{bound_mark(figure)}{text}" if text else "" for text in texts)
    return [Tile("Energy", amount_text(figure), how), Tile("Electricity", *electricity)]


def _co2e_tile(figure: EnergyFigure, found: Co2e | None, grid: GridFactor | None, setting: str) -> Tile:
    """`setting`: how a grid is set for runs of this kind."""
    if found is None:
        no_grid = f"no grid was given; for France, {setting}"
        return Tile("CO2e", "not computed", no_grid if grid is None else "there is no energy to convert")
    low, high = found.co2e_g_low, found.co2e_g_high
    return Tile("CO2e", grams(low, high, figure.is_lower_bound), f"grid {grid.name}, {grid.year}" if grid else "")


def _inference_tiles(record: RunRecord) -> list[Tile]:
    """Tiles of the row with the least energy per item."""
    best, rows = best_row(record), [row for row in rows_in_use(record) if row.energy]
    if best is None or best.energy is None:
        return []
    figure = best.energy.gross()
    remark = f"{method_text(figure)}, median latency {with_prefix(best.latency_s, 's')}"
    several = f", lowest of {len(rows)} rows" if len(rows) > 1 else ""
    return [Tile(f"Energy per {best.values['item']}", amount_text(figure), remark + several)]


def _grade_tile(records: Sequence[RunRecord]) -> Tile:
    """The worst grade, and why."""
    graded = [record.validity for record in records if record.validity.grade]
    if not graded:
        return Tile("Grade", "none", "not graded")
    worst = max(graded, key=lambda validity: validity.grade or "")
    count = sum(validity.grade == worst.grade for validity in graded)
    share = f"{count} of {plural(len(records), 'run')}; " if len(records) > 1 else ""
    meaning = {"A": "sound", "B": "usable with care", "C": "not to be quoted"}[worst.grade or "C"]
    return Tile("Grade", worst.grade or "", f"{share}{meaning}" + (f": {worst.reasons[0]}" if worst.reasons else ""))


def group_tiles(group: GroupRecord, records: Sequence[RunRecord], comparison: Comparison | None) -> tuple[Tile, ...]:
    """Tiles of all runs together; quality is that of the best method."""
    bill = _bill(group, records)
    if bill is None:
        return (Tile("Energy", "missing", "no run has recorded energy"),)
    figure, mixed = bill.whole, mixes_methods(line.figure for line in bill.lines)
    emitted = co2e(figure, bill.grid, bill.pue)
    runs = f"sum of {len(records)} runs" if len(records) > 1 else ""
    setting = "measure with --grid FR" if all(map(program_energy, records)) else "set energy.grid=FR"
    tiles = [*energy_tiles(figure, runs, mixed), _co2e_tile(figure, emitted, bill.grid, setting)]
    tiles.append(Tile("Time", duration_text(sum(r.totals.duration_s for r in records if r.totals)), runs))
    measure = comparison.measure if comparison else None
    rows = [row for row in comparison.rows if row.quality is not None] if comparison else []
    if measure and rows:
        best = max(measure.sign * (row.quality or 0.0) for row in rows)
        labels = [row.label for row in rows if measure.sign * (row.quality or 0.0) == best]
        who = "all methods are equal" if len(labels) == len(rows) > 1 else listed(labels)
        tiles.append(Tile(f"Best {measure.title}", measure.text(measure.sign * best), who))
    return (*tiles, _grade_tile(records))


def _bill(group: GroupRecord, records: Sequence[RunRecord]) -> EnergyBill | None:
    return group_bill(group, records) if any(record.totals for record in records) else None


def run_sentences(record: RunRecord) -> tuple[str, ...]:
    """What the run used, why it is doubtful, and which stage used most."""
    doubts = []
    if record.error:
        ended = "was truncated" if record.status == "truncated" else record.status
        doubts.append(f"It {ended}: {record.error.message.rstrip('.')}.")
    counted = [stage.core_use for stage in record.stages if not stage.outside_totals]
    if (worst := most_contended(counted)) is not None and worst.contended:
        # how many cores, the note of the record alone states: each average has another figure
        doubts.append("CPU contention: timings and CPU estimates are unreliable; rerun on an idle machine.")
    if record.totals:
        doubts.append(estimate_note([record.totals.best], compared=False))
    if record.validity.grade and record.validity.grade != "A" and record.validity.reasons:
        doubts.append(f"Grade {record.validity.grade}: {'; '.join(record.validity.reasons).rstrip('.')}.")
    doubt = [text for text in doubts if text][:1]
    return (run_headline(record), *doubt, *_largest_stage(record))[:MOST_SENTENCES]


def _largest_stage(record: RunRecord) -> list[str]:
    stages = [stage for stage in record.stages if stage.best.energy_j and not stage.outside_totals]
    if len(stages) < 2 or any(stage.repeat is not None for stage in stages):
        return []
    largest = max(stages, key=lambda stage: stage.best.energy_j or 0.0)
    share = (largest.best.energy_j or 0.0) / sum(stage.best.energy_j or 0.0 for stage in stages)
    return [f"{largest.name} used {percent_text(share, 0)} of it ({energy_text(largest.best.energy_j)})."]


def run_headline(record: RunRecord) -> str:
    found, quality = run_energy(record), quality_of(record)
    has_stages = found.inherited is not None
    own = f"{labeled_text(found.own)}{', for its own stages' if has_stages else ''}"
    if found.own.energy_j is None:
        own = "energy missing"
    if program := program_energy(record):
        own = labeled_text(program.energy) + (f", mean of {program.count} repeats" if program.count > 1 else "")
    parts = [f"{record.label}: {record.status}", own]
    if quality is not None:
        parts.insert(1, f"{quality.measure.title} {quality.text()}")
    if found.inherited is not None and found.inherited.energy_j is not None:
        parts.append(f"{labeled_text(found.whole, found.mixed_whole)}, inherited energy included")
    return ", ".join(parts) + "."
