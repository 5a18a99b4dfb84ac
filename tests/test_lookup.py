import pytest

from joulelab.errors import NotFoundError
from joulelab.lookup import PIPELINE_SPECS, PIPELINES, SENSORS, TRAINER_STATS, Table


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(NotFoundError, match="unknown sensor 'nvmll'; did you mean 'nvml'"):
        SENSORS.resolve("nvmll")


def test_a_name_far_from_all_gets_the_list():
    with pytest.raises(NotFoundError, match="known: a, b"):
        Table("thing", {"a": "x:y", "b": "x:y"}).resolve("zzzz")


@pytest.mark.parametrize("table", [SENSORS, PIPELINES, PIPELINE_SPECS, TRAINER_STATS], ids=lambda table: table.kind)
def test_every_entry_of_every_table_resolves(table):
    for name in table.names():
        assert callable(table.resolve(name))


def test_every_pipeline_has_settings_and_stages():
    assert PIPELINES.names() == PIPELINE_SPECS.names()
