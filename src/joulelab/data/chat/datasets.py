"""Published chat datasets by short name, and preparing a document store from any source of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
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
from joulelab.data.splits import USUAL_SHARES, HashShares
from joulelab.data.text import ColumnChoice
from joulelab.errors import ConfigError


@dataclass(frozen=True)
class ChatDataSettings:
    source: str
    """sample:reviews, a file or folder of JSON lines, JSON or Parquet, or a hub id."""
    subset: str = "all"
    """The configuration of a hub dataset; short, long or all of sample:reviews."""
    split: Literal["train", "validation", "test"] | None = "train"
    """Split by the hash of each question; None uses all rows."""
    form: Literal["text", "chat"] = "text"
    """For sample:reviews: plain texts, or questions with answers."""
    limit: int | float | None = None
    """Maximum number of rows, selected by hash; a fraction is a share of them."""
    strip_think_blocks: bool = False
    """Remove reasoning from answers."""
    code_only: bool = False
    """Keep only the last code block of an answer."""
    only_correct: bool = True
    """If the dataset has verdicts on its answers, use only correct ones."""
    last_answer_only: bool = False
    """Train only on the last answer of a conversation, for chat templates that rewrite earlier turns."""
    max_tokens: int | None = None
    """Truncate documents to this length."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the user names for a split."""
    text_column: str | int | None = None
    """Column with the text, if it has none of the usual names."""
    header: bool | None = None
    """Whether a CSV file starts with column names."""
    shares: HashShares = USUAL_SHARES
    """Shares held out by hash, of data without a test split."""


PRESETS: dict[str, ChatDataSettings] = {
    # conversations of many kinds, some with several turns
    "tulu-3": ChatDataSettings("allenai/tulu-3-sft-mixture"),
    # programming problems; of an answer only the program is kept
    "codeforces-cots": ChatDataSettings(
        "open-r1/codeforces-cots", "solutions_py_decontaminated", strip_think_blocks=True, code_only=True
    ),
    # problems with the first complete and correct answer, reasoning included
    "openr1-math": ChatDataSettings("open-r1/OpenR1-Math-220k", "default"),
    "reviews": ChatDataSettings("sample:reviews", "short"),
    "reviews-chat": ChatDataSettings("sample:reviews", "short", form="chat"),
}


def preset(name: str, **changes: Any) -> ChatDataSettings:
    """`preset("tulu-3", source="tulu.parquet", limit=1000)`: settings that are not named keep their published values.

    A local file has one configuration, so a changed source resets the subset.
    """
    if name not in PRESETS:
        raise lookup.unknown("dataset", name, PRESETS)
    known = ChatDataSettings.__dataclass_fields__
    for key in changes:
        if key not in known:
            guess = lookup.nearest(key, known)
            raise ConfigError(
                f"unknown data setting '{key}'" + (f"; did you mean '{guess}'?" if guess else ""),
                f"expected one of {', '.join(known)}",
            )
    if "source" in changes and "subset" not in changes:
        changes["subset"] = "all"
    return replace(PRESETS[name], **changes)


_ROWS_PER_CALL = 250  # enough for a fast tokenizer to use its threads, little enough to keep memory flat


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
    """The cleaned rows, also used as prompts for a teacher; `dropped` counts dropped rows by reason."""
    counts = dropped if dropped is not None else Counter()
    rows = rows_of(
        settings.source,
        split=settings.split,
        subset=settings.subset,
        form=settings.form,
        limit=settings.limit,
        only_correct=settings.only_correct,
        dropped=counts,
        files=settings.files,
        choice=ColumnChoice(text=settings.text_column, header=settings.header, labeled=False),
        shares=settings.shares,
    )
    return cleaned(rows, counts, strip_reasoning=settings.strip_think_blocks, only_code=settings.code_only)


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
    """Encode rows into a store; `template` replaces the tokenizer's chat template."""
    chat_template = template_of(tokenizer, template, last_answer_only)
    tally: Counter[str] = Counter()
    lost = dropped if dropped is not None else Counter()
    attributes = {
        **(notes or {}),
        **encoding_identity(tokenizer, chat_template),
        "template": chat_template.origin,
        "max_tokens": max_tokens,
        "rows": tally,
        "dropped": lost,
    }
    return write_documents(
        folder,
        (document for _, document in encoded_rows(tokenizer, chat_template, rows, max_tokens, lost, tally)),
        vocab_size=vocab_size_of(tokenizer),
        pad_id=pad_id_of(tokenizer),
        tokenizer=tokenizer_name,
        notes=attributes,
    )


def encoded_rows(
    tokenizer: Any,
    template: ChatTemplate,
    rows: Iterable[Row],
    max_tokens: int | None,
    dropped: Counter[str],
    tally: Counter[str],
) -> Iterator[tuple[Row, EncodedDocument]]:
    """Rows that the template accepts, with their documents; `dropped` and `tally` count the others and these."""
    encoder, left = _Encoder(tokenizer, template, dropped), iter(rows)
    while block := list(islice(left, _ROWS_PER_CALL)):
        for row, whole in encoder.encode(block):
            document = whole.cut(max_tokens)
            tally["texts" if isinstance(row, str) else "conversations"] += 1
            tally["cut at max_tokens"] += len(document) < len(whole)
            yield row, document
    if encoder.refusal is not None and not tally:
        raise encoder.refusal
    if encoder.dropped and not tally:
        what = ", ".join(f"{why}: {count:,}" for why, count in encoder.dropped.items())
        raise ConfigError(f"no row to train on ({what})", "a row needs an assistant answer or a text")


class _Encoder:
    """Drops and counts conversations that the template refuses: a large dataset has a few."""

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
