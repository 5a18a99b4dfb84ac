"""Two tokenizers over one text: which spans of tokens cover the same text, and which tokens are in both vocabularies.

A token of a byte-level vocabulary may be part of a character, so positions are counted in bytes. Tokens of one
document are concatenated, and wherever both sequences have a token that ends at the same byte, both are cut. Between
two cuts lies a *span*: the smallest text that both tokenizers cover by whole tokens, one to one in the simplest case.

Some tokenizers lose part of the text: WordPiece lower-cases it and drops spaces, SentencePiece adds a space before the
first word. If the bytes of two documents differ, they are compared by letters without case, accents and spaces, and
where these differ as well, only the common beginning and the common end are aligned.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab.data.chat.encoding import EncodedDocument, vocab_size_of
from joulelab.errors import ConfigError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")
_SPACE_MARK = "▁"
_LOST = "\ufffc"  # a character that texts do not have
_AFTER_NO_SPACE = (".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re")  # as decoders of WordPiece write them


@dataclass(frozen=True, eq=False)
class TokenBytes:
    """The bytes that each token of a vocabulary adds to a text."""

    pieces: tuple[bytes, ...]
    """By id; ids that are no token add nothing."""
    lengths: Ints
    is_special: Bools
    """By id. Special tokens are part of no word: at the end of a document they mean that it ends."""
    fallback: frozenset[int]
    """Ids of single bytes, for characters that have no token (SentencePiece)."""

    @classmethod
    def of(cls, tokenizer: Any) -> TokenBytes:
        steps, added = _decoder_steps(tokenizer), tokenizer.added_tokens_decoder
        pieces = [b""] * vocab_size_of(tokenizer)
        fallback = set()
        for token, number in tokenizer.get_vocab().items():
            if number in added:
                pieces[number] = str(added[number].content).encode()
            else:
                pieces[number] = _piece(token, steps)
                if _BYTE.fullmatch(token):
                    fallback.add(number)
        specials = {number for number, one in added.items() if one.special} | set(map(int, tokenizer.all_special_ids))
        unknown = tokenizer.unk_token_id
        if unknown is not None and unknown not in (tokenizer.eos_token_id, tokenizer.bos_token_id):
            # It stands for a text that is lost, so it must equal nothing in the other document.
            specials.discard(unknown)
            pieces[unknown] = _LOST.encode()
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        is_special = np.isin(np.arange(len(pieces)), sorted(specials))
        return cls(tuple(pieces), lengths, is_special, frozenset(fallback))

    def join(self, ids: Sequence[int] | Ints) -> bytes:
        return b"".join(map(self.pieces.__getitem__, np.asarray(ids).tolist()))

    def text(self, ids: Sequence[int] | Ints) -> str:
        """What the tokens say; special tokens and a character that ends in the middle are left out. Each byte that is
        no character becomes a U+FFFD, as in the alignment."""
        whole = self.join([number for number in ids if not self.is_special[number]])
        return _ESCAPED_BYTE.sub("\ufffd", without_cut_character(whole).decode("utf-8", "surrogateescape"))

    def text_bytes(self, document: EncodedDocument) -> int:
        """Bytes of the trained tokens; special tokens have none."""
        trained = document.ids[1:][document.trained[1:]]
        return int(self.lengths[trained[~self.is_special[trained]]].sum())


def without_cut_character(text: bytes) -> bytes:
    """Without the first bytes of a character whose other bytes are missing at the end."""
    for length in range(1, min(4, len(text) + 1)):
        byte = text[-length]
        if byte & 0xC0 == 0x80:
            continue
        size = 2 if byte >= 0xC0 and byte < 0xE0 else 3 if byte >= 0xE0 and byte < 0xF0 else 4 if byte >= 0xF0 else 1
        return text[:-length] if size > length else text
    return text


# from a vocabulary's spelling of tokens to bytes


def _decoder_steps(tokenizer: Any) -> list[Mapping[str, Any]]:
    backend, name = getattr(tokenizer, "backend_tokenizer", None), getattr(tokenizer, "name_or_path", "") or "it"
    if backend is None:
        raise ConfigError(
            f"the tokenizer {name} has no definition in Python's tokenizers library (tokenizer.json), so the text of "
            "its tokens is not known",
            "use a model with a fast tokenizer, or a teacher and a student with the same tokenizer",
        )
    decoder = json.loads(backend.to_str())["decoder"]
    steps: list[Mapping[str, Any]] = [] if decoder is None else decoder.get("decoders", [decoder])
    if decoder is None:  # such tokens are joined with spaces
        steps = [{"type": "Words"}]
    unknown = [step["type"] for step in steps if step["type"] not in _STEPS]
    if unknown:
        raise ConfigError(
            f"the tokenizer {name} has a decoder of type {', '.join(unknown)}, for which the text of a single token is "
            "not defined",
            f"expected {', '.join(sorted(set(_STEPS) - {'Words'}))}; use a teacher and a student with the same "
            "tokenizer",
        )
    return steps


_STEPS = ("BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece", "Words")


def _piece(token: str, steps: Sequence[Mapping[str, Any]]) -> bytes:
    """What a token adds in the middle of a text."""
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            return _from_byte_letters(token)
        if kind == "ByteFallback" and (found := _BYTE.fullmatch(token)):
            return bytes([int(found[1], 16)])
        if kind == "Replace" and "String" in step["pattern"]:
            token = token.replace(step["pattern"]["String"], step["content"])
        elif kind == "Metaspace":
            token = token.replace(step["replacement"], " ")
        elif kind == "BPEDecoder":
            token = token.replace(step["suffix"], " ")
        elif kind == "WordPiece":
            joined = token.startswith(step["prefix"]) or (step["cleanup"] and token in _AFTER_NO_SPACE)
            token = token.removeprefix(step["prefix"]) if joined else f" {token}"
        elif kind == "Words":
            token = f" {token}"
        # Fuse and Strip change the beginning of a text only
    return token.encode()


@lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies spell bytes: printable ones stand for themselves, the others for
    letters from 256 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _from_byte_letters(token: str) -> bytes:
    letters = _byte_letters()
    return bytes(letters[letter] for letter in token) if all(one in letters for one in token) else token.encode()


# tokens of both vocabularies


@dataclass(frozen=True, eq=False)
class CommonVocabulary:
    """Tokens with the same text, each with its id in both vocabularies, and the ids that have no partner."""

    student_ids: Ints
    teacher_ids: Ints
    student_rest: Ints
    teacher_rest: Ints

    @property
    def size(self) -> int:
        return len(self.student_ids)

    @classmethod
    def of(
        cls,
        student: TokenBytes,
        teacher: TokenBytes,
        ends: Sequence[tuple[int, int]] = (),
        student_rows: int | None = None,
        teacher_rows: int | None = None,
    ) -> CommonVocabulary:
        """`ends`: ids that end a turn or a text in both, whatever they are called. `student_rows`, `teacher_rows`: rows
        of the models' embeddings; a special token that no text has may have none."""
        words, others = _least(len(student.pieces), student_rows), _least(len(teacher.pieces), teacher_rows)
        own, other = _ids_by_text(student, words), _ids_by_text(teacher, others)
        pairs: dict[int, int] = {}
        taken: set[int] = set()
        for one, two in [*ends, *((own[text], other[text]) for text in own if text in other)]:
            if one not in pairs and two not in taken and one < words and two < others:
                pairs[one] = two
                taken.add(two)
        ids = np.array(sorted(pairs), dtype=np.int64)
        partners = np.array([pairs[number] for number in ids.tolist()], dtype=np.int64)
        rest = np.setdiff1d(np.arange(words), ids)
        return cls(ids, partners, rest, np.setdiff1d(np.arange(others), partners))


