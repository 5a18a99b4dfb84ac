"""Load on a server: when it is steady, what is counted in the window, and what happens when the server fails."""

import json
import random
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest

from joulelab.infer.serving.client_load import (
    NS,
    LoadLevel,
    LoadRunner,
    LoadWindow,
    SentRequest,
    StreamingClient,
    warm_up_length,
)
from joulelab.infer.serving.config import Lengths
from joulelab.infer.serving.load_summary import counts_in, energies, load_values, mean_in_flight
from joulelab.meter.figures import EnergyFigure

BODY = {"prompt": "w1 w2 w3", "max_tokens": 10, "temperature": 0, "ignore_eos": True}


def test_the_warm_up_is_what_differs_from_the_rest():
    noise = np.random.default_rng(0)
    steady = 100 + noise.normal(0, 3, 20)
    assert warm_up_length(np.r_[0, 0, 10, 40, 80, steady]) == 5
    assert warm_up_length(steady) <= 3
    assert warm_up_length(np.arange(20.0)) is None, "still growing"
    assert warm_up_length(np.zeros(20)) is None, "no token yet"


@pytest.mark.parametrize(
    "text, mean, low, high", [("64", 64, 64, 64), ("10-30", 20, 10, 30), ("lognormal:100,0.5", 113, 1, 449)]
)
def test_lengths_follow_their_distribution(text, mean, low, high):
    rng, lengths = random.Random(1), Lengths.parse(text)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.03) and min(drawn) >= low and max(drawn) <= high
    assert lengths.largest >= max(drawn)


@pytest.mark.parametrize("text", ["", "0", "-5", "30-10", "lognormal:100", "many", "1e3"])
def test_other_texts_are_no_lengths(text):
    with pytest.raises(ValueError, match=r"expected|lengths"):
        Lengths.parse(text)


def request(sent_s, times_s, tokens, prompt=8, done=True, error=""):
    chunks = [round(NS * moment) for moment in times_s]
    done_ns = chunks[-1] if done and chunks else 0
    return SentRequest(round(NS * sent_s), prompt, tokens, chunks, done_ns, error)


def load_of(requests, window=(2, 6), level=None, steady=True):
    begin, end = (round(NS * moment) for moment in window)
    return LoadWindow(level or LoadLevel(concurrency=2), tuple(requests), 0, (begin, end), steady, 0.1)


# One answer ends in the window and began before it, one lies inside, one is not finished when the load ends.
REQUESTS = [
    request(0, [1, 2.5, 3.5], 6),  # two tokens a chunk
    request(3, [4, 4.5, 5, 5.5], 4),
    request(5, [5.5, 5.9, 7], 0, prompt=0, done=False),
]


def test_tokens_count_when_they_arrive_prompts_when_the_answer_begins_requests_when_they_end():
    found = counts_in(load_of(REQUESTS), [(2 * NS, 6 * NS)])
    per_chunk = 10 / 7  # of the finished requests, for the one without a count
    assert found["output_token"] == [pytest.approx(2 * 2 + 4 + 2 * per_chunk)]
    assert found["input_token"] == [8 + 8]
    assert found["request"] == [2]
    assert found["token"] == [pytest.approx(found["output_token"][0] + 16)]
    assert mean_in_flight(load_of(REQUESTS)) == pytest.approx((1.5 + 2.5 + 1) / 4)


def test_the_energy_of_the_window_is_divided_by_what_was_counted():
    def read(windows):  # 10 W throughout
        seconds = sum(end - begin for begin, end in windows) / NS
        return EnergyFigure(energy_j=10 * seconds, half_width_j=0.1 * seconds, method="counter")

    load = load_of(REQUESTS)
    found, counts = energies(load, read), counts_in(load, [load.window])
    for unit, (values, reason) in found.items():
        assert values["gross_j"] == pytest.approx(40 / counts[unit][0]) and not reason
        assert values["power_w"] == pytest.approx(10)
    assert found["request"][0]["gross_half_width_j"] > 0


