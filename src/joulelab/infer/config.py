"""Settings of the pipeline `infer`: the model, how to run it, and how long to measure. Importable without torch.

Preflight checks that everything the user named can be found before the idle baseline is measured.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from joulelab import lookup
from joulelab.data import hub, sources
from joulelab.data.text import json_rows, unreadable
from joulelab.errors import ConfigError, NotFoundError, UsageError
from joulelab.meter.sensors.cpu import usable_cores
from joulelab.runs import environment
from joulelab.runs.paths import read_json
from joulelab.runs.spec import RunSpec, user_path
from joulelab.units import size_text
from joulelab.zoo.norms.encoder_shapes import SHAPES, Norm
from joulelab.zoo.quantization import (
    WEIGHT_BYTES,
    Quantization,
    is_quantized,
    quantization_packages,
    require_quantization,
)
from joulelab.zoo.registry import PUBLISHED, WorkloadRequest, find_model, is_file, require_packages

Prompt = str | list[dict[str, str]]
"""A text to continue, or the messages of a conversation."""


def is_python_file(name: str) -> bool:
    return name.endswith(".py") and is_file(name)


def require_weights(name: str, model: str, zoo_models: bool = False) -> None:
    """Check that `name`, where the weights of `model` are read from, exists. `zoo_models`: what is asked for may also
    be a model of the zoo."""
    if not name:
        raise UsageError(f"{model} has no published weights in this size", "omit --weights, or pass a folder")
    place = sources.parse(name)
    cached = place.kind == "hub" and hub.cached_folder(name, "config.json") is not None
    if place.kind == "hub" and "/" not in place.repo and not cached:  # few hub ids have no organization
        zoo = {*SHAPES, *lookup.ZOO.names()}
        if name in zoo:
            raise UsageError(
                f"{name} is the name of a zoo model; expected a model with weights",
                "pass a folder, a hub id such as org/name, or a sample such as sample:smollm2",
            )
        samples = [
            sources.SAMPLE_PREFIX + sample.name for sample in sources.SAMPLES.values() if sample.kind != "labeled-text"
        ]
        known = [*(zoo if zoo_models else ()), *samples]
        raise lookup.unknown("model", name, known, "or a folder, or a hub id such as org/name")
    if place.kind == "hub" and not cached:
        hub.require_reachable(name)
    if place.kind == "sample" and sources.find_sample(place.name).kind == "labeled-text":
        raise UsageError(f"{name} is labeled text, not a model", "use sample:minilm or sample:smollm2")
    if place.path is not None and place.path.is_dir() and not (place.path / "config.json").exists():
        raise NotFoundError(f"{place.path} has no config.json", "pass a folder in Hugging Face format")


def max_positions(model: str) -> int | None:
    """Maximum sequence length from the config.json of a sample, folder or hub id, or from a GGUF file; None if it is
    not known."""
    config = model_config(model)
    found = next((config[key] for key in ("max_position_embeddings", "n_positions") if key in config), None)
    return found if isinstance(found, int) else None


def require_positions(model: str, limit: int | None, lengths: Sequence[int]) -> None:
    for tokens in lengths:
        if limit is not None and tokens > limit:
            raise ConfigError(
                f"{model} has {limit:,} positions; {tokens:,} tokens were requested",
                f"request at most {limit:,} tokens",
            )


THREADS_VARIABLE = "OMP_NUM_THREADS"


def default_thread_count() -> int:
    """OMP_NUM_THREADS (its outermost level) if it is set, else all usable cores."""
    value = os.environ.get(THREADS_VARIABLE, "").split(",")[0].strip()
    return min(int(value), usable_cores()) if value.isdecimal() and int(value) > 0 else usable_cores()


Dtype = Literal["fp32", "tf32", "autocast-bf16", "autocast-fp16", "bf16", "fp16", Quantization]
Mode = Literal["eager", "compiled", "cuda-graph", "reduce-overhead", "fastest"]
GPU_MODES = ("cuda-graph", "reduce-overhead")
IDLE_S = 5.0
LIMIT_S = 60.0
_ONLY_FOR_GENERATION = ("prompt_tokens", "new_tokens", "prompts")
Kind = Literal["encoder", "zoo", "pretrained"]


@dataclass(frozen=True)
class Case:
    """One row of the table: input shape, mode, precision and norm."""

    batch_size: int
    tokens: int
    """Tokens per sequence; 0: the model's own input size."""
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
    """Profile inference: latency and energy per item for every combination of the listed values."""

    pipeline: Literal["infer"] = "infer"
    """The pipeline that runs the stages."""
    model: str
    """deit-t, deit-s, deit-b, bert-b, bert-l (built-in encoders), a model of `joulelab zoo`, a .py file that defines
    MODEL, a sample, a folder or a hub id."""
    size: str = ""
    """Size of a zoo model; empty: the published default. All other models have one size."""
    weights: str = ""
    """For built-in encoders and the zoo: `published`, a folder or a hub id; empty: random weights from the seed, which
    take the same time and nearly the same energy."""
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    """Items per call; one row of the table each."""
    seq_lengths: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Tokens per sequence, for text models; empty: 128, or the default of a zoo model."""
    dtypes: tuple[Dtype, ...] = ("fp32",)
    """fp32, tf32, autocast-bf16 or autocast-fp16 (fp32 weights, cast in every call), bf16 or fp16 (cast once); for
    samples, folders and hub ids also quantized weights: int8, nf4 (bitsandbytes), fp8, fp8-weights, int4 (torchao)."""
    modes: tuple[Mode, ...] = ()
    """eager, compiled, cuda-graph, reduce-overhead (torch.compile with CUDA graphs), or fastest (the best of several
    trials). Empty: eager; for generation on a GPU cuda-graph, as servers do."""
    tune: bool = False
    """With mode fastest: also autotune matrix kernels. Takes minutes and gains a few percent."""
    norms: tuple[Norm, ...] = ()
    """For built-in encoders: pre-ln, pre-rms, pre-crms, post-ln, none; empty: as published."""
    threads: int = Field(0, ge=0)
    """CPU threads; 0: OMP_NUM_THREADS if set, else all cores available to this process."""
    min_run_time_s: float = Field(5.0, gt=0, le=3600)
    """Minimum measured time per row. GPU sensors refresh every 100 ms, so measure for many refreshes."""
    rounds: int = Field(4, ge=1, le=100)
    """Rounds that this time is divided into. Rows of one input shape take turns, so that drift affects all alike."""
    target_ci: float | None = Field(None, gt=0, lt=1)
    """Measure until the 95 % interval of the energy is at most this fraction of it (0.02), or until `max_time_s`."""
    max_time_s: float | None = Field(None, gt=0, le=36000)
    """Maximum measured time per row with `target_ci`; null: 60 s, or `min_run_time_s` if that is longer."""
    generate: bool = False
    """Profile text generation: prefill and decode separately, time to first token, time and energy per token and per
    response."""
    prompt_tokens: int = Field(256, ge=1)
    """With `generate`: tokens per prompt."""
    prompts: str = ""
    """With `generate`: a file of prompts instead of random tokens: .txt with one per line, or .jsonl with `prompt`,
    `text` or `messages` in each line. A batch is padded to its longest prompt."""
    new_tokens: int = Field(128, ge=2)
    """With `generate`: tokens per response; end-of-text tokens are ignored."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device; auto uses a GPU if there is one. mps: Apple's GPU, not tested on hardware, never chosen by auto."""

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in a name from the model, and idle baselines, which net energy needs."""
        name, energy = settings.get("model"), settings.get("energy", {})
        if not isinstance(name, str) or not isinstance(energy, dict):
            return dict(settings)
        model = f"{sources.SAMPLE_PREFIX}{name}" if name in sources.SAMPLES else name
        idle = {"idle_before_s": IDLE_S, "idle_after_s": IDLE_S}
        title = "infer-" + model.rstrip("/").rpartition("/")[2].replace(":", "-").removesuffix(".py")[:60]
        complete = {"name": title} | dict(settings) | {"model": model, "energy": idle | energy}
        if isinstance(prompts := settings.get("prompts"), str) and prompts:  # absolute: resumable from another folder
            complete = {"generate": True} | complete | {"prompts": str(user_path(prompts).absolute())}
        return complete

    @field_validator("batch_sizes", "seq_lengths", "dtypes", "modes", "norms")
    @classmethod
    def _no_duplicates(cls, values: Sequence[Any]) -> Sequence[Any]:
        """Rows are identified by these values."""
        twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
        if twice:
            raise ValueError(f"{twice[0]} is listed twice; use rounds=8 to repeat all rows")
        return values

    @field_validator("batch_sizes", "dtypes")
    @classmethod
    def _at_least_one(cls, values: Sequence[Any]) -> Sequence[Any]:
        if not values:
            raise ValueError("at least one value is required")
        return values

    @model_validator(mode="after")
    def _check_combination(self) -> InferSpec:
        if self.norms and self.kind != "encoder":
            raise ValueError(f"norms apply to {', '.join(SHAPES)}, not to {self.model}")
        if self.model in SHAPES and SHAPES[self.model].kind == "image" and self.seq_lengths:
            raise ValueError(f"{self.model} takes images; seq_lengths applies to text models")
        if self.generate and self.kind != "pretrained":
            raise ValueError(
                f"generate requires a causal language model (sample, folder or hub id); {self.model} is none of these"
            )
        if self.generate and self.seq_lengths:
            raise ValueError("generate uses prompt_tokens and new_tokens; omit seq_lengths")
        if self.prompts and self.prompt_tokens != type(self).model_fields["prompt_tokens"].default:
            raise ValueError("prompts have their own lengths; omit prompt_tokens")
        if self.size and self.kind != "zoo":
            raise ValueError(f"size applies to models of `joulelab zoo`; {self.model} has one size")
        if self.weights and self.kind == "pretrained":
            raise ValueError(f"weights applies to built-in and zoo models; {self.model} has its own weights")
        quantized = [dtype for dtype in self.dtypes if is_quantized(dtype)]
        if quantized and self.kind != "pretrained":
            raise ValueError(
                f"dtypes: {quantized[0]} weights are for a sample, folder or hub id; {self.model} is none of these"
            )
        if self.tune and "fastest" not in self.modes:
            raise ValueError("tune requires the mode fastest, which is not in modes")
        for name in _ONLY_FOR_GENERATION:
            if not self.generate and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} requires --generate (generate=true)")
        if self.max_time_s is not None and self.target_ci is None:
            raise ValueError("max_time_s requires target_ci, which is not set; add --target-ci 2%")
        if self.generate and set(self.modes) & {"fastest", "reduce-overhead"}:
            raise ValueError("generate supports the modes eager, compiled and cuda-graph (of the decoding step)")
        if self.target_ci is not None and self.limit_s < self.min_run_time_s:
            raise ValueError(
                f"max_time_s ({self.limit_s:g} s) is shorter than min_run_time_s ({self.min_run_time_s:g} s); raise "
                "max_time_s or lower min_run_time_s"
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
        """Source of the weights: a sample, path or hub id; None for random weights."""
        if self.kind == "pretrained":
            return self.model
        if self.weights != PUBLISHED:
            return self.weights or None
        if self.model in SHAPES:
            return SHAPES[self.model].hub_id
        return WorkloadRequest(find_model(self.model), self.size).size.hub_id

    def groups(self) -> Iterator[list[Case]]:
        """Rows with the same input shape, which take turns."""
        lengths = self.seq_lengths or ((128,) if self.is_text_encoder else (0,))
        for tokens, batch_size in product(lengths, self.batch_sizes):
            yield [
                Case(batch_size, tokens, mode, dtype, norm)
                for norm, dtype, mode in product(self.norms or (None,), self.dtypes, self.modes or ("eager",))
            ]

    def decoding_modes(self, on_gpu: bool, dtype: str = "fp32") -> tuple[Mode, ...]:
        # int8 looks for outliers on the host in every product, which a CUDA graph cannot contain.
        return self.modes or (("cuda-graph",) if on_gpu and dtype != "int8" else ("eager",))

    @property
    def is_text_encoder(self) -> bool:
        return self.kind == "pretrained" or (self.model in SHAPES and SHAPES[self.model].kind == "text")

    def preflight(self) -> None:
        """Check files, lengths, device and memory before the idle baseline is measured."""
        self.require_packages()
        self._require_files()
        prompt_tokens = self._longest_prompt()
        if self.kind == "pretrained":
            lengths = (prompt_tokens + self.new_tokens,) if self.generate else self.seq_lengths
            require_positions(self.model, max_positions(self.model), lengths)
        on_gpu = self._require_device()
        require_memory(self, on_gpu, prompt_tokens)

    def require_packages(self) -> None:
        if self.kind == "zoo":
            require_packages(find_model(self.model))
        lookup.require_packages("this run", "torch", "transformers", *quantization_packages(*self.dtypes))

    def _require_files(self) -> None:
        if self.kind == "zoo":
            entry = find_model(self.model)
            for tokens in self.seq_lengths or (0,):
                shape = {"tokens": tokens} if tokens else {}
                WorkloadRequest(entry, self.size, weights=self.weights, requested_shape=shape).require_length()
        if self.model in SHAPES:
            require_positions(self.model, SHAPES[self.model].positions, self.seq_lengths)
        if self.weights_from is not None:
            require_weights(self.weights_from, self.model, zoo_models=self.weights_from == self.model)
        if self.kind == "pretrained":
            require_usable_model(self.model, self.generate)
        if self.prompts:
            require_tokenizer(self.model)

    def _longest_prompt(self) -> int:
        """In tokens. Without torch (a login node), prompts are read but not tokenized: 1."""
        if not self.prompts:
            return self.prompt_tokens
        prompts = read_prompts(Path(self.prompts))
        if find_spec("torch") is None or find_spec("transformers") is None:
            return 1
        lengths = lookup.CALCULATIONS.resolve("prompt-lengths")(self.model, prompts)
        limit = max_positions(self.model)
        for number, tokens in enumerate(lengths, 1):
            if limit is not None and tokens + self.new_tokens > limit:
                raise ConfigError(
                    f"prompt {number} of {self.prompts} has {tokens:,} tokens; with {self.new_tokens:,} new tokens it "
                    f"does not fit into the {limit:,} positions of {self.model}",
                    "shorten or remove the prompt, or lower --new-tokens",
                )
        return int(max(lengths))

    def _require_device(self) -> bool:
        """Whether a GPU is used."""
        environment.require_mac(self.device)
        gpu = self.device not in ("cpu", "mps") and bool(environment.gpus())
        if self.device == "cuda" and not gpu:
            raise UsageError(
                "device=cuda was requested but no NVIDIA GPU was found", "omit --device or use --device cpu"
            )
        if gpu and not environment.torch_has_cuda():
            if self.device == "cuda":
                raise UsageError(
                    "device=cuda was requested but the installed torch is a CPU build",
                    "install a CUDA build of torch, or use --device cpu",
                )
            gpu = False
        for mode in self.modes:
            if mode in GPU_MODES and not gpu:
                raise UsageError(
                    f"mode {mode} uses CUDA graphs, but the device is a CPU", "use eager, compiled or fastest"
                )
        for dtype in self.dtypes:
            if is_quantized(dtype):
                require_quantization(dtype, gpu)
        if "tf32" in self.dtypes and not gpu:
            raise UsageError("tf32 exists on GPUs only, but the device is a CPU", "use fp32")
        if self.threads > usable_cores():
            raise UsageError(
                f"{self.threads} threads were requested; this process may use {usable_cores()} cores",
                f"set threads to at most {usable_cores()}",
            )
        return gpu


# Prompts from a file.

_PROMPT_HINT = 'write one prompt per line of a .txt file, or {"prompt": "..."} per line of a .jsonl file'
_PROMPT_KEYS = ("prompt", "text", "messages")


def read_prompts(path: Path) -> list[Prompt]:
    """Texts, or conversations that end with a user's message; validated."""
    if not path.exists():
        raise NotFoundError(f"there is no prompt file {path}", _PROMPT_HINT)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, expected a file of prompts", _PROMPT_HINT)
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv", ".parquet", ".xlsx", ".yaml", ".yml"):
        # as plain lines, the header and every column would be part of the prompts
        raise ConfigError(f"{path} is a {kind} file, expected .txt or .jsonl", _PROMPT_HINT)
    try:
        if kind in (".jsonl", ".json"):
            prompts = [_prompt(row, f"row {number}") for number, row in enumerate(json_rows(path), 1)]
        else:
            text = path.read_text(encoding="utf-8")
            if "\0" in text:
                raise ConfigError(f"{path} is not text: it contains NUL bytes", _PROMPT_HINT)
            prompts = [line.strip() for line in text.splitlines() if line.strip()]
    except (ValueError, OSError) as error:
        raise unreadable(path, error) from None
    if not prompts:
        raise ConfigError(f"{path} has no prompts", _PROMPT_HINT)
    return prompts


