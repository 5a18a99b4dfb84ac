"""Settings of the language-model pipelines; importable without torch, so that a login node can check them.

One model for all six pipelines: they differ in what the student learns from, and everything else has to be equal in a
fair comparison. Sections that a pipeline does not use are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from joulelab import lookup
from joulelab.data import sources
from joulelab.data.chat.conversations import check_prompts, check_rows
from joulelab.data.chat.datasets import PRESETS
from joulelab.data.chat.templates import read_template
from joulelab.data.splits import USUAL_SHARES, HashShares, OwnSplits, Size, all_of_own_data
from joulelab.data.text import ColumnChoice
from joulelab.distill.config import LabelsAndTeacherSection, LanguageModelSpec, require_trackers
from joulelab.distill.logit_cache.codecs import get_codec, require_usable
from joulelab.errors import ConfigError, JoulelabError, UsageError
from joulelab.infer.generation.engine_process import CHILD_ENGINES, EngineInstallation
from joulelab.infer.generation.settings import PADDED_PROMPTS, CacheKind, GenerationSettings
from joulelab.runs import environment
from joulelab.runs.phases import Shard
from joulelab.runs.spec import RunSpec, Section, check
from joulelab.train.config import PipelineTraining, TrainingConfig
from joulelab.zoo.quantization import Quantization, is_quantized, quantization_packages, require_quantization

Until = Literal["data", "logits", "generation", "preferences", "teacher", "train"]
ENGINES = ("auto", "builtin", *CHILD_ENGINES, "server")
TEACHER_PHASES = {"kd": "logits", "synthetic": "generation", "dpo": "preferences"}
"""What a pipeline needs from its teacher."""
STARTS_FROM_SFT = ("dpo", "on-policy", "self")
"""Pipelines that continue a student after supervised fine-tuning with a share of the budget."""


class Shape(NamedTuple):
    """Size of a randomly initialized student, a Llama with tied embeddings."""

    width: int
    layers: int
    heads: int
    key_value_heads: int
    inner_width: int
    """Of the feed-forward layers."""


SHAPES = {
    "nano": Shape(width=32, layers=2, heads=2, key_value_heads=1, inner_width=64),
    # with SmolLM2's 49,152 tokens, 3.1 of the 3.4 million parameters are embeddings
    "3m": Shape(width=64, layers=4, heads=2, key_value_heads=2, inner_width=192),
    # with SmolLM2's 49,152 tokens, 7.9 of the 9.9 million parameters are embeddings
    "10m": Shape(width=160, layers=6, heads=5, key_value_heads=5, inner_width=480),
    "30m": Shape(width=320, layers=10, heads=5, key_value_heads=5, inner_width=960),
    # Llama-3.2-1B's
    "1b": Shape(width=2048, layers=16, heads=32, key_value_heads=8, inner_width=8192),
    # Llama-2-7B's
    "7b": Shape(width=4096, layers=32, heads=32, key_value_heads=32, inner_width=11008),
    # Llama-3.1-8B's, for benchmarks with a large teacher
    "8b": Shape(width=4096, layers=32, heads=32, key_value_heads=8, inner_width=14336),
    # Llama-2-13B's
    "13b": Shape(width=5120, layers=40, heads=40, key_value_heads=40, inner_width=13824),
}


class Distillation(LabelsAndTeacherSection):
    """loss = alpha CE + (1 - alpha) T^2 KL, over the trained tokens."""

    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Temperature of the teacher's and the student's distributions (kd_T)."""
    teacher: Literal["cached", "live"] = "cached"
    """Compute the teacher's distributions once for all epochs and students, or in every step."""
    codec: str = "rs50"
    """How distributions are stored: rs50 (50 samples, unbiased, about 40 bytes per token), hybrid32 (the 32 most likely
    tokens and samples from the rest), topkK-renorm, -ghost or -gold (the K most likely tokens, biased), hidden (exact,
    large)."""
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    """Divergence; all but forward need exact distributions: codec hidden, or a live teacher."""
    begin_anew: bool = False
    """In `self`: initialize a new student, with the SFT student as its teacher only; false: train the SFT
    student itself further."""

    @property
    def loss_name(self) -> str:
        """`CE + KL`, with the terms that have a weight."""
        divergence = {"forward": "KL", "reverse": "reverse KL", "jsd": "JSD"}[self.divergence]
        return " + ".join(["CE"] * (self.alpha > 0) + [divergence] * (self.alpha < 1))

    @property
    def cached_temperature(self) -> float:
        """Temperature of a cache; hidden states have none, so one cache of them serves all temperatures."""
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


def _known(name: str, built_in: Sequence[str], table: lookup.Table) -> str:
    if name not in (*built_in, *table.names()):
        error = lookup.unknown(table.kind, name, (*built_in, *table.names()))
        raise ValueError(f"{error.message}; {error.hint}")
    return name


def server_setting(server: str | None) -> str | None:
    if server is not None and not server.startswith(("http://", "https://")):
        raise ValueError(f"'{server}' is not the address of a server; expected for example http://localhost:8000/v1")
    return server


