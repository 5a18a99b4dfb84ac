"""Stage records of the distillation energy benchmark: stage JSON, `experiment_summary.json` and `stage_metrics.csv`.

A record states the energy of a whole stage: GPU energy from polled power, CPU energy from RAPL or, where RAPL could not
be read, CodeCarbon's estimate under the same name, and CodeCarbon's own total. The estimate is recognized because it
equals CodeCarbon's CPU figure, and is not taken as measured. The power samples in a stage JSON have no times of their
own, so they check the stated energy and give no interval.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from joulelab.meter.importers.power_log import ReportedEnergy, StageLog, amount, number
from joulelab.units import J_PER_KWH, energy_text

FORMAT_STAGE = "stage JSON of the distillation energy benchmark"
FORMAT_SUMMARY = "experiment_summary.json of the distillation energy benchmark"
FORMAT_TABLE = "stage_metrics.csv of the distillation energy benchmark"
# Its table as published, for copies that lost the header line.
TABLE_COLUMNS = (
    *("root", "cluster", "stage_dir", "experiment_id", "experiment_name", "stage_id", "stage_name", "source"),
    *("is_snapshot", "snapshot_step", "snapshot_type", "snapshot_time", "total_energy_policy", "pipeline"),
    *("student_size", "dataset_choice", "kd_temperature", "kd_alpha", "sft_max_new_tokens", "start_time", "end_time"),
    *("duration_seconds", "tokens_processed", "tokens_per_second", "gpu_energy_joules", "gpu_avg_power_watts"),
    *("gpu_peak_power_watts", "nvml_poll_interval_ms", "cpu_energy_joules", "total_energy_joules", "total_energy_kwh"),
    *("joules_per_token", "kwh_total", "total_codecarbon_energy_kwh", "codecarbon_emissions_kg"),
    *("codecarbon_cpu_energy_kwh", "codecarbon_gpu_energy_kwh", "codecarbon_ram_energy_kwh"),
)
_SOURCE_COLUMN = TABLE_COLUMNS.index("source")
_SOURCES = ("stage_json", "snapshot_json", "power_log", "experiment_summary")
# These records have no field for whose work a stage is; the benchmark's own script names say it.
_KINDS = (
    (re.compile(r"preprocess"), "data", "prepare"),
    (re.compile(r"logit_cach"), "teacher", "cache"),
    (re.compile(r"synthetic_(?!.*sft)|_generation"), "teacher", "generate"),
    (re.compile(r"preference"), "teacher", "judge"),
    (re.compile(r"eval|benchmark"), "evaluation", "evaluate"),
)
_KEPT = (
    *("experiment_name", "experiment_id", "pipeline", "student_size", "dataset_choice", "kd_temperature", "kd_alpha"),
    *("nvml_poll_interval_ms", "snapshot_step", "total_energy_policy", "codecarbon_emissions_kg"),
    *("codecarbon_cpu_energy_kwh", "codecarbon_gpu_energy_kwh", "codecarbon_ram_energy_kwh", "total_energy_joules"),
)
_SAMPLES_AGREE_REL = 0.1

Fields = Mapping[str, Any]


def is_stage(value: object) -> bool:
    return isinstance(value, dict) and "gpu_energy_joules" in value and bool({"stage_id", "stage_name"} & set(value))


def is_summary(value: object) -> bool:
    stages = value.get("stages") if isinstance(value, dict) else None
    return isinstance(stages, dict) and bool(stages) and all(map(is_stage, stages.values()))


def parse_json(text: str) -> dict[str, Any] | None:
    """A stage record or a summary; None for any other text."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text, parse_constant=number, parse_float=number)  # Infinity, NaN and 1e999 become null
    except (ValueError, RecursionError):
        return None
    return value if is_stage(value) or is_summary(value) else None


def table_looks_like(lines: Sequence[str]) -> bool:
    names = [cell.strip() for cell in lines[0].split(",")]
    return {"stage_id", "gpu_energy_joules"} <= set(names) or _lost_its_header(lines[0])


def _lost_its_header(line: str) -> bool:
    cells = next(csv.reader([line]), [])
    return len(cells) == len(TABLE_COLUMNS) and cells[_SOURCE_COLUMN].strip() in _SOURCES


