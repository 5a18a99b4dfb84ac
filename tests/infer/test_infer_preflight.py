"""Everything that can be known before the idle measurement is checked there: files, prompts, device, memory."""

import json
import struct

import psutil
import pytest

from joulelab.errors import ConfigError, NotFoundError, UsageError
from joulelab.infer.config import InferSpec, max_positions, read_prompts, require_memory
from joulelab.runs import environment
from joulelab.runs.spec import check

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1000,
    "intermediate_size": 3000,
    "num_hidden_layers": 10,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "vocab_size": 5000,
    "max_position_embeddings": 512,
}


def infer(model, **settings):
    return check({"pipeline": "infer", "model": str(model), **settings})


def write_model(folder, parameters=1000, tokenizer=True, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [parameters // 10, 10], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def free(monkeypatch):
    def set_free(size):
        memory = psutil.virtual_memory()._replace(available=size)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        monkeypatch.setattr(environment, "_memory_cgroups", lambda *paths: [])

    return set_free


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("gone.txt", None, "there is no prompt file"),
        ("table.csv", b"prompt\none\n", "is a .csv file, expected .txt or .jsonl"),
        ("empty.txt", b"\n \n", "has no prompts"),
        ("empty.jsonl", b"", "has no prompts"),
        ("binary.txt", b"\x89PNG\xff\xfe", "is not UTF-8 text"),
        ("zeros.txt", b"one\0two", "contains NUL bytes"),
        ("broken.jsonl", b'{"prompt": "one"}\n{"prompt": ', "line 2 is not JSON"),
        ("keys.jsonl", b'{"question": "one"}', "row 1 has question, expected prompt, text, messages"),
        ("number.jsonl", b'{"prompt": 3}', "row 1 is 3, expected a string"),
        ("blank.jsonl", b'{"prompt": " "}', "expected a string"),
        ("answer.jsonl", b'{"messages": [{"role": "assistant", "content": "x"}]}', "expected a message of 'user'"),
    ],
)
def test_a_prompt_file_that_cannot_be_used_is_refused(tmp_path, name, content, error):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=error) as refused:
        read_prompts(tmp_path / name)
    assert refused.value.exit_code == 2


def test_prompts_are_lines_of_text_or_rows_with_a_prompt_or_messages(tmp_path):
    (tmp_path / "q.txt").write_text("one\n\n two \n")
    assert read_prompts(tmp_path / "q.txt") == ["one", "two"]
    rows = ['{"prompt": "a"}', '{"text": "b"}', '{"messages": [{"role": "user", "content": "c", "x": 1}]}', '"d"']
    (tmp_path / "q.jsonl").write_text("\n".join(rows))
    assert read_prompts(tmp_path / "q.jsonl") == ["a", "b", [{"role": "user", "content": "c"}], "d"]


def test_prompts_turn_generation_on_and_keep_their_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = infer(write_model(tmp_path / "llama"), prompts="q.txt")
    assert spec.generate and spec.prompts == str(tmp_path / "q.txt")
    with pytest.raises(ConfigError, match="have their own lengths"):
        infer(tmp_path / "llama", prompts="q.txt", prompt_tokens=9)


def test_prompts_need_a_tokenizer(tmp_path):
    (tmp_path / "q.txt").write_text("one")
    spec = infer(write_model(tmp_path / "llama", tokenizer=False), prompts=str(tmp_path / "q.txt"))
    with pytest.raises(NotFoundError, match="has no tokenizer, which --prompts needs"):
        spec.preflight()


def test_a_prompt_that_is_too_long_is_named(tmp_path, monkeypatch):
    (tmp_path / "q.txt").write_text("one\ntwo\nthree")
    counts = {"one": 3, "two": 500, "three": 5}
    monkeypatch.setattr(
        "joulelab.infer.decoding.prompt_lengths", lambda model, prompts: [counts[prompt] for prompt in prompts]
    )
    model = write_model(tmp_path / "llama")
    with pytest.raises(ConfigError, match=r"prompt 2 of .*q.txt has 500 tokens; with 128 new tokens it does not fit"):
        infer(model, prompts=str(tmp_path / "q.txt")).preflight()
    infer(model, prompts=str(tmp_path / "q.txt"), new_tokens=12).preflight()


