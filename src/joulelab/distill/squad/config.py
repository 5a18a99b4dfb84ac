"""Settings of the pipeline `squad`; importable without torch, so that a login node can check them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from joulelab.data import sources
from joulelab.data.splits import SPLITS, split_of, split_word, text_id
from joulelab.data.squad.questions import SYNTHETIC, Question, parse_squad, read_squad, synthetic_document
from joulelab.distill.config import DistillSection, DistillSpec, TeacherSection
from joulelab.errors import ConfigError
from joulelab.runs.spec import Section, user_path
from joulelab.train.config import PipelineTraining, TrainingConfig

# [CLS] question [SEP] paragraph [SEP]; RoBERTa has one more
_MOST_SPECIAL_TOKENS = 4
_SYNTHETIC_VALIDATION_SEED = 1


class SquadData(Section):
    """Questions on paragraphs, and how a paragraph is cut into windows."""

    aliases: ClassVar = {"train": "train_file", "validation": "validation_file", "test": "test_file"}

    source: str | None = None
    """A folder with files train*.json, validation*.json (or dev*.json) and test*.json in SQuAD's format, instead of
    setting each file."""
    train_file: str = SYNTHETIC
    """A JSON file in SQuAD's format to train on (data.train); or `synthetic`: short stories generated from a seed."""
    validation_file: str = SYNTHETIC
    """A JSON file in SQuAD's format for evaluation during training (data.validation), and for reported quality where
    there is no test file. `synthetic`: other paragraphs; with your own training file, a tenth of its paragraphs by
    hash."""
    test_file: str | None = None
    """A JSON file in SQuAD's format on which quality is reported (data.test); null: the validation questions."""
    version_2: bool = False
    """Whether there are questions that the paragraph does not answer (SQuAD 2.0)."""
    synthetic_train: int = Field(80, ge=1)
    """Paragraphs of `synthetic` to train on; each has 4 questions (6 with version_2)."""
    synthetic_validation: int = Field(40, ge=1)
    """Paragraphs of `synthetic` on which quality is reported."""
    max_seq_length: int = Field(384, ge=16)
    """Maximum tokens in a window: question, paragraph and special tokens."""
    doc_stride: int = Field(128, ge=1)
    """Tokens of the paragraph between the starts of two windows."""
    max_query_length: int = Field(64, ge=1)
    """Longer questions are truncated to this many tokens."""

    @model_validator(mode="after")
    def _windows_meet(self) -> Self:
        room = self.max_seq_length - self.max_query_length - _MOST_SPECIAL_TOKENS
        if room < self.doc_stride:
            raise ValueError(
                f"next to a question of max_query_length={self.max_query_length} a window of max_seq_length="
                f"{self.max_seq_length} has room for {room} tokens of the paragraph; with doc_stride={self.doc_stride} "
                "some tokens would be in no window"
            )
        return self

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.source is not None and (self.train_file != SYNTHETIC or self.validation_file != SYNTHETIC):
            raise ValueError("source is a folder with all files; set it, or train, validation and test, not both")
        return self

    @model_serializer(mode="wrap")
    def _without_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Artifacts made before these settings existed keep their keys."""
        return {
            key: value for key, value in dump(self).items() if value is not None or key not in ("source", "test_file")
        }

    @property
    def is_own(self) -> bool:
        return self.source is not None or self.train_file != SYNTHETIC

    @property
    def files(self) -> dict[str, str]:
        """Split -> file, of the splits that the user has."""
        if self.source is None:
            named = {"train": self.train_file, "validation": self.validation_file, "test": self.test_file}
            return {split: file for split, file in named.items() if file is not None and file != SYNTHETIC}
        found: dict[str, list[str]] = {}
        for file in sorted(user_path(self.source).glob("*.json")):
            found.setdefault(split_word(file.name) or "", []).append(str(file))
        for split in SPLITS:
            if len(found.get(split, [])) > 1:
                raise ConfigError(f"{self.source} has several files for {split}: {', '.join(found[split])}", "name one")
        if "train" not in found:
            raise ConfigError(f"{self.source} has no file train*.json", "name it: data.train=FILE")
        return {split: files[0] for split, files in found.items() if split}

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "validation", *(["test"] if "test" in self.files else []))

    def train_questions(self) -> tuple[Question, ...]:
        if not self.is_own:
            return self._synthetic(self.synthetic_train, 0)
        questions = read_squad(self.files["train"], self.version_2)
        return questions if "validation" in self.files else self._hashed(questions, held_out=False)

    def validation_questions(self) -> tuple[Question, ...]:
        if not self.is_own and self.validation_file == SYNTHETIC:
            return self._synthetic(self.synthetic_validation, _SYNTHETIC_VALIDATION_SEED)
        if "validation" in self.files:
            return read_squad(self.files["validation"], self.version_2)
        return self._hashed(read_squad(self.files["train"], self.version_2), held_out=True)

    def test_questions(self) -> tuple[Question, ...]:
        return read_squad(self.files["test"], self.version_2)

    def questions(self, split: str) -> tuple[Question, ...]:
        make = {"train": self.train_questions, "validation": self.validation_questions, "test": self.test_questions}
        return make[split]()

    def notes(self) -> list[str]:
        if not self.is_own or "validation" in self.files:
            return []
        return [f"{self.files['train']}: no validation questions; a tenth of its paragraphs is held out by hash"]

    def duplicates(self) -> int:
        """Held-out questions that are also trained on, with the same paragraph."""
        trained = {(text_id(question.text), text_id(question.context)) for question in self.train_questions()}
        held_out = self.questions(self.splits[-1])
        return sum((text_id(question.text), text_id(question.context)) in trained for question in held_out)

    def _hashed(self, questions: tuple[Question, ...], held_out: bool) -> tuple[Question, ...]:
        """By paragraph: two questions on one paragraph are never in different splits."""
        chosen = tuple(q for q in questions if (split_of(text_id(q.context)) == "validation") == held_out)
        if not chosen:
            raise ConfigError(
                f"{self.files['train']} has too few paragraphs to hold some out for validation",
                "provide the questions: data.validation=FILE",
            )
        return chosen

    def _synthetic(self, paragraphs: int, seed: int) -> tuple[Question, ...]:
        return parse_squad(synthetic_document(paragraphs, seed, self.version_2), SYNTHETIC, self.version_2)


class QaTeacher(TeacherSection):
    """The large model, already trained to answer questions or fine-tuned in a metered stage."""

    model: str = "sample:minilm"
    """`sample:minilm`, a local folder or a hub id of an encoder."""
    fine_tune: bool = True
    """Train it on the same questions first; false uses it as it is, and refuses a model without a trained head."""
    training: PipelineTraining = PipelineTraining()
    """How it is fine-tuned."""


class QaStudent(Section):
    """The small model."""

    renamed: ClassVar = {"init": "model"}

    model: str = "sample:minilm"
    """`sample:minilm`, a local folder (for example a distilled student) or a hub id; a missing head is initialized from
    the seed."""
    layers: tuple[int, ...] | None = None
    """Layers taken from it, counted from 0; null: all."""


class QaDistill(DistillSection):
    """loss = alpha_ce T^2 KL + alpha_squad CE, each the mean of start and end; a term with weight 0 is not computed."""

    alpha_ce: float = Field(0.5, ge=0)
    """Weight of the teacher's start and end distributions; 0 needs no teacher."""
    alpha_squad: float = Field(0.5, ge=0)
    """Weight of the marked answers."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if self.alpha_ce == 0 and self.alpha_squad == 0:
            raise ValueError("alpha_ce and alpha_squad are both 0: there is nothing to learn from")
        return self

    @property
    def needs_teacher(self) -> bool:
        return self.alpha_ce > 0


class QaEvaluation(Section):
    """How an answer is found from the model's scores."""

    n_best_size: int = Field(20, ge=1)
    """Number of best start and end positions that are paired in each window; also the number of answers listed per
    question."""
    max_answer_length: int = Field(30, ge=1)
    """Maximum tokens in an answer."""
    null_score_diff_threshold: float = 0.0
    """With version_2: "no answer" is predicted if its score exceeds the best span's score by more than this."""


