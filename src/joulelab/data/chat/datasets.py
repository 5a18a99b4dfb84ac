"""Published chat datasets by short name, and preparing a document store from any source of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from joulelab import lookup
from joulelab.data.chat.conversations import Row, cleaned, rows_of
from joulelab.data.chat.encoding import (
    DocumentStore,
    EncodedDocument,
    encode_rows,
    encoding_identity,
    pad_id_of,
    vocab_size_of,
    write_documents,
)
from joulelab.data.chat.templates import ChatTemplate, ConversationRefused, template_of
from joulelab.errors import ConfigError


@dataclass(frozen=True)
class ChatDataSettings:
    source: str
    """sample:reviews, a file or folder of JSON lines, JSON or Parquet, or a hub id."""
    subset: str = "all"
    """The configuration of a hub dataset; short, long or all of sample:reviews."""
    split: Literal["train", "validation", "test"] | None = "train"
    """Our own, by the hash of each question; None is everything."""
    form: Literal["text", "chat"] = "text"
    """Of sample:reviews: plain texts, or questions with answers."""
    limit: int | None = None
    """At most so many rows, taken by hash."""
    strip_think_blocks: bool = False
    """Take the thoughts out of answers."""
    code_only: bool = False
    """Keep the last block of code of an answer."""
    only_correct: bool = True
    """Where a set has verdicts on its answers, teach only the right ones."""
    last_answer_only: bool = False
    """Train on the last answer of a conversation alone, for chat templates that rewrite earlier turns."""
    max_tokens: int | None = None
    """Cut documents there."""


PRESETS: dict[str, ChatDataSettings] = {
    "tulu-3": ChatDataSettings("allenai/tulu-3-sft-mixture"),
    "codeforces-cots": ChatDataSettings(
        "open-r1/codeforces-cots", "solutions_py_decontaminated", strip_think_blocks=True, code_only=True
    ),
    "openr1-math": ChatDataSettings("open-r1/OpenR1-Math-220k", "default"),
    "reviews": ChatDataSettings("sample:reviews", "short"),
    "reviews-chat": ChatDataSettings("sample:reviews", "short", form="chat"),
}


def preset(name: str, **changes: Any) -> ChatDataSettings:
    """`preset("tulu-3", source="tulu.parquet", limit=1000)`: what is not named stays as published.

    A local file holds one configuration, so naming one as the source sets the subset aside.
    """
    if name not in PRESETS:
        raise lookup.unknown("dataset", name, PRESETS)
    known = ChatDataSettings.__dataclass_fields__
    for key in changes:
        if key not in known:
            guess = lookup.nearest(key, known)
            raise ConfigError(
                f"the data have no setting '{key}'" + (f"; did you mean '{guess}'?" if guess else ""),
                f"the settings are {', '.join(known)}",
            )
    if "source" in changes and "subset" not in changes:
        changes["subset"] = "all"
    return replace(PRESETS[name], **changes)


# From a source of rows to a store of encoded documents, with a manifest that says what became of every row.


_ROWS_PER_CALL = 250  # enough for a fast tokenizer to use its threads, little enough to keep memory flat


def prepare_tulu3(folder: Path, tokenizer: Any, tokenizer_name: str, **changes: Any) -> DocumentStore:
    """allenai/tulu-3-sft-mixture: conversations of many kinds, some of several turns."""
    return prepare_store(folder, tokenizer, tokenizer_name, preset("tulu-3", **changes))


def prepare_codeforces_cots(folder: Path, tokenizer: Any, tokenizer_name: str, **changes: Any) -> DocumentStore:
    """open-r1/codeforces-cots: problems with programs; as preset the program alone is taught, without the thoughts."""
    return prepare_store(folder, tokenizer, tokenizer_name, preset("codeforces-cots", **changes))


def prepare_openr1_math(folder: Path, tokenizer: Any, tokenizer_name: str, **changes: Any) -> DocumentStore:
    """open-r1/OpenR1-Math-220k: problems with the first complete and correct answer of several, thoughts included."""
    return prepare_store(folder, tokenizer, tokenizer_name, preset("openr1-math", **changes))


def prepare_store(folder: Path, tokenizer: Any, tokenizer_name: str, settings: ChatDataSettings) -> DocumentStore:
    dropped: Counter[str] = Counter()
    return write_rows(
        folder,
        tokenizer,
        settings_rows(settings, dropped),
        tokenizer_name=tokenizer_name,
        max_tokens=settings.max_tokens,
        last_answer_only=settings.last_answer_only,
        dropped=dropped,
        notes={"settings": asdict(settings)},
    )


def settings_rows(settings: ChatDataSettings, dropped: Counter[str] | None = None) -> Iterator[Row]:
    """The cleaned rows, as prompts for a teacher too; what was dropped and why is counted."""
    counts = dropped if dropped is not None else Counter()
    rows = rows_of(
        settings.source,
        split=settings.split,
        subset=settings.subset,
        form=settings.form,
        limit=settings.limit,
        only_correct=settings.only_correct,
        dropped=counts,
    )
    return cleaned(rows, counts, strip_thoughts=settings.strip_think_blocks, only_code=settings.code_only)


def write_rows(
    folder: Path,
    tokenizer: Any,
    rows: Iterable[Row],
    *,
    tokenizer_name: str,
    max_tokens: int | None = None,
    template: str | None = None,
    last_answer_only: bool = False,
    dropped: Counter[str] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> DocumentStore:
    """Encode rows of any origin; `template` is a chat template in place of the tokenizer's own."""
    chat_template = template_of(tokenizer, template, last_answer_only)
    tally: Counter[str] = Counter()
    lost = dropped if dropped is not None else Counter()
    told = {
        **(notes or {}),
        **encoding_identity(tokenizer, chat_template),
        "template": chat_template.origin,
        "max_tokens": max_tokens,
        "rows": tally,
        "dropped": lost,
    }
    return write_documents(
        folder,
        _encoded(rows, _Encoder(tokenizer, chat_template, lost), max_tokens, tally),
        vocab_size=vocab_size_of(tokenizer),
        pad_id=pad_id_of(tokenizer),
        tokenizer=tokenizer_name,
        notes=told,
    )


