"""`--run-dir` chooses where one run is written; artifacts are searched in the store all the same."""

import json
import shutil

from commands import joulelab_here

from joulelab.errors import JoulelabError
from joulelab.lookup import PIPELINES
from joulelab.runs.groups import with_ancestors
from joulelab.runs.store import load_record

SETTINGS = ["energy.estimate_cpu=true", "energy.gpus=none", "energy.sample_interval_s=0.05"]


def make_teacher(run):
    def make(folder):
        with run.stage("teacher.train"):
            (folder / "weights").write_text("w")

    run.artifact("teacher", kind="model", inputs={"a": 1}, parents=[], make=make)


def run_demo(*words):
    done = joulelab_here("run", "demo-kd", *SETTINGS, *words)
    assert done.returncode == 0, done.stderr


def test_a_run_in_a_chosen_folder_finds_the_teacher_of_the_store_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(PIPELINES, "resolve", lambda name: make_teacher)
    store, chosen = tmp_path / "runs", tmp_path / "elsewhere" / "mine"
    run_demo("--runs-dir", tmp_path / "elsewhere")  # next to the chosen folder, but not in the store
    run_demo("--runs-dir", store)
    (maker,) = store.iterdir()
    run_demo("--runs-dir", store, "--run-dir", chosen)
    record = load_record(chosen)
    assert record.stage("teacher.train") is None
    assert [one.made_by for one in record.inherited] == [maker.name]
    assert with_ancestors([chosen]) == [chosen, maker]


def test_the_store_is_remembered_for_a_resume(tmp_path, monkeypatch):
    store, chosen = tmp_path / "runs", tmp_path / "elsewhere" / "mine"

    def fail(run):
        raise JoulelabError("stopped")

    monkeypatch.setattr(PIPELINES, "resolve", lambda name: fail)
    assert joulelab_here("run", "demo-kd", *SETTINGS, "--runs-dir", store, "--run-dir", chosen).returncode == 1
    monkeypatch.setattr(PIPELINES, "resolve", lambda name: make_teacher)
    run_demo("--runs-dir", store)
    done = joulelab_here("run", "--resume", chosen, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_record(chosen).stage("teacher.train") is None


def test_a_later_run_in_another_chosen_folder_does_not_pay_the_teacher_again(tmp_path, monkeypatch):
    monkeypatch.setattr(PIPELINES, "resolve", lambda name: make_teacher)
    store, first, second = tmp_path / "runs", tmp_path / "scratch" / "run123", tmp_path / "other" / "run124"
    run_demo("--runs-dir", store, "--run-dir", first)
    run_demo("--runs-dir", store, "--run-dir", second)
    record = load_record(second)
    assert record.stage("teacher.train") is None
    assert [one.made_by for one in record.inherited] == ["run123"]
    assert record.inherited[0].energy["cpu_estimate"].energy_j is not None
    listed = joulelab_here("runs", "--runs-dir", store, "--json")
    assert {run["run_id"] for run in json.loads(listed.stdout)} == {"run123", "run124"}


def test_a_command_that_is_repeated_prints_the_record_again_as_json(tmp_path, monkeypatch):
    monkeypatch.setattr(PIPELINES, "resolve", lambda name: make_teacher)
    words = ["run", "demo-kd", *SETTINGS, "--runs-dir", tmp_path / "runs", "--run-dir", tmp_path / "mine", "--json"]
    first, again = (joulelab_here(*words) for _ in range(2))
    assert "is already done" in again.stderr
    assert json.loads(again.stdout) == json.loads(first.stdout)
    other = joulelab_here(*words, "training.learning_rate=1e-3", "training.precision=bf16")
    assert other.returncode == 2
    assert "contains a run with different settings (training.learning_rate, training.precision)" in other.stderr
    # `auto` was chosen when the run began, on whatever machine
    monkeypatch.setattr("joulelab.runs.environment.has_bf16_cores", lambda device: True)
    assert "is already done" in joulelab_here(*words).stderr


def test_a_run_of_the_same_name_elsewhere_and_a_deleted_one_are_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.setattr(PIPELINES, "resolve", lambda name: make_teacher)
    store = tmp_path / "runs"
    for parent in ("a", "b"):
        run_demo("--runs-dir", store, "--run-dir", tmp_path / parent / "mine")
    shutil.rmtree(tmp_path / "a")
    run_demo("--runs-dir", store, "--run-dir", tmp_path / "c" / "mine")
    assert (store / "mine").resolve() == tmp_path / "c" / "mine"


def test_a_second_directory_of_the_same_name_is_reported_as_not_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(PIPELINES, "resolve", lambda name: make_teacher)
    store, first, second = tmp_path / "runs", tmp_path / "a" / "mine", tmp_path / "b" / "mine"
    run_demo("--runs-dir", store, "--run-dir", first)
    done = joulelab_here("run", "demo-kd", *SETTINGS, "--runs-dir", store, "--run-dir", second)
    assert done.returncode == 0 and f"{store} already has a run named mine" in done.stderr
    assert (store / "mine").samefile(first)
    shutil.rmtree(first)
    again = joulelab_here("run", "demo-kd", *SETTINGS, "--runs-dir", store, "--run-dir", first)
    assert again.returncode == 0 and "already has" not in again.stderr
