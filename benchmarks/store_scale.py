"""Speed of a store with many runs: first index, listing, a query, one new run, a killed writer.

    python benchmarks/store_scale.py --runs 10000

Every run folder has a whole record as a real run leaves it (eight stages, settings, lineage). Times are those of the
command as a user types it, start of the interpreter included. The last line is the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from joulelab.meter.figures import EnergyFigure, missing
from joulelab.runs.index import INDEX
from joulelab.runs.record import (
    Attempt,
    EnergyByComponent,
    Result,
    RunRecord,
    Segment,
    StageRecord,
    Totals,
    kind_by_name,
)

STAGES = ("data.preprocess", "teacher.train", "teacher.logits", "teacher.evaluate", "idle.before", "student.train")
STAMP = "2026-03-01T10:00:00.000000+00:00"


def record(number: int) -> RunRecord:
    figure = EnergyFigure(energy_j=1000.0 + number, method="counter", half_width_j=2.0, sources=("gpu:0",))
    absent = missing("RAPL is readable by root only", "chmod a+r the energy_uj files")
    energy = EnergyByComponent(gpu=figure, cpu=absent, dram=absent, cpu_estimate=absent)
    segment = Segment(attempt=1, host="node", started_at=STAMP, duration_s=10.0, start_ns=1, end_ns=10**10)
    stages = tuple(
        StageRecord(
            name=name,
            role=kind_by_name(name).role,
            activity=kind_by_name(name).activity,
            number=place,
            status="done",
            segments=(segment,),
            duration_s=10.0,
            energy=energy,
            energy_j=figure.energy_j,
            best=figure,
            above_idle_j=None,
            mean_power_w=100.0,
            peak_power_w=200.0,
            tokens=4096,
        )
        for place, name in enumerate(STAGES, 1)
    )
    totals = Totals(
        policy="measured",
        energy_j=figure.energy_j,
        figure=figure,
        best=figure,
        **{name: getattr(energy, name) for name in EnergyByComponent.model_fields},
        duration_s=60.0,
        idle_power_w=None,
        above_idle_j=None,
    )
    attempt = Attempt(number=1, host="node", boot_id="x", started_at=STAMP, duration_s=60.0, closed=True, energy=energy)
    return RunRecord(
        run_id=f"made-20260301T{number // 3600 % 24:02d}{number // 60 % 60:02d}{number % 60:02d}Z-{number % 65536:04x}",
        name="made",
        label=f"method {number % 7}",
        status="done",
        created_at=STAMP,
        spec={"pipeline": "classify", "seed": number % 3, "training": {"learning_rate": 3e-4, "epochs": 3}},
        attempts=(attempt,),
        stages=stages,
        totals=totals,
        results={"student.accuracy": Result(value=0.8, trials=1000, successes=800)},
    )


def make(store: Path, number: int) -> None:
    made = record(number)
    folder = store / made.run_id
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(made.model_dump_json(indent=2))


def timed(*words: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "joulelab", *words], check=True, capture_output=True)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--keep", type=Path, help="make the store here and leave it")
    count, kept = (given := parser.parse_args()).runs, given.keep
    store = kept or Path(tempfile.mkdtemp(prefix="joulelab-store-"))
    for number in range(count):
        make(store, number)
    place = ("--runs-dir", str(store))
    found = {"runs": count, "first_index_s": timed("runs", *place)}
    found["list_s"] = min(timed("runs", *place) for _ in range(3))
    found["list_json_s"] = timed("runs", "--json", *place)
    make(store, count)
    found["list_after_one_new_run_s"] = timed("runs", *place)
    requested = "select label, count(*), avg(energy_j) from stages join runs using (run_id) group by label"
    found["query_s"] = timed("query", requested.replace("avg(energy_j)", "avg(stages.energy_j)"), *place)
    found["index_bytes"] = (store / INDEX).stat().st_size
    for name, value in found.items():
        print(f"{name:<28} {value:>12.4g}")
    print(json.dumps(found))
    if kept is None:
        shutil.rmtree(store)


if __name__ == "__main__":
    main()
