"""A user's mistake gets a sentence, a way out and an exit code; nothing is left behind."""

import subprocess
import sys

import pytest
from commands import joulelab


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo-kd", "training.learnig_rate=1"], "did you mean training.learning_rate?"),
        (["demo-kd", "training.epochs=[1, 2]"], "training.epochs: expected a number, found a list [1, 2]"),
        (["demo-kb"], "did you mean 'demo-kd'?"),
        (["missing.yaml"], "no such file: missing.yaml"),
        (["demo-kd", "seed"], "'seed' is not a setting"),
        (["demo-kd", "data.source=./reviews.csv"], "reviews.csv"),
        (["demo-kd", "teacher.model=sample:minilmm"], "did you mean 'minilm'"),
        (["demo-kd", "training.stats=[simpel]"], "did you mean 'simple'"),
        (["demo", "training.learnig_rate=1"], "did you mean training.learning_rate?"),
        ([], "no experiment was named"),
        (["--resume", "nothing"], "no runs under"),
    ],
)
def test_mistakes_end_with_2_one_message_and_no_folder(tmp_path, words, message):
    done = joulelab("run", *words, "--runs-dir", tmp_path / "runs", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_required_joules_that_nobody_can_measure_end_with_3_before_anything_starts(tmp_path):
    words = ["demo-kd", "energy.gpus=none", f"energy.rapl_root={tmp_path}", "--require", "measured"]
    done = joulelab("run", *words, "--runs-dir", tmp_path / "runs")
    assert done.returncode == 3
    assert "no sensor can measure here" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_grade_that_does_not_exist_is_refused(tmp_path):
    done = joulelab("run", "demo-kd", "--require-grade", "Z", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 2
    assert "energy.require_grade: expected 'none', 'A', 'B' or 'C'" in done.stderr


def test_an_unknown_option_is_refused(tmp_path):
    done = joulelab("run", "demo-kd", "--frobnicate", cwd=tmp_path)
    assert done.returncode == 2
    assert "No such option" in done.stderr


def test_a_run_that_does_not_exist_is_answered_with_where_it_was_sought(tmp_path):
    done = joulelab("show", "x", "--runs-dir", tmp_path)
    assert done.returncode == 2
    assert f"no runs under {tmp_path}" in done.stderr


def test_a_dry_run_prints_the_merged_settings_and_runs_nothing(tmp_path):
    done = joulelab("run", "demo-labels", "seed=9", "--dry-run", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 0
    assert "seed: 9" in done.stdout
    assert "kd_alpha: 1.0" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_start_up_touches_no_heavy_package():
    heavy = ("torch", "transformers", "numpy", "pyarrow", "altair", "pydantic")
    program = f"import sys, joulelab.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("verb", [[], ["run"], ["demo"], ["runs"], ["show"], ["report"], ["samples"], ["explain"]])
def test_every_verb_has_help(verb):
    done = joulelab(*verb, "--help")
    assert done.returncode == 0
    assert "Usage: " in done.stdout


def test_listings_have_json(tmp_path):
    import json

    for words in (["runs", "--runs-dir", tmp_path], ["experiments"], ["samples", "list"], ["explain", "training"]):
        done = joulelab(*words, "--json")
        assert done.returncode == 0
        assert isinstance(json.loads(done.stdout), list)


def test_explain_describes_a_setting_and_answers_a_misspelt_one():
    done = joulelab("explain", "distill.kd_T")
    assert "Temperature of the teacher's responses." in done.stdout
    wrong = joulelab("explain", "distill.kdT")
    assert wrong.returncode == 2
    assert "did you mean 'distill.kd_T'" in wrong.stderr
