"""`joulelab submit`: which words are its own, which belong to a verb or program, and the scripts that follow."""

import json
import os
import sys

import pytest
from commands import joulelab, joulelab_here

from joulelab.cli.options import command_named
from joulelab.cli.slurm_jobs import script_of, split_command_line


@pytest.mark.parametrize(
    ("words", "own", "verb"),
    [
        ("demo-kd --preset h100 seed=3", "demo-kd --preset h100 seed=3", ""),
        ("--preset h100 -- python train.py --time 3", "--preset h100", "measure -- python train.py --time 3"),
        ("--time=30 train gpt2 --size tiny --gpus 2", "--time=30 --gpus 2", "train gpt2 --size tiny"),
        ("train gpt2 --json --dry-run --seed 3", "--json --dry-run", "train gpt2 --seed 3"),
        ("--gpus 2 measure --gpus none -- sleep 1", "--gpus 2", "measure --gpus none -- sleep 1"),
        ("sweep train gpt2 --repeats 3 --mem 4G", "--mem 4G", "sweep train gpt2 --repeats 3"),
        ("infer deit-t --batch-size 8 --exclusive", "--exclusive", "infer deit-t --batch-size 8"),
        ("prepare dump x --dump_file y --cpus 2", "--cpus 2", "prepare dump x --dump_file y"),
        ("--resume run", "--resume run", ""),
        ("--array 0-3", "--array 0-3", ""),
    ],
)
def test_options_after_a_verb_are_the_verb_s_unless_only_submit_has_them(words, own, verb):
    found = split_command_line(command_named("submit"), words.split())
    assert found == (own.split(), verb.split())


