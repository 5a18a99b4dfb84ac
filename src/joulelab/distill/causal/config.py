"""Settings of the language-model pipelines; importable without torch, so a login node can check them.

One model for all five pipelines: they differ in what is learnt from, and everything else has to be equal in a fair
comparison. Sections that a pipeline does not use are simply not read.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from joulelab import lookup
from joulelab.data import sources
from joulelab.data.chat.templates import read_template
from joulelab.distill.causal.learning import Distillation, Generation, Preferences
from joulelab.distill.causal.shapes import SHAPES
from joulelab.distill.causal.splitting import require_split, teacher_generates
from joulelab.errors import ConfigError, DependencyMissing
from joulelab.runs.spec import Section
from joulelab.train.config import TrainingConfig, TrainingRunSpec

Until = Literal["data", "logits", "generation", "preferences", "teacher", "student"]


class CausalTraining(TrainingConfig):
    """The loop; how long it lasts is said in `budget`, for all pipelines alike."""

    epochs: float | None = Field(None, gt=0)
    """Passes over the training rows, where they are to be a limit beside the budget."""
    batch_size: int = Field(8, ge=1)
    """Packed rows in a micro-batch; pairs, where preferences are learnt."""
    learning_rate: float = Field(1e-3, gt=0, allow_inf_nan=False)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay; biases and norms are left out."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Here the budget says when training ends."""
        if self.early_stopping_patience and not self.evaluate_every_steps:
            raise ValueError("early_stopping_patience needs evaluate_every_steps: there is nothing to wait for else")
        return self


class CausalData(Section):
    """Conversations or plain text, and the rows made of them."""

    source: str = "sample:reviews"
    """`sample:reviews`, a JSONL, JSON or Parquet file, or a hub id; rows with messages, prompt/response or text."""
    subset: str = "all"
    """The configuration of a hub dataset; `short`, `long` or `all` of sample:reviews."""
    form: Literal["text", "chat"] = "text"
    """Of sample:reviews: plain texts, or a request to continue a review with its answer."""
    documents: int | None = Field(None, ge=1)
    """Train on so many documents, taken by hash; nothing: on all of them."""
    held_out: int = Field(200, ge=1)
    """Documents for quality, of those that their hash sets apart; nobody ever trains on these."""
    max_tokens: int = Field(1024, ge=8)
    """Longer documents are cut here."""
    row_length: int = Field(1024, ge=8)
    """Documents are laid end to end in rows of so many tokens; attention stays within each document."""
    strip_think_blocks: bool = False
    """Leave out what stands between <think> and </think> in answers."""
    code_only: bool = False
    """Keep only the last block of code of an answer; rows without any are left out."""
    only_correct: bool = True
    """Where a set has verdicts on its answers, teach only the right ones."""
    tokenizer: str | None = None
    """Whose tokenizer; nothing: the student's, and of a student that is drawn its teacher's."""
    template: str | None = None
    """A file with a chat template (Jinja) in place of the tokenizer's own."""
    last_answer_only: bool = False
    """Train on the last answer of a conversation alone: the way with templates that rewrite earlier turns."""


class CausalTeacher(Section):
    """The large model."""

    model: str = "sample:smollm2"
    """`sample:smollm2`, a local folder, a GGUF file or a hub id."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Numbers it is held and computed in; auto: bf16 on a GPU, fp32 elsewhere."""
    batch_size: int = Field(8, ge=1)
    """Rows or prompts at a time."""
    server: str | None = None
    """Address of an OpenAI-compatible server that generates in its place, for example http://localhost:8000/v1.
    Its joules are measured where it runs on this machine, and reported missing where it does not. One that wants a
    key gets what the environment variable JOULELAB_SERVER_KEY holds."""

    @field_validator("server")
    @classmethod
    def _is_an_address(cls, server: str | None) -> str | None:
        if server is not None and not server.startswith(("http://", "https://")):
            raise ValueError(f"'{server}' is no address of a server; for example http://localhost:8000/v1")
        return server


class Lora(Section):
    """Low-rank adapters instead of all weights; merged into the model when it is saved."""

    rank: int = Field(16, ge=1)
    """Of the adapters."""
    alpha: int = Field(32, ge=1)
    """The adapters' product is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """On the adapters' input."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the layers that get an adapter."""


