"""What the store's index keeps of a run: the columns of the tables `runs` and `stages`, each with its sentence.

`joulelab runs` lists from them and `joulelab query` asks them, so a column is described once, here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from joulelab.meter.figures import EnergyFigure
from joulelab.runs.measure_result import repeat_mean
from joulelab.runs.record import Grade, Result, RunRecord, StageRecord, Status
from joulelab.runs.summary import flat_summary

TEXT, NUMBER, INTEGER, YES_NO = "text", "number", "integer", "yes/no"
TIME, RESULTS, JSON = "time", "numbers by name", "JSON"


@dataclass(frozen=True)
class Column:
    kind: str
    about: str
    read: Callable[[Any], Any]
    """The value, from a record (of `runs`) or a stage's record (of `stages`)."""


def _path(path: str) -> Callable[[Any], Any]:
    """`totals.best.energy_j` of a record; nothing where a part of the way is missing."""

    def read(record: Any) -> Any:
        for name in path.split("."):
            record = getattr(record, name, None)
        return record

    return read


def _columns(*rows: tuple[str, str, str | Callable[[Any], Any], str]) -> dict[str, Column]:
    """(name, kind, where it is in the record, what it is)"""
    return {
        name: Column(kind, about, _path(where) if isinstance(where, str) else where)
        for name, kind, where, about in rows
    }


def _energies(of: str) -> tuple[tuple[str, str, str, str], ...]:
    return (
        ("gpu_j", NUMBER, f"{of}.gpu.energy_j", "joules of the GPUs; null where nobody measured them"),
        ("cpu_j", NUMBER, f"{of}.cpu.energy_j", "joules of the CPU packages (RAPL)"),
        ("dram_j", NUMBER, f"{of}.dram.energy_j", "joules of the memory (RAPL)"),
        ("cpu_estimate_j", NUMBER, f"{of}.cpu_estimate.energy_j", "CPU joules by the model; never part of energy_j"),
        ("codecarbon_j", NUMBER, f"{of}.codecarbon.energy_j", "what CodeCarbon said, where it ran"),
    )


def _results(record: RunRecord) -> list[tuple[str, float]]:
    return [(name, result.value) for name, result in record.results.items()]


def _of_repeats(record: RunRecord, *names: str) -> Any:
    found: Any = repeat_mean(record)
    for name in names:
        found = getattr(found, name, None)
    return found