def _least(count: int, rows: int | None) -> int:
    return count if rows is None else min(count, rows)


def _ids_by_text(tokens: TokenBytes, words: int) -> dict[tuple[bool, bytes], int]:
    """Ids by text. If two tokens have the same text, the one that is not a byte fallback counts, then the first."""
    order = sorted(range(words), key=lambda number: (number in tokens.fallback, number))
    found: dict[tuple[bool, bytes], int] = {}
    for number in order:
        if tokens.pieces[number]:
            found.setdefault((bool(tokens.is_special[number]), tokens.pieces[number]), number)
    return found


# spans


def align(student: EncodedDocument, teacher: EncodedDocument, own: TokenBytes, other: TokenBytes) -> Ints:
    """Spans of trained tokens of two encodings of one conversation or text, in order: [S, 4], first token and the one
    after the last of the student, then of the teacher. Answers are paired by number, so that chat templates may
    differ."""
    found = [np.empty((0, 4), dtype=np.int64)]
    answers, theirs = _answers(student), _answers(teacher)
    if answers and theirs and answers[0][0] == theirs[0][0] == 1:
        # The first token of a plain text has nothing to predict it from and is not trained, but is part of the text.
        answers[0], theirs[0] = (0, answers[0][1]), (0, theirs[0][1])
    for (start, end), (begin, stop) in zip(answers, theirs, strict=False):
        text_end, text_stop = _without_end(student.ids, start, end, own), _without_end(teacher.ids, begin, stop, other)
        ends = text_end < end and text_stop < stop
        spans = _spans(student.ids[start:text_end], teacher.ids[begin:text_stop], own, other, from_end=ends)
        found.append(spans + np.array([start, start, begin, begin]))
        if ends:
            found.append(np.array([[text_end, end, text_stop, stop]]))
    spans = np.concatenate(found)
    return spans[_all_trained(student, spans[:, :2]) & _all_trained(teacher, spans[:, 2:])]


def _all_trained(document: EncodedDocument, spans_S2: Ints) -> Bools:
    not_trained = np.concatenate([[0], np.cumsum(~document.trained)])
    found: Bools = not_trained[spans_S2[:, 0]] == not_trained[spans_S2[:, 1]]
    return found


