"""`joulelab submit`: which words are its own, which belong to a verb or program, and the scripts that follow."""

import sys

import pytest
from commands import joulelab, joulelab_here

from joulelab.cli.slurm_jobs import split_command_line, verb_command


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
    found = split_command_line(verb_command("submit"), words.split())
    assert found == (own.split(), verb.split())


def scripts(tmp_path, *words):
    done = joulelab_here("submit", "--dry-run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_s_script_measures_it_once_on_one_node_without_requeueing(tmp_path):
    text = scripts(tmp_path, "--preset", "l40s", "--", "python", "train.py", "--note", "two words")
    assert "exec python -m joulelab measure --run-dir \"$run\" -- python train.py --note 'two words'" in text
    assert "--no-requeue" in text and "--gpus-per-node=l40s:1" in text and "--nodes=1" in text


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


def test_a_queued_program_is_started_once_and_only_as_it_was_queued(tmp_path):
    from joulelab.runs.attempt import create_run
    from joulelab.runs.measure.measure_session import MeasureSpec
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
