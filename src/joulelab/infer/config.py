"""Settings of the pipeline `infer`: one model, the ways to run it, and how long to look. Importable without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from joulelab import lookup
from joulelab.data import hub, samples, sources
from joulelab.errors import ConfigError, NotFoundError, UsageError
from joulelab.meter.sensors.cpu import usable_cores
from joulelab.runs import environment
from joulelab.runs.spec import RunSpec
from joulelab.runs.storage import read_json
from joulelab.zoo.norms.encoder_shapes import SHAPES, Norm
from joulelab.zoo.registry import WorkloadRequest, find_model, is_file, require_packages

# Whether what a user named can be found, asked before anything starts: a slip should not wait for an idle baseline.


def is_python_file(name: str) -> bool:
    return name.endswith(".py") and is_file(name)


def require_weights(name: str, model: str) -> None:
    """`name`: where the weights of `model` are to be read from."""
    if not name:
        raise UsageError(f"no weights of {model} in this size were published", "leave --weights out, or name a folder")
    place = sources.parse(name)
    if place.kind == "hub" and "/" not in name:
        known = [*SHAPES, *lookup.ZOO.names(), *(sources.SAMPLE_PREFIX + sample for sample in samples.SAMPLES)]
        raise lookup.unknown("model", name, known, "or a folder, or a hub id such as org/name")
    if place.kind == "hub" and hub.cached_folder(name, "config.json") is None:
        hub.require_reachable(name)
    if place.kind == "sample" and samples.find(place.name).kind == "labeled-text":
        raise UsageError(f"{name} is labelled text, not a model", "use sample:minilm or sample:smollm2")
    if place.path is not None and place.path.is_dir() and not (place.path / "config.json").exists():
        raise NotFoundError(f"{place.path} holds no config.json", "name a folder in Hugging Face format")


def max_positions(model: str) -> int | None:
    """Of a sample, folder or hub id, by its config.json; None where there is no such file here, as with GGUF."""
    place = sources.parse(model)
    folder = hub.cached_folder(model, "config.json") if place.kind == "hub" else place.path
    if folder is None or not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    found = next((config[key] for key in ("max_position_embeddings", "n_positions") if key in config), None)
    return found if isinstance(found, int) else None


def require_positions(model: str, limit: int | None, lengths: Sequence[int]) -> None:
    for tokens in lengths:
        if limit is not None and tokens > limit:
            raise ConfigError(
                f"{model} has {limit:,} positions; {tokens:,} tokens were requested",
                f"request at most {limit:,} tokens",
            )


# How many threads of the CPU an inference gets where nobody says so.


THREADS_VARIABLE = "OMP_NUM_THREADS"


def default_thread_count() -> int:
    """What the variable that all of OpenMP obeys says, for its outermost level; else every core we may use."""
    said = os.environ.get(THREADS_VARIABLE, "").split(",")[0].strip()
    return min(int(said), usable_cores()) if said.isdecimal() and int(said) > 0 else usable_cores()


Dtype = Literal["fp32", "tf32", "autocast-bf16", "autocast-fp16", "bf16", "fp16"]
Mode = Literal["eager", "compiled", "cuda-graph", "reduce-overhead", "fastest"]
GPU_MODES = ("cuda-graph", "reduce-overhead")
IDLE_S = 5.0
LIMIT_S = 60.0
PUBLISHED = "published"
_ONLY_FOR_GENERATION = ("prompt_tokens", "new_tokens")
Kind = Literal["encoder", "zoo", "pretrained"]


@dataclass(frozen=True)
class Case:
    """One row of the table: how the model is run, and on how much at once."""

    batch_size: int
    tokens: int
    """Of a sequence; 0: as the model has it."""
    mode: Mode
    dtype: Dtype
    norm: Norm | None = None

    @property
    def stage(self) -> str:
        parts = [
            f"b{self.batch_size}",
            f"t{self.tokens}" if self.tokens else "",
            self.mode,
            self.dtype,
            self.norm or "",
        ]
        return "infer." + "-".join(part for part in parts if part)


class InferSpec(RunSpec):
    """Profile inference: how long a call takes and how many joules an item, for every combination that is asked for."""

    pipeline: Literal["infer"] = "infer"
    """Which pipeline runs the stages."""
    model: str
    """deit-t, deit-s, deit-b, bert-b, bert-l (our own encoders), a model of `joulelab zoo`, a .py file with a MODEL,
    a sample, a folder or a hub id."""
    size: str = ""
    """Which size, for a model of `joulelab zoo`; empty: its published default. Others (deit-*, bert-b, bert-l, samples,
    folders, hub ids) have one size."""
    weights: str = ""
    """For our own encoders and the zoo: `published`, a folder or a hub id; empty: drawn from the seed, which takes the
    same time and nearly the same joules."""
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    """Items in a call, one row of the table for each."""
    seq_lengths: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Tokens of a sequence, for models of text; empty: 128, or what the zoo's model has."""
    dtypes: tuple[Dtype, ...] = ("fp32",)
    """fp32, tf32, autocast-bf16 or autocast-fp16 (fp32 weights, cast in every call), bf16 or fp16 (weights cast)."""
    modes: tuple[Mode, ...] = ()
    """eager, compiled, cuda-graph, reduce-overhead (torch.compile's own graphs), or fastest (several are tried); empty:
    eager, and for generating text on a GPU cuda-graph, as servers do."""
    tune: bool = False
    """With the mode fastest: try matrix kernels as well, for minutes and some percent."""
    norms: tuple[Norm, ...] = ()
    """For our own encoders: pre-ln, pre-rms, pre-crms, post-ln, none; empty: as published."""
    threads: int = Field(0, ge=0)
    """Of the CPU; 0: OMP_NUM_THREADS where that is set, else as many as this process may use."""
    min_run_time_s: float = Field(5.0, gt=0, le=3600)
    """Seconds that each row is run at least; sensors refresh every 100 ms, so tens of refreshes are wanted."""
    rounds: int = Field(4, ge=1, le=100)
    """Into how many rounds that time is divided; rows of one batch size take turns, so that drift hits all alike."""
    target_ci: float | None = Field(None, gt=0, lt=1)
    """Go on until the 95 % interval of the energy is at most this share of it (0.02), or `max_time_s` is over."""
    max_time_s: float | None = Field(None, gt=0, le=36000)
    """Seconds after which a row ends although its interval is wider than `target_ci`; empty: 60, or `min_run_time_s`
    where that is longer."""
    generate: bool = False
    """Generate text: prefill and decode apart, time to first token, time and joules per token and per response."""
    prompt_tokens: int = Field(256, ge=1)
    """With `generate`: tokens of a prompt."""
    new_tokens: int = Field(128, ge=2)
    """With `generate`: tokens of a response; it always has this many, whatever the model would like to end with."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU where there is one."""

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Idle baselines are part of an inference's figures; the name is the model's."""
        name, energy = settings.get("model"), settings.get("energy", {})
        if not isinstance(name, str) or not isinstance(energy, dict):
            return dict(settings)
        model = f"{sources.SAMPLE_PREFIX}{name}" if name in samples.SAMPLES else name
        idle = {"idle_before_s": IDLE_S, "idle_after_s": IDLE_S}
        title = "infer-" + model.rstrip("/").rpartition("/")[2].replace(":", "-").removesuffix(".py")[:60]
        return {"name": title} | dict(settings) | {"model": model, "energy": idle | energy}

    @field_validator("batch_sizes", "seq_lengths", "dtypes", "modes", "norms")
    @classmethod
    def _named_once(cls, values: Sequence[Any]) -> Sequence[Any]:
        """Two rows of one name would be one row with the figures of neither."""
        twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
        if twice:
            raise ValueError(f"{twice[0]} is named twice, and a row is measured once (rounds=8 repeats all rows)")
        return values

    @field_validator("batch_sizes", "dtypes")
    @classmethod
    def _at_least_one(cls, values: Sequence[Any]) -> Sequence[Any]:
        if not values:
            raise ValueError("without a value there is no row to measure")
        return values

    @model_validator(mode="after")
    def _fits_the_model(self) -> InferSpec:
        if self.norms and self.kind != "encoder":
            raise ValueError(f"norms can be chosen for {', '.join(SHAPES)}, not for {self.model}")
        if self.model in SHAPES and SHAPES[self.model].kind == "image" and self.seq_lengths:
            raise ValueError(f"{self.model} takes images of one size; a sequence length fits models of text")
        if self.generate and self.kind != "pretrained":
            raise ValueError(
                f"generate needs a causal language model by sample, folder or hub id, and {self.model} is none of these"
            )
        if self.generate and self.seq_lengths:
            raise ValueError("with generate the lengths are prompt_tokens and new_tokens; leave seq_lengths out")
        if self.size and self.kind != "zoo":
            raise ValueError(f"size is about models of `joulelab zoo`, and {self.model} is none: it has one size")
        if self.weights and self.kind == "pretrained":
            raise ValueError(f"weights are for a model that is built here; {self.model} brings its own")
        if self.tune and "fastest" not in self.modes:
            raise ValueError("tune is for the mode fastest, which is not among the modes")
        for name in _ONLY_FOR_GENERATION:
            if not self.generate and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} belongs to generation; add --generate (generate=true)")
        if self.max_time_s is not None and self.target_ci is None:
            raise ValueError("max_time_s is the limit of target_ci, which is not set; add --target-ci 2%")
        if self.generate and set(self.modes) & {"fastest", "reduce-overhead"}:
            raise ValueError("generate takes the modes eager, compiled and cuda-graph; they mean the decoding step")
        if self.target_ci is not None and self.limit_s < self.min_run_time_s:
            raise ValueError(
                f"max_time_s ({self.limit_s:g} s) is shorter than min_run_time_s ({self.min_run_time_s:g} s), which "
                "every row is run for anyway; name a longer limit, or a shorter minimum"
            )
        return self

    @property
    def limit_s(self) -> float:
        return max(LIMIT_S, self.min_run_time_s) if self.max_time_s is None else self.max_time_s

    @property
    def kind(self) -> Kind:
        if self.model in SHAPES:
            return "encoder"
        return "zoo" if self.model in lookup.ZOO.names() or is_python_file(self.model) else "pretrained"

    @property
    def usable_threads(self) -> int:
        return self.threads or default_thread_count()

    @property
    def weights_from(self) -> str | None:
        """Where weights are read: a sample, path or hub id; None where they are drawn from the seed."""
        if self.kind == "pretrained":
            return self.model
        if self.weights != PUBLISHED:
            return self.weights or None
        if self.model in SHAPES:
            return SHAPES[self.model].hub_id
        return WorkloadRequest(find_model(self.model), self.size).size.hub_id

    def groups(self) -> Iterator[list[Case]]:
        """Rows of one input, which take turns."""
        lengths = self.seq_lengths or ((128,) if self.is_text_encoder else (0,))
        for tokens, batch_size in product(lengths, self.batch_sizes):
            yield [
                Case(batch_size, tokens, mode, dtype, norm)
                for norm, dtype, mode in product(self.norms or (None,), self.dtypes, self.modes or ("eager",))
            ]

    def decoding_modes(self, on_gpu: bool) -> tuple[Mode, ...]:
        return self.modes or (("cuda-graph",) if on_gpu else ("eager",))

    @property
    def is_text_encoder(self) -> bool:
        return self.kind == "pretrained" or (self.model in SHAPES and SHAPES[self.model].kind == "text")

    def preflight(self) -> None:
        gpu = self.device != "cpu" and bool(environment.gpus())
        if self.device == "cuda" and not gpu:
            raise UsageError("device=cuda, and there is no NVIDIA GPU here", "leave it out, or write --device cpu")
        for mode in self.modes:
            if mode in GPU_MODES and not gpu:
                raise UsageError(
                    f"the mode {mode} launches CUDA graphs, and this runs on a CPU", "use eager, compiled or fastest"
                )
        if "tf32" in self.dtypes and not gpu:
            raise UsageError("tf32 is a GPU's way to multiply, and this runs on a CPU: it would be fp32", "use fp32")
        if self.threads > usable_cores():
            raise UsageError(
                f"{self.threads} threads, and this process may use {usable_cores()} cores", "ask for as many, or fewer"
            )
        if self.kind == "zoo":
            entry = find_model(self.model)
            require_packages(entry)
            for tokens in self.seq_lengths or (0,):
                shape = {"tokens": tokens} if tokens else {}
                WorkloadRequest(entry, self.size, weights=self.weights, asked_shape=shape).require_length()
        if self.model in SHAPES:
            require_positions(self.model, SHAPES[self.model].positions, self.seq_lengths)
        if self.weights_from is not None:
            require_weights(self.weights_from, self.model)
        if self.kind == "pretrained":
            lengths = (self.prompt_tokens + self.new_tokens,) if self.generate else self.seq_lengths
            require_positions(self.model, max_positions(self.model), lengths)
