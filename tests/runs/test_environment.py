import subprocess
from contextlib import nullcontext

import pytest

from joulelab.errors import InvalidMeasurement
from joulelab.redaction import REDACTED
from joulelab.report.compare.method_rows import _machine
from joulelab.report.tables.provenance import environment_cells
from joulelab.runs import environment
from joulelab.runs.environment import commit, package_commit, read_snapshot, snapshot, variables
from joulelab.runs.paths import RunPaths, write_json
from joulelab.runs.spec import HardwareAssertions, load_spec


def test_variables_are_stored_by_name_and_without_the_secrets_in_them(monkeypatch):
    for name in (
        "HF_TOKEN",
        "WANDB_API_KEY",
        "NVIDIA_API_KEY",
        "SLURM_JWT",
        "SLURM_JOB_COMMENT",
        "JOULELAB_SERVER_KEY",
    ):
        monkeypatch.setenv(name, "s3cr3t")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_JOB_NAME", "train hf_abcdefghijklmnopqrst")
    monkeypatch.setenv("HF_HOME", "/scratch/hf")
    monkeypatch.setenv("HF_ENDPOINT", "https://user:pass@mirror.example")
    found = variables()
    assert "s3cr3t" not in str(snapshot())
    assert (found["SLURM_JOB_ID"], found["HF_HOME"]) == ("42", "/scratch/hf")
    assert found["SLURM_JOB_NAME"] == f"train {REDACTED}"
    assert found["HF_ENDPOINT"] == f"https://user:{REDACTED}@mirror.example"


def test_variables_of_no_concern_are_left_out(monkeypatch):
    monkeypatch.setenv("MY_DIARY", "private thoughts")
    assert "MY_DIARY" not in variables()