@pytest.mark.parametrize(
    ("config", "generate", "error"),
    [
        ({"architectures": ["BertForMaskedLM"]}, True, "is not a causal language model"),
        ({"is_encoder_decoder": True}, True, "is not a causal language model"),
        ({"is_encoder_decoder": True}, False, "is an encoder-decoder model"),
    ],
)
def test_a_model_that_cannot_be_used_so_is_refused_from_its_config(tmp_path, config, generate, error):
    with pytest.raises(ConfigError, match=error):
        infer(write_model(tmp_path / "model", **config), generate=generate).preflight()


def test_weights_that_do_not_fit_are_refused_with_both_sizes(tmp_path, free):
    free(3_900_000)
    model = write_model(tmp_path / "llama", parameters=1_000_000)
    with pytest.raises(UsageError, match=r"needs at least .* of which 4.00 MB are weights; 3.90 MB is free") as refused:
        infer(model, device="cpu").preflight()
    assert refused.value.exit_code == 2
    free(80_000_000)
    infer(model, device="cpu").preflight()


def test_the_cache_and_activations_of_a_batch_count(tmp_path, free):
    """10 layers x 2 (keys, values) x 2 heads x 100 x 384 positions x 4 bytes = 6.1 MB per response."""
    model = write_model(tmp_path / "llama")
    free(100_000_000)
    infer(model, generate=True, batch_sizes=[8], device="cpu").preflight()
    with pytest.raises(UsageError, match="batch size 16 needs at least"):
        infer(model, generate=True, batch_sizes=[1, 16], device="cpu").preflight()
    with pytest.raises(UsageError, match=r"deit-t with batch size 99999999 needs at least .* is free"):
        infer("deit-t", batch_sizes=[99_999_999], device="cpu").preflight()


def test_a_job_s_memory_limit_counts(tmp_path, monkeypatch):
    for version, limit, used in (("2", "memory.max", "memory.current"), ("1", *environment._CGROUP_1)):
        top = tmp_path / version
        folder = (top if version == "2" else top / "memory") / "job"
        folder.mkdir(parents=True)
        (folder / limit).write_text("5000\n")
        (folder / used).write_text("4000\n")
        (folder / "memory.stat").write_text("inactive_file 500\n")
        own = tmp_path / f"cgroup-{version}"
        own.write_text("0::/job\n" if version == "2" else "4:memory:/job\n")
        folders = environment._memory_cgroups(top, own)
        monkeypatch.setattr(environment, "_memory_cgroups", lambda *paths, found=folders: found)
        assert environment.free_memory_bytes() == 1500
        monkeypatch.undo()


def test_a_gpu_that_torch_cannot_use_is_refused_before_the_idle_measurement(monkeypatch):
    monkeypatch.setattr(environment, "gpus", lambda: [{"name": "H200"}])
    monkeypatch.setattr(environment, "torch_has_cuda", lambda: False)
    with pytest.raises(UsageError, match="the installed torch is a CPU build"):
        infer("deit-t", device="cuda").preflight()
    infer("deit-t").preflight()  # auto: the CPU


def test_the_build_of_torch_is_read_without_importing_it(tmp_path, monkeypatch):
    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(environment, "find_spec", lambda name: Spec)
    (tmp_path / "version.py").write_text("cuda: Optional[str] = None\nhip: Optional[str] = None\n")
    assert not environment.torch_has_cuda()
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '12.6'\nhip: Optional[str] = None\n")
    assert environment.torch_has_cuda()


def test_positions_and_the_memory_of_a_batch_are_read_from_the_metadata_of_a_gguf_file(tmp_path, monkeypatch):
    """A batch of 100,000 prompts was started, filled the memory and was killed by the kernel."""
    numbers = {"context_length": 2048, "attention.head_count_kv": 3, "attention.head_count": 9, "block_count": 30}
    numbers |= {"embedding_length": 576, "feed_forward_length": 1536, "vocab_size": 49_152}
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(numbers))
    for key, number in numbers.items():
        name = f"llama.{key}".encode()
        head += struct.pack("<Q", len(name)) + name + struct.pack("<II", 4, number)
    model = str(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(head)
    assert max_positions(model) == 2048
    monkeypatch.setattr(environment, "free_memory_bytes", lambda: 20 * 2**30)
    spec = {"pipeline": "infer", "name": "x", "model": model, "generate": True, "prompt_tokens": 4, "new_tokens": 4}
    require_memory(InferSpec.model_validate({**spec, "batch_sizes": (1,)}), False, 4)
    with pytest.raises(UsageError, match=r"batch size 100000 needs at least [\d.]+ GB of memory"):
        require_memory(InferSpec.model_validate({**spec, "batch_sizes": (100_000,)}), False, 4)
