"""Conversations and texts to token ids with a loss mask, and the store that holds such documents.

Targets of the loss are the assistant's tokens and the token that ends its turn, so that a student learns to stop; in a
plain text all tokens, with one end-of-text at the end. The mask is decided here once, by position. Later code never
infers it from ids: where padding and end-of-text share an id, that would remove every end from the loss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from joulelab.data.chat.conversations import Conversation, Row
from joulelab.data.chat.templates import ChatTemplate, RenderedChat, render, render_text, template_of
from joulelab.data.token_store import BITS, Column, RaggedStore, store_writer, token_column
from joulelab.errors import ConfigError


@dataclass(frozen=True, eq=False)
class EncodedDocument:
    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]
    """Which ids are targets of the loss; never the first, which has no context to predict it from."""

    @classmethod
    def answered(cls, prompt: Sequence[int], answer: Sequence[int]) -> EncodedDocument:
        """A prompt and its answer; only the answer is trained."""
        ids = np.array([*prompt, *answer], dtype=np.int64)
        return cls(ids, np.arange(len(ids)) >= len(prompt))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained_count(self) -> int:
        return int(np.count_nonzero(self.trained[1:]))

    def cut(self, max_tokens: int | None) -> EncodedDocument:
        """The first tokens; a truncated answer gets no end of turn."""
        if max_tokens is not None and max_tokens < 2:
            raise ConfigError(f"max_tokens={max_tokens}; expected 2 or more", "the first token is never a target")
        return EncodedDocument(self.ids[:max_tokens], self.trained[:max_tokens])


class Documents(Protocol):
    """A store on disk or a list in memory."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    @property
    def pad_id(self) -> int: ...

    def document(self, number: int) -> EncodedDocument: ...


@dataclass(frozen=True, eq=False)
class DocumentList:
    """Documents in memory, for a test or a held-out set."""

    documents: Sequence[EncodedDocument]
    pad_id: int = 0

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(document) for document in self.documents], dtype=np.int64)

    def document(self, number: int) -> EncodedDocument:
        return self.documents[number]


def encode_rows(tokenizer: Any, rows: Sequence[Row], template: ChatTemplate | None = None) -> list[EncodedDocument]:
    """Encodes many rows per call, so that a fast tokenizer uses its threads."""
    texts = iter(_encode_texts(tokenizer, [row for row in rows if isinstance(row, str)]))
    chats = iter(_encode_chats(tokenizer, [row for row in rows if not isinstance(row, str)], template))
    return [next(texts) if isinstance(row, str) else next(chats) for row in rows]


def encode_conversation(
    tokenizer: Any, conversation: Conversation, max_tokens: int | None = None, template: ChatTemplate | None = None
) -> EncodedDocument:
    return encode_rows(tokenizer, [conversation], template)[0].cut(max_tokens)


def encode_prompt(tokenizer: Any, conversation: Conversation, template: ChatTemplate | None = None) -> list[int]:
    """The prompt up to where the assistant's answer begins."""
    text = render_text(tokenizer, conversation, template or template_of(tokenizer), ask_for_answer=True)
    return _ids(tokenizer, [text])[0]