class Generation(Section):
    """Prompts, how they are answered, and which answers are kept."""

    prompts: int = Field(1000, ge=1)
    """Number of prompts, taken from the training documents or `prompts_from`."""
    prompts_from: str | None = None
    """Other data to take prompts from: a file, a folder or a hub id with a column `prompt` (TRL's prompt-only type), or
    with conversations, whose last answer is not used. Quality is still measured on `data`. null: the training rows."""
    prompt_tokens: int = Field(256, ge=1)
    """Maximum tokens of a prompt: longer prompts are skipped; a plain text is truncated to this length."""
    answer: GenerationSettings = GenerationSettings()
    """How answers are decoded; `n` answers per prompt. Its own seed lets all students share the answers."""
    renamed_values: ClassVar = {"engine": {"transformers": "builtin"}}

    engine: str = "auto"
    """`builtin`: the model in this process. `vllm`, `sglang`: started as a child process in the environment of
    engine_python, and billed. `server`: the one at teacher.server. `auto`: that server if it is set, vLLM if
    engine_python is set and vLLM is known to use less energy for this work, otherwise builtin, with a note on the
    choice. Or the engine of an installed package."""
    engine_python: str | None = None
    """Python of the environment in which vLLM or SGLang is installed, for example /opt/vllm/bin/python."""
    engine_args: tuple[str, ...] = ()
    """Added to the engine's command line, for example ["--tensor-parallel-size", "2"]."""
    engine_timeout_s: float = Field(900.0, gt=0, allow_inf_nan=False)
    """Time limit for the engine to load the model."""
    engine_concurrency: int = Field(256, ge=1)
    """Prompts that are sent to vLLM or SGLang at once."""
    engine_seeds: bool = True
    """Send a seed with every request for a sampled answer to vLLM or SGLang: seed, prompt and number of the answer then
    decide the random numbers, whatever else is in the batch. Rounding still depends on the batch. false: another run
    samples other answers; vLLM can then use FlashInfer's sampler, which has no seeds per request."""
    batch_size: int | None = Field(None, ge=1)
    """Prompts that the builtin engine, or the student in on-policy, answers at once. null: on a GPU as many as fit, for
    up to 1,024 answers, because a token then takes the least energy; 32 on a CPU. Shards and ranks divide the prompts
    in units of this size (null: 32), and a resumed run generates a unit again if one of its answers is missing."""
    cache: CacheKind = "auto"
    """Key-value cache of the teacher. `growing`: works with every model. `fixed`: a slot of fixed size per row, and a
    step captured as a CUDA graph with sampling on the device. `auto`: `fixed` on a GPU if the model supports it."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the step of a `fixed` cache on a GPU; `auto`: if that saves more energy than it uses."""
    chain_of_thought: bool = False
    """Request the reasoning before the answer."""
    min_tokens: int = Field(4, ge=0)
    """Shorter answers are dropped and counted."""
    max_tokens: int | None = Field(None, ge=1)
    """Longer answers are dropped and counted."""
    keep_truncated: bool = False
    """Keep answers that were truncated at max_new_tokens. By default they are dropped and counted."""
    keep_duplicates: bool = False
    """Keep answers with the same words as an earlier one."""
    min_score: float | None = Field(None, allow_inf_nan=False)
    """Drop answers that the judge of `preferences` scores below this."""
    held_out: float = Field(0.0, ge=0, lt=1)
    """In `synthetic`: share of the kept answers, by hash of the prompt, that is not trained on; the student's loss is
    measured on them too."""

    @property
    def prompts_per_unit(self) -> int:
        """Prompts that are generated as a whole. Padded batches are units: the last bits of log-probabilities depend on
        the batch, and shards must give the same as one process."""
        return self.batch_size or PADDED_PROMPTS

    @property
    def longest_prompt(self) -> int:
        """Tokens, including the request for reasoning."""
        return self.prompt_tokens + 64 * self.chain_of_thought

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.longest_prompt + self.answer.max_new_tokens

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(
                f"generation.max_tokens {self.max_tokens} is less than generation.min_tokens {self.min_tokens}"
            )
        _known(self.engine, ENGINES, lookup.ENGINES)
        if self.cache != "auto" and self.answer.num_beams > 1:
            raise ValueError("generation.cache has no effect with num_beams > 1: beam search uses a different cache")
        return self

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        engine, child = self.engine, self.engine in CHILD_ENGINES
        return (
            (
                self.cache != "auto" and engine not in ("auto", "builtin"),
                f"generation.cache has no effect with the engine {engine}; remove it",
            ),
            (
                child and self.engine_python is None,
                f"generation.engine={engine} needs generation.engine_python, the Python of the environment that "
                f"{engine} is installed in",
            ),
            (
                self.engine_python is not None and not (child or engine == "auto"),
                f"generation.engine_python has no effect with the engine {engine}; remove it, or set engine=vllm",
            ),
            (
                bool(self.engine_args) and self.engine_python is None,
                "generation.engine_args has no effect without generation.engine_python",
            ),
            (
                not self.engine_seeds and not (self.engine_python is not None and self.answer.do_sample),
                "generation.engine_seeds=false has no effect without engine_python and answer.do_sample=true",
            ),
            (
                child and self.answer.num_beams > 1,
                f"generation.answer.num_beams: the server of {engine} has no beam search; set 1, or engine=builtin",
            ),
        )


ON_POLICY_PRESETS: dict[str, dict[str, Any]] = {
    "gkd": {"divergence": "jsd", "beta": 0.5, "student_share": 0.5},
    "minillm": {"divergence": "reverse", "student_share": 1.0},
    "weak-start": {"divergence": "forward", "student_share": 0.25},
}


