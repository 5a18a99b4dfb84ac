"""Speed and energy per item of every published size of the zoo on this GPU, compared with published figures.

Each model trains in our loop on synthetic batches of the stated size and shape: a warm-up, then an undisturbed window
of `--seconds` between two synchronizations, energy from the trace. `reference` is milabench's figure for one
H200 (one H100 where it says so), taken from its published reports; `ratio` is ours over theirs.

Every measurement is printed when it is made. All run in one worker process; if it ends (a CUDA error, no memory) or
takes longer than `--limit-s` for one of them, a new process continues with the next.

    python benchmarks/zoo_rows.py --models bert,resnet50 --seconds 10
    python benchmarks/zoo_rows.py --models bert,resnet50 --auto
    python benchmarks/zoo_rows.py --models bert --auto --tiny --seconds 0.2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import get_args

import psutil
import torch
from pacing import forget_peak, free, interrupt_on_sigterm, undisturbed, warm_up

from joulelab import lookup
from joulelab.meter.config import EnergyConfig
from joulelab.meter.integrate import component_energy
from joulelab.meter.series import load_trace
from joulelab.meter.session import Meter
from joulelab.train.autotune import Candidate, Choice, Trial, choose, compile_mode, time_in_training
from joulelab.train.config import CompileMode, Optimizer, Precision, TrainingConfig
from joulelab.train.devices import peak_flops
from joulelab.train.optim import float32_matmul_precision
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer
from joulelab.train.zoo_config import ZooTraining
from joulelab.train.zoo_pipeline import matmul_precision
from joulelab.zoo.cost import model_cost
from joulelab.zoo.objective import prepare
from joulelab.zoo.registry import WorkloadRequest

END_S = 5.0
"""For a process to end."""


@dataclass(frozen=True)
class Row:
    model: str
    batch_size: int
    precision: Precision = "fp16"
    size: str = ""
    shape: dict[str, int] = field(default_factory=dict)
    optimizer: Optimizer = "adamw"
    reference: float | None = None
    unit: str = "items"
    note: str = ""


ROWS = (
    Row("gpt2", 32, "bf16"),
    Row("bert", 32, reference=516.0),
    Row("bert", 32, "tf32", reference=273.0),
    Row("bert", 32, "fp32", reference=113.6),
    Row("reformer", 32, reference=121.0),
    Row("t5", 16, size="small", shape={"tokens": 1024}, reference=109.0),
    Row("opt", 16, "bf16"),
    Row("bart", 32, "bf16"),
    Row("bigbird", 8, "bf16"),
    Row("albert", 32, "bf16"),
    Row("distilbert", 64, "bf16"),
    Row("longformer", 8, "bf16"),
    Row("llava", 1, "fp32", size="7b-bf16", reference=4.35, note="weights in bf16, as theirs"),
    Row("llava", 1, "bf16"),
    Row("whisper", 64, reference=854.0, note="task differs: theirs is an 8.3 M audio classifier, ours speech to text"),
    Row("dinov2", 32, "bf16"),
    Row("vjepa2", 24, "bf16", note="theirs (42.5) is V-JEPA 1 vit-huge", reference=42.5),
    Row("resnet50", 256, reference=4868.0),
    Row("resnet152", 256, reference=1175.0),
    Row("convnext-large", 128, reference=737.0),
    Row("convnext-large", 128, "tf32", reference=297.0),
    Row("convnext-large", 128, "fp32", reference=111.0),
    Row("regnet-y-128gf", 64, reference=218.0),
    Row("vit-g14", 32, reference=58.5, note="theirs reports 117, counting the two global crops of an image"),
    Row("pna", 4096, "tf32", reference=6760.0, note="theirs on an H100"),
    Row("dimenet", 32, "tf32", reference=700.0, note="theirs on an H100"),
    Row("gflownet", 64, "fp32", unit="nodes", reference=8700.0, note="theirs on an H100"),
)


@dataclass(frozen=True)
class Measured:
    row: Row
    compiled: CompileMode
    parameters: int
    items_per_s: float
    amount: int
    window_ns: tuple[int, int]
    mfu: float | None
    memory_gib: float
    first_loss: float
    last_loss: float
    ratio: float | None
    energy_j: float | None = None
    j_per_item: float | None = None
    mean_w: float | None = None
    is_auto: bool = False
    """Precision and compilation were chosen by a trial."""

    def with_energy(self, energy_j: float | None) -> Measured:
        if energy_j is None:
            return self
        span_s = (self.window_ns[1] - self.window_ns[0]) / 1e9
        return replace(self, energy_j=energy_j, j_per_item=energy_j / self.amount, mean_w=energy_j / span_s)


def request_of(row: Row) -> WorkloadRequest:
    return WorkloadRequest(
        lookup.ZOO.resolve(row.model), row.size, batch_size=row.batch_size, requested_shape=row.shape
    )


def measure(row: Row, compiled: CompileMode, seconds: float, device: torch.device, is_auto: bool = False) -> Measured:
    request = request_of(row)
    cost = model_cost(request)
    with device:  # large models are initialized in a second on the GPU, in minutes on the CPU
        workload = prepare(request)
    for module in (workload.model, *workload.objective.modules().values()):
        module.to(device)
    config = TrainingConfig(
        epochs=None, max_steps=10**9, batch_size=row.batch_size, precision=row.precision, compile=compiled,
        optimizer=row.optimizer, learning_rate=1e-5, prefetch=4,
    )  # fmt: skip
    trainer = SimpleTrainer(workload.model, workload.batches, workload.objective, config, NoOpStats())
    workload.model.train()
    forget_peak()
    with float32_matmul_precision(row.precision):
        first_loss = warm_up(trainer, device)
        found = undisturbed(trainer, device, seconds)
    items, amount = found.samples, found.tokens if row.unit == "nodes" else found.samples
    span_s = (found.window_ns[1] - found.window_ns[0]) / 1e9
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    peak = peak_flops(name, matmul_precision(workload.model, row.precision))
    mfu = cost.training_flops * items / span_s / peak if cost.training_flops and peak else None
    return Measured(
        row=row, compiled=compiled, parameters=request.size.parameters, items_per_s=amount / span_s,
        amount=amount, window_ns=found.window_ns, mfu=mfu,
        memory_gib=found.peak_gib or 0.0, first_loss=first_loss, last_loss=found.loss,
        ratio=row.reference and amount / span_s / row.reference, is_auto=is_auto,
    )  # fmt: skip


def measure_auto(row: Row, seconds: float, device: torch.device) -> Measured:
    """As `joulelab train` chooses precision and compilation for a long training."""
    choice = try_candidates(row, device)
    free()
    print(f"  auto: {choice.candidate}, {choice.reason}", flush=True)
    chosen = replace(row, precision=choice.candidate.precision)  # type: ignore[arg-type]
    return measure(chosen, choice.candidate.compile, seconds, device, is_auto=True)  # type: ignore[arg-type]


def try_candidates(row: Row, device: torch.device) -> Choice:
    config = ZooTraining(epochs=None, max_steps=10**9, batch_size=row.batch_size, optimizer=row.optimizer, prefetch=4)
    request = request_of(row)
    with device:
        workload = prepare(request)
    for module in (workload.model, *workload.objective.modules().values()):
        module.to("cpu")  # as in a run: trials have the memory of the GPU for their copies
    free()
    time_candidate = time_in_training(workload, request.seed, config, device)

    def shown(candidate: Candidate) -> Trial:
        trial = time_candidate(candidate)
        print(f"  trial of {row.model} {row.size}: {trial}", flush=True)
        return trial

    # Trials also on a CPU, where `joulelab train` has none: a tiny size shows that each model can be tried.
    return choose(config, "cuda", 1, config.max_steps, shown, compile_mode(workload.model))


def output_text(found: Measured) -> str:
    row = found.row
    name = f"{row.model}{' ' + row.size if row.size else ''} {row.batch_size} {row.precision} compile={found.compiled}"
    name += " (auto)" if found.is_auto else ""
    joule = "missing" if found.j_per_item is None else f"{found.j_per_item:.4g} J/{row.unit[:-1]}, {found.mean_w:.0f} W"
    mfu = "MFU ?" if found.mfu is None else f"MFU {100 * found.mfu:.1f} %"
    reference = f"; {found.ratio:.2f}x of {row.reference:g} {row.note}" if found.ratio else ""
    return (
        f"{name}: {found.parameters / 1e6:.1f} M, {found.items_per_s:.4g} {row.unit}/s, {joule}, {mfu}, "
        f"{found.memory_gib:.1f} GiB, loss {found.first_loss:.3f} -> {found.last_loss:.3f}{reference}"
    )


@dataclass(frozen=True)
class Job:
    """One measurement."""

    row: Row
    is_auto: bool
    """As a trial chooses, and not in the row's precision."""

    def __str__(self) -> str:
        row = self.row
        return " ".join(filter(None, (row.model, row.size, "auto" if self.is_auto else row.precision)))


