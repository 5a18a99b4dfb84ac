"""Tables for judging and reproducing runs: sensors, checklist, notes, differing settings, environment, commands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from joulelab.errors import JoulelabError
from joulelab.meter.figures import relative_text
from joulelab.meter.trace import read_header
from joulelab.report.tables.grid import Column, Grid, make_grid
from joulelab.report.wording import NOTHING, listed
from joulelab.runs.environment import read_snapshot
from joulelab.runs.groups import GroupRecord, varying
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import Check, RunRecord
from joulelab.runs.spec import BASE, EXPERIMENTS, check, experiment_names, load_spec, read_mapping
from joulelab.units import size_text

# Packages whose version can change results or energy.
_RELEVANT_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "nvidia-ml-py", "codecarbon")


def trace_headers(folders: Sequence[Path]) -> list[dict[str, Any]]:
    return [read_header(path) for folder in folders for _, _, path in RunPaths(folder).traces()]


def sensor_grid(headers: Sequence[Mapping[str, Any]]) -> Grid:
    """Every device that was read, once, and every component without a sensor, with a hint."""
    rows: dict[tuple[str, ...], None] = {}
    for header in headers:
        every = f"read every {header.get('interval_s', 1.0):g} s"
        for device in header.get("devices", ()):
            rows[_device_cells(device, every)] = None
    for header in headers:
        for gone in header.get("missing", ()):
            fix = f"; {gone['fix']}" if gone.get("fix") else ""
            rows[gone["component"], "missing", NOTHING, f"{gone['reason']}{fix}"] = None
    return make_grid("Sensors", "Component|Device|Scale error>|Details", list(rows))


def _device_cells(device: Mapping[str, Any], every: str) -> tuple[str, str, str, str]:
    scale = f"±{relative_text(device['gain_error_rel'])}" if device.get("gain_error_rel") else "not stated"
    facts = device.get("facts", {})
    how = [every, *(str(facts[key]) for key in ("model", "source") if key in facts)]
    if not device.get("counted", True):
        how.append("recorded, not counted: part of another device")
    name = f"{device['name']} ({device['device']})" if device["name"] != device["device"] else device["name"]
    return device["component"].replace("_", " "), name, scale, "; ".join(how)


def note_grid(records: Sequence[RunRecord]) -> Grid:
    """Validity notes of all runs, each text once with the number of runs it is about."""
    counts: dict[tuple[str, str], int] = {}
    for record in records:
        for note in record.validity.notes:
            counts[note.level, note.text] = counts.get((note.level, note.text), 0) + 1
    ordered = sorted(counts.items(), key=lambda item: item[0][0] != "warning")
    rows = [(level, f"{count} of {len(records)}", text) for (level, text), count in ordered]
    return make_grid("Meter notes", "Level!|Runs!|Note", rows)


def difference_grid(group: GroupRecord) -> Grid:
    """Settings that differ between the members, by value."""
    rows = [(key, _by_value(group, values)) for key, values in group.varying.items() if key != "label"]
    return make_grid("Settings that differ between the runs", "Setting!|Value: methods", rows)


def _by_value(group: GroupRecord, values: Sequence[Any]) -> str:
    found: dict[str, dict[str, None]] = {}
    for member, value in zip(group.members, values, strict=True):
        text = "not set" if value is None else json.dumps(value, ensure_ascii=False)
        found.setdefault(text, {})[member.label] = None
    return "; ".join(f"{text}: {', '.join(labels)}" for text, labels in found.items())


def environment_grid(folders: Sequence[Path]) -> Grid:
    """Machines and packages of all runs; differing values are marked."""
    found = [environment_cells(folder) for folder in folders if RunPaths(folder).environment.exists()]
    rows = []
    for key in dict.fromkeys(key for cells in found for key in cells):
        values = list(dict.fromkeys(cells.get(key, NOTHING) for cells in found))
        rows.append((key, values[0] if len(values) == 1 else "differs between runs: " + " | ".join(values)))
    return make_grid("Machine and packages", "What!|Value", rows)


def environment_cells(folder: Path) -> dict[str, str]:
    facts = read_snapshot(RunPaths(folder))
    cpu, packages = facts.get("cpu", {}), facts.get("packages", {})
    gpus = [f"{gpu.get('name')} (driver {gpu.get('driver')})" for gpu in facts.get("gpus", ())]
    memory_bytes = cpu.get("memory_bytes")
    cells = {
        "host": str(facts.get("host", NOTHING)),
        "processor": f"{cpu.get('model', '?')}, {cpu.get('usable_threads', '?')} of {cpu.get('threads', '?')} threads",
        "memory": size_text(memory_bytes) if isinstance(memory_bytes, int) else NOTHING,
        "GPUs": ", ".join(gpus) or "none",
        "system": str(facts.get("platform", NOTHING)),
        "Python": str(facts.get("python", NOTHING)),
        "joulelab": f"{facts.get('joulelab', '?')}, {_package_text(facts.get('joulelab_code'))}",
        "your folder": _commit_text(facts.get("code", {})) or "not in a git checkout",
    }
    return cells | {name: str(packages[name]) for name in _RELEVANT_PACKAGES if name in packages}


def _package_text(code: Mapping[str, Any] | None) -> str:
    """Older records have only the commit of the working directory."""
    return "commit not recorded" if code is None else _commit_text(code) or "installed package"


def _commit_text(code: Mapping[str, Any]) -> str:
    if not code.get("commit"):
        return ""
    return f"commit {str(code['commit'])[:12]}{' with uncommitted changes' if code.get('dirty') else ''}"


PATH = "PATH"
"""Stands for the folder of a file that the run named by an absolute path."""


def reproduce_command(record: RunRecord) -> str:
    """The verb or experiment with its changed settings; else the recorded config, relative to the store.

    Absolute paths are those of one machine: their folders are written as `PATH`.
    """
    pipeline, spec = record.spec.get("pipeline"), record.spec
    if pipeline == "measure":
        usual = {"repeat": 1, "warmup": 0}
        flags = [f"--{name}={spec[name]}" for name in usual if spec.get(name, usual[name]) != usual[name]]
        flags += _energy_flags(spec.get("energy", {}))
        program = [portable(str(word)) for word in spec.get("command", ())]
        return shlex.join(["joulelab", "measure", *flags, "--", *program])
    try:
        words, shipped = _shipped(record)
    except (JoulelabError, ImportError):
        return shlex.join(["joulelab", "run", f"{record.run_id}/config.yaml"])
    changed = varying([shipped, spec])
    # settings introduced after the record was written had their default
    settings = [
        f"{key}={portable(json.dumps(after, ensure_ascii=False))}"
        for key, (_, after) in changed.items()
        if _has(spec, key)
    ]
    return shlex.join(["joulelab", *words, *settings])


_SHORT_FLAGS = {"grid": "--grid", "price": "--price"}


def _energy_flags(energy: Mapping[str, Any]) -> list[str]:
    """Options of `joulelab measure` for settings of the meter that are not defaults: they change what is counted."""
    defaults = check({"pipeline": "measure", "name": "x"}).model_dump(mode="json")["energy"]
    flags: list[str] = []
    for key, value in energy.items():
        if key not in defaults or value == defaults[key]:
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        if key == "total_energy_policy" and value == "machine":
            flags.append("--scope=machine")
        else:
            flags.append(f"{_SHORT_FLAGS.get(key, f'--set=energy.{key}')}={portable(text)}")
    return flags


def _shipped(record: RunRecord) -> tuple[list[str], dict[str, Any]]:
    """The words of the command, and its settings without further ones."""
    pipeline, model = record.spec.get("pipeline"), record.spec.get("model")
    if pipeline in ("train", "infer") and isinstance(model, str) and record.name not in experiment_names():
        settings = {**read_mapping(EXPERIMENTS / f"{BASE}.yaml"), "pipeline": pipeline, "model": model}
        return [str(pipeline), portable(model)], check(settings).model_dump(mode="json")
    return ["run", record.name], load_spec(record.name).model_dump(mode="json")


def portable(text: str) -> str:
    """The text with the folders of absolute paths replaced by `PATH`, except `/sys` and `/proc`."""
    return re.sub(r"(?<![\w.:/~-])(?!/(?:sys|proc)/)~?/(?:[^\s/\"',]+/)*(?=[^\s/\"',]+)", f"{PATH}/", text)


def _has(settings: Mapping[str, Any], key: str) -> bool:
    first, _, rest = key.partition(".")
    return first in settings and (not rest or (isinstance(settings[first], Mapping) and _has(settings[first], rest)))


# Differences in these change energy independently of the method.
FLAGGED = ("processor", "GPUs")  # with the driver


def environment_differences(records: Sequence[RunRecord], folders: Mapping[str, Path]) -> Grid:
    """Only what differs, hardware and driver first."""
    rows = []
    for key, by_value in _environment_values(records, folders).items():
        if len(by_value) > 1:
            text = "; ".join(f"{value}: {', '.join(labels)}" for value, labels in by_value.items())
            rows.append(("hardware" if key in FLAGGED else "software", key, text))
    rows.sort(key=lambda row: row[0] != "hardware")
    note = (
        "Hardware or driver differ: energy ratios also reflect the machines."
        if any(row[0] == "hardware" for row in rows)
        else ""
    )
    return make_grid("Environment that differs between the runs", "Kind!|What!|Value: methods", rows, note)


def hardware_warning(records: Sequence[RunRecord], folders: Mapping[str, Path]) -> str:
    """A sentence for the verdict; empty if all runs had the same hardware and driver."""
    differing = [
        key for key, values in _environment_values(records, folders).items() if key in FLAGGED and len(values) > 1
    ]
    if not differing:
        return ""
    return f"The runs differ in {listed(differing)}: energy ratios reflect the machines as well as the methods."


def _environment_values(records: Sequence[RunRecord], folders: Mapping[str, Path]) -> dict[str, dict[str, list[str]]]:
    """What -> value -> labels."""
    known = [record for record in records if RunPaths(folders[record.run_id]).environment.exists()]
    cells = [(record.label, environment_cells(folders[record.run_id])) for record in known]
    found: dict[str, dict[str, list[str]]] = {}
    for key in dict.fromkeys(key for _, values in cells for key in values):
        for label, values in cells:
            labels = found.setdefault(key, {}).setdefault(values.get(key, "none"), [])
            if label not in labels:
                labels.append(label)
    return found


def hardware_text(folder: Path) -> str:
    """`NVIDIA H200`, `2 x NVIDIA H200`, else the processor, for a column."""
    if not RunPaths(folder).environment.exists():
        return "-"
    cells = environment_cells(folder)
    return cells["processor"].split(",")[0] if cells["GPUs"] == "none" else cells["GPUs"].split(" (driver")[0]


TICK = "✓"


def checklist_grid(records: Sequence[RunRecord]) -> Grid | None:
    """Checks as rows, methods as columns; a tick if all runs pass, else the worst grade and its count."""
    graded = [record for record in records if record.validity.checks]
    if not graded:
        return None
    labels = list(dict.fromkeys(record.label for record in graded))
    names = list(dict.fromkeys(check.name for record in graded for check in record.validity.checks))
    rows = []
    for name in names:
        checks = {label: _checks([r for r in graded if r.label == label], name) for label in labels}
        everyone = [check for found in checks.values() for check in found]
        worst = max(everyone, key=lambda check: (check.grade, not check.ok))
        rows.append((name, *(_cell(checks[label]) for label in labels), worst.text))
    columns = (Column("Check", whole=True), *(Column(label) for label in labels), Column("Worst finding"))
    note = (
        f"{TICK} passed in every run. A sound, B usable with care, C not to be quoted; a run's grade is its worst one."
    )
    return Grid("Checklist", columns, tuple(rows), note)


def _checks(records: Sequence[RunRecord], name: str) -> list[Check]:
    return [check for record in records for check in record.validity.checks if check.name == name]


def _cell(checks: Sequence[Check]) -> str:
    if not checks:
        return NOTHING
    if all(check.ok for check in checks):
        return TICK
    worst = max(check.grade for check in checks)
    count = sum(check.grade == worst for check in checks)
    return worst if count == len(checks) else f"{worst} in {count} of {len(checks)}"
