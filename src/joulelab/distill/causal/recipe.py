"""The six language-model pipelines, as recipes for the runner.

    sft         data -> student
    kd          data -> the teacher's logits -> student
    synthetic   data -> the teacher's answers -> filtered documents -> student
    dpo         data -> answers -> scores -> pairs; SFT student -> its log-probabilities -> policy
    on-policy   data -> SFT student -> (its completions -> the teacher's scores -> training)*
    self        data -> SFT student -> its own logits -> student

`until` may end a run at one phase of the teacher's work, and `shard` restrict it to a shard of that phase.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from joulelab.data.chat.encoding import vocab_size_of
from joulelab.distill.causal.config import STARTS_FROM_SFT, CausalSpec
from joulelab.distill.causal.cross_tokenizer import check_tokenizers, cross_tokenizer_inputs, teacher_data
from joulelab.distill.causal.data import check_chat_parts, check_end_of_text, check_own_pairs, prepare_data
from joulelab.distill.causal.generated_data import (
    evaluate_preferences,
    judge_answers,
    make_pairs,
    own_pairs,
    score_reference,
    synthetic_documents,
)
from joulelab.distill.causal.generators import SERVER_KEY, TeacherSource, refuse_ranks
from joulelab.distill.causal.models import (
    TRAIN,
    CausalContext,
    check_codec,
    check_memory,
    check_models,
    load_student,
)
from joulelab.distill.causal.objective import (
    StudentSetup,
    TrainingData,
    distillation_data,
    label_data,
    preference_data,
)
from joulelab.distill.causal.on_policy import on_policy_data, refuse_unmetered_server
from joulelab.distill.causal.quality import (
    Evaluation,
    check_questions,
    evaluate_model,
    flag_chance_answers,
    held_out_loss,
    report_completions,
    report_quality,
    report_start,
    require_better_than_unigram,
    unigram_baseline,
    warn_if_guessing,
)
from joulelab.distill.causal.server_teacher import require_scores, unmetered_location
from joulelab.distill.causal.students import (
    FINAL_MODEL,
    FINAL_POLICY,
    SFT_STUDENT,
    StudentTraining,
    start_budget,
    train_student,
    trained_start,
    training_budget,
)
from joulelab.distill.causal.teacher import (
    StartingStudent,
    cache_logits,
    generate_answers,
    pretrained_teacher,
    prompt_bills,
    refuse_unknown_energy,
)
from joulelab.distill.runner import Runner, run_recipe
from joulelab.errors import refuse_all
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import RunContext
from joulelab.train.fp8_products import check_products
from joulelab.zoo.pretrained import load_tokenizer, weights_identity


def run_sft(run: RunContext) -> None:
    run_recipe(run, SftRecipe)


def run_kd(run: RunContext) -> None:
    run_recipe(run, KdRecipe)


def run_synthetic(run: RunContext) -> None:
    run_recipe(run, SyntheticRecipe)


def run_dpo(run: RunContext) -> None:
    run_recipe(run, DpoRecipe)


def run_on_policy(run: RunContext) -> None:
    run_recipe(run, OnPolicyRecipe)


def run_self(run: RunContext) -> None:
    run_recipe(run, SelfRecipe)


def model_checks(spec: CausalSpec) -> Iterator[Callable[[], object]]:
    """What the models' configurations, tokenizers and test questions tell, before a run starts."""
    yield lambda: check_models(spec)
    yield lambda: check_tokenizers(spec)
    if spec.caches_logits:
        yield lambda: check_codec(spec)
    if spec.until == "train":
        yield lambda: check_products(spec.device, spec.trainings)
    if spec.until == "train":
        yield lambda: check_memory(spec)
    yield lambda: check_chat_parts(spec)
    yield lambda: check_end_of_text(spec)
    yield lambda: check_own_pairs(spec)
    if spec.until in ("teacher", "train"):
        yield lambda: check_questions(spec)
    if spec.scores_on_server and spec.until == "train":
        server, model, key = str(spec.teacher.server), spec.teacher.model, os.environ.get(SERVER_KEY)
        yield lambda: require_scores(
            server, model, spec.on_policy.listed_tokens, vocab_size_of(load_tokenizer(spec.tokenizer)), key
        )
        if spec.budget.counts_teacher:
            yield lambda: refuse_unknown_energy(spec, unmetered_location(server, model, spec.energy.gpus, key))


