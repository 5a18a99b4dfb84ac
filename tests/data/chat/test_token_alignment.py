"""Two tokenizers over one text: spans, common tokens, and what cannot be aligned."""

import numpy as np
import pytest
from tiny_tokenizer import END, bert_tokenizer, byte_level_tokenizer, sentencepiece_tokenizer

from joulelab.data.chat.encoding import EncodedDocument, encode_rows
from joulelab.data.chat.token_alignment import CommonVocabulary, TokenBytes, align, without_cut_character
from joulelab.errors import ConfigError

TEXTS = ["the film was great and the music was lovely", "a naïve plot with Straße and 😀", "we walked slowly"] * 20
CHAT = [{"role": "user", "content": "how was it?"}, {"role": "assistant", "content": "great film 😀, naïve plot"}]


@pytest.fixture(scope="module")
def byte_level():
    return byte_level_tokenizer(TEXTS)


@pytest.fixture(scope="module")
def sentencepiece():
    return sentencepiece_tokenizer(TEXTS)


@pytest.fixture(scope="module")
def wordpiece():
    tokenizer = bert_tokenizer(TEXTS)
    tokenizer.eos_token = "[SEP]"
    return tokenizer


def spans_of(row, student, teacher):
    """The bytes of both sides, span by span."""
    own, other = TokenBytes.of(student), TokenBytes.of(teacher)
    one, two = encode_rows(student, [row])[0], encode_rows(teacher, [row])[0]
    return [(own.join(one.ids[a:b]), other.join(two.ids[c:d])) for a, b, c, d in align(one, two, own, other)]


def test_tokens_of_every_family_spell_the_text(byte_level, sentencepiece, wordpiece):
    text = "the naïve film 😀 was 東 great"
    for tokenizer in (byte_level, sentencepiece):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert TokenBytes.of(tokenizer).text(ids).strip() == text
    ids = wordpiece("The lovely film!", add_special_tokens=False).input_ids
    assert TokenBytes.of(wordpiece).text(ids) == " the lovely film\ufffc"  # the unknown ! is no text


@pytest.mark.parametrize("row", [CHAT, "the naïve film 😀 was 東 great"])
def test_spans_cover_the_same_text_between_byte_level_and_sentencepiece(byte_level, sentencepiece, row):
    """The templates differ, a character is split over tokens, and only one tokenizer begins with a space."""
    for student, teacher in ((byte_level, sentencepiece), (sentencepiece, byte_level)):
        found = spans_of(row, student, teacher)
        assert all(one.strip() == other.strip() for one, other in found[:-1])
        assert " 😀".encode() in [one for one, _ in found]
        assert set(found[-1]) == {END.encode(), b"</s>"}
        first = "great film 😀, naïve plot" if row is CHAT else "naïve film 😀 was 東 great"
        assert b"".join(one for one, _ in found[:-1]).strip() == first.encode()


def test_wordpiece_is_aligned_without_case_accents_and_spaces(byte_level, wordpiece):
    found = spans_of("the Naïve film was LOVELY", byte_level, wordpiece)
    assert [other.strip() for _, other in found[:-1]] == [b"naive", b"film", b"was", b"lovely"]
    assert found[-1] == (END.encode(), b"[SEP]")


def test_an_unknown_word_is_in_no_span_and_what_follows_is_aligned(byte_level, wordpiece):
    found = spans_of("the film zzz was great", byte_level, wordpiece)
    assert [other.strip() for _, other in found] == [b"film", b"was", b"great", b"[SEP]"]


def test_a_truncated_document_is_aligned_up_to_its_end(byte_level, sentencepiece):
    own, other = TokenBytes.of(byte_level), TokenBytes.of(sentencepiece)
    one, two = encode_rows(byte_level, [CHAT])[0], encode_rows(sentencepiece, [CHAT])[0]
    whole = align(one, two, own, other)
    for length in range(len(one.ids) - 12, len(one.ids)):
        cut = align(one.cut(length), two, own, other)
        assert cut.tolist() == [span for span in whole.tolist() if span[1] <= length]
    assert len(align(one.cut(8), two, own, other)) == 0


