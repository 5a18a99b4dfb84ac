import pytest

from joulelab.errors import NotFoundError
from joulelab.lookup import PIPELINE_SPECS, PIPELINES, SENSORS, TRAINER_STATS, Table
from joulelab.meter.config import EnergyConfig
from joulelab.meter.session import CONDITIONS, sensors_for


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


def test_sensors_are_opened_in_the_order_of_their_table_unless_a_condition_excludes_them(monkeypatch):
    monkeypatch.setattr("joulelab.meter.sensors.amd.present", lambda: True)
    assert sensors_for(EnergyConfig()) == ("host", "cores", "rapl", "nvml", "amd")
    assert sensors_for(EnergyConfig(gpus="none", estimate_cpu=True)) == ("host", "cores", "rapl", "cpu-estimate")
    assert set(CONDITIONS) <= set(SENSORS)