RUNS: Mapping[str, Column] = _columns(
    ("run_id", TEXT, "run_id", "the run's folder in the store"),
    ("name", TEXT, "name", "what was run"),
    ("label", TEXT, "label", "the method it stands for in a comparison"),
    ("status", TEXT, "status", "queued, running, done, failed or truncated"),
    ("grade", TEXT, "validity.grade", "how far the measurement can be trusted, A to C"),
    ("pipeline", TEXT, lambda record: record.spec.get("pipeline"), "which pipeline ran the stages"),
    ("seed", INTEGER, lambda record: record.spec.get("seed"), "seed of everything random"),
    ("group_id", TEXT, "group", "the group it belongs to, if any"),
    ("created_at", TIME, "created_at", "when its folder was made"),
    ("host", TEXT, lambda record: record.attempts[-1].host if record.attempts else None, "its latest machine"),
    ("attempts", INTEGER, lambda record: len(record.attempts), "how often it was started"),
    ("duration_s", NUMBER, "totals.duration_s", "seconds of all attempts, idle baselines left out"),
    ("policy", TEXT, "totals.policy", "what energy_j means: measured, gpu_only or codecarbon"),
    (
        "energy_j",
        NUMBER,
        "totals.energy_j",
        "the run's own joules (policy), without what it reused; null: not measured",
    ),
    ("repeats", INTEGER, lambda record: _of_repeats(record, "count"), "of `measure --repeat`: how many; else null"),
    (
        "energy_per_repeat_j",
        NUMBER,
        lambda record: _of_repeats(record, "energy", "energy_j"),
        "mean over these repeats, without warm-ups",
    ),
    ("shown_energy_j", NUMBER, "totals.best.energy_j", "what tables show: energy_j, else the estimate"),
    ("shown_method", TEXT, "totals.best.method", "counter, integrated, estimated or missing"),
    ("half_width_j", NUMBER, "totals.best.half_width_j", "random 95 % half-width of shown_energy_j"),
    ("gain_error_rel", NUMBER, "totals.best.gain_error_rel", "stated scale error of the sensors"),
    ("coverage", NUMBER, "totals.best.coverage", "share of the time in which the sensors were seen"),
    (
        "lower_bound",
        YES_NO,
        "totals.best.is_lower_bound",
        "more energy was used than shown_energy_j: incomplete readings",
    ),
    *_energies("totals"),
    ("idle_power_w", NUMBER, "totals.idle_power_w", "mean power at rest, where it was measured"),
    ("above_idle_j", NUMBER, "totals.above_idle_j", "energy_j less the idle power over that time"),
    ("co2e_g_low", NUMBER, "totals.co2e.co2e_g_low", "grams of CO2e, low end; null without a grid"),
    ("co2e_g_high", NUMBER, "totals.co2e.co2e_g_high", "grams of CO2e, high end"),
    ("results", RESULTS, _results, "quality by name: results['student.accuracy']"),
    ("settings", JSON, lambda record: json.dumps(record.spec), "settings->>'$.training.learning_rate'"),
    ("error", TEXT, "error.message", "why it failed"),
)

STAGES: Mapping[str, Column] = _columns(
    ("stage", TEXT, "name", "name of the stage: <who>.<what>"),
    ("role", TEXT, "role", "whose work: data, teacher, student, evaluation, inference, setup or idle"),
    ("activity", TEXT, "activity", "what is done: train, evaluate, cache, generate, judge, infer, load, ..."),
    ("part_of", TEXT, "part_of", "the stage that this setup or repeated work was split from"),
    ("repeated", YES_NO, "repeated", "work that an interruption lost and a later attempt did again"),
    ("repeat", INTEGER, "repeat", "number of this run of a measured program; null for everything else"),
    ("number", INTEGER, "number", "its place in the run"),
    ("status", TEXT, "status", "running, done, failed or truncated"),
    ("grade", TEXT, "validity.grade", "how far its measurement can be trusted, A to C"),
    ("outside_totals", YES_NO, "outside_totals", "true for idle baselines"),
    ("started_at", TIME, lambda s: s.segments[0].started_at if s.segments else None, "begin of its first segment"),
    ("segments", INTEGER, lambda stage: len(stage.segments), "how many stretches it ran in"),
    ("duration_s", NUMBER, "duration_s", "seconds of all its segments"),
    ("energy_j", NUMBER, "energy_j", "joules under the run's policy"),
    ("shown_energy_j", NUMBER, "best.energy_j", "what tables show: energy_j, else the estimate"),
    ("shown_method", TEXT, "best.method", "counter, integrated, estimated or missing"),
    ("half_width_j", NUMBER, "best.half_width_j", "random 95 % half-width of shown_energy_j"),
    *_energies("energy"),
    ("above_idle_j", NUMBER, "above_idle_j", "energy_j less the idle power over that time"),
    ("mean_power_w", NUMBER, "mean_power_w", "mean power"),
    ("peak_power_w", NUMBER, "peak_power_w", "highest power the sensors could see"),
    ("samples", INTEGER, "samples", "samples that went through it"),
    ("tokens", INTEGER, "tokens", "tokens that went through it"),
    ("j_per_sample", NUMBER, "j_per_sample", "joules per sample"),
    ("j_per_token", NUMBER, "j_per_token", "joules per token"),
    ("samples_per_s", NUMBER, "samples_per_s", "samples per second"),
    ("tokens_per_s", NUMBER, "tokens_per_s", "tokens per second"),
)

