"""A tiny model behind our own server, in this process."""

import sys
from pathlib import Path
from threading import Thread

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "generation"))  # for tiny_lm.py


@pytest.fixture(scope="module")
def tiny_server():
    """(server, tokenizer); answers four requests at once with a context of 64 tokens."""
    from tiny_lm import make_model, make_tokenizer

    from joulelab.infer.serving.batch_engine import BatchEngine
    from joulelab.infer.serving.http_server import ModelServer

    tokenizer = make_tokenizer()
    engine = BatchEngine(make_model(), tokenizer, slots=4, context=64, max_waiting=12)
    engine.start()
    server = ModelServer(engine, "tiny", port=0)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    yield server, tokenizer
    server.stop()
    thread.join(10)
    assert not thread.is_alive()
    server.server_close()