def test_without_input_tokens_of_the_server_the_energy_per_token_of_both_is_missing():
    read = lambda windows: EnergyFigure(energy_j=10.0 * len(windows), half_width_j=0.1, method="counter")  # noqa: E731
    values = load_values(load_of([request(0, [1, 2.5, 3.5], 6, prompt=0), request(3, [4, 5], 2, prompt=0)]), read, "")
    assert values["energy"]["output_token"] is not None and values["output_tokens_per_s"] > 0
    assert [values["energy"]["token"], values["energy"]["input_token"], values["tokens_per_s"]] == [None] * 3
    assert values["input_tokens"] is None and values["why_no_energy"] == "the server reported no input tokens"
    found = energies(load_of([request(0, [], 0, prompt=0), request(9, [], 0, prompt=0)]), read)
    assert found["output_token"] == (None, "no output token arrived in the window")


def test_a_row_has_latencies_of_its_window_and_names_what_is_missing():
    values = load_values(load_of([*REQUESTS, request(2, [], 0, error="HTTP 500: oops")]), None, "it is far away")
    assert values["time_to_first_token_s"]["p50"] == pytest.approx(0.75)  # 1.0 and 0.5 s: those that began inside
    assert values["time_per_output_token_s"]["mean"] == pytest.approx((2.5 / 5 + 1.5 / 3) / 2)
    assert values["latency_s"]["p99"] == pytest.approx(3.5, abs=0.05)
    assert values["energy"] == dict.fromkeys(("output_token", "input_token", "token", "request"))
    assert values["why_no_energy"] == "it is far away" and values["failed"] == 1
    assert any("oops" in note for note in values["notes"])


def test_a_rate_above_what_the_server_answers_is_no_steady_state():
    many = [request(2 + 0.02 * k, [2.5 + 0.1 * k], 1, done=k < 30) for k in range(150)]
    values = load_values(load_of(many, level=LoadLevel(rate_per_s=50.0)), None, "")
    assert values["overloaded"] and not values["steady"]
    assert any("does not keep up" in note for note in values["notes"])


def test_a_load_that_is_not_steady_has_no_energy_and_no_length_per_request():
    """Short answers end first, while the energy is also that of the others."""
    loads = [load_of(REQUESTS, steady=steady) for steady in (True, False)]
    read = lambda windows: EnergyFigure(energy_j=10.0 * len(windows), half_width_j=0.1, method="counter")  # noqa: E731
    values = [load_values(load, read, "") for load in loads]
    assert [one["energy"]["request"] is None for one in values] == [False, True]
    assert [one["mean_output_tokens"] is None for one in values] == [False, True]
    assert all(one["energy"]["output_token"] is not None for one in values)


def run_load(url, level, seconds=2.0, limit_s=10.0):
    return LoadRunner(StreamingClient(url), lambda: ("/completions", BODY), seed=3).run(
        level, seconds, limit_s, lambda elapsed_s: None
    )


def emptied(engine):
    deadline = time.monotonic() + 10
    while engine.load != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    return engine.load == (0, 0)


def test_a_closed_loop_keeps_its_clients_busy(tiny_server):
    load = run_load(tiny_server[0].url, LoadLevel(concurrency=3), seconds=4.0)
    values = load_values(load, None, "")
    assert 2 < values["mean_in_flight"] <= 3.01 and values["failed"] == 0
    assert values["mean_output_tokens"] == 10 and values["mean_input_tokens"] == 3
    done = [one for one in load.requests if one.done_ns]
    assert done and all(one.sent_ns < one.chunk_ns[0] <= one.done_ns for one in done)
    assert emptied(tiny_server[0].engine), "clients that stop are noticed"


def test_arrivals_are_independent_of_the_answers(tiny_server):
    load = run_load(tiny_server[0].url, LoadLevel(rate_per_s=8.0), seconds=4.0)
    seconds = (load.window[1] - load.begin_ns) / NS
    sent = [one.sent_ns for one in load.requests]
    assert len(sent) == pytest.approx(8 * seconds, abs=4 * (8 * seconds) ** 0.5)
    assert len(set(np.round(np.diff(sorted(sent)) / NS, 3))) > len(sent) / 3, "gaps vary"