def _prompt(row: Any, where: str) -> Prompt:
    value = row
    if isinstance(row, dict):
        key = next((key for key in _PROMPT_KEYS if key in row), None)
        if key is None:
            raise ValueError(f"{where} has {', '.join(map(str, row)) or 'no keys'}, expected {', '.join(_PROMPT_KEYS)}")
        value = row[key]
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        if value[-1]["role"] != "user":
            raise ValueError(f"{where} ends with a message of '{value[-1]['role']}', expected a message of 'user'")
        extra = next((key for message in value for key in message if key in _NOT_TEXT and message[key]), None)
        if extra is not None:
            raise ValueError(f"{where} has a message with {extra}; generation takes messages with text only")
        return [{"role": message["role"], "content": message["content"]} for message in value]
    raise ValueError(f"{where} is {value!r:.60}, expected a string or a list of messages with role and content")


_NOT_TEXT = ("tool_calls", "function_call", "reasoning_content", "tools")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


# Models in Hugging Face format, from the files alone.

_GENERATES = ("CausalLM", "LMHead", "Generation")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")


def model_folder(model: str) -> Path | None:
    """Folder of a sample, path or downloaded hub id; None for a file such as GGUF and for what is not downloaded."""
    place = sources.parse(model)
    folder = hub.cached_folder(model, "config.json") if place.kind == "hub" else place.path
    return folder if folder is not None and folder.is_dir() else None


