"""`joulelab serve` over real HTTP: the answers of `transformers.generate`, whatever else is in the batch."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tiny_lm import make_model, make_tokenizer

from joulelab.infer.serving.config import ServedModel
from joulelab.infer.serving.http_server import TextStream

PROMPTS = ["w1 w2 w3", "w7 w8 w9 w1 w2 w3 w4 w5", "w4", "w9 w9", "w30 w31 w32", "w11 w5 w3 w1"]


def send(server, path, body=None, headers=None, method=None):
    """(status, body as JSON or text)"""
    connection = http.client.HTTPConnection(*server.server_address, timeout=30)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    given = {"Content-Type": "application/json"} if headers is None else headers
    connection.request(method or ("GET" if body is None else "POST"), path, data, given)
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, json.loads(text) if reply.headers["Content-Type"] == "application/json" else text


def complete(server, prompt, **settings):
    status, body = send(server, "/v1/completions", {"prompt": prompt, "max_tokens": 12, "temperature": 0} | settings)
    assert status == 200, body
    return body


def generated(model, tokenizer, prompt, tokens=12):
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    found = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=ends, pad_token_id=0)
    return found[0, ids.shape[1] :].tolist()


def test_concurrent_requests_get_the_greedy_tokens_of_transformers(tiny_server):
    server, tokenizer = tiny_server
    model = make_model()  # the server's is in use
    many = PROMPTS * 2  # more than the batch has room for
    with ThreadPoolExecutor(len(many)) as pool:
        replies = list(pool.map(lambda prompt: complete(server, prompt), many))
    for prompt, reply in zip(many, replies, strict=True):
        expected = generated(model, tokenizer, prompt)
        assert reply["choices"][0]["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert reply["usage"] == {
            "prompt_tokens": len(prompt.split()),
            "completion_tokens": len(expected),
            "total_tokens": len(prompt.split()) + len(expected),
        }


def slow_down(server, monkeypatch, seconds=0.02):
    """Requests in the batch of each step from now on; every step takes a while, so that others can arrive."""
    running, step = [], server.engine._batch.step
    monkeypatch.setattr(
        server.engine._batch,
        "step",
        lambda rows: running.append(len(server.engine._running)) or time.sleep(seconds) or step(rows),
    )
    return running


def test_requests_that_arrive_later_join_the_running_batch(tiny_server, monkeypatch):
    server, _ = tiny_server
    running = slow_down(server, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(complete, server, "w1 w2", max_tokens=40, ignore_eos=True)
        while not running:
            time.sleep(0.005)
        complete(server, "w3 w4", max_tokens=5, ignore_eos=True)
        assert not first.done(), "a short answer does not wait for a long one"
        first.result()
    assert running[0] == 1 and 2 in running and running[-1] == 1


def test_a_stream_has_the_same_text_and_its_usage(tiny_server, monkeypatch):
    server, _ = tiny_server
    whole = complete(server, PROMPTS[1])
    slow_down(
        server, monkeypatch
    )  # otherwise this tiny model is faster than the stream, which then sends larger chunks
    body = {"prompt": PROMPTS[1], "max_tokens": 12, "temperature": 0, "stream": True}
    status, text = send(server, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    chunks = [json.loads(event) for event in events[:-1]]
    assert status == 200 and events[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole["choices"][0]["text"]
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    assert len(chunks) > 3, "tokens arrive one by one"


def test_chat_uses_the_template_and_several_answers_differ_by_their_number(tiny_server):
    server, _ = tiny_server
    body = {"messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 8, "seed": 7, "n": 3, "temperature": 1.5}
    status, reply = send(server, "/v1/chat/completions", body)
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert status == 200 and len(set(texts)) > 1
    assert reply["usage"]["prompt_tokens"] == 7  # <|im_start|> user w5 w6 <|im_end|> <|im_start|> assistant
    assert send(server, "/v1/chat/completions", body)[1]["choices"] == reply["choices"], "the seed decides"


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(tiny_server):
    server, _ = tiny_server
    words = complete(server, PROMPTS[0], ignore_eos=True)["choices"][0]["text"].split()
    stop = words[3]
    reply = complete(server, PROMPTS[0], stop=[stop], ignore_eos=True)
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["text"].split() == words[: words.index(stop)]
    assert reply["usage"]["completion_tokens"] == words.index(stop) + 1


@pytest.mark.parametrize(
    "body, status, param",
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "w1", "max_tokens": 100}, 400, "max_tokens"),
        ({"prompt": "w1", "max_tokens": "many"}, 400, "max_tokens"),
        ({"prompt": "w1", "max_tokens": float("inf")}, 400, "max_tokens"),
        ({"prompt": "w1", "n": float("nan")}, 400, "n"),
        ({"prompt": "w1", "seed": float("inf")}, 400, "seed"),
        ({"prompt": "w1", "temperature": 3}, 400, "temperature"),
        ({"prompt": "w1", "logprobs": 5}, 400, "logprobs"),
        ({"prompt": "w1", "tempreature": 1}, 400, "tempreature"),
        ({"prompt": [1, 2, 4000]}, 400, "prompt"),
        ({"prompt": "w1", "n": 65}, 400, "n"),
        ({"prompt": "w1", "model": "other"}, 404, "model"),
        (b"{not json", 400, None),
        (b"[]", 400, None),
    ],
)
def test_bad_requests_get_an_error_object_that_names_the_parameter(tiny_server, body, status, param):
    found, reply = send(tiny_server[0], "/v1/completions", body)
    assert (found, reply["error"]["param"]) == (status, param)
    assert reply["error"]["type"] == "invalid_request_error" and reply["error"]["message"]


def test_half_an_emoji_of_a_text_that_was_cut_is_an_unknown_character(tiny_server):
    status, body = send(tiny_server[0], "/v1/completions", b'{"prompt": "w1 \\ud83d", "max_tokens": 2}')
    assert status == 200, body
    status, body = send(tiny_server[0], "/v1/completions", b'{"prompt": "\xff"}')
    assert status == 400 and "the body is not JSON" in body["error"]["message"]


def test_messages_are_checked(tiny_server):
    for messages in ([], "hi", [{"role": "user"}], [{"role": "assistant", "content": "w1"}]):
        status, reply = send(tiny_server[0], "/v1/chat/completions", {"messages": messages})
        assert (status, reply["error"]["param"]) == (400, "messages")


def test_pages_of_a_browser_cannot_use_the_server(tiny_server):
    server = tiny_server[0]
    body = json.dumps({"prompt": "w1"}).encode()
    assert send(server, "/v1/completions", body, {"Content-Type": "text/plain"})[0] == 415
    assert send(server, "/health", headers={"Host": "attacker.example"})[0] == 403
    assert (
        send(server, "/v1/completions", b"", {"Content-Type": "application/json", "Content-Length": "9" * 12})[0] == 413
    )
    assert server.server_address[0] == "127.0.0.1"


def test_models_health_and_other_paths(tiny_server):
    server = tiny_server[0]
    assert send(server, "/v1/models")[1]["data"][0]["id"] == "tiny"
    assert send(server, "/v1/models/tiny")[1]["id"] == "tiny"
    assert send(server, "/health") == (200, {"status": "ok", "model": "tiny", "running": 0, "waiting": 0})
    assert send(server, "/v2/models")[0] == 404
    assert send(server, "/v1/models", method="DELETE")[0] == 405
    status, answer = send(server, "/v1/completions")
    assert status == 405 and answer["error"]["message"] == "/v1/completions takes POST, not GET"


def test_too_many_waiting_requests_are_refused(tiny_server):
    status, reply = send(
        tiny_server[0], "/v1/completions", {"prompt": "w1", "n": 13, "temperature": 1, "max_tokens": 2}
    )
    assert (status, reply["error"]["code"]) == (429, "rate_limit_exceeded")


def test_a_client_that_goes_away_frees_its_slot(tiny_server, monkeypatch):
    server = tiny_server[0]
    steps = slow_down(server, monkeypatch, 0.05)
    connection = http.client.HTTPConnection(*server.server_address)
    body = {"prompt": "w1", "max_tokens": 62, "stream": True, "ignore_eos": True, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    reply.read1(10)
    reply.close()
    connection.close()
    while server.engine.load != (0, 0):
        time.sleep(0.02)
    assert len(steps) < 40, "the whole answer would take 62 steps"


def test_text_is_sent_when_its_characters_are_complete_and_no_stop_text_can_follow():
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode(errors="replace")

    stream = TextStream(Bytes(), ["END"])
    sent = [stream.add([byte]) for byte in "né ENE END.".encode()]
    assert "".join(sent) == "né ENE " and stream.add([], last=True) == ""
    assert sent[1] == "" and sent[2] == "é", "half a character is not sent"
    assert sent[4] == "" and sent[6] == "EN", "what may begin a stop text waits until it cannot"


@pytest.fixture
def model_folder(tmp_path):
    make_model().save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_command_serves_until_it_is_stopped(model_folder, tmp_path):
    command = [sys.executable, "-m", "joulelab", "serve", str(model_folder), "--port", "0", "--json", "--name", "mine"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    facts = json.loads(started.stdout.readline())
    assert facts["model"] == "mine" and facts["context"] == 128 and facts["dtype"] == "fp32"
    host, port = facts["url"].removeprefix("http://").removesuffix("/v1").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("GET", "/health")
    assert json.loads(connection.getresponse().read())["model"] == "mine"
    os.kill(started.pid, signal.SIGTERM)
    _, messages = started.communicate(timeout=20)
    assert started.returncode == 0 and "stopped" in messages and "Traceback" not in messages


def test_what_cannot_be_served_is_refused_before_it_is_loaded(model_folder, tmp_path, joulelab):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((model_folder / "config.json").read_text())
    for words, text in (
        ([tmp_path / "bare"], "has no tokenizer"),
        ([tmp_path / "absent"], "absent"),
        ([model_folder, "--context", "4096"], "128 positions"),
        ([model_folder, "--dtype", "int5"], "expected one of auto"),
        ([model_folder, "--batch-size", "0"], "--batch-size 0"),
        ([model_folder, "--port", "99999"], "--port 99999"),
        (["sample:minilm"], "not a causal language model"),
        (["gpt2"], "gpt2 is the name of a zoo model; expected a model with weights"),
    ):
        code, out, err = joulelab("serve", *words, "--device", "cpu")
        assert code == 2 and text in err and not out, err


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "bf16"), ((7, 5), "fp32"), (None, "fp32")])
def test_a_gpu_without_bf16_tensor_cores_serves_in_fp32(model_folder, monkeypatch, capability, expected):
    driver = SimpleNamespace(nvmlDeviceGetCudaComputeCapability=lambda handle: capability, NVMLError=RuntimeError)
    monkeypatch.setattr("joulelab.runs.environment.opened_cards", lambda: nullcontext((driver, {"card": 0})))
    monkeypatch.setattr("joulelab.runs.environment.uses_gpu", lambda device: capability is not None)
    assert ServedModel.checked(model=str(model_folder), context=64).dtype == expected
    assert ServedModel.checked(model=str(model_folder), context=64, dtype="fp16").dtype == "fp16"


def test_a_port_in_use_is_refused_before_the_model_is_loaded(model_folder, joulelab):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, err = joulelab("serve", model_folder, "--device", "cpu", "--port", port)
    assert code == 2 and f"port {port} of 127.0.0.1 cannot be used" in err
    assert "loading" not in err
