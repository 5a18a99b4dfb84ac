"""The pipeline `serving`: put load on a server, level by level, and record latency, throughput and energy.

A level is a stage; its row comes from the steady window inside. An engine that the run starts is a child process, so
its CPU time and GPUs are the run's; a running server on this machine is found by its port. The energy of a server
elsewhere is missing: this machine's meter sees only the client.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import psutil

from joulelab.data.inputs import input_bill, keep_recorded_commits
from joulelab.errors import JoulelabError, UsageError
from joulelab.infer.generation.engine_process import CHILD_ENGINES, SERVED_NAME, exit_text, start_engine
from joulelab.infer.generation.server import Endpoint, locate_server, unmetered_gpus
from joulelab.infer.serving.client_load import LoadLevel, LoadRunner, LoadWindow, StreamingClient
from joulelab.infer.serving.config import ServingSpec, api_key, gpus_of, unattributed_gpus
from joulelab.infer.serving.load_summary import load_values
from joulelab.meter.trace import read_lines
from joulelab.runs.context import RunContext
from joulelab.runs.measure.program import kill_group, start_guard
from joulelab.train.stats.step_energy import energy_reader

TRACKER = "serving"
START = "engine.start"
_STOP_S = 20.0
_POLL_S = 0.25
_SHOWN_CHARACTERS = 60
_KEPT = "levels before this one are in the record"


@dataclass(frozen=True)
class MeasuredServer:
    """Where requests go, and whether this machine's meter sees the work."""

    url: str
    model: str
    device: str
    """`cuda` or `cpu`: whose energy is reported; empty: unknown, of a server on another machine."""
    energy_gap: str = ""
    """Why the energy is missing."""
    facts: Any = None
    require_alive: Callable[[], None] = lambda: None
    """Raises if the server's process has ended."""


def run_serving(run: RunContext) -> None:
    spec = cast(ServingSpec, run.spec)
    keep_recorded_commits(run)
    recorded = _recorded_stages(run)
    levels = [level for level in spec.levels if _stage_name(level) not in recorded]
    if len(levels) < len(spec.levels):
        done = ", ".join(level.text for level in spec.levels if level not in levels)
        run.progress.write(f"measured by an earlier attempt on this machine: {done}")
    if not levels:
        return
    if spec.engine in CHILD_ENGINES:
        opened = _child_engine(run, spec)
    else:
        opened = _builtin_engine(run, spec) if spec.engine else _running_server(run, spec)
    with opened as server:
        run.note_device(server.device or "cpu")  # the client's
        requests = spec.requests(server.model)
        client = StreamingClient(server.url, api_key(), spec.timeout_s)
        runner = LoadRunner(client, lambda: next(requests), spec.seed)
        for level in levels:
            with run.stage(_stage_name(level), role="inference", activity="serve"):
                run.progress.write(f"load: {level.text}")

                def tick(seconds: float) -> None:
                    run.progress.advance(round(seconds))
                    run.stop.check()
                    _require_alive(server)

                load = runner.run(level, spec.duration_s, spec.limit_s, tick)
                # No items of the stage are counted: answers that the end of the load cuts off have used energy.
                _require_answers(load, server)
            _record_row(run, spec, server, load)


def _stage_name(level: LoadLevel) -> str:
    return f"serve.{level.name}"


def _recorded_stages(run: RunContext) -> set[str]:
    """Levels whose rows an earlier attempt of this run has recorded, on this machine: one table compares levels."""
    return {
        line["stage"]
        for events, _ in run.paths.attempts_before(run.meter.trace_path, same_host=True)
        for line in read_lines(events)
        if (line.get("kind"), line.get("name")) == ("tracker", TRACKER)
    }


def _require_alive(server: MeasuredServer) -> None:
    try:
        server.require_alive()
    except JoulelabError as error:
        raise JoulelabError(error.message, f"{error.hint}; {_KEPT}") from None


