"""A bill for machines: JSON, the Hub's model card (grams), and rows as CodeCarbon writes them (kWh and kg)."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

import yaml

import joulelab
from joulelab.errors import UsageError
from joulelab.meter.figure_text import method_text, relative_text
from joulelab.meter.figures import EnergyFigure
from joulelab.meter.grids import GridFactor
from joulelab.report.bill_model import COMPONENTS, BillLine, EnergyBill
from joulelab.report.joules import mixes_methods
from joulelab.report.training_type import training_type
from joulelab.runs.carbon import Co2e
from joulelab.units import J_PER_KWH, J_PER_WH

# The columns of CodeCarbon 3's emissions.csv, in its order; what joulelab does not know stays empty.
CODECARBON_COLUMNS = (
    *("timestamp", "project_name", "run_id", "experiment_id", "duration", "emissions", "emissions_rate"),
    *("cpu_power", "gpu_power", "ram_power", "cpu_energy", "gpu_energy", "ram_energy", "energy_consumed"),
    *("water_consumed", "country_name", "country_iso_code", "region", "cloud_provider", "cloud_region", "os"),
    *("python_version", "codecarbon_version", "cpu_count", "cpu_model", "gpu_count", "gpu_model", "longitude"),
    *("latitude", "ram_total_size", "tracking_mode", "cpu_utilization_percent", "gpu_utilization_percent"),
    *("ram_utilization_percent", "ram_used_gb", "on_cloud", "pue", "wue"),
)
NO_GRID = "grams need a grid, and none was named: --grid FR, or --grid 40-60 in g/kWh"


def bill_data(bill: EnergyBill, co2e: Co2e | None) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "of": bill.title,
        "kind": bill.kind,
        "made_by": bill.made_by,
        "students": bill.students,
        "provisional": bill.provisional,
        "own": _figure(bill.own_figure),
        "inherited": _figure(bill.inherited_figure),
        "together": _figure(bill.whole),
        "adds_estimates_to_measurements": bill.mixed,
        "unknown": list(bill.unknown),
        "lower_bound": bill.whole.is_lower_bound,
        "by_component": {name: _figure(bill.component(name)) for name in COMPONENTS},
        "co2e": co2e.model_dump() if co2e else None,
        "lines": [_line(bill, line, "own") for line in bill.own]
        + [_line(bill, line, "inherited") for line in bill.inherited],
    }


def _line(bill: EnergyBill, line: BillLine, paid: str) -> dict[str, Any]:
    return {
        "key": line.key,
        "name": line.name,
        "kind": line.kind,
        "made_by": line.made_by,
        "paid": paid,
        "shared_by_students": line.shared,
        "parents": list(line.parents),
        "energy": _figure(line.figure),
        "share": _figure(bill.share(line)),
        "by_component": {name: _figure(figure) for name, figure in line.components.items()},
    }


def _figure(figure: EnergyFigure | None) -> dict[str, Any] | None:
    return None if figure is None else figure.model_dump(mode="json")


def model_card(bill: EnergyBill, co2e: Co2e | None, grid: GridFactor | None) -> str:
    """The Hub's `co2_eq_emissions` in grams, with what it rests on in words: a bare number could mean anything."""
    if bill.kind == "group":
        raise UsageError(f"{bill.title} is a group, and a model card is of one model", "name the run that made it")
    if co2e is None or grid is None:
        raise UsageError("a model card wants grams of CO2e", NO_GRID)
    low_g, high_g = _grams(co2e)
    whole, building = bill.whole, "" if co2e.with_pue_co2e_g_low is None else " with the building (PUE)"
    shared = f", teacher shared by {bill.students} students" if bill.students > 1 else ""
    unknown = f"; not counted, because unknown: {', '.join(bill.unknown)}" if bill.unknown else ""
    least = "at least " if whole.is_lower_bound else ""
    uncertainty = f" ±{relative_text(whole.total_error_rel)}" if whole.total_error_rel and not least else ""
    source = (
        f"joulelab {joulelab.__version__}: {least}{(whole.energy_j or 0.0) / J_PER_WH:.4g} Wh{uncertainty} "
        f"({method_text(whole, bill.mixed)}{shared}), {low_g:.3g} to {high_g:.3g} g{building} "
        f"on the grid {grid.name}, {grid.year}{unknown}"
    )
    front: dict[str, Any] = {
        "co2_eq_emissions": {
            "emissions": float(f"{(low_g + high_g) / 2:.3g}"),
            "source": source,
            "training_type": training_type(bill),
            "geographical_location": grid.name,
        }
    }
    hardware = _hardware(bill)
    if hardware:
        front["co2_eq_emissions"]["hardware_used"] = hardware
    return "---\n" + yaml.safe_dump(front, sort_keys=False, allow_unicode=True, width=100) + "---\n"