def jobs_of(rows: list[Row], with_auto: bool) -> list[Job]:
    found = []
    for row in rows:
        found.append(Job(row, is_auto=False))
        # The choice does not depend on the precision of the row.
        if with_auto and not any(
            job.is_auto and (job.row.model, job.row.size) == (row.model, row.size) for job in found
        ):
            found.append(Job(row, is_auto=True))
    return found


def run_job(job: Job, compiled: CompileMode, seconds: float, device: torch.device) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        meter = Meter(trace, Path(folder) / "events.jsonl", EnergyConfig())
        meter.start()
        try:
            if job.is_auto:
                found = measure_auto(job.row, seconds, device)
            else:
                found = measure(job.row, compiled, seconds, device)
        finally:
            meter.stop()
        found = found.with_energy(component_energy(load_trace(trace), "gpu", [found.window_ns]).energy_j)
    print(output_text(found))
    print(json.dumps({"benchmark": "zoo_rows", **asdict(found)}), flush=True)


def work(jobs: list[Job], options: argparse.Namespace, done: Connection) -> None:
    """Run the jobs one after the other, in a separate process, and report the end of each."""
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    # Shapes are the same at every step. `joulelab train` does not let cuDNN search: it took 200 s for regnet in fp32.
    torch.backends.cudnn.benchmark = not options.auto
    with suppress(KeyboardInterrupt):
        for job in jobs:
            try:
                run_job(job, options.compile, options.seconds, device)
            except Exception:
                print(f"{job}: FAILED\n{traceback.format_exc(limit=-4)}", flush=True)
                if device.type == "cuda":
                    torch.cuda.synchronize()  # fails after a CUDA error, after which nothing works in this process
            free()
            done.send(None)


