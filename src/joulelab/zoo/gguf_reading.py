"""GGUF files read without the waste of the usual reader: seconds of each load, and joules that teach nobody anything.

Transformers reads the words of a GGUF file through a memory map's own indexing, a slow Python call for each of 150,000
places, and makes the table of tensor names anew for every module of the model. While this is in force, places are taken
from a plain array over the same bytes, and the table is made once.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


@contextmanager
def quick_gguf() -> Iterator[None]:
    """Where the package is not installed nothing is changed, and whoever loads says so."""
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError:
        yield
        return
    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = _over_a_plain_array(reader), cache(name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map


def _over_a_plain_array(reader: Any) -> Any:
    import numpy as np

    class PlainReader(reader):  # type: ignore[misc]
        """The base class assigns its memory map to `data`; a view of it keeps the map open."""

        @property
        def data(self) -> Any:
            return self._bytes

        @data.setter
        def data(self, mapped: Any) -> None:
            self._bytes = mapped.view(np.ndarray)

    return PlainReader
