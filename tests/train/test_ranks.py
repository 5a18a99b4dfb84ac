"""Several ranks train as one: the same gradient for every split, the same run after every interruption."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from commands import joulelab_here
from file_size import file_size_limit
from ragged_language import language_trainer

from joulelab.errors import ConfigError
from joulelab.runs.paths import storage_failure
from joulelab.train import parallel
from joulelab.train.budget import Position
from joulelab.train.checkpoint import ModelState
from joulelab.train.parallel import Ranks
from joulelab.train.sharding_fsdp import ShardedCheckpoints

PROGRAM = Path(__file__).parent / "rank_program.py"


def one_process(batch_size, accumulate):
    trainer = language_trainer(batch_size, accumulate=accumulate)
    trainer.train()
    return trainer.model.state_dict(), trainer.position


def test_one_times_32_and_four_times_8_give_the_same_step():
    whole, position = one_process(32, 1)
    split, split_position = one_process(8, 4)
    assert (position.samples, position.tokens) == (split_position.samples, split_position.tokens)
    for name, value in whole.items():
        torch.testing.assert_close(value, split[name], rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """One launch for both kinds: the launcher and each rank import torch anew."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(PROGRAM), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=None)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(params=["ddp", "fsdp"])
def two_ranks(request, launched):
    folder = launched / request.param
    return folder, json.loads((folder / "found.json").read_text())


def test_two_ranks_give_the_gradient_of_one_process(two_ranks):
    folder, found = two_ranks
    whole, position = one_process(32, 1)
    assert found["position"]["samples"] == position.samples == 32
    assert found["position"]["tokens"] == position.tokens
    weights = torch.load(folder / "weights.pt", weights_only=True)
    assert weights.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-7)


@pytest.fixture
def single_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield Ranks()
    dist.destroy_process_group()


def trained_linear(width):
    trained = torch.nn.ModuleDict({"model": torch.nn.Linear(width, width)})
    optimizer = torch.optim.AdamW(trained.parameters())
    trained["model"](torch.ones(2, width)).sum().backward()
    optimizer.step()
    return ModelState(trained, optimizer)


def test_files_of_a_killed_attempt_do_not_get_into_a_checkpoint(tmp_path, single_rank):
    """It had two ranks, of which one had written its part."""
    killed = tmp_path / "checkpoints" / "step-000000050"
    killed.mkdir(parents=True)
    torch.save({"position": asdict(Position(drawn=100, step=50)), "light": {}}, killed / "rank-00001.pt")
    (killed / "sums-00001.json").write_text(json.dumps({"ranks": 2, "crc32": {}}))
    model_state = trained_linear(width=4)
    checkpoints = ShardedCheckpoints(killed.parent, single_rank)
    checkpoints.save(Position(drawn=50, step=50), model_state, {"x": 1}, wait=True)
    assert not (killed / "rank-00001.pt").exists()
    assert checkpoints.load(model_state, print) == (Position(drawn=50, step=50), {"x": 1})


def test_a_rank_that_the_earlier_attempt_did_not_have_draws_its_own_random_numbers(tmp_path, single_rank):
    """With those of the first rank, both would drop the same activations. The running loss is counted once."""
    model_state, tally = trained_linear(width=4), {"sums": {"loss": torch.tensor(6.0)}, "count": 3}
    state = {"rng": torch.get_rng_state(), "cuda_rng": None, "tally": tally, "budget": {"time_s": 2.0}}
    ShardedCheckpoints(tmp_path, single_rank).save(Position(drawn=5, step=5), model_state, state, wait=True)
    torch.manual_seed(7)
    position, same = ShardedCheckpoints(tmp_path, single_rank).load(model_state, print)
    assert position.step == 5 and same["rng"].equal(state["rng"]) and same["tally"] == tally
    _, new = ShardedCheckpoints(tmp_path, Ranks(rank=1)).load(model_state, print)
    assert new["rng"].equal(torch.get_rng_state()) and not new["rng"].equal(state["rng"])
    assert new["tally"] == {"sums": {"loss": torch.tensor(0.0)}, "count": 0} and new["budget"] == state["budget"]


class Meeting:
    """Sums over two threads in place of ranks; like a collective operation it fails if one comes too late."""

    def __init__(self, limit_s):
        self.barrier, self.values = threading.Barrier(2, timeout=limit_s), [0.0, 0.0]

    def rank(self, number):
        meeting = self

        class Rank(Ranks):
            def sum(self, values):
                meeting.values[number] = values[0]
                meeting.barrier.wait()
                total = sum(meeting.values)
                meeting.barrier.wait()
                return [total]

        return Rank(number, 2, number)


