"""vLLM or SGLang as a child process: started in its own Python environment, awaited, stopped, and never left behind.

Both have an OpenAI-compatible server, so generation goes through `ServerGenerator`; here is what a server that others
started does not need. The engine runs in a process group with a guard (`runs.measure.process_guard`), which ends the
group if this process is killed. Its output goes to a log file, whose last lines explain an early end.

Engines are not imported: they pin their own torch, so they need a separate environment.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.generation.completions import Prompt
from joulelab.infer.generation.server import Endpoint, ServerGenerator, ServerLocation, TokenPrompts
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.runs.measure.program import end_all, kill_group, start_guard
from joulelab.runs.spec import user_path

CHILD_ENGINES = ("vllm", "sglang")
SERVED_NAME = "teacher"
_VERSION_TIMEOUT_S = 60.0
_POLL_S = 0.25
# vLLM ends its workers and frees GPU memory after SIGTERM; beyond this it is killed.
_GRACE_S = 20.0
# An engine that fails closes its connections before its process ends.
_END_S = 3.0
# A killed process that does not end is inside the driver; waiting longer does not help.
_KILLED_S = 30.0
_LOG_LINES = 12
# Two rounds: vLLM 0.26 compiles its top-p kernel when it is first used, once for batches whose size is a multiple of 16
# and once for others (2.5 s each on a 2-core VM). Its own warm-up has top-k and top-p together, which is another
# kernel. A round must last until all of its requests are in one batch.
_WARM_UP_ROUNDS, _WARM_UP_TOKENS = (32, 23), 32
# Variables of this program's own environment and launcher, which would change what the engine imports or make it join
# the launcher's process group.
_OWN_VARIABLES = {
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
}  # fmt: skip


@dataclass(frozen=True)
class EngineInstallation:
    """An engine in its own Python environment."""

    name: str
    python: Path
    version: str
    arguments: tuple[str, ...] = ()
    """Added to the command line of its server."""
    with_seeds: bool = True
    """Whether every request of a sampled answer has a seed."""

    @classmethod
    def find(
        cls, name: str, python: str | None, arguments: Sequence[str] = (), setting: str = "generation.engine_python"
    ) -> EngineInstallation:
        """Asks the environment for the version, without importing the engine. `setting` is how the user names it."""
        if not python:
            raise ConfigError(
                f"the engine {name} needs the Python of the environment that {name} is installed in",
                f"set {setting}, for example /opt/{name}/bin/python",
            )
        # Not `resolve()`, which would follow the link of a virtual environment to the system's Python.
        path = user_path(python).absolute()
        if not os.access(path, os.X_OK) or path.is_dir():
            raise ConfigError(f"{setting}: {path} is not an executable file", "name a Python program")
        question = f"import importlib.metadata as found; print(found.version({name!r}))"
        try:
            asked = subprocess.run(
                [str(path), "-c", question],
                capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, env=_environment(path), check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{path} does not run: {error}", f"check {setting}") from error
        version = asked.stdout.strip()
        if asked.returncode or not version:
            reason = (asked.stderr.strip().splitlines() or ["no version"])[-1]
            if "PackageNotFoundError" not in reason:
                raise ConfigError(
                    f"{path} did not report its version of {name}: {reason:.200}",
                    f"set {setting} to the Python of an environment with {name}",
                )
            raise ConfigError(
                f"{name} is not installed in the environment of {path}: {reason:.200}",
                f"{path} -m pip install {name}, or set {setting} to another environment",
            )
        return cls(name, path, version, tuple(arguments))

    @property
    def identity(self) -> str:
        """Name, version and arguments, for keys and records."""
        return " ".join([f"{self.name} {self.version}", *self.arguments, *([] if self.with_seeds else ["unseeded"])])

    def command(
        self, model: str, tokenizer: str, port: int, dtype: str, context_length: int, revision: str | None = None
    ) -> list[str]:
        """The server's command line; `model` and `tokenizer` are folders or hub ids."""
        # The model's own sampling defaults (generation_config.json) would be added to ours.
        options: dict[str, Any] = {
            "vllm": {
                "--model": model, "--tokenizer": tokenizer, "--max-model-len": context_length,
                "--generation-config": "vllm",
            },
            "sglang": {
                "--model-path": model, "--tokenizer-path": tokenizer, "--context-length": context_length,
                "--sampling-defaults": "openai",
            },
        }[self.name]  # fmt: skip
        options |= {"--served-model-name": SERVED_NAME, "--host": "127.0.0.1", "--port": port, "--dtype": dtype}
        if revision is not None:
            options["--revision"] = revision
        module = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}[self.name]
        given = [str(part) for option in options.items() for part in option]
        return [str(self.python), "-m", module, *given, *self.arguments]


