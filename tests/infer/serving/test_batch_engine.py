"""The batch engine without HTTP: tokens handed over together, steps that overlap with the host, and time limits."""

import threading

import pytest
import torch
from tiny_lm import make_model, make_tokenizer

from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.generation import static_decoder
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.infer.generation.static_decoder import decode_attention
from joulelab.infer.serving import batch_engine, http_server
from joulelab.infer.serving.batch_engine import BatchEngine, ServedRequest, SlotBatch
from joulelab.infer.serving.config import ServedModel
from joulelab.infer.serving.http_server import TextStream
from joulelab.infer.serving.openai_protocol import AnswerFormat, parse_request, server_sent_event
from joulelab.train.optim import repeated_blocks
from joulelab.zoo.quantized_layers import quantize

PROMPTS = [[8, 9, 10], [15], [20, 21], [30, 31, 32, 33], [12, 13], [40]]
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "seed": 5}


def answers(monkeypatch=None, single=16, overlap=False):
    """(tokens, sizes of the lists they came in) of greedy and sampled requests with different lengths."""
    engine = BatchEngine(make_model(), make_tokenizer(), slots=4, context=64)
    if monkeypatch is not None:
        monkeypatch.setattr(batch_engine, "_SINGLE_TOKEN_REQUESTS", single)
    if overlap:  # as on a GPU: tokens are read after the next step has begun
        monkeypatch.setattr(SlotBatch, "is_asynchronous", True)

        def read_tokens(batch, rows):
            found = batch._token_R[:rows].tolist()
            return lambda: found

        monkeypatch.setattr(SlotBatch, "read_tokens", read_tokens)
    engine.start()
    asked = [
        ServedRequest(ids, GenerationSettings(max_new_tokens=6 + 3 * place, **(SAMPLED if place % 2 else {})),
                      ignore_eos=True)
        for place, ids in enumerate(PROMPTS)
    ]  # fmt: skip
    try:
        engine.submit(asked)
        found = []
        for request in asked:
            parts = []
            while isinstance(event := request.events.get(timeout=60), list):
                parts.append(event)
            assert event == "length"
            found.append(parts)
    finally:
        engine.close()
    return [[token for part in parts for token in part] for parts in found], [list(map(len, parts)) for parts in found]


def test_steps_that_overlap_with_the_host_give_the_same_tokens(monkeypatch):
    expected, sizes = answers()
    assert [len(one) for one in expected] == [6 + 3 * place for place in range(len(PROMPTS))]
    assert {size for one in sizes for size in one} == {1}
    found, _ = answers(monkeypatch, overlap=True)
    assert found == expected


def test_many_requests_get_several_tokens_at_a_time_but_the_first_at_once(monkeypatch):
    expected, _ = answers()
    found, sizes = answers(monkeypatch, single=2)
    assert found == expected
    assert all(one[0] == 1 for one in sizes) and any(2 in one for one in sizes)


def test_a_text_event_is_the_chunk_of_the_protocol():
    for kind, body in (("completion", {"prompt": "x"}), ("chat", {"messages": [{"role": "user", "content": "x"}]})):
        answer = AnswerFormat.of(parse_request(kind, body, "tiny"), "tiny")
        for index, text in ((0, "plain"), (1, 'a "quote"\n\\ and 雪'), (0, "\u0000")):
            assert answer.text_event(index, text) == server_sent_event(answer.chunk(index, text))


def test_text_of_a_long_answer_is_made_from_the_last_tokens_only():
    tokenizer, lengths = make_tokenizer(), []
    ids = [10 + place % 30 for place in range(200)]

    class Counting:
        def decode(self, ids, **options):
            lengths.append(len(ids))
            return tokenizer.decode(ids, **options)

    stream = TextStream(Counting(), ())
    text = "".join(stream.add([token]) for token in ids) + stream.add([], last=True)
    assert text == tokenizer.decode(ids)
    assert max(lengths) <= http_server._DECODED_TOGETHER and len(lengths) < 1.2 * len(ids)


