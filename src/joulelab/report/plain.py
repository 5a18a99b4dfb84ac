"""A comparison as plain data, for `--json`: numbers with their units, methods and reasons, and no infinity in it."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from joulelab.meter.figures import EnergyFigure
from joulelab.report.comparison import Comparison, EnergyRatio, QualityDifference, Row
from joulelab.report.pareto import pareto_rows, why_no_front
from joulelab.report.payback import RowPayback, paybacks
from joulelab.report.verdict import verdict
from joulelab.stats import Interval


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    return {
        "schema_version": 2,
        "name": comparison.name,
        "baseline": comparison.baseline,
        "quality": asdict(comparison.measure) if comparison.measure else None,
        "verdict": asdict(verdict(comparison)),
        "methods": [_row(row) for row in comparison.rows],
        "pareto_front": [row.label for row in pareto_rows(comparison)],
        "no_pareto_front": why_no_front(comparison) or None,
        "payback": [_payback(one) for one in paybacks(comparison)],
        "incomplete": [
            {"label": run.label, "seed": run.seed, "run_id": run.run_id, "why": run.why, "own": _figure(run.own)}
            for run in comparison.incomplete
        ],
    }


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
                "co2e": run.record.totals.co2e.model_dump() if run.record.totals and run.record.totals.co2e else None,
            }
            for run in row.runs
        ],
        "quality": row.quality,
        "quality_interval": _interval(row.interval),
        "difference": _difference(row.difference),
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


def _payback(one: RowPayback) -> dict[str, Any]:
    found = one.found
    return {
        "method": one.label,
        "against": one.against,
        "each": one.each,
        "pays_back": found.pays_back if found else None,
        "count": found.count if found else None,
        "low": _finite(found.low) if found else None,
        "high": _finite(found.high) if found else None,
        "spent_j": found.spent.value if found else None,
        "saved_j": found.saved.value if found else None,
        "reason": "; ".join(filter(None, [found.reason if found else "", one.reason])) or None,
        "quality": one.quality or None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _figure(figure: EnergyFigure | None) -> dict[str, Any] | None:
    return None if figure is None else figure.model_dump(mode="json")


def _interval(interval: Interval | None) -> dict[str, float | None] | None:
    """An open end is null: JSON has no infinity."""
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
    # with one seed the lower end is 0 and the upper open; neither is a bound that the data gave
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
