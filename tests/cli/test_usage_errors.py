"""Usage errors: message, hint and exit code; nothing is created."""

import json
import subprocess
import sys

import pytest
from commands import joulelab, joulelab_here

from joulelab import lookup
from joulelab.cli.console import SCREEN_LINES
from joulelab.cli.run import settings_lines
from joulelab.runs.groups import check_group
from joulelab.runs.spec import read_layers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo-kd", "training.learnig_rate=1"], "did you mean training.learning_rate?"),
        (["demo-kd", "training.lr=1"], "unknown setting training.lr; did you mean training.learning_rate?"),
        (["demo-kd", "lr=1"], "unknown setting lr; did you mean training.learning_rate?"),
        (["demo-kd", "training.epochs=[1, 2]"], "training.epochs: expected a number, found a list [1, 2]"),
        (["demo-kd", "evaluators=[sise]"], "unknown evaluator 'sise'; did you mean 'size'?"),
        (["demo-kd", "evaluators=[./mine.py]"], "mine.py"),
        (["demo-kb"], "did you mean 'demo-kd'?"),
        (["missing.yaml"], "no such file: missing.yaml"),
        (["demo-kd", "seed"], "'seed' is not a setting"),
        (["demo-kd", "data.source=./reviews.csv"], "reviews.csv"),
        (["demo-kd", "teacher.model=sample:minilmm"], "did you mean 'minilm'"),
        (["demo-kd", "training.stats=[simpel]"], "did you mean 'simple'"),
        (["demo", "training.learnig_rate=1"], "did you mean training.learning_rate?"),
        (["kd-tiny", "--until", "teacher", "--shard", "8/8"], "invalid shard '8/8'"),
        (["kd-tiny", "--shard", "3/2"], "invalid shard '3/2'"),
        (["kd-tiny", "--shard", "0/8"], "--shard 0/8 does not select any work"),
        (["self-tiny", "--until", "teacher", "--shard", "0/8"], "self learns from a student that is trained first"),
        (["kd-tiny", "--data-script", "preprocess_dataset", "--shard", "0/8"], "not the teacher's work"),
        ([], "no experiment was named"),
        (["--resume", "nothing"], "no runs under"),
        (["--resume", "nothing", "--dry-run", "--budget", "5kJ"], "leave --budget, --dry-run out"),
        (["kd-tiny", "--data-script", "prerun", "--dry-run"], "only the energy settings"),
        (["sft-tiny", "--data-script", "logit_caching"], "does not use the output of logit_caching"),
        (["sft-tiny", "--until", "teacher"], "has no teacher, so --until teacher would do nothing"),
        (["demo-labels", "--part", "teacher"], "has no teacher, so --until teacher would do nothing"),
        (["kd-tiny", "--until", "teachr"], "unknown phase 'teachr'; did you mean 'teacher'?"),
        (["kd-tiny", "--until", "data", "--part", "data"], "--part is the former name of --until"),
        (["demo", "--until", "data"], "--run-dir and --until apply to a single run"),
        (
            ["kd-tiny", "--budget", "20Mtokens", "budget.tokens=10"],
            "and budget.tokens=10 both set a training budget",
        ),
        (["kd-tiny", "--budget", "5kJ", "budget={tokens: 10}"], "both set a training budget"),
        (["demo-kd", "seed=4294967296"], "seed: expected a number less than or equal to 4294967295"),
    ],
)
def test_usage_errors_exit_with_2_and_create_nothing(tmp_path, words, message):
    done = joulelab_here("run", *words, "--runs-dir", tmp_path / "runs", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_student_is_the_former_name_of_the_phase_train(tmp_path):
    def settings(*words):
        done = joulelab_here("run", "kd-tiny", *words, "--dry-run", "--runs-dir", tmp_path / "runs")
        assert done.returncode == 0, done.stderr
        return done

    renamed, option = settings("until=student"), settings("--until", "student")
    assert "until=student is now called until=train" in renamed.stderr
    assert renamed.stdout == settings("until=train").stdout
    assert "the phase student is now train" in option.stderr
    assert option.stdout == settings("--until", "train").stdout


def test_part_is_the_former_name_of_until(tmp_path):
    runs = [
        joulelab_here("run", "kd-tiny", *words, "--dry-run", "--runs-dir", tmp_path / "runs")
        for words in (["--until", "teacher"], ["--part", "teacher"])
    ]
    assert [done.returncode for done in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert (runs[0].stderr, runs[1].stderr) == ("", "--part is now --until: use --until teacher\n")


def test_require_measured_without_a_sensor_exits_with_3_before_anything_starts(tmp_path):
    words = ["demo-kd", "energy.gpus=none", f"energy.rapl_root={tmp_path}", "--require", "measured"]
    done = joulelab_here("run", *words, "--runs-dir", tmp_path / "runs")
    assert done.returncode == 3, done.stderr
    assert "no sensor works on this machine" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_grade_that_does_not_exist_is_refused(tmp_path):
    done = joulelab_here("run", "demo-kd", "--require-grade", "Z", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 2
    assert "--require-grade: expected 'none', 'A', 'B' or 'C'" in done.stderr


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["run", "demo-kd", "--frobnicate"], "joulelab run has no option --frobnicate", "`joulelab run --help`"),
        (["run", "demo-kd", "--dryrun"], "joulelab run has no option --dryrun; did you mean --dry-run?", "--help"),
        (["measure", "--repeat", "x", "--", "true"], "--repeat: expected a whole number, found the text 'x'", "--help"),
        (["measure", "--repeat", "0", "--", "true"], "--repeat: expected a number", "`joulelab measure --help`"),
        (["infer", "deit-t", "--batch-size", "a"], "--batch-size: 'a' is not a list of whole numbers", "1,8,32"),
        (["plot", "a", "--x", "y"], "--x: 'y' is not one of 'elapsed', 'wall'", "`joulelab plot --help`"),
        (["show"], "name is missing", "or `last`; `joulelab show --help`"),
        (["new", "compare", "a.yaml", "--data", "x", "--seeds", "0"], "than or equal to 1, found 0", "--help"),
        (["runs", "--runs-dir"], "Option '--runs-dir' requires an argument", "`joulelab runs --help`"),
        (["runs", "--runs-dir", "nowhere"], "there is no folder nowhere", "check --runs-dir"),
        (["train", "bert", "--epochs", "-1"], "--epochs: expected a number greater than", "`joulelab train --help`"),
        (["rnu"], "No such command 'rnu'. Did you mean 'run'?", "`joulelab --help`"),
        (["kd-tiny", "--dry-run"], "No such command 'kd-tiny'", "kd-tiny is an experiment: joulelab run kd-tiny"),
        (["prepare", "binarise"], "No such command 'binarise'", "`joulelab prepare --help`"),
        (["runs", "a"], "joulelab runs takes no further argument, found a", "`joulelab runs --help`"),
    ],
)
def test_command_line_errors_have_the_form_of_all_errors(tmp_path, words, message, hint):
    done = joulelab_here(*words, cwd=tmp_path)
    first, second = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == ""
    assert first.startswith("error: ") and message in first
    assert second.startswith("hint: ") and hint in second


