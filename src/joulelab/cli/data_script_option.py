"""`--data-script NAME`: one step of a language-model experiment by itself, turned into the settings that stop there."""

from __future__ import annotations

from collections.abc import Sequence

from joulelab.errors import UsageError


def rehearsed(experiment: str) -> str:
    """Whose meter a prerun takes: the experiment's; of a group its first member's."""
    from joulelab.runs.groups import is_group
    from joulelab.runs.spec import read_layers

    settings = read_layers(experiment)
    return str(settings["members"][0]["experiment"]) if is_group(settings) else experiment


def script_settings(script: str, experiment: str, overrides: Sequence[str]) -> list[str]:
    """As `key.path=value`; what the user writes comes after them and wins."""
    from joulelab.distill.causal.data_scripts import settings_of
    from joulelab.runs.groups import is_group
    from joulelab.runs.spec import parse_overrides, read_layers

    settings = read_layers(experiment)
    if is_group(settings):
        named = ", ".join(dict.fromkeys(str(member["experiment"]) for member in settings["members"]))
        raise UsageError(f"{experiment} is a group; a data script is a step of one experiment", f"name one of {named}")
    pipeline = str(parse_overrides(overrides).get("pipeline", settings.get("pipeline")))
    asked = settings_of(script, str(settings["name"]), overrides, pipeline)
    users = _USERS.get(script)
    if users and pipeline not in users:
        raise UsageError(
            f"{experiment} (pipeline {pipeline}) uses nothing that {script} makes",
            f"name an experiment with the pipeline {' or '.join(users)}: {experiment_like(users[0], experiment)}",
        )
    return asked


# Which pipelines find what a step of the teacher's made.
_USERS = {
    "logit_caching": ("kd",),
    "synthetic_generation": ("synthetic", "dpo"),
    "preference_dataset": ("dpo",),
}


def experiment_like(pipeline: str, experiment: str) -> str:
    """`kd-small` beside `sft-small`; of another name the smallest there is."""
    from joulelab.runs.spec import experiment_names

    beside = f"{pipeline}-{experiment.partition('-')[2]}"
    return beside if beside in experiment_names() else f"{pipeline}-tiny"