def _hardware(bill: EnergyBill) -> str:
    """Names of the devices whose joules are in the bill; empty where the record does not name them."""
    sources = {source for line in bill.own for source in line.figure.sources}
    attempts = bill.record.attempts if bill.record else ()
    named = [device.name for attempt in attempts for device in attempt.devices if device.device in sources]
    return ", ".join(dict.fromkeys(named))


def codecarbon_csv(bill: EnergyBill, co2e: Co2e | None, grid: GridFactor | None, pue: float | None) -> str:
    """A row of its own joules and seconds, and one of inherited joules, whose seconds other runs had.

    Estimates go where CodeCarbon has its own models, and `tracking_mode` says so; grams are the middle of the range, in
    kg. Where a PUE is named, joules and grams are those with the building, as they are in CodeCarbon's own file.
    """
    kg = None if co2e is None else sum(_grams(co2e)) / 2000
    whole_j = bill.whole.energy_j
    everyone: dict[str, Any] = {
        "timestamp": bill.record.created_at if bill.record else "",
        "country_name": grid.name if grid else None,
        "country_iso_code": grid.code3 if grid else None,
        "codecarbon_version": f"joulelab {joulelab.__version__}",
        "pue": pue,
    }
    own_mixed, rest_mixed = (mixes_methods(line.figure for line in side) for side in (bill.own, bill.inherited))
    # stages that N students share took their seconds all the same: no time belongs to one student's share of them
    duration_s = None if bill.students > 1 and any(line.shared for line in bill.own) else bill.duration_s
    sides = [("", bill.own_figure, own_mixed, bill.own_component, duration_s)]
    rest = bill.inherited_figure
    if rest is not None and rest.energy_j is not None:
        sides.append((", inherited", rest, rest_mixed, bill.inherited_component, None))
    out = io.StringIO()
    writer = csv.DictWriter(out, CODECARBON_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for beside, figure, mixed, component, seconds in sides:
        part_kg = kg * (figure.energy_j or 0.0) / whole_j if kg is not None and whole_j else None
        row = {
            **everyone,
            "project_name": f"{bill.title}{beside}",
            "run_id": f"{bill.made_by}{beside.replace(', ', '-')}",
            "duration": seconds,
            "emissions": part_kg,
            "emissions_rate": part_kg / seconds if part_kg is not None and seconds else None,
            **{name: _kwh(part, pue) for name, part in _codecarbon_parts(figure, component).items()},
            "energy_consumed": _kwh(figure, pue),
            "tracking_mode": f"joulelab: {method_text(figure, mixed)}",
        }
        writer.writerow({name: "" if row.get(name) is None else row[name] for name in CODECARBON_COLUMNS})
    return out.getvalue()


def _codecarbon_parts(figure: EnergyFigure, component: Callable[[str], EnergyFigure]) -> dict[str, EnergyFigure]:
    cpu = component("cpu")
    if cpu.energy_j is None and figure.method == "estimated":
        cpu = component("cpu_estimate")
    return {"cpu_energy": cpu, "gpu_energy": component("gpu"), "ram_energy": component("dram")}


def _kwh(figure: EnergyFigure, pue: float | None) -> float | None:
    return None if figure.energy_j is None else figure.energy_j / J_PER_KWH * (pue or 1.0)


def _grams(co2e: Co2e) -> tuple[float, float]:
    """The range that a file with room for one number has to tell: with the building where its PUE is known."""
    if co2e.with_pue_co2e_g_low is None or co2e.with_pue_co2e_g_high is None:
        return co2e.co2e_g_low, co2e.co2e_g_high
    return co2e.with_pue_co2e_g_low, co2e.with_pue_co2e_g_high
