"""Machine-readable exports: a comparison as JSON and CSV; a bill as JSON, model card metadata and CodeCarbon CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Literal

import yaml

import joulelab
from joulelab.errors import UsageError
from joulelab.meter.figures import EnergyFigure, method_text, relative_text
from joulelab.meter.grids import Co2e, GridFactor
from joulelab.meter.grids import co2e as co2e_of
from joulelab.report.compare.break_even_report import RowBreakEven, at_equal_energy, break_even_rows
from joulelab.report.compare.comparison import Comparison, EnergyRatio, QualityDifference, Row
from joulelab.report.compare.pareto import pareto_rows, why_no_front
from joulelab.report.compare.scopes import shared_energies
from joulelab.report.compare.verdict import verdict
from joulelab.report.energy_sums import is_teacher, is_teacher_work, mixes_methods
from joulelab.report.tables.bill_tables import (
    COMPONENTS,
    BillLine,
    EnergyBill,
    artifact_bill,
    bill_grids,
    sentences,
)
from joulelab.report.tables.grid import to_markdown
from joulelab.report.tables.provenance import portable, reproduce_command
from joulelab.runs.artifacts import CARD, ELSEWHERE, UNMETERED, Ancestor, Bill, read_bill
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord
from joulelab.stats import Interval
from joulelab.units import J_PER_KWH, J_PER_WH


def comparison_data(comparison: Comparison, students: int = 1) -> dict[str, Any]:
    """With several students, `shared` has the energy of one of them and its ratio to the baseline by method."""
    shared = shared_energies(comparison, students) if students > 1 else {}
    by_method = {label: {"energy": _figure(one.mean), "ratio": _ratio(one.ratio)} for label, one in shared.items()}
    return {
        "schema_version": 2,
        "name": comparison.name,
        "baseline": comparison.baseline,
        "quality": asdict(comparison.measure) if comparison.measure else None,
        "verdict": asdict(verdict(comparison)),
        "methods": [_row(row) for row in comparison.rows],
        "pareto_front": [row.label for row in pareto_rows(comparison)],
        "no_pareto_front": why_no_front(comparison) or None,
        "break_even": [_break_even(one) for one in break_even_rows(comparison)],
        "equal_energy": _equal_energies(comparison),
        "incomplete": [
            {"label": run.label, "seed": run.seed, "run_id": run.run_id, "why": run.why, "own": _figure(run.own)}
            for run in comparison.incomplete
        ],
        **({"shared": {"students": students, "methods": by_method}} if shared else {}),
    }


def comparison_csv(comparison: Comparison, students: int = 1) -> str:
    """One line per method: the figures of `comparison_data`, with the names of nested fields joined by `_`. What is
    unknown is empty."""
    data = comparison_data(comparison, students)
    by_method = data["shared"]["methods"] if students > 1 else {}
    lines = []
    for row in data["methods"]:
        runs = row.pop("runs")
        counted = {"runs": len(runs), "run_ids": " ".join(run["run_id"] for run in runs)}
        one = by_method.get(row["label"])
        shared = {f"shared_by_{students}": {**(one["energy"] or {}), "ratio": one["ratio"]} if one else None}
        lines.append(dict(_flat({"label": row.pop("label"), "role": row.pop("role"), **counted, **row, **shared})))
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Without lists and what is unknown."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}_")
        elif value is not None and not isinstance(value, list):
            yield f"{prefix}{name}", value


def _equal_energies(comparison: Comparison) -> list[dict[str, Any]]:
    """Held-out losses, one value per pair of runs, of methods that were evaluated during training."""
    baseline = comparison.row(comparison.baseline)
    rows = comparison.methods if baseline else ()
    found = [(row.label, at_equal_energy(row, baseline, comparison)) for row in rows if baseline]
    return [{"method": label, "against": comparison.baseline, **asdict(one)} for label, one in found if one]


def _row(row: Row) -> dict[str, Any]:
    return {
        "label": row.label,
        "role": row.role,
        "runs": [
            {
                "run_id": run.record.run_id,
                "seed": run.seed,
                "quality": run.quality.result.value if run.quality else None,
                "trials": run.quality.result.trials if run.quality else None,
                "grade": run.record.validity.grade,
                "co2e": run.record.best_co2e.model_dump() if run.record.best_co2e else None,
            }
            for run in row.runs
        ],
        "quality": row.quality,
        "quality_interval": _interval(row.interval),
        "difference": _difference(row.difference),
        "agreement_with_teacher": _interval(row.agreement),
        "own": _figure(row.own),
        "inherited": _figure(row.inherited),
        "without_teacher": _figure(row.without_teacher),
        "with_teacher": _figure(row.with_teacher),
        "setup": _figure(row.setup),
        "repeated": _figure(row.repeated),
        "all_energy_used": _figure(row.whole),
        "adds_estimates_to_measurements": row.mixed,
        "teacher_share": row.teacher_share,
        "without_teacher_ratio": _ratio(row.student_ratio),
        "with_teacher_ratio": _ratio(row.full_ratio),
        "stages": [
            {"name": s.name, "inherited": s.inherited, "kind": s.kind, **(_figure(s.figure) or {})} for s in row.stages
        ],
        "samples_per_s": row.samples_per_s,
        "j_per_sample": row.j_per_sample,
        "unknown": list(row.unknown),
        "lower_bound": row.with_teacher.is_lower_bound,
    }


def _break_even(one: RowBreakEven) -> dict[str, Any]:
    found = one.found
    return {
        "method": one.label,
        "against": one.against,
        "each": one.each,
        "breaks_even": found.breaks_even if found else None,
        "count": found.count if found else None,
        "low": _finite(found.low) if found else None,
        "high": _finite(found.high) if found else None,
        "spent_j": found.spent.value if found else None,
        "saved_j": found.saved.value if found else None,
        "reason": "; ".join(filter(None, [found.reason if found else "", one.measured_in, one.reason])) or None,
        "quality": one.quality or None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _figure(figure: EnergyFigure | None) -> dict[str, Any] | None:
    return None if figure is None else figure.model_dump(mode="json")


def _interval(interval: Interval | None) -> dict[str, float | None] | None:
    """An unbounded end is null, because JSON has no infinity."""
    if interval is None:
        return None
    return {name: _finite(value) for name, value in asdict(interval).items()}


def _difference(difference: QualityDifference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    paired = difference.paired
    return {
        "interval": _interval(difference.interval),
        "p_value": paired.p_value if paired else None,
        "items": paired.items if paired else None,
        "by_seed": list(difference.by_seed),
        "resolved": difference.significant,
        "about": "trained models" if difference.models_only else "methods",
        "trained_models_differ": paired.significant if paired and difference.models_only else None,
        "would_need_repeats": difference.needed,
        "reason": difference.reason or None,
    }


def _ratio(found: EnergyRatio | None) -> dict[str, Any] | None:
    if found is None:
        return None
    interval = _interval(found.ratio)
    # with one seed the interval is [0, inf]: neither end comes from the data
    if interval is not None and interval["high"] is None:
        interval["low"] = None
    return {
        "interval": interval,
        "repeats": found.seeds,
        "paired_by_seed": found.paired,
        "same_sensors": found.same_devices,
        "resolved": found.significant,
        "would_need_repeats": found.needed,
        "reason": found.reason or None,
    }


# Settings of a student that copy a teacher's weights without naming them.
_TAKES_OVER = ("layers", "layers_of", "teacher_embeddings")


def training_type(bill: EnergyBill) -> Literal["fine-tuning", "pre-training"]:
    """The two values of the Hub: fine-tuning if the model itself (not its teacher) started from external weights."""
    return "fine-tuning" if _began_with_weights(bill) else "pre-training"


def _began_with_weights(bill: EnergyBill) -> bool:
    """Follows the lineage through data and earlier students, but not through a teacher's artifacts."""
    of_teacher = any(line.shared for line in bill.own) if bill.kind != "run" else _is_teacher(bill.record)
    lines = {line.key: line for line in bill.inherited}
    found = {one.key: one for one in bill.record.lineage} if bill.record else {}
    waiting, seen = list(_first(bill, found)), set[str]()
    while waiting:
        key = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        one = lines.get(key) or found.get(key)
        if one is None:
            continue
        weights = one.made_by == ELSEWHERE and one.kind in ("model", "weights")
        if weights and (of_teacher or not _only_teaches(one.name, bill.record.spec if bill.record else {})):
            return True
        shared = lines[key].shared if key in lines else is_teacher_work(found[key])
        if of_teacher or not shared:
            waiting += one.parents
    return False


