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


def test_a_wrong_number_of_parameters_is_reported(joulelab, tmp_path):
    guide = (Path(__file__).parents[2] / "docs" / "add-a-dataset.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- file: ramps.py -->\n```python\n(.*?)```", guide, re.DOTALL)
    Path("ramps.py").write_text(code.replace("parameters=562", "parameters=999"))
    words = ["train", "./ramps.py", "--size", "tiny", "--dataset_split", "train[:100]", "--train_stats", "simple-steps"]
    code, _, err = joulelab(*words, *CPU)
    assert code == 0, err
    (path,) = (tmp_path / "store").glob("*/run.json")
    record = load_record(path.parent)
    assert any("states parameters=999" in note.text and "has 562" in note.text for note in record.validity.notes)
    samples = sum(stage.samples or 0 for stage in record.stages if stage.name in ("model.train", "model.train.setup"))
    assert samples == 96, "six whole batches of 16 out of 100 samples"
    steps = (path.parent / "stats" / "simple" / "steps.csv").read_text().splitlines()
    assert steps[0] == "step,input_s,forward_s,backward_s,optimizer_step_s,step_s"
    assert [row.split(",")[0] for row in steps[1:]] == ["1", "2", "3", "4", "5", "6"]
    assert len(re.findall(r"^step \d: .* ms \(input .* ms, forward", err, re.MULTILINE)) == 6
