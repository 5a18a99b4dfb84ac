"""Runs made by hand for the report's tests: records, traces and predictions as a demo group leaves them.

Every number is chosen here, so that a golden text changes only when the report does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from joulelab.meter.figures import EnergyFigure, missing
from joulelab.meter.grids import co2e, parse_grid
from joulelab.meter.health import CoreUse
from joulelab.meter.trace import LineFile
from joulelab.runs.artifacts import Ancestor, external
from joulelab.runs.groups import GroupRecord, Member, varying
from joulelab.runs.paths import RunPaths, write_json
from joulelab.runs.record import (
    Attempt,
    EnergyByComponent,
    ErrorRecord,
    Note,
    Result,
    RunRecord,
    Segment,
    StageRecord,
    Totals,
    Validity,
    add_components,
)
from joulelab.runs.validity import Evidence, grade

NS = 1_000_000_000
FIRST_NS = 5_000 * NS
HOST = "laptop"
ITEMS = 1_000
STAMP = "2026-03-01T10:00:00.000000+00:00"
GRID = parse_grid("FR")
ESTIMATE = (
    "joules are ESTIMATED, not measured: CPU time x 2.5 W per hardware thread (AMD EPYC: middle of the EPYC rows); "
    "the scale may be off by ±70 %, which cancels in ratios on the same machine"
)
NO_GPU = missing("no NVIDIA driver was found", "install the driver")


def energy(joules: float, measured: bool) -> EnergyByComponent:
    """All of it from the GPU's counter, or all of it from the CPU model."""
    figure = EnergyFigure(
        energy_j=joules,
        method="counter" if measured else "estimated",
        half_width_j=0.6 + 0.002 * joules,
        gain_error_rel=0.05 if measured else 0.7,
        sources=("gpu:0",) if measured else ("estimate:cpu",),
    )
    absent = missing("RAPL is readable by root only", "chmod a+r the energy_uj files")
    off = missing("the estimate was not asked for", "energy.estimate_cpu=true")
    gpu, estimate = (figure, off) if measured else (NO_GPU, figure)
    return EnergyByComponent(gpu=gpu, cpu=absent, dram=absent, cpu_estimate=estimate)


@dataclass(frozen=True)
class Part:
    """A stage to be made: how long, how many joules, how many samples."""

    name: str
    seconds: float
    joules: float
    samples: int | None = None


def stages_of(parts: Sequence[Part], measured: bool, status: str = "done") -> tuple[StageRecord, ...]:
    made, cursor = [], FIRST_NS
    for number, part in enumerate(parts, 1):
        end = cursor + int(part.seconds * NS)
        by_component = energy(part.joules, measured)
        segment = Segment(attempt=1, host=HOST, started_at=STAMP, duration_s=part.seconds, start_ns=cursor, end_ns=end)
        made.append(
            StageRecord(
                name=part.name,
                number=number,
                status="done" if number < len(parts) else status,
                segments=(segment,),
                duration_s=part.seconds,
                energy=by_component,
                energy_j=by_component.under_policy("measured").energy_j,
                best=by_component.best("measured"),
                above_idle_j=part.joules - 10 * part.seconds if measured else None,
                mean_power_w=part.joules / part.seconds,
                peak_power_w=1.4 * part.joules / part.seconds,
                samples=part.samples,
                j_per_sample=part.joules / part.samples if part.samples else None,
                samples_per_s=part.samples / part.seconds if part.samples else None,
                co2e=co2e(by_component.best("measured"), GRID if measured else None, None),
                validity=validity_of(by_component.best("measured"), part.seconds),
            )
        )
        cursor = end
    return tuple(made)


def validity_of(figure: EnergyFigure, seconds: float, notes: tuple[Note, ...] = ()) -> Validity:
    return grade(Evidence(figure=figure, window_s=seconds, refresh_s=0.1, idle=()), notes)


def totals_of(stages: tuple[StageRecord, ...], measured: bool) -> Totals:
    summed = add_components([stage.energy for stage in stages], [stage.duration_s for stage in stages])
    figure = summed.under_policy("measured")
    return Totals(
        policy="measured",
        energy_j=figure.energy_j,
        figure=figure,
        best=summed.best("measured"),
        duration_s=sum(stage.duration_s for stage in stages),
        idle_power_w=10.0 if measured else None,
        above_idle_j=None,
        grid=GRID if measured else None,
        pue=1.2 if measured else None,
        co2e=co2e(summed.best("measured"), GRID if measured else None, 1.2),
        **{name: getattr(summed, name) for name in EnergyByComponent.model_fields},
    )