class OnPolicy(Section):
    """The student writes completions, and the teacher's distributions at these tokens are its targets."""

    aliases: ClassVar = {"lambda": "student_share", "lmbda": "student_share"}

    preset: Literal["gkd", "minillm", "weak-start"] | None = None
    """Defaults: of a publication, `gkd` (Agarwal et al., 2024, as in TRL: Jensen-Shannon divergence with beta 0.5, half
    of the batches written by the student) or `minillm` (Gu et al., 2024: reverse KL, all batches written by the
    student; per token, without its policy-gradient term); or `weak-start` (forward KL, a quarter of the batches), our
    own, for a student that still writes poorly. Settings that you name take precedence."""
    divergence: Literal["forward", "reverse", "jsd"] = "jsd"
    """Per token: `forward` KL(teacher || student), `reverse` KL(student || teacher), or `jsd`, the generalized
    Jensen-Shannon divergence."""
    beta: float = Field(0.5, gt=0, lt=1)
    """The teacher's share of the mixture in `jsd`: near 0 it acts like the forward KL, near 1 like the reverse KL."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Temperature of both distributions in the loss, which is multiplied by its square. Completions are sampled with
    `generation.answer.temperature`."""
    student_share: float = Field(1.0, gt=0, le=1)
    """Share of the micro-batches that the student writes (GKD's lambda); the others come from `other_data`."""
    other_data: Literal["data", "teacher"] = "data"
    """Where the other micro-batches come from: the training documents, or the teacher's completions (as in the pipeline
    synthetic)."""
    sync_every: int = Field(8, ge=1, le=1000)
    """Optimizer steps between two rounds of generation; a round uses the weights at its start. If a joule
    budget ends in the middle of a round, its other completions are discarded, with their energy on the bill."""
    listed_tokens: int = Field(20, ge=0)
    """Most likely tokens of each position that a teacher.server reports. The rest is estimated from the student's
    sample without bias; more tokens give less noise."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {**ON_POLICY_PRESETS.get(str(values.get("preset")), {}), **values}

    @property
    def loss_name(self) -> str:
        return {"forward": "KL", "reverse": "reverse KL", "jsd": f"JSD, beta {self.beta:g}"}[self.divergence]


class JudgeSettings(Section):
    """What scores the answers. `preferences.judge=rubric` is short for `preferences.judge.kind=rubric`."""

    kind: str = "likelihood"
    """`likelihood`: a model's mean log-likelihood per token. `rubric`: a model's grade. `pairwise`: a model compares
    two answers, in both orders. `rule`: a rule on the text, without a model. Or the judge of an installed package."""
    model: str | None = None
    """Model that judges: a folder, a GGUF file, a sample or a hub id, with any tokenizer. null: the teacher."""
    server: str | None = None
    """OpenAI-compatible server that judges by `rubric` or `pairwise`, under the name in `model`; its energy is treated
    like that of teacher.server."""

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, name: str) -> str:
        return _known(name, ("likelihood", "rubric", "pairwise", "rule"), lookup.JUDGES)

    @field_validator("server")
    @classmethod
    def _is_an_address(cls, server: str | None) -> str | None:
        return server_setting(server)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.server is not None and self.kind not in ("rubric", "pairwise"):
            raise ValueError(
                f"server: a server generates text, but the judge {self.kind} does not ask for text; set kind=rubric or "
                "kind=pairwise, or remove server"
            )
        if self.model is not None and not self.asks_model:
            raise ValueError(f"model={self.model}: the judge {self.kind} uses no model; remove it, or set kind=rubric")
        return self

    @property
    def asks_model(self) -> bool:
        return self.kind in ("likelihood", "rubric", "pairwise")


class Preferences(Section):
    """Pairs of a better and a worse answer, and the loss that prefers the better one."""

    renamed_values: ClassVar = {"loss": {"length-normalised": "length-normalized"}}

    candidates_from: Literal["teacher", "start", "data"] = "teacher"
    """Where the answers of a pair come from: written by the teacher, or by the student that training starts from; or
    `data`: the columns `chosen` and `rejected` of `data.source`, without generation and judging."""
    judge: JudgeSettings = JudgeSettings()
    """What scores the answers."""
    min_tokens: int = Field(1, ge=1)
    """Shorter answers are not used for pairs, and counted. Empty ones and repetitions of an answer never are."""
    max_tokens: int | None = Field(None, ge=1)
    """Longer answers are not used for pairs, and counted."""
    keep_truncated: bool = True
    """Use answers that were truncated at max_new_tokens for pairs."""
    held_out: float = Field(0.1, ge=0, lt=1)
    """Share of the pairs, by hash of the prompt, that is not trained on: accuracy and margin are measured on it. Of
    pairs of `data`, the test split is held out instead."""
    rubric: str = "Grade the answer: is it correct, complete and to the point? 1 is useless, 5 is excellent."
    """Instruction for a grading model."""
    rule: Literal["ends", "exact-answer"] = "ends"
    """`ends`: finished answers are better than truncated ones. `exact-answer`: correct final answers are better."""
    tie_margin: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Answers whose scores differ by no more than this form no pair; ties are counted."""
    loss: Literal["dpo", "ipo", "ipo-sum", "length-normalized"] = "dpo"
    """DPO; IPO, whose margin is bounded, over mean log-ratios per token as in TRL, or over their sums as in the paper
    (`ipo-sum`); or DPO over mean log-ratios per token (`length-normalized`)."""
    beta: float = Field(0.1, gt=0, allow_inf_nan=False)
    """Strength of the constraint to the reference: a smaller value lets the policy move farther from it."""
    shared_prompt: bool = True
    """Compute the prompt of a pair once for both answers; false: for models whose attention accepts no custom mask."""

    @field_validator("judge", mode="before")
    @classmethod
    def _judge_by_kind(cls, value: object) -> object:
        return {"kind": value} if isinstance(value, str) else value

    @property
    def loss_name(self) -> str:
        return {"dpo": "DPO", "ipo": "IPO", "ipo-sum": "IPO over sums", "length-normalized": "length-normalized DPO"}[
            self.loss
        ]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.rubric.strip():
            raise ValueError("rubric is empty; describe what makes an answer good")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} is less than min_tokens {self.min_tokens}")
        if self.judge.kind == "rule" and self.rule == "ends" and not self.keep_truncated:
            raise ValueError("rule=ends compares finished answers with truncated ones; set keep_truncated=true")
        return self


class CausalTraining(PipelineTraining):
    """The training loop; its length is set in `budget`, for all pipelines alike."""

    epochs: float | None = Field(None, gt=0)
    """Passes over the training rows, as a limit in addition to the budget."""
    batch_size: int = Field(8, ge=1)
    """Packed rows per micro-batch; pairs in preference training."""
    learning_rate: float = Field(1e-3, gt=0, allow_inf_nan=False)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay; not applied to biases and norms."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Unlike in the base class, no limit is required: the budget ends the training."""
        if self.early_stopping_patience and not self.evaluate_every_steps:
            raise ValueError("early_stopping_patience needs evaluate_every_steps")
        return self


class CausalData(OwnSplits):
    """Conversations or plain text, and the rows made of them."""

    source: str = "sample:reviews"
    """`sample:reviews`, a JSONL, JSON or Parquet file, or a hub id; rows with messages, prompt/response or text."""
    subset: str = "all"
    """The configuration of a hub dataset; `short`, `long` or `all` of sample:reviews."""
    form: Literal["text", "chat"] = "text"
    """For sample:reviews: plain texts, or a request to continue a review with its answer."""
    header: bool | None = None
    """Whether a CSV file starts with column names; false: columns are numbered from 1; null: detected."""
    documents: Size | None = None
    """Training documents, selected by hash: a number, a share (0.1 or 10 %), or null for all."""
    held_out: Size = 200
    """Evaluation documents: a number, a share, or `all`, which is the default for your own data. From the test split,
    else documents that are held out by hash."""
    test_size: float | None = Field(None, gt=0, lt=1)
    """Share of the rows that is held out by hash if the data has no test split; all others are trained on. null: 20 %,
    and 10 % for validation."""
    max_tokens: int = Field(1024, ge=8)
    """Longer documents are truncated."""
    row_length: int = Field(1024, ge=8)
    """Tokens per row. Documents are packed into rows; attention stays within each document."""
    strip_think_blocks: bool = False
    """Remove the text between <think> and </think> from answers."""
    code_only: bool = False
    """Keep only the last code block of an answer; rows without one are dropped."""
    only_correct: bool = True
    """If a dataset marks answers as correct or not, train on the correct ones only."""

    @model_validator(mode="before")
    @classmethod
    def _all_of_own_data(cls, values: object) -> object:
        return all_of_own_data(values, "held_out")

    @property
    def files(self) -> dict[str, str]:
        """Split -> file, of the splits that the settings name."""
        return {str(split): file for split, file in self.named_files.items()}

    def limit(self, split: str) -> int | float | None:
        size = self.documents if split == "train" else self.held_out
        return None if size is None or isinstance(size, str) else size

    def check(self) -> None:
        limits = {split: self.limit(split) for split in ("train", "test")}
        check_rows(self.source, self.subset, self.files, self.columns, self.only_correct, limits, self.shares)

    @property
    def columns(self) -> ColumnChoice:
        return ColumnChoice(text=self.text_column, header=self.header, labeled=False)

    @property
    def shares(self) -> HashShares:
        return USUAL_SHARES if self.test_size is None else HashShares(0.0, self.test_size)

    tokenizer: str | None = None
    """Model whose tokenizer is used; null: the student's, or the teacher's for a randomly initialized student."""
    template: str | None = None
    """A file with a chat template (Jinja) in place of the tokenizer's own."""
    last_answer_only: bool = False
    """Train on the last answer of a conversation only; required for templates that rewrite earlier turns."""


