"""Several ranks train as one: the same gradient for every split, the same run after every interruption."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import joulelab_here
from ragged_language import language_trainer

from joulelab.errors import ConfigError
from joulelab.train import parallel
from joulelab.train.budget import Position
from joulelab.train.checkpoint import ModelState
from joulelab.train.parallel import Ranks

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


def test_files_of_a_killed_attempt_do_not_get_into_a_checkpoint(tmp_path):
    """It had two ranks, of which one had written its part."""
    from joulelab.train.sharding_fsdp import ShardedCheckpoints

    killed = tmp_path / "checkpoints" / "step-000000050"
    killed.mkdir(parents=True)
    torch.save({"position": asdict(Position(drawn=100, step=50)), "light": {}}, killed / "rank-00001.pt")
    (killed / "sums-00001.json").write_text(json.dumps({"ranks": 2, "crc32": {}}))
    trained = torch.nn.ModuleDict({"model": torch.nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW(trained.parameters())
    trained["model"](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        checkpoints = ShardedCheckpoints(killed.parent, Ranks())
        checkpoints.save(Position(drawn=50, step=50), ModelState(trained, optimizer), {"x": 1}, wait=True)
        assert not (killed / "rank-00001.pt").exists()
        position, loop_state = checkpoints.load(ModelState(trained, optimizer), print)
    finally:
        dist.destroy_process_group()
    assert (position, loop_state) == (Position(drawn=50, step=50), {"x": 1})


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
