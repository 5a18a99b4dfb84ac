"""One runner for all distillation pipelines: data, teacher, student, evaluation.

A pipeline is a folder with a `Recipe`: what its data is, what its teacher does, how its student is trained, what is
evaluated. The runner walks the recipe and owns everything that pipelines have in common: input bills, artifacts, stages
with their role and activity, phases (`until`), shards, ranks, training and resuming. A recipe opens no stage and makes
no artifact by itself; it describes them to these methods:

    run_recipe(run, recipe)       the whole pipeline
    Runner.input_bill(...)        the energy bill of a model or data set that the user named
    Runner.make(...)              an artifact made in one stage: prepared data, a teacher's cache
    Runner.train_model(...)       an artifact that is a trained model
    Runner.evaluate(...)          an artifact that holds an evaluation
    Runner.make_sharded(...)      an artifact whose work several tasks or ranks share
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import nn

from joulelab import clock, lookup
from joulelab.data import inputs as data_inputs
from joulelab.data import sources
from joulelab.data.splits import duplicate_note
from joulelab.distill.config import DistillSpec
from joulelab.evaluate.evaluators import FILE, EvaluatorResults, TrainedStudent, load_evaluator, run_evaluator
from joulelab.runs import environment
from joulelab.runs.artifacts import Artifact, Bill, code_version, read_bill
from joulelab.runs.context import RunContext, Stage
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.phases import ALL, PART, Shard
from joulelab.runs.record import Result, StageRole
from joulelab.runs.spec import RunSpec
from joulelab.train.budget import require_energy_reading
from joulelab.train.devices import resolve_device
from joulelab.train.optim import track_compilations
from joulelab.train.parallel import SINGLE_RANK, Ranks, process_group
from joulelab.train.training_session import TrainingJob, TrainingOutcome, require_replayed, train_in_run
from joulelab.zoo.pretrained import import_model_classes

SpecT = TypeVar("SpecT", bound=RunSpec)
DistillSpecT = TypeVar("DistillSpecT", bound=DistillSpec)
DataT = TypeVar("DataT")
TeacherT = TypeVar("TeacherT")

Inputs = Mapping[str, Any]
"""What decides an artifact besides its parents and the code version; part of its key."""
_RANK_POLL_S = 0.2


class Recipe(Protocol[DataT, TeacherT]):
    """One pipeline. The runner calls these methods in this order, each at most once."""

    def check(self) -> None:
        """Refuse settings that cannot work with the named models and files, before the first stage starts."""

    def data(self) -> DataT:
        """The prepared data, as an artifact or as the recipe's own type."""

    def teacher(self, data: DataT) -> TeacherT:
        """The teacher, trained or loaded, with everything that is asked of it before the student's training: an
        evaluation, a cache, completions. Called only if the settings need a teacher."""

    def student(self, data: DataT, teacher: TeacherT | None) -> Artifact:
        """The trained student. Called only if the run includes its last phase."""

    def evaluate(self, data: DataT, student: Artifact, teacher: TeacherT | None) -> None:
        """Evaluate the student and report its results, next to the teacher's where there is one."""

    def load_student(self, data: DataT, student: Artifact) -> nn.Module:
        """The trained student on the run's device, for the evaluators that the settings name."""


@dataclass(frozen=True)
class StageSpec:
    """What the record of a stage declares."""

    name: str
    role: str
    """`data`, `teacher` or `student`."""
    activity: str
    """`preprocess`, `train`, `cache`, `generate`, `judge`, `evaluate`, ..."""
    repeatable: bool = False
    """Opening it again adds a segment to the same stage."""


PREPROCESS = StageSpec("data.preprocess", "data", "preprocess")
_FP32_ON_A_GPU = (
    "training in fp32 uses no tensor cores: on an H200, BERT-base used 5 times the energy of 16-bit products; "
    "set training.precision=bf16"
)


def evaluation_stage(role: str) -> StageSpec:
    return StageSpec(f"{role}.evaluate", role, "evaluate", repeatable=True)


class Scores(Protocol):
    def save(self, folder: Path) -> None: ...