def failing_server(reply):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            reply(self)

        def log_message(self, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return server


def send_events(handler, *events):
    handler.send_response(200)
    handler.end_headers()
    for event in events:
        handler.wfile.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())


def refuse(handler):
    handler.send_response(400)
    handler.end_headers()
    handler.wfile.write(b'{"error": {"message": "no such model"}}')


@pytest.mark.parametrize(
    "reply, expected",
    [
        (refuse, "HTTP 400: no such model"),
        (lambda handler: send_events(handler, {"choices": [{"text": "a"}]}), "ended without"),
        (lambda handler: send_events(handler, "[DONE]"), "no text"),
        (lambda handler: send_events(handler, "{broken"), "JSONDecodeError"),
        (lambda handler: send_events(handler, {"error": {"message": "out of memory"}}, "[DONE]"), "out of memory"),
        (lambda handler: send_events(handler, {"choices": [{"text": ""}]}, "[DONE]"), "no text"),
        (lambda handler: send_events(handler, ends("abort"), usage(1), "[DONE]"), "no text (finish_reason abort)"),
        (lambda handler: send_events(handler, ends("stop"), usage(1)), "ended without"),
        (lambda handler: send_events(handler, ends("stop"), {"error": {"message": "no"}}, "[DONE]"), "no"),
    ],
)
def test_a_failed_request_has_its_reason(reply, expected):
    assert expected in answer_of(reply).error


def ends(reason):
    return {"choices": [{"text": "", "finish_reason": reason}]}


def usage(tokens):
    return {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}}


def answer_of(reply):
    server = failing_server(reply)
    asked = SentRequest(time.monotonic_ns())
    StreamingClient(f"http://127.0.0.1:{server.server_address[1]}/v1", timeout_s=5).ask(asked, "/completions", BODY)
    server.shutdown()
    return asked


@pytest.mark.parametrize(
    "first", [ends("stop"), {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": "stop"}]}]
)
def test_an_answer_that_is_the_end_token_is_one_token_whose_time_is_that_of_its_end(first):
    def reply(handler):
        send_events(handler, first)
        time.sleep(0.2)
        handler.wfile.write(f"data: {json.dumps(usage(1))}\n\ndata: [DONE]\n\n".encode())

    asked = answer_of(reply)
    assert not asked.error and (asked.completion_tokens, asked.prompt_tokens) == (1, 4)
    assert len(asked.chunk_ns) == 1 and asked.done_ns == asked.chunk_ns[0]
    assert (time.monotonic_ns() - asked.chunk_ns[0]) / NS > 0.2, "the finish reason, not the usage after it"
    assert asked.time_per_output_token_s is None
    assert not answer_of(lambda handler: send_events(handler, usage(1), "[DONE]")).error


def test_a_load_on_a_server_that_refuses_everything_ends_at_once():
    server = failing_server(refuse)
    begin = time.monotonic()
    load = run_load(f"http://127.0.0.1:{server.server_address[1]}/v1", LoadLevel(concurrency=3), limit_s=60)
    server.shutdown()
    assert time.monotonic() - begin < 20 and all(one.error for one in load.requests)


class Silent(BaseHTTPRequestHandler):
    """Accepts a request and waits until the client has closed the connection."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.waiting += 1
        self.connection.settimeout(30)
        self.connection.recv(1)  # empty: closed by the client
        self.server.closed += 1
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("level", [LoadLevel(concurrency=16), LoadLevel(rate_per_s=40.0)], ids=lambda level: level.name)
def test_the_end_of_a_load_closes_requests_that_are_not_answered(level):
    """Otherwise a server would answer them during the next load, whose energy has then no tokens for them."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    server.waiting = server.closed = 0
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()

    def tick(elapsed_s):
        if elapsed_s > 1:
            raise KeyboardInterrupt

    runner = LoadRunner(
        StreamingClient(f"http://127.0.0.1:{server.server_port}/v1"), lambda: ("/completions", BODY), seed=3
    )
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        runner.run(level, 2.0, 10.0, tick)
    assert time.monotonic() - begin < 9, "the clients are not waited for one after the other"
    deadline = time.monotonic() + 5
    while server.closed < server.waiting and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.closed == server.waiting >= 8
    server.shutdown()