def make_record(
    label: str,
    seed: int,
    parts: Sequence[Part],
    *,
    measured: bool = False,
    correct: int | None = None,
    result: str = "student.accuracy",
    lineage: tuple[Ancestor, ...] = (),
    made: tuple[str, ...] = (),
    status: str = "done",
    name: str = "",
    error: ErrorRecord | None = None,
) -> RunRecord:
    short = name or "made-" + label.replace(" + ", "-").replace(" ", "-")
    stages = stages_of(parts, measured, status)
    totals = totals_of(stages, measured) if stages else None
    notes = () if measured else (Note(level="info", text="gpu not measured: no NVIDIA driver was found"),)
    notes += () if measured else (Note(level="warning", text=ESTIMATE),)
    attempt = Attempt(
        number=1,
        host=HOST,
        boot_id="b",
        started_at=STAMP,
        duration_s=totals.duration_s if totals else 0.0,
        closed=status == "done",
        energy=totals.components if totals else energy(0.0, measured),
    )
    return RunRecord(
        run_id=f"{short}-20260301T100000Z-00{seed:02x}".replace("<", "").replace(">", "").replace("/", ""),
        name=short,
        label=label,
        status=status,
        created_at=STAMP,
        spec={"name": short, "label": label, "seed": seed, "pipeline": "made", "training": {"learning_rate": 0.001}},
        attempts=(attempt,),
        stages=stages,
        totals=totals,
        results={} if correct is None else {result: Result(value=correct / ITEMS, trials=ITEMS, successes=correct)},
        made=made,
        lineage=lineage,
        validity=validity_of(totals.best, totals.duration_s, notes) if totals else Validity(notes=notes),
        error=error,
    )


def ancestor(name: str, joules: float, stages: tuple[str, ...], measured: bool) -> Ancestor:
    by_component = energy(joules, measured)
    return Ancestor(
        key=f"key-{name}",
        name=name,
        kind=name,
        made_by="made-teacher-20260301T100000Z-0000",
        stages=stages,
        energy={part: getattr(by_component, part) for part in EnergyByComponent.model_fields},
    )


def teacher_lineage(measured: bool) -> tuple[Ancestor, ...]:
    return (
        external("sample:minilm", "weights", "minilm").artifact,
        ancestor("tokenized-reviews", 12.0, ("data.preprocess",), measured),
        ancestor("teacher", 640.0, ("teacher.train",), measured),
        ancestor("teacher-cache", 130.0, ("teacher.logits",), measured),
    )


TEACHER_PARTS = (
    Part("data.preprocess", 4.0, 12.0, 2_500),
    Part("teacher.train", 90.0, 640.0, 4_500),
    Part("teacher.evaluate", 15.0, 82.0, 1_000),
    Part("teacher.logits", 22.0, 130.0, 1_500),
    Part("run.overhead", 3.0, 6.0),
)


def student_parts(joules: float) -> tuple[Part, ...]:
    return (
        Part("student.train", 24.0, joules, 6_000),
        Part("student.evaluate", 3.0, 9.0, 1_000),
        Part("run.overhead", 2.0, 4.0),
    )


def labels_only(seed: int, correct: int, joules: float = 120.0, measured: bool = False) -> RunRecord:
    data = (teacher_lineage(measured)[1],)
    return make_record("labels only", seed, student_parts(joules), measured=measured, correct=correct, lineage=data)


def distilled(label: str, seed: int, correct: int, joules: float, measured: bool = False, **more: Any) -> RunRecord:
    lineage = teacher_lineage(measured)
    return make_record(label, seed, student_parts(joules), measured=measured, correct=correct, lineage=lineage, **more)


def teacher_run(measured: bool = False) -> RunRecord:
    lineage = teacher_lineage(measured)
    made = tuple(part.key for part in lineage[1:])
    return make_record(
        "teacher",
        0,
        TEACHER_PARTS,
        measured=measured,
        correct=874,
        result="teacher.accuracy",
        lineage=lineage,
        made=made,
    )


def demo_records(measured: bool = False) -> list[RunRecord]:
    """A resolved gain (response KD), one that is not (the feature variant), and a baseline, two seeds each."""
    return [
        teacher_run(measured),
        labels_only(0, 790, 120.0, measured),
        labels_only(1, 796, 123.0, measured),
        distilled("response KD", 0, 826, 131.0, measured),
        distilled("response KD", 1, 834, 133.5, measured),
        distilled("response + feature KD", 0, 801, 152.0, measured),
        distilled("response + feature KD", 1, 795, 149.0, measured),
    ]


def with_contention(record: RunRecord) -> RunRecord:
    """The same run on a machine where other processes used the cores while the student was trained."""
    use = CoreUse(cores=2, others_cores=1.2, idle_cores=0.0)

    def estimate(figure: EnergyFigure) -> EnergyFigure:
        return figure.model_copy(update={"cpu_contention": True})

    stages = [stage.model_copy(update={"core_use": use, "best": estimate(stage.best)}) for stage in record.stages[:1]]
    totals = record.totals.model_copy(update={"best": estimate(record.totals.best)})
    return record.model_copy(update={"stages": (*stages, *record.stages[1:]), "totals": totals})


