"""The same call against a server process of the OpenAI protocol; over real HTTP, with real failures."""

import json
import os
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from openai_server import serve_with_transformers, serving
from tiny_lm import make_model, make_tokenizer

from joulelab.errors import ConfigError, JoulelabError, UsageError
from joulelab.infer.generation.completions import generate_into
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.server import (
    EncodedPrompt,
    Endpoint,
    ServerGenerator,
    TokenPrompts,
    classify_listeners,
    locate_server,
    request_body,
    unmetered_gpus,
)
from joulelab.infer.generation.settings import GenerationSettings

PROMPTS = ["w1 w2 w3", "w7 w8 w9 w1 w2", [{"role": "user", "content": "w5 w6"}], "w4"]
GREEDY = GenerationSettings(max_new_tokens=12)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(model_folder):
    with serving(model_folder) as address_and_pid:
        yield address_and_pid


def test_a_server_states_what_the_same_model_states_here(served):
    address, _ = served
    assert output_text(ServerGenerator(address, "tiny", GREEDY, concurrency=3)) == output_text(here())


def test_so_does_the_server_that_comes_with_transformers(model_folder):
    for package in ("fastapi", "uvicorn", "openai", "transformers.cli.serve"):
        pytest.importorskip(package)
    with serving(model_folder, serve_with_transformers) as (address, pid):
        generator = ServerGenerator(address, str(model_folder), GREEDY, concurrency=2)
        assert generator.location.pids == (pid,)
        assert output_text(generator) == output_text(here())


def here():
    return TransformersGenerator(make_model(), make_tokenizer(), GREEDY, identity="tiny", batch_size=4)


def output_text(generator):
    answers = [one for some in generator.generate(PROMPTS) for one in some]
    return [(one.text, one.finish_reason, one.tokens, one.prompt_tokens) for one in answers]


def test_answers_of_one_prompt_have_seeds_of_their_own_and_come_again(served, tmp_path):
    address, _ = served
    settings = GenerationSettings(max_new_tokens=12, do_sample=True, temperature=1.5, n=3, seed=5)
    generator = ServerGenerator(address, "tiny", settings)
    first = generate_into(tmp_path / "one.jsonl", generator, PROMPTS)
    assert first == generate_into(tmp_path / "two.jsonl", generator, PROMPTS)
    assert all(len({answer.text for answer in answers}) == 3 for answers in first)


def test_a_server_of_this_machine_is_in_its_meter(served):
    address, pid = served
    generator = ServerGenerator(address, "tiny", GREEDY)
    assert generator.location.pids == (pid,)
    assert generator.energy_gap is None
    assert ServerGenerator(address, "tiny", GREEDY, on_this_node=False).energy_gap is not None


@pytest.mark.parametrize(
    ("address", "output_text"),
    [
        ("http://192.0.2.7:8000/v1", "not an address of this machine"),
        ("http://127.0.0.1:9/v1", "no process on this machine listens"),
    ],
)
def test_a_server_that_is_not_here_is_not_in_the_meter(address, output_text):
    place = locate_server(address)
    assert not place.is_local
    assert output_text in place.reason


def test_a_tunnel_is_not_the_server():
    assert not classify_listeners(8000, {17: "ssh"}).is_local
    assert classify_listeners(8000, {17: "python3", None: ""}).is_local


def test_a_gpu_of_the_server_that_no_one_meters_is_named(monkeypatch):
    sys.path.insert(0, str(Path(__file__).parents[2] / "meter"))
    from fake_nvml import FakeNvml

    class WithServer(FakeNvml):
        def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
            return [type("Entry", (), {"pid": os.getpid()})()] if handle == 1 else []

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert unmetered_gpus([os.getpid()], nvml=WithServer()) == ["GPU-bbbbbbbb"]
    assert unmetered_gpus([os.getpid()], "GPU-aaaaaaaa,GPU-bbbbbbbb", nvml=WithServer()) == []