def scripts(tmp_path, *words):
    done = joulelab_here("submit", "--dry-run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_s_script_measures_it_once_on_one_node_without_requeueing(tmp_path):
    text = scripts(tmp_path, "--preset", "l40s", "--", "python", "train.py", "--note", "two words")
    assert "exec python -m joulelab measure --run-dir \"$run\" -- python train.py --note 'two words'" in text
    assert "--no-requeue" in text and "--gpus-per-node=l40s:1" in text and "--nodes=1" in text


def test_a_wrong_setting_is_named_by_the_option_of_the_verb(tmp_path):
    for words, text in (
        (("run", "demo-kd", "--require", "foo"), "--require: expected 'nothing' or 'measured'"),
        (("train", "gpt2", "--batch-size", "0"), "--batch-size: expected a number"),
        (("demo-kd", "--nodes", "0"), "--nodes: expected a number"),
    ):
        done = joulelab_here("submit", *words, "--dry-run", cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {text}"), done.stderr


def test_a_cpu_job_requests_neither_the_preset_s_gpu_nor_its_cores(tmp_path):
    words = ("prepare", "dump", "sample:reviews", "--dump_file", "d.txt")
    text = scripts(tmp_path, "--preset", "h100", *words)
    assert "--cpus-per-task=4\n" in text and "--mem=8G" in text and "--time=02:00:00" in text and "gpus" not in text
    text = scripts(tmp_path, "--cpus", "2", "--mem", "1G", "--time", "5", *words)
    assert "--cpus-per-task=2\n" in text and "--mem=1G" in text and "--time=5\n" in text


def test_run_with_its_options_is_the_experiment_with_them(tmp_path):
    plain, verb = (scripts(tmp_path, *words) for words in (["fitnets-quick"], ["run", "fitnets", "--quick"]))
    assert plain == verb


def test_without_slurm_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = joulelab_here("submit", "--no-check", "--", sys.executable, "-c", "pass", cwd=tmp_path)
    assert done.returncode == 2 and "sbatch was not found" in done.stderr
    assert not (tmp_path / "runs").exists()


def commands_of_slurm(folder, **scripts):
    """Commands that behave as given, in front of what is on the PATH."""
    for name, line in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)


def test_without_a_controller_nothing_is_submitted_and_no_run_is_left(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    said = "echo 'sinfo: error: Unknown host' >&2; echo 'sinfo: fatal: no configuration' >&2; exit 1"
    commands_of_slurm(tmp_path / "bin", sbatch="touch submitted; echo 7", sinfo=said)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for options in ([], ["--no-check"]):
        done = joulelab_here("submit", "--gpus", "0", *options, "--", sys.executable, "-c", "pass", cwd=tmp_path)
        assert done.returncode == 2
        assert "no Slurm controller answers (sinfo: error: Unknown host); nothing was submitted" in done.stderr
        assert "fatal" not in done.stderr
    assert not (tmp_path / "runs").exists() and not (tmp_path / "submitted").exists()


def test_a_refused_program_is_not_offered_to_be_resumed(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    commands_of_slurm(tmp_path / "bin", sbatch="echo 'invalid account' >&2; exit 1", sinfo="echo cpu", scancel="")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    done = joulelab_here("submit", "--no-check", "--", sys.executable, "-c", "pass", cwd=tmp_path)
    assert done.returncode == 1 and "invalid account" in done.stderr
    assert "submit --resume" not in done.stderr and "repeat the command" in done.stderr


def test_a_missing_script_is_refused_before_anything_is_created(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    commands_of_slurm(tmp_path / "bin", sbatch="touch submitted; echo 7", sinfo="echo 'cpu*|(null)'")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for program in ([sys.executable, "-u", "nofile.py"], ["bash", "nofile.py", "3"]):
        done = joulelab_here("submit", "--gpus", "0", "--", *program, cwd=tmp_path)
        assert done.returncode == 2 and "nofile.py" in done.stderr and "does not exist" in done.stderr
    assert not (tmp_path / "runs").exists() and not (tmp_path / "submitted").exists()


@pytest.mark.parametrize(
    ("program", "script"),
    [
        ("python train.py --epochs 3", "train.py"),
        ("/usr/bin/python3.12 -u -W ignore train.py", "train.py"),
        ("bash -e -o pipefail job.sh", "job.sh"),
        ("python -m package.train x", None),
        ("python -uc pass", None),
        ("bash -lc job", None),
        ("python -", None),
        ("torchrun train.py", None),
    ],
)
def test_the_script_of_an_interpreter(program, script):
    assert script_of(program.split()) == script


def test_an_option_of_submit_after_the_dashes_is_noted(tmp_path):
    words = ("submit", "--dry-run", "--", "python", "train.py")
    done = joulelab_here(*words, "--dry-run", "--time=3", "--epochs", "3", cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert line == "passed to the program, not to submit: --dry-run, --time (options of submit precede `--`)"
    assert joulelab_here(*words, "--epochs", "3", cwd=tmp_path).stderr == ""


def test_a_dry_run_as_json_has_the_scripts_and_settings(tmp_path):
    done = joulelab_here("submit", "--dry-run", "--json", "--preset", "l40s", "--", "python", "train.py", cwd=tmp_path)
    data = json.loads(done.stdout)
    (job,) = data["jobs"]
    assert data["settings"]["gpu_type"] == "l40s" and job["script"].startswith("#!")
    quiet = scripts(tmp_path, "-q", "--preset", "l40s", "--", "python", "train.py")
    assert quiet.startswith("sbatch --parsable ") and quiet.count("\n") == 1


def test_a_queued_program_is_started_once_and_only_as_it_was_queued(tmp_path):
    from joulelab.runs.attempt import create_run
    from joulelab.runs.measure.result import MeasureSpec
    from joulelab.runs.store import load_record

    command = [sys.executable, "-c", "print(1)"]
    run = create_run(tmp_path / "runs", MeasureSpec(name="mine", command=tuple(command), repeat=2)).folder
    for words in (["--repeat", "3", "--", *command], ["--", sys.executable, "-c", "print(2)"]):
        refused = joulelab("measure", "--run-dir", run, *words, cwd=tmp_path)
        assert refused.returncode == 2, refused.stderr
    done = joulelab("measure", "--run-dir", run, "--", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = load_record(run)
    assert (record.status, record.name) == ("done", "mine")
    assert [stage.name for stage in record.stages if stage.name.startswith("program")] == [
        "program.run.1",
        "program.run.2",
    ]
    again = joulelab("measure", "--run-dir", run, "--", *command, cwd=tmp_path)
    assert again.returncode == 2 and "has already started (status done)" in again.stderr
    elsewhere = joulelab("measure", "--run-dir", tmp_path / "here", "--", *command, cwd=tmp_path)
    assert elsewhere.returncode == 0 and load_record(tmp_path / "here").status == "done"
