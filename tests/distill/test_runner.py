"""The runner walks a recipe; a new pipeline is one folder (`line_pipeline`) and one line."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import joulelab.distill
from joulelab import lookup
from joulelab.distill import runner
from joulelab.distill.runner import Runner
from joulelab.errors import ConfigError
from joulelab.runs.attempt import create_run
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import execute
from joulelab.runs.spec import check, read_mapping
from joulelab.train.parallel import Ranks

SETTINGS = {"pipeline": "line", "name": "line", "device": "cpu", "energy": {"gpus": "none"}}


@pytest.fixture(autouse=True)
def one_line(monkeypatch):
    package, spec, run = ("line_pipeline", "config:LineSpec", "recipe:run_line")
    monkeypatch.setitem(lookup.PIPELINE_SPECS._entries, "line", f"{package}.{spec}")
    monkeypatch.setitem(lookup.PIPELINES._entries, "line", f"{package}.{run}")


def run(store, **changes):
    return execute(create_run(store, check({**SETTINGS, **changes})), SilentProgress())


def method_stages(record):
    return [(stage.name, stage.role, stage.activity) for stage in record.stages if stage.is_method_work]


def test_a_new_pipeline_has_stages_bills_and_results(tmp_path):
    record = run(tmp_path)
    assert method_stages(record) == [
        ("data.preprocess", "data", "preprocess"),
        ("teacher.train", "teacher", "train"),
        ("student.train", "student", "train"),
        ("student.evaluate", "student", "evaluate"),
    ]
    assert record.results["student.distance"].value < 0.2
    assert {ancestor.name for ancestor in record.lineage} == {"data", "teacher", "final_model", "student-distance"}


def test_what_several_ranks_have_trained_has_another_key_and_a_resume_keeps_it(tmp_path, monkeypatch):
    run = SimpleNamespace(paths=SimpleNamespace(artifacts=tmp_path))

    def ranks_of(world):
        return Runner.ranks_of(SimpleNamespace(run=run, ranks=Ranks(0, world, 0)), "teacher")

    assert (ranks_of(1), ranks_of(2)) == ({}, {"ranks": 2})
    bill = SimpleNamespace(inputs={"ranks": 2}, code_version=runner.code_version())
    monkeypatch.setattr(runner, "read_bill", lambda folder: bill if folder == tmp_path / "teacher" else None)
    assert (ranks_of(1), ranks_of(4)) == ({"ranks": 2}, {"ranks": 2})
    bill.inputs = {}
    assert ranks_of(2) == {}
    bill.code_version = "older"  # it will be trained again
    assert ranks_of(2) == {"ranks": 2}


def test_a_run_ends_after_its_last_phase_and_later_runs_reuse_what_it_made(tmp_path):
    assert [name for name, _, _ in method_stages(run(tmp_path, until="data"))] == ["data.preprocess"]
    assert [name for name, _, _ in method_stages(run(tmp_path, until="teacher"))] == ["teacher.train"]
    whole = run(tmp_path)
    assert [name for name, _, _ in method_stages(whole)] == ["student.train", "student.evaluate"]
    assert {ancestor.name for ancestor in whole.inherited} == {"data", "teacher"}


@pytest.mark.parametrize(("on_gpu", "until", "count"), [(True, "train", 1), (True, "data", 0), (False, "train", 0)])
def test_training_in_fp32_on_a_gpu_is_noted(tmp_path, monkeypatch, on_gpu, until, count):
    monkeypatch.setattr("joulelab.runs.environment.has_bf16_cores", lambda device: on_gpu)
    record = run(tmp_path, until=until, training={"precision": "fp32"})
    texts = [note.text for note in record.validity.notes if "training in fp32" in note.text]
    assert len(texts) == count and all("training.precision=bf16" in text for text in texts)


def test_a_precision_is_chosen_where_the_run_starts_and_kept(tmp_path, monkeypatch):
    """`teacher` and `training` of this pipeline are trainings; the second attempt is on another machine."""
    monkeypatch.setattr("joulelab.runs.environment.has_bf16_cores", lambda device: True)
    paths = create_run(tmp_path, check({**SETTINGS, "training": {"epochs": 2}}))
    assert read_mapping(paths.config)["training"]["precision"] == "auto"
    execute(paths, SilentProgress(), "data")
    monkeypatch.setattr("joulelab.runs.environment.has_bf16_cores", lambda device: False)
    record = execute(paths, SilentProgress())
    for settings in (record.spec, read_mapping(paths.config)):
        assert [settings[name]["precision"] for name in ("teacher", "training")] == ["bf16", "bf16"]
    elsewhere = run(tmp_path, until="data")
    assert [elsewhere.spec[name]["precision"] for name in ("teacher", "training")] == ["fp32", "fp32"]


def test_one_attempt_per_phase_makes_one_run(tmp_path):
    paths = create_run(tmp_path, check(SETTINGS))
    for phase in ("data", "teacher", "train"):
        assert execute(paths, SilentProgress(), phase).status == "queued"
    record = execute(paths, SilentProgress())
    assert record.status == "done"
    assert method_stages(record) == method_stages(run(tmp_path / "whole"))


def test_without_a_teacher_none_is_trained(tmp_path):
    record = run(tmp_path, distill={"alpha": 1.0})
    assert "teacher" not in {role for _, role, _ in method_stages(record)}


def test_a_joule_budget_that_cannot_be_kept_is_refused_before_the_first_stage(tmp_path):
    with pytest.raises(ConfigError, match="energy budget"):
        run(tmp_path, teacher={"max_energy_j": 5.0})
    (folder,) = tmp_path.glob("line-*")
    assert not (folder / "artifacts" / "data").exists()


def test_recipes_leave_stages_artifacts_bills_and_training_to_the_runner():
    root = Path(joulelab.distill.__file__).parent
    for folder in ("classify", "distilbert", "squad", "prepare"):
        for file in (root / folder).glob("*.py"):
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"\brun\.(stage|artifact|uses)\(|import .*\b(train_in_run|input_bill)\b", text), file
