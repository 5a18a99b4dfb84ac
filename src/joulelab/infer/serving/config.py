"""Settings of the server and of the load that measures one. Importable without torch."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import psutil
from pydantic import Field, field_validator, model_validator

from joulelab import lookup
from joulelab.data import sources
from joulelab.errors import ConfigError, UsageError
from joulelab.infer.config import (
    IDLE_S,
    default_thread_count,
    gguf_file,
    max_positions,
    read_prompts,
    require_positions,
    require_tokenizer,
    require_usable_model,
    require_weights,
)
from joulelab.infer.generation.engine_process import CHILD_ENGINES, EngineInstallation
from joulelab.infer.generation.server import Endpoint, locate_server, server_address, with_children
from joulelab.infer.serving.client_load import FirstToken, LoadEnd, LoadLevel, SentRequest, StreamingClient
from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors.cpu import usable_cores
from joulelab.meter.sensors.nvml import compute_pids, opened_cards
from joulelab.runs import environment
from joulelab.runs.spec import RunSpec, user_path
from joulelab.zoo.quantization import is_quantized, quantization_packages, require_quantization

ServedDtype = Literal["auto", "fp32", "bf16", "fp16", "nf4", "fp8", "fp8-weights", "int4"]
LOOPBACK = "127.0.0.1"
"""`joulelab serve` listens here only."""
DEFAULT_CONTEXT = 2048
_BATCH = {True: 64, False: 16}
MAX_BATCH = 1024


@dataclass(frozen=True)
class ServedModel:
    """What `joulelab serve` serves; everything is checked."""

    model: str
    name: str
    dtype: str
    on_gpu: bool
    batch_size: int
    context: int
    max_waiting: int
    threads: int

    @classmethod
    def checked(
        cls,
        *,
        model: str,
        dtype: str = "auto",
        device: str = "auto",
        batch_size: int | None = None,
        concurrency: int = 1,
        context: int | None = None,
        max_waiting: int = 256,
        threads: int | None = None,
        name: str | None = None,
    ) -> ServedModel:
        """Raises before anything is loaded if the model cannot be served with these settings. Without `batch_size`, as
        many answers at once as the default, or as `concurrency` if that is more."""
        if dtype == "int8":
            raise ConfigError(
                "--dtype int8: LLM.int8() rounds the rows of a batch together, so an answer would change with the "
                "requests next to it",
                "use nf4 or fp8-weights",
            )
        lookup.require_packages("joulelab serve", "torch", "transformers", *quantization_packages(dtype))
        model = f"{sources.SAMPLE_PREFIX}{model}" if model in sources.SAMPLES else model
        require_weights(model, model)
        require_usable_model(model, generate=True)
        if gguf_file(model) is None:
            require_tokenizer(model)
        on_gpu = _uses_gpu(device)
        if dtype not in get_args(ServedDtype):
            raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(get_args(ServedDtype))}", "see --help")
        if is_quantized(dtype):
            require_quantization(dtype, on_gpu)
        limit = max_positions(model)
        room = context if context is not None else min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)
        require_positions(model, limit, [room])
        slots = batch_size if batch_size is not None else min(MAX_BATCH, max(_BATCH[on_gpu], concurrency))
        for option, value, least, most in (
            ("--context", room, 2, 1 << 20),
            ("--batch-size", slots, 1, MAX_BATCH),
            ("--max-waiting", max_waiting, 1, 1 << 20),
            ("--threads", 1 if threads is None else threads, 1, usable_cores()),
        ):
            if not least <= value <= most:
                raise UsageError(f"{option} {value}: expected a number from {least} to {most:,}")
        chosen = dtype if dtype != "auto" else "bf16" if environment.has_bf16_cores(device) else "fp32"
        return cls(model, name or model, chosen, on_gpu, slots, room, max_waiting, threads or default_thread_count())


def _uses_gpu(device: str) -> bool:
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device}: expected auto, cpu or cuda", "leave it out to use a GPU if there is one")
    found = environment.uses_gpu(device)
    if device == "cuda" and not found:
        raise UsageError(
            "device=cuda was requested but no NVIDIA GPU was found that the installed torch can use",
            "omit --device or use --device cpu",
        )
    return found


def require_port(port: int) -> None:
    """Raise before a framework is imported and a model is loaded if the port cannot be used."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: expected a number from 0 to 65535", "leave it out to use 8000")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise UsageError(
                f"port {port} of {LOOPBACK} cannot be used: {error.strerror}", "choose another --port, or 0 for any"
            ) from None