class CausalTeacher(Section):
    """The large model."""

    model: str = "sample:smollm2"
    """`sample:smollm2`, a local folder, a GGUF file or a hub id; with `server`, the name that the server knows."""
    precision: Literal["auto", "fp32", "bf16", Quantization] = "auto"
    """Precision of weights and computation; auto: bf16 on a GPU with tensor cores for it, fp32 elsewhere. Or quantized
    weights with bf16 activations: int8, nf4 (extra bitsandbytes), fp8, fp8-weights, int4 (extra torchao); also those of
    a judge model."""
    cross_tokenizer_loss: Literal["gold", "uld"] = "gold"
    """In kd and on-policy, if teacher and student have different tokenizers: their distributions are compared over
    spans of text that both cover by whole tokens, which is approximate. `gold`: the divergence on tokens of both
    vocabularies, sorted probabilities on the others. `uld`: sorted probabilities only."""
    batch_size: int = Field(8, ge=1)
    """Rows that the teacher scores at once."""
    server: str | None = None
    """Address of an OpenAI-compatible server that generates instead, for example http://localhost:8000/v1, or that
    scores tokens in on-policy (with vLLM's prompt_logprobs). Its
    energy is measured if it runs on this machine, and reported as missing otherwise. The environment variable
    JOULELAB_SERVER_KEY holds its API key, if it needs one."""

    @field_validator("server")
    @classmethod
    def _is_an_address(cls, server: str | None) -> str | None:
        return server_setting(server)

    @property
    def quantization(self) -> str | None:
        return self.precision if is_quantized(self.precision) else None

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        return (
            (
                self.server is not None and self.quantization is not None,
                f"teacher.precision={self.precision} quantizes a model in this process, not teacher.server",
            ),
        )


class Lora(Section):
    """Low-rank adapters instead of all weights; merged into the model when it is saved."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: int = Field(32, ge=1)
    """The adapters' product is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapters' input."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the layers that get an adapter."""


class CausalStudent(Section):
    """The small model: pretrained, made of layers of the teacher, or randomly initialized in a size."""

    alternatives: ClassVar = ("model", "layers", "size")
    details: ClassVar = {"teacher_embeddings": "size"}

    model: str | None = None
    """Start from these weights: a sample, a folder or a hub id."""
    layers: tuple[int, ...] | None = None
    """Start from these layers of the teacher, counted from 0, with its embeddings and head."""
    size: str | None = None
    """Start from random weights in this size: nano, 3m, 10m, 30m, 1b, 7b, 8b or 13b."""
    teacher_embeddings: bool = False
    """With `size`: start from the teacher's embeddings, projected to the student's width on their principal
    components. A student of the teacher's `layers` has them in any case."""
    lora: Lora | None = None
    """Train adapters instead of all weights."""

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        named = [name for name in self.alternatives if getattr(self, name) is not None]
        if len(named) != 1:
            found = " and ".join(named) or "none of them"
            hint = f"; unset what you do not want, for example student.{named[-1]}=null" if named else ""
            raise ValueError(
                f"a student starts from exactly one of {', '.join(self.alternatives)}; the settings name {found}{hint}"
            )
        if self.layers is not None and not self.layers:
            raise ValueError("layers is empty; name the teacher's layers to start from, for example [0, 5]")
        if self.size is not None and self.size not in SHAPES:
            raise ValueError(f"unknown size '{self.size}'; expected one of {', '.join(SHAPES)}")
        if self.teacher_embeddings and self.model is not None:
            raise ValueError(
                "teacher_embeddings needs a randomly initialized student, but student.model has its own embeddings; "
                "set student.teacher_embeddings=false, or size instead of model"
            )
        return self


class CausalBudget(Section):
    """Training budget of a student, over all its stages; the same for every pipeline of a fair comparison."""

    tokens: int | None = Field(None, ge=1)
    """Tokens that the student processes in student.sft and student.train together."""
    energy_j: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Energy for training the student, in joules (`--budget 500kJ`); instead of tokens, or in addition."""
    counts_teacher: bool = False
    """Subtract the teacher's energy (logits, answers, judgments) from the energy budget first."""
    start_share: float = Field(0.5, gt=0, lt=1)
    """Share of the budget for the SFT student that dpo, on-policy and self start from."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.tokens is None and self.energy_j is None:
            raise ValueError("the budget is empty: set tokens, energy_j or both")
        if self.counts_teacher and self.energy_j is None:
            raise ValueError("counts_teacher needs an energy budget, but energy_j is not set")
        return self


class Quality(Section):
    """Evaluation of teacher and student after training."""

    against_teacher: bool | None = None
    """Evaluate the teacher too, once for all runs of the store; null: if the pipeline has a teacher and no
    teacher.server replaces it."""
    answers: str | None = None
    """A task with exact answers: a JSONL file with `prompt`, `answer` and, for multiple choice, `choices`; or
    `sample:reviews`, which asks whether held-out reviews are positive or negative. null: none."""
    answer_items: int = Field(100, ge=1)
    """Maximum number of questions of that task."""
    answer_tokens: int = Field(16, ge=1)
    """Maximum tokens of an answer, if it is not multiple choice."""
    grader: Literal["text", "math-verify"] = "text"
    """How free answers are compared: as numbers, formulas or text, or as mathematical expressions by math-verify."""
    harness_tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness, for example gsm8k, mmlu, ifeval, or names from harness_folder."""
    harness_folder: str | None = None
    """A folder with your own task files."""
    harness_limit: int | None = Field(None, ge=1)
    """Maximum number of questions of each of those tasks; null: all."""
    harness_chat_template: bool = False
    """Format the prompts of those tasks with the chat template of the tokenizer, if it has one."""


