"""Encoded documents in a store on disk: token ids, and one bit per token: whether it is a target of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from joulelab.data.chat.documents import EncodedDocument
from joulelab.data.store import BITS, Column, RaggedStore, store_writer, token_column
from joulelab.errors import ConfigError


class DocumentStore(RaggedStore):
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
                "check that the conversations have assistant turns and that max_tokens does not cut all of them off",
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
