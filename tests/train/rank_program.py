"""What each rank runs in the tests of DDP and FSDP: `torchrun rank_program.py FOLDER`, which gets one folder a kind."""

import json
import shutil
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from joulelab.errors import EndedBySignal
from joulelab.train import parallel as rank_group
from joulelab.train.sharding_fsdp import ShardedCheckpoints
from joulelab.train.trainer import TrainerCallbacks

sys.path.insert(0, str(Path(__file__).parent))
from ragged_language import language_trainer


def one_step(kind, ranks):
    """2 ranks x 4 micro-batches x 4 rows = the 32 rows of one epoch."""
    trainer = language_trainer(4, TrainerCallbacks(ranks=ranks), parallel=kind, accumulate=4)
    trainer.train()
    state = get_model_state_dict(trainer.trained, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name.removeprefix("model."): value for name, value in state.items()}, trainer.position


def losses_of(kind, ranks, folder, stop_at=None):
    losses, calls = {}, []

    def check_stop():
        calls.append(1)
        if ranks.rank == 1 and len(calls) == stop_at:  # one rank alone is told to stop
            raise EndedBySignal(15)

    around = TrainerCallbacks(
        ranks=ranks,
        checkpoints=ShardedCheckpoints(folder, ranks),
        check_stop=check_stop,
        on_log=lambda report: losses.setdefault(report.position.step, report.loss),
        on_resume=lambda position: losses.setdefault("resumed_at", position.step),
        warn=lambda text: losses.setdefault("warning", text),
    )
    trainer = language_trainer(
        4, around, dropout=0.2, parallel=kind, accumulate=2, max_steps=8, optimizer="adamw", learning_rate=0.01,
        checkpoint_every_steps=3, log_every_steps=2,
    )  # fmt: skip
    torch.manual_seed(7 + ranks.rank)
    try:
        trainer.train()
    except EndedBySignal:
        losses["stopped_at"] = trainer.position.step
    return losses


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def main():
    folder = Path(sys.argv[1])
    with rank_group.process_group() as ranks:
        for kind in ("ddp", "fsdp"):
            (folder / kind).mkdir(exist_ok=True)
            check(kind, folder / kind, ranks)


def check(kind, folder, ranks):
    weights, position = one_step(kind, ranks)
    whole = losses_of(kind, ranks, folder / "whole")
    cut = losses_of(kind, ranks, folder / "cut", stop_at=5)
    if ranks.is_first:
        shutil.copytree(folder / "cut", folder / "flipped")
        flip(max((folder / "flipped").glob("step-*")) / "__1_0.distcp")
    rest = losses_of(kind, ranks, folder / "cut")
    flipped = losses_of(kind, ranks, folder / "flipped")
    if ranks.is_first:
        torch.save(weights, folder / "weights.pt")
        found = {"position": vars(position), "whole": whole, "cut": cut, "rest": rest, "flipped": flipped}
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
