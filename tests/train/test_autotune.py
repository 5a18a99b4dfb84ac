"""`auto` for precision and compilation: what is tried, what is chosen, and that the training is not changed by it."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch

from joulelab.runs.attempt import create_run
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import execute
from joulelab.runs.spec import check, read_mapping
from joulelab.train import zoo_pipeline
from joulelab.train.autotune import Candidate, Trial, choose, compile_mode, planned_steps, time_in_training
from joulelab.train.config import TrainingConfig
from joulelab.train.zoo_config import ZooTraining
from joulelab.zoo.objective import prepare

FP32, BF16, COMPILED = Candidate("fp32", "off"), Candidate("bf16", "off"), Candidate("bf16", "default")
# an eager step of 90 ms, 1.8 times as fast in bf16, and 20 % faster compiled after half a minute
TIMES = {
    FP32: Trial(FP32, 0.5, 0.090, 2.0),
    BF16: Trial(BF16, 0.5, 0.050, 2.01),
    COMPILED: Trial(COMPILED, 30.0, 0.040, 2.01),
}


class Timing:
    def __init__(self, **changes):
        self.times = {**TIMES, **{globals()[name]: trial for name, trial in changes.items()}}
        self.tried = []

    def __call__(self, candidate):
        self.tried.append(candidate)
        return self.times[candidate]


def chosen(steps, timing=None, device="cuda", ranks=1, **settings):
    timing = timing or Timing()
    choice = choose(ZooTraining(**settings), device, ranks, steps, timing)
    return choice.candidate, timing.tried


def test_weights_in_bf16_are_trained_in_bf16_everywhere():
    assert chosen(100_000, weights="bf16") == (COMPILED, [BF16, COMPILED])
    assert chosen(100_000, device="cpu", weights="bf16") == (BF16, [])


def test_a_long_training_is_compiled_and_a_shorter_one_is_not():
    assert chosen(100_000) == (COMPILED, [BF16, FP32, COMPILED])
    assert chosen(2600) == (BF16, [BF16, FP32, COMPILED])  # 30 s of compilation save 26 s
    assert chosen(1500) == (BF16, [BF16, FP32])  # compilation could not pay, so it is not tried
    assert chosen(1000) == (BF16, [BF16])  # nor is fp32 for 50 s


def test_a_training_without_a_number_of_steps_is_long_unless_its_time_is_short():
    assert chosen(None)[0] == COMPILED
    assert chosen(None, max_time_s=100.0, epochs=None) == (BF16, [BF16, FP32])
    assert chosen(None, max_time_s=30.0, epochs=None) == (BF16, [])


def test_nothing_is_tried_on_a_cpu_with_ranks_or_for_a_few_steps():
    assert chosen(100_000, device="cpu") == (FP32, [])
    assert chosen(100_000, ranks=8) == (BF16, [])
    assert chosen(20) == (BF16, [])


def test_settings_that_are_named_stay():
    assert chosen(100_000, precision="fp32", compile="off", device="cpu") == (FP32, [])
    fast = Timing()
    fast.times[Candidate("fp32", "default")] = Trial(Candidate("fp32", "default"), 30.0, 0.05, 2.0)
    assert chosen(100_000, fast, precision="fp32")[0] == Candidate("fp32", "default")
    assert chosen(100_000, compile="off") == (BF16, [BF16, FP32])


def test_a_candidate_with_another_loss_or_an_error_is_not_chosen():
    assert chosen(100_000, Timing(BF16=Trial(BF16, 0.5, 0.05, 2.4)), compile="off")[0] == FP32
    assert chosen(100_000, Timing(BF16=Trial(BF16, 0.5, 0.05, math.nan)), compile="off")[0] == FP32
    assert chosen(100_000, Timing(COMPILED=Trial(COMPILED, problem="no compiler")))[0] == BF16
    failed = Timing(FP32=Trial(FP32, problem="out of memory"), BF16=Trial(BF16, problem="out of memory"))
    assert chosen(100_000, failed)[0] == FP32
    for problem in (Trial(BF16, 0.5, 0.05, math.nan), Trial(BF16, problem="out of memory")):
        assert chosen(1000, Timing(BF16=problem)) == (FP32, [BF16, FP32]), "also in a short training"


def test_deep_models_are_compiled_by_layer():
    deep = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(24))
    deep, flat = torch.nn.ModuleDict({"layers": deep}), torch.nn.ModuleDict({"layers": deep[:4]})
    assert (compile_mode(deep), compile_mode(flat)) == ("blocks", "default")
    by_layer = Candidate("bf16", "blocks")
    timing = Timing()
    timing.times[by_layer] = Trial(by_layer, 5.0, 0.04, 2.0)
    assert choose(ZooTraining(), "cuda", 1, 100_000, timing, "blocks").candidate == by_layer


def test_a_slow_bf16_stays_in_fp32():
    assert chosen(1000, Timing(BF16=Trial(BF16, 0.5, 0.2, 2.0)))[0] == FP32


def spec(**changes):
    settings = {
        "pipeline": "train", "model": "pna", "device": "cpu", "shape": {}, "evaluate_batches": 1,
        "training": {"max_steps": 3, "batch_size": 2}, "energy": {"estimate_cpu": True},
    }  # fmt: skip
    return check({**settings, **changes})


def test_real_trials_time_the_model_and_leave_random_numbers_alone():
    one = spec(model="bert", size="tiny")
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    timing = time_in_training(prepare(one.request), one.seed, one.training, torch.device("cpu"))
    trials = [timing(FP32), timing(BF16)]
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(not trial.problem and trial.step_s > 0 and trial.setup_s > 0 for trial in trials)
    assert trials[1].loss == pytest.approx(trials[0].loss, rel=0.05) and trials[0].loss != trials[1].loss


@pytest.mark.parametrize("model", ["bert", "dinov2", "gflownet"])
def test_trials_start_from_the_same_weights_and_leave_the_workload_as_it_was(model):
    """dinov2 has a second module (an average of the weights), gflownet known rewards and perhaps processes."""
    pytest.importorskip("rdkit" if model == "gflownet" else "transformers")
    one = spec(model=model, size="tiny")
    workload = prepare(one.request)
    modules = {"model": workload.model, **workload.objective.modules()}
    before = {name: {k: v.clone() for k, v in module.state_dict().items()} for name, module in modules.items()}
    timing = time_in_training(workload, one.seed, one.training, torch.device("cpu"))
    first, second = timing(FP32), timing(FP32)
    assert not first.problem and first.loss == second.loss
    for name, module in modules.items():
        assert all(torch.equal(value, before[name][key]) for key, value in module.state_dict().items()), name
        assert all(parameter.grad is None for parameter in module.parameters())
    if model == "gflownet":
        assert not workload.objective._reward._known, "rewards of the trial would be missing in the training"


def test_an_objective_that_cannot_be_copied_is_tried_as_it_is():
    one = spec(model="bert", size="tiny")
    workload = prepare(one.request)
    workload.objective.lock = threading.Lock()
    assert not time_in_training(workload, one.seed, one.training, torch.device("cpu"))(FP32).problem


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (RuntimeError("out of memory\nmore"), "RuntimeError: out of memory"),
        (NotImplementedError(), "NotImplementedError: "),
        (AssertionError("no kernel"), "AssertionError: no kernel"),
    ],
)
def test_a_trial_that_fails_is_a_result(error, problem):
    class Failing(zoo_pipeline.load_trainer("")):
        def forward(self, batch):
            raise error

    one = spec(model="bert", size="tiny")
    trial = time_in_training(prepare(one.request), one.seed, one.training, torch.device("cpu"), Failing)(FP32)
    assert trial.problem == problem


def test_steps_follow_from_epochs_steps_or_tokens():
    workload = SimpleNamespace(
        batches=SimpleNamespace(batches_per_epoch=50, at=lambda e, i: SimpleNamespace(tokens=100))
    )
    assert planned_steps(TrainingConfig(epochs=2), workload) == 100
    assert planned_steps(TrainingConfig(epochs=None, max_tokens=1000, accumulate=2), workload) == 5
    assert planned_steps(TrainingConfig(epochs=None, max_time_s=9.0), workload) is None


@pytest.mark.parametrize(("has_cores", "candidates"), [(True, [BF16, FP32]), (False, [FP32])])
def test_the_choice_is_in_the_settings_of_the_run_and_its_trial_in_a_setup_stage(
    tmp_path, monkeypatch, has_cores, candidates
):
    """On a CPU with a fake timing function, as if it were a GPU; one without tensor cores for bf16 is not tried with
    it."""
    tried = []

    def timing(workload, seed, config, device, trainer, check_stop):
        return lambda candidate: tried.append(candidate) or TIMES[candidate]

    real = zoo_pipeline.choose
    monkeypatch.setattr(zoo_pipeline, "time_in_training", timing)
    monkeypatch.setattr(zoo_pipeline, "choose", lambda config, device, *rest: real(config, "cuda", *rest))
    monkeypatch.setattr(zoo_pipeline, "_is_tried", lambda device, ranks: True)
    monkeypatch.setattr(zoo_pipeline.environment, "has_bf16_cores", lambda device: has_cores)
    monkeypatch.setattr(zoo_pipeline, "planned_steps", lambda config, workload: 1300)
    paths = create_run(tmp_path, spec(model="bert", size="tiny"))
    assert read_mapping(paths.config)["training"]["precision"] == "auto"
    record = execute(paths, SilentProgress())
    assert record.status == "done", record.error
    assert tried == candidates
    chosen = candidates[0].precision
    for settings in (read_mapping(paths.config), record.spec):
        assert (settings["training"]["precision"], settings["training"]["compile"]) == (chosen, "off")
    stage = next(stage for stage in record.stages if stage.name == "model.autotune")
    assert (stage.role, stage.activity) == ("setup", "autotune")
    assert any(note.text.startswith(f"auto: {chosen} eager, the shortest") for note in record.validity.notes)


def test_on_a_cpu_auto_is_fp32_without_a_trial(tmp_path):
    paths = create_run(tmp_path, spec(model="bert", size="tiny"))
    record = execute(paths, SilentProgress())
    assert (record.spec["training"]["precision"], record.spec["training"]["compile"]) == ("fp32", "off")
    assert "model.autotune" not in [stage.name for stage in record.stages]