class CausalSpec(LanguageModelSpec):
    """Train a small language model: on data (sft), on a teacher's distributions (kd), its answers (synthetic), its
    preferences (dpo), its distributions at tokens that the student writes (on-policy), or on its own distributions
    (self)."""

    shares_ranks: ClassVar[bool] = True
    data: CausalData = CausalData()
    """Conversations or text."""
    teacher: CausalTeacher = CausalTeacher()
    """The teacher."""
    student: CausalStudent = CausalStudent(size="10m")
    """The student."""
    distill: Distillation = Distillation()
    """Loss against distributions, in kd and self."""
    generation: Generation = Generation()
    """Answers of the teacher for synthetic and dpo; of the student for on-policy."""
    on_policy: OnPolicy = OnPolicy()
    """Loss and rounds of on-policy."""
    preferences: Preferences = Preferences()
    """Pairs and the loss over them, in dpo."""
    budget: CausalBudget = CausalBudget(tokens=1_000_000)
    """Training budget of the student."""
    training: CausalTraining = CausalTraining()
    """How the student is trained."""
    start: CausalTraining | None = None
    """How the SFT student that dpo, on-policy and self start from is trained; null: the same as `training`; none: it is
    not trained, because `student.model` is one (sets `sft_first=false`)."""
    sft_first: bool = True
    """In dpo, on-policy and self: train an SFT student first. false: start from `student.model` as it is."""
    quality: Quality = Quality()
    """Evaluation after training."""
    until: Until = "train"  # type: ignore[assignment]
    """Last phase of the run: tokenized `data`; the teacher's `logits`, its answers (`generation`) or `preferences`;
    everything from its `teacher`; or all phases (`train`). Later runs reuse what this one made, with its energy."""
    shard: str | None = None
    """Do only this shard of the teacher's work, counted from 0: `2/8` (`--shard 2/8`). The tasks are independent, and a
    later run joins their results. Used with until logits, generation, preferences or teacher."""
    eval_batch_size: int = Field(8, ge=1)
    """Batch size for evaluation."""

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        complete = super().complete(settings)
        policy = complete.get("on_policy")
        if isinstance(policy, dict) and "batch_size" in policy:  # runs of development versions
            at_once = {"batch_size": policy["batch_size"]} if complete["pipeline"] == "on-policy" else {}
            complete["generation"] = {**at_once, **complete.get("generation", {})}
            complete["on_policy"] = {key: value for key, value in policy.items() if key != "batch_size"}
        return {**complete, "start": None, "sft_first": False} if complete.get("start") == "none" else complete

    @property
    def own_pairs(self) -> bool:
        """Whether the pairs are columns of the data, so that no teacher is needed for them."""
        return self.preferences.candidates_from == "data" and (self.pipeline == "dpo" or self.until == "preferences")

    @property
    def has_teacher(self) -> bool:
        """Whether the run uses `teacher.model`; in self the SFT student is the teacher."""
        if self.own_pairs and self.until in ("preferences", "teacher", "train"):
            return self.student.layers is not None
        if self.until in TEACHER_PHASES.values():
            return True
        return self.pipeline not in ("sft", "self") or self.student.layers is not None

    @property
    def served_teacher_is_used_for(self) -> tuple[str, ...] | None:
        """If a server generates the teacher's completions: the settings that need files of `teacher.model` on this
        machine. None: the teacher is a model here."""
        if self.teacher.server is None or not self.teacher_generates or self.pipeline == "on-policy":
            return None
        judge, student = self.preferences.judge, self.student
        judges_here = self.teacher_judges and judge.asks_model and judge.model is None and judge.server is None
        uses = {
            "student.teacher_embeddings=true": student.teacher_embeddings,
            "student.layers": student.layers is not None,
            "quality.against_teacher=true": self.evaluates_teacher,
            f"preferences.judge.kind={judge.kind} without preferences.judge.model": judges_here,
        }
        return tuple(setting for setting, is_used in uses.items() if is_used)

    @property
    def teacher_is_elsewhere(self) -> bool:
        """Whether no file of `teacher.model` is needed here."""
        return self.served_teacher_is_used_for == ()

    @property
    def compares_distributions(self) -> bool:
        """Whether the student's distributions are compared with the teacher's, token by token."""
        return self.pipeline in ("kd", "on-policy") or self.teacher_phase == "logits"

    @property
    def unused_settings(self) -> Mapping[str, str]:
        """Whatever phase a run ends with, its pipeline's settings are accepted, so that all phases can be given the
        same ones."""
        phase = self.teacher_phase
        users = {
            "distill": (("kd", "self"), phase == "logits"),
            "generation": (("synthetic", "dpo", "on-policy"), self.answers_prompts),
            "on_policy": (("on-policy",), False),
            "preferences": (("dpo",), self.teacher_judges or phase == "preferences"),
            "start": (STARTS_FROM_SFT, False),
        }
        unused = {
            name: ", ".join(pipelines)
            for name, (pipelines, is_used) in users.items()
            if self.pipeline not in pipelines and not is_used
        }
        if self.pipeline != "synthetic" and not self.mixes_teacher_answers:
            filters = ("min_tokens", "max_tokens", "keep_truncated", "keep_duplicates", "min_score")
            by = "synthetic, and on-policy with on_policy.student_share below 1 and other_data=teacher"
            unused |= {f"generation.{name}": by for name in filters}
        if self.pipeline != "synthetic":
            unused["generation.held_out"] = "synthetic"
        if self.pipeline == "on-policy" and not self.mixes_teacher_answers:
            engine = [name for name in type(self.generation).model_fields if name.startswith("engine_")]
            by = "runs whose completions are written before the training; on-policy students write in this process"
            unused |= {f"generation.{name}": by for name in engine}
        if not self.compares_distributions:
            unused["teacher.cross_tokenizer_loss"] = "kd and on-policy"
        if self.teacher.cross_tokenizer_loss == "uld":
            names = ("distill.divergence", "on_policy.divergence", "on_policy.beta")
            unused |= dict.fromkeys(names, "teacher.cross_tokenizer_loss=gold; uld has no divergence")
        if self.on_policy.student_share == 1:
            unused["on_policy.other_data"] = "on-policy with on_policy.student_share below 1"
        if self.pipeline not in STARTS_FROM_SFT or not self.sft_first:
            unused["budget.start_share"] = f"{', '.join(STARTS_FROM_SFT)}, unless sft_first=false"
        if self.distill.teacher == "live" and not self.caches_logits:
            unused["distill.codec"] = "distill.teacher=cached"
        is_live = self.pipeline == "on-policy" or (self.pipeline == "kd" and self.distill.teacher == "live")
        if is_live and not self.caches_logits and not self.teacher_judges:
            # a live teacher reads the batches of the training
            unused["teacher.batch_size"] = "runs that cache logits or judge answers"
        if not self.has_teacher and not self.evaluates_teacher:
            unused["teacher.precision"] = "runs with a teacher"
            if self.pipeline != "self":  # its cache is made in such batches
                unused["teacher.batch_size"] = "runs with a teacher"
        if self.pipeline == "on-policy" and (self.start is not None or not self.sft_first):
            unused["training.prefetch"] = "other pipelines: in on-policy, batches are written between steps"
        return unused

    def for_this_machine(self) -> Self:
        """The SFT student is trained in the precision that `training` names, unless `start` names one."""
        found, named = super().for_this_machine(), self.training.precision
        if self.start is None or named == "auto":
            return found
        return found.model_copy(update={"start": self.start.with_precision(named)})

    @property
    def trainings(self) -> tuple[TrainingConfig, ...]:
        """The trainings of this run, each with the run's energy budget as its limit."""
        if self.until != "train":
            return ()
        used = (self.training, self.start if self.sft_first else None)[: 2 if self.pipeline in STARTS_FROM_SFT else 1]
        limit = {"max_energy_j": self.budget.energy_j}
        return tuple(training.model_copy(update=limit) for training in used if training is not None)

    @property
    def evaluates_teacher(self) -> bool:
        """Whether quality is reported relative to the teacher's."""
        setting = self.quality.against_teacher
        # which model a server serves is not known here, and the local weights' quality would be taken for its own
        return self.has_teacher and self.teacher.server is None if setting is None else setting

    @property
    def tokenizer(self) -> str:
        return self.data.tokenizer or self.student.model or self.teacher.model

    @property
    def teacher_phase(self) -> str | None:
        """The phase that the teacher's work of this run ends with."""
        if self.until not in ("teacher", "train"):
            return self.until
        return "generation" if self.mixes_teacher_answers else TEACHER_PHASES.get(self.pipeline)

    @property
    def caches_logits(self) -> bool:
        """Whether the teacher's distributions are stored, in `distill.codec`; a run of that phase alone always does."""
        return self.teacher_phase == "logits" and (self.until != "train" or self.distill.teacher == "cached")

    @property
    def scores_on_server(self) -> bool:
        """Whether on-policy asks a server for the teacher's log-probabilities."""
        return self.pipeline == "on-policy" and self.teacher.server is not None

    @property
    def mixes_teacher_answers(self) -> bool:
        """Whether on-policy trains on the teacher's completions too."""
        policy = self.on_policy
        return self.pipeline == "on-policy" and policy.student_share < 1 and policy.other_data == "teacher"

    @property
    def answers_prompts(self) -> bool:
        """Whether the teacher or the student generates answers to prompts."""
        return self.teacher_generates or self.teacher_phase == "preferences" or self.pipeline == "on-policy"

    @property
    def teacher_judges(self) -> bool:
        if self.own_pairs:
            return False
        filters = self.pipeline == "synthetic" or self.mixes_teacher_answers
        return self.pipeline == "dpo" or (filters and self.generation.min_score is not None)

    @property
    def teacher_generates(self) -> bool:
        if self.teacher_phase == "preferences":
            return self.preferences.candidates_from == "teacher"
        return self.teacher_phase == "generation"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.shard is not None:
            self._check_shard(self.shard)
        limits = {"max_tokens": "budget.tokens", "max_energy_j": "budget.energy_j"}
        for training in self._all_trainings:
            for name, instead in limits.items():
                if getattr(training, name) is not None:
                    raise ValueError(f"set {instead} instead of {name} under training: it applies to all stages")
            if training.parallel == "fsdp" and self.student.lora is not None:
                raise ValueError(
                    "parallel=fsdp with student.lora is not supported: adapters need little memory; use ddp, and "
                    "training.weights=bf16 for the frozen weights"
                )
            if training.matmul == "fp8" and self.student.lora is not None:
                raise ValueError(
                    "matmul=fp8 with student.lora is not supported: layers with adapters are not computed in fp8; "
                    "remove one of them"
                )
        return self

    @property
    def _all_trainings(self) -> tuple[CausalTraining, ...]:
        return (self.training, *([self.start] if self.start else []))

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        data, answer, complete = self.data, self.generation.answer, self.until in ("teacher", "train")
        return (
            (
                data.max_tokens > data.row_length,
                f"data.max_tokens {data.max_tokens} is more than data.row_length {data.row_length}: "
                "a document must fit into a row",
            ),
            (
                self.pipeline == "kd" and complete and self.distill.alpha == 1,
                "distill.alpha=1 ignores the teacher, but kd would spend energy on it; use the pipeline sft",
            ),
            (
                (self.until == "preferences" or (self.pipeline == "dpo" and complete))
                and not self.own_pairs
                and answer.n < 2,
                "a pair needs two answers to one prompt, but generation.answer.n is 1; set 2 or more, and do_sample",
            ),
            (
                self.pipeline == "on-policy" and complete and not answer.do_sample,
                "on-policy trains on samples of the student; set generation.answer.do_sample=true",
            ),
            (
                self.scores_on_server and (answer.temperature, answer.top_p, answer.top_k) != (1, 1, 0),
                "a teacher.server reports some tokens, and the rest is estimated from the student's samples, which "
                "must be from its whole distribution: set generation.answer.temperature=1, top_p=1 and top_k=0",
            ),
            (
                self.scores_on_server and (self.on_policy.student_share < 1 or self.on_policy.temperature != 1),
                "a teacher.server reports some tokens, and the rest is estimated from the student's samples at "
                "temperature 1: set on_policy.student_share=1 and on_policy.temperature=1",
            ),
            (
                self.scores_on_server and self.training.precision == "fp16",
                "with a teacher.server, gradients of single tokens exceed the largest number of fp16; set "
                "training.precision=bf16 or fp32",
            ),
            (
                self.pipeline == "on-policy"
                and not self.scores_on_server
                and self.on_policy.listed_tokens != OnPolicy().listed_tokens,
                f"on_policy.listed_tokens={self.on_policy.listed_tokens} has no effect without teacher.server, because "
                "a teacher in this process gives whole distributions; remove it, or set teacher.server",
            ),
            (
                self.pipeline == "on-policy" and self.on_policy.divergence != "jsd" and self.on_policy.beta != 0.5,
                f"on_policy.beta={self.on_policy.beta:g} has no effect with on_policy.divergence="
                f"{self.on_policy.divergence}; remove it, or set on_policy.divergence=jsd",
            ),
            (
                self.pipeline == "on-policy" and self.generation.longest > data.row_length,
                f"a prompt (generation.prompt_tokens) and its completion (generation.answer.max_new_tokens) have up to "
                f"{self.generation.longest} tokens together, but data.row_length is {data.row_length}; lower one of "
                "them, or raise data.row_length",
            ),
            (
                self.pipeline == "on-policy"
                and self.generation.longest <= data.row_length
                and self.training.batch_size * (data.row_length // self.generation.longest) < answer.n,
                f"the {answer.n} completions of one prompt (generation.answer.n) do not fit into a batch of "
                f"{self.training.batch_size} rows (training.batch_size) of {data.row_length} tokens; lower n or raise "
                "training.batch_size",
            ),
            (
                not self.sft_first and self.pipeline in STARTS_FROM_SFT and self.student.model is None,
                "sft_first=false (start: none) starts from student.model as it is, but student.model is not set; name "
                "the SFT model, and unset student.size or student.layers",
            ),
            (
                not self.sft_first and self.pipeline not in STARTS_FROM_SFT,
                f"start: none (sft_first=false) is for {', '.join(STARTS_FROM_SFT)}; {self.pipeline} trains no SFT "
                "student first",
            ),
            (
                self.teacher.server is not None and not self.teacher_generates and self.pipeline != "on-policy",
                f"{self.pipeline}{'' if complete else f' until={self.until}'} needs no server: teacher.server "
                "generates answers in synthetic and dpo and scores them in on-policy; remove it, or use one of these "
                "pipelines, or until=generation",
            ),
            (
                self.teacher.server is not None and answer.num_beams > 1,
                "generation.answer.num_beams: servers of the OpenAI protocol have no beam search; set 1",
            ),
            (
                self.teacher_generates
                and self.teacher.server is not None
                and self.generation.engine not in ("auto", "server"),
                f"generation.engine={self.generation.engine} and teacher.server are both set; set only one of them",
            ),
            (
                self.pipeline == "on-policy"
                and not self.mixes_teacher_answers
                and self.generation.engine in CHILD_ENGINES,
                f"generation.engine={self.generation.engine}: the weights of a student in training change, so it "
                "generates in this process; set builtin",
            ),
            (
                self.teacher.quantization is not None and self.generation.engine in CHILD_ENGINES,
                f"teacher.precision={self.teacher.precision} quantizes in this process, but generation.engine="
                f"{self.generation.engine} loads the weights itself; set engine=builtin, or precision=bf16 with the "
                'engine\'s own option, for example generation.engine_args=["--quantization","fp8"]',
            ),
            (
                self.teacher.server is None and self.generation.engine == "server",
                "generation.engine=server needs teacher.server, for example http://localhost:8000/v1",
            ),
            (
                self.teacher_generates and self.teacher.server is not None and self.generation.cache != "auto",
                "generation.cache applies to a model in this process, not to teacher.server; remove it",
            ),
        )

    def _check_shard(self, text: str) -> None:
        try:
            shard = Shard.parse(text)
        except JoulelabError as error:
            raise ValueError(f"shard: {error.message}; {error.hint}") from None
        reason = why_not_sharded(self)
        if reason is None and self.until == "train":
            reason = f"shard {shard} is part of one phase, but until=train runs all of them; set until=teacher"
        if reason is not None:
            raise ValueError(reason)

    def checks(self) -> Iterator[Callable[[], object]]:
        yield lambda: require_trackers(self._all_trainings)
        yield self.require_evaluators
        judge = self.preferences.judge
        models = (
            self.teacher.model if self.has_teacher and not self.teacher_is_elsewhere else None,
            self.student.model,
            self.tokenizer,
            judge.model if self.teacher_judges and judge.server is None else None,
        )
        yield self.data.check
        data = self.data.inputs().values()
        prompts = self.generation.prompts_from if self.answers_prompts else None
        if prompts is not None:
            yield lambda: check_prompts(prompts)
        for name in dict.fromkeys((*data, *models, self.quality.answers)):
            if name:
                yield lambda name=name: sources.parse(name)  # type: ignore[misc]
        if self.data.template is not None:
            yield lambda: read_template(Path(str(self.data.template)))
        yield self._check_harness_folder
        kind = self.teacher.quantization
        if kind is not None and (self.has_teacher or self.evaluates_teacher):
            yield lambda: require_quantization(kind, environment.uses_gpu(self.device))
        has_engine = self.generation.engine_python is not None
        if has_engine and self.answers_prompts and "generation.engine_python" not in self.unused_settings:
            yield self.engine_installation

    def engine_installation(self) -> EngineInstallation:
        """The engine that `generation.engine_python` has; raises ConfigError if it has none. With `auto`, vLLM if both
        are installed: only vLLM was measured."""
        generation = self.generation
        names = (generation.engine,) if generation.engine in CHILD_ENGINES else CHILD_ENGINES
        reasons: list[ConfigError] = []
        for name in names:
            try:
                found = EngineInstallation.find(name, generation.engine_python, generation.engine_args)
                return replace(found, with_seeds=generation.engine_seeds)
            except ConfigError as error:
                reasons.append(error)
        raise reasons[0]

    def _check_harness_folder(self) -> None:
        folder = self.quality.harness_folder
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"{Path(folder).absolute()} is not a folder", "check quality.harness_folder")

    def require_packages(self) -> None:
        optional = {"peft": bool(self.student.lora), "lm_eval": bool(self.quality.harness_tasks)}
        optional["math_verify"] = bool(self.quality.answers) and self.quality.grader == "math-verify"
        wanted = [*self.requires, *(name for name, used in optional.items() if used)]
        if self.teacher.quantization is not None and (self.has_teacher or self.evaluates_teacher):
            wanted += quantization_packages(self.teacher.quantization)
        lookup.require_packages("this run", *wanted)