def _answers(document: EncodedDocument) -> list[tuple[int, int]]:
    """Runs of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], document.trained, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _without_end(ids: Ints, start: int, end: int, tokens: TokenBytes) -> int:
    while end > start and tokens.is_special[ids[end - 1]]:
        end -= 1
    return end


def _spans(student: Ints, teacher: Ints, own: TokenBytes, other: TokenBytes, from_end: bool) -> Ints:
    """Spans of two token sequences. `from_end`: both end where the text ends, so they can be aligned from there too."""
    mine, theirs = _Positions.in_bytes(student, own), _Positions.in_bytes(teacher, other)
    before = _common_prefix(mine.text, theirs.text)
    is_cut = before == min(len(mine.text), len(theirs.text)) and not from_end  # one of them ends earlier
    if mine.text != theirs.text and not is_cut:
        mine, theirs = _Positions.in_letters(student, own), _Positions.in_letters(teacher, other)
        before = _common_prefix(mine.text, theirs.text)
    spans = _between(np.concatenate([[[0, 0]], _cuts(mine, theirs, 0, before, shift=0)]))
    if mine.text == theirs.text:
        if len(spans):
            spans[-1, [1, 3]] = len(student), len(teacher)  # tokens without letters after the last span belong to it
        return spans
    if from_end:
        shift = len(theirs.text) - len(mine.text)
        shortest = min(len(mine.text), len(theirs.text))
        after = min(_common_prefix(mine.text[::-1], theirs.text[::-1]), shortest - before)
        cuts = _cuts(mine, theirs, len(mine.text) - after, len(mine.text), shift)
        spans = np.concatenate([spans, _between(cuts)])
    return spans


def _between(cuts: Ints) -> Ints:
    spans = np.concatenate([cuts[:-1], cuts[1:]], axis=1)[:, [0, 2, 1, 3]]
    found: Ints = spans[(spans[:, 1] > spans[:, 0]) & (spans[:, 3] > spans[:, 2])]
    return found


@dataclass(frozen=True, eq=False)
class _Positions:
    """The text of some tokens, and where in it each of them ends; -1 in the middle of a letter."""

    text: bytes | str
    ends: Ints

    @classmethod
    def in_bytes(cls, ids: Ints, tokens: TokenBytes) -> _Positions:
        # A special token in the middle, such as the begin of a text, adds nothing that the other tokenizer could have.
        special = tokens.is_special[ids]
        return cls(tokens.join(ids[~special]), np.cumsum(np.where(special, 0, tokens.lengths[ids])))

    @classmethod
    def in_letters(cls, ids: Ints, tokens: TokenBytes) -> _Positions:
        exact = cls.in_bytes(ids, tokens)
        assert isinstance(exact.text, bytes)
        text = exact.text.decode("utf-8", "surrogateescape")  # bytes that are no character are one letter each
        letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        codes, which = np.unique(letters, return_inverse=True)
        sizes, folded = zip(*map(_letter, codes.tolist()), strict=True) if len(codes) else ((), ())
        at = np.full(len(exact.text) + 1, -1, dtype=np.int64)
        at[0] = 0
        at[np.cumsum(_each(sizes)[which])] = np.cumsum(_each(list(map(len, folded)))[which])
        return cls(text.translate(dict(zip(codes.tolist(), folded, strict=True))), at[exact.ends])


def _each(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, dtype=np.int64)


def _letter(code: int) -> tuple[int, str]:
    """Its number of bytes, and the letter without case, accents and spaces."""
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no character; U+FFFD in a decoded text
        return 1, "\ufffd"
    return len(chr(code).encode()), _folded(chr(code))


@lru_cache(maxsize=65_536)
def _folded(letter: str) -> str:
    """Without case, accents and spaces."""
    if letter == _SPACE_MARK:
        return ""
    plain = unicodedata.normalize("NFKD", letter)
    return "".join(one for one in plain.casefold() if not one.isspace() and not unicodedata.combining(one))


def _common_prefix(one: bytes | str, other: bytes | str) -> int:
    if one == other:
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:  # the longest length at which both begin equally, by bisection: slices are compared in C
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _cuts(mine: _Positions, theirs: _Positions, first: int, last: int, shift: int) -> Ints:
    """Numbers of tokens of both before each position between `first` and `last` at which tokens of both end: [C, 2]. A
    token without letters, such as a space, belongs to what follows it."""
    own, own_at = np.unique(mine.ends, return_index=True)
    other, other_at = np.unique(theirs.ends - np.where(theirs.ends < 0, 0, shift), return_index=True)
    common, mine_at, theirs_at = np.intersect1d(own, other, assume_unique=True, return_indices=True)
    inside = (common > 0) & (common >= first) & (common <= last) & (own[mine_at] >= 0)
    return np.stack([own_at[mine_at], other_at[theirs_at]], axis=1)[inside] + 1
