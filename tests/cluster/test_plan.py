"""Planned jobs, their steps, shards and ranks."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from joulelab import lookup
from joulelab.cluster.plan import Member, plan, require_ranks, require_shards, usual_steps
from joulelab.distill.causal.config import shard_specs
from joulelab.errors import ConfigError, UsageError
from joulelab.runs.spec import RunSpec, check, merge, read_experiment

STORE = Path("/shared/runs")


GROUP = STORE / "groups" / "demo-1"


MEMBERS = [Member(STORE / "labels-1", False), Member(STORE / "kd-1", True), Member(STORE / "kd-2", True)]


def test_the_teacher_is_made_in_the_first_run_that_has_one():
    jobs = {job.key.partition("-")[2]: job for job in plan(MEMBERS, ("data", "teacher", "students"), report_on=GROUP)}
    assert jobs["data"].runs == (STORE / "labels-1",)
    assert jobs["teacher"].runs == (STORE / "kd-1",)
    assert [jobs[name].after for name in jobs] == [None, "01-data", "02-teacher"]


@pytest.mark.parametrize(
    ("experiment", "changes", "has_teacher"),
    [
        ("demo-kd", {}, True),
        ("demo-labels", {}, False),
        ("squad-tiny", {}, True),
        ("squad-tiny-labels", {}, False),
        ("fitnets-images", {}, True),
        ("distilbert-tiny-alone", {}, False),
        ("distilbert-tiny-alone", {"until": "teacher"}, True),
        ("sft-tiny", {}, False),
        ("kd-tiny", {}, True),
    ],
)
def test_settings_declare_whether_a_run_has_a_teacher(experiment, changes, has_teacher):
    assert check(merge(read_experiment(experiment), changes)).has_teacher is has_teacher


def test_a_pipeline_declares_on_its_spec_that_it_divides_its_work_among_ranks():
    class Sharing(RunSpec):
        shares_ranks = True

    require_ranks(Sharing(pipeline="mine"), nodes=2, ranks=4)
    with pytest.raises(UsageError, match="single process, but 2 x 4") as refused:
        require_ranks(RunSpec(pipeline="mine"), nodes=2, ranks=4)
    assert "distilbert, dpo, kd, on-policy, self, sft, synthetic, train" in refused.value.hint


def test_work_that_several_runs_need_is_split_once_and_different_work_one_after_the_other():
    specs = [check(merge(read_experiment(name), {"seed": seed})) for seed in (0, 1) for name in ("sft-tiny", "kd-tiny")]
    (shares,) = shard_specs(specs, 4)
    assert [(spec.name, spec.shard, spec.until) for spec in shares][1] == ("kd-tiny-teacher-1-of-4", "1/4", "teacher")
    from_teacher = {"preferences": {"candidates_from": "teacher"}}
    others = [check(read_experiment("synthetic-tiny")), check(merge(read_experiment("dpo-tiny"), from_teacher))]
    works = shard_specs([*specs, *others], 2)
    assert [work[0].pipeline for work in works] == ["kd", "synthetic", "dpo"]
    shared = [[STORE / spec.name for spec in work] for work in works]
    jobs = plan(MEMBERS, usual_steps(specs, shards=2), report_on=GROUP, shards=shared)
    keys = ["01-data", "02-teacher", "03-teacher", "04-teacher", "05-students", "06-report"]
    assert [job.key for job in jobs] == keys
    assert [job.after for job in jobs] == [None, *keys[:-1]]


def test_shards_are_refused_where_there_is_nothing_to_split():
    for name, text in (("sft-tiny", "no teacher"), ("self-tiny", "trained first"), ("demo-kd", "can be divided")):
        with pytest.raises(UsageError, match=text):
            shard_specs([check(read_experiment(name))], 4)
    with pytest.raises(UsageError, match="which --steps leaves out"):
        require_shards(4, ("data", "students"))


def test_a_parallel_kind_needs_several_processes_of_the_job():
    spec = check({"pipeline": "train", "model": "gpt2", "training": {"parallel": "fsdp"}})
    require_ranks(spec, nodes=1, ranks=2)
    with pytest.raises(ConfigError, match="parallel=fsdp requires several ranks"):
        require_ranks(spec, nodes=1, ranks=1)


def test_an_energy_budget_is_that_of_one_host():
    """Each host's meter is read by its own process, and ranks exchange no energy."""
    by_energy = {"training": {"epochs": None, "max_energy_j": 500}}
    zoo = check({"pipeline": "train", "model": "gpt2", **by_energy})
    kd = check(merge(read_experiment("kd-tiny"), {"budget": {"tokens": None, "energy_j": 500}}))
    for spec in (zoo, kd):
        require_ranks(spec, nodes=1, ranks=2)
        with pytest.raises(ConfigError, match="set for 2 hosts"):
            require_ranks(spec, nodes=2, ranks=1)


def test_separate_models_on_several_ranks_are_refused():
    spec = check({"pipeline": "train", "model": "gpt2", "training": {"parallel": "none"}})
    require_ranks(spec, nodes=1, ranks=1)
    with pytest.raises(ConfigError, match="would train 2 separate models"):
        require_ranks(spec, nodes=1, ranks=2)


def test_pipelines_that_share_their_work_are_those_that_join_the_ranks():
    """`run_recipe` joins the ranks of every pipeline that declares it."""
    modules = {name: place.partition(":")[0] for name, place in lookup.PIPELINES._entries.items()}
    sources = {name: Path(find_spec(module).origin).read_text() for name, module in modules.items()}
    declared = {name for name in lookup.PIPELINE_SPECS.names() if lookup.PIPELINE_SPECS.resolve(name).shares_ranks}
    assert {name for name, text in sources.items() if "process_group() as" in text} <= declared
    assert all("process_group() as" in sources[name] or "run_recipe(" in sources[name] for name in declared)