def _first(bill: EnergyBill, lineage: Mapping[str, Ancestor]) -> tuple[str, ...]:
    """Keys that the model was made from; for a run, what it made or, if it kept nothing, what it used."""
    made = tuple(key for key in bill.record.made if key in lineage) if bill.record and bill.kind == "run" else ()
    return made or bill.roots


def _is_teacher(record: RunRecord | None) -> bool:
    return record is not None and is_teacher(record)


def _only_teaches(name: str, spec: Mapping[str, Any]) -> bool:
    return _is_teacher_in(spec, name) and not _takes_over(spec)


def _is_teacher_in(spec: Mapping[str, Any], name: str) -> bool:
    """An online teacher is used like initial weights; only the settings distinguish them."""
    teacher, student = (json.dumps(spec.get(who)) for who in ("teacher", "student"))
    return name in teacher and name not in student


def _takes_over(spec: Mapping[str, Any]) -> bool:
    student = spec.get("student")
    return isinstance(student, dict) and any(student.get(setting) for setting in _TAKES_OVER)


# Columns of CodeCarbon 3's emissions.csv in order; unknown ones stay empty.
CODECARBON_COLUMNS = (
    *("timestamp", "project_name", "run_id", "experiment_id", "duration", "emissions", "emissions_rate"),
    *("cpu_power", "gpu_power", "ram_power", "cpu_energy", "gpu_energy", "ram_energy", "energy_consumed"),
    *("water_consumed", "country_name", "country_iso_code", "region", "cloud_provider", "cloud_region", "os"),
    *("python_version", "codecarbon_version", "cpu_count", "cpu_model", "gpu_count", "gpu_model", "longitude"),
    *("latitude", "ram_total_size", "tracking_mode", "cpu_utilization_percent", "gpu_utilization_percent"),
    *("ram_utilization_percent", "ram_used_gb", "on_cloud", "pue", "wue"),
)
NO_GRID = "pass a grid: --grid FR, or --grid 40-60 (g/kWh)"


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


