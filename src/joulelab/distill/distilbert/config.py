"""Settings of the pipeline `distilbert`; importable without torch, so that a login node can check them.

The names of the scripts that made DistilBERT are accepted, so that an old command can be copied word by word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from joulelab.data import sources
from joulelab.data.masking import require_counts
from joulelab.data.splits import OwnSplits, Size, is_own_data, is_place
from joulelab.data.text import check_documents
from joulelab.data.token_store import find_store, refuse_pickle
from joulelab.distill.config import DistillSection, LanguageModelSpec, TeacherSection
from joulelab.errors import ConfigError, NotFoundError
from joulelab.runs.spec import LARGEST_SEED, Section, user_path
from joulelab.train.config import PipelineTraining, TrainingConfig

StudentType = Literal["distilbert", "roberta", "gpt2"]
TeacherType = Literal["bert", "roberta", "gpt2"]
TEACHER_OF = {"distilbert": "bert", "roberta": "roberta", "gpt2": "gpt2"}
"""Both sides must read the same tokens, so each type of student has one type of teacher."""
OWN_HELD_OUT = 0.05
"""Share of the user's text that is held out, unless the settings state a size."""
_CONFIG_FILE = "name a config.json in Hugging Face's format"
OF_TEACHER = "teacher"
"""Where the student's layers come from unless another model is named."""


class LmTraining(PipelineTraining):
    """The loop as DistilBERT was trained: small micro-batches, many of them to a step."""

    epochs: float | None = Field(3.0, gt=0)
    """Passes over the training data (n_epoch); null: as many as the other budgets allow."""
    batch_size: int = Field(5, ge=1)
    """Sequences in a micro-batch."""
    accumulate: int = Field(50, ge=1)
    """Micro-batches per optimizer step (gradient_accumulation_steps); each token of the step has the same weight."""
    learning_rate: float = Field(5e-4, gt=0, allow_inf_nan=False)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's decay rates of the two moments."""
    eps: float = Field(1e-6, gt=0)
    """AdamW's term against division by zero (adam_epsilon)."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; not applied to biases and norms."""
    clip_norm: float | None = Field(5.0, gt=0)
    """Longer gradients are scaled down to this norm (max_grad_norm)."""
    warmup_share: float = Field(0.05, ge=0, lt=1)
    """Share of the budget over which the learning rate rises from 0 (warmup_prop)."""


class LmData(OwnSplits):
    """Text or tokens, and how they are cut into sequences."""

    source: str = "sample:reviews"
    """Text (`sample:reviews`, a file, a folder, a hub id), or a folder that `joulelab prepare binarize` wrote."""
    split: str = "train"
    """For text: documents to use, for example `train` or `train[:4000]`; held-out documents are taken from them."""
    validation_size: Size = 500
    """Documents held out for the validation loss, spread evenly over all of them: a number, or a share (0.05 or 5 %),
    which is the default for your own text."""
    token_counts: str | None = None
    """File that `joulelab prepare token-counts` wrote; null: counted over the training documents."""
    max_model_input_size: int = Field(512, ge=8)
    """Maximum tokens per sequence; longer documents are split."""
    min_tokens: int = Field(11, ge=0)
    """Sequences of this many tokens or fewer are dropped."""
    max_unknown_share: float = Field(0.5, gt=0, le=1)
    """Sequences with this share of unknown tokens, or more, are dropped."""
    group_by_size: bool = True
    """Batch sequences of similar length: padding uses energy and teaches nothing."""
    packing: bool = False
    """Concatenate documents and cut rows of exactly max_model_input_size tokens: no padding, one shape. Attention then
    crosses from one document to the next within a row."""

    @model_validator(mode="before")
    @classmethod
    def _share_of_own_text(cls, values: object) -> object:
        if not isinstance(values, Mapping) or not is_own_data(values.get("source"), values.get("train")):
            return values
        return {"validation_size": OWN_HELD_OUT, **values}

    @property
    def trained_on(self) -> str:
        """The text or token store to train on."""
        return self.train if self.train is not None and is_place(self.train) else self.source

    def check(self) -> None:
        """Refuse files without text, or without the named column, before a run starts."""
        for name in self.inputs().values():
            refuse_pickle(Path(name))
            check_documents(name, self.text_column)

    @field_validator("source")
    @classmethod
    def _converted_store(cls, source: str) -> str:
        """Older commands pass NAME.pickle; the converted store is NAME."""
        return str(find_store(Path(source))) if source.endswith(".pickle") else source