def run_recipe(run: RunContext, make_recipe: Callable[[Runner[DistillSpecT]], Recipe[DataT, TeacherT]]) -> None:
    """Walk a recipe from data to evaluation, or to the last phase.

    `until` in the settings ends the run after a phase; `run.includes` ends this attempt, and another one continues it.
    """
    with process_group() if run.spec.shares_ranks else nullcontext(SINGLE_RANK) as ranks:
        runner: Runner[DistillSpecT] = Runner(run, ranks)
        recipe, spec = make_recipe(runner), runner.spec
        # Everything that can be refused is refused here, before the first stage spends energy.
        recipe.check()
        for name in spec.evaluators:
            load_evaluator(name)
        require_energy_reading(run, *spec.trainings)
        require_replayed(run, *spec.trainings)
        in_fp32 = spec.until != "data" and any(training.precision == "fp32" for training in spec.trainings)
        if in_fp32 and environment.has_bf16_cores(spec.device):
            run.note(_FP32_ON_A_GPU)
        data = recipe.data()
        if spec.until == "data" or not run.includes("teacher"):
            return
        # Outside any stage: importing transformers takes longer than loading a small model and
        # would be billed to whichever model comes first.
        import_model_classes()
        teacher = recipe.teacher(data) if spec.has_teacher else None
        if spec.until == "train" and run.includes("train"):
            student = recipe.student(data, teacher)
            if run.includes("evaluate"):
                recipe.evaluate(data, student, teacher)
                for name in spec.evaluators:
                    _run_evaluator(runner, recipe, name, data, student)


def _run_evaluator(
    runner: Runner[DistillSpecT], recipe: Recipe[DataT, TeacherT], name: str, data: DataT, student: Artifact
) -> None:
    path = Path(name) if name.endswith(".py") else None

    def score(stage: Stage) -> EvaluatorResults:
        trained = TrainedStudent(recipe.load_student(data, student), data, runner.spec, runner.device)
        return run_evaluator(name, trained, stage)

    title = path.stem if path else name
    inputs = {"evaluator": sources.content_hash(path) if path else name}
    if origin := None if path else lookup.EVALUATORS.origin(name):
        inputs["package"] = origin
    made = runner.evaluate(
        f"student-{title}", "student", score, kind="evaluation", inputs=inputs, parents=[student.bill]
    )
    for key, result in read_json(made.folder / FILE).items():
        runner.run.result(f"student.{title}.{key}", Result.model_validate(result))


