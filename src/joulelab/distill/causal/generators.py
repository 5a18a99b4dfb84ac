"""Who answers prompts: a model in this process, or a server in its place."""

from __future__ import annotations

import os
from collections.abc import Sequence

from joulelab.distill.causal.bench import Bench
from joulelab.distill.causal.distributions import Voice
from joulelab.infer.generation.completions import Generator, Prompt
from joulelab.infer.generation.engine import TransformersGenerator

SERVER_KEY = "JOULELAB_SERVER_KEY"
"""Of the environment, not of the settings: these are saved and shown."""


def make_generator(bench: Bench, voice: Voice, prompts: Sequence[Prompt]) -> Generator:
    spec = bench.spec
    if by_server(bench, voice):
        from joulelab.infer.generation.server import ServerGenerator

        return ServerGenerator(
            str(spec.teacher.server), spec.teacher.model, spec.generation.answer,
            api_key=os.environ.get(SERVER_KEY), metered_gpus=spec.energy.gpus,
        )  # fmt: skip
    return TransformersGenerator(
        voice.load(), bench.tokenizer, spec.generation.answer,
        identity=voice.identity, batch_size=spec.teacher.batch_size, cache=spec.generation.cache, whole=prompts,
    )  # fmt: skip


def by_server(bench: Bench, voice: Voice) -> bool:
    return bench.spec.teacher.server is not None and voice.name == bench.spec.teacher.model


def unseen(bench: Bench) -> str | None:
    """A server on this very machine is in its sensors' joules, and in no estimate from the CPU time of this program."""
    if any(figure.measured for figure in bench.run.meter.so_far().values()):
        return None
    return "no sensor measures here, and an estimate from this program's CPU time has nothing of the server's"