class LmTeacher(TeacherSection):
    """The large model."""

    aliases: ClassVar = {"teacher_type": "type", "teacher_name": "model"}

    type: TeacherType = "bert"
    """Its architecture (teacher_type)."""
    model: str = "google-bert/bert-base-uncased"
    """`sample:minilm`, a local folder or a hub id (teacher_name)."""
    training: LmTraining | None = None
    """Train it as a language model first, in a metered stage; needed for a model without a language head, such as
    MiniLM."""
    half_weights: bool = True
    """Where training.precision is bf16 or fp16, keep the frozen weights in it too: half the memory and traffic."""


class LmStudent(Section):
    """The small model: layers of its teacher, or a model by name, configuration or size."""

    aliases: ClassVar = {
        "student_type": "type",
        "student_pretrained_weights": "model",
        "student_config": "config",
        "student_size": "size",
    }
    alternatives: ClassVar = ("layers", "model", "config", "size")

    type: StudentType = "distilbert"
    """Its architecture (student_type)."""
    layers: tuple[int, ...] | None = None
    """Layers taken from the teacher, counted from 0, for example [0, 2, 4, 7, 9, 11] of BERT's twelve."""
    layers_of: str = OF_TEACHER
    """Model that `layers` are taken from: `teacher` (as this run has it), or another model by name, in which case the
    student inherits no energy from the teacher."""
    vocab_transform: bool = True
    """Also copy the layers of the language head."""
    model: str | None = None
    """Start from these weights: a folder or a hub id (student_pretrained_weights)."""
    config: str | None = None
    """Start from random weights in the size of this JSON file, Hugging Face's config.json (student_config)."""
    size: str | None = None
    """Start from random weights in this size of the zoo's model: `base`, `tiny` (student_size)."""

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        named = [name for name in self.alternatives if getattr(self, name) is not None]
        if len(named) != 1:
            found = " and ".join(named) or "none of them"
            raise ValueError(
                f"a student starts from exactly one of {', '.join(self.alternatives)}; the settings name {found}"
            )
        return self

    def read_config(self) -> dict[str, Any]:
        """The values in the file that `config` names."""
        file = user_path(str(self.config))
        if not file.is_file():
            raise NotFoundError(f"there is no file {file.absolute()}", _CONFIG_FILE, self.config)
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:  # also bytes that are not UTF-8
            raise ConfigError(f"student.config={self.config} is not JSON: {error}", _CONFIG_FILE) from None
        if not isinstance(values, dict):
            raise ConfigError(f"student.config={self.config} has no JSON object", _CONFIG_FILE)
        return values


class LmDistillation(DistillSection):
    """loss = alpha_ce T^2 KL + alpha_mlm CE | alpha_clm CE + alpha_mse MSE + alpha_cos (1 - cos), each a mean over its
    own positions; a term with weight 0 is not computed."""

    alpha_ce: float = Field(0.5, ge=0, allow_inf_nan=False)
    """Weight of the teacher's responses: T^2 KL of the two distributions over the vocabulary."""
    alpha_mlm: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the cross-entropy on masked tokens; needs `mlm`."""
    alpha_clm: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the cross-entropy on next tokens; needs `mlm=false`."""
    alpha_mse: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the squared difference of the logits, summed over the vocabulary, at the positions of alpha_ce."""
    alpha_cos: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of 1 - cosine of the last hidden states, over all tokens; needs equal widths."""
    mlm: bool = True
    """Masked language modeling (BERT, RoBERTa); false: predict each token from those before it (GPT-2)."""
    mlm_mask_prop: float = Field(0.15, gt=0, lt=1)
    """Fraction of a sequence's tokens to predict; the tokens are sampled again in every epoch."""
    word_mask: float = Field(0.8, ge=0, le=1)
    """Fraction of the tokens to predict that are replaced by the mask token."""
    word_keep: float = Field(0.1, ge=0, le=1)
    """Fraction of the tokens to predict that are left unchanged."""
    word_rand: float = Field(0.1, ge=0, le=1)
    """Fraction of the tokens to predict that are replaced by a random token."""
    mlm_smoothing: float = Field(0.7, ge=0)
    """Tokens to predict are sampled in proportion to count ** -mlm_smoothing: rare ones more often; 0: uniformly."""
    restrict_ce_to_mask: bool = False
    """Use the teacher's responses (and alpha_mse) at masked positions only, not at all tokens."""
    freeze_pos_embs: bool = False
    """Do not train the student's position embeddings."""
    freeze_token_type_embds: bool = False
    """Do not train the student's token type embeddings; only RoBERTa has them."""

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        shares = self.word_mask + self.word_keep + self.word_rand
        alphas = self.alpha_ce + self.alpha_mlm + self.alpha_clm + self.alpha_mse + self.alpha_cos
        return (
            (alphas == 0, "every alpha is 0: there is nothing to learn from"),
            (self.alpha_mlm > 0 and not self.mlm, "alpha_mlm > 0 without mlm: no token is masked"),
            (
                self.alpha_clm > 0 and self.mlm,
                "alpha_clm > 0 with mlm: a masked model sees the next token; set mlm=false",
            ),
            (
                # 0.7 + 0.2 + 0.1 is not exactly 1 in binary
                not math.isclose(shares, 1.0, abs_tol=1e-6),
                f"word_mask + word_keep + word_rand = {shares:g}; expected a sum of 1",
            ),
            (
                self.restrict_ce_to_mask and not self.mlm,
                "restrict_ce_to_mask without mlm: no token is masked",
            ),
            (
                self.restrict_ce_to_mask and self.alpha_ce == self.alpha_mse == 0,
                "restrict_ce_to_mask with alpha_ce = alpha_mse = 0 has no effect",
            ),
        )

    @property
    def needs_teacher(self) -> bool:
        return self.alpha_ce > 0 or self.alpha_mse > 0 or self.alpha_cos > 0

    @property
    def compares_logits(self) -> bool:
        return self.alpha_ce > 0 or self.alpha_mse > 0

    @property
    def predicts(self) -> bool:
        """Whether a term predicts tokens, not a teacher's outputs."""
        return self.alpha_mlm > 0 or self.alpha_clm > 0

    @property
    def everywhere(self) -> bool:
        """Whether all tokens are projected to the vocabulary, or only the masked ones."""
        return not self.mlm or (self.compares_logits and not self.restrict_ce_to_mask)