def gguf_file(model: str) -> Path | None:
    path = sources.parse(model).path
    if path is not None and path.is_dir() and not (path / "config.json").exists():
        path = next(iter(sorted(path.glob("*.gguf"))), None)
    return path if path is not None and path.suffix.lower() == ".gguf" else None


# Names of a GGUF file's metadata after that of the architecture, and of the same numbers in config.json.
_GGUF_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}


def _gguf_config(file: Path) -> dict[str, Any]:
    """The metadata begin with key-value pairs: the key's text, the type (4: 32-bit unsigned), the value."""
    with file.open("rb") as opened:
        head = opened.read(65_536)
    found = {
        name: re.search(re.escape(f".{key}".encode()) + rb"\x04\0\0\0(.{4})", head, re.DOTALL)
        for key, name in _GGUF_KEYS.items()
    }
    return {name: int.from_bytes(match[1], "little") for name, match in found.items() if match}


def model_config(model: str) -> dict[str, Any]:
    """Its config.json, or the same numbers from a GGUF file; empty if they are not known without loading the model."""
    if (file := gguf_file(model)) is not None:
        return _gguf_config(file)
    folder = model_folder(model)
    return read_json(folder / "config.json") if folder and (folder / "config.json").is_file() else {}


def require_usable_model(model: str, generate: bool) -> None:
    config = model_config(model)
    if config.get("is_encoder_decoder") and not generate:
        raise ConfigError(
            f"{model} is an encoder-decoder model, whose inputs cannot be generated automatically",
            "use a zoo model (t5, bart), which has its own inputs",
        )
    classes = config.get("architectures") or []
    generates = not classes or any(part in name for name in classes for part in _GENERATES)
    if generate and (config.get("is_encoder_decoder") or not generates):
        raise ConfigError(
            f"{model} is not a causal language model ({', '.join(classes)})", "use one such as sample:smollm2"
        )