def test_a_model_that_does_not_respond_ends_with_a_reason(monkeypatch):
    engine = BatchEngine(make_model(), make_tokenizer(), slots=2, context=16)
    released = threading.Event()
    monkeypatch.setattr(engine._batch, "warm_up", lambda: released.wait(60))
    with pytest.raises(JoulelabError, match=r"not ready after 0.05 s of warm-up"):
        engine.start(timeout_s=0.05)
    released.set()
    engine.close()
    monkeypatch.setattr(http_server, "_TOKEN_TIMEOUT_S", 0.05)
    request = ServedRequest([1], GenerationSettings())
    with pytest.raises(JoulelabError, match=r"no token for 0.05 s"):
        next(http_server._progress(request))


def next_tokens(batch, prompts, steps):
    batch.read(prompts, range(len(prompts)))
    found = []
    for _ in range(steps):
        batch.step(len(prompts))
        found.append(batch.read_tokens(len(prompts))())
    return found


@torch.no_grad()
def test_a_compiled_step_generates_the_same_tokens(monkeypatch):
    """On a CPU the compiler and the capture are replaced; how layers get their slots is the same."""
    prompts = [[5, 6, 7], [8, 9]]
    model = make_model()
    with decode_attention(model):
        expected = next_tokens(SlotBatch(model, 2, 16, 50), prompts, 4)
        monkeypatch.setattr(
            batch_engine, "compile_layer", lambda model, variant: type(repeated_blocks(model)[0]).forward
        )
        monkeypatch.setattr(batch_engine, "capture_cuda_graph", lambda run: run)
        batch = SlotBatch(model, 2, 16, 50, compile_step=True)
        batch.read(prompts, range(2))  # allocates the slots
        captured = batch._captured(2)
        found = []
        for _ in range(4):
            captured()
            found.append(batch.read_tokens(2)())
    assert found == expected and batch.note == ""


def test_a_model_that_cannot_be_compiled_is_served_with_a_note(monkeypatch):
    def fail(model, variant):
        raise RuntimeError("no C compiler\nmore")

    monkeypatch.setattr(batch_engine, "compile_layer", fail)
    monkeypatch.setattr(static_decoder, "capture_cuda_graph", lambda run: run)
    batch = SlotBatch(make_model(), 2, 16, 50, compile_step=True)
    assert callable(batch._captured(2))
    assert batch.note.startswith("the model is not compiled") and batch.note.endswith(": no C compiler")


@torch.no_grad()
def test_kernels_of_a_quantization_library_that_cannot_be_captured_run_without_graphs(monkeypatch):
    def fail(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(static_decoder, "capture_cuda_graph", fail)
    model = make_model()
    with decode_attention(model):
        batch = SlotBatch(model, 2, 16, 50)
        read = []
        with pytest.raises(RuntimeError, match="capturing"):
            batch._captured_prompts(lambda: read.append(1))
        monkeypatch.setattr(static_decoder, "quantization_of", lambda model: "nf4")
        batch._captured_prompts(lambda: read.append(1))()
        assert read == [1, 1], "the first call reads the prompts, too"
        batch.read([[5, 6, 7]], range(1))
        assert batch._captured(1)().shape[0] == 1
    assert batch.note.startswith("nf4: generation runs without CUDA graphs")


def test_int8_weights_are_not_served():
    """LLM.int8() picks its columns of outliers from all rows of a batch."""
    with pytest.raises(ConfigError, match=r"int8: .* an answer would change with the requests next to it"):
        ServedModel.checked(model="sample:smollm2", dtype="int8")
    pytest.importorskip("bitsandbytes")
    model = quantize(make_model(hidden_size=128, intermediate_size=256), "int8")
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has int8 weights, .* cannot serve it"):
        BatchEngine(model, None, slots=2, context=16)
