"""A comparison as plain data, for `--json`: numbers with their units, methods and reasons, and no infinity in it."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from joulelab.meter.figures import EnergyFigure
from joulelab.report.compare import AccuracyDifference, Comparison, EnergyRatio, Row
from joulelab.report.verdict import verdict
from joulelab.stats import Interval


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "name": comparison.name,
        "baseline": comparison.baseline,
        "verdict": asdict(verdict(comparison)),
        "methods": [_row(row) for row in comparison.rows],
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
                "accuracy": run.accuracy.value,
                "trials": run.accuracy.trials,
                **({"lower_is_better": True} if run.accuracy.lower_is_better else {}),
                "grade": run.record.validity.grade,
                "co2e": run.record.totals.co2e.model_dump() if run.record.totals and run.record.totals.co2e else None,
            }
            for run in row.runs
        ],
        "accuracy": row.accuracy,
        "accuracy_interval": _interval(row.interval),
        "difference": _difference(row.difference),
        "own": _figure(row.own),
        "inherited": _figure(row.inherited),
        "with_teacher": _figure(row.with_teacher),
        "adds_estimates_to_measurements": row.mixed,
        "teacher_share": row.teacher_share,
        "own_ratio": _ratio(row.own_ratio),
        "with_teacher_ratio": _ratio(row.full_ratio),
        "stages": [{"name": s.name, "inherited": s.inherited, **(_figure(s.figure) or {})} for s in row.stages],
        "samples_per_s": row.samples_per_s,
        "j_per_sample": row.j_per_sample,
        "unknown": list(row.unknown),
    }


def _figure(figure: EnergyFigure | None) -> dict[str, Any] | None:
    return None if figure is None else figure.model_dump(mode="json")


def _interval(interval: Interval | None) -> dict[str, float | None] | None:
    """An open end is null: JSON has no infinity."""
    if interval is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in asdict(interval).items()}


def _difference(difference: AccuracyDifference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    paired = difference.paired
    return {
        "interval": _interval(paired.difference if paired else difference.over_seeds),
        "p_value": paired.p_value if paired else None,
        "items": paired.items if paired else None,
        "by_seed": list(difference.by_seed),
        "resolved": difference.resolved,
        "reason": difference.reason or None,
    }


def _ratio(found: EnergyRatio | None) -> dict[str, Any] | None:
    if found is None:
        return None
    interval = _interval(found.ratio)
    # with one seed the lower end is 0 and the upper open; neither is a bound that the data gave
    if interval is not None and interval["high"] is None:
        interval["low"] = None
    return {"interval": interval, "seeds": found.seeds, "resolved": found.resolved, "reason": found.reason or None}
