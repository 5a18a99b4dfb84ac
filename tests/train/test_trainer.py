"""The loop: the same gradient for every split, the same run after every interruption, and an end to every NaN."""

import math
import os
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from file_size import file_size_limit
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from joulelab.errors import ConfigError, CorruptedFile, EndedBySignal, NonFiniteLoss
from joulelab.runs.artifacts import crc32
from joulelab.train.budget import Position
from joulelab.train.checkpoint import CheckpointFolder, ModelState
from joulelab.train.config import TrainingConfig
from joulelab.train.optim import make_optimizer
from joulelab.train.parallel import Ranks
from joulelab.train.stats.hooks import NoOpStats, StatsList, TrainerStats
from joulelab.train.stats.phase_times import SimpleStats
from joulelab.train.trainer import (
    Prefetcher,
    RunningLoss,
    SimpleTrainer,
    Trainer,
    TrainerCallbacks,
    _cuda_tensors,
    learning_rate_factor,
    load_trainer,
)
from joulelab.zoo.objective import ObjectiveOutput


@dataclass(frozen=True)
class Rows:
    x: torch.Tensor
    y: torch.Tensor

    @property
    def samples(self):
        return len(self.x)

    @property
    def tokens(self):
        return len(self.x)

    def to(self, device):
        return self


class Ragged:
    """32 rows of a learnable task, cut into batches of uneven size."""

    def __init__(self, sizes):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(sum(sizes), 6, generator=generator)
        y = (x[:, 0] > 0).long()
        self.parts = [Rows(*pair) for pair in zip(x.split(sizes), y.split(sizes), strict=True)]

    @property
    def batches_per_epoch(self):
        return len(self.parts)

    def at(self, epoch, index):
        return self.parts[index]


class CrossEntropy:
    def __call__(self, model, batch, phase):
        with phase("forward.student"):
            loss = nn.functional.cross_entropy(model(batch.x), batch.y, reduction="sum")
        return ObjectiveOutput(loss, batch.samples, {"ce": loss.detach()})

    def modules(self):
        return {}

    def after_step(self, model):
        pass


def model(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 2))


def trainer(batches, net=None, stats=None, around=None, objective=None, **config):
    defaults = {"epochs": 1, "learning_rate": 0.01, "log_every_steps": 1, "weight_decay": 0.0}
    settings = TrainingConfig(**{**defaults, **config})
    return SimpleTrainer(net or model(), batches, objective or CrossEntropy(), settings, stats or NoOpStats(), around)


