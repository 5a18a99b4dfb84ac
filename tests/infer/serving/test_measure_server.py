"""`joulelab infer --server` and `--engine`: a run like every other, refused before it starts where it cannot work."""

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import engine_stand_in
import psutil
import pytest
import torch
from commands import joulelab_here, shown
from tiny_lm import make_model, make_tokenizer

from joulelab.errors import JoulelabError, UsageError
from joulelab.infer.serving import config, serving_pipeline
from joulelab.infer.serving.config import ServingSpec
from joulelab.infer.serving.serving_pipeline import MeasuredServer
from joulelab.meter.config import EnergyConfig
from joulelab.runs.spec import check

SHORT = (
    "--duration",
    "3",
    "--prompt-tokens",
    "4-8",
    "--new-tokens",
    "8",
    "energy.idle_before_s=0",
    "energy.idle_after_s=0",
)


def measure(store, *words):
    return joulelab_here("infer", *words, "--runs-dir", store)


@pytest.mark.slow
def test_a_running_server_is_measured_and_its_table_written(tiny_server, tmp_path):
    server, table = tiny_server[0], tmp_path / "rows.csv"
    done = measure(
        tmp_path, "--server", server.url, "--concurrency", "1,3", *SHORT, "--max-tpot", "1e6", "--table", table
    )
    assert done.returncode == 0, done.stderr
    assert "per output token, estimated" in done.stdout and "p95 of time per output token at most" in done.stdout
    record = shown(tmp_path)
    stages = {stage["name"]: stage for stage in record["stages"]}
    assert stages["serve.c1"]["role"] == "inference" and stages["serve.c3"]["activity"] == "serve"
    row = record["findings"]["serve.c3"]["serving"]
    assert row["model"] == "tiny" and row["mean_output_tokens"] == 8 and 4 <= row["mean_input_tokens"] <= 8
    assert row["energy"]["output_token"]["method"] == "estimated"
    per = {unit: values["gross_j"] for unit, values in row["energy"].items()}
    assert per["token"] < per["output_token"] < per["request"], "the same energy over different counts"
    rows = list(csv.DictReader(table.open()))
    assert [one["max_num_seqs"] for one in rows] == ["1", "3"]
    assert float(rows[1]["energy_per_token_joules"]) == pytest.approx(per["output_token"])
    names = {"output_token": "token", "input_token": "input_token", "token": "total_token", "request": "request"}
    for unit, name in names.items():
        half_width = row["energy"][unit]["gross_half_width_j"]
        assert float(rows[1][f"energy_per_{name}_half_width_joules"]) == pytest.approx(half_width)
    refused = joulelab_here("compare", "last", "--runs-dir", tmp_path)
    assert refused.returncode == 2 and "joulelab show" in refused.stderr, "a load of a chosen length has no ratio"