class SquadSpec(DistillSpec):
    """Question answering: DistilBERT's second step, on files in SQuAD's format."""

    renamed: ClassVar = {"evaluation.batch_size": "eval_batch_size"}

    data: SquadData = SquadData()
    """Questions, paragraphs, answers."""
    teacher: QaTeacher = QaTeacher()
    """The teacher."""
    student: QaStudent = QaStudent()
    """The student."""
    distill: QaDistill = QaDistill()
    """What the student learns from."""
    training: PipelineTraining = PipelineTraining()
    """How the student is trained."""
    evaluation: QaEvaluation = QaEvaluation()
    """How answers are found and scored."""

    @property
    def has_teacher(self) -> bool:
        return self.until == "teacher" or self.distill.needs_teacher

    @property
    def trainings(self) -> tuple[TrainingConfig, ...]:
        fine_tunes = self.has_teacher and self.teacher.fine_tune
        return (*([self.teacher.training] if fine_tunes else []), self.training)

    def checks(self) -> Iterator[Callable[[], object]]:
        yield from super().checks()
        # takes seconds at most, and a wrong answer would otherwise fail the run after the model was loaded
        yield self.data.train_questions
        yield self.data.validation_questions
        yield self._check_test
        for model in dict.fromkeys((self.student.model, *([self.teacher.model] if self.has_teacher else []))):
            yield lambda model=model: _require_model(model)  # type: ignore[misc]

    def _check_test(self) -> None:
        if "test" in self.data.files:
            self.data.test_questions()


def _require_model(name: str) -> None:
    if sources.parse(name).kind == "file":
        raise ConfigError(f"{name} is a file; expected a model's folder, a hub id or a sample")