class CausalStudent(Section):
    """The small model: by its weights, as layers of the teacher, or drawn in a size."""

    model: str | None = None
    """Start from these weights: a sample, a folder or a hub id."""
    layers: tuple[int, ...] | None = None
    """Start from these layers of the teacher, counted from 0, with its embeddings and head."""
    size: str | None = None
    """Draw one of this size from the seed: nano, 10m, 30m, 1b or 8b."""
    teacher_embeddings: bool = False
    """Of a student that is drawn: begin with the teacher's embeddings, brought to the student's width along their main
    directions."""
    lora: Lora | None = None
    """Train adapters instead of all weights."""

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        named = [name for name in ("model", "layers", "size") if getattr(self, name) is not None]
        if len(named) != 1:
            found = " and ".join(named) or "none of them"
            way_out = f"; switch off what you do not want, for example student.{named[-1]}=null" if named else ""
            raise ValueError(
                f"a student starts from exactly one of model, layers, size; the settings name {found}{way_out}"
            )
        if self.layers is not None and not self.layers:
            raise ValueError("layers: it is empty; name the teacher's layers to start from, for example [0, 5]")
        if self.size is not None and self.size not in SHAPES:
            raise ValueError(f"size: '{self.size}' is none of {', '.join(SHAPES)}")
        if self.teacher_embeddings and self.size is None:
            raise ValueError("teacher_embeddings is about a student that is drawn: set size")
        return self


class CausalBudget(Section):
    """How much a student may train, in all its stages together; the same for every pipeline of a fair comparison."""

    tokens: int | None = Field(None, ge=1)
    """Tokens that go through the student in student.sft and student.train together."""
    energy_j: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Joules that may be spent on the student (`--budget 500kJ`); instead of tokens, or beside them."""
    counts_teacher: bool = False
    """Whether what the teacher took (its logits, answers, judgements) is taken off the joules first."""
    start_share: float = Field(0.5, gt=0, lt=1)
    """Of pipelines that begin with an SFT student: its share of the budget."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.tokens is None and self.energy_j is None:
            raise ValueError("the budget is empty: set tokens, energy_j or both")
        if self.counts_teacher and self.energy_j is None:
            raise ValueError("counts_teacher is about joules, and no energy_j is set")
        return self