def read_table(lines: Sequence[str]) -> tuple[list[StageLog], list[str]]:
    headerless = _lost_its_header(lines[0])
    notes = ["the table has no header line; its columns are read in their published order"] if headerless else []
    rows = list(csv.DictReader(lines, fieldnames=TABLE_COLUMNS) if headerless else csv.DictReader(lines))
    stages = []
    for row in rows:
        stage, own = read_stage(row)
        notes += own
        if stage is not None:
            stages.append(stage)
    if without := len(rows) - len(stages):
        notes.append(f"{without} rows have no duration or no energy and were skipped")
    return stages, list(dict.fromkeys(notes))


def _above_0(fields: Fields, name: str) -> float | None:
    """An amount of the record; its 0 stands for `not measured`."""
    return amount(fields.get(name)) or None


def read_stage(fields: Fields) -> tuple[StageLog | None, list[str]]:
    """The stage and remarks on it; None where it states no time or no energy."""
    name = str(fields.get("stage_id") or fields.get("stage_name") or "stage")
    started_s, ended_s = _above_0(fields, "start_time"), _above_0(fields, "end_time")
    duration_s = _above_0(fields, "duration_seconds")
    if duration_s is None and started_s and ended_s and ended_s > started_s:
        duration_s = ended_s - started_s
    notes: list[str] = []
    energies = []
    gpu_j = _gpu_energy_j(fields, name, duration_s, notes)
    if gpu_j is not None:
        energies.append(ReportedEnergy("gpu", gpu_j, "integrated", _above_0(fields, "gpu_peak_power_watts")))
    cpu_j = _above_0(fields, "cpu_energy_joules")
    codecarbon_cpu_kwh = _above_0(fields, "codecarbon_cpu_energy_kwh")
    if cpu_j is not None:
        if codecarbon_cpu_kwh is not None and math.isclose(cpu_j, codecarbon_cpu_kwh * J_PER_KWH, rel_tol=1e-6):
            notes.append(
                f"{name}: the CPU energy is CodeCarbon's estimate ({energy_text(cpu_j)}), not a reading of RAPL; "
                "it is not in the measured total"
            )
        else:
            energies.append(ReportedEnergy("cpu", cpu_j, "counter"))
    if (total_kwh := _above_0(fields, "total_codecarbon_energy_kwh")) is not None:
        energies.append(ReportedEnergy("codecarbon", total_kwh * J_PER_KWH, "estimated"))
    if not duration_s or not energies:
        return None, notes
    role, activity = next(
        ((role, activity) for kind, role, activity in _KINDS if kind.search(name)), ("student", "train")
    )
    tokens = _above_0(fields, "tokens_processed")
    snapshot = str(fields.get("snapshot", fields.get("is_snapshot", ""))).lower() == "true"
    stage = StageLog(
        name=name,
        role=role,
        activity=activity,
        duration_s=duration_s,
        started_s=started_s,
        energies=tuple(energies),
        tokens=None if tokens is None else round(tokens),
        complete=not snapshot,
        facts={key: fields[key] for key in _KEPT if fields.get(key) not in (None, "", 0.0)},
    )
    return stage, notes


def _gpu_energy_j(fields: Fields, name: str, duration_s: float | None, notes: list[str]) -> float | None:
    stated_j = _above_0(fields, "gpu_energy_joules")
    samples = fields.get("gpu_power_samples")
    watts = [value for value in map(amount, samples) if value is not None] if isinstance(samples, list) else []
    if not watts or not duration_s:
        return stated_j
    mean_j = sum(watts) / len(watts) * duration_s
    if stated_j is None:
        notes.append(f"{name}: no GPU energy is stated; it is the mean of {len(watts)} power samples x duration")
        return mean_j
    if abs(mean_j / stated_j - 1) > _SAMPLES_AGREE_REL:
        notes.append(
            f"{name}: the mean of {len(watts)} power samples x duration is {energy_text(mean_j)}, the stated energy "
            f"{energy_text(stated_j)}; the stated one is used"
        )
    return stated_j


def final_stages(found: Sequence[tuple[Path, StageLog]]) -> list[tuple[Path, StageLog]]:
    """Each stage once: the complete record, or else its longest snapshot. Copies of a record count once."""
    best: dict[tuple[str, float | None], tuple[Path, StageLog]] = {}
    for path, stage in found:
        key = (stage.name, stage.started_s)
        known = best.get(key)
        rank = (stage.complete, stage.duration_s)
        if known is None or rank > (known[1].complete, known[1].duration_s):
            best[key] = (path, stage)
    return list(best.values())