def test_a_truncated_document_has_the_spans_of_the_whole_one(byte_level):
    """Where one text is the beginning of the other, spaces count: letters alone would join these tokens to one span."""
    other_tokenizer = byte_level_tokenizer(["was   so   great", "the  film"] * 40)
    own, other = TokenBytes.of(byte_level), TokenBytes.of(other_tokenizer)
    text = "the film  was   so   great   and  the music   was  lovely"
    one, two = encode_rows(byte_level, [text])[0], encode_rows(other_tokenizer, [text])[0]
    whole = align(one, two, own, other)
    assert len(whole) > 12
    for length in (9, 12, 15):
        found = align(one.cut(length), two, own, other)
        assert found.tolist() == [span for span in whole.tolist() if span[1] <= length]


def test_a_prompt_of_one_token_is_no_part_of_the_answer(byte_level, sentencepiece):
    """The other tokenizer takes several for it, so the documents begin differently."""

    def document(tokenizer, prompt):
        start, rest = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, "two words"))
        ids = np.array([*(start[:1] if prompt == "a" else start), *rest])
        return EncodedDocument(ids, np.arange(len(ids)) >= len(ids) - len(rest))

    one, other = document(byte_level, "a"), document(sentencepiece, "several words before")
    spans = align(one, other, TokenBytes.of(byte_level), TokenBytes.of(sentencepiece))
    assert not one.trained[0] and one.trained[1] and not other.trained[1]
    assert len(spans) and spans[0, 0] == 1 and spans[-1, 1] == len(one.ids)


def test_texts_with_nothing_in_common_have_no_span(byte_level, sentencepiece):
    own, other = TokenBytes.of(byte_level), TokenBytes.of(sentencepiece)
    one, two = byte_level("xyz").input_ids, sentencepiece("abc").input_ids
    documents = [EncodedDocument(np.array([0, *ids]), np.arange(len(ids) + 1) > 1) for ids in (one, two)]
    assert len(align(*documents, own, other)) == 0


def test_common_tokens_have_the_same_bytes_and_ends_are_partners(byte_level, sentencepiece):
    own, other = TokenBytes.of(byte_level), TokenBytes.of(sentencepiece)
    ends = (byte_level.eos_token_id, sentencepiece.eos_token_id)
    common = CommonVocabulary.of(own, other, [ends])
    pairs = list(zip(common.student_ids.tolist(), common.teacher_ids.tolist(), strict=True))
    assert ends in pairs
    assert all(own.pieces[one] == other.pieces[two] for one, two in pairs if (one, two) != ends)
    assert len({one for one, _ in pairs}) == len({two for _, two in pairs}) == common.size > 200
    assert common.size + len(common.student_rest) == len(byte_level)
    assert common.size + len(common.teacher_rest) == len(sentencepiece)
    # a letter of SentencePiece exists as a token and as a byte; its partner is the token
    letter = byte_level.convert_tokens_to_ids("g")
    assert dict(pairs)[letter] == sentencepiece.convert_tokens_to_ids("g")


def test_a_decoder_without_single_tokens_is_refused(byte_level):
    from tokenizers import Tokenizer, decoders
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer.from_str(byte_level.backend_tokenizer.to_str())
    core.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match="decoder of type CTC"):
        TokenBytes.of(PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END))


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_beginning_of_a_character_at_the_end_is_left_out(cut):
    assert without_cut_character("ab😀".encode()[:-cut]) == b"ab"
    assert without_cut_character("ab東".encode()) == "ab東".encode()
    assert without_cut_character(b"ab") == b"ab"


@pytest.mark.parametrize("raw", [b"a \xe2\x82 film", b"a \x80\x80 film", b"\xf0\x9f great"])
def test_every_byte_that_is_no_character_becomes_one_character(byte_level, sentencepiece, raw):
    """What follows them stays aligned."""
    own, other = TokenBytes.of(byte_level), TokenBytes.of(sentencepiece)
    of_byte = {piece: number for number, piece in enumerate(own.pieces) if len(piece) == 1}
    ids = [of_byte[bytes([byte])] for byte in raw]
    text = own.text(ids)
    assert text.count("\ufffd") == 2 and text.encode().replace("\ufffd".encode(), b"") == bytes(
        byte for byte in raw if byte < 0x80
    )
    theirs = sentencepiece(text, add_special_tokens=False).input_ids
    documents = [EncodedDocument(np.array([0, 0, *one]), np.arange(len(one) + 2) > 1) for one in (ids, theirs)]
    spans = align(*documents, own, other)
    assert spans[-1, 1] == len(ids) + 2, "up to the end"
