"""Settings that all distillation pipelines share; importable without torch, so that a login node can check them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar

from pydantic import Field, field_validator

from joulelab import lookup
from joulelab.errors import NotFoundError
from joulelab.runs import environment
from joulelab.runs.phases import RENAMED_PHASES, Phase
from joulelab.runs.spec import LARGEST_SEED, Section, user_path
from joulelab.train.config import PipelineTraining, Precision, TrainingConfig, TrainingRunSpec

Device = Literal["auto", "cpu", "cuda"]
SectionT = TypeVar("SectionT", bound=Section)


class DistillSpec(TrainingRunSpec):
    """A run that prepares data, runs or trains a teacher, trains a student and evaluates it.

    A pipeline adds the sections `data`, `teacher`, `student`, `distill` and `training`.
    """

    renamed_values: ClassVar = {"until": RENAMED_PHASES}

    until: Phase = "train"
    """Last phase of the run: `data`, `teacher` (with its cache) or `train`. Later runs reuse what this one made, with
    its energy."""
    device: Device = "auto"
    """Device to compute on; auto uses a GPU if there is one."""
    eval_batch_size: int = Field(32, ge=1)
    """Batch size for evaluation and caching."""

    evaluators: tuple[str, ...] = ()
    """Further evaluators of the student: `size`, or your own file `./my_evaluator.py` that defines `evaluate`."""

    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers")
    """Packages without which no stage can run."""

    @field_validator("evaluators")
    @classmethod
    def _known_evaluators(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        """Files by their absolute path: a job may run in another directory."""
        files = {name: user_path(name).absolute() for name in names if name.endswith(".py")}
        try:
            for name in names:
                if name not in files:
                    lookup.EVALUATORS.require(name)
        except NotFoundError as error:
            raise ValueError(f"{error.message}; {error.hint}") from None
        return tuple(dict.fromkeys(str(files.get(name, name)) for name in names))

    def for_this_machine(self) -> Self:
        return _with_precision(self, "bf16" if environment.has_bf16_cores(self.device) else "fp32")

    def require_packages(self) -> None:
        lookup.require_packages("this run", *self.requires)

    def checks(self) -> Iterator[Callable[[], object]]:
        yield lambda: require_trackers(self.trainings)
        yield self.require_evaluators

    def require_evaluators(self) -> None:
        for name in self.evaluators:
            if name.endswith(".py") and not Path(name).is_file():
                raise NotFoundError(f"there is no file {name}", "evaluators: name a built-in one or a .py file")


class LanguageModelSpec(DistillSpec):
    """A student that predicts tokens of a vocabulary."""

    chunk: int = Field(4096, ge=1)
    """Tokens whose distributions over the vocabulary exist at a time; more is faster until memory is short."""


class TeacherSection(Section):
    """A pretrained teacher, by name."""

    model: str
    """`sample:minilm`, a local folder or a hub id."""
    seed: int = Field(0, ge=0, le=LARGEST_SEED)
    """Seed of the teacher's training; separate from the run's, so that all students of a comparison share a teacher."""


class DistillSection(Section):
    """Terms of the student's loss and their weights."""

    aliases: ClassVar = {"kd_T": "temperature"}

    temperature: float = Field(2.0, gt=0, allow_inf_nan=False)
    """Temperature of the teacher's and the student's distributions in the teacher's term (kd_T)."""


class LabelsAndTeacherSection(DistillSection):
    """loss = alpha CE + (1 - alpha) T^2 KL + ..."""

    aliases: ClassVar = {"kd_alpha": "alpha", "kd_T": "temperature"}

    alpha: float = Field(0.5, ge=0, le=1)
    """Weight of the labels, or of the data's own tokens (kd_alpha); 0 uses the teacher alone, 1 turns it off."""


def _with_precision(section: SectionT, precision: Precision) -> SectionT:
    """The section with this precision in every training whose precision is `auto`."""
    changed: dict[str, Section] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, PipelineTraining):
            changed[name] = value.with_precision(precision)
        elif isinstance(value, Section):
            changed[name] = _with_precision(value, precision)
    return section.model_copy(update=changed)


def require_trackers(trainings: Iterable[TrainingConfig]) -> None:
    for training in trainings:
        training.require_packages()
        for name in training.stats:
            lookup.TRAINER_STATS.require(name)
