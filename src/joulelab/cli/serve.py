"""`joulelab serve`, a small OpenAI-compatible server, and `joulelab infer --server`, which measures one under load."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import AsJson, Flag, checked_spec, complete_models, note, read_names
from joulelab.errors import UsageError
from joulelab.lookup import CALCULATIONS

if TYPE_CHECKING:
    from joulelab.cli.run import RunOptions
    from joulelab.runs.record import RunRecord


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder in Hugging Face format (also a run's artifact), a hub id, a GGUF file or a sample.",
            autocompletion=complete_models,
        ),
    ],
    port: Annotated[int, typer.Option("--port", help="Port on 127.0.0.1; 0 chooses a free one.")] = 8000,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="auto (bf16 on a GPU with tensor cores for it, else fp32), fp32, bf16, fp16, or quantized weights: "
            "nf4, fp8, fp8-weights, int4.",
        ),
    ] = "auto",
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")] = "auto",
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            metavar="N",
            help="Answers that are generated together (default: 64 on a GPU, 16 on a CPU).",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="N",
            help="Maximum tokens of a prompt and its answer (default: 2048, or the model's maximum).",
            show_default=False,
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", metavar="N", help="Requests that may wait; more get status 429.")
    ] = 256,
    threads: Annotated[
        int | None,
        typer.Option("--threads", metavar="N", help="CPU threads (default: all available).", show_default=False),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the model in requests (default: MODEL).", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a causal language model with the OpenAI protocol: completions and chat completions, also streamed, the list
    of models, and /health. Concurrent requests are batched.

    For tests and small uses: it listens on 127.0.0.1 only, without authentication. To measure it, or any other server,
    run `joulelab infer --server http://127.0.0.1:8000/v1`.

    Examples:

      joulelab serve sample:smollm2

      joulelab serve runs/kd-.../artifacts/final_model --port 0 --json

      joulelab serve my-org/model --dtype nf4 --batch-size 32 --context 4096
    """
    from joulelab.infer.serving.config import ServedModel, require_port

    # Signals before the model is loaded end the process at once, as for any other command.
    settings = ServedModel.checked(
        model=model,
        dtype=dtype,
        device=device,
        batch_size=batch_size,
        context=context,
        max_waiting=max_waiting,
        threads=threads,
        name=name,
    )
    require_port(port)
    note(f"loading {model}")
    server = CALCULATIONS.resolve("model-server")(settings, port)
    for text in server.notes:
        note(text)
    stopped = _stop_on_signals(server)
    if as_json:
        print(json.dumps({"url": server.url, "model": server.model, **server.facts}), flush=True)
    facts = server.facts
    note(
        f"serving {server.model} at {server.url} ({facts['device']}, {facts['dtype']}, up to {facts['batch_size']} "
        f"requests at once, {facts['context']:,} tokens each with the prompt)"
    )
    note(f"try it:     curl {server.url}/models")
    note(f"measure it: joulelab infer --server {server.url}")
    note("stop it:    Ctrl-C")
    server.run()
    if stopped:
        note("stopped")


def _stop_on_signals(server: Any) -> list[int]:
    """Stopping is the normal end of a server, so the exit code is 0."""
    received: list[int] = []

    def stop(signum: int, frame: Any) -> None:
        if not received:
            received.append(signum)
            server.stop()

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    return received


# `joulelab infer --server URL` and `--engine builtin`.


def _concurrencies(text: str) -> list[int]:
    try:
        return [int(item) for item in read_names(text)]
    except ValueError:
        raise UsageError(f"--concurrency {text} is not a list of whole numbers", "write 1,4,16") from None


def _rates(text: str) -> list[float]:
    try:
        return [float(item) for item in read_names(text)]
    except ValueError:
        raise UsageError(f"--rate {text} is not a list of numbers", "write 0.5,2,8") from None


def _one_batch_size(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"--batch-size {text}: an engine has one batch size", "write one number")
    return int(text)


FLAGS: Mapping[str, Flag] = {
    "server": Flag("server"),
    "engine": Flag("engine"),
    "engine_python": Flag("engine_python"),
    "concurrency": Flag("concurrency", _concurrencies),
    "rate": Flag("rates", _rates),
    "duration": Flag("duration_s"),
    "max_time": Flag("max_time_s"),
    "max_ttft": Flag("ttft_limit_ms"),
    "max_tpot": Flag("tpot_limit_ms"),
    "percentile": Flag("limit_percentile"),
    "prompts": Flag("prompts", str),
    "prompt_tokens": Flag("prompt_tokens"),
    "new_tokens": Flag("new_tokens"),
    "dtype": Flag("dtype"),
    "device": Flag("device"),
    "batch_size": Flag("batch_size", _one_batch_size),
    "threads": Flag("threads"),
    "require": Flag("energy.require"),
    "require_grade": Flag("energy.require_grade"),
    "estimate_cpu": Flag("energy.estimate_cpu", switch=True),
}


def measure_server(params: Mapping[str, Any], options: RunOptions) -> None:
    """`params`: the options of `joulelab infer`; its words are the model and settings."""
    from joulelab.cli.infer import models_and_settings
    from joulelab.cli.run import start_run
    from joulelab.report.tables.serving_tables import serving_data, write_serving_table

    models, overrides = models_and_settings(params["words"])
    if len(models) > 1:
        raise UsageError(f"{len(models)} models were named ({', '.join(models)}); a server is measured with one")
    # Not every version of typer converts what the context holds.
    table = Path(params["table"]) if params["table"] is not None else None
    if table is not None and table.suffix.lower() not in (".csv", ".json"):
        raise UsageError(f"--table {table}: expected a file that ends in .csv or .json")
    if table is not None and not table.absolute().parent.is_dir():
        raise UsageError(f"--table {table}: there is no folder {table.absolute().parent}")
    named = {"model": models[0]} if models else {}
    spec = checked_spec("infer", "serving", FLAGS, {**params, **named, "overrides": overrides}, **named)

    def to_json(record: RunRecord) -> str:
        return json.dumps({**json.loads(record.model_dump_json()), "serving": serving_data(record)}, indent=2)

    def finished(record: RunRecord) -> None:
        if table is not None:
            write_serving_table(record, table)
            note(f"table: {table}")

    start_run(spec, replace(options, to_json=to_json, finished=finished))
