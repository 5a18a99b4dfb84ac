"""Work that can be split: over tasks that never meet (`--shard 2/8`), and over the ranks that torchrun started.

    a share     does its units, and leaves them in the store as a part with a bill of its own
    the whole   finds the parts that are there, does what is missing, joins; the parts are on its bill
    ranks       each does its share of either, and all go on when the last is done

What it is that is split does not matter here: a teacher's distributions, its answers, its judgements.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulelab import clock
from joulelab.distill.causal.bench import Bench
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import Stage
from joulelab.runs.sharding import ALL, PART, Shard
from joulelab.runs.storage import read_json, write_json
from joulelab.train.optim import compilation_marks

_LOOK_S = 0.2


@dataclass(frozen=True)
class Begun:
    """What is left of a share."""

    go_on: Callable[[Stage], None] | None
    """Nothing: it is all there."""
    counts: Mapping[str, int]
    """What earlier attempts of this run have done of it."""


@dataclass(frozen=True)
class SplitWork:
    name: str
    """Of the artefact."""
    kind: str
    stage: str
    inputs: Mapping[str, Any]
    parents: Sequence[Bill]
    at_once: int
    """Rows or prompts in a unit: a split by other units is another split."""
    total: Callable[[], int]
    """Rows or prompts of the whole; asked only where there is work to do."""
    begin: Callable[[Path, Shard, Sequence[Path]], Begun]
    """(where to work, our share, folders of others) -> what is left; whatever is heavy is loaded only where it is."""
    join: Callable[[Sequence[Path], Path], None]
    """Folders that hold the work between them -> one folder; of a share's folders: what they hold."""
    opens: Callable[[Path], object] | None = None
    """Fails where the whole, once made, has come to harm that the list of its files does not show."""
    role: str = "teacher"
    activity: str = "generate"
    """Of its stage."""
    takes_damaged_shares: bool = False
    """`begin` looks through the folders of others itself, and takes what is still good in them."""

    def key(self, bench: Bench) -> str:
        """Of the whole: a share whose own parent is a share belongs to what is made from all of it."""
        parents = [str(bill.inputs.get("whole", bill.key)) for bill in self.parents]
        return bench.run.key_of(self.kind, self.inputs, parents)


def worked(bench: Bench, work: SplitWork) -> Artifact:
    """The whole, or the share that this run is to do."""
    share = bench.share
    if share is None:
        return _whole(bench, work)
    key = work.key(bench)
    whole = bench.run.found(key, work.opens)
    if whole is not None:
        bench.run.progress.say(f"{work.name}: whole already, made by {whole.bill.artefact.made_by}; nothing to split")
        return whole
    return bench.run.artifact(
        f"{work.name}-{share.name}",
        kind=work.kind + PART,
        inputs={"whole": key, "share": str(share), "at_once": work.at_once},
        parents=work.parents,
        make=lambda folder: _work(bench, work, share, folder, []),
    )


def _whole(bench: Bench, work: SplitWork) -> Artifact:
    def make(folder: Path) -> None:
        parts = bench.run.shares_of(work.key(bench), damaged_too=work.takes_damaged_shares)
        if parts:
            of = parts[0].bill.inputs["share"].partition("/")[2]
            bench.run.progress.say(f"{work.name}: {len(parts)} of {of} shares are there, their bills come along")
        _work(bench, work, ALL, folder, [part.folder for part in parts])

    return bench.run.artifact(
        work.name, kind=work.kind, inputs=work.inputs, parents=work.parents, make=make, opens=work.opens
    )


def _work(bench: Bench, work: SplitWork, share: Shard, folder: Path, others: Sequence[Path]) -> None:
    place = bench.kept_work(work.stage)
    own = share.among(bench.ranks.rank, bench.ranks.world)
    compiling = compilation_marks(bench.spec.training.compile, bench.run.note_setup)
    # looking for prompts and loading are part of the work, and of its bill
    with compiling, bench.run.stage(work.stage, role=work.role, activity=work.activity) as stage:
        resumed, began_ns = any(place.glob("*")), clock.now().mono_ns
        begun = work.begin(place, own, others)
        if resumed:  # every unit was kept when it was done; what is loaded once more is start-up
            stage.resumed()
            bench.run.note_setup("load", began_ns, clock.now().mono_ns)
        bench.run.progress.stage(work.stage, -(-work.total() // own.of))
        stage.count(**begun.counts)
        if begun.go_on is not None:
            begun.go_on(stage)
        if bench.ranks.world > 1:
            _wait_for_ranks(bench, stage, place, share)
        work.join([*others, place], folder)
    bench.ranks.barrier()
    if bench.ranks.is_first:
        shutil.rmtree(place)


def _wait_for_ranks(bench: Bench, stage: Stage, place: Path, share: Shard) -> None:
    """By files, which wait for hours where a message would give up; what a rank has done stays done when it is killed.

    Each rank counts what it did itself; the stage counts what all did.
    """
    notes = [place / f"{share.among(rank, bench.ranks.world).name}.done" for rank in range(bench.ranks.world)]
    write_json(notes[bench.ranks.rank], dict(stage.counts))
    while not all(note.exists() for note in notes):
        bench.run.stop.check()
        time.sleep(_LOOK_S)
    counted = [read_json(note) for note in notes]
    stage.count(**{name: sum(one.get(name, 0) for one in counted) for one in counted for name in one})