def _require_answers(load: LoadWindow, server: MeasuredServer) -> None:
    """Raise if the load has no steady window: the server has ended, or it answered no request in the window."""
    errors = Counter(one.error for one in load.requests if one.error)
    error = errors.most_common(1)[0][0] if errors else ""
    failed = f"{errors.total()} of {len(load.requests)} requests at {load.level.text} failed: {error}"
    if errors:
        _require_alive(server)
        try:
            Endpoint(server.url, api_key(), tries=1).require_reachable()
        except UsageError:
            hint = f"restart the server; its log may show why it stopped; {_KEPT}"
            raise JoulelabError(f"the server at {server.url} stopped answering; {failed}", hint) from None
    low, high = load.window
    if any(low <= at_ns < high for one in load.requests if not one.error for at_ns in one.chunk_ns):
        return
    if not errors:
        raise JoulelabError(
            f"no request at {load.level.text} was answered within {load.seconds:.0f} s", f"raise --max-time; {_KEPT}"
        )
    hint = "see the server's log"
    if "HTTP 429" in error:
        hint = "lower the load, or let more requests wait (--max-waiting of `joulelab serve`)"
    raise JoulelabError(failed, f"{hint}; {_KEPT}")


def _record_row(run: RunContext, spec: ServingSpec, server: MeasuredServer, load: LoadWindow) -> None:
    """Waits until the trace covers the window. Before the next level, so that a killed run keeps this one."""
    read = None if server.energy_gap else energy_reader(run.meter, load.window[1], server.device)
    gpus = gpu_names(run) if server.device == "cuda" else []
    values = load_values(load, read, server.energy_gap)
    if values["overloaded"]:
        run.warn(f"{load.level.text}: the server does not keep up with this rate, so the row is not steady")
    elif not values["steady"]:
        run.warn(f"{load.level.text}: throughput was still changing, so the row is not steady; raise --max-time")
    if values["failed"]:
        run.warn(f"{load.level.text}: {values['notes'][-1]}")
    values |= {
        "server": spec.server or f"engine {spec.engine}",
        "model": spec.model or server.model,
        "engine": server.facts,
        "device": server.device,
        "gpus": len(gpus) if server.device else None,
        "gpu_model": next(iter(gpus), ""),
        "prompts": Path(spec.prompts).name,
        "prompt_tokens": spec.prompt_tokens,
        "new_tokens": spec.new_tokens,
        "limits": {
            "ttft_ms": spec.ttft_limit_ms,
            "tpot_ms": spec.tpot_limit_ms,
            "percentile": spec.limit_percentile,
        },
    }
    run.meter.event("tracker", stage=_stage_name(load.level), name=TRACKER, values=values)


def gpu_names(run: RunContext) -> list[str]:
    """Names of the metered GPUs."""
    from joulelab.meter.series import load_trace

    trace = load_trace(run.meter.trace_path)
    return [series.name for series in trace.devices if series.component == "gpu" and series.counted]


@contextmanager
def _running_server(run: RunContext, spec: ServingSpec) -> Iterator[MeasuredServer]:
    model = spec.require_server()
    location = locate_server(spec.server)
    gap = "" if location.is_local else f"this machine's meter does not measure the server: {location.reason}"
    uuids = gpus_of(location.pids)
    if not gap and (unmetered := unmetered_gpus(location.pids, spec.meter_settings().gpus)):
        gap = f"the server computes on GPUs that are not metered here: {', '.join(unmetered)}; set energy.gpus"
    if not gap and not uuids and (unknown := unattributed_gpus(location.pids)):
        gap = (
            f"a process that cannot be identified computes on GPU {', '.join(unknown)}, and it may be the server; run "
            "joulelab in the container of the server and as its user"
        )
    if gap:
        run.warn(f"energy per token is missing: {gap}. The stages' energy is that of this machine, the client.")
    else:
        where = f"GPU {', '.join(uuids)}" if uuids else "CPU"
        run.note(f"the server is on this machine ({location.reason}) and computes on {where}")
    device = ("cuda" if uuids else "cpu") if location.is_local else ""
    pids = location.pids if location.is_local else ()
    processes = [process for pid in pids if (process := _process(pid)) is not None]

    def require_alive() -> None:
        if processes and not any(map(_is_alive, processes)):
            raise JoulelabError(
                f"the server at {spec.server} (pid {', '.join(str(one.pid) for one in processes)}) has ended",
                "restart it; its log may show why it ended",
            )

    yield MeasuredServer(spec.server, model, device, gap, None, require_alive)


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def _child_engine(run: RunContext, spec: ServingSpec) -> Iterator[MeasuredServer]:
    """vLLM or SGLang. Start and load are a stage; the load's own warm-up is left out of the steady window."""
    from joulelab.zoo.pretrained import servable_model

    input_bill(run, "model", spec.model, "model", role=None)
    installation, context = spec.child_engine
    place = servable_model(spec.model)
    assert place is not None  # checked
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(spec.dtype, spec.dtype)
    with run.stage(START, role="setup", activity="load"):
        run.progress.write(f"starting {installation.identity} with {spec.model}")
        engine = start_engine(
            installation, place[0],
            tokenizer=place[0], revision=place[1], dtype=dtype, context_length=context,
            log=run.paths.folder / f"engine-{installation.name}.log", timeout_s=spec.engine_timeout_s,
            check=run.stop.check, report=lambda line: run.progress.advance(0, line[:_SHOWN_CHARACTERS]),
        )  # fmt: skip
    try:
        device = "cuda" if gpus_of((engine.pid,)) or unattributed_gpus((engine.pid,)) else "cpu"
        facts = {"engine": installation.identity, "device": device, "dtype": dtype, "context": context}
        yield MeasuredServer(engine.endpoint.base_url, SERVED_NAME, device, "", facts, engine.require_alive)
    finally:
        engine.stop()