def run_jobs(jobs: list[Job], options: argparse.Namespace) -> None:
    spawn = multiprocessing.get_context("spawn")
    while jobs:
        receiver, sender = spawn.Pipe(duplex=False)
        worker = spawn.Process(target=work, args=(jobs, options, sender))
        worker.start()
        sender.close()  # with the worker's copy it ends when the worker does
        try:
            while jobs and receiver.poll(options.limit_s):
                receiver.recv()
                jobs = jobs[1:]
            problem = f"not done within {options.limit_s:g} s"
        except EOFError:
            worker.join(END_S)
            problem = f"its process ended with exit code {worker.exitcode}"
        finally:
            end(worker, is_idle=not jobs)
        if jobs:
            print(f"{jobs[0]}: FAILED: {problem}", flush=True)
            jobs = jobs[1:]


def end(worker: BaseProcess, is_idle: bool) -> None:
    """With the processes that it has started. Killed: a wait for a kernel or a compiler does not end by itself."""
    family = []
    with suppress(psutil.Error):
        family = psutil.Process(worker.pid).children(recursive=True)
    worker.join(END_S if is_idle else 0.0)
    worker.kill()
    worker.join(END_S)  # not forever: a process inside the GPU driver may not end
    for process in family:
        with suppress(psutil.Error):
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="by commas; default: all rows")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the undisturbed window")
    parser.add_argument("--compile", default="off", choices=get_args(CompileMode))
    parser.add_argument("--auto", action="store_true", help="measure each row also as a trial chooses")
    parser.add_argument("--precision", default="", help="only rows of this precision")
    parser.add_argument("--batch-size", type=int, default=0, help="in place of the row's own")
    parser.add_argument("--limit-s", type=float, default=400.0, help="of one measurement, with its trial (400)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU, to check the benchmark")
    options = parser.parse_args()
    interrupt_on_sigterm()
    wanted = [name for name in options.models.split(",") if name]
    if unknown := [name for name in wanted if name not in {row.model for row in ROWS}]:
        parser.error(f"no row of {', '.join(unknown)}; rows: {', '.join(dict.fromkeys(row.model for row in ROWS))}")
    rows = [row for row in ROWS if not wanted or row.model in wanted]
    rows = [row for row in rows if not options.precision or row.precision == options.precision]
    if options.tiny:
        rows = [replace(row, size="tiny", batch_size=2, shape={}, precision="fp32") for row in rows]
    elif not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU; --tiny runs on a CPU")
    rows = [replace(row, batch_size=options.batch_size or row.batch_size) for row in rows]
    with suppress(KeyboardInterrupt):
        run_jobs(jobs_of(rows, options.auto), options)


if __name__ == "__main__":
    main()
