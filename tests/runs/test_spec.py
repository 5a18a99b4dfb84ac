"""Settings: merged, checked, and answered in the user's words."""

import json
import time

import pytest

from joulelab.errors import ConfigError, NotFoundError, UsageError
from joulelab.runs.spec import (
    _print_notice,
    check,
    describe,
    experiment_names,
    explained,
    load_spec,
    merge,
    parse_overrides,
    parse_yaml,
    read_experiment,
    read_layers,
    read_mapping,
)


def refused(**overrides):
    with pytest.raises(ConfigError) as found:
        load_spec("demo-kd", overrides)
    return found.value.message


def test_an_unknown_key_is_answered_with_the_nearest_name():
    assert refused(training={"learnig_rate": 1}) == (
        "unknown setting training.learnig_rate; did you mean training.learning_rate?"
    )


def test_a_key_nothing_like_any_other_gets_the_list():
    assert "known here: energy.codecarbon, " in refused(energy={"zzz": 1})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training": {"epochs": [1, 2]}}, "training.epochs: expected a number, found a list [1, 2]"),
        ({"training": {"batch_size": 1.5}}, "training.batch_size: expected a whole number, found 1.5"),
        ({"training": {"batch_size": "8"}}, "training.batch_size: expected a whole number, found the text '8'"),
        (
            {"training": 3},
            "training: expected a section with keys, found 3; its keys are training.accumulate, "
            "training.activation_checkpointing, training.batch_size, training.betas and 31 more",
        ),
        ({"training": {"learning_rate": -1}}, "training.learning_rate: expected a number greater than 0, found -1"),
        ({"device": "tpu"}, "device: expected 'auto', 'cpu' or 'cuda', found the text 'tpu'"),
        ({"seed": None}, "seed: expected a whole number, found null"),
        ({"energy": {"power_cap_w": float("inf")}}, "energy.power_cap_w: expected a finite number, found inf"),
        (
            {"energy": {"processes": "9999999999"}},
            "energy.processes: expected pids separated by commas, found '9999999999'",
        ),
        ({"reuse_artifacts": "yes please"}, "reuse_artifacts: expected true or false, found the text 'yes please'"),
    ],
)
def test_a_wrong_value_is_answered_with_key_expected_and_found(overrides, message):
    assert refused(**overrides) == message


def test_what_to_set_works_as_typed():
    """A section's own check does not know where the section is."""
    assert refused(training={"matmul": "fp8", "precision": "fp32"}).endswith("; set training.precision=bf16")


def test_several_mistakes_are_reported_at_once():
    first, *listed = refused(seeed=1, training={"epochs": "x"}).splitlines()
    assert first == "2 problems were found:" and len(listed) == 2


def test_the_order_is_base_then_experiment_then_command_line():
    spec = load_spec("demo-labels", parse_overrides(["training.learning_rate=3e-4", "seed=7"]))
    assert spec.training.learning_rate == pytest.approx(3e-4)  # the command line
    assert spec.distill.alpha == 1.0  # demo-labels
    assert spec.data.subset == "short"  # demo-kd, which it extends
    assert spec.energy.gpus == "auto"  # base
    assert spec.seed == 7


def test_sections_merge_and_lists_are_replaced():
    assert merge({"a": {"x": 1, "y": [1, 2]}}, {"a": {"y": [3]}}) == {"a": {"x": 1, "y": [3]}}


def test_numbers_are_read_as_people_write_them():
    assert parse_overrides(["a=3e-4", "b=1_000", "c=.5", "d=true", "e=[1, 2]", "f=1.0e+3"]) == {
        "a": 3e-4, "b": 1000, "c": 0.5, "d": True, "e": [1, 2], "f": 1000.0,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["learning_rate", "=3", "a..b=1", ".a=1"])
def test_what_is_not_a_setting_is_refused(text):
    with pytest.raises(UsageError, match="is not a setting"):
        parse_overrides([text])


def test_broken_yaml_in_a_value_is_refused_with_its_key():
    with pytest.raises(ConfigError, match="the value of a"):
        parse_overrides(["a=[1, 2"])


def test_an_unknown_experiment_is_answered_with_the_nearest():
    with pytest.raises(NotFoundError, match="did you mean 'demo-kd'"):
        read_experiment("demo-kb")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(NotFoundError, match="no such file"):
        read_experiment(str(tmp_path / "mine.yaml"))


def test_broken_yaml_is_answered_with_file_and_line(tmp_path):
    (tmp_path / "mine.yaml").write_text("a: 1\nb: [1, 2\nc: 3\n")
    with pytest.raises(ConfigError, match=r"mine.yaml, line 3: not valid YAML"):
        read_experiment(str(tmp_path / "mine.yaml"))


