"""Prompts are found only if they are needed, with no more tokenization than necessary."""

import json
from types import SimpleNamespace

import pytest
from tiny_llama import make_tokenizer
from tiny_tokenizer import byte_level_tokenizer

from joulelab.distill.causal import teacher
from joulelab.distill.causal.config import Generation
from joulelab.distill.causal.data import check_chat_parts, data_rows
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import encode_prompt, with_chain_of_thought
from joulelab.infer.generation.static_decoder import StaticDecoder
from joulelab.runs.spec import check


def test_reused_answers_need_no_search_for_prompts(lab, finished, monkeypatch):
    def unwanted(tracker_context):
        raise AssertionError("the prompts were asked and answered already")

    store = finished["dpo"][1].folder.parent
    monkeypatch.setattr(teacher, "training_prompts", unwanted)
    for name, generation in {"synthetic": {"held_out": 0.3}, "dpo": {}}.items():
        training = {"evaluate_every_steps": 4}
        record, _ = lab.run(store, name, label=name, seed=2, training=training, generation=generation)
        assert record.status == "done"


@pytest.mark.parametrize("text", ["w1 " * 500, "w1", "\n" + " " * 400 + "w2 w3 " * 30, "x" * 5000 + " w4" * 9])
def test_the_first_tokens_equal_those_of_the_whole_text(text):
    tokenizer = make_tokenizer()
    others = ["w2", text, "w3 " * 300]
    assert teacher._first_ids(tokenizer, others, 5) == [tokenizer(one)["input_ids"][:5] for one in others]


TURN = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]
MIXED_ROWS = [
    "w1 " * 500, "w2 w3", TURN, "w2 w3", "w4 " * 3, [{"role": "assistant", "content": "w1"}], TURN[:1],
    "\n" + " " * 400 + "w2 w3 " * 30, [{"role": "user", "content": "w8 " * 200}], *(f"w{n}" for n in range(20)),
]  # fmt: skip


def prompts_one_by_one(tokenizer, rows, generation):
    """The definition, a row at a time."""
    found = {}
    for row in rows:
        expected = None
        if isinstance(row, str):
            ids = tokenizer(row)["input_ids"][: generation.prompt_tokens]
            prompt = tokenizer.decode(ids, skip_special_tokens=True)
        else:
            if row[-1]["role"] == "assistant":
                expected = row[-1]["content"]
            prompt = row[:-1] if expected is not None else row
        if not prompt:
            continue
        prompt = with_chain_of_thought(prompt) if generation.chain_of_thought else prompt
        if len(encode_prompt(tokenizer, prompt)) <= generation.longest_prompt:
            found.setdefault(str(prompt), (prompt, expected))
        if len(found) == generation.prompts:
            break
    return list(found.values())


@pytest.mark.parametrize("chain_of_thought", [False, True])
@pytest.mark.parametrize(("wanted", "at_once"), [(1, 4), (5, 4), (7, 1024), (100, 3), (100, 1024)])
def test_prompts_of_a_batch_of_rows_equal_those_of_one_row_at_a_time(monkeypatch, wanted, at_once, chain_of_thought):
    tokenizer = make_tokenizer()
    generation = Generation(prompts=wanted, prompt_tokens=40, chain_of_thought=chain_of_thought)
    context = SimpleNamespace(prompt_tokenizer=tokenizer, spec=SimpleNamespace(generation=generation, data=None))
    monkeypatch.setattr(teacher, "_ROWS_AT_ONCE", at_once)
    monkeypatch.setattr(teacher, "_rows_with_prompts", lambda context, left_out: iter(MIXED_ROWS))
    found = teacher._find_prompts(context)
    assert found == prompts_one_by_one(tokenizer, MIXED_ROWS, generation)
    assert len(found) == wanted or wanted == 100


def test_a_prompt_does_not_end_in_a_part_of_a_character(monkeypatch):
    tokenizer = byte_level_tokenizer(["plain words"], vocab_size=260)  # a byte is a token
    generation = Generation(prompts=9, prompt_tokens=5)
    context = SimpleNamespace(prompt_tokenizer=tokenizer, spec=SimpleNamespace(generation=generation, data=None))
    monkeypatch.setattr(
        teacher, "_rows_with_prompts", lambda context, left_out: iter(["a東京", "😀😀", "東", "abcdef"])
    )
    assert [prompt for prompt, _ in teacher._find_prompts(context)] == ["a東", "😀", "東", "abcde"]


def test_prompts_that_are_all_too_long_are_refused_with_the_length_of_the_shortest(monkeypatch):
    rows = [TURN, [{"role": "user", "content": "w8 " * 20}]]
    monkeypatch.setattr(teacher, "_rows_with_prompts", lambda context, left_out: iter(rows))
    spec = SimpleNamespace(
        generation=Generation(prompts=3, prompt_tokens=2), data=SimpleNamespace(source="chats.jsonl")
    )
    tokenizer = make_tokenizer()
    with pytest.raises(ConfigError) as refused:
        teacher._find_prompts(SimpleNamespace(prompt_tokenizer=tokenizer, spec=spec))
    length = len(encode_prompt(tokenizer, TURN[:1]))
    assert refused.value.message == (
        f"no prompt of chats.jsonl has 2 tokens or fewer; the shortest has {length}, its chat template included"
    )


def test_no_row_is_read_after_the_one_that_completes_the_prompts(monkeypatch):
    read = []

    def rows(context, left_out):
        for row in ["w1", "w1", "w2", "w3", "w4"]:
            read.append(row)
            yield row

    monkeypatch.setattr(teacher, "_rows_with_prompts", rows)
    generation = Generation(prompts=3, prompt_tokens=8)
    context = SimpleNamespace(prompt_tokenizer=make_tokenizer(), spec=SimpleNamespace(generation=generation))
    assert len(teacher._find_prompts(context)) == 3 and read == ["w1", "w1", "w2", "w3"]


