"""`joulelab run EXPERIMENT --compare`: the group that compares an experiment with others."""

import pytest

from joulelab.cli.options import comparison_of
from joulelab.errors import NotFoundError, UsageError


@pytest.mark.parametrize(
    ("experiment", "group"),
    [
        ("fitnets", "fitnets"),
        ("fitnets-response", "fitnets"),
        ("distilbert-tiny-quick-kd", "distilbert-tiny-quick"),
        ("kd-tiny", "compare-tiny"),
    ],
)
def test_an_experiment_leads_to_the_group_it_is_named_after_or_alone_in(experiment, group):
    assert comparison_of(experiment) == group


def test_where_it_is_not_plain_which_group_is_meant_the_choice_is_the_users():
    with pytest.raises(UsageError, match="several groups") as several:
        comparison_of("kd-small")
    assert "compare-small" in several.value.hint
    with pytest.raises(UsageError, match="no group compares squad-tiny"):
        comparison_of("squad-tiny")
    with pytest.raises(UsageError, match="needs an experiment"):
        comparison_of(None)
    with pytest.raises(NotFoundError):
        comparison_of("no-such-thing")