def test_the_energy_of_a_server_elsewhere_is_missing(tiny_server, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "joulelab.infer.serving.serving_pipeline.locate_server",
        lambda url: config.locate_server("http://192.0.2.1:9/v1"),
    )
    table = tmp_path / "rows.csv"
    words = ("--server", tiny_server[0].url, "--concurrency", "2", *SHORT, "--json", "--table", table)
    done = measure(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["serving"][0]
    assert row["energy"]["output_token"] is None and "192.0.2.1" in row["why_no_energy"]
    assert row["output_tokens_per_s"] > 0 and row["energy_method"] == "missing"
    assert (row["device"], row["gpus"], row["gpu_model"]) == ("", None, ""), "unknown, not a CPU"
    written = next(csv.DictReader(table.open()))
    assert (written["gpu_model"], written["num_gpus"]) == ("", "")
    screen = " ".join(joulelab_here("show", "last", "--runs-dir", tmp_path).stdout.split())
    assert "unknown hardware" in screen and "client, whole run: " in screen


def test_a_rate_that_the_server_does_not_keep_up_with_is_reported_on_the_screen(tiny_server, tmp_path, monkeypatch):
    summarize = serving_pipeline.load_values
    unsteady = {"overloaded": True, "steady": False}
    monkeypatch.setattr(serving_pipeline, "load_values", lambda *load: summarize(*load) | unsteady)
    done = measure(tmp_path, "--server", tiny_server[0].url, "--rate", "4", *SHORT)
    assert done.returncode == 0, done.stderr
    text = " ".join(f"{done.stdout} {done.stderr}".split())
    assert (
        text.count("warning: 4 requests/s: the server does not keep up with this rate, so the row is not steady") == 1
    )
    screen = " ".join(joulelab_here("show", "last", "-v", "--runs-dir", tmp_path).stdout.split())
    assert "4/s *" in screen and "*: the load was not steady" in screen
    stage = next(one for one in shown(tmp_path)["stages"] if one["name"] == "serve.r4")
    assert not stage["samples"] and not stage["tokens"], "answers that are cut off would be missing"


def test_a_level_at_which_all_requests_fail_leaves_the_levels_before_it(tiny_server, tmp_path, monkeypatch):
    run, rows_before = serving_pipeline.LoadRunner.run, []

    def failing(runner, level, *settings):
        events = [path.read_text() for path in tmp_path.glob("*/events/*.jsonl")]
        rows_before.append(sum('"name": "serving"' in text or '"name":"serving"' in text for text in events))
        load = run(runner, level, *settings)
        failed = [replace(one, error="HTTP 429: 12 requests wait already") for one in load.requests]
        return load if level.concurrency == 1 else replace(load, requests=tuple(failed))

    monkeypatch.setattr(serving_pipeline.LoadRunner, "run", failing)
    done = measure(tmp_path, "--server", tiny_server[0].url, "--concurrency", "1,2", *SHORT)
    assert done.returncode == 1 and "requests at 2 concurrent requests failed: HTTP 429" in done.stderr
    assert "--max-waiting" in done.stderr and "levels before this one are in the record" in done.stderr
    assert rows_before == [0, 1], "a level has its row before the next one begins, also if that one is killed"
    found = shown(tmp_path)["findings"]
    assert found["serve.c1"]["serving"]["output_tokens"] > 0 and "serve.c2" not in found
    assert "Serving tiny" in joulelab_here("show", "last", "--runs-dir", tmp_path).stdout

    monkeypatch.undo()
    resumed = joulelab_here("run", "--resume", "last", "--runs-dir", tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "measured by an earlier attempt on this machine: 1 concurrent request" in resumed.stderr
    record = shown(tmp_path)
    assert record["findings"]["serve.c1"] == found["serve.c1"], "a level with a row is not measured again"
    assert record["findings"]["serve.c2"]["serving"]["output_tokens"] > 0
    stages = {stage["name"]: stage for stage in record["stages"]}
    assert len(stages["serve.c1"]["segments"]) == 1 and "serve.c1.repeated" not in stages


def test_a_server_that_has_ended_is_named():
    """Also if some requests were answered before."""
    requests = [
        SimpleNamespace(chunk_ns=[5], error=""),
        SimpleNamespace(chunk_ns=[6], error="the stream ended without [DONE]"),
        *[SimpleNamespace(chunk_ns=[], error="Connection refused")] * 2,
    ]
    level = SimpleNamespace(text="2 concurrent requests")
    load = SimpleNamespace(requests=requests, level=level, seconds=3, window=(0, 10))
    expected = "http://127.0.0.1:9/v1 stopped answering; 3 of 4 requests at 2 conc.* failed: Connection refused"
    with pytest.raises(JoulelabError, match=expected):
        serving_pipeline._require_answers(load, MeasuredServer("http://127.0.0.1:9/v1", "m", ""))

    def require_alive():
        raise JoulelabError("the engine was killed by signal 9", "see its log")

    ended = MeasuredServer("http://127.0.0.1:9/v1", "m", "cpu", require_alive=require_alive)
    with pytest.raises(JoulelabError, match="the engine was killed by signal 9") as raised:
        serving_pipeline._require_answers(load, ended)
    assert raised.value.hint == "see its log; levels before this one are in the record"


SERVER_THAT_ENDS = """
import json, os, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

asking = []

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments): pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "tiny", "max_model_len": 4096}]}).encode())

    def do_POST(self):
        asking.append(1)
        if len(asking) == 2:
            os._exit(1)
        tokens = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["max_tokens"]
        self.send_response(200)
        self.end_headers()
        for _ in range(tokens):
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}' + bytes([10, 10]))
            time.sleep(0.01)
        usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}})
        asking.pop()
        self.wfile.write(f"data: {usage}".encode() + bytes([10, 10]) + b"data: [DONE]" + bytes([10, 10]))

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.slow
def test_a_server_that_ends_during_a_load_is_the_error_and_ends_the_load_at_once(tmp_path):
    """It ends when two requests are under way; the level before, with one at a time, is in the record."""
    with subprocess.Popen([sys.executable, "-c", SERVER_THAT_ENDS], stdout=subprocess.PIPE, text=True) as server:
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
        try:
            done = measure(tmp_path, "--server", url, "--concurrency", "1,2", *SHORT)
        finally:
            server.kill()
    assert done.returncode == 1
    assert f"error: the server at {url} (pid {server.pid}) has ended" in done.stderr
    assert "levels before this one are in the record" in done.stderr
    found = shown(tmp_path)
    assert found["findings"]["serve.c1"]["serving"]["output_tokens"] > 0 and "serve.c2" not in found["findings"]
    stage = next(stage for stage in found["stages"] if stage["name"] == "serve.c2")
    assert stage["duration_s"] < 3, "the load ended with its server, before its 3 s"


@pytest.mark.slow
def test_an_engine_that_ends_during_a_load_is_reported_with_its_log(tmp_path):
    python = engine_stand_in.write(tmp_path / "environment")
    make_model().save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    words = ("--engine", "vllm", "--engine-python", python, "--model", tmp_path / "tiny", "--concurrency", "2")
    done = measure(tmp_path / "runs", *words, 'engine_args=["--behave","die-later"]', *SHORT)
    assert done.returncode == 1
    assert "vllm 0.99.0 --behave die-later ended with exit code 1" in done.stderr
    assert "RuntimeError: illegal memory access" in done.stderr


@pytest.mark.slow
def test_a_builtin_engine_that_is_killed_during_a_load_is_the_error(tmp_path, monkeypatch):
    make_model().save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    run = serving_pipeline.LoadRunner.run

    def kill_and_run(runner, level, *settings):
        engines = [one for one in psutil.Process().children(recursive=True) if "serve" in one.cmdline()]
        engines[0].kill()
        return run(runner, level, *settings)

    monkeypatch.setattr(serving_pipeline.LoadRunner, "run", kill_and_run)
    words = ("--engine", "builtin", "--model", tmp_path / "tiny", "--concurrency", "2", *SHORT)
    done = measure(tmp_path / "runs", *words)
    assert done.returncode == 1 and "error: the engine was killed by signal 9" in done.stderr


def test_a_level_without_an_answer_in_its_window_is_no_row(tiny_server):
    requests = [SimpleNamespace(chunk_ns=[5], error="")]
    load = SimpleNamespace(requests=requests, level=SimpleNamespace(text="x"), seconds=3, window=(10, 20))
    with pytest.raises(JoulelabError, match="no request at x was answered within 3 s"):
        serving_pipeline._require_answers(load, MeasuredServer(tiny_server[0].url, "tiny", "cpu"))
    load.window = (0, 10)
    serving_pipeline._require_answers(load, MeasuredServer(tiny_server[0].url, "tiny", "cpu"))


@pytest.mark.slow
def test_an_engine_is_started_measured_and_stopped(tmp_path):
    make_model().save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    words = ("--engine", "builtin", "--model", tmp_path / "tiny", "--rate", "6", "--concurrency", "2")
    done = measure(tmp_path / "runs", *words, *SHORT)
    assert done.returncode == 0, done.stderr
    assert "(engine builtin, CPU, fp32): " in " ".join(done.stdout.split())
    record = shown(tmp_path / "runs")
    assert [
        stage["name"] for stage in record["stages"] if "." in stage["name"] and "overhead" not in stage["name"]
    ] == [
        "engine.start",
        "serve.c2",
        "serve.r6",
    ]
    assert record["findings"]["serve.r6"]["serving"]["engine"]["dtype"] == "fp32"


@pytest.mark.slow
def test_an_engine_ends_with_a_run_that_is_killed(tmp_path):
    """Otherwise it would keep the GPU's memory and add to later measurements."""
    make_model().save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    words = ["infer", "--engine", "builtin", "--model", str(tmp_path / "tiny"), "--concurrency", "2"]
    words += [
        "--prompt-tokens",
        "8",
        "--new-tokens",
        "8",
        "duration_s=60",
        "--runs-dir",
        str(tmp_path / "runs"),
        "--estimate-cpu",
    ]

    def engines():
        found = [
            one for one in psutil.process_iter(["cmdline"]) if str(tmp_path / "tiny") in (one.info["cmdline"] or [])
        ]
        return [one for one in found if "serve" in one.info["cmdline"]]

    started = subprocess.Popen([sys.executable, "-m", "joulelab", *words], stderr=subprocess.DEVNULL)
    try:
        wait_for(engines)
    finally:
        started.kill()
        started.wait()
    wait_for(lambda: not engines())


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_vllm_is_started_as_a_child_measured_and_stopped(tmp_path):
    """Against a stand-in that speaks its protocol."""
    python = engine_stand_in.write(tmp_path / "environment")
    make_model().save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    words = ("--engine", "vllm", "--engine-python", python, "--model", tmp_path / "tiny", "--concurrency", "2")
    done = measure(tmp_path / "runs", *words, *SHORT)
    assert done.returncode == 0, done.stderr
    record = shown(tmp_path / "runs")
    stages = {stage["name"]: stage for stage in record["stages"]}
    assert stages["engine.start"]["role"] == "setup" and stages["serve.c2"]["role"] == "inference"
    row = record["findings"]["serve.c2"]["serving"]
    assert row["output_tokens"] > 0 and row["engine"]["engine"] == "vllm 0.99.0" and row["server"] == "engine vllm"
    commands = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
    assert not [one for one in commands if "api_server" in one and str(tmp_path) in one]


def test_a_builtin_engine_that_never_becomes_ready_is_stopped():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryFile("w+") as messages, pytest.raises(JoulelabError, match=r"not ready after 0.1 s"):
        serving_pipeline._facts_of(child, messages, 0.1, lambda: None)
    assert child.poll() is not None


@pytest.mark.parametrize(
    "words, text",
    [
        (("--server", "http://127.0.0.1:9/v1"), "no server answers at http://127.0.0.1:9/v1: Connection refused hint:"),
        (("--server", "localhost"), "is not a server address"),
        (("--engine", "builtin"), "needs a model"),
        (("--engine", "builtin", "--model", "no/such/folder"), "no/such/folder"),
        (("--server", "http://127.0.0.1:9/v1", "--engine", "builtin"), "either a running server"),
        (("--server", "http://127.0.0.1:9/v1", "--dtype", "bf16"), "dtype belongs to an engine"),
        (("--engine", "vllm", "--model", "TINY"), "set --engine-python"),
        (("--engine", "vllm", "--model", "TINY", "--engine-python", sys.executable), "vllm is not installed"),
        (("--engine", "vllm", "--model", "TINY", "--batch-size", "4"), "--batch-size belongs to the builtin engine"),
        (("--engine", "sglang", "--model", "TINY", "--dtype", "nf4"), "is a format of the builtin engine"),
        (("--engine", "builtin", "--model", "TINY", "--engine-python", "p"), "belong to --engine vllm"),
        (("--server", "http://127.0.0.1:9/v1", "--concurrency", "0"), "concurrency"),
        (("--server", "http://127.0.0.1:9/v1", "--concurrency", "two"), "whole numbers"),
        (("--server", "http://127.0.0.1:9/v1", "--prompt-tokens", "9-3"), "wrong order"),
        (("--server", "http://127.0.0.1:9/v1", "--table", "rows.txt"), ".csv or .json"),
        (("--server", "http://127.0.0.1:9/v1", "--norm", "none"), "--norm has no effect"),
        (("--server", "http://127.0.0.1:9/v1", "--prompts", "absent.txt"), "absent.txt"),
        (("smollm2", "--concurrency", "4"), "applies to a server"),
        (
            ("--server", "http://127.0.0.1:9/v1", "--prompts", "q.txt", "--prompt-tokens", "256"),
            "--prompt-tokens has no effect with --prompts",
        ),
        (
            ("--server", "http://127.0.0.1:9/v1", "prompts=q.txt", "prompt_tokens=64-512"),
            "prompts have their own lengths; omit prompt_tokens",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_run(words, text, tmp_path):
    if "TINY" in words:
        make_model().save_pretrained(tmp_path / "tiny")
        make_tokenizer().save_pretrained(tmp_path / "tiny")
    done = measure(tmp_path / "runs", *(tmp_path / "tiny" if word == "TINY" else word for word in words))
    assert done.returncode == 2 and text in " ".join(done.stderr.split()), done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_model_in_a_folder_with_an_equals_sign_is_no_setting(tmp_path, monkeypatch):
    make_model().save_pretrained(tmp_path / "lr=0.1")
    make_tokenizer().save_pretrained(tmp_path / "lr=0.1")
    monkeypatch.chdir(tmp_path)
    short = ("--prompt-tokens", "8", "--new-tokens", "8", "--dry-run")
    for model in (["--model", "./lr=0.1"], ["lr=0.1"]):
        done = measure(tmp_path / "runs", "--engine", "builtin", *model, *short)
        assert done.returncode == 0 and "lr=0.1" in done.stdout, done.stderr


def test_a_model_that_the_server_lacks_is_refused(tiny_server, tmp_path):
    done = measure(tmp_path / "runs", "--server", tiny_server[0].url, "--model", "other")
    assert done.returncode == 2 and "it lists tiny" in done.stderr and not (tmp_path / "runs").exists()


def test_a_server_whose_answer_is_the_end_token_can_be_measured(tiny_server, tmp_path):
    server, tokenizer = tiny_server
    ended = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompts = (f"w{k}" for k in range(40))
    prompt = next(one for one in prompts if first_token(tokenizer, one) in (ended, tokenizer.eos_token_id))
    (tmp_path / "prompts.txt").write_text(prompt + "\n")
    own = {"prompts": str(tmp_path / "prompts.txt"), "new_tokens": "8"}
    spec = check({"pipeline": "serving", "server": server.url, **own})
    assert spec.require_server() == "tiny"


def first_token(tokenizer, prompt):
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    return int(make_model()(input_ids=ids).logits[0, -1].argmax())


@pytest.mark.parametrize(
    "error, hint",
    [
        ("HTTP 400: unknown parameter 'ignore_eos'", "set ignore_eos=false: the server does not support ignore_eos"),
        (
            "HTTP 400: This model's maximum context length is 512 tokens.",
            "lower --new-tokens or --prompt-tokens, or start the server",
        ),
        ("HTTP 401: invalid token", "see the server's log; ignore_eos=false omits this parameter"),
    ],
)
def test_the_hint_fits_the_error_of_the_server(error, hint, monkeypatch):
    spec = check({"pipeline": "serving", "server": "http://localhost:1/v1"})
    monkeypatch.setattr(config, "listed_models", lambda url: {"m": None})
    monkeypatch.setattr(
        config.StreamingClient, "ask", lambda client, request, path, body, ended: setattr(request, "error", error)
    )
    with pytest.raises(UsageError) as refused:
        spec.require_server()
    assert refused.value.hint.startswith(hint)


@pytest.mark.parametrize(
    "options, found",
    [
        (
            ["--prompt-tokens", "5000"],
            "prompts of 5000 words (--prompt-tokens) and answers of 128 tokens (--new-tokens)",
        ),
        (["--prompt-tokens", "8", "--new-tokens", "20-60"], "prompts of 8 words (--prompt-tokens) and answers of 60"),
        (["--prompts", "PROMPTS", "--new-tokens", "64"], "a prompt and answers of 64 tokens (--new-tokens)"),
    ],
)
def test_requests_that_the_servers_context_cannot_hold_are_refused(tiny_server, tmp_path, options, found):
    (tmp_path / "prompts.txt").write_text("w1 w2\n")
    named = [str(tmp_path / "prompts.txt") if one == "PROMPTS" else one for one in options]
    done = measure(tmp_path / "runs", "--server", tiny_server[0].url, *named)
    said = " ".join(done.stderr.split())
    assert (
        done.returncode == 2
        and found in said
        and "do not fit into the context of" in said
        and "(64 tokens)" in said
        and "--context N" in said
    )
    assert "ignore_eos" not in said and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("lengths", [{"new_tokens": "60"}, {"prompt_tokens": "4-60", "new_tokens": "8"}])
def test_a_server_that_does_not_state_its_context_is_asked_for_an_answer_of_full_length(
    tiny_server, monkeypatch, lengths
):
    monkeypatch.setattr(config, "listed_models", lambda url: {"tiny": None})
    server = {"pipeline": "serving", "server": tiny_server[0].url, "prompt_tokens": "8"}
    with pytest.raises(UsageError, match="does not answer a streamed request: HTTP 400") as refused:
        check({**server, **lengths}).preflight()
    assert refused.value.hint.startswith("lower --new-tokens or --prompt-tokens")
    check({**server, "new_tokens": "20-50"}).preflight()


def test_an_engine_gets_room_for_what_is_requested_of_it(tmp_path):
    make_model().save_pretrained(tmp_path / "tiny")  # 128 positions
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    (tmp_path / "prompts.txt").write_text("w1 w2\n")
    engine = {"pipeline": "serving", "engine": "builtin", "model": str(tmp_path / "tiny"), "device": "cpu"}
    own = {**engine, "prompts": str(tmp_path / "prompts.txt")}
    for settings in ({**engine, "prompt_tokens": "80", "new_tokens": "60"}, {**own, "new_tokens": "128"}):
        with pytest.raises(UsageError, match=r"do not fit into the context of .* \(128 tokens\)"):
            check(settings).served_model  # noqa: B018
    served = check({**own, "new_tokens": "20", "rates": [50.0], "concurrency": [1]}).served_model
    assert (served.context, served.batch_size) == (128, 16)
    assert check({**own, "new_tokens": "20", "concurrency": [2048]}).served_model.batch_size == config.MAX_BATCH


def test_prompts_of_a_file_are_sent_in_order_and_random_words_differ(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}]}\n')
    settings = {"pipeline": "serving", "server": "http://localhost:1/v1", "prompts": str(file)}
    spec = check(settings)
    sent = [request for _, request in zip(range(3), spec.requests("m"), strict=False)]
    assert [path for path, _ in sent] == ["/completions", "/chat/completions", "/completions"]
    assert sent[1][1]["messages"][0]["content"] == "two" and "ignore_eos" not in sent[0][1]
    plain = check({"pipeline": "serving", "server": "http://localhost:1/v1"})
    words = [body["prompt"] for _, (_, body) in zip(range(5), plain.requests("m"), strict=False)]
    assert len(set(words)) == 5 and all(len(text.split()) == 256 for text in words)


def test_a_local_server_is_metered_by_its_processes_and_gpus(monkeypatch):
    spec = ServingSpec(name="x", server="http://localhost:8000/v1")
    place = config.locate_server("http://192.0.2.1:9/v1")
    monkeypatch.setattr(config, "locate_server", lambda url: type(place)(True, "here", (41, 42)))
    monkeypatch.setattr(config, "gpus_of", lambda pids: ["GPU-3"])
    found = spec.meter_settings()
    assert (found.process_ids, found.gpus) == ((41, 42), "GPU-3")
    named = spec.model_copy(update={"energy": EnergyConfig(gpus="0")})
    assert named.meter_settings().gpus == "0", "GPUs that the user names are kept"
    monkeypatch.setattr(config, "locate_server", lambda url: place)
    assert spec.meter_settings() == spec.energy


class Cards:
    """One GPU on which the processes `pids` compute."""

    def __init__(self, *pids):
        self.pids = pids

    @contextmanager
    def opened(self, nvml):
        yield self, {type("Card", (), {"uuid": "GPU-1"})(): "handle"}


@pytest.mark.parametrize(
    ("computing", "server", "found"),
    [
        ((), (41,), []),
        ((2**30,), (os.getpid(),), ["GPU-1"]),  # a number of another container
        ((os.getpid(),), (os.getppid(),), ["GPU-1"]),  # below
        ((1,), (os.getpid(),), []),  # another process, which is known
        ((1,), (), ["GPU-1"]),  # a server of another user
    ],
)
def test_a_gpu_whose_processes_cannot_be_identified_may_be_the_servers(monkeypatch, computing, server, found):
    cards = Cards(*computing)
    monkeypatch.setattr(config, "opened_cards", cards.opened)
    monkeypatch.setattr(config, "compute_pids", lambda nvml, handle: set(cards.pids))
    if computing == (os.getpid(),):  # the server's own child
        assert config.unattributed_gpus(server) == [] and config.gpus_of(server) == found
    else:
        assert config.unattributed_gpus(server) == found