def model_card(bill: EnergyBill, co2e: Co2e | None, grid: GridFactor | None) -> str:
    """The Hub's `co2_eq_emissions` in grams, with method and uncertainty in `source`."""
    if bill.kind == "group":
        raise UsageError(f"{bill.title} is a group, and a model card describes one model", "pass the run that made it")
    trains = bill.record is None or any(stage.role in ("teacher", "student") for stage in bill.record.stages)
    if bill.kind == "run" and not trains:
        raise UsageError(
            f"{bill.title} trained no model", "name the run that did; a model card has the CO2e of training"
        )
    if co2e is None or grid is None:
        raise UsageError("a model card needs CO2e", NO_GRID)
    return _front_matter({"co2_eq_emissions": _emissions(bill, co2e, grid)})


def _front_matter(front: Mapping[str, Any]) -> str:
    return "---\n" + yaml.safe_dump(dict(front), sort_keys=False, allow_unicode=True, width=100) + "---\n"


def _emissions(bill: EnergyBill, co2e: Co2e, grid: GridFactor) -> dict[str, Any]:
    low_g, high_g = _grams(co2e)
    whole, building = bill.whole, "" if co2e.with_pue_co2e_g_low is None else " with the building (PUE)"
    shared = f", teacher shared by {bill.students} students" if bill.students > 1 else ""
    unknown = f"; not included (unknown): {', '.join(bill.unknown)}" if bill.unknown else ""
    least = "at least " if whole.is_lower_bound else ""
    uncertainty = f" ±{relative_text(whole.total_error_rel)}" if whole.total_error_rel and not least else ""
    source = (
        f"joulelab {joulelab.__version__}: {least}{(whole.energy_j or 0.0) / J_PER_WH:.4g} Wh{uncertainty} "
        f"({method_text(whole, bill.mixed)}{shared}), {low_g:.3g} to {high_g:.3g} g CO2e{building} "
        f"(grid: {grid.name}, {grid.year}){unknown}"
    )
    emissions: dict[str, Any] = {
        "emissions": float(f"{(low_g + high_g) / 2:.3g}"),
        "source": source,
        "training_type": training_type(bill),
        "geographical_location": grid.name,
    }
    hardware = _hardware(bill)
    return {**emissions, "hardware_used": hardware} if hardware else emissions


# The model card that a run writes into the folder of each model that it made.


_COMMIT_DIGITS = 40
_WEIGHTS = ("*.safetensors", "*.bin", "model.pt")
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def write_model_cards(paths: RunPaths, record: RunRecord) -> None:
    """`README.md` of the models of a closed run, in the Hub's format."""
    for folder in sorted(paths.artifacts.glob("*")):
        bill = read_bill(folder)
        if bill is not None and bill.key in record.made and any(any(folder.glob(name)) for name in _WEIGHTS):
            (folder / CARD).write_text(folder_card(bill, paths, record), encoding="utf-8")


