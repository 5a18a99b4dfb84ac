"""Sizes of students that are drawn rather than loaded, in the shape of Llama; data only, to be read without torch.

Embeddings are tied. With SmolLM2's 49,152 words most of a small student is its vocabulary: 7.9 of 9.9 million
parameters.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from joulelab import lookup
from joulelab.data import sources
from joulelab.data.chat.templates import read_template
from joulelab.distill.logit_cache.codecs import get_codec, require_usable
from joulelab.errors import ConfigError, DependencyMissing, JoulelabError
from joulelab.infer.generation.settings import CacheKind, GenerationSettings
from joulelab.runs.sharding import Shard
from joulelab.runs.spec import Section
from joulelab.train.config import TrainingConfig, TrainingRunSpec


class Shape(NamedTuple):
    width: int
    layers: int
    heads: int
    key_value_heads: int
    inner_width: int
    """Of the feed-forward layers."""


SHAPES = {
    "nano": Shape(width=32, layers=2, heads=2, key_value_heads=1, inner_width=64),
    "10m": Shape(width=160, layers=6, heads=5, key_value_heads=5, inner_width=480),
    "30m": Shape(width=320, layers=10, heads=5, key_value_heads=5, inner_width=960),
    # Llama-3.2-1B's
    "1b": Shape(width=2048, layers=16, heads=32, key_value_heads=8, inner_width=8192),
    # Llama-3.1-8B's, as a teacher of benchmarks
    "8b": Shape(width=4096, layers=32, heads=32, key_value_heads=8, inner_width=14336),
}


# What a student can learn from, as settings: distributions, answers, preferences; importable without torch.


class Distillation(Section):
    """loss = alpha CE + (1 - alpha) T^2 KL, over the positions that are trained on."""

    alpha: float = Field(0.5, ge=0, le=1)
    """Weight of the data's own tokens; 0 listens to the teacher alone. In `self`, 1 is plain further training."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Of the teacher's and the student's distributions."""
    teacher: Literal["cached", "live"] = "cached"
    """Let the teacher answer once for all epochs and students, or anew in every step."""
    codec: str = "rs50"
    """How its distributions are kept: rs50 (50 draws, unbiased, some 40 bytes a token), hybrid32 (the 32 likeliest and
    draws from the rest), topkK-renorm, -ghost or -gold (the K likeliest, biased), hidden (exact, large)."""
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    """Which divergence; all but forward need exact distributions: codec hidden, or a live teacher."""
    begin_anew: bool = False
    """In `self`: draw a new student, and let the SFT student be its teacher alone; else it goes on from there."""

    @property
    def loss_name(self) -> str:
        """`CE + KL`, with the terms that have a weight."""
        said = {"forward": "KL", "reverse": "reverse KL", "jsd": "JSD"}[self.divergence]
        return " + ".join(["CE"] * (self.alpha > 0) + [said] * (self.alpha < 1))

    @property
    def kept_temperature(self) -> float:
        """Of what a cache keeps; hidden states have none, so that one cache of them serves all temperatures."""
        return 1.0 if get_codec(self.codec).is_exact else self.temperature

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        try:
            get_codec(self.codec)
            if self.teacher == "cached":
                require_usable(self.codec, self.temperature, self.temperature, self.divergence)
        except JoulelabError as error:
            raise ValueError(f"{error.message}; {error.hint}") from None
        return self