@pytest.mark.parametrize(("words", "code"), [([], 0), (["new"], 2), (["samples"], 2), (["prepare"], 2)])
def test_without_a_command_the_help_is_printed_and_no_error(words, code):
    done = joulelab_here(*words)
    printed = done.stdout if code == 0 else done.stderr
    assert done.returncode == code
    assert printed.startswith(f"Usage: {' '.join(['joulelab', *words])} ")
    assert "error:" not in printed and "hint:" not in printed


def test_a_verb_that_ends_with_a_code_still_does(tmp_path):
    done = joulelab("measure", "--gpus", "none", "--runs-dir", tmp_path, "--", "sh", "-c", "exit 7")
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--gpus", "foo"], "--gpus: expected auto, none, or indices and UUIDs"),
        (["--rapl-root", "/no/such/tree"], "expected a directory with a RAPL tree, found no directory at"),
    ],
)
def test_sensors_that_are_named_wrongly_end_with_2_before_anything_starts(tmp_path, option, message):
    done = joulelab_here("measure", *option, "--runs-dir", tmp_path / "runs", "--", "true")
    assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("a: [1", "experiment.yaml, line 1: not valid YAML", "hint: check brackets, quotes and indentation there"),
        ("- 1", "experiment.yaml: expected `key: value` lines, found a list [1]", "hint: `joulelab run demo-kd"),
        ("5", "experiment.yaml: expected `key: value` lines, found 5", "hint: `joulelab run demo-kd"),
    ],
)
def test_a_broken_yaml_file_is_answered_with_what_to_do(tmp_path, text, message, hint):
    (tmp_path / "experiment.yaml").write_text(text)
    done = joulelab_here("run", "experiment.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr and hint in done.stderr


def test_an_unknown_size_is_answered_with_where_sizes_are_listed(tmp_path):
    done = joulelab_here("train", "bert", "--size", "huge", cwd=tmp_path)
    assert done.returncode == 2
    assert "unknown size of bert 'huge'" in done.stderr
    assert "hint: `joulelab zoo bert` lists its sizes" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["infer", "bert-b", "--seq-length", "999999"], "bert-b has 512 positions; 999,999 tokens were requested"),
        (["infer", "bert", "--size", "tiny", "--seq-length", "32,65"], "bert has 64 positions; 65 tokens"),
        (["infer", "bert", "--seq-length", "513"], "bert has 512 positions; 513 tokens were requested"),
        (["infer", "longformer", "--seq-length", "4097"], "longformer has 4,096 positions; 4,097 tokens"),
        (["train", "gpt2", "shape.tokens=1025"], "gpt2 has 1,024 positions; 1,025 tokens were requested"),
        (["infer", "./model", "--seq-length", "513"], "./model has 512 positions; 513 tokens were requested"),
        (["infer", "./model", "--generate", "--prompt-tokens", "500"], "./model has 512 positions; 628 tokens"),
    ],
)
def test_an_input_longer_than_the_model_is_refused_before_anything_starts(tmp_path, words, message):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 512}')
    done = joulelab_here(*words, "--runs-dir", tmp_path / "runs", cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert "hint: request at most" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep", "--resume", "sweep-x", "--dry-run"], "--resume uses the settings of the sweep itself"),
        (["sweep", "--resume", "sweep-x", "--repeats", "2"], "--resume uses the settings of the sweep itself"),
        (["sweep", "--resume", "sweep-x", "--name", "x"], "--resume uses the settings of the sweep itself"),
        (["runs", "--last", "1", "--prune", "--yes"], "--last has no effect with --prune"),
        (["runs", "--last", "1", "--compact"], "--last has no effect with --compact"),
        (["compare", "x", "--json", "--format", "csv"], "--json and --format csv were both given"),
        (["bill", "x", "--json", "--format", "markdown"], "--json and --format markdown were both given"),
        (["zoo", "--size", "tiny"], "--size belongs to a model, and none was named"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, words, message):
    done = joulelab_here(*words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_show_takes_patterns_as_other_verbs_do(tmp_path):
    for name in ("hole-a", "hole-b", "whole"):
        joulelab("measure", "--gpus", "none", "--name", name, "--runs-dir", tmp_path, "--", "true")
    done = joulelab_here("show", "hole-*", "--runs-dir", tmp_path, "--json")
    assert [record["name"] for record in json.loads(done.stdout)] == ["hole-a", "hole-b"]
    shown = joulelab_here("show", "hole-*", "--runs-dir", tmp_path)
    assert "hole-a-" in shown.stdout and "hole-b-" in shown.stdout and "whole-" not in shown.stdout
    assert joulelab_here("show", "none-*", "--runs-dir", tmp_path).returncode == 2


def test_an_unknown_run_is_reported_with_the_searched_store(tmp_path):
    done = joulelab_here("show", "x", "--runs-dir", tmp_path)
    assert done.returncode == 2
    assert f"no runs under {tmp_path}" in done.stderr


def test_a_dry_run_prints_the_merged_settings_and_runs_nothing(tmp_path):
    done = joulelab_here("run", "demo-labels", "seed=9", "--dry-run", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 0
    assert "seed: 9" in done.stdout
    assert "alpha: 1.0" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_a_terminal_gets_a_screen_of_settings_that_are_not_defaults():
    """`run demo --dry-run` printed 931 lines of YAML."""
    _, specs = check_group(read_layers("demo"), {})
    lines = settings_lines({f"{spec.label}, seed {spec.seed}": spec for spec in specs}, 80)
    assert len(lines) <= SCREEN_LINES and max(map(len, lines)) <= 80
    assert lines[1].startswith("all runs: ") and "response KD, seed 1: distill.alpha=0.3 distill.feat_beta=0.0" in lines
    alone = settings_lines({"": specs[1]}, 80)
    assert "distill.alpha=1.0" in alone and "pipeline=classify" in alone


@pytest.mark.parametrize("words", [["run", "demo"], ["run", "kd-tiny"], ["sweep", "train", "gpt2", "--size", "tiny"]])
def test_a_dry_run_with_json_prints_json(words):
    done = joulelab_here(*words, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "seed" in (found if "name" in found else next(iter(found.values())))


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ("a-run/run.json", "is a store with runs (a-run)"),
        ("groups/a/group.json", "is a store with runs (groups)"),
    ],
)
def test_a_run_is_not_mixed_into_a_store(tmp_path, inside, message):
    chosen = tmp_path / "chosen"
    (chosen / inside).parent.mkdir(parents=True)
    (chosen / inside).write_text("{}")
    for verb in ("run", "submit"):
        done = joulelab_here(verb, "demo-labels", "--run-dir", chosen, "--dry-run")
        assert (done.returncode, done.stdout) == (2, "") and message in done.stderr
    assert sorted(path.name for path in chosen.iterdir()) == [inside.split("/")[0]]
    own = tmp_path / "own"
    own.mkdir()
    (own / "monitor.jsonl").touch()  # the log of a job, which was there first
    assert joulelab_here("run", "demo-labels", "--run-dir", own, "--dry-run").returncode == 0


def test_start_up_touches_no_heavy_package():
    heavy = ("torch", "transformers", "numpy", "pyarrow", "altair", "pydantic")
    program = f"import sys, joulelab.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("verb", [[], ["run"], ["demo"], ["runs"], ["show"], ["report"], ["samples"], ["explain"]])
def test_every_verb_has_help(verb):
    done = joulelab_here(*verb, "--help")
    assert done.returncode == 0
    assert "Usage: " in done.stdout


def test_listings_have_json(tmp_path):
    for words in (["runs", "--runs-dir", tmp_path], ["experiments"], ["samples", "list"], ["explain", "training"]):
        done = joulelab_here(*words, "--json")
        assert done.returncode == 0
        assert isinstance(json.loads(done.stdout), list)


@pytest.mark.parametrize(
    ("setting", "command"),
    [
        ("generation.answer.temperature=x", "joulelab explain generation.answer.temperature"),
        ("generation.answer.stop=[1]", "joulelab explain generation.answer.stop"),
        ("generation.answer.nosuch=1", "joulelab explain generation.answer"),
        ("nosuch=1", "joulelab explain KEY"),
    ],
)
def test_a_refused_setting_comes_with_a_command_that_describes_it(setting, command):
    done = joulelab_here("run", "synthetic-tiny", setting, "--dry-run")
    assert done.returncode == 2 and f"`{command}` describes" in done.stderr


def test_explain_names_the_section_of_an_unknown_setting():
    done = joulelab_here("explain", "generation.answer.zzz")
    assert (
        done.returncode == 2
        and "`joulelab explain generation.answer` lists the settings of that section" in done.stderr
    )


def test_the_command_for_one_setting_describes_that_of_the_same_pipeline():
    assert "joulelab explain device --pipeline infer" in joulelab_here("explain", "--pipeline", "infer").stdout


def test_explain_describes_a_setting_and_suggests_the_nearest_name():
    done = joulelab_here("explain", "distill.kd_T")
    assert "distill.temperature" in done.stdout
    assert "Temperature of the teacher's and the student's distributions" in done.stdout and "(kd_T)" in done.stdout
    wrong = joulelab_here("explain", "distill.temperatur")
    assert wrong.returncode == 2
    assert "did you mean 'distill.temperature'" in wrong.stderr
    assert "did you mean 'training.learning_rate'" in joulelab_here("explain", "training.lr").stderr
    assert "training.learning_rate" in joulelab_here("explain", "lr").stdout
    assert joulelab_here("explain", "kd_T").stdout.startswith("distill.temperature (")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("max_step", "training.max_steps"),  # not the optional `hint.max_steps`, which is shorter
        ("steps", "training.max_steps"),  # not `start.eps`, which has as many letters in common
        ("training.step", "training.max_steps"),
        ("learningrate", "training.learning_rate"),
        ("trian.lr", "training.learning_rate"),
        ("energy.grd", "energy.grid"),
    ],
)
def test_explain_suggests_the_setting_that_is_likely_meant(wrong, meant):
    done = joulelab_here("explain", wrong)
    assert done.returncode == 2
    assert f"unknown setting '{wrong}'; did you mean '{meant}'?" in done.stderr
    assert len(done.stderr) < 300, "no list of all pipelines or settings"


