"""Default output of every verb is at most one screen; -v adds, -q reduces to the result; help and completion."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from commands import joulelab, joulelab_here

from joulelab.cli.catalog import FAMILIES, families
from joulelab.cli.console import SCREEN_LINES, PlainProgress, QuietProgress, print_answer
from joulelab.cli.main import app
from joulelab.cli.options import detail, detail_level
from joulelab.report.tables.grid import make_grid
from joulelab.runs.spec import experiment_names

COLUMNS, LINES = 100, 30


def _made():
    path = Path(__file__).parent.parent / "report" / "made_records.py"
    spec = importlib.util.spec_from_file_location("made_records", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["made_records"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    made, store = _made(), tmp_path_factory.mktemp("store")
    made.write_group(store, made.demo_records())
    for seed in range(40):
        made.write_run(store, made.distilled("another student", 100 + seed, 810, 140.0))
    return store


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def _commands():
    def found(command, path=()):
        inner = getattr(command, "commands", None)
        if inner is None:
            yield path, command
        else:
            for name, one in inner.items():
                yield from found(one, (*path, name))

    return list(found(typer.main.get_command(app)))


def test_every_verb_has_the_same_two_options():
    for path, command in _commands():
        options = {option: parameter.help for parameter in command.params for option in parameter.opts}
        assert options.get("-v") == "Print everything.", path
        assert options.get("-q") == "Print only the result line.", path


WORDS = [
    ("runs",),
    ("show", "last"),
    ("show", "made-teacher-*"),
    ("compare", "last"),
    ("bill", "last"),
    ("query", "select run_id, label, status from runs"),
    ("query", "select * from runs"),
    ("query", "--schema"),
    ("experiments",),
    ("zoo",),
    ("explain",),
    ("explain", "training"),
    ("explain", "--pipeline", "infer"),
    ("samples", "list"),
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_the_default_output_is_one_screen_and_more_is_printed_on_request(words, store):
    runs_dir = () if words[0] in ("experiments", "zoo", "explain", "samples") else ("--runs-dir", store)
    done = joulelab_here(*words, *runs_dir)
    assert done.returncode == 0, done.stderr
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    assert 0 < len(lines) <= LINES, "\n".join(lines)
    full = joulelab_here(*words, *runs_dir, "-v")
    assert full.returncode == 0, full.stderr
    if "-v: " in done.stdout:
        assert len(full.stdout) > len(done.stdout)
    quiet = joulelab_here(*words, *runs_dir, "-q")
    assert quiet.returncode == 0 and quiet.stderr == ""


def test_the_result_comes_first_and_is_all_that_quiet_prints(store):
    for words in (("show", "last"), ("compare", "last"), ("bill", "last")):
        first = joulelab_here(*words, "--runs-dir", store, "-q").stdout
        assert len(first.splitlines()) == 1
        shown = " ".join(joulelab_here(*words, "--runs-dir", store).stdout.split())
        assert shown.startswith(first.strip())


def test_a_group_is_shown_with_its_id_and_its_page(store):
    (group,) = sorted(store.joinpath("groups").iterdir())[-1:]
    assert f"group {group.name}" in joulelab_here("show", group.name, "--runs-dir", store).stdout
    (group / "report.html").write_text("<html>", encoding="utf-8")
    shown = "".join(joulelab_here("show", group.name, "--runs-dir", store, "-v").stdout.split())
    assert f"group{group.name}report{group / 'report.html'}" in shown
    (group / "report.html").unlink()


def test_the_newest_runs_are_listed_and_quiet_prints_ids(store):
    lines = joulelab_here("runs", "--runs-dir", store).stdout
    newest = joulelab_here("runs", "--runs-dir", store, "-q").stdout.splitlines()
    assert len(newest) == 47 and newest[-1] in lines and newest[0] not in lines
    assert "older" in lines.splitlines()[-1]
    assert newest[0] in joulelab_here("runs", "--runs-dir", store, "-v").stdout


def test_verbose_and_quiet_exclude_each_other(store):
    refused = joulelab_here("runs", "--runs-dir", store, "-v", "-q")
    assert refused.returncode == 2 and "-v and -q were both given" in refused.stderr


@pytest.mark.slow
def test_a_run_prints_one_screen_of_progress_and_result(tmp_path):
    words = ("train", "gpt2", "--size", "tiny", "--max_steps", "3", "--estimate-cpu", "--runs-dir", tmp_path)
    done = joulelab(*words)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) + len(done.stderr.splitlines()) <= LINES + 6, done.stdout + done.stderr
    quiet = joulelab(*words, "-q")
    assert quiet.stderr == "" and len(quiet.stdout.splitlines()) == 1 and quiet.stdout.startswith("gpt2: ")


def test_tables_are_cut_to_a_screen_and_a_remark_is_printed_once(capsys):
    grid = make_grid("Rows", "A!|B!", [(str(number), "x") for number in range(100)])
    print_answer("the result", [grid, grid], ["same", "same"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= SCREEN_LINES and lines[0] == "the result"
    assert lines.count("same") == 1 and lines[-1].startswith("-v: ") and "more rows" in lines[-1]
    with detail_level("quiet"):
        print_answer("the result", [grid])
    assert capsys.readouterr().out == "the result\n"
    with detail_level("verbose"):
        print_answer("the result", [grid])
    assert len(capsys.readouterr().out.splitlines()) > 100
    assert detail() == "normal"


def test_stages_that_do_not_fit_are_named_with_their_energy(capsys):
    """Otherwise the energies on the screen do not add up to the result above them."""
    stages = [(f"stage.{number}", f"{number} J") for number in range(30)]
    remarks = ["remark " + str(number) for number in range(16)]
    print_answer("r: 435 J", [make_grid("Stages", "Stage!|Energy>", stages[:10])], remarks)
    assert capsys.readouterr().out.splitlines()[-1] == "-v: 2 more rows (stage.8 8 J, stage.9 9 J)"
    print_answer("r: 435 J", [make_grid("Stages", "Stage!|Energy>", stages)], remarks)
    assert capsys.readouterr().out.splitlines()[-1] == "-v: 22 more rows"


def test_a_sum_stays_when_rows_above_it_are_cut(capsys):
    rows = [*((f"stage.{number}", f"{number} J") for number in range(30)), ("sum", "435 J")]
    print_answer("r: 435 J", [make_grid("Energy by source", "What!|Energy>", rows)], ["remark"] * 3)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["sum", "435", "J"] for line in lines) and " stage.0 " in "".join(lines)
    assert "more rows" in lines[-1] and len(lines) <= SCREEN_LINES


def test_a_message_is_reported_once_and_a_group_states_warnings_only(capsys):
    with PlainProgress() as progress:
        for _ in range(2):
            progress.write("Reusing data")
        for _ in range(3):
            progress.stage("infer.b1", 1)
            progress.finish()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Reusing data" and len(lines) == 2 and lines[1].split()[0] == "infer.b1"
    with PlainProgress(stages=False) as progress:
        progress.stage("student.train", 1)
        progress.write("Reusing data")
        progress.write("warning: the teacher is at chance level")
        progress.line("[1/2] teacher")
    assert capsys.readouterr().err.splitlines() == ["warning: the teacher is at chance level", "[1/2] teacher"]
    with QuietProgress() as progress:
        progress.stage("student.train", 1)
        progress.write("warning: x")
    assert capsys.readouterr().err == ""


def test_every_experiment_is_listed_once_with_the_hardware_it_needs():
    listed = [name for _, names in families() for name in names]
    assert sorted(listed) == experiment_names()
    for family, names in families():
        assert family.hardware and set(family.durations) <= set(names), family.title
    text = joulelab_here("experiments").stdout
    assert "demo (5 min)" in text and all(family.title.split()[0] in text for family in FAMILIES)


def test_help_groups_the_verbs_by_task():
    lines = joulelab_here("--help").stdout.splitlines()
    heads = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert heads == [
        *("Options", "Measure", "Train, distill and serve", "Run on a Slurm cluster"),
        *("Read results", "Share runs", "Look up"),
    ]
    assert lines[lines.index("Measure:") + 1].split()[0] == "measure"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("joulelab show made-t", "made-teacher-"),
        ("joulelab report la", "last"),
        ("joulelab run demo-f", "demo-features"),
        ("joulelab train resnet1", "resnet152"),
        ("joulelab infer resnet1", "resnet152"),
        ("joulelab zoo gp", "gpt2"),
        ("joulelab comp", "compare"),
    ],
)
def test_the_shell_completes_verbs_runs_experiments_and_models(words, wanted, store):
    environment = {
        **os.environ,
        "_JOULELAB_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
        "JOULELAB_RUNS": str(store),
    }
    command = [sys.executable, "-m", "joulelab"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert any(line.startswith(wanted) for line in done.stdout.splitlines()), done


@pytest.mark.parametrize(
    ("status", "changes", "hint"),
    [
        ("truncated", {}, "; resume it: joulelab run --resume made-KD-"),
        ("truncated", {"group": "my-group"}, "; resume it: joulelab run --resume my-group\n"),
        ("truncated", {"spec": {"pipeline": "measure", "seed": 0}}, None),
        ("done", {}, None),
    ],
)
def test_an_interrupted_run_is_shown_with_the_command_that_resumes_it(tmp_path, status, changes, hint):
    made = _made()
    made.write_run(tmp_path, made.distilled("KD", 0, 810, 140.0, status=status).model_copy(update=changes))
    shown = joulelab_here("show", "last", "--runs-dir", tmp_path).stdout
    assert "\nrun made-KD-" in shown
    assert hint in shown if hint else "resume it" not in shown
