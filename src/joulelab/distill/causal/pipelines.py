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
from joulelab.distill.causal.answers import generated
from joulelab.distill.causal.bench import TRAIN, Bench
from joulelab.distill.causal.budgets import for_start, for_training
from joulelab.distill.causal.config import CausalSpec
from joulelab.distill.causal.data import tokenised
from joulelab.distill.causal.distributions import Voice, kd_lesson, logit_cache
from joulelab.distill.causal.judging import judged
from joulelab.distill.causal.pairs import preference_lesson, preference_pairs, reference_logs
from joulelab.distill.causal.quality import (
    Examined,
    examined,
    held_out_loss,
    require_knowledge,
    require_questions,
    tell,
    warn_of_guessing,
)
from joulelab.distill.causal.splitting import TEACHER_STEPS, judges
from joulelab.distill.causal.starts import require_models
from joulelab.distill.causal.students import (
    FINAL_MODEL,
    FINAL_POLICY,
    START,
    Course,
    Desk,
    Lesson,
    load_student,
    sft_lesson,
    trained,
)
from joulelab.distill.causal.synthetic_set import synthetic_documents
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import RunContext
from joulelab.train.budget import require_energy_reading
from joulelab.train.parallel import process_group
from joulelab.zoo.pretrained import import_model_classes

Story = Callable[[Bench, Artifact], None]


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
        bench = Bench(run, cast(CausalSpec, run.spec), ranks)
        _require_what_comes(bench)
        data = tokenised(bench)
        if bench.spec.until != "data":
            import_model_classes()
        if bench.spec.until == "student":
            story(bench, data)
        else:
            _one_step(bench, data, bench.spec.until)


def _require_what_comes(bench: Bench) -> None:
    """Before anything is computed: that the last stage can do what the settings ask of it."""
    spec = bench.spec
    require_models(spec)
    if spec.until in ("teacher", "student"):
        require_questions(bench)
    if spec.until == "student":
        trainings = (spec.training, spec.start) if spec.pipeline in ("dpo", "self") else (spec.training,)
        require_energy_reading(bench.run, *trainings, energy_j=spec.budget.energy_j)
    if spec.teacher.server is not None and spec.quality.against_teacher is None:
        bench.run.progress.say(
            f"the teacher's quality is not told: {spec.teacher.server} speaks in its place, and whether it serves "
            f"{spec.teacher.model} is not known here; quality.against_teacher=true asks the local weights"
        )


def sft(bench: Bench, data: Artifact) -> None:
    lesson = sft_lesson(bench, bench.rows(data, TRAIN))
    student = _final(bench, data, FINAL_MODEL, lesson, [data.bill], {})
    _judged(bench, data, student)


def kd(bench: Bench, data: Artifact) -> None:
    voice = the_teacher(bench)
    _check_teacher(bench, data)
    cache = logit_cache(bench, data, voice) if bench.spec.distill.teacher == "cached" else None
    lesson = kd_lesson(bench, bench.rows(data, TRAIN), cache, voice)
    parents = [data.bill, cache.bill if cache else voice.bill]
    distill = bench.spec.distill.model_dump(mode="json")
    student = _final(bench, data, FINAL_MODEL, lesson, parents, {"distill": distill})
    _judged(bench, data, student)


def synthetic(bench: Bench, data: Artifact) -> None:
    voice = the_teacher(bench)
    _check_teacher(bench, data)
    made = synthetic_documents(bench, data, generated(bench, data, voice), voice)
    lesson = sft_lesson(bench, bench.rows(made, TRAIN))
    student = _final(bench, data, FINAL_MODEL, lesson, [made.bill], {})
    _judged(bench, data, student)


def dpo(bench: Bench, data: Artifact) -> None:
    _check_teacher(bench, data)
    pairs = _pairs(bench, data)
    start = sft_student(bench, data)
    reference = reference_logs(bench, pairs, start)
    lesson = preference_lesson(bench, pairs, reference, start)
    wanted = bench.spec.preferences.model_dump(mode="json", include={"loss", "beta", "shared_prompt"})
    policy = _final(bench, data, FINAL_POLICY, lesson, [reference.bill], {"preferences": wanted}, start)
    _judged(bench, data, policy)