class Generation(Section):
    """Prompts, how they are answered, and which answers are kept."""

    prompts: int = Field(1000, ge=1)
    """Prompts that are answered, taken from the training documents."""
    prompt_tokens: int = Field(256, ge=1)
    """Longer prompts are left out; of a plain text, so many tokens are its prompt."""
    answer: GenerationSettings = GenerationSettings()
    """How answers are decoded; `n` of them to each prompt. Its seed is its own, so that all students share them."""
    cache: CacheKind = "auto"
    """What the teacher keeps of what it has read. `growing`: rows that are done leave the batch. `fixed`: one size for
    all steps, captured as a CUDA graph; quicker for a small teacher, and it may take more joules. `auto`: `fixed` on a
    GPU where there are steps enough."""
    chain_of_thought: bool = False
    """Ask for the reasoning before the answer."""
    min_tokens: int = Field(4, ge=0)
    """Shorter answers are dropped, and counted."""
    max_tokens: int | None = Field(None, ge=1)
    """Longer answers are dropped, and counted."""
    keep_truncated: bool = False
    """Keep answers that were cut at max_new_tokens. Without it they are dropped and counted: they end nowhere."""
    keep_duplicates: bool = False
    """Keep answers whose words were said before."""
    min_score: float | None = Field(None, allow_inf_nan=False)
    """Drop answers that the judge of `preferences` scores below this."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"answers of at least {self.min_tokens} and at most {self.max_tokens} tokens do not exist")
        if self.cache != "auto" and self.answer.num_beams > 1:
            raise ValueError("generation.cache changes nothing with num_beams > 1: beams have a cache of their own")
        return self


class Preferences(Section):
    """Pairs of a better and a worse answer, and the loss that prefers the better one."""

    candidates_from: Literal["teacher", "start"] = "teacher"
    """Who writes the answers: the teacher, or the SFT student that training starts from."""
    judge: Literal["likelihood", "rubric", "rule"] = "likelihood"
    """By the teacher's mean log-likelihood a token, by its grade on a rubric, or by a rule."""
    rubric: str = "Grade the answer: is it correct, complete and to the point? 1 is useless, 5 is excellent."
    """What a judging model is asked."""
    rule: Literal["ends", "exact-answer"] = "ends"
    """Answers that came to their end are better than those cut off; or: those with the data's own final answer are."""
    tie_margin: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Answers whose scores differ by no more than this make no pair; ties are counted."""
    loss: Literal["dpo", "ipo", "ipo-sum", "length-normalised"] = "dpo"
    """DPO; IPO, whose margin is bounded, over mean log-ratios per token as in TRL, or over their sums as in the paper
    (`ipo-sum`); or DPO over mean log-ratios per token."""
    beta: float = Field(0.1, gt=0, allow_inf_nan=False)
    """How far the policy may leave its reference: small is far."""
    shared_prompt: bool = True
    """Compute the prompt of a pair once for both answers; false is for models whose attention takes no mask of ours."""

    @property
    def loss_name(self) -> str:
        return {"dpo": "DPO", "ipo": "IPO", "ipo-sum": "IPO over sums", "length-normalised": "length-normalised DPO"}[
            self.loss
        ]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.rubric.strip():
            raise ValueError("rubric: it is empty; write what makes an answer good")
        return self


# Which work of a teacher can be done in shares, and the settings of a run that does one; importable without torch.


TEACHER_PHASES = {"kd": "logits", "synthetic": "generation", "dpo": "preferences"}
"""What a pipeline needs of its teacher."""


def judges(spec: CausalSpec) -> bool:
    """Whether the teacher judges answers."""
    return spec.pipeline == "dpo" or (spec.pipeline == "synthetic" and spec.generation.min_score is not None)


def teacher_generates(spec: CausalSpec) -> bool:
    """Whether the teacher writes answers."""
    step = TEACHER_PHASES.get(spec.pipeline) if spec.until in ("teacher", "student") else spec.until
    if step == "preferences":
        return spec.preferences.candidates_from == "teacher"
    return step == "generation"


def why_not_sharded(spec: CausalSpec) -> str | None:
    """Why the teacher's work cannot be done by tasks that know nothing of each other; nothing: it can."""
    step = TEACHER_PHASES.get(spec.pipeline) if spec.until in ("teacher", "student") else spec.until
    if step is None and spec.pipeline == "self":
        return "self learns from a student that is trained first: there is no teacher's work to split"
    if step is None:
        return f"{spec.pipeline} has no teacher whose work could be split"
    if step == "data":
        return "until=data is not the teacher's work; only that is split"
    if step == "logits" and spec.distill.teacher == "live":
        return "distill.teacher=live asks the teacher in every step of training; only a cache is made in shares"
    if step == "preferences" and spec.preferences.candidates_from == "start":
        return "preferences.candidates_from=start: the answers are written by a student that is trained first"
    return None


def check_shard(spec: CausalSpec) -> None:
    """That the settings' `shard` makes sense, as a validator says it."""
    try:
        share = Shard.parse(spec.shard or "")
    except JoulelabError as error:
        raise ValueError(f"shard: {error.message}; {error.hint}") from None
    why_not = why_not_sharded(spec)
    if why_not is None and spec.until == "student":
        why_not = f"shard {share} is of one step, and until=student is all of them; set until=teacher"
    if why_not is not None:
        raise ValueError(why_not)


def teacher_shard(spec: CausalSpec, share: Shard) -> dict[str, Any]:
    """Settings of the run that does this share: of the step the settings stop at, or of all the teacher's work."""
    whole = spec.until == "student"
    name = f"{spec.name}-teacher" if whole else spec.name
    return {
        **spec.model_dump(mode="json"),
        "name": f"{name[:60]}-{share.name}",
        "label": f"{spec.label or spec.name}, share {share} of the teacher's work",
        "until": "teacher" if whole else spec.until,
        "shard": str(share),
    }


def teacher_work(spec: CausalSpec) -> dict[str, Any]:
    """What decides it: runs that agree in this share their teacher's work."""
    asked: dict[str, Any] = {"distill": {"codec"}}
    if TEACHER_PHASES.get(spec.pipeline) != "logits":
        asked = {"generation": {"prompts", "prompt_tokens", "answer", "chain_of_thought"}}
        asked |= {"preferences": {"judge", "rubric", "rule"}} if judges(spec) else {}
    always = dict.fromkeys(("pipeline", "data", "teacher", "device"), True)
    settings = spec.model_dump(mode="json", include={**always, **asked})
    return {**settings, "tokenizer": spec.tokenizer, "temperature": spec.distill.kept_temperature}


# Settings of the language-model pipelines; importable without torch, so a login node can check them.
#
# One model for all five pipelines: they differ in what is learnt from, and everything else has to be equal in a fair
# comparison. Sections that a pipeline does not use are simply not read.


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
            check_shard(self)
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
