"""What a reader needs to judge and repeat the runs: sensors, notes, settings that differ, machine, commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from joulelab.errors import JoulelabError
from joulelab.meter.figure_text import relative_text
from joulelab.meter.trace import read_header
from joulelab.report.grid import Grid, make_grid
from joulelab.report.wording import NOTHING
from joulelab.runs.groups import GroupRecord, varying
from joulelab.runs.json_file import read_json
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord
from joulelab.runs.spec import load_spec
from joulelab.units import size_text

# Packages whose version can change a result or its joules.
_TELLING_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "nvidia-ml-py", "codecarbon")


def trace_headers(folders: Sequence[Path]) -> list[dict[str, Any]]:
    return [read_header(path) for folder in folders for _, _, path in RunPaths(folder).traces()]


def sensor_grid(headers: Sequence[Mapping[str, Any]]) -> Grid:
    """Every device that was read, once, and every component nobody could read, with the way to change that."""
    rows: dict[tuple[str, ...], None] = {}
    for header in headers:
        every = f"read every {header.get('interval_s', 1.0):g} s"
        for device in header.get("devices", ()):
            rows[_device_cells(device, every)] = None
    for header in headers:
        for gone in header.get("missing", ()):
            fix = f"; {gone['fix']}" if gone.get("fix") else ""
            rows[gone["component"], "missing", NOTHING, f"{gone['reason']}{fix}"] = None
    return make_grid("Sensors", "Component|Device|Scale error>|How", list(rows))


def _device_cells(device: Mapping[str, Any], every: str) -> tuple[str, str, str, str]:
    scale = f"±{relative_text(device['gain_error_rel'])}" if device.get("gain_error_rel") else "not stated"
    facts = device.get("facts", {})
    how = [every, *(str(facts[key]) for key in ("model", "source") if key in facts)]
    if not device.get("counted", True):
        how.append("recorded, not counted: it lies inside another device")
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
    return make_grid("Notes of the meter", "Level!|Runs!|Note", rows)


def difference_grid(group: GroupRecord) -> Grid:
    """Settings that differ between the members, by the value they take."""
    rows = [(key, _by_value(group, values)) for key, values in group.varying.items() if key != "label"]
    return make_grid("Settings that differ between the runs", "Setting!|Value: methods", rows)


def _by_value(group: GroupRecord, values: Sequence[Any]) -> str:
    found: dict[str, dict[str, None]] = {}
    for member, value in zip(group.members, values, strict=True):
        text = "not set" if value is None else json.dumps(value, ensure_ascii=False)
        found.setdefault(text, {})[member.label] = None
    return "; ".join(f"{text}: {', '.join(labels)}" for text, labels in found.items())


def environment_grid(folders: Sequence[Path]) -> Grid:
    """The machines and packages of all runs; what is not the same everywhere is said to differ."""
    found = [environment_cells(folder) for folder in folders if RunPaths(folder).environment.exists()]
    rows = []
    for key in dict.fromkeys(key for cells in found for key in cells):
        values = list(dict.fromkeys(cells.get(key, NOTHING) for cells in found))
        rows.append((key, values[0] if len(values) == 1 else "differs between runs: " + " | ".join(values)))
    return make_grid("Machine and packages", "What!|Value", rows)


def environment_cells(folder: Path) -> dict[str, str]:
    facts = read_json(RunPaths(folder).environment)
    cpu, packages = facts.get("cpu", {}), facts.get("packages", {})
    gpus = [f"{gpu.get('name')} (driver {gpu.get('driver')})" for gpu in facts.get("gpus", ())]
    cells = {
        "host": str(facts.get("host", NOTHING)),
        "processor": f"{cpu.get('model', '?')}, {cpu.get('usable_threads', '?')} of {cpu.get('threads', '?')} threads",
        "memory": size_text(cpu["memory_bytes"]) if "memory_bytes" in cpu else NOTHING,
        "GPUs": ", ".join(gpus) or "none",
        "system": str(facts.get("platform", NOTHING)),
        "Python": str(facts.get("python", NOTHING)),
        "joulelab": f"{facts.get('joulelab', '?')}, {_package_text(facts.get('joulelab_code'))}",
        "your folder": _commit_text(facts.get("code", {})) or "not in a git checkout",
    }
    return cells | {name: packages[name] for name in _TELLING_PACKAGES if name in packages}


def _package_text(code: Mapping[str, Any] | None) -> str:
    """Records of earlier versions have only the commit of the folder one started in."""
    return "commit not recorded" if code is None else _commit_text(code) or "installed package"


def _commit_text(code: Mapping[str, Any]) -> str:
    if not code.get("commit"):
        return ""
    return f"commit {code['commit'][:12]}{' with uncommitted changes' if code.get('dirty') else ''}"


def reproduce_command(record: RunRecord, folder: Path) -> str:
    """The named experiment with the settings that were changed; where it cannot be found, the config as it ran."""
    try:
        shipped = load_spec(record.name).model_dump(mode="json")
    except (JoulelabError, ImportError):
        return shlex.join(["joulelab", "run", str(RunPaths(folder).config)])
    changed = varying([shipped, record.spec])
    # a setting that is younger than the record had no other value then than the default it has now
    settings = [
        f"{key}={json.dumps(after, ensure_ascii=False)}"
        for key, (_, after) in changed.items()
        if _has(record.spec, key)
    ]
    return shlex.join(["joulelab", "run", record.name, *settings])


def _has(settings: Mapping[str, Any], key: str) -> bool:
    first, _, rest = key.partition(".")
    return first in settings and (not rest or (isinstance(settings[first], Mapping) and _has(settings[first], rest)))