@pytest.mark.parametrize("verb", [["run", "demo-labels"], ["measure", "--", "true"]])
def test_a_store_that_cannot_be_created_is_a_usage_error(tmp_path, verb):
    (tmp_path / "file").write_text("")
    done = joulelab_here(verb[0], "--runs-dir", tmp_path / "file", *verb[1:])
    assert done.returncode == 2
    assert f"cannot create a run in {tmp_path / 'file'}" in done.stderr
    assert "it is a file, not a directory" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    listing = joulelab_here("runs", "--runs-dir", tmp_path / "file")
    assert listing.returncode == 2


def test_one_unreadable_run_does_not_hide_the_others(tmp_path):
    done = joulelab("measure", "--gpus", "none", "--runs-dir", tmp_path, "--name", "good", "--", "true")
    assert done.returncode == 0, done.stderr
    (tmp_path / "broken-1").mkdir()
    (tmp_path / "broken-1" / "run.json").write_text("{")
    listing = joulelab_here("runs", "--runs-dir", tmp_path)
    assert listing.returncode == 0
    assert "good-" in listing.stdout
    assert "unreadable: " in listing.stderr
    assert joulelab_here("show", "last", "--runs-dir", tmp_path).returncode == 0


def test_a_report_goes_into_a_folder_or_states_why_not(tmp_path):
    joulelab("measure", "--gpus", "none", "--runs-dir", tmp_path / "runs", "--", "true")
    (tmp_path / "out").mkdir()
    assert joulelab_here("report", "last", "--runs-dir", tmp_path / "runs", "-o", tmp_path / "out").returncode == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    (tmp_path / "file").touch()
    for place in ("/proc/nothing/page.html", tmp_path / "file" / "page.html"):
        wrong = joulelab_here("report", "last", "--runs-dir", tmp_path / "runs", "--out", place)
        assert wrong.returncode == 2
        assert "cannot write the page to" in wrong.stderr


