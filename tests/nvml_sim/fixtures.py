"""Fixtures around the simulated driver, for any test folder whose conftest imports them."""

import ctypes

import pytest
from nvml_sim.driver import NvmlSim, build

JOB_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "SLURM_JOB_ID", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory):
    try:
        return build(tmp_path_factory.mktemp("nvml"))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def nvml_sim(nvml_library, tmp_path, monkeypatch):
    """One simulated H200 at 100 W, seen by child processes; change `.gpus` and `.write()` for another world."""
    sim = NvmlSim(nvml_library, tmp_path / "nvml-control")
    sim.write()
    for name, value in sim.env().items():
        monkeypatch.setenv(name, value)
    for name in (*JOB_VARIABLES, "GPU_DEVICE_ORDINAL"):
        monkeypatch.delenv(name, raising=False)
    return sim


@pytest.fixture
def nvml_here(nvml_sim, monkeypatch):
    """The same, for the real binding inside this process too; what else this process loaded is put back afterwards."""
    pynvml = pytest.importorskip("pynvml")
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(nvml_sim.built)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return nvml_sim
