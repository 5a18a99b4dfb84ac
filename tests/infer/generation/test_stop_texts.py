"""A stop text is noticed with the very token that completes it, however its characters are spread over tokens."""

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny_lm import make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from joulelab.infer.generation.sampler import StopTexts


def byte_tokenizer():
    """A token for every byte, so that a letter with an accent takes two of them."""
    core = Tokenizer(models.BPE({name: k for k, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core)


BYTES = byte_tokenizer()


@given(
    text=st.text("aé\n. €", max_size=30),
    stops=st.lists(st.text("aé\n. €", min_size=1, max_size=3), min_size=1, max_size=2),
)
def test_it_is_seen_where_the_text_so_far_first_has_it(text, stops):
    ids = BYTES(text)["input_ids"]
    watched = StopTexts(BYTES, stops)
    plain = [any(stop in BYTES.decode(ids[:length]) for stop in stops) for length in range(1, len(ids) + 1)]
    first = plain.index(True) if True in plain else None
    seen = [watched.reached(ids[:length]) for length in range(1, len(ids) + 1)]
    assert (seen.index(True) if True in seen else None) == first


def test_a_space_that_the_decoder_puts_between_words_counts():
    words = make_tokenizer()
    ids = words("w1 w2")["input_ids"]
    watched = StopTexts(words, ["w1 "])
    assert [watched.reached(ids[:1]), watched.reached(ids)] == [False, True]


def test_text_is_made_only_after_a_token_that_could_complete_a_stop(monkeypatch):
    watched = StopTexts(BYTES, ["\n"])
    ids = BYTES("a" * 50)["input_ids"]
    decoded = []
    monkeypatch.setattr(watched, "_text", lambda some: decoded.append(some) or "a")
    assert not any(watched.reached(ids[:length]) for length in range(1, 51))
    assert decoded == [ids[:1]]


@pytest.mark.parametrize("ids", [[1], [1, 2]])
def test_without_stop_texts_nothing_stops(ids):
    assert not StopTexts(None, ()).reached(ids)