def test_a_gpu_that_was_named_and_is_not_there_ends_with_3(tmp_path):
    done = joulelab("measure", "--gpus", "GPU-zz", "--runs-dir", tmp_path / "runs", "--", "true")
    assert done.returncode == 3
    assert "the requested GPUs 'GPU-zz' cannot be read" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_looks_for_the_files_too(tmp_path):
    done = joulelab_here("run", "demo-kd", "data.source=./none.csv", "--dry-run", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 2


def test_a_subset_of_a_file_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "mine.csv").write_text("text,label\na,0\nb,1\n")
    source = f"data.source={tmp_path / 'mine.csv'}"
    done = joulelab_here("run", "demo-kd", source, "data.subset=short", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 2
    assert "set data.subset=all" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_quick_selects_the_short_version_or_lists_experiments_that_have_one(tmp_path):
    done = joulelab_here("run", "fitnets", "--quick", "--dry-run", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 0 and "train_size: 1200" in done.stdout
    refused = joulelab_here("run", "demo-kd", "--quick", "--runs-dir", tmp_path / "runs")
    assert refused.returncode == 2
    assert (
        "demo-kd has no short version" in refused.stderr
        and "experiments that have one: distilbert-tiny, fitnets" in refused.stderr
    )


def test_a_run_that_has_not_ended_is_not_exported(tmp_path):
    from joulelab.runs.attempt import create_run
    from joulelab.runs.spec import RunSpec

    pytest.importorskip("tensorboard")
    create_run(tmp_path, RunSpec(name="waits", pipeline="measure"))
    done = joulelab_here("export", "last", "--to", "tensorboard", "--runs-dir", tmp_path)
    assert done.returncode == 2
    assert "is not finished (status queued)" in done.stderr


def test_a_wrong_setting_is_answered_without_the_checks_that_import_a_framework(tmp_path, monkeypatch):
    def checks(spec):
        raise AssertionError("imports torch")

    monkeypatch.setattr(lookup.PIPELINE_CHECKS, "resolve", lambda name: checks)
    done = joulelab_here("run", "kd-tiny", "training.learning_rate=x", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 2 and "training.learning_rate: expected a number" in done.stderr
    assert not (tmp_path / "runs").exists()
