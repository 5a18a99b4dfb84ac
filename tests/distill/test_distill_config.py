"""Settings that several distillation pipelines have: the same names, limits and published spellings everywhere."""

import pytest

from joulelab.errors import ConfigError
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