@pytest.mark.parametrize("sizes", [[32], [8, 8, 8, 8], [1, 2, 13, 16], [31, 1]])
def test_every_split_into_micro_batches_gives_the_same_step(sizes):
    whole, split = trainer(Ragged([32])), trainer(Ragged(sizes), accumulate=len(sizes))
    whole.train()
    split.train()
    for a, b in zip(whole.model.parameters(), split.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_training_lowers_the_loss():
    losses = []
    around = TrainerCallbacks(on_log=lambda report: losses.append(report.loss))
    trainer(Ragged([8] * 4), around=around, epochs=20).train()
    assert losses[-1] < 0.5 * losses[0]


class StopAt:
    def __init__(self, step):
        self.step, self.calls = step, 0

    def __call__(self):
        self.calls += 1
        if self.calls == self.step:
            raise EndedBySignal(15)


@pytest.mark.parametrize("stop_at", [1, 7, 13])
def test_a_run_interrupted_and_resumed_is_the_uninterrupted_run_bit_for_bit(tmp_path, stop_at):
    whole = trainer(Ragged([8] * 4), model(dropout=0.3), epochs=5, log_every_steps=3)
    torch.manual_seed(1)
    final = whole.train()

    checkpoints = CheckpointFolder(tmp_path)
    cut = trainer(
        Ragged([8] * 4),
        model(dropout=0.3),
        around=TrainerCallbacks(checkpoints=checkpoints, check_stop=StopAt(stop_at)),
        epochs=5,
        log_every_steps=3,
        checkpoint_every_steps=1000,
    )
    torch.manual_seed(1)
    with pytest.raises(EndedBySignal):
        cut.train()
    assert cut.position.step == stop_at

    torch.manual_seed(999)
    rest = trainer(
        Ragged([8] * 4),
        model(dropout=0.3),
        around=TrainerCallbacks(checkpoints=checkpoints),
        epochs=5,
        log_every_steps=3,
    )
    assert rest.train() == final
    assert rest.position == whole.position
    for a, b in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_loss_that_is_not_finite_ends_training():
    with pytest.raises(NonFiniteLoss, match="the loss became"):
        trainer(Ragged([8] * 4), learning_rate=1e38, clip_norm=1e38, epochs=50).train()


def test_a_broken_state_is_never_saved(tmp_path):
    class Broken(CrossEntropy):
        def __call__(self, model, batch, phase):
            good = super().__call__(model, batch, phase)
            return ObjectiveOutput(good.loss_sum * math.nan, good.count)

    checkpoints = CheckpointFolder(tmp_path)
    broken = trainer(
        Ragged([8] * 4),
        objective=Broken(),
        around=TrainerCallbacks(checkpoints=checkpoints),
        log_every_steps=1000,
        checkpoint_every_steps=2,
    )
    with pytest.raises(NonFiniteLoss):
        broken.train()
    assert not list(tmp_path.iterdir())


def test_the_schedule_counts_optimizer_steps_and_not_micro_batches():
    rates = []
    around = TrainerCallbacks(on_log=lambda report: rates.append(report.learning_rate))
    trainer(Ragged([2] * 16), around=around, accumulate=4, epochs=2, warmup_share=0.25, learning_rate=1.0).train()
    assert len(rates) == 8
    assert max(rates) == rates[2]
    assert rates[-1] == pytest.approx(0.5 / 8 / 0.75)


def test_the_rate_rises_over_the_warm_up_and_falls_to_zero():
    assert learning_rate_factor("linear", 0.05, 0.1) == pytest.approx(0.5)
    assert learning_rate_factor("linear", 0.1, 0.1) == pytest.approx(1.0)
    assert learning_rate_factor("linear", 1.0, 0.1) == 0.0
    assert learning_rate_factor("linear", 0.0, 0.0) == 1.0


def test_leftover_gradients_do_not_leak_into_the_next_step():
    net = trainer(Ragged([8] * 4))
    net.step()
    assert all(p.grad is None for p in net.model.parameters())


class Journal(TrainerStats):
    def __init__(self):
        self.lines = []

    def start(self, phase):
        self.lines.append(f"start {phase}")

    def stop(self, phase):
        self.lines.append(f"stop {phase}")

    def log_step(self, step):
        self.lines.append(f"step {step}")


def test_the_hooks_tell_the_story_of_a_step_in_order():
    journal = Journal()
    trainer(Ragged([8, 8]), stats=journal, accumulate=2).train()
    forward_backward = ["start input", "stop input", "start forward", "stop forward", "start backward", "stop backward"]
    assert journal.lines == [
        "start train", "start step", *forward_backward, *forward_backward,
        "start optimizer_step", "stop optimizer_step", "stop step", "step 1", "stop train",
    ]  # fmt: skip


def test_a_tracker_may_override_a_single_hook_and_several_work_at_once():
    class OnlyBackward(TrainerStats):
        count = 0

        def start_backward(self):
            self.count += 1

    only, journal = OnlyBackward(), Journal()
    trainer(Ragged([8] * 4), stats=StatsList([only, journal])).train()
    assert only.count == 4
    assert journal.lines.count("start backward") == 4


def test_simple_stats_tell_mean_and_quantiles_per_phase():
    stats = SimpleStats()
    trainer(Ragged([8] * 4), stats=stats).train()
    output_text = stats.log_stats()
    assert "forward" in output_text
    assert "p95 ms" in output_text


def heavy(value=0.0):
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1))