@contextmanager
def _builtin_engine(run: RunContext, spec: ServingSpec) -> Iterator[MeasuredServer]:
    """Start, load and warm-up are a stage; the engine ends with the block, whatever happens inside."""
    input_bill(run, "model", spec.model, "model", role=None)
    served = spec.served_model
    command = [sys.executable, "-m", "joulelab", "serve", served.model, "--port", "0", "--json"]
    for option, value in (
        ("--dtype", served.dtype),
        ("--device", "cuda" if served.on_gpu else "cpu"),
        ("--batch-size", served.batch_size),
        ("--context", served.context),
        ("--threads", served.threads),
        ("--max-waiting", 4096),
    ):
        command += [option, str(value)]
    # In its own group: Ctrl-C reaches this process, which then stops the engine in order. Its guard ends it if this
    # process is killed.
    guard = start_guard()
    try:
        with tempfile.TemporaryFile("w+") as messages:
            with run.stage(START, role="setup", activity="load"):
                run.progress.write(f"starting {spec.engine} with {spec.model}")
                child = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=messages, text=True, process_group=guard.pid
                )
                facts = _facts_of(child, messages, spec.engine_timeout_s, run.stop.check)

            def require_alive() -> None:
                if child.poll() is not None:
                    raise _engine_end(child, messages)

            try:
                yield MeasuredServer(facts["url"], facts["model"], facts["device"], "", facts, require_alive)
            finally:
                _stop(child)
    finally:
        kill_group(guard)


def _facts_of(
    child: subprocess.Popen[str], messages: IO[str], timeout_s: float, check: Callable[[], None]
) -> dict[str, Any]:
    """What the engine reports once it is ready."""
    assert child.stdout is not None
    begin_s = time.monotonic()
    try:
        while not select.select([child.stdout], [], [], _POLL_S)[0]:
            check()
            if time.monotonic() - begin_s > timeout_s:
                raise JoulelabError(
                    f"the engine was not ready after {timeout_s:g} s",
                    "raise engine_timeout_s, or start it by hand to see its messages: joulelab serve MODEL",
                )
        line = child.stdout.readline()
    except BaseException:
        _stop(child)
        raise
    if not line:
        child.wait()
        raise _engine_end(child, messages)
    facts: dict[str, Any] = json.loads(line)
    return facts


def _engine_end(child: subprocess.Popen[str], messages: IO[str]) -> JoulelabError:
    messages.seek(0)
    problem = [text for text in messages.read().splitlines() if text.strip()]
    error = next((text.removeprefix("error: ") for text in problem if text.startswith("error: ")), "")
    return JoulelabError(
        f"the engine {exit_text(child.returncode)}: {error or ' '.join(problem[-1:])}",
        "start it by hand to see all messages: joulelab serve MODEL",
    )


def _stop(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
