"""A document as the trainer sees it: token ids, and which of them are to be learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from joulelab.errors import ConfigError


@dataclass(frozen=True, eq=False)
class EncodedDocument:
    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]
    """Which ids are targets of the loss. The first never is: nothing stands before it to predict it from."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained_count(self) -> int:
        return int(np.count_nonzero(self.trained[1:]))

    def cut(self, max_tokens: int | None) -> EncodedDocument:
        """The first tokens; an answer that is cut has no end of turn, and none is made up."""
        if max_tokens is not None and max_tokens < 2:
            raise ConfigError(f"max_tokens is {max_tokens}; a token needs one before it", "allow 2 or more")
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
    """A few documents in memory, for a test or a held-out set."""

    documents: Sequence[EncodedDocument]
    pad_id: int = 0

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(document) for document in self.documents], dtype=np.int64)

    def document(self, number: int) -> EncodedDocument:
        return self.documents[number]
