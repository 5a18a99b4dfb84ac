"""What differs between runs beside their settings: machines, drivers, packages. Flagged, because joules follow them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from joulelab.report.facts import environment_cells
from joulelab.report.grid import Grid, make_grid
from joulelab.report.wording import listed
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord

# A difference in one of these changes joules for reasons that no method has.
FLAGGED = ("processor", "GPUs")  # with the driver


def environment_differences(records: Sequence[RunRecord], folders: Mapping[str, Path]) -> Grid:
    """Only what is not the same everywhere; hardware and driver first, with a mark."""
    rows = []
    for key, by_value in _by_value(records, folders).items():
        if len(by_value) > 1:
            told = "; ".join(f"{value}: {', '.join(labels)}" for value, labels in by_value.items())
            rows.append(("hardware" if key in FLAGGED else "software", key, told))
    rows.sort(key=lambda row: row[0] != "hardware")
    note = (
        "Hardware or driver differ: a ratio of joules then tells of the machines as well."
        if any(row[0] == "hardware" for row in rows)
        else ""
    )
    return make_grid("Environment that differs between the runs", "Kind!|What!|Value: methods", rows, note)


def hardware_warning(records: Sequence[RunRecord], folders: Mapping[str, Path]) -> str:
    """A sentence for the verdict; empty where all ran on the same kind of machine with the same driver."""
    differing = [key for key, values in _by_value(records, folders).items() if key in FLAGGED and len(values) > 1]
    if not differing:
        return ""
    return f"The runs differ in {listed(differing)}: ratios of joules tell of the machines as well as of the methods."


def _by_value(records: Sequence[RunRecord], folders: Mapping[str, Path]) -> dict[str, dict[str, list[str]]]:
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
    """`NVIDIA H200`, `2 x NVIDIA H200`, else the processor: what stands in a column."""
    if not RunPaths(folder).environment.exists():
        return "-"
    cells = environment_cells(folder)
    return cells["processor"].split(",")[0] if cells["GPUs"] == "none" else cells["GPUs"].split(" (driver")[0]