def test_the_command_line_of_a_snapshot_has_no_secrets(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--password", "hunter2", "--max-tokens", "128"])
    assert snapshot()["command"] == ["train.py", "--password", REDACTED, "--max-tokens", "128"]


def test_a_snapshot_names_machine_packages_and_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    found = snapshot()
    assert found["slurm"] == {"SLURM_JOB_ID": "42"}
    assert found["packages"]["numpy"]
    assert found["cpu"]["threads"] >= 1


def test_a_snapshot_is_taken_on_a_system_without_core_affinity_as_macos_is(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.delattr("psutil.Process.cpu_affinity", raising=False)
    cpu = snapshot()["cpu"]
    assert cpu["usable_threads"] == cpu["threads"]


def _repository(folder):
    def git(*words):
        subprocess.run(["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    git("init", "-q")
    (folder / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")


def test_the_commit_of_a_package_is_its_own_and_not_that_of_the_folder_it_is_installed_in(tmp_path, monkeypatch):
    _repository(tmp_path)
    (tmp_path / "venv").mkdir()
    installed = tmp_path / "venv" / "__init__.py"
    installed.write_text("")
    assert package_commit(installed) == {"commit": None, "dirty": None}
    assert package_commit(tmp_path / "a") == commit(tmp_path) != {"commit": None, "dirty": None}
    monkeypatch.chdir(tmp_path)
    found = snapshot()
    assert found["code"] == commit(tmp_path)
    assert found["joulelab_code"]["commit"] != found["code"]["commit"]


def test_a_commit_is_reported_dirty_or_clean(tmp_path):
    _repository(tmp_path)
    assert commit(tmp_path)["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert commit(tmp_path)["dirty"] is True


def test_where_git_takes_too_long_or_cannot_be_started_the_commit_is_unknown(tmp_path, monkeypatch):
    """`git status` of a large repository on a network file system takes minutes."""
    monkeypatch.setattr(environment, "GIT_LIMIT_S", 0.2)
    monkeypatch.setenv("PATH", str(tmp_path))
    for script in ("#!/bin/sh\nexec /bin/sleep 9\n", "no program"):
        (tmp_path / "git").write_text(script)
        (tmp_path / "git").chmod(0o755)
        assert commit(tmp_path) == package_commit(tmp_path / "a") == {"commit": None, "dirty": None}


def test_outside_a_repository_the_commit_is_unknown(tmp_path):
    assert commit(tmp_path) == {"commit": None, "dirty": None}


@pytest.mark.parametrize("wrong", ["text", 3, None, [], ["x", 1], {}, True])
def test_an_edited_snapshot_is_read_without_the_sections_that_have_another_type(tmp_path, wrong):
    """Every entry in turn: reports and comparisons read them, and a traceback there hides the energy of the run."""
    facts = snapshot() | {"gpus": [{"name": "H200", "driver": "570"}]}
    paths, record = RunPaths(tmp_path), type("Record", (), {"attempts": ()})()
    for name in facts:
        write_json(paths.environment, facts | {name: wrong})
        read = read_snapshot(paths)
        assert name not in read or type(read[name]) is type(facts[name]) or not isinstance(facts[name], dict | list)
        assert environment_cells(tmp_path)["host"] and isinstance(_machine(record, tmp_path, "cpu:0"), str)
    write_json(paths.environment, facts)
    assert read_snapshot(paths) == {name: value for name, value in facts.items() if value is not None}
    assert read_snapshot(RunPaths(tmp_path / "no-run")) == {}


H100 = {"name": "NVIDIA H100 NVL", "memory_bytes": 94 * 2**30}


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ({"gpu_name": "H200"}, "GPU name: expected H200, found NVIDIA H100 NVL"),
        ({"assert_gpu_name": "H10"}, "GPU name: expected H10"),  # whole words
        ({"assert_gpu_count": 4}, "GPU count: expected 4 GPUs, found 2"),
        ({"min_gpu_memory_gib": 130}, "GPU memory: expected at least 130 GiB on every GPU, the smallest has 94.0"),
        ({"assert_cpu_brand": "Xeon"}, "CPU name: expected Xeon, found AMD EPYC 9454"),
    ],
)
def test_other_hardware_than_the_settings_require_is_refused(monkeypatch, expected, found):
    monkeypatch.setattr(environment, "gpus", lambda: [H100, H100])
    monkeypatch.setattr(environment, "processor_name", lambda: "AMD EPYC 9454")
    with pytest.raises(InvalidMeasurement, match="nothing was started") as refused:
        environment.demand_hardware(load_spec("demo-labels", {"hardware": expected}).hardware)
    assert found in refused.value.message and refused.value.exit_code == 4
    fitting = {"gpu_name": "h100", "gpu_count": 2, "min_gpu_memory_gib": 80, "cpu_name": "EPYC"}
    environment.demand_hardware(HardwareAssertions(**fitting))


def test_a_run_on_other_hardware_leaves_no_directory(joulelab, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="without torch the missing package is the first error")
    monkeypatch.setattr(environment, "gpus", list)
    words = ["--runs-dir", str(tmp_path / "runs"), "hardware.assert_gpu_name=H100"]
    code, _, err = joulelab("run", "demo-labels", *words)
    assert code == 4 and "GPU name: expected H100, found no GPU; nothing was started" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("capability", "found"), [((9, 0), True), ((8, 0), True), ((7, 5), False), (None, False)])
def test_tensor_cores_for_bf16_begin_with_ampere(monkeypatch, capability, found):
    class Driver:
        NVMLError = RuntimeError

        @staticmethod
        def nvmlDeviceGetCudaComputeCapability(handle):  # noqa: N802
            if capability is None:
                raise RuntimeError("Not Supported")
            return capability

    monkeypatch.setattr(environment, "opened_cards", lambda: nullcontext((Driver, {"card": 0})))
    monkeypatch.setattr(environment, "uses_gpu", lambda device: device != "cpu")
    assert environment.has_bf16_cores("auto") is found
    assert not environment.has_bf16_cores("cpu")