def require_end_id(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        name = getattr(tokenizer, "name_or_path", "") or "it"
        raise ConfigError(
            f"the tokenizer has no end-of-text token, so a student would not learn to stop ({name})",
            "use the tokenizer of a causal language model, such as sample:smollm2 (data.tokenizer)",
        )
    return int(tokenizer.eos_token_id)


def pad_id_of(tokenizer: Any) -> int:
    """Padding is known by position, so any id would do; other software may read it."""
    return int(tokenizer.pad_token_id) if tokenizer.pad_token_id is not None else require_end_id(tokenizer)


def vocab_size_of(tokenizer: Any) -> int:
    return max(len(tokenizer), 1 + max(map(int, tokenizer.get_vocab().values())))


def tokenizer_sha256(tokenizer: Any) -> str:
    """Equal for tokenizers that give equal ids for every text, wherever they are stored."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        definition: Any = sorted(tokenizer.get_vocab().items())
    else:
        definition = json.loads(backend.to_str())
        for setting in ("truncation", "padding"):  # state of the last call, not part of the definition
            definition.pop(setting, None)
    specials = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    whole = json.dumps([definition, specials], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(whole.encode()).hexdigest()


def encoding_identity(tokenizer: Any, template: ChatTemplate) -> dict[str, str]:
    """Everything that determines the ids of a row, for manifests and artifact keys."""
    return {
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "template_sha256": hashlib.sha256(template.text.encode()).hexdigest(),
        "trained_answers": "last" if template.last_answer_only else "all",
    }


def _encode_texts(tokenizer: Any, texts: list[str]) -> Iterator[EncodedDocument]:
    if not texts:
        return
    end = require_end_id(tokenizer)
    for found in tokenizer(texts, padding=False, truncation=False).input_ids:
        # some tokenizers append an end themselves
        ids = found if found and found[-1] == end else [*found, end]
        yield _document(ids, [True] * len(ids))


def _encode_chats(
    tokenizer: Any, conversations: list[Conversation], template: ChatTemplate | None
) -> Iterator[EncodedDocument]:
    """Prompts and answers are tokenized separately, as in generation; the decoded text must not change."""
    if not all(conversations):
        raise ConfigError("a conversation has no turns", "drop empty rows")
    used = template or template_of(tokenizer)
    chats = [render(tokenizer, conversation, used) for conversation in conversations]
    found = iter(_ids(tokenizer, [text for chat in chats for text in (chat.text, *chat.pieces)]))
    for chat in chats:
        whole = next(found)
        yield _joined(tokenizer, chat, whole, list(islice(found, len(chat.pieces))))


def _joined(tokenizer: Any, chat: RenderedChat, whole: list[int], pieces: list[list[int]]) -> EncodedDocument:
    ids = list(chain.from_iterable(pieces))
    if ids != whole and tokenizer.decode(ids) != tokenizer.decode(whole):
        # for example a tokenizer that adds a space before every text: find the pieces in the whole instead
        pieces = _pieces_of_whole(tokenizer, chat, whole)
        ids = whole
    # prompts and answers alternate, starting with a prompt
    return _document(ids, [place % 2 == 1 for place, piece in enumerate(pieces) for _ in piece])


def _pieces_of_whole(tokenizer: Any, chat: RenderedChat, whole: list[int]) -> list[list[int]]:
    texts = ["".join(chat.pieces[:count]) for count in range(len(chat.pieces))]
    beginnings = [*_ids(tokenizer, texts), whole]
    if any(whole[: len(beginning)] != beginning for beginning in beginnings):
        raise ConfigError(
            "the tokenizer joins the end of a prompt and the beginning of an answer into one token, "
            "so the assistant's tokens cannot be identified",
            "use a chat template that ends the prompt with a special token or a new line",
        )
    cuts = [len(beginning) for beginning in beginnings]
    return [whole[start:end] for start, end in pairwise(cuts)]


def _document(ids: list[int], trained: list[bool]) -> EncodedDocument:
    targets = np.array(trained, dtype=np.bool_)
    targets[:1] = False
    return EncodedDocument(np.array(ids, dtype=np.int64), targets)


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    # the template's text already contains the special tokens
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False, padding=False, truncation=False).input_ids
    return found


class DocumentStore(RaggedStore):
    """Encoded documents on disk: token ids, and one bit per token that marks targets of the loss."""

    COLUMNS = ("tokens", "trained")
    NOUN = "document store"

    def _read_attributes(self) -> None:
        self.pad_id: int = self.attributes["pad_id"]
        self.trained_count: int = self.attributes["trained_tokens"]
        """Targets of the loss in all documents."""

    def document(self, number: int) -> EncodedDocument:
        return EncodedDocument(self.row(number), self.bits("trained", self.span(number)))


def write_documents(
    folder: Path,
    documents: Iterable[EncodedDocument],
    *,
    vocab_size: int,
    pad_id: int,
    tokenizer: str,
    notes: Mapping[str, Any] | None = None,
) -> DocumentStore:
    """Write documents as they come; those without a target of the loss are skipped and counted.

    `tokenizer` is its name. `notes` become attributes of the store (hashes, the template, counts of dropped rows); they
    are read after the last document, so the caller may count while documents are written.
    """
    targets = skipped = 0
    with store_writer(folder, {"tokens": token_column(vocab_size), "trained": Column(BITS)}) as writer:
        for document in documents:
            if not document.trained_count:
                skipped += 1
                continue
            writer.append([len(document)], tokens=document.ids, trained=document.trained)
            targets += document.trained_count
        if not targets:
            raise ConfigError(
                f"none of {skipped:,} documents has a token to train on",
                "check that the conversations have assistant turns and that max_tokens does not truncate them away",
            )
        writer.attributes.update(
            **(notes or {}),
            trained_tokens=targets,
            documents_without_trained_tokens=skipped,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            pad_id=pad_id,
        )
    return DocumentStore(folder)