class Canned:
    """A server that replies what it is told to, in order, and remembers what it was asked."""

    def __init__(self, *replies):
        self.replies, self.bodies, self.keys = list(replies), [], []
        canned = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send(200, {"data": []})

            def do_POST(self):
                canned.keys.append(self.headers["Authorization"])
                canned.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send(*canned.replies.pop(0))

            def send(self, status, value):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(value.encode() if isinstance(value, str) else json.dumps(value).encode())

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, daemon=True).start()
        self.endpoint = Endpoint(f"http://127.0.0.1:{self.server.server_address[1]}/v1", pause_s=0.01)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def ask(self, **settings):
        generator = ServerGenerator(self.endpoint, "any", GenerationSettings(max_new_tokens=4, **settings))
        return next(iter(generator.generate(["w1"])))[0]


def reply(reason, tokens=3):
    return {"choices": [{"text": "said", "finish_reason": reason}], "usage": {"completion_tokens": tokens}}


def test_a_busy_server_is_asked_again_and_a_refusal_is_reported():
    with Canned((503, {"error": "busy"}), (200, reply("stop"))) as server:
        assert server.ask().text == "said"
    with Canned((400, {"error": "no such thing"})) as server, pytest.raises(JoulelabError, match="no such thing"):
        server.ask()


@pytest.mark.parametrize(("tries", "text"), [(1, "after 1 attempt: HTTP 503"), (2, "after 2 attempts: HTTP 503")])
def test_a_server_that_stays_busy_is_reported_with_the_number_of_attempts(tries, text):
    with Canned(*[(503, {"error": "busy"})] * tries) as server, pytest.raises(JoulelabError, match=text):
        replace(server.endpoint, tries=tries).post("/completions", {})


def test_what_did_not_end_by_itself_counts_as_interrupted():
    with Canned(*((200, reply(reason)) for reason in ("stop", "length", "content_filter", None))) as server:
        assert [server.ask().finish_reason for _ in range(4)] == ["stop", "length", "length", "stop"]
    with Canned((200, reply(None, tokens=4))) as server:
        assert server.ask().finish_reason == "length"


def test_a_missing_field_of_a_server_is_not_zero():
    nothing = reply("stop") | {"choices": [{"text": None, "finish_reason": "stop"}]}
    with Canned((200, nothing)) as server:
        assert server.ask().text == ""


