"""A small server of the OpenAI protocol over a model folder, by transformers' own `generate`, in a separate process.
It shares no code with what it is used to test."""

import json
import multiprocessing
import socket
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

import torch
import transformers

ONE_AT_A_TIME = Lock()


def load(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


def score(model, body):
    """vLLM's prompt_logprobs: the most likely tokens of every position but the first, and the prompt's own."""
    ids = body["prompt"]
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    found = [None]
    for place, token in enumerate(ids[1:]):
        best = {*logs[place].topk(body["prompt_logprobs"]).indices.tolist(), token}
        found.append({str(one): {"logprob": float(logs[place, one])} for one in best})
    choice = {"index": 0, "finish_reason": "length", "text": "", "prompt_logprobs": found}
    return {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": 1}}


def complete(model, tokenizer, body, chat):
    if "prompt_logprobs" in body:
        return score(model, body)
    if chat:
        text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
    else:
        text = body["prompt"]
    own = tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else text
    ids = torch.tensor([own])
    ends = body.get("stop_token_ids") or [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    if body.get("ignore_eos"):
        ends = [-1]
    sampling = {"do_sample": False}
    if body["temperature"]:
        sampling = {"do_sample": True, "temperature": body["temperature"], "top_p": body["top_p"], "top_k": 0}
        torch.manual_seed(body["seed"])
    whole = model.generate(ids, max_new_tokens=body["max_tokens"], eos_token_id=ends, pad_token_id=0, **sampling)
    found = whole[0, ids.shape[1] :].tolist()
    ended = found[-1] in ends
    reported = tokenizer.decode(found, skip_special_tokens=True)
    choice = {"index": 0, "finish_reason": "stop" if ended else "length"}
    if body.get("return_token_ids"):
        choice["token_ids"] = found
    if body.get("logprobs"):
        with torch.no_grad():
            logs = model(whole).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
        each = logs.gather(-1, torch.tensor(found)[:, None]).squeeze(-1).tolist()
        choice["logprobs"] = {"content": [{"logprob": one} for one in each]} if chat else {"token_logprobs": each}
    choice |= {"message": {"role": "assistant", "content": reported}} if chat else {"text": reported}
    return {"choices": [choice], "usage": {"prompt_tokens": ids.shape[1], "completion_tokens": len(found)}}


def handler(model, tokenizer):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"data": [{"id": "tiny"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with ONE_AT_A_TIME:  # the seed is the process's
                found = complete(model, tokenizer, body, self.path.endswith("/chat/completions"))
            self.stream(found) if body.get("stream") else self.reply(found)

        def stream(self, whole):
            """The text in one chunk, then the usage."""
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for part in ({"choices": whole["choices"]}, {"choices": [], "usage": whole["usage"]}):
                self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def reply(self, value):
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    return Handler


def serve(folder, connection):
    torch.set_num_threads(1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(*load(folder)))
    connection.send(server.server_address[1])
    server.serve_forever()


def serve_with_transformers(folder, connection):
    """The library's own server, which has the same protocol and none of our code."""
    from transformers.cli.serve import Serve

    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Serve(str(folder), device="cpu", host="127.0.0.1", port=port, log_level="error", non_blocking=True)
    while True:  # its thread has begun, and listens a little later
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        time.sleep(0.05)
    connection.send(port)
    server._thread.join()


@contextmanager
def serving(folder, server=serve):
    """Its address and process id. Forked: importing transformers anew would take longer than all that is tested."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=server, args=(folder, there), daemon=True)
    process.start()
    try:
        assert here.poll(120), "the server did not start"
        yield f"http://127.0.0.1:{here.recv()}/v1", process.pid
    finally:
        process.kill()
        process.join()