# shards of the teacher's work


def why_not_sharded(spec: CausalSpec) -> str | None:
    """Why the teacher's work cannot be divided among independent tasks; None: it can."""
    phase = spec.teacher_phase
    if phase is None and spec.pipeline == "self":
        return "self learns from a student that is trained first: there is no teacher's work to shard"
    if phase is None and spec.pipeline == "on-policy":
        return "on-policy: the teacher scores what the student writes during training, so its work cannot be sharded"
    if phase is None:
        return f"{spec.pipeline} has no teacher whose work could be sharded"
    if phase == "data":
        return "until=data is not the teacher's work; only that can be sharded"
    if phase == "logits" and spec.distill.teacher == "live":
        return "distill.teacher=live runs the teacher in every training step; only a cache can be made in shards"
    if spec.own_pairs:
        return "preferences.candidates_from=data: the data has the pairs, and no teacher works on them"
    if phase == "preferences" and spec.preferences.candidates_from == "start":
        return "preferences.candidates_from=start: the answers are written by a student that is trained first"
    return None


def teacher_shard(spec: CausalSpec, shard: Shard) -> dict[str, Any]:
    """Settings of the run that does this shard: of the phase that `until` names, or of all the teacher's work."""
    complete = spec.until == "train"
    name = f"{spec.name}-teacher" if complete else spec.name
    return {
        **spec.model_dump(mode="json"),
        "name": f"{name[:60]}-{shard.name}",
        "label": f"{spec.label or spec.name}, shard {shard} of the teacher's work",
        "until": "teacher" if complete else spec.until,
        "shard": str(shard),
    }