def require_tokenizer(model: str) -> None:
    folder = model_folder(model)
    if folder is not None and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise NotFoundError(
            f"{folder} has no tokenizer, which --prompts needs",
            f"copy the tokenizer's files there ({', '.join(_TOKENIZER_FILES[:2])}, ...), or use --prompt-tokens",
        )


# Memory: a lower bound from what the files and settings say, compared with what is free.

_BYTES: Mapping[str, float] = {
    "fp32": 4,
    "tf32": 4,
    "autocast-bf16": 4,
    "autocast-fp16": 4,
    "bf16": 2,
    "fp16": 2,
    **WEIGHT_BYTES,
}
_LARGEST_HEADER = 100_000_000


def require_memory(spec: InferSpec, on_gpu: bool, prompt_tokens: int) -> None:
    """Refuse a row whose weights, cache and largest activations exceed the free memory. Real use is higher."""
    free_bytes = environment.free_gpu_bytes() if on_gpu else environment.free_memory_bytes()
    if free_bytes is None:
        return
    weights = _weight_bytes(spec)
    batch_size = max(spec.batch_sizes)
    needed = weights + batch_size * _item_bytes(spec, prompt_tokens)
    if needed > free_bytes:
        where = "GPU memory" if on_gpu else "memory"
        own = f", of which {size_text(weights)} are weights" if weights else ""
        raise UsageError(
            f"{spec.model} with batch size {batch_size} needs at least {size_text(needed)} of {where}{own}; "
            f"{size_text(free_bytes)} is free",
            "use a smaller model, batch or sequence, or 16-bit weights (--dtype bf16)",
        )


