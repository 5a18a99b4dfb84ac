"""Settings of the pipeline `distilbert`; importable without torch, so a login node can check them.

Names are those of the scripts that made DistilBERT, so that an old command can be copied word by word.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from joulelab import lookup
from joulelab.data import sources
from joulelab.data.masking import require_counts
from joulelab.data.token_store import find_store, refuse_pickle
from joulelab.errors import ConfigError, DependencyMissing
from joulelab.runs.spec import LARGEST_SEED, Section
from joulelab.train.config import TrainingConfig, TrainingRunSpec

StudentType = Literal["distilbert", "roberta", "gpt2"]
TeacherType = Literal["bert", "roberta", "gpt2"]
TEACHER_OF = {"distilbert": "bert", "roberta": "roberta", "gpt2": "gpt2"}
"""Both sides must read the same tokens, so each kind of student has one kind of teacher."""
OF_TEACHER = "teacher"
"""Where the student's layers come from unless another model is named."""


class LmTraining(TrainingConfig):
    """The loop as DistilBERT was trained: small micro-batches, many of them to a step."""

    epochs: float | None = Field(3.0, gt=0)
    """Passes over the training data (n_epoch); nothing: as many as the other budgets allow."""
    batch_size: int = Field(5, ge=1)
    """Sequences in a micro-batch."""
    accumulate: int = Field(50, ge=1)
    """Micro-batches to an optimiser step (gradient_accumulation_steps); each token of the step weighs the same."""
    learning_rate: float = Field(5e-4, gt=0, allow_inf_nan=False)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's decay rates of the two moments."""
    eps: float = Field(1e-6, gt=0)
    """AdamW's term against division by nothing (adam_epsilon)."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; biases and norms are left out."""
    clip_norm: float | None = Field(5.0, gt=0)
    """Gradients are scaled down to this norm where they are longer (max_grad_norm)."""
    warmup_share: float = Field(0.05, ge=0, lt=1)
    """Share of the budget in which the learning rate rises from 0 (warmup_prop)."""


class LmData(Section):
    """Text or tokens, and how sequences are made of them."""

    source: str = "sample:reviews"
    """Text (`sample:reviews`, a file, a folder, a hub id), or a folder that `joulelab prepare binarize` wrote."""
    split: str = "train"
    """Of text: which documents, for example `train` or `train[:4000]`; held-out documents are among them."""
    validation_size: int = Field(500, ge=1)
    """Documents held out for the validation loss, spread evenly over all of them."""
    token_counts: str | None = None
    """What `joulelab prepare token-counts` wrote; nothing: counted over the training documents."""
    max_model_input_size: int = Field(512, ge=8)
    """Tokens that a sequence may have; longer documents are split."""
    min_tokens: int = Field(11, ge=0)
    """Sequences of this many tokens or fewer are dropped."""
    max_unknown_share: float = Field(0.5, gt=0, le=1)
    """Sequences with this share of unknown tokens, or more, are dropped."""
    group_by_size: bool = True
    """Put sequences of similar length into a batch: padding costs joules and teaches nothing."""
    packing: bool = False
    """Lay documents end to end and cut rows of exactly max_model_input_size tokens: no padding, one shape. Attention
    then crosses from one document to the next within a row."""

    @field_validator("source")
    @classmethod
    def _as_it_is_called_now(cls, source: str) -> str:
        """Commands of old name NAME.pickle; the store that was made in its place is called NAME."""
        return str(find_store(Path(source))) if source.endswith(".pickle") else source


class LmTeacher(Section):
    """The large model."""

    teacher_type: TeacherType = "bert"
    """Its architecture."""
    teacher_name: str = "google-bert/bert-base-uncased"
    """`sample:minilm`, a local folder or a hub id."""
    training: LmTraining | None = None
    """Train it as a language model first, in a metered stage of its own (MiniLM, say, has no language head)."""
    seed: int = Field(0, ge=0, le=LARGEST_SEED)
    """Seed of that training; its own, so that all students of a comparison share one teacher."""
    half_weights: bool = True
    """Where training.precision is bf16 or fp16, keep the frozen weights in it too: half the memory and traffic."""


class LmStudent(Section):
    """The small model: layers of its teacher, or a model by name, configuration or size."""

    student_type: StudentType = "distilbert"
    """Its architecture."""
    layers: tuple[int, ...] | None = None
    """Layers taken from the teacher, counted from 0: [0, 2, 4, 7, 9, 11] of BERT's twelve."""
    layers_of: str = OF_TEACHER
    """Whose layers: `teacher` as this run has it, or a model by name, so that the student owes the teacher nothing."""
    vocab_transform: bool = True
    """Take the layers of the language head along."""
    student_pretrained_weights: str | None = None
    """Start from these weights: a folder or a hub id."""
    student_config: str | None = None
    """Start from random weights in the size of this JSON file (Hugging Face's config.json)."""
    student_size: str | None = None
    """Start from random weights in this size of the zoo's model: `base`, `tiny`."""

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        named = [name for name in _STARTS if getattr(self, name) is not None]
        if len(named) != 1:
            found = " and ".join(named) or "none of them"
            raise ValueError(f"a student starts from exactly one of {', '.join(_STARTS)}; the settings name {found}")
        return self