def _encoded(
    rows: Iterable[Row], encoder: _Encoder, max_tokens: int | None, tally: Counter[str]
) -> Iterator[EncodedDocument]:
    left = iter(rows)
    while block := list(islice(left, _ROWS_PER_CALL)):
        for row, whole in encoder.encode(block):
            document = whole.cut(max_tokens)
            tally["texts" if isinstance(row, str) else "conversations"] += 1
            tally["cut at max_tokens"] += len(document) < len(whole)
            yield document
    if encoder.refusal is not None and not tally:
        raise encoder.refusal
    if encoder.dropped and not tally:
        what = ", ".join(f"{why}: {count:,}" for why, count in encoder.dropped.items())
        raise ConfigError(f"no row is left to train on ({what})", "rows need an assistant's answer, or a text")


class _Encoder:
    """Counts what the template refuses and goes on: a set of a million has a few odd conversations."""

    def __init__(self, tokenizer: Any, template: ChatTemplate, dropped: Counter[str]) -> None:
        self._tokenizer, self._template, self.dropped = tokenizer, template, dropped
        self.refusal: ConversationRefused | None = None

    def encode(self, block: list[Row]) -> list[tuple[Row, EncodedDocument]]:
        try:
            return list(zip(block, encode_rows(self._tokenizer, block, self._template), strict=True))
        except ConversationRefused as refusal:
            if len(block) > 1:
                return [found for row in block for found in self.encode([row])]
            self.refusal = refusal
            self.dropped["the chat template refused it"] += 1
            return []
