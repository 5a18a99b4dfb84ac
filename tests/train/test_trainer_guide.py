"""docs/add-a-trainer.md, followed literally, and mistakes in a user's trainer."""

import re
from pathlib import Path

import pytest

from joulelab.runs.store import load_record
from joulelab.train.trainer import SimpleTrainer, load_trainer

GUIDE = (Path(__file__).parents[2] / "docs" / "add-a-trainer.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
CPU = ["--estimate-cpu", "--device", "cpu", "energy.gpus=none"]


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("JOULELAB_RUNS", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)


def test_the_guide_s_trainer_runs_and_changes_the_training(joulelab, tmp_path):
    name = re.search(r"Save this as `(\w+\.py)`", GUIDE).group(1)
    Path(name).write_text(CODE.replace("alpha=1e-3", "alpha=1.0"))
    words = re.search(r"^joulelab (train .*)$", GUIDE, re.MULTILINE).group(1).replace("20", "5").split()
    assert joulelab(*words, *CPU)[0] == 0
    assert joulelab(*words[: words.index("--trainer")], *CPU)[0] == 0
    mine, plain = (load_record(path.parent) for path in sorted((tmp_path / "store").glob("*/run.json")))
    assert mine.spec["trainer"].endswith(name) and plain.spec["trainer"] == ""
    losses = [record.results["model.train.final_loss"].value for record in (mine, plain)]
    assert losses[0] != losses[1]
    assert mine.stage("model.train").samples == plain.stage("model.train").samples


def test_the_guide_names_the_methods_of_a_trainer():
    for method in re.findall(r"^\| `(\w+)\(", GUIDE, re.MULTILINE):
        assert callable(getattr(SimpleTrainer, method))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no Python file"),
        ("x = 1\n", "must define one subclass of SimpleTrainer; found none"),
        ("1 / 0\n", "mine.py, line 1: ZeroDivisionError"),
    ],
)
def test_a_trainer_with_a_mistake_is_refused_before_the_run(joulelab, tmp_path, text, message):
    if text is not None:
        Path("mine.py").write_text(text)
    code, _, err = joulelab("train", "gpt2", "--size", "tiny", "--max_steps", 2, "--trainer", "./mine.py", *CPU)
    assert code == 2 and message in err and "Traceback" not in err
    assert not (tmp_path / "store").exists()


def test_no_file_is_the_simple_trainer():
    assert load_trainer("") is SimpleTrainer