class DistilbertSpec(LanguageModelSpec):
    """Distill a masked or causal language model: tokens, teacher, student, and the validation loss of both."""

    shares_ranks: ClassVar[bool] = True
    seed: int = Field(56, ge=0, le=LARGEST_SEED)
    """Seed of everything random: initial weights, order of the data, masks, dropout."""
    data: LmData = LmData()
    """Text and sequences."""
    teacher: LmTeacher = LmTeacher()
    """The teacher."""
    student: LmStudent = LmStudent(layers=(0, 2, 4, 7, 9, 11))
    """The student."""
    distill: LmDistillation = LmDistillation(alpha_ce=5.0, alpha_mlm=2.0, alpha_cos=1.0)
    """What the student learns from."""
    training: LmTraining = LmTraining()
    """How the student is trained."""

    @model_validator(mode="after")
    def _types_fit(self) -> Self:
        student, teacher, distill = self.student.type, self.teacher.type, self.distill
        if TEACHER_OF[student] != teacher:
            raise ValueError(
                f"a {student} student reads the tokens of a {TEACHER_OF[student]} teacher, not of {teacher}"
            )
        if distill.mlm and student == "gpt2":
            raise ValueError("mlm with a gpt2 student: it never sees what follows a mask; set distill.mlm=false")
        if not distill.mlm and student != "gpt2":
            raise ValueError(f"mlm=false with a {student} student: it sees the next token; set distill.mlm=true")
        if distill.freeze_token_type_embds and student != "roberta":
            raise ValueError(f"freeze_token_type_embds: a {student} student has no token type embeddings")
        if "fsdp" in (self.training.parallel, self.teacher.training and self.teacher.training.parallel):
            raise ValueError("parallel=fsdp: the vocabulary's weights are read outside the sharded model; use ddp")
        return self

    @property
    def has_teacher(self) -> bool:
        takes_layers = self.student.layers is not None and self.student.layers_of == OF_TEACHER
        return self.until == "teacher" or self.distill.needs_teacher or takes_layers

    @property
    def trainings(self) -> tuple[TrainingConfig, ...]:
        return (*([self.teacher.training] if self.teacher.training else []), self.training)

    def checks(self) -> Iterator[Callable[[], object]]:
        yield from super().checks()
        for name in dict.fromkeys(
            (*self.data.inputs().values(), self.teacher.model, self.student.layers_of, self.student.model)
        ):  # the teacher's tokenizer is used even without a teacher
            if name and name != OF_TEACHER:
                yield lambda name=name: sources.parse(name)  # type: ignore[misc]
        yield self.data.check
        if self.data.token_counts:
            yield lambda: require_counts(Path(str(self.data.token_counts)))
        if self.student.config is not None:
            yield self.student.read_config
