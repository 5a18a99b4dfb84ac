"""What stands below tables of inference: who else used the cores, why a row ended, why there are no joules."""

from __future__ import annotations

from collections.abc import Sequence

from joulelab.meter.figure_text import relative_text, uncertainty_note
from joulelab.meter.health import most_contended
from joulelab.report.inference_rows import InferenceRow
from joulelab.runs.record import RunRecord
from joulelab.units import power_text, three_digits

Named = Sequence[tuple[str, InferenceRow]]
"""Rows under the names that tell them apart in their table."""


def crowd_notes(rows: Named) -> list[str]:
    """A call waits its turn where others use the cores, on a GPU while its kernels are launched."""
    crowded = [(name, row) for name, row in rows if row.crowded]
    worst = most_contended([row.core_use for _, row in crowded])
    if worst is None:
        return []
    names = list(dict.fromkeys(name for name, _ in crowded))
    whose = "all rows" if len(crowded) == len(rows) else "; ".join(names)
    most = "in the worst of them " if len(crowded) > 1 else ""
    return [f"Crowded ({whose}): {most}{worst.text} meanwhile, so latencies are upper bounds. Run it on quiet cores."]


def ended_notes(rows: Named) -> list[str]:
    """Rows that ended for the same reason together, each with the interval that stands in its line of the table."""
    by_reason: dict[str, list[str]] = {}
    for name, row in rows:
        if reason := row.values.get("stopped"):  # older records of generations have none
            # of an estimate only the total uncertainty is printed, and no run time makes that smaller
            tight = f" (±{relative_text(row.energy.relative)})" if row.energy and not row.energy.estimated else ""
            by_reason.setdefault(reason, []).append(f"{name}{tight}")
    return [f"Ended by: {reason}: {'; '.join(names)}." for reason, names in by_reason.items()]


def energy_notes(rows: Sequence[InferenceRow]) -> list[str]:
    """How the joules of a table came about; nothing where there are none."""
    told = [row.energy for row in rows if row.energy is not None]
    if not told:
        return []
    measured = [energy for energy in told if not energy.estimated]
    notes = []
    if len(measured) < len(told):
        where = f"In {len(told) - len(measured)} of {len(told)} rows: " if measured else ""
        notes = [f"{where}Energy is estimated from CPU time, not measured; ±: total uncertainty; no net energy."]
    if not measured:
        return notes
    idle_w = [energy.idle_power_w for energy in measured if energy.idle_power_w is not None]
    if not idle_w:
        spread = uncertainty_note(energy.gross() for energy in measured)
        return [*notes, *([spread] if spread else []), "No idle baseline was measured, so there is no net energy."]
    powers = " to ".join(dict.fromkeys(three_digits(power_w) for power_w in (min(idle_w), max(idle_w))))
    return [
        *notes,
        f"Net: less the idle power of {powers} W, of before and after by their length; half their difference is in the "
        f"interval. {uncertainty_note(energy.gross() for energy in measured)} The gain error cancels in ratios on one "
        "card.",
    ]


def memory_notes(rows: Sequence[InferenceRow]) -> list[str]:
    on_gpu = rows[0].values["device"] == "cuda"
    return [] if on_gpu else ["Memory: the most the whole process ever held."]


def missing_notes(rows: Sequence[InferenceRow], record: RunRecord) -> list[str]:
    """The reason in full only where the run's own line about energy does not give it already."""
    reasons = list(dict.fromkeys(row.values["why_no_energy"] for row in rows if row.energy is None))
    if not reasons:
        return []
    told = record.totals.figure.reason if record.totals and record.totals.figure.energy_j is None else None
    if told and all(told in reason or reason in told for reason in reasons):
        return ["Not measured: joules and watts; the run's line `energy` says why."]
    return [f"Not measured: joules and watts. {'; '.join(reasons)}."]


def unused_gpu_notes(rows: Sequence[InferenceRow], record: RunRecord) -> list[str]:
    """The power of GPUs that were measured while the model ran on the CPU; the energy of an item leaves it out."""
    stages = [record.stage(row.stage) for row in rows]
    powers = [stage.unused_gpu_w for stage in stages if stage and stage.unused_gpu_w is not None]
    if not powers:
        return []
    text = " to ".join(dict.fromkeys(power_text(power_w) for power_w in (min(powers), max(powers))))
    return [f"GPU: {text}, not used by this model and not included; energy is that of the CPU."]