# The load that measures a server.

_WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "you were all her she there would their we him been has when who will no more if out so up said what its about "
    "into them can only other time new some could these two may first then do any like my now over such our man me"
)
"""Short common words, which most tokenizers encode as one token each."""
DEFAULT_CONCURRENCY = (1, 4, 16)
KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens: `256`, `64-512` (uniform) or `lognormal:256,0.6` (median, sigma of the logarithm)."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ValueError."""
        if match := re.fullmatch(r"\d+", text):
            found = cls("fixed", int(text))
        elif match := re.fullmatch(r"(\d+)-(\d+)", text):
            found = cls("uniform", int(match[1]), int(match[2]))
        elif match := re.fullmatch(r"lognormal:(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)", text):
            found = cls("lognormal", float(match[1]), float(match[2]))
        else:
            raise ValueError(f"expected 256, 64-512 or lognormal:MEDIAN,SIGMA, found '{text}'")
        if found.first < 1 or (found.kind == "uniform" and found.second < found.first) or found.second > 1e6:
            raise ValueError(f"'{text}' has lengths below 1 or in the wrong order")
        return found

    def draw(self, rng: random.Random) -> int:
        if self.kind == "uniform":
            return rng.randint(int(self.first), int(self.second))
        value = self.first * math.exp(rng.gauss(0, self.second)) if self.kind == "lognormal" else self.first
        return max(1, min(round(value), self.largest))

    @property
    def largest(self) -> int:
        """Draws of a lognormal distribution are limited to three sigma."""
        if self.kind == "uniform":
            return int(self.second)
        return round(self.first * math.exp(3 * self.second)) if self.kind == "lognormal" else int(self.first)


