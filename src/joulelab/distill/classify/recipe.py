"""The pipelines `classify` (texts) and `fitnets-images`.

    classify         data.preprocess -> teacher.train -> teacher.evaluate -> teacher.logits (the cache)
                     -> student.hint (FitNets) -> student.train -> student.evaluate
    fitnets-images   teacher.train -> teacher.evaluate -> student.hint -> student.train -> student.evaluate

After every epoch a model is evaluated on validation samples, in the stages `teacher.validate` and `student.validate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from joulelab.data import sources
from joulelab.data.batches import BatchSource, BatchStream, ShuffledRows
from joulelab.distill.classify.config import ClassifySpec, CnnConfig, DistillConfig, FitnetsImagesSpec
from joulelab.distill.classify.data import (
    ImageSplits,
    Texts,
    find_images,
    open_cache,
    prepare_texts,
    write_cache,
)
from joulelab.distill.classify.objective import (
    LABELS_ONLY,
    ClassifyObjective,
    ForwardAdapter,
    HintObjective,
    ImageForward,
    LiveTeacher,
    TeacherSource,
    TextForward,
    build_cnn,
    build_student,
    freeze_teacher,
    hidden_index,
    hidden_width,
    load_connector,
    make_connector,
    make_regressor,
    require_positions,
    require_student,
    require_vocabulary,
    save_connector,
    student_layer_check,
    teacher_layer_check,
    truncated_body,
)
from joulelab.distill.runner import Inputs, Runner, StageSpec, run_recipe
from joulelab.errors import ConfigError, refuse_all
from joulelab.evaluate.classification import (
    Predictions,
    chance_note,
    load_predictions,
    majority_share,
    predict,
    predict_images,
    quality_results,
)
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import RunContext, Stage
from joulelab.train.config import TrainingConfig
from joulelab.train.fp8_products import check_products
from joulelab.train.optim import autocast, float32_matmul_precision
from joulelab.train.training_session import EvaluationPoint, TrainingJob
from joulelab.zoo.objective import Objective
from joulelab.zoo.pretrained import load_classifier, load_tokenizer, load_weights, save_hf, save_weights, seeded_init

IMAGE_TEACHER_SEED = 0  # separate from the run's, so that all students of a comparison share a teacher
_CACHE = StageSpec("teacher.logits", "teacher", "cache")
_SIGNIFICANCE = 1e-3


def run_classify(run: RunContext) -> None:
    run_recipe(run, TextRecipe)


def run_fitnets_images(run: RunContext) -> None:
    run_recipe(run, ImageRecipe)


def text_checks(spec: ClassifySpec) -> Iterator[Callable[[], object]]:
    """Check what the models' configurations and tokenizers show, before a run starts."""
    yield lambda: check_products(spec.device, spec.trainings)
    trains_student = spec.until == "train"
    models = [*([spec.teacher.source] if spec.has_teacher else []), *([spec.student.model] if trains_student else [])]
    for model in dict.fromkeys(models):
        yield lambda model=model: require_positions(model, spec.data.max_tokens)  # type: ignore[misc]
    if spec.has_teacher:
        yield lambda: teacher_layer_check(spec)
    if trains_student:
        yield lambda: require_student(spec)
        yield lambda: require_vocabulary(spec)
    if trains_student and spec.has_teacher and (spec.distill.needs_features or spec.student.hint is not None):
        yield lambda: student_layer_check(spec)


SpecT = TypeVar("SpecT", bound=ClassifySpec | FitnetsImagesSpec)
DataT = TypeVar("DataT", bound=Texts | ImageSplits)


@dataclass(frozen=True)
class Teacher:
    """A trained teacher, evaluated; `load` returns it on the device."""

    name: str
    bill: Bill
    load: Callable[[], nn.Module]
    test: Predictions
    validation: Predictions | None = None
    cache: Artifact | None = None

    @property
    def parent(self) -> Bill:
        """The bill of what the student learns from."""
        return self.bill if self.cache is None else self.cache.bill


@dataclass(frozen=True)
class TeacherSignal:
    """The teacher as the student's training uses it."""

    source: TeacherSource
    width: int
    """Width of its features."""


