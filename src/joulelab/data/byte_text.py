"""Text as its own bytes: a tokenizer that needs no file, so that a text of the user's trains any model anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from joulelab.data.vocabulary import FIRST_PLAIN

IDS_NEEDED = FIRST_PLAIN + 256


def encode_bytes(texts: Sequence[str]) -> list[NDArray[np.int64]]:
    return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) + FIRST_PLAIN for text in texts]


def decode_bytes(ids: Sequence[int] | NDArray[np.int64]) -> str:
    """What can be read back; special ids are left out."""
    values = np.asarray(ids) - FIRST_PLAIN
    return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes().decode(errors="replace")
