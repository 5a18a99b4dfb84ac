"""The members of a sweep, and a group whose members run elsewhere."""

import pytest

from joulelab.errors import ConfigError, EndedBySignal, UsageError
from joulelab.runs.context import SilentProgress
from joulelab.runs.groups import (
    check_group,
    create_group,
    execute_group,
    group_records,
    group_yaml,
    load_group,
    point_label,
    queue_members,
    sweep_specs,
)
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.record import RunRecord
from joulelab.runs.spec import load_spec, read_experiment, read_layers

SETTINGS = {"pipeline": "train", "model": "gpt2", "size": "tiny", "seed": 3}


def test_all_configurations_come_before_the_next_repeat():
    specs = sweep_specs(SETTINGS, {"training.batch_size": [2, 4], "training.precision": ["fp32", "bf16"]}, repeats=2)
    assert [spec.seed for spec in specs] == [3, 3, 3, 3, 4, 4, 4, 4]
    assert [spec.training.batch_size for spec in specs[:4]] == [2, 2, 4, 4]
    assert specs[1].label == "batch_size=2, precision=bf16"


def test_a_group_on_other_data_has_no_description_of_the_former_data_whatever_name_the_data_has(tmp_path):
    (tmp_path / "a.yaml").write_text("pipeline: train\nmodel: gpt2\nsize: tiny\ndataset: a.txt\nlabel: a\n")
    member = {"experiment": str(tmp_path / "a.yaml")}
    settings = {"name": "g", "about": "On a.", "baseline": "a", "members": [member]}
    assert check_group(settings, {"seed": 3})[0].about == "On a."
    assert check_group(settings, {"data": {"source": "b.txt"}})[0].about == ""


def test_a_setting_is_swept_under_any_of_its_names_but_not_under_two():
    settings = {**read_experiment("kd-tiny"), "distill": {"temperature": 3.0}}
    specs = sweep_specs(settings, {"distill.kd_T": [1.0, 2.0]}, repeats=1)
    assert [(spec.distill.temperature, spec.label) for spec in specs] == [(1.0, "kd_T=1.0"), (2.0, "kd_T=2.0")]
    with pytest.raises(ConfigError, match=r"distill\.kd_T and distill\.temperature both set distill\.temperature"):
        sweep_specs(settings, {"distill.kd_T": [1.0, 2.0], "distill.temperature": [1.0, 2.0]}, repeats=1)


def test_repeats_alone_are_a_sweep_of_one_configuration():
    specs = sweep_specs(SETTINGS, {}, repeats=3)
    assert [spec.seed for spec in specs] == [3, 4, 5]
    assert {spec.label for spec in specs} == {""}


def test_names_that_end_alike_are_distinguished():
    assert point_label({"training.seed_a": 1, "training.lr": 2}) == "seed_a=1, lr=2"
    assert point_label({"teacher.lr": 1, "student.lr": 2}) == "teacher.lr=1, student.lr=2"


@pytest.mark.parametrize("axes", [{"seed": [1, 2]}, {"training.batch_size": [2, 2]}])
def test_seeds_and_doubles_are_refused(axes):
    with pytest.raises(UsageError, match=r"repeats|twice"):
        sweep_specs(SETTINGS, axes, repeats=1)


def ends_with(*statuses):
    """Instead of training: the first member ends with the first status, and so on."""
    left = list(statuses)

    def run_member(run):
        record = RunRecord.model_validate(read_json(run.record)).model_copy(update={"status": left.pop(0)})
        write_json(run.record, record)
        if record.status == "truncated":
            raise EndedBySignal(15)
        return record

    return run_member


@pytest.fixture
def group(tmp_path):
    specs = sweep_specs(SETTINGS, {"training.batch_size": [2, 4]}, repeats=2)
    return create_group(tmp_path, specs, name="sweep-gpt2", sweep=True)


def test_a_member_that_failed_does_not_stop_the_others_and_is_run_again_on_resume(tmp_path, group):
    records = execute_group(group, SilentProgress(), ends_with("done", "failed", "done", "done"))
    assert [record.status for record in records] == ["done", "failed", "done", "done"]
    first = [member.run_id for member in load_group(group.folder).members]
    again = execute_group(group, SilentProgress(), ends_with("done"))
    assert [record.status for record in again] == ["done"] * 4
    assert [member.run_id for member in load_group(group.folder).members] == first, "the same runs, not new ones"


