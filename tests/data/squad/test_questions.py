"""SQuAD's JSON is read as it is, and every mistake in it is told with its place."""

import copy
import json
from pathlib import Path

import pytest

from joulelab.data.squad.questions import parse_squad, read_squad, synthetic_document
from joulelab.errors import ConfigError, NotFoundError

FILES = Path(__file__).parent


@pytest.fixture
def document():
    return json.loads((FILES / "v1.json").read_text(encoding="utf-8"))


def first_question(document):
    return document["data"][0]["paragraphs"][0]["qas"][0]


def test_version_1_is_read_with_all_marked_answers():
    questions = read_squad(FILES / "v1.json", version_2=False)
    assert [question.id for question in questions][:2] == ["kite-1", "kite-2"]
    assert [answer.text for answer in questions[1].answers] == ["Åse Lind and her brother", "Åse Lind"]
    assert all(q.context[a.start : a.end] == a.text for q in questions for a in q.answers)


def test_version_2_has_questions_without_an_answer():
    questions = read_squad(FILES / "v2.json", version_2=True)
    assert [question.id for question in questions if question.impossible] == ["kite-5", "bridge-5"]


def test_a_file_of_version_1_may_be_read_as_version_2():
    assert len(read_squad(FILES / "v1.json", version_2=True)) == 8


def test_an_impossible_question_in_version_1_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"article 0 \('Sønderby'\), question kite-5 is marked impossible") as caught:
        read_squad(FILES / "v2.json", version_2=False)
    assert caught.value.hint == "set data.version_2=true"


@pytest.mark.parametrize("start", [0, 10_000, -3])
def test_an_answer_that_is_not_at_its_place_is_refused(document, start):
    first_question(document)["answers"][0]["answer_start"] = start
    with pytest.raises(ConfigError, match=rf"question kite-1: at answer_start {start} the context is .* '1987'"):
        parse_squad(document, "mine", version_2=False)


def test_a_place_counted_in_bytes_is_refused(document):
    context = document["data"][0]["paragraphs"][0]["context"]
    first_question(document)["answers"][0]["answer_start"] = context.encode().index(b"1987")
    with pytest.raises(ConfigError, match="question kite-1: at answer_start") as caught:
        parse_squad(document, "mine", version_2=False)
    assert "not bytes" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "output_text"),
    [
        (lambda d: d.pop("data"), "mine has no 'data'"),
        (lambda d: d.update(data={}), "'data' of mine: expected a list, found an object"),
        (lambda d: d.update(data=[]), "mine contains no questions"),
        (lambda d: d["data"].__setitem__(1, "text"), "article 1: expected an object, found text"),
        (lambda d: d["data"][0].pop("paragraphs"), r"article 0 \('Sønderby'\) has no 'paragraphs'"),
        (lambda d: d["data"][0]["paragraphs"][0].update(context=" "), "paragraph 0: 'context' is empty"),
        (lambda d: first_question(d).pop("id"), r"article 0 \('Sønderby'\), a question has no 'id'"),
        (
            lambda d: first_question(d).update(question=3),
            "'question' of .* question kite-1: expected text, found an int",
        ),
        (lambda d: first_question(d).update(answers=[]), "question kite-1 has no answer and is not marked impossible"),
        (lambda d: first_question(d)["answers"][0].update(answer_start="39"), "expected an integer, found text"),
        (lambda d: first_question(d).update(id="kite-2"), "two questions with the id kite-2"),
    ],
)
def test_a_wrong_shape_is_reported_with_its_place(document, change, output_text):
    change(document)
    with pytest.raises(ConfigError, match=output_text):
        parse_squad(document, "mine", version_2=False)


def test_an_impossible_question_with_an_answer_is_refused(document):
    first_question(document)["is_impossible"] = True
    with pytest.raises(ConfigError, match="question kite-1 is marked impossible and has an answer"):
        parse_squad(document, "mine", version_2=True)


@pytest.mark.parametrize("content", [b"", b"{'data': []}", b"\xff\xfe{}"])
def test_what_is_not_json_is_reported(tmp_path, content):
    (tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.json is not JSON"):
        read_squad(tmp_path / "broken.json", version_2=False)


def test_a_list_at_the_top_is_not_squad(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected an object, found a list"):
        read_squad(tmp_path / "list.json", version_2=False)


def test_a_missing_file_is_reported_by_name(tmp_path):
    with pytest.raises(NotFoundError, match="there is no file"):
        read_squad(tmp_path / "none.json", version_2=False)


@pytest.mark.parametrize("version_2", [False, True])
def test_synthetic_documents_are_valid_and_the_same_for_the_same_seed(version_2):
    made = synthetic_document(20, seed=3, version_2=version_2)
    assert made == synthetic_document(20, seed=3, version_2=version_2) != synthetic_document(20, 4, version_2)
    questions = parse_squad(copy.deepcopy(made), "synthetic", version_2)
    assert len(questions) == 20 * (6 if version_2 else 4)
    assert sum(question.impossible for question in questions) == (40 if version_2 else 0)