class Runner(Generic[SpecT]):
    """One run, as its recipe uses it."""

    def __init__(self, run: RunContext, ranks: Ranks = SINGLE_RANK) -> None:
        self.run = run
        self.spec = cast(SpecT, run.spec)
        self.ranks = ranks
        data_inputs.keep_recorded_commits(run)

    @cached_property
    def device(self) -> torch.device:
        """Resolved on first use: a run that only prepares data needs no GPU."""
        return resolve_device(self.spec.device, self.run)  # type: ignore[attr-defined]

    # inputs and artifacts

    def input_bill(self, name: str, source: str, kind: str, *, role: StageRole, server: str | None = None) -> Bill:
        """The bill of a model or data set that the user named, recorded in the lineage as `name`.

        `role` is what the run uses it as: `data`, `teacher` or `student`. `server`: see `data.inputs.input_bill`.
        """
        return data_inputs.input_bill(self.run, name, source, kind, role=role, server=server)

    def artifact(
        self,
        name: str,
        make: Callable[[Path], None],
        *,
        kind: str,
        inputs: Inputs,
        parents: Sequence[Bill],
        reuse: bool = True,
    ) -> Artifact:
        """The artifact of these inputs and parents, found in the store or made.

        `reuse=False` is for what the run is about, above all its student: it is made anew in every run, and only an
        earlier attempt of the same run is resumed.
        """
        # two bills of one artifact that differ in its use are both kept: `ancestry_of` decides on the role
        unique = [bill for number, bill in enumerate(parents) if bill not in parents[:number]]
        return self.run.artifact(name, kind=kind, inputs=inputs, parents=unique, make=make, reuse=reuse)

    def make(
        self,
        name: str,
        stage: StageSpec,
        work: Callable[[Path, Stage], None],
        *,
        kind: str,
        inputs: Inputs,
        parents: Sequence[Bill],
        total: Callable[[], int] | None = None,
        reuse: bool = True,
    ) -> Artifact:
        """An artifact whose work is one stage. Models are loaded inside `work`, so that loading is on its bill.

        `total` is the number of samples, for the progress display.
        """

        def make(folder: Path) -> None:
            with self.stage(stage, None if total is None else total()) as opened:
                work(folder, opened)

        return self.artifact(name, make, kind=kind, inputs=inputs, parents=parents, reuse=reuse)

    # stages

    @contextmanager
    def stage(self, stage: StageSpec, total: int | None = None) -> Iterator[Stage]:
        with self.run.stage(
            stage.name, total, again=stage.repeatable, role=stage.role, activity=stage.activity
        ) as opened:
            yield opened

    def train(self, job: TrainingJob) -> TrainingOutcome:
        """One training stage; resumed from its checkpoint where an earlier attempt was interrupted."""
        return train_in_run(self.run, replace(job, ranks=self.ranks))

    def train_model(
        self,
        name: str,
        job: Callable[[], TrainingJob],
        save: Callable[[nn.Module, Path], None],
        *,
        kind: str,
        inputs: Inputs,
        parents: Sequence[Bill],
        reuse: bool = False,
    ) -> Artifact:
        """A trained model as an artifact; `job` loads model and data and is called only if there is training to do."""

        def make(folder: Path) -> None:
            prepared = job()
            self.train(prepared)
            save(prepared.model, folder)

        inputs = {**inputs, **(self.ranks_of(name) if reuse else {})}
        return self.artifact(name, make, kind=kind, inputs=inputs, parents=parents, reuse=reuse)

    def ranks_of(self, name: str) -> Inputs:
        """For the key of a trained model that other runs may reuse: with several ranks a step has as many batches. An
        attempt on another number of ranks keeps what an earlier attempt of the run has trained."""
        own = read_bill(self.run.paths.artifacts / name)
        is_kept = own is not None and own.code_version == code_version()
        ranks = int(own.inputs.get("ranks", 1)) if own is not None and is_kept else self.ranks.world
        return {"ranks": ranks} if ranks > 1 else {}

    def evaluate(
        self,
        name: str,
        role: str,
        score: Callable[[Stage], Scores],
        *,
        kind: str,
        inputs: Inputs,
        parents: Sequence[Bill],
        total: Callable[[], int] | None = None,
        reuse: bool = False,
    ) -> Artifact:
        """An evaluation as an artifact, billed to the stage `<role>.evaluate`."""
        return self.make(
            name, evaluation_stage(role), lambda folder, stage: score(stage).save(folder),
            kind=kind, inputs=inputs, parents=parents, total=total, reuse=reuse,
        )  # fmt: skip

    def make_sharded(self, work: ShardedWork) -> Artifact:
        """The whole of `work`, or the shard that this run was given."""
        shard = self.shard
        if shard is None:
            return self._make_whole(work)
        key = work.key(self.run)
        whole = self.run.find_artifact(key, work.opens)
        if whole is not None:
            self.run.progress.write(f"{work.name}: already complete in {whole.bill.artifact.made_by}, nothing to shard")
            return whole
        return self.run.artifact(
            f"{work.name}-{shard.name}",
            kind=work.kind + PART,
            # The batch size is part of the key: units are batches, so another size is another
            # split, and shards of two splits would overlap.
            inputs={"whole": key, "share": str(shard), "at_once": work.batch_size},
            parents=work.parents,
            make=lambda folder: self._work_on(work, shard, folder, []),
        )

    @property
    def shard(self) -> Shard | None:
        """The shard of the teacher's work that this run does (`--shard 2/8`); None: all of it."""
        text = getattr(self.spec, "shard", None)
        return None if text is None else Shard.parse(text)

    # results

    def report(self, name: str, value: float, *, lower_is_better: bool = False) -> None:
        self.run.result(name, Result(value=value, lower_is_better=lower_is_better))

    def report_data(self, sizes: Mapping[str, int], notes: Sequence[str], duplicates: int) -> None:
        """The user's data in the record and on the terminal: rows of each split, how they were split, duplicates."""
        for name, rows in sizes.items():
            self.report(f"data.{name}_rows", float(rows))
        self.report("data.test_rows_in_train", float(duplicates), lower_is_better=True)
        for note in notes:
            self.run.note(note)
        warning = duplicate_note(duplicates, list(sizes.values())[-1])
        if warning is not None:
            self.run.warn(warning)

    def counter(self, stage: Stage) -> Callable[[int, int], None]:
        return progress_counter(self.run, stage)

    def reading(self, rows: int) -> None:
        """Show how many rows of a source were read; also ends the reading if the run was asked to stop."""
        self.run.progress.advance(rows, f"{rows:,} rows read")
        self.run.stop.check()

    def _make_whole(self, work: ShardedWork) -> Artifact:
        def make(folder: Path) -> None:
            parts = self.run.find_shards(work.key(self.run), include_damaged=work.accepts_damaged_shards)
            if parts:
                count = parts[0].bill.inputs["share"].partition("/")[2]
                self.run.progress.write(f"{work.name}: found {len(parts)} of {count} shards (their energy is included)")
            self._work_on(work, ALL, folder, [part.folder for part in parts])

        return self.run.artifact(
            work.name, kind=work.kind, inputs=work.inputs, parents=work.parents, make=make, opens=work.opens
        )

    def _work_on(self, work: ShardedWork, shard: Shard, folder: Path, others: Sequence[Path]) -> None:
        place = self.run.paths.checkpoints / work.stage.name  # outlives an interrupted attempt
        place.mkdir(parents=True, exist_ok=True)
        # Ranks divide a shard like shards divide the whole, without communication: each takes every
        # n-th unit of the same sorted list.
        own = shard.among(self.ranks.rank, self.ranks.world)
        compile_mode = self.spec.training.compile  # type: ignore[attr-defined]
        compiling = track_compilations(compile_mode, self.run.note_setup)
        with compiling, self.stage(work.stage) as stage:
            resumed, began_ns = any(place.glob("*")), clock.now().mono_ns
            remaining = work.begin(place, own, others)
            if resumed:  # finished units were kept; loading the model once more is start-up
                stage.resumed()
                self.run.note_setup("load", began_ns, clock.now().mono_ns)
            self.run.progress.stage(work.stage.name, -(-work.total() // own.of))
            stage.count(**remaining.counts)
            if remaining.work is not None:
                remaining.work(stage)
            elif shard != ALL and self.ranks.is_first and not remaining.counts:
                self.run.warn(
                    f"{work.name}: shard {shard} has no work, because there are fewer than {shard.of} batches of "
                    f"{work.batch_size}"
                )
            if self.ranks.world > 1:
                self._wait_for_ranks(stage, place, shard)
            work.join([*others, place], folder)
        self.ranks.barrier()
        if self.ranks.is_first:
            shutil.rmtree(place)

    def _wait_for_ranks(self, stage: Stage, place: Path, shard: Shard) -> None:
        """Through files: a collective operation would time out after minutes, and what a killed rank has finished must
        stay finished. Each rank counts its own work; the stage counts that of all."""
        world = self.ranks.world
        notes = [place / f"{shard.among(rank, world).name}.done" for rank in range(world)]
        write_json(notes[self.ranks.rank], dict(stage.counts))
        while not all(note.exists() for note in notes):
            self.run.stop.check()
            time.sleep(_RANK_POLL_S)
        counts = [read_json(note) for note in notes]
        stage.count(**{name: sum(one.get(name, 0) for one in counts) for one in counts for name in one})


def progress_counter(run: RunContext, stage: Stage) -> Callable[[int, int], None]:
    """To be called with the samples and tokens of this pass so far; the counts of earlier passes of the stage are kept.
    It also ends the pass if the run was asked to stop."""
    before = {"samples": 0, "tokens": 0, **stage.counts}

    def count(samples: int, tokens: int) -> None:
        stage.count(samples=before["samples"] + samples, tokens=before["tokens"] + tokens)
        run.progress.advance(samples)
        run.stop.check()

    return count


# Work that can be split: over tasks that never meet (`--shard 2/8`) and over the ranks that torchrun started.
#
#     a shard     does its units and leaves them in the store as a part with a bill
#     the whole   finds the shards in the store, does what is missing and joins them; the shards are on its bill
#     ranks       each does its part of either; all continue when the last one is done


@dataclass(frozen=True)
class RemainingWork:
    """What is left of a shard."""

    work: Callable[[Stage], None] | None
    """None: nothing is left."""
    counts: Mapping[str, int]
    """What earlier attempts of this run have done of it."""


@dataclass(frozen=True)
class ShardedWork:
    """A teacher's distributions, completions or judgments: an artifact made of independent units."""

    name: str
    """Name of the artifact."""
    kind: str
    stage: StageSpec
    inputs: Inputs
    parents: Sequence[Bill]
    batch_size: int
    """Rows or prompts in a unit; another batch size is another split."""
    total: Callable[[], int]
    """Rows or prompts of the whole; called only if there is work to do."""
    begin: Callable[[Path, Shard, Sequence[Path]], RemainingWork]
    """(folder, this shard, folders of other shards) -> remaining work; models are loaded only if there is any."""
    join: Callable[[Sequence[Path], Path], None]
    """Join folders that together hold all units into one folder."""
    opens: Callable[[Path], object] | None = None
    """Opens a finished artifact; fails if it is corrupted in a way that its list of files does not show."""
    accepts_damaged_shards: bool = False
    """`begin` checks the folders of others itself and uses the units that are intact."""

    def key(self, run: RunContext) -> str:
        """Key of the whole artifact, not of a shard. If a parent is a shard, the whole of that parent counts."""
        parents = [str(bill.inputs.get("whole", bill.key)) for bill in self.parents]
        return run.key_of(self.kind, self.inputs, parents)