class CausalRecipe:
    """What the six pipelines share; each adds what it needs of its teacher, and its student."""

    def __init__(self, runner: Runner[CausalSpec]) -> None:
        self.context = CausalContext(runner)
        self.spec = runner.spec
        self.runner = runner

    def check(self) -> None:
        spec = self.spec
        refuse_all(model_checks(spec))
        refuse_ranks(self.context)
        if spec.teacher.server is not None and spec.quality.against_teacher is None:
            self.runner.run.progress.write(
                f"the teacher is not evaluated, because it is unknown which weights {spec.teacher.server} serves; "
                f"quality.against_teacher=true evaluates the local weights of {spec.teacher.model}"
            )

    def data(self) -> Artifact:
        return prepare_data(self.context)

    def teacher(self, data: Artifact) -> Artifact | None:
        """What the student learns from, as an artifact; or, if the run ends here, the phase that `until` names."""
        if self.spec.until == "train":
            return self.teacher_outputs(data)
        self._teacher_phase(data)
        return None

    def teacher_outputs(self, data: Artifact) -> Artifact | None:
        return None

    def student(self, data: Artifact, teacher: Artifact | None) -> Artifact:
        raise NotImplementedError

    def load_student(self, data: Artifact, student: Artifact) -> nn.Module:
        return load_student(student.folder).to(self.context.device)

    def evaluate(self, data: Artifact, student: Artifact, teacher: Artifact | None) -> None:
        reference = self._report_teacher_quality(data)
        own = evaluate_model(self.context, "student", data, lambda: self.load_student(data, student), student.bill)
        unigram = unigram_baseline(self.context, data)
        report_quality(self.runner.run, "student", own, reference, unigram=unigram)
        if self.spec.pipeline in STARTS_FROM_SFT:
            report_start(self.context, data, self.starting_student(data), own, reference)
        warn_if_guessing(self.context, own, data)

    # the teacher

    def _teacher_phase(self, data: Artifact) -> None:
        """One phase of the teacher's work, or a shard of it; later runs find it with its bill."""
        context, shard, phase = self.context, self.runner.shard, self.spec.teacher_phase
        judges = self.spec.until == "preferences"
        if self.spec.until == "teacher":
            judges = self.spec.teacher_judges
            if shard is None:
                self._report_teacher_quality(data)
            elif shard.number == 0:  # once for all tasks
                self.check_teacher(data)
        teacher = pretrained_teacher(context)
        if phase == "logits":
            cache_logits(context, data, teacher)
        elif phase == "preferences" and shard is None:
            self.pairs(data)
        elif phase in ("generation", "preferences"):
            answers = generate_answers(context, data, teacher)
            if judges:
                judge_answers(context, answers, teacher)

    def check_teacher(self, data: Artifact) -> None:
        """Refuse a teacher that is no better than guessing before more energy is spent on it."""
        if self.spec.evaluates_teacher:
            self._evaluate_teacher(data)

    def _report_teacher_quality(self, data: Artifact) -> Evaluation | None:
        if not self.spec.evaluates_teacher:
            return None
        evaluation = self._evaluate_teacher(data)
        unigram = unigram_baseline(self.context, teacher_data(self.context, data))
        report_quality(self.runner.run, "teacher", evaluation, unigram=unigram)
        flag_chance_answers(self.context, "teacher", evaluation)
        return evaluation

    def _evaluate_teacher(self, data: Artifact) -> Evaluation:
        teacher, own = pretrained_teacher(self.context), teacher_data(self.context, data)
        evaluation = evaluate_model(self.context, "teacher", own, teacher.load, teacher.bill, reuse=True)
        require_better_than_unigram(self.context, evaluation.held_out, own)  # an evaluation of an earlier run, too
        return evaluation

    def pairs(self, data: Artifact) -> Artifact:
        if self.spec.own_pairs:
            return own_pairs(self.context, data)
        context, teacher = self.context, pretrained_teacher(self.context)
        if self.spec.preferences.candidates_from == "teacher":
            return make_pairs(context, generate_answers(context, data, teacher), teacher)
        start = self.student_as_teacher(self.starting_student(data))
        return make_pairs(context, generate_answers(context, data, start, role="student"), teacher)

    # students

    def starting_student(self, data: Artifact) -> StartingStudent:
        """The student that dpo, on-policy and self start from: named by the user, or trained on the data first."""
        spec = self.spec
        if spec.sft_first:
            return trained_start(self._sft_student(data))
        name = str(spec.student.model)
        bill = self.runner.input_bill("student's weights", name, "model", role="student")
        return StartingStudent(name, weights_identity(name), bill, 0, "student.model, as it is")

    def _sft_student(self, data: Artifact) -> Artifact:
        """An artifact that several pipelines share if its settings are equal."""
        context, rows = self.context, self.context.rows(data, TRAIN)
        training = StudentTraining(
            name=SFT_STUDENT,
            stage="student.sft",
            config=self.spec.start or self.spec.training,
            budget=start_budget(self.spec),
            inputs={},
            parents=[data.bill],
            make_data=lambda setup: label_data(context, rows, setup),
            held_out_loss=held_out_loss(context, data),
            shared=True,
            validate_stage="student.sft-validate",  # inherited with the SFT student, unlike the run's own validation
        )
        return train_student(context, training)

    def student_as_teacher(self, student: StartingStudent) -> TeacherSource:
        return TeacherSource(
            SFT_STUDENT, student.key, lambda: load_student(student.source).to(self.context.device), student.bill,
            self.context.tokenizer, weights=student.source,
        )  # fmt: skip

    def final_student(
        self,
        data: Artifact,
        make_data: Callable[[StudentSetup], TrainingData],
        parents: Sequence[Bill],
        inputs: Mapping[str, object] | None = None,
        *,
        name: str = FINAL_MODEL,
        start: StartingStudent | None = None,
        budget_start: StartingStudent | None = None,
    ) -> Artifact:
        """The student of the run, trained in every run and never reused.

        `start` is the SFT student that it continues; `budget_start` one whose training counts toward the budget.
        """
        training = StudentTraining(
            name=name,
            stage="student.train",
            config=self.spec.training,
            budget=training_budget(self.context, parents, start or budget_start),
            inputs=inputs or {},
            parents=parents,
            make_data=make_data,
            held_out_loss=held_out_loss(self.context, data),
            start=start,
        )
        return train_student(self.context, training)


