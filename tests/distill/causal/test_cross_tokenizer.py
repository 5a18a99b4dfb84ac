"""Distillation from a teacher with another tokenizer and chat template, live, cached and on-policy."""

import json
import re
import shutil

import numpy as np
import pytest
from tiny_llama import SPECIALS, TEMPLATE, WORDS, conversation, make_model, make_tokenizer
from tiny_tokenizer import byte_level_tokenizer

from joulelab.data.chat.encoding import DocumentList, DocumentStore, EncodedDocument, pad_id_of
from joulelab.data.chat.packing import pack
from joulelab.distill.causal.cross_tokenizer import IN_TEACHERS_TOKENS, TokenizerPair, both_trained, check_tokenizers
from joulelab.distill.causal.data import check_end_of_text
from joulelab.distill.causal.models import check_codec, check_models
from joulelab.distill.logit_cache.cache_store import LogitCache
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import encode_prompt
from joulelab.runs.context import Stage
from joulelab.runs.execute import execute
from joulelab.runs.spec import check, refuse_unused
from joulelab.zoo.pretrained import load_tokenizer

LONGER = {"max_tokens": 64, "row_length": 64}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Byte-level BPE, in which a word of the teacher is two or three tokens."""
    folder = tmp_path_factory.mktemp("tokenizer") / "bytes"
    texts = [turn["content"] for row in range(40) for turn in conversation(row)]
    byte_level_tokenizer(texts, vocab_size=290).save_pretrained(folder)
    return folder


def losses(paths):
    lines = [json.loads(line) for line in (paths.folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def data(tokenizer, **more):
    return {"data": {**LONGER, "tokenizer": str(tokenizer)}, **more}


def test_a_live_teacher_and_its_cache_teach_the_same(lab, tokenizer, tmp_path):
    runs = {}
    for name, distill in {
        "live": {"alpha": 0.2, "teacher": "live"},
        "cached": {"alpha": 0.2, "codec": "hidden"},
    }.items():
        record, paths = lab.run(tmp_path, "kd", **data(tokenizer, distill=distill, budget={"tokens": 12_000}))
        assert record.status == "done", record.error
        runs[name] = (record, losses(paths))
    record, found = runs["live"]
    assert found[-1]["loss"] < 0.6 * found[0]["loss"]
    kl = [line["loss.kl"] for line in found]
    assert kl[-1] < 0.9 * kl[0]
    for one, other in zip(found, runs["cached"][1], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
    notes = [note.text for note in record.validity.notes]
    assert any(note.startswith("approximate: teacher and student have different tokenizers") for note in notes)
    results = record.results
    assert results["alignment.token_share"].value > 0.95
    assert 0 < results["alignment.one_to_one_share"].value < 1
    assert 0 < results["teacher.bits_per_byte"].value < results["student.bits_per_byte"].value
    assert "student.bits_per_byte.over_teacher" in results
    assert "student.agreement" not in results and "student.clm_loss.over_teacher" not in results


def test_on_policy_scores_the_students_text_in_the_teachers_tokens(lab, tokenizer, tmp_path):
    changes = data(
        tokenizer,
        budget={"tokens": 6000},
        generation={"prompt_tokens": 40, "answer": {"max_new_tokens": 20}},
        on_policy={"sync_every": 2, "student_share": 0.5},
    )
    record, _ = lab.run(tmp_path, "on-policy", **changes)
    assert record.status == "done", record.error
    assert {"student.generate", "teacher.score"} <= {stage.name for stage in record.stages}
    assert 0 < record.results["alignment.token_share"].value <= 1
    assert any("approximate: teacher" in note.text for note in record.validity.notes)
    assert record.results["student.bits_per_byte"].value > 0


@pytest.mark.parametrize("pipeline", ["synthetic", "dpo"])
def test_completions_of_a_teacher_with_another_tokenizer_are_learned_as_text(lab, tokenizer, tmp_path, pipeline):
    record, paths = lab.run(tmp_path, pipeline, **data(tokenizer, generation={"held_out": 0.3}))
    assert record.status == "done", record.error
    written = [json.loads(line) for line in (paths.artifacts / "answers" / "answers.jsonl").read_text().splitlines()]
    texts = {answer["text"] for one in written for answer in one["answers"]}
    words = {*WORDS, *SPECIALS}
    assert texts and all(set(text.split()) <= words for text in texts)
    student = load_tokenizer(str(tokenizer))
    if pipeline == "synthetic":
        store = DocumentStore.open(paths.artifacts / "synthetic" / "train")
        documents = [store.document(number) for number in range(len(store))]
        answers = {student.decode(one.ids[one.trained], skip_special_tokens=True) for one in documents}
        assert answers <= texts
        assert store.attributes["vocab_size"] == len(student)
    else:
        assert record.stage("teacher.judge").samples == len(written)
    notes = [note.text for note in record.validity.notes]
    assert any("are encoded in the student's tokens as text" in note for note in notes)
    assert not any("approximate" in note for note in notes)
    assert "alignment.token_share" not in record.results and "student.agreement" not in record.results
    assert 0 < record.results["teacher.bits_per_byte"].value < record.results["student.bits_per_byte"].value


def test_on_policy_mixes_completions_of_a_teacher_with_another_tokenizer(lab, tokenizer, tmp_path):
    changes = data(
        tokenizer,
        budget={"tokens": 4000},
        generation={"prompt_tokens": 40, "answer": {"max_new_tokens": 20}},
        on_policy={"sync_every": 2, "student_share": 0.5, "other_data": "teacher"},
    )
    record, paths = lab.run(tmp_path, "on-policy", **changes)
    assert record.status == "done", record.error
    folder = paths.artifacts / "synthetic"
    own, theirs = (DocumentStore.open(place / "train") for place in (folder, folder / IN_TEACHERS_TOKENS))
    assert len(own) == len(theirs) > 0
    student, teacher = load_tokenizer(str(tokenizer)), load_tokenizer(str(lab.teacher))
    for number in range(len(own)):
        one, other = own.document(number), theirs.document(number)
        text = teacher.decode(other.ids[other.trained], skip_special_tokens=True)
        answer = student.decode(one.ids[one.trained], skip_special_tokens=True)  # cut at data.max_tokens
        assert text.startswith(answer) and (text == answer or len(one) == LONGER["max_tokens"])
    assert 0 < record.results["alignment.token_share"].value <= 1


def test_documents_keep_their_numbers_if_one_tokenizer_has_no_room_for_an_answer():
    def document(trained):
        return EncodedDocument.answered([1, 2], [3] * trained)

    own, theirs = both_trained(map(document, (2, 0, 3, 1)), map(document, (1, 4, 0, 2)))
    assert [one.trained_count for one in own] == [2, 1]
    assert [one.trained_count for one in theirs] == [1, 2]


def test_prompts_are_cut_in_the_tokens_of_the_model_that_continues_them(lab, tokenizer, tmp_path):
    changes = data(tokenizer, until="generation", generation={"prompt_tokens": 16, "answer": {"n": 1}})
    record, _ = lab.run(tmp_path / "fits", "synthetic", **changes)
    assert record.status == "done", record.error  # 12 tokens of the teacher are more than twice as many of the student
    with pytest.raises(ConfigError, match=r"no prompt of .* has 16 tokens or fewer"):
        lab.run(tmp_path / "too long", "on-policy", **data(tokenizer, generation={"prompt_tokens": 16}))


def test_prompts_that_the_teachers_chat_template_refuses_are_left_out(lab, tokenizer, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(lab.teacher, teacher)
    made = make_tokenizer()
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    made.chat_template = refusal + TEMPLATE
    made.save_pretrained(teacher)
    rows = [conversation(row) for row in range(60)]
    with_system = [
        [{"role": "system", "content": "w1"}, *row] if number % 3 == 0 else row for number, row in enumerate(rows)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in with_system))
    changes = data(tokenizer, until="generation", teacher={"model": str(teacher)}, generation={"prompts": 60})
    changes["data"]["source"] = str(file)
    record, paths = lab.run(tmp_path / "runs", "synthetic", **changes)
    assert record.status == "done", record.error
    assert any("refused by the chat template" in note.text for note in record.validity.notes)
    written = (paths.artifacts / "answers" / "answers.jsonl").read_text().splitlines()
    assert all(one["role"] != "system" for line in written for one in json.loads(line)["prompt"])


@pytest.mark.slow
def test_spans_of_completions_are_counted_once_over_a_resume(lab, tokenizer, tmp_path, monkeypatch):
    changes = data(
        tokenizer,
        generation={"prompt_tokens": 40, "answer": {"max_new_tokens": 20}},
        on_policy={"sync_every": 4},
        training={"checkpoint_every_steps": 2},
    )
    whole, _ = lab.run(tmp_path / "whole", "on-policy", **changes)
    paths, count, seen = lab.paths(tmp_path / "killed", "on-policy", **changes), Stage.count, []

    def failing(stage, **counts):
        count(stage, **counts)
        seen.extend([1] if stage.name == "student.train" else [])
        if len(seen) == 7 and stage.name == "student.train":
            raise RuntimeError("power failure")

    monkeypatch.setattr(Stage, "count", failing)
    with pytest.raises(RuntimeError, match="power failure"):
        execute(paths, lab.listening)
    monkeypatch.setattr(Stage, "count", count)
    resumed = execute(paths, lab.listening)
    for name in ("alignment.token_share", "alignment.one_to_one_share"):
        assert resumed.results[name].value == whole.results[name].value, name


def test_a_completion_has_the_teachers_prompt_and_the_same_words(lab, tokenizer):
    pair = TokenizerPair.of(load_tokenizer(str(tokenizer)), load_tokenizer(str(lab.teacher)), "gold")
    words = f"{WORDS[3]} {WORDS[4]}"
    ids = [*pair.student(words, add_special_tokens=False).input_ids, pair.student.eos_token_id]
    document = pair.completion(conversation(0)[:1], ids)
    answer = pair.teacher.convert_ids_to_tokens(document.ids[document.trained])
    assert answer == [WORDS[3], WORDS[4], "<|im_end|>"]


@pytest.mark.parametrize(
    ("loss", "name", "expected"),
    [
        ("gold", "CE + KL", "CE + KL, approximate"),
        ("uld", "CE + KL", "CE + ULD"),
        ("uld", "JSD, beta 0.5", "ULD"),
    ],
)
def test_the_log_names_the_loss_that_is_computed(lab, tokenizer, loss, name, expected):
    pair = TokenizerPair.of(load_tokenizer(str(tokenizer)), load_tokenizer(str(lab.teacher)), loss)
    assert pair.loss_name(name) == expected


@pytest.mark.parametrize(
    ("pipeline", "changes", "text"),
    [
        ("kd", {}, "codec rs50 stores part of the teacher's distribution.*distill.teacher=live"),
        (
            "kd",
            {"distill": {"teacher": "live"}, "student": {"size": "nano", "teacher_embeddings": True}},
            "embeddings.*set student.teacher_embeddings=false",
        ),
        ("on-policy", {"teacher": {"server": "http://localhost:1/v1"}, "answer_t": 1}, "remove teacher.server"),
    ],
)
def test_what_needs_the_same_ids_is_refused_before_it_runs(lab, tokenizer, pipeline, changes, text):
    generation = {"prompt_tokens": 30}
    if changes.pop("answer_t", None):
        generation["answer"] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    spec = check(lab.settings(pipeline, **data(tokenizer, generation=generation), **changes))
    with pytest.raises(ConfigError) as refused:
        check_tokenizers(spec)
    assert re.search(text, f"{refused.value.message}; {refused.value.hint}")


def test_settings_of_the_loss_without_effect_are_refused(lab, tokenizer):
    spec = check(lab.settings("kd", teacher={"cross_tokenizer_loss": "uld"}))
    with pytest.raises(ConfigError, match=r"uld has no effect, because .* the same tokenizer"):
        check_tokenizers(spec)
    check_tokenizers(check(lab.settings("kd", **data(tokenizer, distill={"teacher": "live"}))))
    with pytest.raises(ConfigError, match=r"distill.divergence has no effect .* uld has no divergence"):
        refuse_unused({"distill": {"divergence": "reverse"}}, [spec])


def test_the_engine_of_a_teacher_that_does_not_generate_is_refused(lab):
    mixed = {"on_policy": {"student_share": 0.5, "other_data": "teacher"}}
    for policy, is_used in (({}, False), (mixed, True)):
        spec = check(lab.settings("on-policy", generation={"prompt_tokens": 18, "engine_python": "/none"}, **policy))
        assert ("generation.engine_python" in spec.unused_settings) is not is_used
        assert (spec.engine_installation in list(spec.checks())) is is_used


def test_a_student_without_embeddings_for_its_tokens_is_refused(lab, tokenizer, tmp_path):
    make_model(make_tokenizer()).save_pretrained(tmp_path / "student")
    student = {"student": {"size": None, "model": str(tmp_path / "student")}}
    with pytest.raises(ConfigError, match=r"has embeddings for .* tokens, but the tokenizer .* has ids up to 2"):
        check_tokenizers(check(lab.settings("sft", **data(tokenizer, **student))))


def test_special_tokens_need_no_embeddings(lab, tokenizer, tmp_path):
    """Gemma 3 has one for images that its language model has none for."""
    made = make_tokenizer()
    make_model(made).save_pretrained(tmp_path / "student")
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    made.save_pretrained(tmp_path / "student")
    student = {"student": {"size": None, "model": str(tmp_path / "student")}}
    check_tokenizers(check(lab.settings("sft", **student)))


@pytest.mark.parametrize("use", ["padding", "chat template"])
def test_special_tokens_that_rows_have_need_embeddings(lab, tmp_path, use):
    made = make_tokenizer()
    make_model(made).save_pretrained(tmp_path / "student")
    if use == "padding":
        made.add_special_tokens({"pad_token": "<new>"})
    else:
        made.add_special_tokens({"additional_special_tokens": ["<new>"]})
        made.chat_template = made.chat_template.replace("<|im_start|>", "<new>")
    made.save_pretrained(tmp_path / "student")
    spec = check(lab.settings("sft", student={"size": None, "model": str(tmp_path / "student")}))
    with pytest.raises(ConfigError, match=r"has ids up to 32 \(<new>\)"):
        check_tokenizers(spec)


@pytest.mark.parametrize("pipeline", ["kd", "on-policy"])
def test_a_token_that_only_the_teacher_has_a_row_for_is_not_compared(lab, tmp_path, pipeline):
    """Gemma 3: the 4B model has a row for the image token, the 1B model of the same tokenizer has none."""
    made = make_tokenizer()
    make_model(made).save_pretrained(tmp_path / "student")
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    make_model(made, seed=1).save_pretrained(tmp_path / "teacher")
    for name in ("student", "teacher"):
        made.save_pretrained(tmp_path / name)
    changes = {"quality": {"against_teacher": False}, "generation": {"prompt_tokens": 18}, "budget": {"tokens": 600}}
    changes |= {name: {"model": str(tmp_path / name)} for name in ("student", "teacher")}
    changes["student"]["size"] = None
    record, paths = lab.run(tmp_path / "runs", pipeline, **changes)
    assert record.status == "done", record.error
    if pipeline == "kd":
        assert LogitCache.open(paths.artifacts / "logits").manifest.vocabulary == len(made) - 1


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_token_without_a_row_is_not_compared_between_tokenizers(lab, tokenizer, tmp_path, who):
    made = make_tokenizer() if who == "teacher" else load_tokenizer(str(tokenizer))
    make_model(made).save_pretrained(tmp_path / who)
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    made.save_pretrained(tmp_path / who)
    named = {"student": {"size": None, "model": str(tmp_path / "student")}} if who == "student" else {}
    named |= {"teacher": {"model": str(tmp_path / "teacher")}} if who == "teacher" else {}
    changes = {
        "quality": {"against_teacher": False},
        "budget": {"tokens": 600},
        "distill": {"teacher": "live"},
        **named,
    }
    changes["data"] = LONGER if who == "student" else {**LONGER, "tokenizer": str(tokenizer)}
    record, _ = lab.run(tmp_path / "runs", "kd", **changes)
    assert record.status == "done", record.error
    assert record.results["alignment.token_share"].value > 0.95


def test_a_teacher_without_embeddings_for_its_tokens_is_refused(lab, tokenizer, tmp_path):
    made = make_tokenizer()
    make_model(made).save_pretrained(tmp_path)
    made.add_special_tokens({"pad_token": "<new>"})
    made.save_pretrained(tmp_path)
    spec = check(lab.settings("kd", **data(tokenizer, teacher={"model": str(tmp_path)}, distill={"teacher": "live"})))
    with pytest.raises(ConfigError, match=r"teacher.model=.* has embeddings for 32 tokens"):
        check_tokenizers(spec)


def test_a_batch_that_the_teacher_cannot_read_to_its_answer_has_no_span(lab, tokenizer):
    """The teacher's prompt fills its positions."""
    student, teacher = load_tokenizer(str(lab.teacher)), load_tokenizer(str(tokenizer))
    pair = TokenizerPair.of(student, teacher, "gold", teacher_positions=4)
    prompt, answer = conversation(0)[:1], student(f"{WORDS[3]} {WORDS[4]}", add_special_tokens=False).input_ids
    ids = np.array([*encode_prompt(student, prompt), *answer])
    document = EncodedDocument(ids, np.arange(len(ids)) >= len(ids) - len(answer))
    theirs = pair.completion(prompt, answer)
    assert len(theirs.ids) == 4 and not theirs.trained.any()
    packed = pack(DocumentList([document], pad_id_of(student)), 64, seed=0)
    batch = pair.batch(packed, np.arange(1), DocumentList([theirs], pad_id_of(teacher)))
    assert (batch.count, batch.teacher.count, batch.spans.size) == (len(answer), 1, 0)


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_texts_beyond_the_positions_of_a_model_are_refused(lab, who):
    changes = {"student": {"size": None, "model": str(lab.teacher)}} if who == "student" else {}
    spec = check(lab.settings("kd", data={"max_tokens": 300, "row_length": 300}, **changes))
    text = rf"{who}.model=.* has 256 positions, but texts have up to 300 tokens \(data.max_tokens\)"
    with pytest.raises(ConfigError, match=text):
        (check_models if who == "student" else check_tokenizers)(spec)


