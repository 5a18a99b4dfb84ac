"""Options shared by verbs: the table from options to settings, and options that stand for several settings."""

import pytest

from joulelab.cli import infer, measure, prepare, slurm_jobs, train
from joulelab.cli.options import (
    Flag,
    RequestedSetting,
    base_settings,
    comparison_of,
    merged,
    options_in_errors,
    read_override,
    requested_settings,
)
from joulelab.errors import ConfigError, NotFoundError, UsageError


@pytest.mark.parametrize(
    ("experiment", "group"),
    [
        ("fitnets", "fitnets"),
        ("fitnets-response", "fitnets"),
        ("distilbert-tiny-quick-kd", "distilbert-tiny-quick"),
        ("kd-tiny", "compare-tiny"),
    ],
)
def test_compare_finds_the_group_an_experiment_is_named_after_or_the_only_one_with_it(experiment, group):
    assert comparison_of(experiment) == group


def test_compare_refuses_an_ambiguous_or_missing_group():
    with pytest.raises(UsageError, match="several groups") as several:
        comparison_of("kd-small")
    assert "compare-small" in several.value.hint
    with pytest.raises(UsageError, match="no group compares squad-tiny"):
        comparison_of("squad-tiny")
    with pytest.raises(UsageError, match="needs an experiment"):
        comparison_of(None)
    with pytest.raises(NotFoundError):
        comparison_of("no-such-thing")


FLAGS = {
    "learning_rate": Flag("training.learning_rate", float),
    "train_stats": Flag("training.stats", lambda text: text.split(","), is_list=True),
    "save_model": Flag("save_model", switch=True),
    "accumulate": Flag("training.accumulate"),
}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"accumulate": 0, "overrides": ["training.accumulate=4"]},
            "--accumulate 0 and training.accumulate=4 both set training.accumulate",
        ),
        (
            {"save_model": True, "overrides": ["save_model=false"]},
            "^--save_model and save_model=false both set",
        ),
        ({"model": "gpt2", "overrides": ["model=bert"]}, "gpt2 and model=bert both set model"),
    ],
)
def test_an_option_and_a_setting_for_the_same_are_refused(given, text):
    with pytest.raises(UsageError, match=text):
        requested_settings("train", FLAGS, given)


def test_options_become_settings():
    params = {"learning_rate": "0.1,0.2", "train_stats": "simple,energy", "save_model": False, "accumulate": 0}
    params["overrides"] = ["seed=4"]
    requested = requested_settings("train", FLAGS, params)
    assert [(setting.key, setting.given) for setting in requested] == [
        ("training.learning_rate", "0.1,0.2"),
        ("training.stats", "simple,energy"),
        ("training.accumulate", 0),
        ("seed", "4"),
    ]
    assert requested[0].values == [0.1, 0.2]
    assert requested[1].values == [["simple", "energy"]]
    requested = requested_settings("train", FLAGS, {**params, "learning_rate": "0.1", "save_model": True})
    settings = merged(base_settings("train", model="gpt2"), requested)
    assert [settings[name] for name in ("pipeline", "model", "seed", "save_model")] == ["train", "gpt2", 4, True]
    assert settings["training"] == {"learning_rate": 0.1, "stats": ["simple", "energy"], "accumulate": 0}


@pytest.mark.parametrize(
    ("command", "parameter", "option"),
    [
        ("train", "batch_size", "--batch_size"),
        ("infer", "batch_size", "--batch-size"),
        ("prepare extract-student", "vocab_transform", "--vocab_transform"),
        ("prepare dump", "source", "source"),
    ],
)
def test_an_option_is_named_as_the_help_spells_it(command, parameter, option):
    assert RequestedSetting(Flag("x"), 1, command, parameter).option == option


def test_a_wrong_setting_is_named_by_its_option():
    requested = [RequestedSetting(Flag("training.batch_size"), 0, "train", "batch_size")]
    with pytest.raises(ConfigError, match=r"^--batch_size: expected") as caught, options_in_errors(requested):
        raise ConfigError("training.batch_size: expected a number", "check it")
    assert caught.value.hint.startswith("`joulelab train --help`")
    with pytest.raises(ConfigError, match=r"^seed: expected"), options_in_errors(requested):
        raise ConfigError("seed: expected a number", "check it")


def test_commas_inside_brackets_are_not_swept():
    assert read_override("training.betas=[0.9, 0.95]").values == [[0.9, 0.95]]
    assert read_override("training.stats=simple,energy").values == [["simple", "energy"]]
    assert read_override("seed=1,2").values == [1, 2]


@pytest.mark.parametrize(
    ("flags", "command"),
    [
        (train.FLAGS, train.train),
        (infer.FLAGS, infer.infer),
        (measure.FLAGS, measure.measure),
        (slurm_jobs.FLAGS, slurm_jobs.submit),
    ],
)
def test_every_flag_of_a_table_is_a_parameter_of_its_verb(flags, command):
    assert set(flags) <= set(command.__annotations__)


def test_every_flag_of_prepare_is_a_parameter_of_a_step():
    steps = (prepare.dump, prepare.binarize, prepare.token_counts, prepare.extract_student, prepare.reviews)
    assert set(prepare.FLAGS) <= {name for step in steps for name in step.__annotations__}
