"""The pipeline `distilbert`, as a story of stages: tokens, teacher, student, and what each of the two knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from torch import nn

from joulelab.data import sources
from joulelab.data.inputs import input_bill
from joulelab.data.masking import counts_file
from joulelab.distill.lm_batches import LmBatch, LmBatches
from joulelab.distill.lm_config import OF_TEACHER, LmDistillation, LmDistillSpec, LmTraining
from joulelab.distill.lm_data import LmCorpus, held_out_batches, make_task, open_corpus, sequences_of, write_corpus
from joulelab.distill.lm_heads import freeze_embeddings
from joulelab.distill.lm_models import load_lm, make_student, ready, require_fit, require_room
from joulelab.distill.lm_objective import FrozenTeacher, LmObjective, Scales
from joulelab.distill.lm_quality import Examiner, LmQuality, require_knowledge
from joulelab.evaluate.language import no_better_than_guessing
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import RunContext
from joulelab.runs.record import Result
from joulelab.train.budget import require_joules
from joulelab.train.devices import device_of
from joulelab.train.optim import compile_in_place
from joulelab.train.parallel import Ranks, joined
from joulelab.train.training_session import EvaluationPoint, TrainingJob, train_in_run
from joulelab.zoo.pretrained import import_models, load_tokenizer, save_hf, weights_identity

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def run_distilbert(run: RunContext) -> None:
    with joined() as ranks:
        lab = _Lab(run, cast(LmDistillSpec, run.spec), ranks)
        require_joules(run, lab.spec.teacher.training, lab.spec.training)
        data = lab.tokens()
        import_models()
        teacher = lab.checked_teacher(data) if lab.spec.has_teacher else None
        if lab.spec.until == "student":
            student = lab.student(data, teacher)
            lab.quality("student", str(student.folder), student.bill, data)


class Teacher:
    """Weights in a folder or by name, and the bill that comes with them."""

    def __init__(self, name: str, bill: Bill, kind: str) -> None:
        self.name, self.bill, self._kind = name, bill, kind

    def load(self, seed: int = 0) -> nn.Module:
        """A language head that the weights do not have is drawn from the seed."""
        return load_lm(self.name, self._kind, seed)


class _Lab:
    """One run's stages; each finds or makes one artefact."""

    def __init__(self, run: RunContext, spec: LmDistillSpec, ranks: Ranks) -> None:
        self.run = run
        self.spec = spec
        self.ranks = ranks
        self.device = device_of(spec.device, self.run)
        self.corpus_folder = Path()
        self.looked = 0
        self.last_looks: dict[str, LmQuality] = {}

    # data

    def tokens(self) -> Artifact:
        data, teacher = self.spec.data, self.spec.teacher
        parents = [input_bill(self.run, "texts", data.source, "text", role="data")]
        if data.token_counts:
            counted = str(counts_file(Path(data.token_counts)))
            parents.append(input_bill(self.run, "token counts", counted, "counts", role="data"))

        def make(folder: Path) -> None:
            with self.run.stage("data.preprocess", role="data", activity="preprocess") as stage:
                write_corpus(
                    folder,
                    data,
                    teacher.teacher_name,
                    teacher.teacher_type,
                    lambda samples, tokens: stage.count(samples=samples, tokens=tokens),
                )

        counts = sources.content_hash(counts_file(Path(data.token_counts))) if data.token_counts else ""
        inputs = {
            **data.model_dump(include={"source", "split", "validation_size"}),
            "counts": counts,
            "tokenizer": weights_identity(teacher.teacher_name),
        }
        made = self.run.artifact("data", kind="token-store", inputs=inputs, parents=parents, make=make)
        self.corpus_folder = made.folder
        return made

    @cached_property
    def corpus(self) -> LmCorpus:
        return open_corpus(self.corpus_folder, self.spec.data)

    @cached_property
    def examiner(self) -> Examiner:
        spec = self.spec
        batches = held_out_batches(self.corpus, spec.data, spec.distill, spec.eval_batch_size)
        return Examiner(batches, self.corpus, self.device, spec.training.precision, spec.chunk, self._tick)

    # teacher

    def checked_teacher(self, data: Artifact) -> Teacher:
        teacher = self.teacher(data)
        require_knowledge(self.quality("teacher", teacher.name, teacher.bill, data), teacher.name)
        return teacher

    def teacher(self, data: Artifact) -> Teacher:
        config = self.spec.teacher
        pretrained = input_bill(self.run, "pretrained teacher", config.teacher_name, "model", role="teacher")
        if config.training is None:
            return Teacher(config.teacher_name, pretrained, config.teacher_type)
        training = config.training

        def make(folder: Path) -> None:
            model = self._prepared(load_lm(config.teacher_name, config.teacher_type, config.seed))
            alone = self._alone(self.spec.distill)
            self._train("teacher", model, None, alone, training, config.seed)
            self._save(model, config.teacher_name, folder)

        shapes = self.spec.data.model_dump(mode="json", exclude={"source", "split"})
        masks = self._alone(self.spec.distill).model_dump(mode="json")
        inputs = {"teacher": config.model_dump(mode="json"), "data": shapes, "masks": masks}
        parents = [data.bill, pretrained]
        made = self.run.artifact("teacher", kind="language-teacher", inputs=inputs, parents=parents, make=make)
        return Teacher(str(made.folder), made.bill, config.teacher_type)

    # student

    def student(self, data: Artifact, teacher: Teacher | None) -> Artifact:
        spec = self.spec
        source = self._start(teacher)

        def make(folder: Path) -> None:
            said = teacher.load() if teacher is not None and spec.distill.needs_teacher else None
            whole = source.load(spec.seed) if source is not None else None
            model = make_student(spec.student, whole, self._vocab_size(said), spec.seed)
            del whole
            if said is not None:
                require_fit(model, said, same_width=spec.distill.alpha_cos > 0)
            freeze_embeddings(model, spec.distill.freeze_pos_embs, spec.distill.freeze_token_type_embds)
            model = self._prepared(model)
            frozen = self._frozen(said) if said is not None else None
            self._train("student", model, frozen, spec.distill, spec.training, spec.seed)
            self._save(model, spec.teacher.teacher_name, folder)

        wanted = {"student", "distill", "training", "seed", "data", "chunk"}
        inputs = spec.model_dump(mode="json", include=wanted)
        bills = [part.bill for part in (teacher, source) if part is not None]
        weights = spec.student.student_pretrained_weights
        if spec.student.layers is None and weights is not None:
            bills.append(input_bill(self.run, "student's weights", weights, "model", role="student"))
        unique = {bill.key: bill for bill in [data.bill, *bills]}
        # trained anew in every run: its joules are what the run is for
        return self.run.artifact(
            "final_model",
            kind="student",
            inputs=inputs,
            parents=list(unique.values()),
            make=make,
            reuse=False,
        )

    def _start(self, teacher: Teacher | None) -> Teacher | None:
        """Whose layers the student takes; nothing where it starts otherwise."""
        student, kind = self.spec.student, self.spec.teacher.teacher_type
        if student.layers is None:
            return None
        if student.layers_of == OF_TEACHER:
            return teacher
        bill = input_bill(self.run, "student's layers", student.layers_of, "model", role="student")
        return Teacher(student.layers_of, bill, kind)

    def _frozen(self, model: nn.Module) -> FrozenTeacher:
        config = self.spec.training
        dtype = HALF.get(config.precision) if self.spec.teacher.half_weights else None
        frozen = FrozenTeacher(self._prepared(model), dtype)
        compile_in_place(frozen.model, config.compile)
        return frozen

    # both

    def _train(
        self,
        who: str,
        model: nn.Module,
        teacher: FrozenTeacher | None,
        distill: LmDistillation,
        config: LmTraining,
        seed: int,
    ) -> None:
        sequences = sequences_of(self.corpus, self.corpus.train, self.spec.data)
        task = make_task(self.corpus, distill, distill.everywhere)
        batches = LmBatches(sequences, task, config.batch_size, seed, self.spec.data.group_by_size)
        scales = Scales.of(distill, task.targets_share(batches.lengths))
        if not (self.run.paths.checkpoints / f"{who}.train").exists():
            self._look(who, lambda: model, f"{who}.{self._what}.start")
        self.run.result(f"{who}.train.padded_share", Result(value=batches.padded_share))
        train_in_run(
            self.run,
            TrainingJob(
                stage=f"{who}.train",
                role=who,
                model=model,
                batches=batches,
                objective=LmObjective(model, teacher, scales, self.spec.chunk, config.compile),
                config=config,
                seed=seed,
                evaluate=lambda moment: self._look_on_the_way(who, model, moment),
                evaluate_stage=f"{who}.evaluate",
                ranks=self.ranks,
            ),
        )

    def quality(self, who: str, name: str, bill: Bill, data: Artifact) -> LmQuality:
        """Of a trained or named model, on held-out tokens; a teacher that others share is asked once."""
        spec = self.spec
        kind = spec.teacher.teacher_type if who == "teacher" else spec.student.student_type

        def make(place: Path) -> None:
            found = self.last_looks.get(who)  # the loop's last look is at the weights that were saved
            if found is None:
                found = self._look(who, lambda: self._prepared(load_lm(name, kind)), f"{who}.{self._what}")
            found.save(place)

        inputs = {
            "data": spec.data.model_dump(mode="json"),
            "masks": self._alone(spec.distill).model_dump(mode="json"),
            "precision": spec.training.precision,
        }
        made = self.run.artifact(
            f"{who}-quality",
            kind="quality",
            inputs=inputs,
            parents=[bill, data.bill],
            make=make,
            reuse=who == "teacher",
        )
        found = LmQuality.load(made.folder)
        self._tell(f"{who}.{self._what}", found)
        words = f", perplexity {found.perplexity:.1f}" if not spec.distill.mlm else ""
        self.run.progress.say(
            f"{who}: {found.loss:.3f} nats per held-out token{words} (by frequency {found.unigram:.3f})"
        )
        problem = no_better_than_guessing(found.loss, found.unigram) if who == "student" else None
        if problem is not None:
            self.run.warn(problem)
        return found

    def _look(self, who: str, load: Callable[[], nn.Module], name: str) -> LmQuality:
        """Loading is part of the stage: whoever finds what was told inherits what it took."""
        total = self.examiner.batches.batches_per_epoch
        with self.run.stage(f"{who}.evaluate", total, again=True, role=who, activity="evaluate") as stage:
            found = self._examined(load())
            stage.count(tokens=stage.counts.get("tokens", 0) + found.tokens)
        self._tell(name, found)
        return found

    def _look_on_the_way(self, who: str, model: nn.Module, moment: EvaluationPoint) -> float:
        found = self.last_looks[who] = self._examined(model)
        moment.stage.count(tokens=(1 + moment.looks) * found.tokens)  # one was before the first step
        return found.loss

    def _examined(self, model: nn.Module) -> LmQuality:
        self.looked = 0
        return self.examiner.examine(model)

    def _tell(self, name: str, found: LmQuality) -> None:
        self.run.result(name, Result(value=found.loss, lower_is_better=True))
        if not self.spec.distill.mlm:
            self.run.result(f"{name}.perplexity", Result(value=found.perplexity, lower_is_better=True))
        self.run.result("data.unigram_loss", Result(value=found.unigram))

    @property
    def _what(self) -> str:
        return "mlm_loss" if self.spec.distill.mlm else "clm_loss"

    def _tick(self, batch: LmBatch) -> None:
        self.looked += 1
        self.run.progress.advance(self.looked)

    def _prepared(self, model: nn.Module) -> nn.Module:
        require_room(model, self.spec.data.max_model_input_size, self.corpus.store.vocab_size)
        return ready(model, unpadded=self.spec.data.packing).to(self.device)

    def _save(self, model: nn.Module, tokenizer: str, folder: Path) -> None:
        """On every rank: the first one's folder is the run's, the others' are their own and go with them."""
        save_hf(model, load_tokenizer(tokenizer), folder)

    def _vocab_size(self, teacher: nn.Module | None) -> int:
        return self.corpus.store.vocab_size if teacher is None else int(teacher.config.vocab_size)  # type: ignore

    def _alone(self, distill: LmDistillation) -> LmDistillation:
        """The same masks, and tokens as the only thing to learn from."""
        off = {"alpha_ce": 0.0, "alpha_mse": 0.0, "alpha_cos": 0.0, "restrict_ce_to_mask": False}
        frozen = {"freeze_pos_embs": False, "freeze_token_type_embds": False}
        tokens = {"alpha_mlm": float(distill.mlm), "alpha_clm": float(not distill.mlm)}
        return distill.model_copy(update={**off, **frozen, **tokens})
