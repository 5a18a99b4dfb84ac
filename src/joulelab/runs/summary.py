"""`experiment_summary.json`: totals and stages as one flat mapping, for scripts that want a number without a schema."""

from __future__ import annotations

from typing import Any

from joulelab.meter.figures import EnergyFigure
from joulelab.meter.grids import Co2e, Cost
from joulelab.runs.record import RunRecord, program_energy
from joulelab.units import J_PER_KWH


def flat_summary(record: RunRecord) -> dict[str, Any]:
    flat: dict[str, Any] = {
        "run_id": record.run_id,
        "name": record.name,
        "label": record.label,
        "status": record.status,
        "seed": record.spec.get("seed"),
        "attempts": len(record.attempts),
    }
    if record.totals:
        flat |= {
            "total_energy_policy": record.totals.policy,
            "total_energy_j": record.totals.energy_j,
            "total_energy_kwh": _kwh(record.totals.energy_j),
            "shown_energy_j": record.totals.best.energy_j,
            "shown_energy_method": record.totals.best.method,
            **_errors("shown_energy_", record.totals.best),
            "duration_s": record.totals.duration_s,
            "idle_power_w": record.totals.idle_power_w,
            "above_idle_j": record.totals.above_idle_j,
            "grade": record.validity.grade,
            **_grams("total", record.totals.co2e),
            **_cost(record.totals.cost),
        }
        if record.totals.codecarbon.energy_j is not None:
            flat["codecarbon_energy_j"] = record.totals.codecarbon.energy_j
    if (program := program_energy(record)) is not None:
        flat |= {"program_energy_j": program.energy.energy_j, "program_duration_s": program.duration_s}
        if program.count > 1:
            flat |= {"repeats": program.count, "energy_per_repeat_j": program.energy.energy_j}
    for stage in record.stages:
        flat |= {
            f"{stage.name}.energy_j": stage.best.energy_j,
            f"{stage.name}.energy_kwh": _kwh(stage.best.energy_j),
            f"{stage.name}.method": stage.best.method,
            **_errors(f"{stage.name}.", stage.best),
            f"{stage.name}.duration_s": stage.duration_s,
            f"{stage.name}.mean_power_w": stage.mean_power_w,
            f"{stage.name}.peak_power_w": stage.peak_power_w,
            f"{stage.name}.samples": stage.samples,
            f"{stage.name}.tokens": stage.tokens,
            f"{stage.name}.tokens_per_s": stage.tokens_per_s,
            f"{stage.name}.above_idle_j": stage.above_idle_j,
            f"{stage.name}.grade": stage.validity.grade,
            **_grams(stage.name, stage.co2e),
        }
    flat |= {name: result.value for name, result in record.results.items()}
    return flat


def _errors(prefix: str, figure: EnergyFigure) -> dict[str, Any]:
    """Random half-width and gain error separately: which one matters depends on the comparison."""
    return {
        f"{prefix}half_width_j": figure.half_width_j,
        f"{prefix}gain_error_rel": figure.gain_error_rel,
        f"{prefix}coverage": figure.coverage,
        f"{prefix}lower_bound": figure.is_lower_bound,
    }


def _grams(prefix: str, emissions: Co2e | None) -> dict[str, Any]:
    """No keys at all without a grid: a null would read as a failed computation."""
    if emissions is None:
        return {}
    separator = "." if prefix != "total" else "_"
    return {
        f"{prefix}{separator}{name}": value
        for name, value in emissions.model_dump().items()
        if value is not None and name != "method"
    }


def _cost(found: Cost | None) -> dict[str, Any]:
    if found is None:
        return {}
    return {"total_cost_low": found.low, "total_cost_high": found.high, "total_cost_currency": found.currency}


def _kwh(energy_j: float | None) -> float | None:
    return None if energy_j is None else energy_j / J_PER_KWH
