"""The five language-model pipelines, as recipes for the runner.

    sft         data -> student
    kd          data -> the teacher's logits -> student
    synthetic   data -> the teacher's answers -> filtered documents -> student
    dpo         data -> answers -> scores -> pairs; SFT student -> its log-probabilities -> policy
    self        data -> SFT student -> its own logits -> student

`until` may end a run at one phase of the teacher's work, and `shard` restrict it to a shard of that phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from joulelab.distill.causal.config import CausalSpec
from joulelab.distill.causal.data import check_chat_parts, prepare_data
from joulelab.distill.causal.generated_data import judge_answers, make_pairs, score_reference, synthetic_documents
from joulelab.distill.causal.models import TRAIN, CausalContext, check_models, check_tokenizers, load_student
from joulelab.distill.causal.objective import (
    StudentSetup,
    TrainingData,
    distillation_data,
    label_data,
    preference_data,
)
from joulelab.distill.causal.quality import (
    Evaluation,
    check_questions,
    evaluate_model,
    flag_chance_answers,
    held_out_loss,
    report_quality,
    require_better_than_unigram,
    warn_if_guessing,
)
from joulelab.distill.causal.students import (
    FINAL_MODEL,
    FINAL_POLICY,
    SFT_STUDENT,
    StudentTraining,
    start_budget,
    train_student,
    training_budget,
)
from joulelab.distill.causal.teacher import TeacherSource, cache_logits, generate_answers, pretrained_teacher
from joulelab.distill.runner import Runner, run_recipe
from joulelab.errors import refuse_all
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import RunContext


def run_sft(run: RunContext) -> None:
    run_recipe(run, SftRecipe)


def run_kd(run: RunContext) -> None:
    run_recipe(run, KdRecipe)


def run_synthetic(run: RunContext) -> None:
    run_recipe(run, SyntheticRecipe)


def run_dpo(run: RunContext) -> None:
    run_recipe(run, DpoRecipe)


def run_self(run: RunContext) -> None:
    run_recipe(run, SelfRecipe)


def model_checks(spec: CausalSpec) -> Iterator[Callable[[], object]]:
    """What the models' configurations, tokenizers and test questions tell, before a run starts."""
    yield lambda: check_models(spec)
    yield lambda: check_tokenizers(spec)
    yield lambda: check_chat_parts(spec)
    if spec.until in ("teacher", "train"):
        yield lambda: check_questions(spec)


class CausalRecipe:
    """What the five pipelines share; each adds what it needs of its teacher, and its student."""

    def __init__(self, runner: Runner[CausalSpec]) -> None:
        self.context = CausalContext(runner)
        self.spec = runner.spec
        self.runner = runner

    def check(self) -> None:
        spec = self.spec
        refuse_all(model_checks(spec))
        if spec.teacher.server is not None and spec.quality.against_teacher is None:
            self.runner.run.progress.write(
                f"the teacher is not evaluated: {spec.teacher.server} generates the answers, and the model that it "
                f"serves is unknown; quality.against_teacher=true evaluates the local weights of {spec.teacher.model}"
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
        report_quality(self.runner.run, "student", own, reference)
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
        report_quality(self.runner.run, "teacher", evaluation)
        flag_chance_answers(self.context, "teacher", evaluation)
        return evaluation

    def _evaluate_teacher(self, data: Artifact) -> Evaluation:
        teacher = pretrained_teacher(self.context)
        evaluation = evaluate_model(self.context, "teacher", data, teacher.load, teacher.bill, reuse=True)
        require_better_than_unigram(self.context, evaluation, data)
        return evaluation

    def pairs(self, data: Artifact) -> Artifact:
        context, teacher = self.context, pretrained_teacher(self.context)
        if self.spec.preferences.candidates_from == "teacher":
            return make_pairs(context, generate_answers(context, data, teacher), teacher)
        start = self.student_as_teacher(self.sft_student(data))
        return make_pairs(context, generate_answers(context, data, start, role="student"), teacher)

    # students

    def sft_student(self, data: Artifact) -> Artifact:
        """The student that dpo and self start from; an artifact that both share if its settings are equal."""
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

    def student_as_teacher(self, student: Artifact) -> TeacherSource:
        return TeacherSource(
            SFT_STUDENT, student.key, lambda: load_student(student.folder).to(self.context.device), student.bill
        )

    def final_student(
        self,
        data: Artifact,
        make_data: Callable[[StudentSetup], TrainingData],
        parents: Sequence[Bill],
        inputs: Mapping[str, object] | None = None,
        *,
        name: str = FINAL_MODEL,
        start: Artifact | None = None,
        budget_start: Artifact | None = None,
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
        inputs = {"distill": self.spec.distill.model_dump(mode="json")}
        return self.final_student(
            data, lambda setup: distillation_data(context, rows, source, teacher, setup), parents, inputs
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


class DpoRecipe(CausalRecipe):
    def teacher_outputs(self, data: Artifact) -> Artifact | None:
        """The preference pairs; None if this attempt ends before the student that writes the candidates."""
        self.check_teacher(data)
        if self.spec.preferences.candidates_from == "start" and not self.runner.run.includes("train"):
            return None
        return self.pairs(data)

    def student(self, data: Artifact, teacher: Artifact | None) -> Artifact:
        assert teacher is not None
        context, pairs, start = self.context, teacher, self.sft_student(data)
        reference = score_reference(context, pairs, start)
        inputs = self.spec.preferences.model_dump(mode="json", include={"loss", "beta", "shared_prompt"})
        return self.final_student(
            data, lambda setup: preference_data(context, pairs, reference, start, setup),
            [reference.bill], {"preferences": inputs}, name=FINAL_POLICY, start=start,
        )  # fmt: skip


class SelfRecipe(CausalRecipe):
    def student(self, data: Artifact, teacher: Artifact | None) -> Artifact:
        """With alpha 1 the SFT student is no teacher, and this is plain further training."""
        context, distill, start = self.context, self.spec.distill, self.sft_student(data)
        rows, source = context.rows(data, TRAIN), self.student_as_teacher(start)
        distills = distill.alpha < 1
        if distills:
            name = self.spec.student.model or self.spec.student.size or "the student"
            context.run.note(
                f"the teacher of this run is its own SFT student ({name}, artifact {SFT_STUDENT} of run "
                f"{start.bill.artifact.made_by}); teacher.model={self.spec.teacher.model} is not used"
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