_STARTS = ("layers", "student_pretrained_weights", "student_config", "student_size")


class LmDistillation(Section):
    """loss = alpha_ce T^2 KL + alpha_mlm CE | alpha_clm CE + alpha_mse MSE + alpha_cos (1 - cos), each a mean over its
    own positions; a term with weight 0 is not computed."""

    alpha_ce: float = Field(0.5, ge=0, allow_inf_nan=False)
    """Weight of the teacher's responses: T^2 KL of the two distributions over the vocabulary."""
    alpha_mlm: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the masked tokens' cross-entropy; needs `mlm`."""
    alpha_clm: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the next tokens' cross-entropy; without `mlm`."""
    alpha_mse: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the squared distance of the logits, summed over the vocabulary, where alpha_ce looks too."""
    alpha_cos: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of 1 - cosine of the last hidden states, over all tokens; needs equal widths."""
    temperature: float = Field(2.0, gt=0, allow_inf_nan=False)
    """Of the teacher's responses."""
    mlm: bool = True
    """Masked language modelling (BERT, RoBERTa); false: each token from those before it (GPT-2)."""
    mlm_mask_prop: float = Field(0.15, gt=0, lt=1)
    """Share of a sequence's tokens to be predicted, drawn afresh whenever the sequence comes again."""
    word_mask: float = Field(0.8, ge=0, le=1)
    """Of those, shown as the mask token."""
    word_keep: float = Field(0.1, ge=0, le=1)
    """Of those, shown as they are."""
    word_rand: float = Field(0.1, ge=0, le=1)
    """Of those, shown as a random token."""
    mlm_smoothing: float = Field(0.7, ge=0)
    """Tokens are drawn in proportion to count ** -mlm_smoothing: rare ones more often; 0: all alike."""
    restrict_ce_to_mask: bool = False
    """Look at the teacher's responses (and alpha_mse) at masked positions alone, not at all tokens."""
    freeze_pos_embs: bool = False
    """Leave the student's position embeddings as they start."""
    freeze_token_type_embds: bool = False
    """Leave the student's token type embeddings as they start; only RoBERTa has them."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for holds, reason in self._contradictions():
            if holds:
                raise ValueError(reason)
        return self

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
                # 0.7 + 0.2 + 0.1 is not 1 in binary, and is right all the same
                not math.isclose(shares, 1.0, abs_tol=1e-6),
                f"word_mask + word_keep + word_rand = {shares:g}; the shares of one whole add up to 1",
            ),
            (
                self.restrict_ce_to_mask and not self.mlm,
                "restrict_ce_to_mask without mlm: no token is masked",
            ),
            (
                self.restrict_ce_to_mask and self.alpha_ce == self.alpha_mse == 0,
                "restrict_ce_to_mask with alpha_ce = alpha_mse = 0: it restricts nothing",
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
        """Tokens themselves, not what a teacher says of them."""
        return self.alpha_mlm > 0 or self.alpha_clm > 0

    @property
    def everywhere(self) -> bool:
        """Whether all tokens are projected to the vocabulary, or the masked ones alone."""
        return not self.mlm or (self.compares_logits and not self.restrict_ce_to_mask)


class LmDistillSpec(TrainingRunSpec):
    """Distil a masked or causal language model: tokens, teacher, student, and the validation loss of both."""

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
    until: Literal["teacher", "student"] = "student"
    """`teacher` ends after the teacher is trained; other runs then reuse it with its bill."""
    chunk: int = Field(4096, ge=1)
    """Tokens whose distributions over the vocabulary exist at a time; more is faster until memory is short."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU where there is one."""
    eval_batch_size: int = Field(32, ge=1)
    """Sequences at a time where nothing is trained."""

    @property
    def has_teacher(self) -> bool:
        layers_from_teacher = self.student.layers is not None and self.student.layers_of == OF_TEACHER
        return self.until == "teacher" or self.distill.needs_teacher or layers_from_teacher

    @model_validator(mode="after")
    def _kinds_fit(self) -> Self:
        student, teacher, distill = self.student.student_type, self.teacher.teacher_type, self.distill
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

    def preflight(self) -> None:
        absent = [name for name in ("torch", "transformers") if find_spec(name) is None]
        if absent:
            raise DependencyMissing(f"this run needs {' and '.join(absent)}", 'pip install "joulelab[train]"')
        models = (self.student.layers_of, self.student.student_pretrained_weights)
        for name in (self.data.source, self.teacher.teacher_name, *models):
            if name and name != OF_TEACHER:
                sources.parse(name)
        refuse_pickle(Path(self.data.source))
        if self.data.token_counts:
            require_counts(Path(self.data.token_counts))
        student_config = self.student.student_config and Path(self.student.student_config)
        if student_config and not student_config.is_file():
            raise ConfigError(f"there is no file {student_config.absolute()}", "check the path")
        for config in (self.training, self.teacher.training):
            for name in config.stats if config else ():
                lookup.TRAINER_STATS.require(name)
