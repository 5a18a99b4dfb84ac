"""Reported rates of a short compiled distillation compared with its steady state.

BERT-base is distilled into DistilBERT with random weights, as in `distilbert_step.py`, but as a run: `train_in_run`
with its stages and marks. Three figures: what the stage `student.train` reports; the same with the setup inside, as the
first release reported it; and the steady state, from the log lines between a fifth of the steps and the end.

    python benchmarks/training_rates.py --steps 500
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import get_args

import torch
from distilbert_step import Way, make_batches, make_models

from joulelab.distill.distilbert.objective import FrozenTeacher, LmObjective
from joulelab.meter.config import EnergyConfig
from joulelab.meter.integrate import component_energy
from joulelab.meter.series import load_trace
from joulelab.meter.trace import read_lines
from joulelab.runs.measure.result import MeasuredRun, MeasureSpec
from joulelab.runs.paths import RunPaths
from joulelab.train.config import CompileMode, Precision, TrainingConfig
from joulelab.train.optim import compile_in_place
from joulelab.train.training_session import TrainingJob, train_in_run


def assignment(way: Way, steps: int, folder: Path, tiny: bool, device: torch.device) -> TrainingJob:
    student, teacher = make_models(tiny, device)
    batches, scales = make_batches(folder, way.batch_size)
    frozen = FrozenTeacher(teacher, torch.bfloat16 if way.precision == "bf16" else None)
    compile_in_place(frozen.model, way.compiled)
    config = TrainingConfig(
        epochs=None, max_steps=steps, batch_size=way.batch_size, precision=way.precision, compile=way.compiled,
        learning_rate=1e-5, prefetch=4, log_every_steps=max(1, steps // 50),
    )  # fmt: skip
    return TrainingJob(
        stage="student.train",
        role="student",
        model=student,
        batches=batches,
        objective=LmObjective(student, frozen, scales, way.chunk, way.compiled),
        config=config,
        seed=0,
    )


def steady_state(paths: RunPaths, steps: int, component: str) -> tuple[float, float | None]:
    """(tokens per second, joules per token) between a fifth of the steps and the end."""
    lines = [line for line in read_lines(paths.metrics) if "tokens" in line and line["step"] >= steps // 5]
    first, last = lines[0], lines[-1]
    tokens = last["tokens"] - first["tokens"]
    window = (first["mono_ns"], last["mono_ns"])
    energy_j = component_energy(load_trace(paths.traces()[-1][2]), component, [window]).energy_j
    return tokens / (window[1] - window[0]) * 1e9, None if energy_j is None else energy_j / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=256, help="rows of 128 tokens")
    parser.add_argument("--chunk", type=int, default=8192, help="positions whose logits exist at a time")
    parser.add_argument("--compile", default="default", choices=get_args(CompileMode))
    parser.add_argument("--precision", default="bf16", choices=get_args(Precision))
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    way = Way("run", options.batch_size, options.precision, options.compile, options.chunk)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs"
        measured = MeasuredRun(store, MeasureSpec(name="rates", energy=EnergyConfig(estimate_cpu=device.type == "cpu")))
        run = measured.begin()
        task = assignment(way, options.steps, Path(folder) / "rows", options.tiny, device)
        loss = train_in_run(run, task).loss
        record = measured.end("done")
        component = "gpu" if device.type == "cuda" else "cpu_estimate"
        steady_tokens_per_s, steady_j = steady_state(measured.paths, options.steps, component)
    stages = {stage.name: stage for stage in record.stages}
    train, setup = stages["student.train"], stages.get("student.train.setup")
    setup_s, setup_j = (setup.duration_s, setup.best.energy_j or 0.0) if setup else (0.0, 0.0)
    tokens = train.tokens or 0
    found = {
        "benchmark": "training_rates",
        "steps": options.steps,
        "loss": loss,
        "reported_tokens_per_s": train.tokens_per_s,
        "reported_mj_per_token": 1e3 * (train.j_per_token or 0.0),
        "setup_s": setup_s,
        "setup_j": setup_j,
        "setup_inside_tokens_per_s": tokens / (train.duration_s + setup_s),
        "setup_inside_mj_per_token": 1e3 * ((train.best.energy_j or 0.0) + setup_j) / tokens,
        "steady_tokens_per_s": steady_tokens_per_s,
        "steady_mj_per_token": None if steady_j is None else 1e3 * steady_j,
        "joules": {name: stage.best.energy_j for name, stage in stages.items()},
    }
    for name, value in found.items():
        print(f"{name}: {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