def test_a_completion_whose_prompt_the_teachers_template_refuses_is_written_as_chatml(lab, tokenizer):
    teacher = make_tokenizer()
    teacher.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    teacher.chat_template += TEMPLATE
    pair = TokenizerPair.of(load_tokenizer(str(tokenizer)), teacher, "gold", teacher_positions=16)
    ids = pair.student(WORDS[3], add_special_tokens=False).input_ids
    prompt = [{"role": "system", "content": WORDS[1]}, {"role": "user", "content": WORDS[2]}]
    document = pair.completion(prompt, ids)
    assert "system" in teacher.convert_ids_to_tokens(document.ids)
    assert teacher.convert_ids_to_tokens(document.ids[document.trained]) == [WORDS[3]]
    longer = pair.student(" ".join(WORDS[:20]), add_special_tokens=False).input_ids
    assert len(pair.completion(prompt[1:], longer).ids) == 16


def test_a_cache_of_more_tokens_than_the_teacher_has_is_refused(lab):
    with pytest.raises(ConfigError, match=r"codec=topk5000-ghost lists 5,000 tokens, but .* has"):
        check_codec(check(lab.settings("kd", distill={"codec": "topk5000-ghost"})))


def test_a_tokenizer_without_an_end_of_text_is_refused_for_texts_before_the_run(lab, tmp_path):
    made = make_tokenizer()
    made.eos_token = None
    made.save_pretrained(tmp_path / "no end")
    (tmp_path / "texts.txt").write_text("".join(f"w1 w2 {number}\n" for number in range(40)))
    changes = {"data": {**LONGER, "tokenizer": str(tmp_path / "no end")}}
    check_end_of_text(check(lab.settings("sft", **changes)))  # turns of a conversation have their own end
    changes["data"]["source"] = str(tmp_path / "texts.txt")
    with pytest.raises(ConfigError, match="the tokenizer has no end-of-text token"):
        check_end_of_text(check(lab.settings("sft", **changes)))


def test_data_without_a_common_span_is_refused(lab, tokenizer, tmp_path):
    """The teacher has no token for any of these words."""
    turns = [[{"role": "user", "content": "w1"}, {"role": "assistant", "content": f"zzz{k} yyy"}] for k in range(40)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))
    changes = data(tokenizer, distill={"teacher": "live"})
    changes["data"]["source"] = str(file)
    spec = check(lab.settings("kd", **changes))
    with pytest.raises(ConfigError, match=r"no text of .* can be aligned"):
        check_tokenizers(spec)