def _weight_bytes(spec: InferSpec) -> int:
    """All precisions and norms are in memory at the same time; for generation one after the other."""
    each = [int(_parameters(spec) * _BYTES[dtype]) for dtype in spec.dtypes]
    return max(each) if spec.generate else sum(each) * max(1, len(spec.norms))


def _parameters(spec: InferSpec) -> int:
    """0 if it is not known without loading the model."""
    if spec.kind == "encoder":
        return SHAPES[spec.model].parameters
    if spec.kind == "zoo":
        return WorkloadRequest(find_model(spec.model), spec.size).size.parameters
    if (file := gguf_file(spec.model)) is not None:
        return file.stat().st_size // 4  # at most 32 bits per weight
    folder = model_folder(spec.model)
    if folder is None:
        return 0
    return sum(map(_safetensors_parameters, folder.glob("*.safetensors"))) or sum(
        file.stat().st_size // 4 for file in folder.glob("pytorch_model*.bin")
    )


def _safetensors_parameters(file: Path) -> int:
    """From the header: eight bytes of length, then JSON with the shape of every tensor."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if length < _LARGEST_HEADER else {}
        shapes = [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
        return sum(math.prod(shape) for shape in shapes)
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # loading reports a damaged file


def _item_bytes(spec: InferSpec, prompt_tokens: int) -> int:
    """Input, the largest activation and, for generation, the cache of one item; 0 where the shape is not known."""
    each = min(2 if "16" in dtype or is_quantized(dtype) else 4 for dtype in spec.dtypes)
    if spec.kind == "encoder":
        shape = SHAPES[spec.model]
        tokens = shape.patches + 1 if shape.kind == "image" else max(spec.seq_lengths or (128,))
        image = 3 * shape.side**2 if shape.kind == "image" else 0
        return each * (image + tokens * (shape.width + shape.hidden))
    if spec.kind == "zoo":
        return 0
    config = model_config(spec.model)

    def number(*keys: str) -> int:
        return next((config[key] for key in keys if isinstance(config.get(key), int)), 0)

    width = number("hidden_size", "n_embd", "d_model", "dim")
    inner = number("intermediate_size", "n_inner", "hidden_dim", "ffn_dim") or 4 * width
    if not spec.generate:
        tokens = max(spec.seq_lengths or (128,))
        head = number("vocab_size") if any("LM" in name for name in config.get("architectures") or []) else 0
        return each * tokens * max(width + inner, head)
    heads = number("num_attention_heads", "n_head")
    kv_heads = number("num_key_value_heads") or heads
    head_width = number("head_dim") or (width // heads if heads else 0)
    cache = 2 * number("num_hidden_layers", "n_layer") * kv_heads * head_width * (prompt_tokens + spec.new_tokens)
    return each * (cache + prompt_tokens * (width + inner) + number("vocab_size"))