def group_of(records: Sequence[RunRecord], baseline: str = "labels only") -> GroupRecord:
    members = tuple(
        Member(label=r.label, seed=r.spec["seed"], experiment=r.name, spec=r.spec, run_id=r.run_id) for r in records
    )
    return GroupRecord(
        group_id="made-demo-20260301T100000Z-beef",
        name="Distilling a film critic",
        about="A two-layer student learns from labels alone, from a teacher's answers, and from its features as well.",
        baseline=baseline,
        created_at=STAMP,
        members=members,
        varying=varying([member.spec for member in members]),
    )


def correct_items(correct: int, seed: int) -> np.ndarray:
    """Which items are right: by an order of their own, shifted by method and seed."""
    order = (np.arange(ITEMS) * 7919 + 2 * correct + 31 * seed) % ITEMS
    return order < correct


def write_predictions(folder: Path, correct: int, seed: int) -> None:
    place = folder / "artifacts" / "student-predictions"
    place.mkdir(parents=True)
    labels = np.arange(ITEMS) % 2
    predicted = np.where(correct_items(correct, seed), labels, 1 - labels)
    ids = np.array([f"review-{i:05d}" for i in range(ITEMS)])
    np.savez(place / "predictions.npz", ids=ids, labels=labels, predicted=predicted)


def write_trace(paths: RunPaths, record: RunRecord, measured: bool) -> None:
    """Half a second between readings, with a ripple on top, so that a power curve has something to show."""
    file = LineFile(paths.trace(HOST, 1))
    device = {"device": "estimate:cpu", "component": "cpu_estimate", "name": "AMD EPYC", "gain_error_rel": 0.7}
    facts = {"w_per_thread": 2.5, "source": "middle of the EPYC rows", "model": "CPU time x rated watts per thread"}
    if measured:
        device, facts = {"device": "gpu:0", "component": "gpu", "name": "NVIDIA H200", "gain_error_rel": 0.05}, {}
    gone = [] if measured else [{"component": "gpu", "reason": "no NVIDIA driver was found", "fix": "install it"}]
    head = {"kind": "header", "timestamp": STAMP, "mono_ns": FIRST_NS, "host": HOST, "boot_id": "b"}
    head |= {"interval_s": 0.5, "wall_minus_mono_s": 0.0, "missing": gone}
    head |= {"devices": [{**device, "counted": True, "refresh_s": 0.1, "facts": facts}]}
    file.append(head, *_readings(record, measured))
    file.append({"kind": "end", "timestamp": STAMP, "mono_ns": record.stages[-1].segments[-1].end_ns})
    file.close()


def _readings(record: RunRecord, measured: bool) -> list[dict[str, Any]]:
    lines, total_j, tick = [], 0.0, NS // 2
    for stage in record.stages:
        segment = stage.segments[0]
        for step, mono_ns in enumerate(range(segment.start_ns, segment.end_ns, tick)):
            watts = (stage.mean_power_w or 0.0) * (1 + 0.3 * ((step * 7) % 5 - 2) / 2)
            total_j += watts / 2
            stamp = {"timestamp": STAMP, "mono_ns": mono_ns}
            if measured:
                lines.append({"kind": "gpu", **stamp, "device": "gpu:0", "power_watts": watts})
            else:
                lines.append({"kind": "estimate", **stamp, "device": "estimate:cpu", "busy_thread_s": total_j / 2.5})
    return lines


def write_run(store: Path, record: RunRecord, measured: bool = False, predictions: bool = True) -> Path:
    paths = RunPaths(store / record.run_id)
    write_json(paths.record, record)
    write_json(paths.environment, ENVIRONMENT)
    if record.stages:
        write_trace(paths, record, measured)
    result = record.results.get("student.accuracy")
    if result is not None and predictions:
        write_predictions(paths.folder, result.successes or 0, record.spec["seed"])
    return paths.folder


def write_group(store: Path, records: Sequence[RunRecord], measured: bool = False) -> Path:
    group = group_of(records)
    for record in records:
        write_run(store, record, measured)
    folder = store / "groups" / group.group_id
    write_json(folder / "group.json", group)
    return folder


ENVIRONMENT = {
    "host": HOST,
    "platform": "Linux-6.1-x86_64",
    "python": "3.11.9",
    "joulelab": "0.1.0",
    "cpu": {"model": "AMD EPYC", "threads": 2, "usable_threads": 2, "memory_bytes": 8_000_000_000},
    "gpus": [],
    "packages": {"torch": "2.8.0", "numpy": "2.1.0", "left-pad": "1.0"},
    "code": {"commit": "0123456789abcdef0123", "dirty": True},
}