class SftRecipe(CausalRecipe):
    def student(self, data: Artifact, teacher: Artifact | None) -> Artifact:
        rows = self.context.rows(data, TRAIN)
        return self.final_student(data, lambda setup: label_data(self.context, rows, setup), [data.bill])


class KdRecipe(CausalRecipe):
    def teacher_outputs(self, data: Artifact) -> Artifact | None:
        """The logit cache; None with a live teacher."""
        teacher = pretrained_teacher(self.context)
        self.check_teacher(data)
        return cache_logits(self.context, data, teacher) if self.spec.distill.teacher == "cached" else None

    def student(self, data: Artifact, teacher: Artifact | None) -> Artifact:
        context, rows, source = self.context, self.context.rows(data, TRAIN), pretrained_teacher(self.context)
        parents = [data.bill, teacher.bill if teacher else source.bill]
        own = teacher_data(context, data)
        if own is not data:
            parents.append(own.bill)
        inputs = {"distill": self.spec.distill.model_dump(mode="json"), **cross_tokenizer_inputs(context)}
        return self.final_student(
            data, lambda setup: distillation_data(context, rows, source, teacher, setup, own), parents, inputs
        )


class SyntheticRecipe(CausalRecipe):
    def teacher_outputs(self, data: Artifact) -> Artifact:
        """The filtered answers, as documents."""
        context, teacher = self.context, pretrained_teacher(self.context)
        self.check_teacher(data)
        return synthetic_documents(context, data, generate_answers(context, data, teacher), teacher)

    def student(self, data: Artifact, teacher: Artifact | None) -> Artifact:
        assert teacher is not None
        rows = self.context.rows(teacher, TRAIN)
        return self.final_student(data, lambda setup: label_data(self.context, rows, setup), [teacher.bill])

    def evaluate(self, data: Artifact, student: Artifact, teacher: Artifact | None) -> None:
        super().evaluate(data, student, teacher)
        assert teacher is not None
        report_completions(self.context, teacher, lambda: self.load_student(data, student), student.bill)


