"""Settings that several distillation pipelines have: the same names, limits and published spellings everywhere."""

import pytest

from joulelab.errors import ConfigError, NotFoundError, SeveralProblems
from joulelab.runs.spec import load_spec, parse_overrides

EXPERIMENTS = ("demo-kd", "kd-tiny", "distilbert-tiny-quick-kd", "squad-tiny")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_temperature_has_one_name_and_one_limit(experiment):
    assert load_spec(experiment, parse_overrides(["distill.kd_T=3.5"])).distill.temperature == 3.5
    with pytest.raises(ConfigError, match=r"distill\.temperature: expected a finite number"):
        load_spec(experiment, parse_overrides(["distill.temperature=.inf"]))


@pytest.mark.parametrize("experiment", ["demo-kd", "kd-tiny"])
def test_the_weight_of_the_labels_has_one_name(experiment):
    assert load_spec(experiment, parse_overrides(["distill.kd_alpha=0.25"])).distill.alpha == 0.25


@pytest.mark.parametrize(
    ("experiment", "setting"),
    [
        ("demo-kd", "data.train=missing.csv"),
        ("demo-kd", "teacher.fine_tuned=./missing"),
        ("kd-tiny", "student.model=./missing"),
        ("kd-tiny", "data.template=./missing"),
        ("on-policy-tiny", "generation.prompts_from=missing.jsonl"),
        ("distilbert-tiny-quick-kd", "student.config=./missing.json"),
        ("distilbert-tiny-quick-kd", "data.token_counts=./missing.npy"),
        ("squad-tiny", "data.train_file=missing.json"),
        ("fitnets-images", "data.source=~nobody-of-this-name/missing"),
    ],
)
def test_a_missing_file_or_model_is_reported_with_the_setting_that_names_it(experiment, setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = load_spec(experiment, parse_overrides([setting]))
    with pytest.raises((NotFoundError, SeveralProblems)) as refused:
        spec.preflight()
    assert f"{setting}: there " in refused.value.message


def test_all_settings_that_name_a_missing_model_are_reported_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = load_spec("kd-tiny", parse_overrides(["teacher.model=./no", "student.model=./no"]))
    with pytest.raises((NotFoundError, SeveralProblems)) as refused:
        spec.preflight()
    assert refused.value.message.count("there is no") == 1
    assert "teacher.model=./no, student.model=./no: there is no file or folder" in refused.value.message