def test_a_file_that_is_no_mapping_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="found a list"):
        read_experiment(str(tmp_path / "mine.yaml"))


def test_an_experiment_that_extends_itself_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: mine\n")
    with pytest.raises(NotFoundError, match="unknown experiment 'mine'"):
        read_experiment(str(path))


def test_a_directory_and_a_file_of_another_kind_are_no_experiments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine.csv").write_text("text,label\n")
    (tmp_path / "demo-kd").mkdir()
    for name in ("mine", "./mine", str(tmp_path / "mine")):
        with pytest.raises(ConfigError, match=f"{name} is a directory"):
            read_experiment(name)
    with pytest.raises(ConfigError, match=r"mine\.csv is not a YAML file"):
        read_experiment("mine.csv")
    assert read_experiment("demo-kd")["name"] == "demo-kd", "a shipped name comes first"


def test_a_user_s_file_can_extend_a_shipped_experiment(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: demo-kd\ntraining: {epochs: 9}\n")
    spec = check(read_experiment(str(path)))
    assert (spec.name, spec.training.epochs, spec.data.max_tokens) == ("mine", 9, 64)


def test_a_spec_is_frozen():
    with pytest.raises(Exception, match="frozen"):
        load_spec("demo-kd").seed = 3


def test_every_shipped_experiment_is_valid():
    from joulelab.runs.groups import check_group, is_group

    for name in experiment_names():
        settings = read_layers(name)
        assert check_group(settings, {})[1] if is_group(settings) else load_spec(name)


def test_a_group_whose_baseline_is_nobodys_label_is_refused_with_the_labels_there_are():
    from joulelab.runs.groups import check_group

    with pytest.raises(ConfigError) as refusal:
        check_group({**read_layers("demo"), "baseline": "label only"}, {})
    assert "'label only'" in refusal.value.message
    assert "labels only" in str(refusal.value.hint)


def test_an_unknown_key_of_a_member_is_answered_with_the_known_ones():
    from joulelab.runs.groups import check_group

    with pytest.raises(ConfigError) as refusal:
        check_group({"name": "g", "baseline": "a", "members": [{"experiment": "demo-kd", "zzz": 1}]}, {})
    known = "known here: members.0.experiment, members.0.overrides, members.0.seeds"
    assert refusal.value.message == f"unknown setting members.0.zzz; {known}"
    assert "explain" not in str(refusal.value.hint)


def test_a_group_finds_the_experiments_next_to_it(tmp_path, monkeypatch):
    from joulelab.runs.groups import check_group

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.yaml").write_text("extends: b.yaml\nlabel: a\n")
    (tmp_path / "mine" / "b.yaml").write_text("extends: demo-kd\n")
    (tmp_path / "here.yaml").write_text("extends: demo-kd\nlabel: here\n")
    (tmp_path / "mine" / "group.yaml").write_text(
        "baseline: a\nmembers:\n  - {experiment: a.yaml}\n  - {experiment: here.yaml}\n  - {experiment: demo-kd}\n"
    )
    monkeypatch.chdir(tmp_path)
    group, specs = check_group(read_layers("mine/group.yaml"), {})
    assert [spec.name for spec in specs] == ["a", "here", "demo-kd"]
    assert group.members[0].experiment == str(tmp_path / "mine" / "a.yaml").removeprefix(f"{tmp_path}/")


def test_a_misspelled_key_of_a_group_is_answered_like_any_other():
    from joulelab.runs.groups import check_group

    with pytest.raises(ConfigError, match="unknown setting basline; did you mean baseline"):
        check_group({**read_layers("demo"), "basline": "x"}, {})


def test_every_setting_is_documented():
    from joulelab.lookup import PIPELINE_SPECS

    for pipeline in PIPELINE_SPECS.names():
        undocumented = [row.key for row in describe(PIPELINE_SPECS.resolve(pipeline)) if not row.about]
        assert undocumented == []


def test_a_setting_is_found_in_whichever_pipeline_has_it():
    infer = explained("min_run_time_s")
    assert infer.pipelines == ("infer",) and infer.rows[0].about
    rank = explained("student.lora.rank")
    assert "kd" in rank.pipelines and rank.rows[0].takes == "whole number, at least 1"
    lora = explained("student.lora", "kd").rows
    assert lora[0].takes == "section or null" and len(lora) > 1
    rate = explained("training.learning_rate")
    assert set(rate.pipelines) & {"kd", "classify"} and set(rate.otherwise).isdisjoint(rate.pipelines)
    assert {"kd", "classify", "train"} <= {*rate.pipelines, *rate.otherwise}
    assert [row.key for row in explained().rows if row.key == "seed"] and "kd" in explained().pipelines
    with pytest.raises(NotFoundError, match=r"did you mean 'min_run_time_s'") as unknown:
        explained("min_runtime_s")
    with pytest.raises(UsageError, match="kd-tiny is an experiment") as refusal:
        explained("kd-tiny")
    assert "joulelab run kd-tiny --dry-run" in str(refusal.value.hint)
    assert "joulelab explain --pipeline" in unknown.value.hint


@pytest.mark.parametrize("seed", [-1, 2**32, 99999999999999999999])
def test_a_seed_that_no_generator_takes_is_refused_at_the_settings(seed):
    with pytest.raises(ConfigError, match="seed: expected"):
        load_spec("demo-kd", {"seed": seed})
    assert load_spec("demo-kd", {"seed": 2**32 - 1}).seed == 2**32 - 1


def test_published_and_earlier_names_of_settings_are_accepted(capsys):
    published = load_spec("demo-kd", {"distill": {"kd_alpha": 0.25, "kd_T": 3.0}})
    assert (published.distill.alpha, published.distill.temperature) == (0.25, 3.0)
    assert capsys.readouterr().err == ""
    names = {"teacher": {"teacher_name": "sample:minilm"}, "student": {"student_size": "tiny", "layers": None}}
    spec = load_spec("distilbert-tiny-kd", names)
    assert (spec.teacher.model, spec.student.size) == ("sample:minilm", "tiny")
    _print_notice.cache_clear()  # once per process
    renamed = load_spec("squad-tiny", {"student": {"init": "elsewhere"}, "evaluation": {"batch_size": 7}})
    assert (renamed.student.model, renamed.eval_batch_size) == ("elsewhere", 7)
    assert "student.init is now called student.model" in capsys.readouterr().err
    preferences = load_spec("dpo-tiny", {"preferences": {"loss": "length-normalised"}}).preferences
    assert preferences.loss == "length-normalized"
    assert "preferences.loss=length-normalised is now called" in capsys.readouterr().err


TWO_NAMES = [
    ("on-policy-tiny", "on_policy", {"lambda": 0.5}, {"student_share": 0.25}),
    ("on-policy-tiny", "on_policy", {"lambda": 0.5}, {"lmbda": 0.25}),
    ("demo-kd", "distill", {"kd_T": 4.0}, {"temperature": 5.0}),
    ("squad-tiny", "student", {"init": "a"}, {"model": "b"}),  # a former name
]


@pytest.mark.parametrize(("experiment", "section", "one", "other"), TWO_NAMES)
def test_two_names_of_a_setting_with_different_values_are_refused_in_one_file_and_on_one_command_line(
    tmp_path, experiment, section, one, other
):
    (first, value), (second, _) = *one.items(), *other.items()
    both = f"{section}.{first} and {section}.{second} both set {section}.*, to different values"
    with pytest.raises(ConfigError, match=both):
        load_spec(experiment, parse_overrides([f"{section}.{key}={given}" for key, given in {**one, **other}.items()]))
    own = tmp_path / "own.yaml"
    own.write_text(json.dumps({"extends": experiment, section: {**one, **other}}))
    with pytest.raises(ConfigError, match=both):
        load_spec(str(own))
    assert load_spec(experiment, {section: {first: value, second: value}}), "the same value twice is no contradiction"


@pytest.mark.parametrize(("experiment", "section", "one", "other"), TWO_NAMES)
def test_an_override_replaces_a_setting_whatever_names_both_use(tmp_path, experiment, section, one, other):
    for below, over in ((one, other), (other, one)):
        own = tmp_path / "own.yaml"
        own.write_text(json.dumps({"extends": experiment, section: below}))
        assert load_spec(str(own), {section: over}) == load_spec(experiment, {section: over, "name": "own"})
        child = tmp_path / "child.yaml"
        child.write_text(json.dumps({"extends": str(own), section: over}))
        assert getattr(load_spec(str(child)), section) == getattr(load_spec(str(own), {section: over}), section)


def test_layers_of_a_file_that_names_its_pipeline_last_are_overridden_too(tmp_path):
    (tmp_path / "a.yaml").write_text("distill: {kd_T: 4.0}\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\ndistill: {temperature: 5.0}\n")
    (tmp_path / "c.yaml").write_text("extends: b.yaml\npipeline: kd\n")
    assert read_layers(str(tmp_path / "c.yaml"))["distill"] == {"temperature": 5.0}


def test_names_in_another_section_are_names_of_the_setting_like_any_other(tmp_path):
    squad = tmp_path / "squad.yaml"
    squad.write_text("extends: squad-tiny\neval_batch_size: 8\n")
    assert load_spec(str(squad), parse_overrides(["evaluation.batch_size=3"])).eval_batch_size == 3
    train = tmp_path / "train.yaml"
    train.write_text("pipeline: train\nmodel: gpt2\ndata: {source: a.txt, validation: b.txt, text_column: 2}\n")
    spec = load_spec(str(train))
    assert (spec.dataset, spec.validation_dataset, spec.text_column) == ("a.txt", "b.txt", 2)
    other = load_spec(str(train), {"dataset": "c.txt"})
    assert (other.dataset, other.validation_dataset, other.text_column) == ("c.txt", "", None), "other data"
    assert load_spec(str(train), {"dataset": "c.txt"}) == load_spec(str(train), {"data": {"train": "c.txt"}})
    with pytest.raises(ConfigError, match=r"data\.source and dataset both set dataset"):
        load_spec(str(train), {"data": {"source": "c.txt"}, "dataset": "d.txt"})
    with pytest.raises(ConfigError, match=r"data\.validation and data\.test both set"):
        load_spec(str(train), {"data": {"validation": "c.txt", "test": "d.txt"}})
    with pytest.raises(ConfigError, match="unknown setting data; did you mean dataset"):
        load_spec(str(train), {"data": {"zzz": 1}})


def test_a_model_next_to_the_file_is_found_under_published_names_too(tmp_path):
    for name in ("my-teacher", "my-student"):
        (tmp_path / name).mkdir()
    own = tmp_path / "own.yaml"
    own.write_text("teacher: {teacher_name: my-teacher}\nstudent: {student_pretrained_weights: my-student}\n")
    layers = read_layers(str(own))
    assert layers["teacher"] == {"teacher_name": str(tmp_path / "my-teacher")}
    assert layers["student"] == {"student_pretrained_weights": str(tmp_path / "my-student")}


def test_every_file_of_a_setting_may_be_next_to_the_settings(tmp_path):
    for name in ("tokens", "template.jinja", "prompts.jsonl", "judge", "questions.jsonl"):
        (tmp_path / name).touch()
    own = tmp_path / "own.yaml"
    own.write_text(
        "data: {tokenizer: tokens, template: template.jinja}\ngeneration: {prompts_from: prompts.jsonl}\n"
        "preferences: {judge: {model: judge}}\nquality: {answers: questions.jsonl, harness_folder: absent}\n"
    )
    layers = read_layers(str(own))
    assert layers["data"] == {"tokenizer": str(tmp_path / "tokens"), "template": str(tmp_path / "template.jinja")}
    assert layers["generation"]["prompts_from"] == str(tmp_path / "prompts.jsonl")
    assert layers["preferences"]["judge"]["model"] == str(tmp_path / "judge")
    assert layers["quality"] == {"answers": str(tmp_path / "questions.jsonl"), "harness_folder": "absent"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e6", 1_000_000), ("2E+3", 2000), ("1e-4", 0.0001), ("1.0e6", 1e6), ("1e30", 1e30), ("3.0", 3.0)],
)
def test_a_whole_number_may_have_an_exponent(text, value):
    found = parse_yaml(text, "here")
    assert found == value and type(found) is type(value)


def test_settings_of_wandb_have_two_names_as_well(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("extends: demo-kd\ntrackers: {tensorboard: {}, wandb: {project: mine}}\n")
    spec = load_spec(str(own))
    assert (spec.trackers, spec.wandb.project) == (("tensorboard", "wandb"), "mine")
    assert load_spec(str(own), {"wandb": {"project": "other"}}).wandb.project == "other"
    assert load_spec(str(own), {"trackers": {"wandb": {"name": "x"}}}).wandb.project == "mine"
    assert load_spec(str(own), {"trackers": {"wandb": False}}).trackers == ("tensorboard",)
    assert load_spec("demo-kd", {"trackers": {"wandb": True}}).trackers == ("wandb",)
    listed = tmp_path / "listed.yaml"
    listed.write_text("extends: demo-kd\ntrackers: [tensorboard]\n")
    added = load_spec(str(listed), {"trackers": {"wandb": {"project": "mine"}}})
    assert (added.trackers, added.wandb.project) == (("tensorboard", "wandb"), "mine"), "the others stay enabled"
    with pytest.raises(ConfigError, match=r"trackers.wandb.project and wandb.project both set wandb.project"):
        load_spec("demo-kd", {"trackers": {"wandb": {"project": "a"}}, "wandb": {"project": "b"}})
    with pytest.raises(ConfigError, match="only wandb accepts settings"):
        load_spec("demo-kd", {"trackers": {"mlflow": {"project": "a"}}})
    with pytest.raises(ConfigError, match=r"trackers\.wandb is 5; expected true or false, or its settings"):
        load_spec("demo-kd", {"trackers": {"wandb": 5}})


def test_a_setting_without_effect_is_named_as_it_was_given():
    with pytest.raises(ConfigError, match=r"distill.kd_T has no effect in this run with pipeline=sft"):
        load_spec("sft-tiny", {"distill": {"kd_T": 3.0}})


def test_a_key_that_a_file_has_twice_is_refused_with_both_lines(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("extends: demo-kd\ntraining: {epochs: 9}\nseed: 1\ntraining: {batch_size: 4}\n")
    with pytest.raises(ConfigError, match=r"own.yaml, line 4: training is set twice; the first one is in line 2"):
        read_experiment(str(own))
    own.write_text("a: &x {b: 1}\nc: {<<: *x, b: 2}\n")
    assert read_mapping(own)["c"] == {"b": 2}, "a merged section is no second key"


def test_other_data_or_another_student_drop_the_description_of_the_experiment():
    about = load_spec("demo-kd", {}).about
    assert "film-review" in about
    assert load_spec("demo-kd", {"data": {"source": "sample:reviews"}, "seed": 3}).about == about
    assert load_spec("demo-kd", {"data": {"source": "folder"}}).about == ""
    assert load_spec("demo-kd", {"student": {"layers": [0, 1, 5]}}).about == ""
    assert load_spec("demo-kd", {"data": {"source": "folder"}, "about": "Mine."}).about == "Mine."


def test_other_data_drops_the_test_questions_about_film_reviews():
    assert load_spec("sft-small", {}).quality.answers == "sample:reviews"
    assert load_spec("sft-small", {"data": {"source": "folder"}}).quality.answers is None
    own = {"data": {"source": "folder"}, "quality": {"answers": "mine.jsonl"}}
    assert load_spec("sft-small", own).quality.answers == "mine.jsonl"


def test_every_experiment_has_a_description():
    assert [name for name in experiment_names() if name != "base" and not read_layers(name).get("about")] == []


@pytest.mark.parametrize("text", ["uses hf_abcdefghijklmnopqrst", "http://me:pass@host/v1", "password=abc"])
def test_a_secret_in_settings_is_refused_with_its_key(text):
    with pytest.raises(ConfigError, match="about contains what looks like a secret") as refused:
        load_spec("demo-kd", {"about": text})
    assert text not in refused.value.message and "environment variable" in refused.value.hint


BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("data: " + "[" * 60 + "]" * 60, "nested too deep"),
        ("data: " + "{a: " * 20_000 + "1" + "}" * 20_000, "nested too deep"),
        ("data: &x\n  source: *x\n", "line 1: an alias contains itself"),
        (BOMB, "values, aliases included"),
        ("seed: !!timestamp 2026-02-31", "not valid YAML .*day"),
        ("seed: !!int x", "not valid YAML"),
    ],
)
def test_settings_that_are_deep_circular_or_endless_are_refused_at_once(tmp_path, text, problem):
    (tmp_path / "mine.yaml").write_text(text)
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=problem):
        read_mapping(tmp_path / "mine.yaml")
    assert time.monotonic() - begin < 5


def test_aliases_and_texts_that_look_like_dates_are_read(tmp_path):
    (tmp_path / "mine.yaml").write_text("a: &x {b: 2026-02-31, c: 3e-4}\nd: *x\ne: 2026-01-01\n")
    inner = {"b": "2026-02-31", "c": 3e-4}
    assert read_mapping(tmp_path / "mine.yaml") == {"a": inner, "d": inner, "e": "2026-01-01"}


def test_a_settings_file_of_many_megabytes_is_refused_unread(tmp_path):
    with (tmp_path / "mine.yaml").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ConfigError, match="a settings file has at most"):
        read_mapping(tmp_path / "mine.yaml")


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\x07", "\u202eabc"])
def test_control_characters_in_settings_are_refused(text):
    with pytest.raises(ConfigError, match="label contains control characters") as refused:
        load_spec("demo-kd", {"label": text})
    assert text not in refused.value.message


def test_a_key_that_is_a_name_elsewhere_lists_the_other_settings():
    assert "distill.temperature" in explained("temperature").same_name
    assert explained("distill.temperature").same_name == ()
