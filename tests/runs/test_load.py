"""`joulelab.load` and `load_runs`: finished runs as objects with tables for pandas."""

import sys
import time

import pytest

import joulelab
from joulelab.errors import DependencyMissing, NotFoundError, UsageError

FAST = {"sample_interval_s": 0.05, "gpus": "none"}


def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(500))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = tmp_path_factory.mktemp("load") / "runs"
    for name in ("demo-a", "demo-b"):
        with joulelab.measure(name, runs_dir=store, energy={**FAST, "grid": "FR", "price": "0.25 EUR"}) as m:
            busy(0.3)
            m.context.log(1, loss=0.5)
    return store


def test_a_run_has_the_energy_that_is_printed_and_four_tables(store):
    run = joulelab.load("last", store)
    assert run.energy == run.record.best_energy and run.energy_j > 0
    assert str(run).startswith("demo-b: ") and str(run).endswith(f"run directory: {run.folder}")
    stages = run.to_pandas("stages")
    assert stages["stage"].tolist() == ["program.run", "run.overhead"]
    assert stages["shown_energy_j"][0] == run.energy_j
    totals = run.to_pandas("totals")
    assert len(totals) == 1 and totals["shown_energy_j"][0] == run.energy_j
    assert totals["cost_high"][0] > totals["cost_low"][0] > 0
    assert str(totals["created_at"].dtype).startswith("datetime64")
    assert run.to_pandas("metrics")["loss"].tolist() == [0.5]
    trace = run.to_pandas("trace")
    assert set(trace["component"]) == {"cpu_estimate"} and trace["power_w"].max() > 0
    assert trace["seconds"].is_monotonic_increasing


def test_several_runs_are_one_table_with_their_ids(store):
    runs = joulelab.load_runs("demo-*", store)
    assert [run.record.name for run in runs] == ["demo-a", "demo-b"]
    totals = runs.to_pandas()
    assert totals["run_id"].tolist() == [run.run_id for run in runs]
    assert set(runs[:1].to_pandas("stages")["run_id"]) == {runs[0].run_id}


def test_names_that_fit_no_run_several_runs_or_no_table_are_refused(store, tmp_path):
    with pytest.raises(UsageError, match="'demo-\\*' names 2 runs"):
        joulelab.load("demo-*", store)
    with pytest.raises(NotFoundError, match="no run matches 'nothing-\\*'"):
        joulelab.load_runs("nothing-*", store)
    with pytest.raises(UsageError, match="no store at"):
        joulelab.load_runs("*", tmp_path / "absent")
    with pytest.raises(NotFoundError, match="unknown table 'stage'; did you mean 'stages'"):
        joulelab.load("last", store).to_pandas("stage")


def test_without_pandas_the_error_names_the_package(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(DependencyMissing, match="pandas cannot be imported") as found:
        joulelab.load("last", store).to_pandas("stages")
    assert found.value.hint == "pip install pandas"