class ServingSpec(RunSpec):
    """Measure a server of the OpenAI protocol under load: latency, throughput, and energy per token and request."""

    pipeline: Literal["serving"] = "serving"
    """The pipeline that runs the stages."""
    server: str = ""
    """URL of a running server, ending in /v1, for example http://localhost:8000/v1; empty: `engine` starts one."""
    engine: Literal["", "builtin", "vllm", "sglang"] = ""
    """Engine to start for this run: builtin (`joulelab serve`), or vllm or sglang in the environment of
    `engine_python`."""
    engine_python: str = ""
    """Python of the environment in which vLLM or SGLang is installed, for example /opt/vllm/bin/python."""
    engine_args: tuple[str, ...] = ()
    """Added to the command line of vLLM or SGLang, for example ["--quantization", "fp8"]."""
    engine_timeout_s: float = Field(900.0, gt=0, allow_inf_nan=False)
    """Time limit for an engine to load the model."""
    model: str = ""
    """Name of the model in requests (empty: the first that the server lists); with `engine`, the model to serve."""
    concurrency: tuple[Annotated[int, Field(ge=1, le=2048)], ...] = ()
    """Numbers of concurrent clients, each of which sends its next request when its answer is complete; one row of the
    table per number."""
    rates: tuple[Annotated[float, Field(gt=0, le=10_000)], ...] = ()
    """Mean request rates per second (Poisson arrivals); one row per rate. Without `concurrency` and `rates`: 1, 4 and
    16 clients."""
    prompts: str = ""
    """A file of prompts: .txt with one per line, or .jsonl with `prompt`, `text` or `messages` in each line. Empty:
    random words."""
    prompt_tokens: str = "256"
    """Words of a random prompt, about one token each: a number, a range (64-512) or lognormal:MEDIAN,SIGMA."""
    new_tokens: str = "128"
    """Maximum tokens per answer: a number, a range or lognormal:MEDIAN,SIGMA."""
    ignore_eos: bool | None = None
    """Continue after the end-of-text token, so that all answers have the requested length (vLLM, SGLang, joulelab
    serve); null: yes for random words, no for a file of prompts."""
    temperature: float = Field(0.0, ge=0, le=2)
    """Sampling temperature; 0: the most likely token."""
    duration_s: float = Field(20.0, ge=2, le=36_000)
    """Length of the steady-state window of each row; the warm-up before it is detected from the throughput and left
    out."""
    max_time_s: float | None = Field(None, gt=0, le=36_000)
    """Maximum seconds of load per row; null: three times `duration_s`, at least 60 s."""
    ttft_limit_ms: float | None = Field(None, gt=0)
    """Limit on the time to first token; the lowest energy among rows within the limits is reported."""
    tpot_limit_ms: float | None = Field(None, gt=0)
    """Limit on the time per output token; as `ttft_limit_ms`."""
    limit_percentile: Literal[50, 90, 95, 99] = 95
    """Percentile of the requests that must meet the limits."""
    dtype: ServedDtype = "auto"
    """With `engine`: type of the weights; auto: bf16 on a GPU with tensor cores for it (compute capability 8.0 or
    newer), else fp32; vLLM and SGLang choose by the model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """With `engine`: device; auto uses a GPU if there is one."""
    batch_size: int | None = Field(None, ge=1, le=MAX_BATCH)
    """With `engine`: answers that are generated together; null: the engine's default, at least `concurrency`."""
    context: int | None = Field(None, ge=2)
    """With `engine`: maximum tokens of a prompt and its answer; null: enough for the requested lengths, and
    at least 1,024 tokens for a prompt from a file."""
    threads: int | None = Field(None, ge=1)
    """With `engine`: CPU threads; null: all available."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds after which a request without any data counts as failed."""

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """A name, an absolute path, and idle baselines, which net energy needs."""
        found = dict(settings)
        energy = settings.get("energy", {})
        model, server = settings.get("model"), settings.get("server")
        if settings.get("engine") and isinstance(model, str) and model in sources.SAMPLES:
            found["model"] = f"{sources.SAMPLE_PREFIX}{model}"
        if isinstance(energy, dict):
            found["energy"] = {"idle_before_s": IDLE_S, "idle_after_s": IDLE_S} | energy
        if isinstance(server, str) and server:
            found["server"] = server.rstrip("/")
        what = model if isinstance(model, str) and model else urlsplit(str(server or "")).netloc
        title = "serving-" + re.sub(r"[^\w.-]", "-", str(what).rstrip("/").rpartition("/")[2])[:60]
        if isinstance(prompts := settings.get("prompts"), str) and prompts:
            found["prompts"] = str(user_path(prompts).absolute())
        return {"name": title.rstrip("-")} | found

    @field_validator("prompt_tokens", "new_tokens")
    @classmethod
    def _are_lengths(cls, value: str) -> str:
        Lengths.parse(value)
        return value

    @field_validator("concurrency", "rates")
    @classmethod
    def _once_each(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
        if twice:
            raise ValueError(f"{twice[0]:g} is listed twice; a row is identified by this value")
        return values

    @model_validator(mode="after")
    def _one_server(self) -> ServingSpec:
        if bool(self.server) == bool(self.engine):
            raise ValueError("name either a running server (--server URL) or an engine to start (--engine NAME)")
        if self.engine and not self.model:
            raise ValueError("engine needs a model to serve (--model MODEL)")
        for name in ("dtype", "device", "batch_size", "context", "threads"):
            if self.server and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} belongs to an engine that this run starts; a running server has its own")
        child = self.engine in CHILD_ENGINES
        for name in ("device", "batch_size", "threads"):
            if child and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} belongs to the builtin engine; {self.engine} has engine_args for it")
        if child and is_quantized(self.dtype):
            raise ValueError(f"dtype={self.dtype} is a format of the builtin engine; {self.engine} has engine_args")
        if not child and (self.engine_python or self.engine_args):
            raise ValueError("engine_python and engine_args belong to --engine vllm and --engine sglang")
        if self.prompts and self.prompt_tokens != type(self).model_fields["prompt_tokens"].default:
            raise ValueError("prompts have their own lengths; omit prompt_tokens")
        if self.max_time_s is not None and self.max_time_s < self.duration_s:
            raise ValueError(f"max_time_s ({self.max_time_s:g}) is shorter than duration_s ({self.duration_s:g})")
        return self

    @property
    def levels(self) -> tuple[LoadLevel, ...]:
        closed = self.concurrency or (() if self.rates else DEFAULT_CONCURRENCY)
        return (*(LoadLevel(concurrency=one) for one in closed), *(LoadLevel(rate_per_s=one) for one in self.rates))

    @property
    def limit_s(self) -> float:
        return max(60.0, 3 * self.duration_s) if self.max_time_s is None else self.max_time_s

    @property
    def ignores_eos(self) -> bool:
        return not self.prompts if self.ignore_eos is None else self.ignore_eos

    @property
    def _context(self) -> int:
        """What random prompts of the largest length need, at two tokens per word."""
        if self.context is not None:
            return self.context
        new_tokens = Lengths.parse(self.new_tokens).largest
        if self.prompts:
            longest = max(DEFAULT_CONTEXT, DEFAULT_CONTEXT // 2 + new_tokens)
        else:
            longest = max(64, 2 * Lengths.parse(self.prompt_tokens).largest + new_tokens)
        return min(longest, max_positions(self.model) or longest)

    @property
    def child_engine(self) -> tuple[EngineInstallation, int]:
        """With `engine` vllm or sglang: the installation and the context length; checked."""
        require_weights(self.model, self.model)
        if gguf_file(self.model) is not None:
            raise ConfigError(f"{self.model}: {self.engine} is started with a folder or hub id, not a GGUF file")
        require_usable_model(self.model, generate=True)
        require_tokenizer(self.model)
        room = self._context
        require_positions(self.model, max_positions(self.model), [room])
        found = EngineInstallation.find(self.engine, self.engine_python, self.engine_args, "--engine-python")
        self._require_room(room)
        return found, room

    @property
    def served_model(self) -> ServedModel:
        """With `engine` builtin: what is served; checked."""
        served = ServedModel.checked(
            model=self.model,
            dtype=self.dtype,
            device=self.device,
            batch_size=self.batch_size,
            concurrency=max(level.concurrency for level in self.levels),
            context=self._context,
            threads=self.threads,
        )
        self._require_room(served.context)
        return served

    def checks(self) -> Iterator[Callable[[], object]]:
        if self.prompts:
            yield lambda: read_prompts(Path(self.prompts))
        if self.engine in CHILD_ENGINES:
            yield lambda: self.child_engine
        elif self.engine:
            yield lambda: self.served_model
        else:
            yield self.require_server_with_room

    def require_server(self) -> str:
        """The name of the model in requests; raises if the server does not answer one."""
        server_address(self.server)
        contexts = listed_models(self.server)
        if self.model and contexts and self.model not in contexts:
            raise ConfigError(
                f"{self.server} has no model '{self.model}'; it lists {', '.join(list(contexts)[:5])}",
                "leave --model out to use the first",
            )
        name = self.model or next(iter(contexts), "")
        if not name:
            raise ConfigError(f"{self.server} lists no model", "name one with --model")
        self._require_room(contexts.get(name))
        path, body = next(self.requests(name))
        self._require_answer(path, {**body, "max_tokens": 2})
        return name

    def require_server_with_room(self) -> None:
        """Only a request of full length shows whether a server that does not state its context has room for it."""
        name = self.require_server()
        if listed_models(self.server).get(name) is not None:
            return
        path, body = next(self.requests(name))
        longest: dict[str, Any] = {**body, "max_tokens": Lengths.parse(self.new_tokens).largest}
        if not self.prompts:
            words = itertools.cycle(_WORDS.split())
            longest["prompt"] = " ".join(itertools.islice(words, Lengths.parse(self.prompt_tokens).largest))
        self._require_answer(path, longest, only_first_token=True)

    def _require_answer(self, path: str, body: Mapping[str, Any], only_first_token: bool = False) -> None:
        probe = SentRequest(time.monotonic_ns())
        timeout_s = self.timeout_s if only_first_token else min(self.timeout_s, 120.0)
        ended = FirstToken(probe) if only_first_token else LoadEnd()
        StreamingClient(self.server, api_key(), timeout_s, whole=True).ask(probe, path, body, ended)
        if probe.error:
            hint = self._hint(probe.error)
            raise UsageError(f"{self.server} does not answer a streamed request: {probe.error}", hint)

    def _require_room(self, context: int | None) -> None:
        """Refuse requests that the server's context of so many tokens cannot hold; a word has at least one token."""
        prompt = 1 if self.prompts else Lengths.parse(self.prompt_tokens).largest
        new_tokens = Lengths.parse(self.new_tokens).largest
        if context is not None and prompt + new_tokens > context:
            own = "a prompt" if self.prompts else f"prompts of {prompt} words (--prompt-tokens)"
            if self.server:
                hint = "lower them, or start the server with more room (joulelab serve --context N)"
            else:  # without the setting, it is as large as the model allows
                hint = "lower them" if self.context is None else "lower them, or raise context"
            raise ConfigError(
                f"{own} and answers of {new_tokens} tokens (--new-tokens) do not fit into the context of "
                f"{self.server or self.model} ({context} tokens)",
                hint,
            )

    def _hint(self, error: str) -> str:
        if "ignore_eos" in error:
            return "set ignore_eos=false: the server does not support ignore_eos"
        # A prompt that is too long: each server has its own words.
        if error.startswith(("HTTP 400", "HTTP 413")) and any(word in error for word in ("token", "context")):
            shorter = "shorten the prompts" if self.prompts else "--prompt-tokens"
            return f"lower --new-tokens or {shorter}, or start the server with more room (joulelab serve --context N)"
        return "see the server's log" + ("; ignore_eos=false omits this parameter" if self.ignores_eos else "")

    def requests(self, model: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Path and body of each request, without end; the same for every run of these settings."""
        rng = random.Random(self.seed)
        inputs, outputs = Lengths.parse(self.prompt_tokens), Lengths.parse(self.new_tokens)
        given = read_prompts(Path(self.prompts)) if self.prompts else []
        for number in itertools.count():
            body: dict[str, Any] = {"model": model, "max_tokens": outputs.draw(rng), "temperature": self.temperature}
            if self.ignores_eos:
                body["ignore_eos"] = True
            # Random words differ in every request, so that a server's prefix cache does not shorten the work.
            prompt = given[number % len(given)] if given else " ".join(rng.choices(_WORDS.split(), k=inputs.draw(rng)))
            if isinstance(prompt, str):
                yield "/completions", {**body, "prompt": prompt}
            else:
                yield "/chat/completions", {**body, "messages": prompt}

    def meter_settings(self) -> EnergyConfig:
        """A local server's processes count as this run's, and only its GPUs are metered, unless GPUs were named."""
        if not self.server:
            return self.energy
        location = locate_server(self.server)
        if not location.is_local:
            return self.energy
        changes = {"processes": ",".join(map(str, location.pids))}
        if self.energy.gpus == "auto" and (uuids := gpus_of(location.pids)):
            changes["gpus"] = ",".join(uuids)
        return self.energy.model_copy(update=changes)


def api_key() -> str | None:
    """From the environment, never from settings, which are recorded."""
    return os.environ.get(KEY_VARIABLE) or None


def listed_models(base_url: str) -> dict[str, int | None]:
    """Names that the server lists, each with its context in tokens if the server states it (vLLM and `joulelab serve`
    do); raises if it does not answer."""
    found = Endpoint(base_url, api_key(), timeout_s=20.0).get("/models")
    cards = [one for one in found.get("data") or () if isinstance(one, dict) and one.get("id")]
    contexts = [card.get("max_model_len") for card in cards]
    return {
        str(card["id"]): context if isinstance(context, int) else None
        for card, context in zip(cards, contexts, strict=True)
    }


def gpus_of(pids: Collection[int], nvml: Any = None) -> list[str]:
    """UUIDs of the GPUs on which these processes or their children compute; empty without NVML."""
    if not pids:
        return []
    with opened_cards(nvml) as (nvml, cards):
        own = with_children(pids)
        return [card.uuid for card, handle in cards.items() if own & compute_pids(nvml, handle)]


def unattributed_gpus(pids: Collection[int], nvml: Any = None) -> list[str]:
    """UUIDs of GPUs on which a process computes that may be the server but cannot be recognized: it is not visible here
    (another container), or the server is (a process of another user)."""
    with opened_cards(nvml) as (nvml, cards):
        own = with_children(pids) if pids else set()
        running = {card.uuid: compute_pids(nvml, handle) for card, handle in cards.items()}
    return [
        uuid
        for uuid, found in running.items()
        if found and not own & found and (not pids or not all(psutil.pid_exists(pid) for pid in found))
    ]