def test_a_checkpoint_that_one_rank_cannot_write_fails_on_all_ranks_and_is_removed(tmp_path):
    meeting, folder = Meeting(limit_s=30), tmp_path / "step-000000003"
    folder.mkdir()

    def write(number):
        checkpoints = SimpleNamespace(_ranks=meeting.rank(number))
        with ShardedCheckpoints._failing_together(checkpoints, folder):
            if number == 1:
                raise OSError(28, "No space left on device")

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(write, number) for number in (0, 1))
        with pytest.raises(OSError, match="another rank could not write its part of step-000000003"):
            first.result()
        with pytest.raises(OSError, match="No space left"):
            second.result()
    assert not folder.exists()


@pytest.mark.parametrize("loop_state", [{}, {"rng": torch.get_rng_state()}], ids=["weights", "loop state"])
def test_a_sharded_checkpoint_that_does_not_fit_is_an_error_of_the_disk(tmp_path, single_rank, loop_state):
    model_state = trained_linear(width=64)
    checkpoints = ShardedCheckpoints(tmp_path / "checkpoints", single_rank)
    with file_size_limit(4096), pytest.raises((OSError, RuntimeError)) as failed:
        checkpoints.save(Position(step=3), model_state, loop_state, wait=True)
    assert "size limit" in storage_failure(failed.value).message
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_wait_for_the_first_longer_than_an_operation_of_all_may_take(monkeypatch, fails):
    monkeypatch.setattr(parallel, "_POLL_S", 0.05)
    meeting = Meeting(limit_s=0.7)

    def work():
        time.sleep(1.5)
        if fails:
            raise OSError("disk full")
        return "written"

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(meeting.rank(number).on_first, work) for number in (0, 1))
        assert second.result() is None
        if fails:
            with pytest.raises(OSError, match="disk full"):
                first.result()
        else:
            assert first.result() == "written"


def test_a_signal_to_one_rank_stops_all_and_the_resumed_run_has_the_same_loss_curve(two_ranks):
    _, found = two_ranks
    assert found["cut"]["stopped_at"] == 5
    assert found["rest"].pop("resumed_at") == 5
    output_text = {**{step: loss for step, loss in found["cut"].items() if step != "stopped_at"}, **found["rest"]}
    assert output_text == found["whole"]
    assert len(output_text) == 4


def test_a_flipped_bit_in_the_shard_of_one_rank_makes_all_ranks_use_the_older_checkpoint(two_ranks):
    _, found = two_ranks
    flipped = found["flipped"]
    assert flipped.pop("resumed_at") == 3
    assert "the checksum of __1_0.distcp does not match" in flipped.pop("warning")
    assert flipped == {step: found["whole"][step] for step in ("4", "6", "8")}


def test_a_parallel_kind_without_ranks_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="requires several ranks") as refused:
        language_trainer(8, parallel="fsdp")
    assert "torchrun" in refused.value.hint


@pytest.mark.samples
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("train", "gpt2", "training.parallel=fsdp"), "parallel=fsdp requires several ranks but there is one"),
        (("train", "gpt2", "--trainer", "ddp"), "parallel=ddp requires several ranks but there is one"),
        (("run", "sft-tiny", "training.parallel=fsdp"), "parallel=fsdp requires several ranks but there is one"),
        (("run", "fitnets-quick", "training.parallel=fsdp"), "the pipeline 'classify' runs in a single process"),
    ],
)
def test_a_parallel_kind_without_torchrun_is_refused_before_there_is_a_run(words, text, tmp_path):
    done = joulelab_here(*words, "--runs-dir", tmp_path / "runs")
    assert done.returncode == 2 and text in " ".join(done.stderr.split()), done.stderr
    assert not (tmp_path / "runs").exists()
    planned = joulelab_here(*words, "--dry-run", "--runs-dir", tmp_path / "runs")
    assert planned.returncode == 0, "settings can be checked where there are no ranks"


@pytest.mark.samples
def test_what_trains_no_model_needs_no_ranks(tmp_path):
    words = ("run", "sft-tiny", "training.parallel=fsdp", "--until", "data", "--runs-dir", tmp_path / "runs")
    assert joulelab_here(*words).returncode == 0