def test_a_proxy_for_other_hosts_is_not_used_for_this_machine(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with Canned((200, reply("stop"))) as server:
        assert server.ask().text == "said"


def test_the_body_states_what_the_settings_state():
    with Canned((200, reply("stop")), (200, reply("stop"))) as server:
        server.ask(stop=("\n",))
        server.ask(do_sample=True, temperature=0.7, top_p=0.9, top_k=5, seed=3)
    greedy, sampled = server.bodies
    assert greedy["temperature"] == 0.0
    assert greedy["stop"] == ["\n"]
    assert (sampled["temperature"], sampled["top_p"], sampled["top_k"]) == (0.7, 0.9, 5)
    assert 0 <= sampled["seed"] < 2**31


def test_an_address_without_its_version_is_completed():
    with Canned((404, {"error": "see /v1/models"})) as server:
        address = server.endpoint.base_url.removesuffix("/v1")
        with pytest.raises(UsageError) as refused:
            Endpoint(address).post("/completions", {})
    assert refused.value.hint == f"did you mean {address}/v1?"


def test_every_answer_to_every_prompt_has_its_own_seed():
    """With the same seeds, different prompts are answered by the same random numbers, and often the same text."""
    settings = GenerationSettings(do_sample=True, n=2, seed=3)
    chats = [[{"role": "user", "content": text}] for text in ("w1", "w2")]
    encoded = [EncodedPrompt([1, 2], ()), EncodedPrompt([1, 3], ())]
    asked = [("w1", None), ("w2", None), *((chat, None) for chat in chats), *(("w1", one) for one in encoded)]
    seeds = [
        request_body("any", settings, prompt, answer, {}, tokens)[1]["seed"]
        for prompt, tokens in asked
        for answer in range(2)
    ]
    assert len(set(seeds)) == len(seeds) == 12
    assert seeds[0] == request_body("other", settings, "w1", 0, {})[1]["seed"]


def test_a_seed_is_left_out_if_answers_need_not_be_reproducible():
    settings = GenerationSettings(do_sample=True, top_p=0.9)
    with Canned((200, reply("stop")), (200, reply("stop"))) as server:
        for with_seeds in (True, False):
            list(ServerGenerator(server.endpoint, "any", settings, with_seeds=with_seeds).generate(["w1"]))
    assert ["seed" in body for body in server.bodies] == [True, False]


def test_a_prompt_that_is_sent_as_tokens_is_tokenized_once_for_all_of_its_answers():
    calls = []

    class Counting:
        eos_token_id, eos_token, bos_token_id = 99, "end", None

        def __call__(self, texts):
            calls.append(texts)
            return {"input_ids": [[len(text), 7] for text in texts]}

    settings = GenerationSettings(do_sample=True, n=2)
    with Canned(*[(200, reply("stop"))] * 4) as server:
        generator = ServerGenerator(server.endpoint, "any", settings, as_tokens=TokenPrompts(Counting(), (3,)))
        assert [len(answers) for answers in generator.generate(["w1", "w22"])] == [2, 2]
    assert calls == [["w1", "w22"]]
    assert sorted(body["prompt"] for body in server.bodies) == [[2, 7], [2, 7], [3, 7], [3, 7]]


def test_a_key_goes_along_where_there_is_one():
    with Canned((200, reply("stop")), (200, reply("stop"))) as server:
        for key in (None, "mine"):
            list(ServerGenerator(server.endpoint.base_url, "any", GREEDY, api_key=key).generate(["w1"]))
    assert server.keys == [None, "Bearer mine"]


@pytest.mark.parametrize(
    ("found", "lacking"),
    [
        ({"choices": [{"text": "said"}]}, "number in usage.completion_tokens"),
        ({"choices": [{"text": "said"}], "usage": {"completion_tokens": -1}}, "number in usage.completion_tokens"),
        ({"choices": []}, "answer in choices"),
        ({"error": "busy"}, "answer in choices"),
        ({"choices": [{"message": {}}], "usage": {"completion_tokens": 1}}, "text in choices"),
    ],
)
def test_a_reply_that_is_no_answer_is_refused_in_the_words_of_the_protocol(found, lacking):
    with Canned((200, found)) as server, pytest.raises(JoulelabError, match=f"the server's reply has no {lacking}"):
        server.ask()


PAGE = """<!DOCTYPE html><html><head><style>body { color: red }</style></head>
<body><h1>Fish &amp; chips</h1>
<p>Open daily.</p></body></html>"""


@pytest.mark.parametrize(
    ("status", "value", "text"),
    [
        (200, PAGE, "did not reply with JSON: Fish & chips Open daily."),
        (200, "", "did not reply with JSON: Expecting value"),
        (501, PAGE, "replied with a web page: HTTP 501: Fish & chips Open daily."),
        (404, PAGE, "replied with a web page: HTTP 404: Fish & chips Open daily."),
    ],
)
def test_the_address_of_a_website_is_a_mistake_of_the_user(status, value, text):
    with Canned((status, value)) as server, pytest.raises(UsageError) as refused:
        server.ask()
    assert text in refused.value.message and "<" not in refused.value.message
    assert "OpenAI-compatible" in refused.value.hint


@pytest.mark.parametrize(("status", "refused"), [(200, True), (404, False)])
def test_a_website_is_refused_before_any_work_but_not_a_server_without_a_list_of_models(status, refused, monkeypatch):
    with Canned() as server:
        handler = server.server.RequestHandlerClass
        monkeypatch.setattr(handler, "do_GET", lambda self: self.send(status, PAGE))
        if refused:
            with pytest.raises(UsageError, match="did not reply with JSON"):
                server.endpoint.require_reachable()
        else:
            server.endpoint.require_reachable()


def test_a_server_that_is_not_there_is_reported_before_any_work(served):
    with pytest.raises(JoulelabError, match="no server answers"):
        ServerGenerator("http://127.0.0.1:9/v1", "tiny", GREEDY)
    with pytest.raises(ConfigError, match="no beam search"):
        ServerGenerator(served[0], "tiny", GenerationSettings(num_beams=2))
    with pytest.raises(ConfigError, match="not a server address"):
        ServerGenerator("localhost:8000", "tiny", GREEDY)