def test_an_interrupted_sweep_resumes_the_remaining_runs(tmp_path, group):
    with pytest.raises(EndedBySignal):
        execute_group(group, SilentProgress(), ends_with("done", "truncated"))
    assert [member.run_id is not None for member in load_group(group.folder).members] == [True, True, False, False]
    execute_group(group, SilentProgress(), ends_with("done", "done", "done"))
    record, members = group_records(group.folder)
    assert record.sweep
    assert [member.status for member in members] == ["done"] * 4
    assert record.varying["training.batch_size"] == [2, 4, 2, 4]


def test_a_group_is_written_as_an_experiment_file_that_runs_it_again(tmp_path):
    """`joulelab pack` adds it to an archive; its paths are relative to the group's folder."""
    specs = [load_spec("demo-labels", {"seed": seed}) for seed in (0, 1)]
    paths = create_group(tmp_path, specs, name="pair", about="two seeds", baseline="labels only")
    queue_members(paths)
    file = paths.folder / "group.yaml"
    file.write_text(group_yaml(load_group(paths.folder)))
    assert str(tmp_path) not in file.read_text()
    group, again = check_group(read_layers(str(file)), {})
    assert (group.name, group.about, group.baseline) == ("pair", "two seeds", "labels only")
    assert again == specs


@pytest.mark.parametrize(
    ("experiment", "changes", "refused"),
    [
        (
            "kd-tiny",
            {"on_policy": {"sync_every": 4}},
            "on_policy.sync_every has no effect in this run",
        ),
        ("sft-tiny", {"generation": {"prompts": 4}}, "generation is used by: synthetic, dpo, on-policy"),
        ("on-policy-tiny", {"generation": {"min_score": 0.5}}, "generation.min_score has no effect in this run"),
        ("on-policy-tiny", {"on_policy": {"student_share": 1.0, "other_data": "teacher"}}, "student_share below 1"),
        ("kd-tiny", {"distill": {"teacher": "live", "codec": "hidden"}}, "distill.teacher=cached"),
        ("kd-tiny", {"budget": {"start_share": 0.3}}, "budget.start_share has no effect in this run"),
        ("on-policy-tiny", {"generation": {"held_out": 0.3}}, "generation.held_out has no effect in this run"),
        ("on-policy-tiny", {"training": {"prefetch": 3}}, "training.prefetch has no effect in this run"),
        ("on-policy-tiny", {"teacher": {"batch_size": 3}}, "teacher.batch_size has no effect in this run"),
        ("self-tiny", {"teacher": {"batch_size": 2}}, None),
        ("kd-tiny", {"distill": {"teacher": "live", "codec": "hidden"}, "until": "logits"}, None),
        ("sft-tiny", {"teacher": {"precision": "bf16"}}, "teacher.precision is used by: runs with a teacher"),
        ("self-tiny", {"preferences": {"beta": 0.2}}, "preferences.beta has no effect"),
        ("kd-tiny", {"generation": {"prompts": 4}, "until": "generation"}, None),
        ("synthetic-tiny", {"generation": {"prompts": 4}, "until": "data"}, None),
        ("synthetic-tiny", {"generation": {"min_score": 0.5}, "preferences": {"judge": "rubric"}}, None),
    ],
)
def test_changed_settings_that_the_pipeline_does_not_use_are_refused(experiment, changes, refused):
    if refused is None:
        load_spec(experiment, changes)
    else:
        with pytest.raises(UsageError, match=refused):
            load_spec(experiment, changes)


def test_a_group_accepts_changed_settings_that_one_of_its_members_uses():
    layers = read_layers("compare-tiny")
    assert check_group(layers, {"on_policy": {"sync_every": 4}})[1][0].on_policy.sync_every == 4
    layers = {**layers, "members": [one for one in layers["members"] if one["experiment"] in ("sft-tiny", "kd-tiny")]}
    with pytest.raises(UsageError, match=r"on_policy\.sync_every has no effect"):
        check_group(layers, {"on_policy": {"sync_every": 4}})