def test_checkpoints_keep_the_newest_two_and_load_without_pickled_code(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        folder.save(Position(step=step), heavy(step), {"seen": step}, wait=True)
    assert len(list(tmp_path.glob("*.pt"))) == 2
    into = heavy()
    position, light = folder.load(into, pytest.fail)
    assert (position.step, float(into.trained.weight.detach()), light) == (3, 3.0, {"seen": 3})


@pytest.mark.parametrize(("kept", "steps"), [(0, []), (1, [6]), (3, [4, 5, 6]), (9, [1, 2, 3, 4, 5, 6])])
def test_the_newest_checkpoints_stay_after_training_if_requested(tmp_path, kept, steps):
    folder = CheckpointFolder(tmp_path / "student.train", kept)
    for step in range(1, 7):
        folder.save(Position(step=step), heavy(step), {"seen": step}, wait=True)
    folder.clear()
    files = sorted((tmp_path / "student.train").glob("*")) if (tmp_path / "student.train").exists() else []
    weights = [torch.load(file, weights_only=True)["state"]["trained"]["weight"].item() for file in files]
    assert weights == steps


def test_a_half_written_checkpoint_is_not_taken(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(Position(step=1), heavy(), {}, wait=True)
    (tmp_path / "step-000000002.tmp").write_bytes(b"half")
    assert folder.load(heavy(), pytest.fail)[0].step == 1


def flip(path):
    """One bit in the middle: the value of a weight."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


class RunsCode:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("name", ["step-000000009.pt", "step-000000009.{sum:08x}.pt"])
def test_a_checkpoint_that_would_run_code_is_not_used(tmp_path, name):
    folder, warnings = CheckpointFolder(tmp_path / "checkpoints"), []
    folder.save(Position(step=1), heavy(1), {}, wait=True)
    made = tmp_path / "made.pt"
    torch.save({"position": RunsCode(tmp_path / "ran"), "state": {}}, made)
    made.replace(tmp_path / "checkpoints" / name.format(sum=crc32(made)))
    assert folder.load(heavy(), warnings.append)[0].step == 1
    assert "(it contains more than tensors and plain values)" in warnings[0] and not (tmp_path / "ran").exists()


def as_an_earlier_version(path):
    """Without a checksum in its name."""
    return path.rename(path.with_name(f"{path.name.split('.')[0]}.pt"))


@pytest.mark.parametrize("damage", [flip, cut, lambda path: path.write_bytes(b"")])
def test_a_corrupted_checkpoint_gives_way_to_the_older_one_with_a_warning(tmp_path, damage):
    folder, warnings = CheckpointFolder(tmp_path), []
    for step in (1, 2):
        folder.save(Position(step=step), heavy(step), {"seen": step}, wait=True)
    newest = max(tmp_path.glob("step-*.pt"))
    damage(newest)
    into = heavy()
    position, light = folder.load(into, warnings.append)
    assert (position.step, float(into.trained.weight.detach()), light) == (1, 1.0, {"seen": 1})
    older = next(tmp_path.glob("step-*1.*.pt"))
    assert newest.name in warnings[0] and "corrupted" in warnings[0]
    assert warnings[1:] == [f"training resumes from the older checkpoint {older.name}"]
    folder.save(Position(step=2), heavy(2), {}, wait=True)
    assert folder.load(heavy(), pytest.fail)[0].step == 2, "the step that is done again is saved and used"
    folder.clear()
    assert not tmp_path.exists()


def test_without_an_intact_checkpoint_the_error_says_how_to_train_from_the_beginning(tmp_path):
    folder = CheckpointFolder(tmp_path / "student.train")
    for step in (1, 2):
        folder.save(Position(step=step), heavy(step), {}, wait=True)
    for path in (tmp_path / "student.train").glob("step-*.pt"):
        flip(path)
    with pytest.raises(CorruptedFile, match=r"no checkpoint of student.train can be read: step-000000001\.") as refused:
        folder.load(heavy(), lambda text: None)
    assert "resume once more" in refused.value.hint
    assert folder.load(heavy(), pytest.fail) is None


def test_checkpoints_of_earlier_versions_load_and_a_truncated_one_is_passed_over(tmp_path):
    folder, warnings = CheckpointFolder(tmp_path), []
    for step in (1, 2):
        folder.save(Position(step=step), heavy(step), {}, wait=True)
    old, new = (as_an_earlier_version(path) for path in sorted(tmp_path.glob("step-*.pt")))
    assert folder.load(heavy(), pytest.fail)[0].step == 2
    cut(new)
    assert folder.load(heavy(), warnings.append)[0].step == 1
    assert len(warnings) == 2 and old.exists()


def test_training_continues_while_a_checkpoint_is_written_and_changes_nothing_in_it(tmp_path):
    folder, saved = CheckpointFolder(tmp_path), heavy(1.0)
    released = threading.Event()
    folder._pool.submit(released.wait)  # the disk is busy
    folder.save(Position(step=1), saved, {}, wait=False)
    nn.init.constant_(saved.trained.weight, 2.0)  # the next step changes the weights in place
    assert not list(tmp_path.iterdir())
    released.set()
    into = heavy()
    folder.load(into, pytest.fail)
    assert float(into.trained.weight.detach()) == 1.0


def test_finished_training_leaves_no_empty_folder(tmp_path):
    folder = CheckpointFolder(tmp_path / "student.train")
    folder.save(Position(step=1), heavy(), {}, wait=True)
    folder.clear()
    assert not (tmp_path / "student.train").exists()


def test_tensors_on_a_gpu_are_found_in_nested_parts_of_a_batch():
    @dataclass
    class Part:
        ids: object
        more: object = ()

    with FakeTensorMode():
        on_gpu = [torch.empty(1, device="cuda") for _ in range(5)]
        inner = Part(on_gpu[1], {"a": on_gpu[2], "b": [on_gpu[3], 7]})
        batch = Part(on_gpu[0], (inner, None, torch.empty(1), Part("text", on_gpu[4])))
    found = list(_cuda_tensors(vars(batch)))
    assert [tensor is expected for tensor, expected in zip(found, on_gpu, strict=True)] == [True] * 5


def test_a_full_disk_is_warned_about_and_does_not_end_training(tmp_path):
    class Full(CheckpointFolder):
        def _write(self, position, state):
            raise OSError(28, "No space left on device")

    warnings = []
    around = TrainerCallbacks(checkpoints=Full(tmp_path), warn=warnings.append)
    trainer(Ragged([8] * 4), around=around, checkpoint_every_steps=1).train()
    assert len(warnings) == 3, "none after the last step, when the model is about to become an artifact"
    assert "no space left" in warnings[0]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_checkpoint_that_does_not_fit_leaves_nothing_behind(tmp_path, asynchronous):
    warnings = []
    around = TrainerCallbacks(checkpoints=CheckpointFolder(tmp_path), warn=warnings.append)
    training = trainer(Ragged([8] * 4), around=around, checkpoint_every_steps=2, checkpoint_async=asynchronous)
    with file_size_limit(1024):
        training.train()
    assert training.position.step == 4 and len(warnings) == 1 and "size limit" in warnings[0]
    assert not list(tmp_path.iterdir())


def test_an_error_of_a_checkpoint_that_is_not_of_the_disk_ends_training(tmp_path):
    class Broken(CheckpointFolder):
        def save(self, position, model_state, loop_state, wait):
            raise RuntimeError("the state cannot be copied")

    with pytest.raises(RuntimeError, match="cannot be copied"):
        trainer(
            Ragged([8] * 4), around=TrainerCallbacks(checkpoints=Broken(tmp_path)), checkpoint_every_steps=1
        ).train()


def test_a_signal_during_the_last_step_does_not_keep_the_model_from_being_saved(tmp_path):
    calls = []

    def check_stop():
        calls.append(1)
        if len(calls) == 4:
            raise EndedBySignal(15)

    around = TrainerCallbacks(checkpoints=CheckpointFolder(tmp_path), check_stop=check_stop)
    training = trainer(Ragged([8] * 4), around=around)
    training.train()
    assert training.position.step == 4 and not list(tmp_path.iterdir())


def test_ranks_take_turns_and_a_report_has_the_rate_of_the_first_group():
    taken, logged = [], []
    trainer = SimpleNamespace(
        _input=SimpleNamespace(take=taken.append), position=Position(drawn=6), ranks=SimpleNamespace(rank=1, world=2),
        _running_loss=SimpleNamespace(pop_means=lambda ranks: (0.5, {})), _require_finite=lambda loss: None,
        stats=SimpleNamespace(log_loss=lambda loss: None), budget=SimpleNamespace(fraction=lambda position: 0.25),
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}, {"lr": 0.2}]),
        callbacks=SimpleNamespace(on_log=logged.append),
    )  # fmt: skip
    Trainer.next_batch(trainer)
    Trainer.next_batch(trainer)
    assert taken == [7, 9] and trainer.position.drawn == 10
    assert Trainer.log(trainer) == 0.5 and (logged[0].learning_rate, logged[0].fraction) == (0.1, 0.25)


def test_warmup_steps_multiply_a_decay_that_runs_from_the_first_step():
    """Third of four warm-up steps, a quarter of the budget spent: 3/4 of the linear decay's 3/4."""

    def rate(**config):
        config = TrainingConfig(schedule="linear", learning_rate=1.0, **config)
        groups = [{"lr": 0.0}]
        trainer = SimpleNamespace(
            config=config, position=Position(step=2), optimizer=SimpleNamespace(param_groups=groups),
            budget=SimpleNamespace(fraction_amid=lambda position, tokens: 0.25),
        )  # fmt: skip
        Trainer._set_learning_rate(trainer, 10)
        return groups[0]["lr"]

    assert rate(warmup_steps=4) == pytest.approx(0.75 * learning_rate_factor("linear", 0.25, 0.0))
    assert rate(warmup_steps=2) == pytest.approx(learning_rate_factor("linear", 0.25, 0.0)) == pytest.approx(0.75)
    assert rate(warmup_share=0.5) == pytest.approx(learning_rate_factor("linear", 0.25, 0.5))


def test_the_mean_loss_is_over_the_counts_of_all_ranks_and_the_sums_start_again():
    running, alone = RunningLoss(torch.device("cpu")), SimpleNamespace(sum=list)
    for loss, part, count in ((6.0, 2.0, 3), (4.0, 1.0, 2)):
        running.add(SimpleNamespace(loss_sum=torch.tensor(loss), parts={"kl": torch.tensor(part)}, count=count))
    assert running.peek() == 10.0 and running.state()["count"] == 5
    assert running.pop_means(SimpleNamespace(sum=lambda values: [2 * one for one in values])) == (2.0, {"kl": 0.6})
    assert running.peek() == 0.0 and running.state() == {"sums": {}, "count": 0}
    assert math.isnan(running.pop_means(alone)[0])
    running.add(SimpleNamespace(loss_sum=torch.tensor(3.0), parts={}, count=0))
    assert running.pop_means(alone) == (3.0, {})


def test_the_next_batches_are_prepared_while_one_is_used_and_dropped_after_a_rewind():
    """Three batches per epoch, two ahead, of every second number."""
    prepared = []

    class Source:
        batches_per_epoch = 3

        def at(self, epoch, index):
            prepared.append((epoch, index))
            return SimpleNamespace(to=lambda device: (epoch, index))

    ahead = Prefetcher(Source(), torch.device("cpu"), 2, stride=2)
    assert [ahead.take(number) for number in (0, 2, 4)] == [(0, 0), (0, 2), (1, 1)]
    ahead.close()
    assert prepared[:5] == [(0, 0), (0, 2), (1, 1), (2, 0), (2, 2)][: len(prepared)] and len(prepared) <= 5
    again = Prefetcher(Source(), torch.device("cpu"), 1)
    assert [again.take(number) for number in (0, 1, 0, 5)] == [(0, 0), (0, 1), (0, 0), (1, 2)]
    again.close()
    prepared.clear()
    plain = Prefetcher(Source(), torch.device("cpu"), 0)
    assert plain.take(4) == (1, 1) and prepared == [(1, 1)]
    plain.close()


def test_the_schedules_by_hand():
    assert [learning_rate_factor("linear", at, 0.2) for at in (0.0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx(
        [0, 0.5, 1, 0.5, 0]
    )
    assert [learning_rate_factor("cosine", at, 0.0) for at in (0.0, 1 / 3, 0.5, 1.0)] == pytest.approx(
        [1, 0.75, 0.5, 0]
    )
    assert learning_rate_factor("constant", 0.9, 0.1) == 1.0 and learning_rate_factor("linear", 1.5, 0.0) == 0.0


def test_the_seed_of_rounding_is_the_first_ranks_and_fp32_draws_none():
    torch.manual_seed(3)
    drawn = int(torch.randint(2**31, ()))

    class Alone(Ranks):
        def sum(self, values):
            return list(values)

    for rank, seed in ((0, drawn), (1, 0)):
        torch.manual_seed(3)
        trainer = SimpleNamespace(config=SimpleNamespace(weights="bf16"), ranks=Alone(rank, 2))
        assert SimpleTrainer._rounding_seed(trainer) == seed
    torch.manual_seed(3)
    assert SimpleTrainer._rounding_seed(SimpleNamespace(config=SimpleNamespace(weights="fp32"))) == 0
    assert int(torch.randint(2**31, ())) == drawn


def test_a_file_must_define_one_trainer(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from joulelab.train.trainer import SimpleTrainer\nLIMIT = 3\nclass Helper: pass\n"
        "class Mine(SimpleTrainer): pass\n"
    )
    assert load_trainer(str(file)).__name__ == "Mine" and load_trainer("") is SimpleTrainer
    for text, found in (("", "none"), ("class A(SimpleTrainer): pass\nclass B(SimpleTrainer): pass\n", "A, B")):
        other = tmp_path / f"other{len(text)}.py"
        other.write_text("from joulelab.train.trainer import SimpleTrainer\n" + text)
        with pytest.raises(ConfigError, match=f"found {found}"):
            load_trainer(str(other))


def test_as_many_batches_are_prepared_as_asked_for():
    source = SimpleNamespace(batches_per_epoch=10, at=lambda epoch, index: Rows(torch.ones(1), torch.ones(1)))
    ahead = Prefetcher(source, torch.device("cpu"), 2, stride=3)
    ahead.take(0)
    assert [number for number, _ in ahead._queue] == [3, 6]
    ahead.close()


def test_replicas_round_alike_whatever_their_rank(monkeypatch):
    shards = []

    def made(*given):
        shards.append(given[-1])
        return make_optimizer(*given)

    monkeypatch.setattr("joulelab.train.trainer.make_optimizer", made)
    for ranks in (Ranks(), Ranks(rank=3)):
        trainer(Ragged([4, 4]), around=TrainerCallbacks(ranks=ranks), max_steps=1)
    assert shards == [0, 0]