def from_itself(bench: Bench, data: Artifact) -> None:
    """With alpha 1 the SFT student is no teacher, and this is plain further training."""
    start, rows, distill = sft_student(bench, data), bench.rows(data, TRAIN), bench.spec.distill
    itself = Voice(START, start.key, lambda: load_student(start.folder).to(bench.device), start.bill)
    teaches = distill.alpha < 1
    cache = logit_cache(bench, data, itself) if teaches and distill.teacher == "cached" else None
    lesson = kd_lesson(bench, rows, cache, itself) if teaches else sft_lesson(bench, rows)
    parents = [data.bill, start.bill, *([cache.bill] if cache else [])]
    wanted = {"distill": distill.model_dump(mode="json")}
    goes_on = None if distill.begin_anew else start
    student = _final(bench, data, FINAL_MODEL, lesson, parents, wanted, goes_on, spent_on=start)
    _judged(bench, data, student)


def _one_step(bench: Bench, data: Artifact, until: str) -> None:
    """A step of an experiment by itself, or a share of it; whoever needs it finds it with its bill."""
    judging = until == "preferences"
    if until == "teacher":
        until, judging = TEACHER_STEPS.get(bench.spec.pipeline, "data"), judges(bench.spec)
        if bench.share is None:
            _tell_teacher_if_asked(bench, data)
        elif bench.share.number == 0:  # once for all tasks: a teacher that knows nothing is refused
            _check_teacher(bench, data)
    voice = the_teacher(bench)
    if until == "logits":
        logit_cache(bench, data, voice)
    elif until == "preferences" and bench.share is None:
        _pairs(bench, data)
    elif until in ("generation", "preferences"):
        answers = generated(bench, data, voice)
        if judging:
            judged(bench, answers, voice)


def _pairs(bench: Bench, data: Artifact) -> Artifact:
    voice = the_teacher(bench)
    if bench.spec.preferences.candidates_from == "teacher":
        return preference_pairs(bench, generated(bench, data, voice), voice)
    start = sft_student(bench, data)
    itself = Voice(START, start.key, lambda: load_student(start.folder).to(bench.device), start.bill)
    return preference_pairs(bench, generated(bench, data, itself, role="student"), voice)


def the_teacher(bench: Bench) -> Voice:
    name = bench.spec.teacher.model
    bill = input_bill(bench.run, "teacher", name, "model", role="teacher")
    return Voice(name, bench.teacher_identity, bench.load_teacher, bill)


def sft_student(bench: Bench, data: Artifact) -> Artifact:
    """What dpo and self begin with: a student of its own bill, found by both where they share its settings."""
    course = Course(
        name=START,
        stage="student.sft",
        config=bench.spec.start or bench.spec.training,
        allowance=for_start(bench.spec),
        inputs={},
        parents=[data.bill],
        lesson=sft_lesson(bench, bench.rows(data, TRAIN)),
        held_out=held_out_loss(bench, data),
        shared=True,
        look_stage="student.sft-validate",  # others inherit its joules, and not those of this run's own student
    )
    return trained(bench, course)


def _final(
    bench: Bench,
    data: Artifact,
    name: str,
    lesson: Callable[[Desk], Lesson],
    parents: Sequence[Bill],
    inputs: Mapping[str, object],
    start: Artifact | None = None,
    spent_on: Artifact | None = None,
) -> Artifact:
    """The student that the run is for: trained anew in every run, its joules are what the run is about."""
    course = Course(
        name=name,
        stage="student.train",
        config=bench.spec.training,
        allowance=for_training(bench, parents, start or spent_on),
        inputs=inputs,
        parents=parents,
        lesson=lesson,
        held_out=held_out_loss(bench, data),
        start=start,
    )
    return trained(bench, course)


def _judged(bench: Bench, data: Artifact, student: Artifact) -> None:
    teacher = _tell_teacher_if_asked(bench, data)
    found = examined(bench, "student", data, lambda: load_student(student.folder).to(bench.device), student.bill)
    tell(bench.run, "student", found, teacher)
    warn_of_guessing(bench, found, data)


def _tell_teacher_if_asked(bench: Bench, data: Artifact) -> Examined | None:
    if not bench.spec.asks_teacher:
        return None
    found = _examined_teacher(bench, data, the_teacher(bench))
    tell(bench.run, "teacher", found)
    return found


def _check_teacher(bench: Bench, data: Artifact) -> None:
    """Before anything else is spent on it: a teacher that knows nothing is refused."""
    if bench.spec.asks_teacher:
        _examined_teacher(bench, data, the_teacher(bench))


def _examined_teacher(bench: Bench, data: Artifact, voice: Voice) -> Examined:
    found = examined(bench, "teacher", data, voice.load, voice.bill, reuse=True)
    require_knowledge(bench, found, data)
    return found
