"""JoulelabCallback in the real transformers.Trainer, on a model small enough for seconds."""

import json
import time

import pytest

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from joulelab.integrations import JoulelabCallback  # noqa: E402
from joulelab.meter.figures import figure_text  # noqa: E402
from joulelab.runs.store import load_record, run_folders  # noqa: E402

ENERGY = {"gpus": "none", "estimate_cpu": True, "sample_interval_s": 0.05}


def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(500))


class SlowSteps(transformers.TrainerCallback):
    """Steps of this model end within a tick of the CPU clock and a training before the first reading."""

    def on_step_end(self, args, state, control, **kwargs):
        busy(0.05)


class Words(torch.utils.data.Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, 64, (size, 16), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def trainer(folder, callback, size=22, **arguments):
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    given = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "logging_steps": 2,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "include_num_input_tokens_seen": True,
        **arguments,
    }
    return transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(**given),
        train_dataset=Words(size),
        eval_dataset=Words(8),
        callbacks=[callback],
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    callback = JoulelabCallback("tiny", energy=ENERGY, runs_dir=folder / "runs")
    training = trainer(folder, callback)
    training.add_callback(SlowSteps())
    training.train()
    return training, callback


def test_a_training_is_a_run_with_training_and_evaluation_apart(trained):
    _, callback = trained
    record = load_record(callback.folder)
    assert record.status == "done"
    train, evaluate = record.stage("model.train"), record.stage("model.evaluate")
    assert (len(train.segments), len(evaluate.segments)) == (3, 2)
    inside = [(segment.start_ns, segment.end_ns) for segment in train.segments]
    for segment in evaluate.segments:
        assert all(segment.end_ns <= begin or segment.start_ns >= end for begin, end in inside)


def test_the_end_of_a_training_prints_energy_uncertainty_grade_warnings_and_run_directory(tmp_path, capfd):
    callback = JoulelabCallback("printed", energy={"gpus": "none"}, runs_dir=tmp_path / "runs")
    trainer(tmp_path, callback, max_steps=2).train()
    answer, *more = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("joulelab: ", "  "))]
    record = callback.record
    assert answer.startswith(f"joulelab: printed: {figure_text(record.best_energy)}; ") and "grade C" in answer
    assert record.best_energy == record.totals.best and record.best_energy.method == "estimated"
    assert any(line.startswith("  warning: energy is ESTIMATED") for line in more)
    assert more[-1] == f"  run directory: {callback.folder}"


def test_steps_samples_and_tokens_are_counted_with_the_short_last_batch(trained):
    training, callback = trained
    train = callback.record.stage("model.train")
    assert training.state.global_step == 12
    assert train.phases["step"].count == 12
    assert train.samples == 44
    assert train.tokens == 44 * 16
    assert train.j_per_token == pytest.approx(train.best.energy_j / (44 * 16))


def test_joules_are_in_the_trainer_s_history_under_the_estimate_s_own_name(trained):
    training, _ = trained
    found = [line["energy_estimated_j"] for line in training.state.log_history if "energy_estimated_j" in line]
    assert found and found == sorted(found)
    assert not any("energy_j" in line for line in training.state.log_history)


def test_losses_and_results_are_in_the_run_folder(trained):
    _, callback = trained
    lines = [json.loads(line) for line in (callback.folder / "metrics.jsonl").read_text().splitlines()]
    assert any("loss" in line for line in lines)
    assert callback.record.results["model.evaluate.eval_loss"].value > 0


def test_a_training_that_raises_is_a_failed_run_with_its_joules(tmp_path):
    class Broken(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            busy(0.2)  # one step may end within a tick of the CPU clock, and its estimate is then 0
            raise RuntimeError("out of luck")

    with (
        pytest.raises(RuntimeError, match="out of luck"),
        JoulelabCallback("broken", energy=ENERGY, runs_dir=tmp_path / "runs") as callback,
    ):
        training = trainer(tmp_path, callback)
        training.add_callback(Broken())
        training.train()
    record = load_record(callback.folder)
    assert (record.status, record.error.message) == ("failed", "out of luck")
    assert record.stage("model.train").status == "failed"
    assert record.totals.best.energy_j > 0


def test_a_second_training_closes_the_one_that_was_left_open(tmp_path):
    class BrokenOnce(transformers.TrainerCallback):
        broken = False

        def on_step_end(self, args, state, control, **kwargs):
            if not self.broken:
                self.broken = True
                raise RuntimeError("once")

    callback = JoulelabCallback("twice", energy=ENERGY, runs_dir=tmp_path / "runs")
    training = trainer(tmp_path, callback, num_train_epochs=1, eval_strategy="no")
    training.add_callback(BrokenOnce())
    with pytest.raises(RuntimeError, match="once"):
        training.train()
    training.train()
    statuses = sorted(load_record(folder).status for folder in run_folders(tmp_path / "runs"))
    assert statuses == ["done", "failed"]


def test_evaluation_every_few_steps_suspends_the_training_each_time(tmp_path):
    callback = JoulelabCallback("steps", energy=ENERGY, runs_dir=tmp_path / "runs")
    settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 6, "gradient_accumulation_steps": 2}
    trainer(tmp_path, callback, size=100, **settings).train()
    assert len(callback.record.stage("model.evaluate").segments) == 3
    assert callback.record.stage("model.train").samples == 6 * 8


def test_a_resumed_training_counts_what_its_own_joules_paid_for(tmp_path):
    settings = {"num_train_epochs": 1, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 4}
    trainer(tmp_path, JoulelabCallback("first", energy=ENERGY, runs_dir=tmp_path / "runs"), **settings).train()
    callback = JoulelabCallback("second", energy=ENERGY, runs_dir=tmp_path / "runs")
    trainer(tmp_path, callback, **settings).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    train = callback.record.stage("model.train")
    assert train.phases["step"].count == 2  # of 6
    assert (train.samples, train.tokens) == (6, 6 * 16)


def test_an_evaluation_before_the_first_step_is_not_training(tmp_path):
    callback = JoulelabCallback("start", energy=ENERGY, runs_dir=tmp_path / "runs")
    trainer(tmp_path, callback, eval_on_start=True, eval_strategy="no", max_steps=1).train()
    stages = {name: callback.record.stage(name).segments for name in ("model.train", "model.evaluate")}
    assert len(stages["model.evaluate"]) == 1
    # what training there was before it took no time worth the name
    before = [s for s in stages["model.train"] if s.end_ns <= stages["model.evaluate"][0].start_ns]
    assert sum(s.end_ns - s.start_ns for s in before) < 20e6


def test_another_rank_measures_nothing(tmp_path):
    callback = JoulelabCallback("rank", energy=ENERGY, runs_dir=tmp_path / "runs")
    state = transformers.TrainerState(is_world_process_zero=False)
    control = transformers.TrainerControl()
    for event in (callback.on_train_begin, callback.on_step_begin, callback.on_step_end, callback.on_train_end):
        event(None, state, control)
    callback.on_log(None, state, control, logs={"loss": 1.0})
    assert callback.record is None and not (tmp_path / "runs").exists()
