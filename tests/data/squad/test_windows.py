"""Windows over paragraphs: every token is in one, every answer is found again, and the files keep them as they are."""

from pathlib import Path

import numpy as np
import pytest
from tiny_tokenizer import bert_tokenizer, roberta_like_tokenizer

from joulelab.data.squad.questions import Answer, Question, read_squad
from joulelab.data.squad.windows import (
    CLS,
    NOT_CONTEXT,
    SquadBatches,
    WindowShape,
    collate,
    iterate_in_order,
    load_questions,
    make_windows,
    open_features,
    token_span,
    write_features,
)
from joulelab.errors import ConfigError, JoulelabError, NotFoundError

FILES = Path(__file__).parent
NARROW = WindowShape(max_seq_length=48, doc_stride=11, max_query_length=16)


@pytest.fixture(scope="module")
def questions():
    return read_squad(FILES / "v2.json", version_2=True)


@pytest.fixture(scope="module")
def tokenizer(questions):
    return bert_tokenizer([text for question in questions for text in (question.text, question.context)])


def context_tokens(window):
    inside = window.characters[:, 0] != NOT_CONTEXT
    return window.ids[inside], window.characters[inside]


def test_a_window_that_holds_all_is_what_the_tokenizer_makes_of_the_pair(questions, tokenizer):
    wide = WindowShape(384, 128, 64)
    for window, question in zip(make_windows(questions, tokenizer, wide), questions, strict=True):
        pair = tokenizer(question.text, question.context, return_offsets_mapping=True)
        assert window.ids.tolist() == pair["input_ids"]
        assert window.types.tolist() == pair["token_type_ids"]
        expected = [
            o if s == 1 else (-1, -1) for o, s in zip(pair["offset_mapping"], pair.sequence_ids(0), strict=True)
        ]
        assert window.characters.tolist() == [list(pair) for pair in expected]


def test_another_family_of_models_gets_its_own_special_tokens(questions, tokenizer):
    other = roberta_like_tokenizer(tokenizer)
    for window, question in zip(make_windows(questions, other, WindowShape(384, 128, 64)), questions, strict=True):
        assert window.ids.tolist() == other(question.text, question.context)["input_ids"]


def test_windows_begin_a_stride_apart_and_leave_no_token_out(questions, tokenizer):
    windows = list(make_windows(questions, tokenizer, NARROW))
    assert len(windows) > 2 * len(questions)
    for number, question in enumerate(questions):
        own = [window for window in windows if window.question == number]
        whole = tokenizer(question.context, add_special_tokens=False)["input_ids"]
        assert [window.first_token for window in own] == [NARROW.doc_stride * place for place in range(len(own))]
        seen = {}
        for window in own:
            assert len(window.ids) <= NARROW.max_seq_length
            seen |= {
                window.first_token + place: token for place, token in enumerate(context_tokens(window)[0].tolist())
            }
        assert [seen[place] for place in range(len(whole))] == whole
        last = own[-2].first_token + len(context_tokens(own[-2])[0])
        assert last < len(whole), "the window before the last one does not reach the end"


def test_every_answer_is_found_again_by_its_text(questions, tokenizer):
    """Through token positions and back: in at least one window, and in none of them as another text."""
    found = {}
    for window in make_windows(questions, tokenizer, NARROW):
        start, end = window.span
        if start != CLS:
            context = questions[window.question].context
            text = context[window.characters[start, 0] : window.characters[end, 1]]
            found.setdefault(questions[window.question].id, set()).add(text)
    assert found == {question.id: {question.answers[0].text} for question in questions if question.answers}


def test_a_window_points_to_cls_unless_it_holds_the_whole_answer(questions, tokenizer):
    for window in make_windows(questions, tokenizer, NARROW):
        question, (_, characters) = questions[window.question], context_tokens(window)
        holds = bool(question.answers) and (
            characters[0, 0] <= question.answers[0].start and question.answers[0].end <= characters[-1, 1]
        )
        assert (window.span != (CLS, CLS)) == holds


def test_an_answer_inside_a_token_takes_the_token_and_blanks_around_it_do_not_count():
    characters = np.array([[0, 3], [4, 8], [9, 12]])
    assert token_span(Answer("8", 5), characters) == (1, 1)
    assert token_span(Answer(" abcd ", 3), characters) == (1, 1)
    assert token_span(Answer("x", 50), characters) is None


def test_a_long_question_is_cut(tokenizer, questions):
    long = Question("q", "kites " * 100, questions[0].context, questions[0].answers)
    (first, *_) = make_windows([long], tokenizer, NARROW)
    assert int((first.types == 0).sum()) == NARROW.max_query_length + 2


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="does not return the characters of a token"):
        list(make_windows([], object(), NARROW))


@pytest.fixture
def features(tmp_path, questions, tokenizer):
    windows = make_windows(questions, tokenizer, NARROW)
    return write_features(tmp_path / "set", questions, windows, len(tokenizer), tokenizer.pad_token_id)


def test_the_store_gives_back_questions_and_windows(features, questions, tokenizer):
    assert load_questions(features.folder) == questions
    for row, window in enumerate(make_windows(questions, tokenizer, NARROW)):
        part = features.span(row)
        np.testing.assert_array_equal(features.tokens[part], window.ids)
        np.testing.assert_array_equal(features.characters[part], window.characters)
        assert tuple(features.spans[row]) == window.span


def test_the_same_questions_give_the_same_bytes(tmp_path, features, questions, tokenizer):
    windows = make_windows(questions, tokenizer, NARROW)
    write_features(tmp_path / "again", questions, windows, len(tokenizer), tokenizer.pad_token_id)
    for path in features.folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_a_damaged_or_unfinished_store_is_reported(features):
    (features.folder / "tokens.bin").write_bytes(bytes(3))
    with pytest.raises(JoulelabError, match="corrupted"):
        open_features(features.folder)
    (features.folder / "manifest.json").unlink()
    with pytest.raises(NotFoundError, match="no complete set of windows"):
        open_features(features.folder)


def test_batches_hold_every_window_once_and_mark_where_an_answer_may_be(features):
    stream = SquadBatches(features, batch_size=5, seed=1)
    batches = [stream.at(0, index) for index in range(stream.batches_per_epoch)]
    assert sum(batch.samples for batch in batches) == len(features)
    assert sum(batch.tokens for batch in batches) == features.tokens_total
    for batch in batches:
        answerable = batch["answerable"]
        assert answerable[:, CLS].all()
        assert not (answerable & (batch["attention_mask"] == 0)).any()
        assert not answerable[:, 1:][batch["token_type_ids"][:, 1:] == 0].any()
        assert answerable.gather(1, batch["spans"]).all()
    with pytest.raises(IndexError):
        stream.at(0, stream.batches_per_epoch)


def test_evaluation_reads_every_row_once_longest_first(features):
    rows = np.concatenate([rows for rows, _ in iterate_in_order(features, 4)])
    assert sorted(rows) == list(range(len(features)))
    assert (np.diff(features.lengths[rows]) <= 0).all()
    assert collate(features, rows[:2])["input_ids"].shape == (2, features.lengths.max())