def teacher_work(spec: CausalSpec) -> dict[str, Any]:
    """The settings that decide the teacher's work: runs that agree in them share it."""
    decisive: dict[str, Any] = {"distill": {"codec"}}
    if TEACHER_PHASES.get(spec.pipeline) != "logits":
        decisive = {"generation": {"prompts", "prompts_from", "prompt_tokens", "answer", "chain_of_thought", "engine"}}
        decisive |= {"preferences": {"judge", "rubric", "rule"}} if spec.teacher_judges else {}
    always = dict.fromkeys(("pipeline", "data", "teacher", "device"), True)
    settings = spec.model_dump(mode="json", include={**always, **decisive})
    return {**settings, "tokenizer": spec.tokenizer, "temperature": spec.distill.cached_temperature}


# Parts of an experiment as separate runs: data scripts, and shards of the teacher's work.
#
# A data script (`joulelab run EXPERIMENT --data-script NAME`) is a name for an `until` setting, with the source of a
# published dataset for some. Its run makes an artifact with its energy bill, and the experiment finds it in the
# store.
#
# Importable without torch, so that a login node can check the settings.


LANGUAGE_PIPELINES = ("sft", "kd", "synthetic", "dpo", "on-policy", "self")
PRERUN = "prerun"
"""Checks the machine through a separate command; uses only the meter settings of the experiment."""