class Quality(Section):
    """What is asked of teacher and student when training is over."""

    against_teacher: bool | None = None
    """Ask the teacher the same questions, once for all runs of the store; nothing: wherever the pipeline has one and
    no teacher.server speaks in its place."""
    answers: str | None = None
    """A task with exact answers: a JSONL file with `prompt`, `answer` and, where it is a choice, `choices`; or
    `sample:reviews`, which asks whether held-out reviews are positive or negative. Nothing: none."""
    answer_items: int = Field(100, ge=1)
    """Questions of that task, at most."""
    answer_tokens: int = Field(16, ge=1)
    """Tokens of an answer, at most, where it is not a choice."""
    harness_tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness, for example gsm8k, mmlu, ifeval, or names from harness_folder."""
    harness_folder: str | None = None
    """A folder with task files of your own."""
    harness_limit: int | None = Field(None, ge=1)
    """Questions of each of those tasks, at most; nothing: all."""


class CausalSpec(TrainingRunSpec):
    """Teach a small language model: from data (sft), from a teacher's distributions (kd), its answers (synthetic), its
    preferences (dpo), or from itself (self)."""

    shares_ranks: ClassVar[bool] = True
    data: CausalData = CausalData()
    """Conversations or text."""
    teacher: CausalTeacher = CausalTeacher()
    """The teacher."""
    student: CausalStudent = CausalStudent(size="10m")
    """The student."""
    distill: Distillation = Distillation()
    """What is learnt from distributions, in kd and self."""
    generation: Generation = Generation()
    """Which answers the teacher writes, for synthetic and dpo."""
    preferences: Preferences = Preferences()
    """How pairs are made and learnt from, in dpo."""
    budget: CausalBudget = CausalBudget(tokens=1_000_000)
    """How much the student may train."""
    training: CausalTraining = CausalTraining()
    """How the student is trained."""
    start: CausalTraining | None = None
    """How the SFT student is trained that dpo and self begin with; nothing: as `training` says."""
    quality: Quality = Quality()
    """What is asked when training is over."""
    until: Until = "student"
    """Stop when this is made: tokenised `data`, the teacher's `logits`, its answers (`generation`), `preferences`, all
    that this pipeline needs of its `teacher`, or the `student`. Other runs find it with its bill."""
    shard: str | None = None
    """Do only this share of the teacher's work, counted from 0: `2/8` (`--shard 2/8`). Tasks need not know of each
    other; the run that comes after joins what they made. Goes with until logits, generation, preferences or teacher."""
    chunk: int = Field(4096, ge=1)
    """Positions whose distributions over the vocabulary exist at a time; more is faster until memory is short."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU where there is one."""
    eval_batch_size: int = Field(8, ge=1)
    """Rows at a time where nothing is trained."""

    @property
    def has_teacher(self) -> bool:
        return self.pipeline not in ("sft", "self") or self.student.layers is not None

    @property
    def asks_teacher(self) -> bool:
        """Whether quality is told beside the teacher's."""
        asked = self.quality.against_teacher
        # what a server serves is not known here, and the local weights' quality would pass for its own
        return self.has_teacher and self.teacher.server is None if asked is None else asked

    @property
    def tokenizer(self) -> str:
        return self.data.tokenizer or self.student.model or self.teacher.model

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for holds, reason in self._contradictions():
            if holds:
                raise ValueError(reason)
        if self.shard is not None:
            require_split(self)
        limits = {"max_tokens": "budget.tokens", "max_energy_j": "budget.energy_j"}
        for training in (self.training, *([self.start] if self.start else [])):
            for name, instead in limits.items():
                if getattr(training, name) is not None:
                    raise ValueError(f"{name} is not set under training here but as {instead}, for all stages alike")
            if training.parallel == "fsdp":
                raise ValueError("parallel=fsdp: the vocabulary's weights are read outside the sharded model; use ddp")
        return self

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        data, answer, whole = self.data, self.generation.answer, self.until in ("teacher", "student")
        return (
            (
                data.max_tokens > data.row_length,
                f"data.max_tokens {data.max_tokens} is more than data.row_length {data.row_length}: "
                "a document has to fit into a row",
            ),
            (
                self.pipeline == "kd" and whole and self.distill.alpha == 1,
                "distill.alpha 1 takes nothing from the teacher, and kd would pay for it; use the pipeline sft",
            ),
            (
                (self.until == "preferences" or (self.pipeline == "dpo" and whole)) and answer.n < 2,
                "a pair needs two answers to one prompt, and generation.answer.n is 1; set 2 or more, and do_sample",
            ),
            (
                self.teacher.server is not None and not teacher_generates(self),
                f"teacher.server is asked for answers, and {self.pipeline} until={self.until} asks for none: it would "
                "do nothing; leave it out, or use the pipeline synthetic or dpo, or until=generation",
            ),
            (
                self.teacher.server is not None and answer.num_beams > 1,
                "generation.answer.num_beams: servers of the OpenAI protocol have no beam search; set 1",
            ),
            (
                self.teacher.server is not None and self.generation.cache != "auto",
                "generation.cache is about a model in this process, and a server answers: leave it out",
            ),
        )

    def preflight(self) -> None:
        wanted = ["torch", "transformers", *(["peft"] if self.student.lora else [])]
        wanted += ["lm_eval"] if self.quality.harness_tasks else []
        absent = [name for name in wanted if find_spec(name) is None]
        if absent:
            extra = {"peft": "peft", "lm_eval": "lm-eval"}.get(absent[0], "train")
            raise DependencyMissing(f"this run needs {' and '.join(absent)}", f'pip install "joulelab[{extra}]"')
        answers = self.quality.answers
        for name in (self.data.source, self.teacher.model, self.student.model, self.data.tokenizer, answers):
            if name:
                sources.parse(name)
        if self.data.template is not None:
            read_template(Path(self.data.template))
        folder = self.quality.harness_folder
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"there is no folder {Path(folder).absolute()}", "check quality.harness_folder")
        for training in (self.training, *([self.start] if self.start else [])):
            for name in training.stats:
                lookup.TRAINER_STATS.require(name)