def _environment(python: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
    # Kernels that are compiled at run time need the programs of the same environment.
    return {**kept, "PATH": os.pathsep.join([str(python.parent), kept.get("PATH", os.defpath)])}


def exit_text(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


class EngineProcess:
    """The server of an engine, from its start to its end."""

    def __init__(self, installation: EngineInstallation, command: Sequence[str], port: int, log: Path) -> None:
        self.installation, self.log = installation, log
        # With retries: an engine under load resets single connections; that it has ended is noticed by its process.
        self.endpoint = Endpoint(f"http://127.0.0.1:{port}/v1")
        log.parent.mkdir(parents=True, exist_ok=True)
        self._guard = start_guard()
        try:
            with log.open("ab") as file:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                    process_group=self._guard.pid, env=_environment(installation.python),
                )  # fmt: skip
        except BaseException:
            kill_group(self._guard)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(
        self, timeout_s: float, check: Callable[[], None] = lambda: None, report: Callable[[str], None] = lambda t: None
    ) -> None:
        """`report` gets the last line of the log whenever it changes."""
        begin_s, shown = time.monotonic(), ""
        probe = replace(self.endpoint, timeout_s=5.0)
        while True:
            check()
            self.require_alive()
            with suppress(JoulelabError):
                probe.require_reachable()
                return
            waited_s = time.monotonic() - begin_s
            if waited_s > timeout_s:
                raise JoulelabError(
                    f"{self.installation.name} was not ready after {waited_s:.0f} s; the end of {self.log}:\n"
                    + self.log_tail(),
                    "raise engine_timeout_s, or fix what the log reports",
                )
            line = (self.log_tail(1) or "starting").strip()
            if line != shown:
                report(line)
                shown = line
            time.sleep(_POLL_S)

    def require_alive(self, grace_s: float = 0.0) -> None:
        """`grace_s`: wait for an end that is under way, after a connection was lost."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        code = self._process.poll()
        if code is not None:
            raise JoulelabError(
                f"{self.installation.identity} {exit_text(code)}; the end of {self.log}:\n{self.log_tail()}",
                "fix what the log reports; engine_args are added to the engine's command line",
            )

    def log_tail(self, lines: int = _LOG_LINES) -> str:
        with self.log.open(encoding="utf-8", errors="replace") as file:
            last = collections.deque((line.rstrip() for line in file if line.strip()), lines)
        return "\n".join(line[-300:] for line in last)

    def stop(self) -> None:
        """End the engine with all of its processes; does nothing the second time."""
        if self._guard.returncode is not None:
            return
        workers: list[psutil.Process] = []
        with suppress(psutil.Error):
            # Workers may have left the process group.
            workers = psutil.Process(self._process.pid).children(recursive=True)
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        end_all([worker for worker in workers if worker.is_running()])
        kill_group(self._guard)
        try:
            self._process.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            raise JoulelabError(
                f"{self.installation.name} (pid {self._process.pid}) did not end {_KILLED_S:g} s after SIGKILL",
                "a process that is blocked in the GPU driver cannot be killed; check the driver with nvidia-smi",
            ) from None


def start_engine(
    installation: EngineInstallation,
    model: str,
    *,
    tokenizer: str,
    dtype: str,
    context_length: int,
    log: Path,
    revision: str | None = None,
    timeout_s: float = 900.0,
    check: Callable[[], None] = lambda: None,
    report: Callable[[str], None] = lambda text: None,
) -> EngineProcess:
    """A running engine; the caller stops it. `model` is a folder, or a hub id with its `revision`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = installation.command(model, tokenizer, port, dtype, context_length, revision)
    engine = EngineProcess(installation, command, port, log)
    try:
        engine.wait_until_ready(timeout_s, check, report)
    except BaseException:
        engine.stop()
        raise
    return engine


class EngineGenerator(ServerGenerator):
    """Generates with a running engine, whose process it stops when it is closed."""

    def __init__(
        self,
        engine: EngineProcess,
        tokenizer: Any,
        end_ids: Sequence[int],
        settings: GenerationSettings,
        *,
        identity: str,
        concurrency: int = 256,
        metered_gpus: str = "auto",
        log_probabilities: bool = False,
        extra: Mapping[str, Any] | None = None,
        check: Callable[[], None] = lambda: None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """`identity` names the weights; the engine is added to it. `on_close` replaces stopping the engine."""

        def check_engine() -> None:
            check()
            engine.require_alive()

        super().__init__(
            engine.endpoint, SERVED_NAME, settings,
            concurrency=concurrency, on_this_node=True, metered_gpus=metered_gpus, extra=extra,
            as_tokens=TokenPrompts(tokenizer, end_ids), log_probabilities=log_probabilities,
            with_seeds=engine.installation.with_seeds, check=check_engine,
        )  # fmt: skip
        self._engine, self._on_close = engine, on_close or engine.stop
        self.identity = engine_identity(identity, engine.installation)
        self.location = ServerLocation(True, f"{engine.installation.name} was started here", (engine.pid,))

    def warm_up(self, prompts: Sequence[Prompt]) -> None:
        """A few answers: engines compile some kernels for the first requests. Stop texts are left out, because they
        would end a round before its batch is full."""
        settings = self.settings
        tokens = min(_WARM_UP_TOKENS, settings.max_new_tokens)
        self.settings = settings.model_copy(update={"max_new_tokens": tokens, "n": 1, "stop": ()})
        try:
            for size in _WARM_UP_ROUNDS:
                most = min(size, self.prompts_at_once) if prompts else 0  # a batch is never larger
                some = list(itertools.islice(itertools.cycle(prompts), most))
                collections.deque(self.generate(some), maxlen=0)
        finally:
            self.settings = settings

    def _explain_failure(self) -> None:
        self._engine.require_alive(grace_s=_END_S)

    def close(self) -> None:
        super().close()
        self._on_close()


def engine_identity(weights: str, installation: EngineInstallation) -> str:
    return f"{weights} by {json.dumps(installation.identity)}"


# Energy of vLLM from its start to its first answer, on an H200.
_VLLM_START_J = 6500.0
_VLLM_ROWS = 1024


@dataclass(frozen=True)
class GenerationShape:
    """Sizes that decide which engine uses less energy."""

    parameters: int
    answers: int
    rows: int
    """Answers that the builtin engine generates at once."""
    prompt_tokens: int
    new_tokens: int


# mJ per token on an H200 (docs/results.md), by parameters and prompt tokens, then by rows: builtin, vLLM 0.26.
_TOKEN_MJ = {
    (135e6, 24): {1: (160, 299), 8: (24.9, 40.5), 128: (3.26, 6.08), 1024: (1.90, 5.93)},
    (135e6, 1024): {1: (196, 397), 8: (38.2, 52.7), 128: (12.6, 16.6), 1024: (10.6, 18.2)},
    (1.7e9, 24): {1: (676, 690), 8: (91.7, 97.8), 128: (14.3, 18.6), 1024: (10.2, 15.3)},
    (1.7e9, 1024): {1: (752, 742), 8: (161, 174), 128: (85.0, 92.4), 1024: (81.5, 96.1)},
}


def vllm_uses_less_energy(shape: GenerationShape) -> bool:
    """By the nearest shape that was measured, vLLM's start included. vLLM fills up to 1,024 rows by itself, where the
    builtin engine has those of a batch."""
    nearest = min(
        _TOKEN_MJ,
        key=lambda one: (abs(math.log(one[0] / shape.parameters)), abs(math.log(one[1] / max(1, shape.prompt_tokens)))),
    )
    by_rows = sorted(_TOKEN_MJ[nearest].items(), reverse=True)
    ours_mj = next(own for rows, (own, _) in by_rows if rows <= max(1, shape.rows))
    filled = min(shape.answers, _VLLM_ROWS)
    theirs_mj = next(other for rows, (_, other) in by_rows if rows <= max(1, filled))
    # Beyond the measured sizes both engines mostly read weights, so that energy grows with the parameters alike.
    tokens, scale = shape.answers * shape.new_tokens, max(1.0, shape.parameters / nearest[0])
    return scale * tokens * (ours_mj - theirs_mj) / 1e3 > _VLLM_START_J