class DpoRecipe(CausalRecipe):
    def data(self) -> Artifact:
        data = super().data()
        if self.spec.own_pairs and self.spec.until in ("preferences", "teacher"):  # there is no teacher's phase
            self.pairs(data)
        return data

    def teacher_outputs(self, data: Artifact) -> Artifact | None:
        """The preference pairs; None if this attempt ends before the student that writes the candidates."""
        self.check_teacher(data)
        if self.spec.preferences.candidates_from == "start" and not self.runner.run.includes("train"):
            return None
        return self.pairs(data)

    def student(self, data: Artifact, teacher: Artifact | None) -> Artifact:
        context, pairs = self.context, teacher or self.pairs(data)
        start = self.starting_student(data)
        reference = score_reference(context, pairs, start)
        inputs = self.spec.preferences.model_dump(mode="json", include={"loss", "beta", "shared_prompt"})
        return self.final_student(
            data, lambda setup: preference_data(context, pairs, reference, start.key, setup),
            [reference.bill], {"preferences": inputs}, name=FINAL_POLICY, start=start,
        )  # fmt: skip

    def evaluate(self, data: Artifact, student: Artifact, teacher: Artifact | None) -> None:
        super().evaluate(data, student, teacher)
        evaluate_preferences(self.context, teacher or self.pairs(data), self.starting_student(data), student)


class OnPolicyRecipe(CausalRecipe):
    def check(self) -> None:
        super().check()
        if self.spec.scores_on_server and self.spec.until == "train" and self.spec.budget.counts_teacher:
            refuse_unmetered_server(self.context)

    def teacher_outputs(self, data: Artifact) -> Artifact | None:
        """The teacher's completions, if some batches come from them; the student's are made and scored in training."""
        context, teacher = self.context, pretrained_teacher(self.context)
        self.check_teacher(data)
        if not self.spec.mixes_teacher_answers:
            return None
        return synthetic_documents(context, data, generate_answers(context, data, teacher), teacher)

    def student(self, data: Artifact, teacher: Artifact | None) -> Artifact:
        context, policy, source = self.context, self.spec.on_policy, pretrained_teacher(self.context)
        start = self.starting_student(data)
        others = (teacher or data) if policy.student_share < 1 else None
        rows = None if others is None else context.rows(others, TRAIN)
        inputs = {
            "on_policy": policy.model_dump(mode="json"),
            "generation": self.spec.generation.model_dump(mode="json", exclude={"prompts_from"}),
            **cross_tokenizer_inputs(context),
        }
        parents = [data.bill, *prompt_bills(context), source.bill, start.bill, *([teacher.bill] if teacher else [])]
        own = None if others is None else teacher_data(context, others)
        if own is not None and own is not others:
            parents.append(own.bill)
        return self.final_student(
            data, lambda setup: on_policy_data(context, source, rows, setup, own), parents, inputs, start=start
        )


class SelfRecipe(CausalRecipe):
    def student(self, data: Artifact, teacher: Artifact | None) -> Artifact:
        """With alpha 1 the SFT student is no teacher, and this is plain further training."""
        context, distill, start = self.context, self.spec.distill, self.starting_student(data)
        rows, source = context.rows(data, TRAIN), self.student_as_teacher(start)
        distills = distill.alpha < 1
        if distills:
            student = self.spec.student
            name = student.model or student.size or "the student"
            initial = student.layers is not None or student.teacher_embeddings
            use = "used for its initial weights only" if initial else "not used"
            context.run.note(
                f"the teacher of this run is its own SFT student ({name}, {start.made_by}); "
                f"teacher.model={self.spec.teacher.model} is {use}"
            )
        cache = cache_logits(context, data, source) if distills and distill.teacher == "cached" else None

        def make_data(setup: StudentSetup) -> TrainingData:
            if distills:
                return distillation_data(context, rows, source, cache, setup)
            return label_data(context, rows, setup)

        parents = [data.bill, start.bill, *([cache.bill] if cache else [])]
        return self.final_student(
            data, make_data, parents, {"distill": distill.model_dump(mode="json")},
            start=None if distill.begin_anew else start, budget_start=start,
        )  # fmt: skip
