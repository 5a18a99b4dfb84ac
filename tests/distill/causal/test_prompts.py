"""Prompts are found only if they are needed, with no more tokenization than necessary."""

import json

import pytest
from tiny_llama import make_tokenizer

from joulelab.distill.causal import teacher
from joulelab.infer.generation.static_decoder import StaticDecoder


def test_reused_answers_need_no_search_for_prompts(lab, finished, monkeypatch):
    def unwanted(tracker_context):
        raise AssertionError("the prompts were asked and answered already")

    store = finished["dpo"][1].folder.parent
    monkeypatch.setattr(teacher, "training_prompts", unwanted)
    for name in ("synthetic", "dpo"):
        record, _ = lab.run(store, name, label=name, seed=2, training={"evaluate_every_steps": 4})
        assert record.status == "done"


@pytest.mark.parametrize("text", ["w1 " * 500, "w1", "\n" + " " * 400 + "w2 w3 " * 30, "x" * 5000 + " w4" * 9])
def test_the_first_tokens_equal_those_of_the_whole_text(text):
    tokenizer = make_tokenizer()
    assert teacher._first_ids(tokenizer, text, 5) == tokenizer(text)["input_ids"][:5]


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