def _published(name: str) -> tuple[str, ...]:
    data = PRESETS[name]
    switches = (
        f"data.strip_think_blocks={str(data.strip_think_blocks).lower()}",
        f"data.code_only={str(data.code_only).lower()}",
    )
    return ("until=data", f"data.source={data.source}", f"data.subset={data.subset}", *switches)


DATA_SCRIPTS: dict[str, tuple[str, ...]] = {
    "preprocess_dataset": ("until=data",),
    "tulu_preprocess_dataset": _published("tulu-3"),
    "codeforces_preprocess_dataset": _published("codeforces-cots"),
    "openr1_math_preprocess_dataset": _published("openr1-math"),
    "logit_caching": ("until=logits",),
    "synthetic_generation": ("until=generation",),
    "preference_dataset": ("until=preferences",),
    PRERUN: (),
}


def data_script_settings(
    script: str, experiment: str, overrides: Sequence[str] = (), pipeline: str = LANGUAGE_PIPELINES[0]
) -> list[str]:
    """The script's changes to the experiment, as `key.path=value`; the user's `overrides` come later and win.

    A local copy of a published dataset has no subsets, so with `data.source=FILE` the hub's subset is not used.
    """
    if script not in DATA_SCRIPTS:
        raise lookup.unknown("data script", script, DATA_SCRIPTS)
    if pipeline not in LANGUAGE_PIPELINES:
        raise UsageError(
            f"{script} is for experiments with language models ({', '.join(LANGUAGE_PIPELINES)}), but "
            f"{experiment} has the pipeline {pipeline}",
            "use one of those, for example kd-tiny; `joulelab experiments` lists them",
        )
    own = DATA_SCRIPTS[script]
    given = dict(setting.split("=", 1) for setting in overrides if "=" in setting)
    if "data.source" in given and Path(given["data.source"]).exists():
        own = (*(setting for setting in own if not setting.startswith("data.subset=")), "data.subset=all")
    return [f"name={experiment}-{script}"[:85], *own]


def shard_spec(spec: RunSpec, shard: Shard) -> RunSpec:
    """Checked settings of the run that does this shard of the teacher's work."""
    reason = _why_not_sharded(spec)
    if reason is not None or not isinstance(spec, CausalSpec):
        raise UsageError(
            f"{spec.name} cannot be sharded: {reason}",
            f"pipelines whose teacher's work can be sharded: {', '.join(TEACHER_PHASES)}",
        )
    return check(teacher_shard(spec, shard))


def shard_specs(specs: Sequence[RunSpec], shards: int) -> list[list[RunSpec]]:
    """The runs of all shards, for each teacher's work that these runs need; work that several need is listed once."""
    works: dict[str, RunSpec] = {}
    for spec in specs:
        if isinstance(spec, CausalSpec) and why_not_sharded(spec) is None:
            works.setdefault(json.dumps(teacher_work(spec), sort_keys=True), spec)
    chosen = list(works.values()) or [specs[0]]  # which then raises with the reason
    return [[shard_spec(spec, Shard(number, shards)) for number in range(shards)] for spec in chosen]


def _why_not_sharded(spec: RunSpec) -> str | None:
    if isinstance(spec, CausalSpec):
        return why_not_sharded(spec)
    return f"the pipeline '{spec.pipeline}' has no teacher's work that can be divided"