def folder_card(bill: Bill, paths: RunPaths, record: RunRecord) -> str:
    energy = artifact_bill(bill, paths.folder.parent)
    grams = co2e_of(energy.whole, energy.grid, energy.pue)
    outside = [one for one in bill.ancestry if one.made_by == ELSEWHERE and one.kind != UNMETERED]
    models = [one for one in outside if one.kind in ("model", "weights", "fine-tuned-teacher")]
    of_teacher = any(line.shared for line in energy.own)  # a teacher's own card: its base model is no teacher
    taught = [one for one in models if one.used_as == "teacher" or _is_teacher_in(record.spec, one.name)]
    teachers = [] if of_teacher else taught
    bases = [one for one in models if one not in teachers]
    data = [one for one in outside if one not in models]
    copied = _takes_over(record.spec)
    front: dict[str, Any] = {
        "library_name": "transformers" if (paths.artifacts / energy.title / "config.json").exists() else "pytorch"
    }
    for field, found in (("base_model", [*bases, *(teachers if copied else ())]), ("datasets", data)):
        names = list(dict.fromkeys(name for one in found if (name := _hub_name(one)) is not None))
        if names:
            front[field] = names[0] if field == "base_model" and len(names) == 1 else names
    front["tags"] = ["joulelab", "energy"]
    if grams is not None and energy.grid is not None:
        front["co2_eq_emissions"] = _emissions(energy, grams, energy.grid)
    bill_command = f"joulelab bill {record.run_id}/{energy.title} --grid FR --format model-card"
    carbon = f"CO2e is not stated, because no grid was set: `{bill_command}`."
    if grams is not None and energy.grid is not None:
        carbon = f"Grid: {energy.grid.name}, {energy.grid.year}."
    lines = [
        f"# {record.name}: {energy.title}",
        str(record.spec.get("about") or f"Method: {record.label or record.name}."),
        "## Training inputs",
        "\n".join(
            f"- {role}: {_input_text(one)}"
            for role, some in (
                ("base model", bases),
                ("teacher, which also provided initial weights" if copied else "teacher", teachers),
                ("data", data),
            )
            for one in some
        )
        or "- randomly initialized weights and generated data",
        "## Energy",
        "\n\n".join([*sentences(energy, grams), carbon]),
        *(to_markdown(grid).strip() for grid in bill_grids(energy)),
        "## How to reproduce",
        f"    {reproduce_command(record)}",
        f"joulelab {joulelab.__version__}, run {record.run_id}. `bill.json` has the same energy with all ancestors.",
    ]
    return portable(_front_matter(front) + "\n" + "\n\n".join(lines) + "\n")


def _hub_name(one: Ancestor) -> str | None:
    """`org/name` of what came from the hub; the key of what was loaded from a file has its path and content hash."""
    name = one.key.removeprefix("external:").rpartition("@")[0].partition(":")[0]
    return name if _HUB_NAME.fullmatch(name) and len(one.key.rpartition("@")[2]) == _COMMIT_DIGITS else None


def _input_text(one: Ancestor) -> str:
    commit = one.key.rpartition("@")[2]
    return f"{one.name} at commit {commit}" if _hub_name(one) else f"{one.name} (content hash {commit})"


def _hardware(bill: EnergyBill) -> str:
    """Names of the devices in the bill; empty if the record has none."""
    sources = {source for line in bill.own for source in line.figure.sources}
    attempts = bill.record.attempts if bill.record else ()
    named = [device.name for attempt in attempts for device in attempt.devices if device.device in sources]
    return ", ".join(dict.fromkeys(named))


def codecarbon_csv(bill: EnergyBill, co2e: Co2e | None, grid: GridFactor | None, pue: float | None) -> str:
    """A row of own energy and time, and one of inherited energy without time, which other runs spent.

    Estimates are in the columns of CodeCarbon's own models, marked by `tracking_mode`; emissions are the middle of the
    range in kg. With a PUE, energy and emissions include the building, as in CodeCarbon's own file.
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
    # the time of stages that N students share cannot be divided among them
    duration_s = None if bill.students > 1 and any(line.shared for line in bill.own) else bill.duration_s
    sides = [("", bill.own_figure, own_mixed, bill.own_component, duration_s)]
    rest = bill.inherited_figure
    if rest is not None and rest.energy_j is not None:
        sides.append((", inherited", rest, rest_mixed, bill.inherited_component, None))
    out = io.StringIO()
    writer = csv.DictWriter(out, CODECARBON_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for suffix, figure, mixed, component, seconds in sides:
        part_kg = kg * (figure.energy_j or 0.0) / whole_j if kg is not None and whole_j else None
        row = {
            **everyone,
            "project_name": f"{bill.title}{suffix}",
            "run_id": f"{bill.made_by}{suffix.replace(', ', '-')}",
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
    """Range of CO2e in grams; with the PUE if it is known."""
    if co2e.with_pue_co2e_g_low is None or co2e.with_pue_co2e_g_high is None:
        return co2e.co2e_g_low, co2e.co2e_g_high
    return co2e.with_pue_co2e_g_low, co2e.with_pue_co2e_g_high
