"""Which engine generates the answers of a run, and how it is started.

    builtin           the model in this process
    vllm, sglang      a child process in its own environment: loaded and warmed up in setup stages, generating in the
                      stage of the work, stopped at its end
    server            an OpenAI-compatible server that was started by others
    another name      the engine of an installed package

Engine, version and arguments are part of the key of the answers: another engine rounds differently.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from joulelab import lookup
from joulelab.distill.causal.config import CausalSpec
from joulelab.distill.causal.models import CausalContext
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import EngineFactory, Generator, Prompt, encode_prompts, end_ids
from joulelab.infer.generation.engine import TransformersGenerator, require_positions
from joulelab.infer.generation.engine_process import (
    CHILD_ENGINES,
    EngineGenerator,
    EngineInstallation,
    GenerationShape,
    start_engine,
    vllm_uses_less_energy,
)
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.infer.generation.static_decoder import ENOUGH_ROWS, Setup
from joulelab.runs.artifacts import Bill
from joulelab.zoo.pretrained import causal_lm_config, declared_generation, save_hf, servable_model

SERVER_KEY = "JOULELAB_SERVER_KEY"
"""An environment variable, not a setting: settings are saved and shown."""
# Prompts are rounded up to this, so that a few longer prompts are not another context length.
_CONTEXT_STEP = 64
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class TeacherSource:
    """A model that teaches: its name, how to load it, its identity for keys, and its energy bill."""

    name: str
    identity: str
    load: Callable[[], nn.Module]
    bill: Bill
    tokenizer: Any
    weights: str | None = None
    """What `zoo.pretrained` loads: a folder, file or hub id; None: only `load` knows."""


@dataclass(frozen=True)
class ChosenEngine:
    name: str
    installation: EngineInstallation | None = None
    """Of an engine that runs as a child process."""

    @property
    def sends_requests(self) -> bool:
        return self.installation is not None or self.name == "server"

    @property
    def key(self) -> str | None:
        """For the key of the answers; None for engines that answers of earlier versions were keyed without."""
        if self.installation is not None:
            return self.installation.identity
        origin = lookup.ENGINES.origin(self.name)
        return f"{self.name} of {origin}" if origin else None


def choose_engine(context: CausalContext, teacher: TeacherSource) -> ChosenEngine:
    """Decided by settings and sizes only, so that every shard and every attempt chooses the same engine."""
    spec = context.spec
    name = spec.generation.engine
    if spec.teacher.server is not None and teacher.name == spec.teacher.model:
        return ChosenEngine("server")
    if name == "server":  # of the teacher; the student of this run generates here
        return ChosenEngine("builtin")
    if name in CHILD_ENGINES:
        return ChosenEngine(name, spec.engine_installation())
    if name != "auto":
        return ChosenEngine(name)
    if spec.generation.engine_python is None:
        return ChosenEngine("builtin")
    installation = spec.engine_installation()
    against = _why_not(context, teacher, installation)
    if against is None:
        context.run.note(f"generation.engine=auto: {installation.identity}, which uses less energy for this work")
        return ChosenEngine(installation.name, installation)
    context.run.note(f"generation.engine=auto: builtin, because {against}")
    return ChosenEngine("builtin")


def _why_not(context: CausalContext, teacher: TeacherSource, installation: EngineInstallation) -> str | None:
    """Why `auto` does not choose this engine; None: it does."""
    spec = context.spec
    if context.device.type != "cuda":
        return f"{installation.name} needs a GPU"
    if spec.generation.answer.num_beams > 1:
        return f"the server of {installation.name} has no beam search"
    if spec.teacher.quantization is not None:
        return f"{spec.teacher.precision} weights are quantized in this process"
    if installation.name != "vllm":
        return f"{installation.name} was not measured"
    if not vllm_uses_less_energy(_shape(context, teacher)):
        return "it uses less energy for this work than vLLM with its start (docs/results.md)"
    return None


def _shape(context: CausalContext, teacher: TeacherSource) -> GenerationShape:
    generation = context.spec.generation
    config = causal_lm_config(teacher.weights or context.spec.teacher.model).get_text_config()
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        parameters = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    answers, n = generation.prompts * generation.answer.n, generation.answer.n
    return GenerationShape(
        parameters=parameters,
        answers=answers,
        rows=min(answers, ENOUGH_ROWS if generation.batch_size is None else generation.batch_size * n),
        prompt_tokens=generation.prompt_tokens,
        new_tokens=generation.answer.max_new_tokens,
    )


def refuse_ranks(context: CausalContext) -> None:
    """One engine uses all GPUs of a job by itself; an engine per rank would compete for the same ones."""
    if (
        context.runner.ranks.world > 1
        and context.spec.answers_prompts
        and context.spec.generation.engine in CHILD_ENGINES
    ):
        raise ConfigError(
            f"generation.engine={context.spec.generation.engine} was started by {context.runner.ranks.world} ranks",
            "start one process; for several GPUs set generation.engine_args=[--data-parallel-size,N] or use --shard",
        )


def make_generator(
    context: CausalContext, teacher: TeacherSource, chosen: ChosenEngine, prompts: Sequence[Prompt], stage: str
) -> Generator:
    """To be closed by the caller (`closing_generator`). `prompts`: all prompts of the work; `stage`: the open stage."""
    spec = context.spec
    if chosen.name == "server":
        from joulelab.infer.generation.server import ServerGenerator

        return ServerGenerator(
            str(spec.teacher.server), spec.teacher.model, spec.generation.answer,
            api_key=os.environ.get(SERVER_KEY), metered_gpus=spec.energy.gpus, check=context.run.stop.check,
        )  # fmt: skip
    if chosen.installation is not None:
        return _start_engine(context, teacher, chosen.installation, prompts, stage)
    identity, generation = engine_identity(spec, teacher.identity), spec.generation
    return local_generator(
        context, teacher.load(), teacher.tokenizer, identity, generation.answer, generation.batch_size, prompts
    )


def engine_identity(spec: CausalSpec, weights: str) -> str:
    """Identity of these weights in the engine that works in this process."""
    origin = lookup.ENGINES.origin(spec.generation.engine)
    return weights if origin is None else f"{weights} by {origin}"


def local_generator(
    context: CausalContext,
    model: nn.Module,
    tokenizer: Any,
    identity: str,
    answer: GenerationSettings,
    batch_size: int | None,
    prompts: Sequence[Prompt],
    passes: float = 1.0,
    setup: Setup | None = None,
) -> Generator:
    """The builtin engine, or that of an installed package, for a model in this process; `prompts` are all that it will
    get, `passes` how often; `setup` is around compilations and captures. A student in training generates here, whatever
    engine the teacher has."""
    generation = context.spec.generation
    if lookup.ENGINES.origin(generation.engine) is not None:
        engine: EngineFactory = lookup.ENGINES.resolve(generation.engine)
        at_once = batch_size or generation.prompts_per_unit
        return engine(model, tokenizer, answer, identity=identity, batch_size=at_once)
    return TransformersGenerator(
        model, tokenizer, answer,
        identity=identity, batch_size=batch_size, cache=generation.cache, whole=prompts, passes=passes,
        compile_step={"auto": None, "on": True, "off": False}[generation.compile],
        setup=setup or context.run.setup, note=context.run.note,
    )  # fmt: skip


def _start_engine(
    context: CausalContext,
    teacher: TeacherSource,
    installation: EngineInstallation,
    prompts: Sequence[Prompt],
    stage: str,
) -> EngineGenerator:
    run, spec, tokenizer = context.run, context.spec, teacher.tokenizer
    scratch = run.paths.checkpoints / f"{stage}-engine"
    context_length = _context_length(context, teacher, prompts)
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, scratch, ignore_errors=True)
        # A nested stage suspends the outer one: the outer one has generation only.
        with run.stage(f"{stage}.load", role="setup", activity="load", again=True):
            model, revision, ends = _servable(context, teacher, scratch)
            tokenizer.save_pretrained(scratch / "tokenizer")
            gc.collect()
            context.release_teacher()  # the engine takes most of the GPU's memory
            run.progress.write(f"{stage}: starting {installation.identity}")
            engine = start_engine(
                installation, model,
                dtype=str(context.teacher_precision).removeprefix("torch."), context_length=context_length,
                tokenizer=str(scratch / "tokenizer"), revision=revision,
                log=run.paths.folder / f"{stage}-{installation.name}.log",
                timeout_s=spec.generation.engine_timeout_s, check=run.stop.check,
                report=lambda line: run.progress.advance(0, line[:_SHOWN_CHARACTERS]),
            )  # fmt: skip
        undo.callback(engine.stop)
        held = undo.pop_all()

        def stop_engine() -> None:
            # Also while a stop of the run is under way, where a stage may not open.
            with held, run.stage(f"{stage}.stop", role="setup", activity="stop", again=True):
                held.close()

        undo.callback(stop_engine)
        generator = EngineGenerator(
            engine, tokenizer, ends, spec.generation.answer,
            identity=teacher.identity, concurrency=spec.generation.engine_concurrency,
            metered_gpus=spec.energy.gpus, check=run.stop.check, on_close=undo.pop_all().close,
        )  # fmt: skip
        undo.callback(generator.close)
        with run.stage(f"{stage}.warm-up", role="setup", activity="warm-up", again=True):
            generator.warm_up(prompts)
        undo.pop_all()
    return generator


def _context_length(context: CausalContext, teacher: TeacherSource, prompts: Sequence[Prompt]) -> int:
    """What the longest prompt and its answer need; less memory and fewer captured graphs than the model's maximum."""
    new_tokens = context.spec.generation.answer.max_new_tokens
    longest = max(len(ids) for ids in encode_prompts(teacher.tokenizer, prompts))
    config = causal_lm_config(teacher.weights or context.spec.teacher.model)
    require_positions(config, longest, new_tokens)
    rounded = -(-(longest + new_tokens) // _CONTEXT_STEP) * _CONTEXT_STEP
    return min(rounded, getattr(config, "max_position_embeddings", None) or rounded)


def _servable(context: CausalContext, teacher: TeacherSource, scratch: Path) -> tuple[str, str | None, Sequence[int]]:
    """(folder or hub id, revision, end tokens). Weights that only this program can read are saved first."""
    place = servable_model(teacher.weights) if teacher.weights is not None else None
    if place is not None and teacher.weights is not None:
        return *place, end_ids(declared_generation(teacher.weights), teacher.tokenizer)
    model = teacher.load()
    save_hf(model, teacher.tokenizer, scratch / "model")
    return str(scratch / "model"), None, end_ids(model, teacher.tokenizer)
