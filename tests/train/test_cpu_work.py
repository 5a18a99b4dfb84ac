"""A model on the CPU of a machine with a GPU: energy per item is the CPU's, and the idle GPU is named."""

import re

import pytest
from nvml_sim.driver import SimGpu, constant
from nvml_sim.fixtures import nvml_library, nvml_sim  # noqa: F401

from joulelab.report.tables.run_tables import run_grids, run_result
from joulelab.report.tables.training_table import training_grid
from joulelab.runs.attempt import create_run
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import execute
from joulelab.runs.record import work_policy
from joulelab.runs.spec import check


def trained(tmp_path, **energy):
    spec = {
        "pipeline": "train", "model": "gpt2", "size": "tiny", "device": "cpu", "evaluate_batches": 1,
        "training": {"batch_size": 8, "max_time_s": 1.5}, "energy": {"rapl_root": str(tmp_path), **energy},
    }  # fmt: skip
    return execute(create_run(tmp_path / "runs", check(spec)), SilentProgress())


def energy_line(record):
    return dict(training_grid(record, record.stage("model.train")).rows)["energy"]


def test_training_on_the_cpu_leaves_the_idle_gpu_out_of_energy_per_item(nvml_sim, tmp_path):  # noqa: F811
    nvml_sim.gpus = [SimGpu(wave=constant(80), settings={"utilization": "0 0"})]
    nvml_sim.write()
    record = trained(tmp_path)
    stage = record.stage("model.train")
    assert stage.j_per_sample is None and stage.best.measured, "its joules are in the total and in no item"
    line = energy_line(record)
    assert line.startswith("missing: cpu: no RAPL domains")
    assert re.search(r"; GPU: \d\d\.\d W, not used and not included$", line)
    header = dict(run_grids(record)[0].rows)["energy (measured)"]
    assert header.endswith("energy counter; all of it is the GPU, which the models did not use")
    assert "; all of it is the GPU, which the models did not use" in run_result(record)

    estimated = trained(tmp_path, estimate_cpu=True)
    stage, line = estimated.stage("model.train"), energy_line(estimated)
    assert stage.item_energy.method == "estimated"
    assert stage.j_per_sample == pytest.approx(stage.energy.cpu_estimate.energy_j / stage.samples)
    assert " per sequence, estimated; mean power" in line
    assert re.search(r"GPU: \d\d\.\d W, not used and not included", line)
    assert "±7" in line, "total uncertainty of the estimate"


def test_a_gpu_that_works_for_the_run_counts(nvml_sim, tmp_path):  # noqa: F811
    """A teacher's server on this node may use the GPU while the student trains on the CPU."""
    nvml_sim.gpus = [SimGpu(wave=constant(400), settings={"utilization": "90 40"})]
    nvml_sim.write()
    stage = trained(tmp_path).stage("model.train")
    assert stage.item_energy is None
    assert stage.j_per_sample == pytest.approx(stage.best.energy_j / stage.samples)


def test_what_the_user_chose_to_count_stays():
    assert work_policy("gpu_only", "cpu") == "gpu_only"
    assert work_policy("codecarbon", "cpu") == "codecarbon"
    assert work_policy("measured", "cuda") == work_policy("measured", None) == "measured"
