"""Teachers with quantized weights: as caches, generators, judges and live teachers, and in keys and records."""

import pytest

from joulelab import lookup
from joulelab.errors import ConfigError, DependencyMissing, DeviceMissing
from joulelab.runs.artifacts import read_bill
from joulelab.runs.paths import read_json
from joulelab.runs.spec import check
from joulelab.zoo import quantized_layers

INT8 = {"precision": "int8"}


@pytest.fixture
def quantized(monkeypatch):
    """The layers that were replaced, in each model that was quantized."""
    pytest.importorskip("bitsandbytes")
    found, replace = [], quantized_layers._replace_by_bitsandbytes

    def observed(model, kind):
        replace(model, kind)
        found.append([layer for layer in model.modules() if "8bit" in type(layer).__name__])

    monkeypatch.setattr(quantized_layers, "_replace_by_bitsandbytes", observed)
    return found


def test_a_cache_of_a_quantized_teacher_has_its_own_key(lab, tmp_path, quantized):
    record, paths = lab.run(tmp_path, "kd", until="logits", teacher=INT8)
    _, plain = lab.run(tmp_path, "kd", until="logits", teacher={"precision": "bf16"})
    assert len(quantized) == 1 and len(quantized[0]) > 4
    own, other = (read_bill(one.artifacts / "logits") for one in (paths, plain))
    assert own.key != other.key and own.inputs["precision"] == "int8"
    assert own.inputs["voice"] == f"{other.inputs['voice']} as int8"
    assert record.status == "done" and "precision: int8" in (paths.folder / "config.yaml").read_text()


def test_a_quantized_teacher_writes_and_judges_answers(lab, tmp_path, quantized):
    _, paths = lab.run(tmp_path, "dpo", until="preferences", teacher=INT8)
    assert len(quantized) == 1, "generation and judging share the loaded model"
    assert str(read_json(paths.artifacts / "answers" / "report.json")["generator"]).endswith(" as int8")
    assert read_bill(paths.artifacts / "scores").inputs["teacher"].endswith(" as int8")


def test_an_on_policy_student_learns_from_a_quantized_teacher(lab, tmp_path, quantized):
    settings = {"generation": {"prompt_tokens": 18}, "quality": {"against_teacher": False}}
    record, _ = lab.run(tmp_path, "on-policy", teacher=INT8, **settings)
    assert record.stage("teacher.score").tokens > 0
    assert len(quantized) == 1, "the student is not quantized"


def test_layers_of_a_quantized_teacher_are_taken_from_its_original_weights(lab, tmp_path, quantized):
    settings = {"student": {"size": None, "layers": [0]}, "quality": {"against_teacher": False}}
    record, _ = lab.run(tmp_path, "kd", teacher=INT8, **settings)
    assert record.status == "done" and len(quantized) == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"teacher": {**INT8, "server": "http://localhost:1/v1"}}, "not teacher.server"),
        ({"teacher": INT8, "generation": {"engine": "vllm", "engine_python": "p"}}, "set engine=builtin"),
        ({"teacher": {"precision": "int7"}}, "precision"),
    ],
)
def test_settings_that_cannot_work_are_refused(lab, changes, text):
    with pytest.raises(ConfigError, match=text):
        check(lab.settings("synthetic", **changes))


def test_package_and_device_are_checked_before_the_run(lab, monkeypatch):
    def checked(kind):
        for one in check(lab.settings("kd", teacher={"precision": kind}, device="cpu")).checks():
            one()

    monkeypatch.setattr(lookup, "absent_packages", lambda *names: list(names))
    with pytest.raises(DependencyMissing, match=r"int8 weights needs? bitsandbytes"):
        checked("int8")
    monkeypatch.setattr(lookup, "absent_packages", lambda *names: [])
    with pytest.raises(DeviceMissing, match="int4 weights need an NVIDIA GPU"):
        checked("int4")


def test_an_unknown_precision_is_one_problem_with_all_choices(lab):
    with pytest.raises(ConfigError, match=r"teacher.precision: expected 'auto', 'fp32', .* or 'int4'"):
        check(lab.settings("kd", teacher={"precision": "nf5"}))
