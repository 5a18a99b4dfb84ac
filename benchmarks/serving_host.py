"""Host work of `joulelab serve` per token: CPU time of the server's process under streaming clients.

The model is one narrow layer with the tokenizer and vocabulary of SmolLM2, so nearly all of the time is what a server
does for every token besides computing it: scheduling, text, JSON, sockets. On a GPU this work has to fit into the time
of a step. CPU time is compared, because it depends less on other processes than the rates next to it.

    python benchmarks/serving_host.py --clients 1 16 64
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil

from joulelab.infer.serving.client_load import SentRequest, StreamingClient


def write_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from joulelab.zoo.pretrained import load_tokenizer, save_hf

    tokenizer = load_tokenizer("sample:smollm2")
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=1, num_key_value_heads=1, intermediate_size=16,
        vocab_size=len(tokenizer), tie_word_embeddings=True, max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
    )  # fmt: skip
    save_hf(LlamaForCausalLM(config), tokenizer, folder)


def measure(url: str, server: psutil.Process, clients: int, options: argparse.Namespace) -> dict[str, float]:
    """Every client sends `--requests` requests, one after the other."""
    client, done = StreamingClient(url), list[SentRequest]()
    body = {
        "model": "bench", "prompt": "The quick brown fox jumps over the lazy dog", "ignore_eos": True,
        "max_tokens": options.new_tokens, "temperature": options.temperature,
    }  # fmt: skip

    def ask() -> None:
        for _ in range(options.requests):
            request = SentRequest(time.monotonic_ns())
            done.append(request)
            client.ask(request, "/completions", body)
            if request.error:
                raise SystemExit(f"a request failed: {request.error}")

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    before, begin_s = server.cpu_times(), time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after, seconds = server.cpu_times(), time.monotonic() - begin_s
    tokens = sum(one.completion_tokens for one in done)
    cpu_s = after.user + after.system - before.user - before.system
    per_token_s = [one.time_per_output_token_s for one in done if one.time_per_output_token_s is not None]
    return {
        "clients": clients,
        "tokens": tokens,
        "server_cpu_us_per_token": 1e6 * cpu_s / tokens,
        "tokens_per_s": tokens / seconds,
        "time_per_output_token_ms": 1e3 * float(np.median(per_token_s)) if per_token_s else 0.0,
        "time_to_first_token_ms": 1e3 * float(np.median([one.time_to_first_token_s for one in done])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64], help="concurrent requests")
    parser.add_argument("--requests", type=int, default=3, help="requests per client")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        command = [sys.executable, "-m", "joulelab", "serve", folder, "--port", "0", "--json", "--name", "bench"]
        # One thread: those of torch wait actively for the next product, which would count as CPU time.
        command += ["--threads", "1", "--batch-size", str(max(options.clients))]
        command += ["--context", str(options.new_tokens + 32)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            try:
                assert server.stdout is not None
                url = json.loads(server.stdout.readline())["url"]
                process = psutil.Process(server.pid)
                rows = [measure(url, process, clients, options) for clients in options.clients]
            finally:
                server.terminate()
    print(f"{'clients':>8}{'tokens':>8}{'server CPU, us/token':>22}{'tokens/s':>10}{'ms/token':>10}{'first, ms':>11}")
    for row in rows:
        clients, tokens, cpu_us, rate, token_ms, first_ms = row.values()
        print(f"{clients:>8.0f}{tokens:>8.0f}{cpu_us:>22.0f}{rate:>10,.0f}{token_ms:>10.2f}{first_ms:>11.1f}")
    print(json.dumps({"benchmark": "serving_host", "rows": rows}))


if __name__ == "__main__":
    main()
