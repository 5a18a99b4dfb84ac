"""Every benchmark starts, and runs at a tiny size where a CPU is enough."""

import argparse
import importlib
import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from joulelab.meter.figures import EnergyFigure

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())
NEEDS_GPU = ("square_waves.py", "vllm_worker.py")
QUICK = {
    "logit_cache.py": "--words 512 --tokens 128 --chunk 64 --repeats 1",
    "merge_scale.py": "--nodes 1 2 --gpus 2 --minutes 0.5",
    "recorder_cost.py": "--seconds 0.3",
    "report_scale.py": "--hours 0.5 --gpus 2 --hz 1",
    "window_cost.py": "--rounds 200",
}
SLOW = {
    "causal_step.py": "--tiny --student 7b --ways sft,kd-cache,kd-live,lora,trl --compile off --teacher-compile off "
    "--seconds 0.3",
    "distilbert_step.py": "--tiny --compile off --precision fp32 --seconds 0.3 --batch-size 2 --chunk 64",
    "dpo_step.py": "--tiny --compile off --seconds 0.3 --pairs 2 --prompt 16 --completion 16 --weights bf16 "
    "--ways ours,live,cached,trl --limit-s 1000",
    "fitnets_speed.py": "--tiny --compile off --seconds 0.3 --tokens 16 --batch-size 8 --old-batch-size 4",
    "inference_rows.py": "--tiny --skip reduce-overhead fastest",
    "isolated_phases.py": "--size tiny --models bert --warmup-s 0.5 --undisturbed-s 0.5 --solo-s 0.2 --rounds 1",
    "loop_overhead.py": "--blocks 10",
    "store_scale.py": "--runs 20",
    "ui_scale.py": "--runs 20 --hours 0.2",
    "tracker_cost.py": "--rounds 4 --rounds-of-others 4 --block-s 0.02 --width 32 --batch 4",
    "zoo_rows.py": "--tiny --models bert,gflownet --auto --seconds 0.2",
    "training_rates.py": "--tiny --compile off --steps 10 --batch-size 4 --chunk 256",
}
SLOW_WITH_SAMPLES = {
    "binarize.py": "--documents 60 --slice 10 --rounds 1 --workers 1",
    "generation_speed.py": "--shape tiny --cases 2x2:8/4 --seconds 0.01 --engines builtin,generate",
    "review_scale.py": "--rows 200",
    "serving_host.py": "--clients 2 --requests 1 --new-tokens 4",
}


def test_every_benchmark_has_a_tiny_size_here_or_needs_a_gpu():
    assert sorted((*NEEDS_GPU, *QUICK, *SLOW, *SLOW_WITH_SAMPLES)) == SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, monkeypatch, capsys):
    """In this process: a new one would import torch for seconds, for each of them."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    assert ended.value.code == 0
    assert f"usage: {script}" in capsys.readouterr().out


@pytest.mark.parametrize("script", QUICK)
def test_tiny_size(script, tmp_path):
    run(script, QUICK[script], tmp_path, timeout_s=60)


@pytest.mark.slow
@pytest.mark.parametrize("script", SLOW)
def test_tiny_size_with_training(script, tmp_path):
    run(script, SLOW[script], tmp_path, timeout_s=300)


@pytest.mark.slow
@pytest.mark.samples
@pytest.mark.parametrize("script", SLOW_WITH_SAMPLES)
def test_tiny_size_with_samples(script, tmp_path):
    run(script, SLOW_WITH_SAMPLES[script], tmp_path, timeout_s=300)


def run(script, options, folder, timeout_s):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *options.split()],
        cwd=folder, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # Most catch the error of one variant, so that the others keep their figures.
    # peft imports bitsandbytes, which prints that it found no optional kernel for the CPU
    lines = (line for line in (done.stdout + done.stderr).lower().splitlines() if "kernels-community" not in line)
    assert [line for line in lines if "failed" in line] == []
    rows = folder / "inference_rows.jsonl"  # the one benchmark that writes a file instead of a last line
    text = rows.read_text() if rows.exists() else done.stdout
    assert isinstance(json.loads(text.splitlines()[-1]), dict)


def test_inference_rows_subtracts_the_stable_idle_power_before_the_load(monkeypatch):
    """100 W at rest before, 300 W under load, 130 W and falling after it: net of 100 W, not of the mean of both."""
    second = 10**9
    monkeypatch.syspath_prepend(BENCHMARKS)
    lab_class = runpy.run_path(str(BENCHMARKS / "inference_rows.py"))["Lab"]
    lab = lab_class(meter=None, options=None)
    lab.idle_windows = [(0, 6 * second), (20 * second, 26 * second)]

    def read(windows):
        joules = sum(power_w(begin) * (end - begin) / second for begin, end in windows)
        return EnergyFigure(energy_j=joules, half_width_j=0.0, method="counter")

    def power_w(at_ns):
        return 100.0 if at_ns < 6 * second else 300.0 if at_ns < 20 * second else 150.0 - 5 * (at_ns / second - 20)

    assert lab.idle(read).power_w == pytest.approx(100.0)
    assert lab.idle(read).half_width_w == pytest.approx(0.0)


def work_that_ends_and_hangs(jobs, options, done):
    for job in jobs:
        if job == "ends":
            os._exit(3)
        if job == "hangs":
            time.sleep(600)
        print(f"measured {job}", flush=True)
        done.send(None)


def test_a_row_whose_process_ends_or_hangs_does_not_lose_the_others(monkeypatch, capfd):
    monkeypatch.syspath_prepend(BENCHMARKS)
    zoo_rows = importlib.import_module("zoo_rows")
    monkeypatch.setattr(zoo_rows, "work", work_that_ends_and_hangs)
    zoo_rows.run_jobs(["first", "ends", "second", "hangs", "third"], argparse.Namespace(limit_s=8.0))
    assert capfd.readouterr().out.splitlines() == [
        "measured first",
        "ends: FAILED: its process ended with exit code 3",
        "measured second",
        "hangs: FAILED: not done within 8 s",
        "measured third",
    ]


def test_each_size_is_measured_once_as_a_trial_chooses(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    zoo_rows = importlib.import_module("zoo_rows")
    rows = [row for row in zoo_rows.ROWS if row.model in ("llava", "bert")]
    assert [str(job) for job in zoo_rows.jobs_of(rows, with_auto=True)] == [
        "bert fp16", "bert auto", "bert tf32", "bert fp32",
        "llava 7b-bf16 fp32", "llava 7b-bf16 auto", "llava bf16", "llava auto",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_benchmark_that_is_stopped_by_a_time_limit_reports_what_it_has_measured():
    command = [sys.executable, str(BENCHMARKS / "generation_speed.py"), "--shape", "tiny", "--engines", "builtin"]
    command += ["--cases", "1x1:8/4,2000x2:24/64", "--seconds", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("1x1:8/4  builtin"))
        time.sleep(2)  # Python drops an interrupt during the garbage collection that follows
        process.terminate()  # as `timeout` does
        last = process.stdout.read().splitlines()[-1]
    assert process.returncode == 0
    assert [one["case"] for one in json.loads(last)["results"]] == ["1x1:8/4"]
