"""A Python environment with a package `vllm` or `sglang` whose server speaks the same protocol with the same options,
and generates with transformers. `write` returns its Python program."""

import sys
from pathlib import Path

MODULES = {"vllm": "vllm/entrypoints/openai/api_server.py", "sglang": "sglang/launch_server.py"}
SERVER = """
import argparse, os, signal, socket, struct, subprocess, sys, time
sys.path.insert(0, {folder!r})
parser = argparse.ArgumentParser()
for name in ("--model", "--model-path", "--tokenizer", "--tokenizer-path", "--served-model-name", "--host", "--dtype",
             "--generation-config", "--sampling-defaults", "--revision", "--behave"):
    parser.add_argument(name)
for name in ("--port", "--max-model-len", "--context-length", "--sleep"):
    parser.add_argument(name, type=int)
given = parser.parse_args()
print("INFO loading", given.model or given.model_path, flush=True)
if given.behave == "die":
    print("ValueError: no kernel image is available", flush=True)
    sys.exit(3)
if given.behave == "hang":
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("worker", worker.pid, flush=True)
    time.sleep(600)
import torch, transformers
from http.server import ThreadingHTTPServer
from openai_server import handler
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(given.model or given.model_path).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(given.tokenizer or given.tokenizer_path)
made = handler(model, tokenizer)
if given.behave == "die-later":
    asked = []
    answer = made.do_POST
    def post(self):
        asked.append(1)
        if len(asked) > 40:
            print("RuntimeError: illegal memory access", flush=True)
            os._exit(1)
        answer(self)
    made.do_POST = post
if given.behave == "reset-once":
    first, plain = [1], made.do_POST
    def post_or_reset(self):
        if first:
            first.clear()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        plain(self)
    made.do_POST = post_or_reset
if given.sleep:
    slow = made.do_POST
    made.do_POST = lambda self: (time.sleep(given.sleep), slow(self))
server = ThreadingHTTPServer((given.host, given.port), made)
print("INFO ready", flush=True)
server.serve_forever()
"""


def write(folder, engine="vllm", version="0.99.0"):
    site = folder / "site"
    module = site / MODULES[engine]
    module.parent.mkdir(parents=True)
    for package in module.relative_to(site).parents[:-1]:
        (site / package / "__init__.py").touch()
    module.write_text(SERVER.format(folder=str(Path(__file__).parent)))
    info = site / f"{engine}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python