# What `joulelab runs` needs beside the columns, ready to be printed.
LISTING, SUMMARY, STAGE_ROWS = "listing", "summary", "stage_rows"


def row_of(record: RunRecord) -> dict[str, Any]:
    """A run as one row of the index, its stages inside."""
    return {
        **_fitting(RUNS, record),
        LISTING: json.dumps(_listing(record)),
        SUMMARY: json.dumps(flat_summary(record), indent=2),
        STAGE_ROWS: [_stage_row(stage) for stage in record.stages],
    }


def _listing(record: RunRecord) -> dict[str, Any]:
    totals, repeats = record.totals, repeat_mean(record)
    return {
        "repeats": repeats.count if repeats else None,
        "record": record.model_dump(include={"run_id", "name", "label", "status", "group", "created_at"}),
        "grade": record.validity.grade,
        "results": {name: result.model_dump() for name, result in record.results.items()},
        "totals": totals
        and {
            "policy": totals.policy,
            "energy_j": repeats.energy.energy_j if repeats else totals.energy_j,
            "duration_s": repeats.duration_s if repeats else totals.duration_s,
        },
        "best": totals and (repeats.energy if repeats else totals.best).model_dump(exclude={"reason", "fix"}),
    }


@dataclass(frozen=True, slots=True)
class ListedTotals:
    policy: str
    energy_j: float | None
    duration_s: float
    best: EnergyFigure


@dataclass(frozen=True, slots=True)
class ListedValidity:
    grade: Grade | None


@dataclass(frozen=True, slots=True)
class ListedRun:
    """As much of a record as a list of runs shows; ten thousand whole ones would take seconds to build.

    Of a program that was measured several times the totals are those of one run of it, the mean over `repeats`.
    """

    run_id: str
    name: str
    label: str
    status: Status
    group: str | None
    created_at: str
    totals: ListedTotals | None
    results: dict[str, Result]
    validity: ListedValidity
    repeats: int | None = None


def listed_run(listing: str) -> ListedRun:
    """Not validated again: it was when it was indexed."""
    told = json.loads(listing)
    totals = None
    if told["totals"] is not None:
        figure = {**told["best"], "sources": tuple(told["best"]["sources"]), "reason": None, "fix": None}
        totals = ListedTotals(**told["totals"], best=EnergyFigure.model_construct(**figure))
    results = {name: Result.model_construct(**result) for name, result in told["results"].items()}
    return ListedRun(
        **told["record"],
        totals=totals,
        results=results,
        validity=ListedValidity(told["grade"]),
        repeats=told["repeats"],
    )


def _stage_row(stage: StageRecord) -> dict[str, Any]:
    return _fitting(STAGES, stage)


def _fitting(columns: Mapping[str, Column], record: RunRecord | StageRecord) -> dict[str, Any]:
    """Settings may hold anything; what a column cannot hold is left out, so that one odd run hides no other."""
    values = {name: column.read(record) for name, column in columns.items()}
    return {name: value if _FITS[columns[name].kind](value) else None for name, value in values.items()}


_FITS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys((TEXT, TIME, JSON), lambda value: isinstance(value, str)),
    NUMBER: lambda value: isinstance(value, int | float),
    INTEGER: lambda value: type(value) is int and -(2**63) <= value < 2**63,
    YES_NO: lambda value: isinstance(value, bool),
    RESULTS: lambda value: isinstance(value, list),
}


def arrow_fields(columns: Mapping[str, Column]) -> list[tuple[str, Any]]:
    import pyarrow as pa

    kinds = {
        TEXT: pa.string(),
        NUMBER: pa.float64(),
        INTEGER: pa.int64(),
        YES_NO: pa.bool_(),
        TIME: pa.string(),
        JSON: pa.string(),
        RESULTS: pa.map_(pa.string(), pa.float64()),
    }
    return [(name, kinds[column.kind]) for name, column in columns.items()]