class _ClassificationRecipe(Generic[SpecT, DataT]):
    """What texts and images have in common: the student's two stages and the evaluation."""

    def __init__(self, runner: Runner[SpecT]) -> None:
        self.runner: Runner[SpecT] = runner
        self.spec: SpecT = runner.spec

    # what differs

    training: TrainingConfig
    hint: TrainingConfig | None
    validates: bool
    """After every epoch."""
    student_settings: set[str]
    """Settings that decide the student, besides its data and teacher."""
    make_connector: Callable[[int, int, bool], nn.Module]
    """(student's width, teacher's width, with a norm) -> connector."""

    def build(self, data: DataT) -> nn.Module:
        """The student as it starts, on the device."""
        raise NotImplementedError

    def pretrained(self) -> Sequence[Bill]:
        """Bills of the student's first weights."""
        return []

    def save(self, model: nn.Module, folder: Path) -> None:
        raise NotImplementedError

    def load_student(self, data: DataT, student: Artifact) -> nn.Module:
        raise NotImplementedError

    def forward_from(self, layer: int) -> ForwardAdapter:
        raise NotImplementedError

    def signal(self, data: DataT, teacher: Teacher) -> TeacherSignal:
        raise NotImplementedError

    def batches(self, data: DataT, batch_size: int, seed: int) -> BatchSource[Any]:
        raise NotImplementedError

    def validation(self, data: DataT, job: TrainingJob) -> tuple[Callable[[], Predictions], int]:
        """How the model is evaluated on the validation samples, and their tokens."""
        raise NotImplementedError

    def predictions(
        self, data: DataT, role: str, split: str, load: Callable[[], nn.Module], bill: Bill, reuse: bool = False
    ) -> Predictions:
        raise NotImplementedError

    # training

    def job(
        self,
        data: DataT,
        role: str,
        model: nn.Module,
        objective: Objective[Any],
        config: TrainingConfig,
        seed: int,
        name: str = "train",
    ) -> TrainingJob:
        batches = self.batches(data, config.batch_size, seed)
        return TrainingJob(f"{role}.{name}", role, model, batches, objective, config, seed)

    def validated(self, data: DataT, job: TrainingJob, teacher: Predictions | None = None) -> TrainingJob:
        """The job with evaluations on the validation samples, in the stage `<role>.validate`."""
        steps_per_epoch = -(-job.batches.batches_per_epoch // job.config.accumulate)
        every = job.config.evaluate_every_steps or (steps_per_epoch if self.validates else None)
        if every is None:
            return job
        predict_held_out, tokens = self.validation(data, job)
        stage = f"{job.role}.validate"
        return replace(
            job,
            config=job.config.model_copy(update={"evaluate_every_steps": every}),
            evaluate=EpochValidation(self.runner.run, stage, predict_held_out, tokens, steps_per_epoch, teacher),
            evaluate_stage=stage,
            evaluate_activity="validate",
        )

    # the student

    def student(self, data: DataT, teacher: Teacher | None) -> Artifact:
        distill: DistillConfig = self.spec.distill
        signal = self.signal(data, teacher) if teacher is not None else None
        parents = [*data.bills, *self.pretrained(), *([teacher.parent] if teacher else [])]
        hinted = self._hinted(data, signal, parents) if signal is not None and self.hint is not None else None

        def job() -> TrainingJob:
            model, connector = self._start(data, signal, hinted)
            forward = self._student_forward(model) if distill.needs_features else self.forward_from(-1)
            used = connector if distill.feat_beta > 0 else None
            objective = ClassifyObjective(distill, forward, signal.source if signal else None, used)
            plain = self.job(data, "student", model, objective, self.training, self.spec.seed)
            return self.validated(data, plain, teacher.validation if teacher else None)

        inputs = self.spec.model_dump(mode="json", include=self.student_settings)
        if hinted is not None:
            parents.append(hinted.bill)
        return self.runner.train_model("final_model", job, self.save, kind="student", inputs=inputs, parents=parents)

    def _hinted(self, data: DataT, signal: TeacherSignal, parents: Sequence[Bill]) -> Artifact:
        """FitNets' first stage; an artifact, so that a run interrupted in the second stage does not repeat it."""
        hint = self.hint
        assert hint is not None

        def make(folder: Path) -> None:
            model, connector = self._start(data, signal, None)
            assert connector is not None
            layer = hidden_index(model, self.spec.distill.s_layer, "distill.s_layer")
            objective = HintObjective(self.spec.distill, self.forward_from(layer), signal.source, connector)
            with truncated_body(model, layer) as body:
                self.runner.train(self.job(data, "student", body, objective, hint, self.spec.seed, "hint"))
            save_weights(model, folder)
            save_connector(connector, folder)

        inputs = self.spec.model_dump(mode="json", include=self.student_settings - {"training"})
        return self.runner.artifact(
            "hinted-student", make, kind="hinted-student", inputs=inputs, parents=parents, reuse=False
        )

    def _start(
        self, data: DataT, signal: TeacherSignal | None, hinted: Artifact | None
    ) -> tuple[nn.Module, nn.Module | None]:
        """Student and connector, initialized from the seed or as the hint stage left them."""
        distill: DistillConfig = self.spec.distill
        model = self.build(data)
        if signal is None or not (distill.feat_beta > 0 or self.hint):
            return model, None
        width = hidden_width(model, hidden_index(model, distill.s_layer, "distill.s_layer"))
        with seeded_init(self.spec.seed):
            connector = self.make_connector(width, signal.width, distill.feat_ln).to(self.runner.device)
        if hinted is not None:
            load_weights(model, hinted.folder)
            load_connector(connector, hinted.folder)
        return model, connector

    def _student_forward(self, model: nn.Module) -> ForwardAdapter:
        return self.forward_from(hidden_index(model, self.spec.distill.s_layer, "distill.s_layer"))

    # evaluation

    def evaluate(self, data: DataT, student: Artifact, teacher: Teacher | None) -> None:
        predicted = self.predictions(data, "student", "test", lambda: self.load_student(data, student), student.bill)
        report_quality(self.runner.run, "student", predicted, teacher.test if teacher else None)
        flag_chance_level(self.runner.run, "student", predicted)


class TextRecipe(_ClassificationRecipe[ClassifySpec, Texts]):
    student_settings = {"student", "distill", "training", "seed"}
    make_connector = staticmethod(make_connector)

    def __init__(self, runner: Runner[ClassifySpec]) -> None:
        super().__init__(runner)
        self.training, self.hint = self.spec.training, self.spec.student.hint
        self.validates = self.spec.validate_every_epoch

    def check(self) -> None:
        refuse_all(text_checks(self.spec))

    def data(self) -> Texts:
        return prepare_texts(self.runner)

    # the teacher

    def teacher(self, data: Texts) -> Teacher:
        config = self.spec.teacher
        if config.fine_tuned is not None:
            bill = self.runner.input_bill("fine-tuned teacher", config.fine_tuned, "fine-tuned-teacher", role="teacher")
            return self._given_teacher(data, config.fine_tuned, bill)
        return self._trained_teacher(data)

    def _given_teacher(self, data: Texts, name: str, bill: Bill) -> Teacher:
        """A classifier that the user named must beat chance before anything else is spent on it."""
        folder = sources.parse(name).path
        load = self._loader(data, name)
        validation = self._teacher_predictions(data, "validation", load, bill, folder)
        require_better_than_chance(validation, name)
        test = self._teacher_predictions(data, "test", load, bill, folder)
        return self._with_cache(data, Teacher(name, bill, load, test, validation))

    def _trained_teacher(self, data: Texts) -> Teacher:
        config, validates = self.spec.teacher, self.validates

        def job() -> TrainingJob:
            model = load_classifier(config.model, num_labels=data.classes, seed=config.seed).to(self.runner.device)
            objective = ClassifyObjective(LABELS_ONLY, self.forward_from(-1))
            job = self.job(data, "teacher", model, objective, config.training, config.seed)
            return self.validated(data, job)

        trained = self.runner.train_model(
            "teacher", job, lambda model, folder: save_hf(model, load_tokenizer(config.model), folder),
            kind="fine-tuned-teacher",
            inputs={**config.model_dump(mode="json"), "validated": validates},
            parents=[*data.bills, self.runner.input_bill("pretrained teacher", config.model, "model", role="teacher")],
            reuse=True,
        )  # fmt: skip
        name, bill, load = str(trained.folder), trained.bill, self._loader(data, str(trained.folder))
        near = trained.folder if trained.reused else None
        validation = self._teacher_predictions(data, "validation", load, bill, near) if validates else None
        test = self._teacher_predictions(data, "test", load, bill, near)
        if not trained.reused:
            report_quality(self.runner.run, "teacher", test)
        flag_chance_level(self.runner.run, "teacher", test)
        return self._with_cache(data, Teacher(name, bill, load, test, validation))

    def _loader(self, data: Texts, name: str) -> Callable[[], nn.Module]:
        return lambda: load_classifier(name, num_labels=data.classes, seed=0).to(self.runner.device)

    def _teacher_predictions(
        self, data: Texts, split: str, load: Callable[[], nn.Module], bill: Bill, folder: Path | None
    ) -> Predictions:
        """The run that trained the teacher has evaluated it: its predictions are next to it and need not be made
        again. `folder`: of a teacher from another run."""
        if folder is not None:
            near = self.runner.run.artifact_in(folder.parent / predictions_name("teacher", split))
            if near is not None and {bill.key, data.artifact.key} <= set(near.bill.artifact.parents):
                return load_predictions(near.folder)
        return self.predictions(data, "teacher", split, load, bill, reuse=True)

    def _with_cache(self, data: Texts, teacher: Teacher) -> Teacher:
        """Also in a run that ends with the teacher: the students of later runs use the cache."""
        if self.spec.distill.teacher != "cached":
            return teacher
        distill, precision, dataset = self.spec.distill, self.spec.training.precision, data.split("train")

        def work(folder: Path, stage: Stage) -> None:
            with float32_matmul_precision(precision), autocast(precision, self.runner.device):
                model = freeze_teacher(teacher.load(), self.runner.device, precision)
                write_cache(
                    folder, model, dataset,
                    forward=self._teacher_forward(model), batch_size=self.spec.eval_batch_size,
                    device=self.runner.device, count=self.runner.counter(stage),
                )  # fmt: skip

        inputs = {"t_layer": distill.t_layer, "feat_pool": distill.feat_pool, "precision": precision}
        cache = self.runner.make(
            "teacher-cache", _CACHE, work,
            kind="teacher-cache", inputs=inputs, parents=[teacher.bill, *data.bills], total=lambda: len(dataset),
        )  # fmt: skip
        return replace(teacher, cache=cache)

    def signal(self, data: Texts, teacher: Teacher) -> TeacherSignal:
        if teacher.cache is not None:
            cache = open_cache(teacher.cache.folder, data.split("train"))
            return TeacherSignal(cache, cache.width)
        config = self.spec.training
        model = freeze_teacher(teacher.load(), self.runner.device, config.precision, config.compile)
        forward = self._teacher_forward(model)
        return TeacherSignal(LiveTeacher(model, forward), hidden_width(model, forward.layer))

    def _teacher_forward(self, model: nn.Module) -> TextForward:
        distill = self.spec.distill
        return TextForward(hidden_index(model, distill.t_layer, "distill.t_layer"), distill.feat_pool)

    # the student

    def build(self, data: Texts) -> nn.Module:
        return build_student(self.spec.student, data.classes, self.spec.seed).to(self.runner.device)

    def pretrained(self) -> Sequence[Bill]:
        """A randomly initialized student has no pretrained weights."""
        if isinstance(self.spec.student.layers, int):
            return []
        return [self.runner.input_bill("pretrained student layers", self.spec.student.model, "model", role="student")]

    def forward_from(self, layer: int) -> ForwardAdapter:
        return TextForward(layer, self.spec.distill.feat_pool)

    def save(self, model: nn.Module, folder: Path) -> None:
        save_hf(model, load_tokenizer(self.spec.student.model), folder)

    def load_student(self, data: Texts, student: Artifact) -> nn.Module:
        return self._loader(data, str(student.folder))()

    def batches(self, data: Texts, batch_size: int, seed: int) -> BatchSource[Any]:
        return BatchStream(data.split("train"), batch_size, seed)

    def validation(self, data: Texts, job: TrainingJob) -> tuple[Callable[[], Predictions], int]:
        held_out, size, device = data.split("validation"), self.spec.eval_batch_size, self.runner.device

        def predict_held_out() -> Predictions:
            with autocast(job.config.precision, device):
                # not interruptible: the loop checks for a stop afterwards, where it can save a checkpoint
                return predict(job.model, held_out, size, device, lambda samples, tokens: None)

        return predict_held_out, held_out.tokens_total

    def predictions(
        self, data: Texts, role: str, split: str, load: Callable[[], nn.Module], bill: Bill, reuse: bool = False
    ) -> Predictions:
        dataset, size = data.split(split), self.spec.eval_batch_size

        def score(stage: Stage) -> Predictions:
            return predict(load(), dataset, size, self.runner.device, self.runner.counter(stage))

        made = self.runner.evaluate(
            predictions_name(role, split), role, score,
            kind="predictions", inputs={"split": split}, parents=[bill, *data.bills],
            total=lambda: len(dataset), reuse=reuse,
        )  # fmt: skip
        return load_predictions(made.folder)


class ImageRecipe(_ClassificationRecipe[FitnetsImagesSpec, ImageSplits]):
    """FitNets on feature maps of CNNs, which a 1x1 convolution maps to the teacher's channels."""

    student_settings = {"data", "student", "hint", "distill", "seed"}
    make_connector = staticmethod(make_regressor)

    def __init__(self, runner: Runner[FitnetsImagesSpec]) -> None:
        super().__init__(runner)
        self.training, self.hint, self.validates = self.spec.student.training, self.spec.hint, True

    def check(self) -> None:
        pass

    def data(self) -> ImageSplits:
        return find_images(self.runner)

    def teacher(self, data: ImageSplits) -> Teacher:
        config, seed = self.spec.teacher, IMAGE_TEACHER_SEED

        def job() -> TrainingJob:
            objective = ClassifyObjective(LABELS_ONLY, self.forward_from(-1))
            model = self._build(config, data, seed)
            return self.validated(data, self.job(data, "teacher", model, objective, config.training, seed))

        inputs: Inputs = {"data": self.spec.data.model_dump(), "model": config.model_dump(mode="json")}
        trained = self.runner.train_model(
            "teacher", job, save_weights, kind="image-teacher", inputs=inputs, parents=data.bills, reuse=True
        )

        def load() -> nn.Module:
            return self._load(config, data, trained, seed)

        test = self.predictions(data, "teacher", "test", load, trained.bill, reuse=True)
        report_quality(self.runner.run, "teacher", test)
        flag_chance_level(self.runner.run, "teacher", test)
        return Teacher(str(trained.folder), trained.bill, load, test)

    def signal(self, data: ImageSplits, teacher: Teacher) -> TeacherSignal:
        config = self.spec.student.training
        model = freeze_teacher(teacher.load(), self.runner.device, config.precision, config.compile)
        layer = hidden_index(model, self.spec.distill.t_layer, "distill.t_layer")
        return TeacherSignal(LiveTeacher(model, ImageForward(layer)), hidden_width(model, layer))

    def build(self, data: ImageSplits) -> nn.Module:
        return self._build(self.spec.student, data, self.spec.seed)

    def forward_from(self, layer: int) -> ForwardAdapter:
        return ImageForward(layer)

    def save(self, model: nn.Module, folder: Path) -> None:
        save_weights(model, folder)

    def load_student(self, data: ImageSplits, student: Artifact) -> nn.Module:
        return self._load(self.spec.student, data, student, seed=0)

    def batches(self, data: ImageSplits, batch_size: int, seed: int) -> BatchSource[Any]:
        return ShuffledRows(data.train.rows, batch_size, seed, data.train.batch)

    def validation(self, data: ImageSplits, job: TrainingJob) -> tuple[Callable[[], Predictions], int]:
        held_out = data.split("validation")
        return lambda: predict_images(job.model, held_out, self.runner.device), 0

    def predictions(
        self, data: ImageSplits, role: str, split: str, load: Callable[[], nn.Module], bill: Bill, reuse: bool = False
    ) -> Predictions:
        def score(stage: Stage) -> Predictions:
            predicted = predict_images(load(), data.split(split), self.runner.device)
            stage.count(samples=len(predicted.labels))
            return predicted

        made = self.runner.evaluate(
            predictions_name(role, split), role, score,
            kind="predictions", inputs={split: getattr(self.spec.data, split)}, parents=[bill, *data.bills],
            reuse=reuse,
        )  # fmt: skip
        return load_predictions(made.folder)

    def _build(self, config: CnnConfig, data: ImageSplits, seed: int) -> nn.Module:
        return build_cnn(config, data.train.classes, seed).to(self.runner.device)

    def _load(self, config: CnnConfig, data: ImageSplits, made: Artifact, seed: int) -> nn.Module:
        model = self._build(config, data, seed)
        load_weights(model, made.folder)
        return model


# quality: on validation samples after every epoch, on test samples at the end


@dataclass(frozen=True)
class EpochValidation:
    """Evaluates a model during its training; returns the held-out loss, which early stopping follows."""

    run: RunContext
    stage: str
    predict: Callable[[], Predictions]
    tokens: int
    """Tokens in the validation samples."""
    steps_per_epoch: int
    teacher: Predictions | None = None

    def __call__(self, point: EvaluationPoint) -> float:
        predicted = self.predict()
        figures = quality_results(predicted, self.teacher)
        epoch = point.step / self.steps_per_epoch
        numbers = {name: figure.value for name, figure in figures.items()}
        self.run.log(point.step, stage=self.stage, epoch=round(epoch, 3), loss=predicted.loss(), **numbers)
        self.run.result(f"{self.stage}.accuracy.epoch_{round(epoch, 2):g}", figures["accuracy"])
        samples = len(predicted.labels)
        point.stage.count(samples=point.evaluations * samples, tokens=point.evaluations * self.tokens)
        return predicted.loss()


def predictions_name(role: str, split: str) -> str:
    """Comparisons pair test predictions item by item; those on validation samples must not be taken for them."""
    return f"{role}-predictions" if split == "test" else f"{role}-{split}"


def report_quality(run: RunContext, role: str, predicted: Predictions, teacher: Predictions | None = None) -> None:
    figures = quality_results(predicted, teacher)
    for name, figure in figures.items():
        run.result(f"{role}.{name}", figure)
    text = f"{role} accuracy {100 * figures['accuracy'].value:.1f} % on {len(predicted.labels)} held-out samples"
    if "agreement" in figures:
        text += f"; same prediction as the teacher for {100 * figures['agreement'].value:.1f} %"
    run.progress.write(text)


def flag_chance_level(run: RunContext, role: str, predicted: Predictions) -> None:
    """A warning is enough for a model that was trained here: the user chose how little."""
    note = chance_note(predicted, role)
    if note is not None:
        run.warn(note)


# Is a classifier better than chance? A "fine-tuned" teacher whose head was never trained would teach noise. The
# baseline is to predict the most frequent class. If a share p of n samples is of that class, the number of correct
# predictions of the baseline is at most binomial(n, p); a teacher must be correct more often than that would be in all
# but one of a thousand cases.


def correct_needed(trials: int, chance: float) -> int:
    """The smallest number of correct predictions with a binomial tail probability of at most `_SIGNIFICANCE`; above
    `trials` if there is none."""
    tail = 0.0
    # From the top, so that the small probabilities of the tail are added before the large ones and
    # none is lost to rounding.
    for correct in range(trials, -1, -1):
        tail += _binomial(trials, correct, chance)
        if tail > _SIGNIFICANCE:
            return correct + 1
    return 0


def chance_problem(predicted: Predictions, name: str, split: str) -> str:
    """Why this teacher is not significantly better than the majority class on `split`; empty if it is."""
    accuracy = predicted.accuracy()
    trials, correct = len(predicted.labels), accuracy.successes or 0
    chance = majority_share(predicted)
    needed = correct_needed(trials, chance)
    if correct >= needed:
        return ""
    baseline = f"the majority-class baseline is {100 * chance:.1f} %; at least {needed} correct needed for p < 0.001"
    return (
        f"the teacher {name} is correct on {correct} of {trials} {split} texts ({100 * accuracy.value:.1f} %); "
        f"{baseline}"
    )


def require_better_than_chance(predicted: Predictions, name: str) -> None:
    """`predicted`: on the validation texts."""
    problem = chance_problem(predicted, name, "validation")
    if not problem:
        return
    below = predicted.accuracy().value < 1 - majority_share(predicted) - 0.1
    raise ConfigError(
        problem + (": the label order does not match" if below else ": its head is not trained for this task"),
        "name a classifier fine-tuned on these classes, or remove teacher.fine_tuned to train one here; with only "
        f"{len(predicted.labels)} validation texts a difference may not be significant (data.validation_size)",
    )


def _binomial(trials: int, correct: int, probability: float) -> float:
    if probability >= 1.0:
        return float(correct == trials)
    ways = math.lgamma(trials + 1) - math.lgamma(correct + 1) - math.lgamma(trials - correct + 1)
    return math.exp(ways + correct * math.log(probability) + (trials - correct) * math.log1p(-probability))