def test_a_source_with_fewer_prompts_than_requested_is_noted(monkeypatch):
    monkeypatch.setattr(teacher, "_rows_with_prompts", lambda context, left_out: iter(["w1", "w1", "w2"]))
    spec = SimpleNamespace(generation=Generation(prompts=3, prompt_tokens=8), data=SimpleNamespace(source="texts.txt"))
    notes = []
    run = SimpleNamespace(note=notes.append)
    context = SimpleNamespace(prompt_tokenizer=make_tokenizer(), spec=spec, run=run, prompts=[])
    assert len(teacher.training_prompts(context)) == 2
    assert len(teacher.training_prompts(context)) == 2
    assert notes == [
        "prompts: 2, not 3 (generation.prompts), because texts.txt has no more different ones of up to 8 tokens"
    ]


def test_texts_go_through_the_tokenizer_together(monkeypatch):
    tokenizer, calls = make_tokenizer(), []

    class Counting:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, texts):
            calls.append(len(texts))
            return tokenizer(texts)

    monkeypatch.setattr(teacher, "_rows_with_prompts", lambda context, left_out: (f"w{n} w1" for n in range(25)))
    generation = Generation(prompts=20, prompt_tokens=8)
    teacher._find_prompts(SimpleNamespace(prompt_tokenizer=Counting(), spec=SimpleNamespace(generation=generation)))
    assert calls == [20, 20], "first tokens, then prompts"


def test_both_key_value_caches_generate_the_same_text(lab, tmp_path, monkeypatch):
    made = []
    decode = StaticDecoder.decode
    monkeypatch.setattr(StaticDecoder, "decode", lambda self, *given: made.append(given) or decode(self, *given))
    words = {}
    for cache in ("growing", "fixed"):
        _, paths = lab.run(tmp_path / cache, "synthetic", until="generation", generation={"cache": cache})
        lines = (paths.artifacts / "answers" / "answers.jsonl").read_text().splitlines()
        words[cache] = [[answer["text"] for answer in json.loads(line)["answers"]] for line in lines]
        assert bool(made) == (cache == "fixed")
    assert words["growing"] == words["fixed"]


@pytest.mark.parametrize("change", [{"generation": {"prompts": 8}}, {"preferences": {"tie_margin": 0.01}}])
def test_prompts_are_found_once_and_within_the_stage_that_needs_them(lab, finished, monkeypatch, change):
    """All texts go through the tokenizer for it, which is most of what making pairs takes."""
    found, inside = teacher._find_prompts, []

    def watched(tracker_context):
        inside.append([stage.name for stage in tracker_context.run._open])
        return found(tracker_context)

    monkeypatch.setattr(teacher, "_find_prompts", watched)
    store = finished["dpo"][1].folder.parent
    record, _ = lab.run(store, "dpo", until="preferences", **change)
    assert record.status == "done" and record.stage("data.preferences")
    assert inside == [["teacher.generate" if "generation" in change else "data.preferences"]]


def asked(folder):
    """The words of the prompts in the log of answers."""
    lines = (folder / "answers" / "answers.jsonl").read_text().splitlines()
    return {json.loads(line)["prompt"][0]["content"] for line in lines}


def test_prompts_without_answers_come_from_a_file_of_their_own(lab, tmp_path):
    """Held-out questions among them are not answered; another content of the file gives other answers."""
    held_out = next(data_rows(check(lab.settings("synthetic")).data, "test", limit=16))[0]["content"]
    file = tmp_path / "prompts.jsonl"
    prompts = [f"w{number} w{number + 1}" for number in range(6)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in [held_out, *prompts]))
    changes = {"generation": {"prompts_from": str(file)}}
    _, paths = lab.run(tmp_path / "runs", "synthetic", until="generation", **changes)
    assert asked(paths.artifacts) == set(prompts)
    assert f"note: prompts: not used of {file}: 1 (a held-out question)" in lab.listening.messages
    file.write_text(json.dumps({"prompt": "w9 w8"}) + "\n")
    _, paths = lab.run(tmp_path / "runs", "synthetic", until="generation", **changes)
    assert asked(paths.artifacts) == {"w9 w8"}


@pytest.mark.parametrize("pipeline", ["dpo", "on-policy"])
def test_other_pipelines_that_generate_use_these_prompts(lab, tmp_path, monkeypatch, pipeline):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"w{number} w{number + 1}"}) + "\n" for number in range(6)))
    seen = []
    found = teacher._find_prompts
    monkeypatch.setattr(teacher, "_find_prompts", lambda context: seen.extend(prompts := found(context)) or prompts)
    generation = {"prompts_from": str(file), "prompt_tokens": 18}
    until = {"until": "preferences"} if pipeline == "dpo" else {"on_policy": {"sync_every": 2}}
    record, _ = lab.run(tmp_path / "runs", pipeline, generation=generation, **until)
    assert record.status == "done"
    assert {prompt[0]["content"] for prompt, _ in seen} == {f"w{number} w{number + 1}" for number in range(6)}


def test_prompts_with_tools_are_refused_before_a_run_starts(lab, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "w1", "tools": [{"type": "function", "function": {"name": "w"}}]}) + "\n")
    with pytest.raises(ConfigError, match=r"prompts.jsonl has tools"):
        check_chat_parts(check(lab.settings("synthetic", generation={"prompts_from": str(file)})))
