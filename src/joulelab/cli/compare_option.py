"""`--compare`: in place of one experiment the group that sets it beside others, on the same data and budget."""

from __future__ import annotations

from joulelab.errors import UsageError


def comparison_of(experiment: str | None) -> str:
    """A group is its own answer; of several that hold the experiment, the one it is named after."""
    from joulelab.runs.groups import is_group
    from joulelab.runs.spec import experiment_names, read_layers

    if experiment is None:
        raise UsageError("--compare needs an experiment", "for example: joulelab run fitnets --compare")
    if is_group(read_layers(experiment)):
        return experiment
    groups = {name: layers for name in experiment_names() if is_group(layers := read_layers(name))}
    holding = [
        name for name, layers in groups.items() if experiment in {row["experiment"] for row in layers["members"]}
    ]
    named_after = [name for name in holding if experiment.startswith(f"{name}-")]
    found = named_after or holding
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{experiment} is a member of several groups", f"name one of them: {', '.join(found)}")
    raise UsageError(
        f"no group sets {experiment} beside others", f"these are compared as they stand: {', '.join(groups)}"
    )
