"""The five pipelines, each a short story of stages; what they share is told in the modules they call.

sft        data -> student
kd         data -> the teacher's distributions -> student
synthetic  data -> the teacher's answers -> student
dpo        data -> SFT student; answers -> judged pairs -> the reference's log-probabilities -> policy
self       data -> SFT student -> its own distributions -> student
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from joulelab.data.inputs import input_bill
from joulelab.distill.causal.config import TEACHER_PHASES, CausalSpec, judges
from joulelab.distill.causal.context import TRAIN, CausalContext
from joulelab.distill.causal.data import prepare_data
from joulelab.distill.causal.models import check_models
from joulelab.distill.causal.preference_data import judge_answers, make_pairs, preference_training, score_reference
from joulelab.distill.causal.quality import (
    Evaluation,
    check_questions,
    evaluate_model,
    held_out_loss,
    report_quality,
    require_better_than_unigram,
    warn_if_guessing,
)
from joulelab.distill.causal.students import (
    FINAL_MODEL,
    FINAL_POLICY,
    START,
    StudentSetup,
    StudentTraining,
    TrainingData,
    label_training,
    load_student,
    start_budget,
    train_student,
    training_budget,
)
from joulelab.distill.causal.synthetic_data import synthetic_documents
from joulelab.distill.causal.teacher import TeacherSource, cache_logits, distillation_data, generate_answers
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import RunContext
from joulelab.train.budget import require_energy_reading
from joulelab.train.parallel import process_group
from joulelab.zoo.pretrained import import_model_classes

Story = Callable[[CausalContext, Artifact], None]


def run_sft(run: RunContext) -> None:
    _run(run, sft)


def run_kd(run: RunContext) -> None:
    _run(run, kd)


def run_synthetic(run: RunContext) -> None:
    _run(run, synthetic)


def run_dpo(run: RunContext) -> None:
    _run(run, dpo)


def run_self(run: RunContext) -> None:
    _run(run, from_itself)


def _run(run: RunContext, story: Story) -> None:
    with process_group() as ranks:
        bench = CausalContext(run, cast(CausalSpec, run.spec), ranks)
        _require_what_comes(bench)
        data = prepare_data(bench)
        if bench.spec.until != "data":
            import_model_classes()
        if bench.spec.until == "student":
            story(bench, data)
        else:
            _one_step(bench, data, bench.spec.until)


def _require_what_comes(bench: CausalContext) -> None:
    """Before anything is computed: that the last stage can do what the settings ask of it."""
    spec = bench.spec
    check_models(spec)
    if spec.until in ("teacher", "student"):
        check_questions(bench)
    if spec.until == "student":
        trainings = (spec.training, spec.start) if spec.pipeline in ("dpo", "self") else (spec.training,)
        require_energy_reading(bench.run, *trainings, energy_j=spec.budget.energy_j)
    if spec.teacher.server is not None and spec.quality.against_teacher is None:
        bench.run.progress.say(
            f"the teacher's quality is not told: {spec.teacher.server} speaks in its place, and whether it serves "
            f"{spec.teacher.model} is not known here; quality.against_teacher=true asks the local weights"
        )


def sft(bench: CausalContext, data: Artifact) -> None:
    lesson = label_training(bench, bench.rows(data, TRAIN))
    student = _final(bench, data, FINAL_MODEL, lesson, [data.bill], {})
    _judged(bench, data, student)


def kd(bench: CausalContext, data: Artifact) -> None:
    voice = the_teacher(bench)
    _check_teacher(bench, data)
    cache = cache_logits(bench, data, voice) if bench.spec.distill.teacher == "cached" else None
    lesson = distillation_data(bench, bench.rows(data, TRAIN), cache, voice)
    parents = [data.bill, cache.bill if cache else voice.bill]
    distill = bench.spec.distill.model_dump(mode="json")
    student = _final(bench, data, FINAL_MODEL, lesson, parents, {"distill": distill})
    _judged(bench, data, student)


def synthetic(bench: CausalContext, data: Artifact) -> None:
    voice = the_teacher(bench)
    _check_teacher(bench, data)
    made = synthetic_documents(bench, data, generate_answers(bench, data, voice), voice)
    lesson = label_training(bench, bench.rows(made, TRAIN))
    student = _final(bench, data, FINAL_MODEL, lesson, [made.bill], {})
    _judged(bench, data, student)


def dpo(bench: CausalContext, data: Artifact) -> None:
    _check_teacher(bench, data)
    pairs = _pairs(bench, data)
    start = sft_student(bench, data)
    reference = score_reference(bench, pairs, start)
    lesson = preference_training(bench, pairs, reference, start)
    wanted = bench.spec.preferences.model_dump(mode="json", include={"loss", "beta", "shared_prompt"})
    policy = _final(bench, data, FINAL_POLICY, lesson, [reference.bill], {"preferences": wanted}, start)
    _judged(bench, data, policy)


def from_itself(bench: CausalContext, data: Artifact) -> None:
    """With alpha 1 the SFT student is no teacher, and this is plain further training."""
    start, rows, distill = sft_student(bench, data), bench.rows(data, TRAIN), bench.spec.distill
    itself = TeacherSource(START, start.key, lambda: load_student(start.folder).to(bench.device), start.bill)
    teaches = distill.alpha < 1
    cache = cache_logits(bench, data, itself) if teaches and distill.teacher == "cached" else None
    lesson = distillation_data(bench, rows, cache, itself) if teaches else label_training(bench, rows)
    parents = [data.bill, start.bill, *([cache.bill] if cache else [])]
    wanted = {"distill": distill.model_dump(mode="json")}
    goes_on = None if distill.begin_anew else start
    student = _final(bench, data, FINAL_MODEL, lesson, parents, wanted, goes_on, spent_on=start)
    _judged(bench, data, student)


def _one_step(bench: CausalContext, data: Artifact, until: str) -> None:
    """A step of an experiment by itself, or a share of it; whoever needs it finds it with its bill."""
    judging = until == "preferences"
    if until == "teacher":
        until, judging = TEACHER_PHASES.get(bench.spec.pipeline, "data"), judges(bench.spec)
        if bench.share is None:
            _tell_teacher_if_asked(bench, data)
        elif bench.share.number == 0:  # once for all tasks: a teacher that knows nothing is refused
            _check_teacher(bench, data)
    voice = the_teacher(bench)
    if until == "logits":
        cache_logits(bench, data, voice)
    elif until == "preferences" and bench.share is None:
        _pairs(bench, data)
    elif until in ("generation", "preferences"):
        answers = generate_answers(bench, data, voice)
        if judging:
            judge_answers(bench, answers, voice)


def _pairs(bench: CausalContext, data: Artifact) -> Artifact:
    voice = the_teacher(bench)
    if bench.spec.preferences.candidates_from == "teacher":
        return make_pairs(bench, generate_answers(bench, data, voice), voice)
    start = sft_student(bench, data)
    itself = TeacherSource(START, start.key, lambda: load_student(start.folder).to(bench.device), start.bill)
    return make_pairs(bench, generate_answers(bench, data, itself, role="student"), voice)


def the_teacher(bench: CausalContext) -> TeacherSource:
    name = bench.spec.teacher.model
    bill = input_bill(bench.run, "teacher", name, "model", role="teacher")
    return TeacherSource(name, bench.teacher_identity, bench.load_teacher, bill)


def sft_student(bench: CausalContext, data: Artifact) -> Artifact:
    """What dpo and self begin with: a student of its own bill, found by both where they share its settings."""
    course = StudentTraining(
        name=START,
        stage="student.sft",
        config=bench.spec.start or bench.spec.training,
        allowance=start_budget(bench.spec),
        inputs={},
        parents=[data.bill],
        lesson=label_training(bench, bench.rows(data, TRAIN)),
        held_out=held_out_loss(bench, data),
        shared=True,
        look_stage="student.sft-validate",  # others inherit its joules, and not those of this run's own student
    )
    return train_student(bench, course)


def _final(
    bench: CausalContext,
    data: Artifact,
    name: str,
    lesson: Callable[[StudentSetup], TrainingData],
    parents: Sequence[Bill],
    inputs: Mapping[str, object],
    start: Artifact | None = None,
    spent_on: Artifact | None = None,
) -> Artifact:
    """The student that the run is for: trained anew in every run, its joules are what the run is about."""
    course = StudentTraining(
        name=name,
        stage="student.train",
        config=bench.spec.training,
        allowance=training_budget(bench, parents, start or spent_on),
        inputs=inputs,
        parents=parents,
        lesson=lesson,
        held_out=held_out_loss(bench, data),
        start=start,
    )
    return train_student(bench, course)


def _judged(bench: CausalContext, data: Artifact, student: Artifact) -> None:
    teacher = _tell_teacher_if_asked(bench, data)
    found = evaluate_model(bench, "student", data, lambda: load_student(student.folder).to(bench.device), student.bill)
    report_quality(bench.run, "student", found, teacher)
    warn_if_guessing(bench, found, data)


def _tell_teacher_if_asked(bench: CausalContext, data: Artifact) -> Evaluation | None:
    if not bench.spec.asks_teacher:
        return None
    found = _examined_teacher(bench, data, the_teacher(bench))
    report_quality(bench.run, "teacher", found)
    return found


def _check_teacher(bench: CausalContext, data: Artifact) -> None:
    """Before anything else is spent on it: a teacher that knows nothing is refused."""
    if bench.spec.asks_teacher:
        _examined_teacher(bench, data, the_teacher(bench))


def _examined_teacher(bench: CausalContext, data: Artifact, voice: TeacherSource) -> Evaluation:
    found = evaluate_model(bench, "teacher", data, voice.load, voice.bill, reuse=True)
    require_better_than_unigram(bench, found, data)
    return found
