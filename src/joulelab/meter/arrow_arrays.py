"""Arrow arrays built from their buffers.

`pyarrow.array` looks whether it was given something of pandas, and imports pandas to find out: half a second, and tens
of megabytes in the measured program, for nothing. These few types are simple enough to lay out by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np


def array_of(values: Sequence[Any], kind: Any) -> Any:
    """Values, None where there is none, as an Arrow array of int64, float64, bool, string, list, map or struct.

    A map is given as a list of pairs, a struct as a dict.
    """
    import pyarrow as pa

    known = np.fromiter((value is not None for value in values), bool, len(values))
    buffers, children = [None if known.all() else _bits(known)], []
    if pa.types.is_string(kind):
        encoded = [b"" if value is None else value.encode() for value in values]
        buffers += [_offsets(encoded), pa.py_buffer(b"".join(encoded))]
    elif pa.types.is_boolean(kind):
        buffers.append(_bits(np.fromiter(map(bool, values), bool, len(values))))
    elif pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        children = [array_of([value and value[field.name] for value in values], field.type) for field in fields]
    elif pa.types.is_map(kind):
        pairs = list(chain.from_iterable(value or () for value in values))
        entries = pa.struct([pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)])
        children = [array_of([{"key": key, "value": item} for key, item in pairs], entries)]
        buffers.append(_offsets([value or () for value in values]))
    elif pa.types.is_list(kind):
        children = [array_of(list(chain.from_iterable(value or () for value in values)), kind.value_type)]
        buffers.append(_offsets([value or () for value in values]))
    else:
        width = np.int64 if pa.types.is_integer(kind) else np.float64
        buffers.append(pa.py_buffer(np.array([0 if value is None else value for value in values], width)))
    missing = len(values) - int(known.sum())
    return pa.Array.from_buffers(kind, len(values), buffers, missing, children=children)


def indices(rows: Sequence[int] | np.ndarray[Any, Any]) -> Any:
    """Row numbers, for `take`."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(np.ascontiguousarray(rows, np.int64))])


def table_of(rows: Sequence[dict[str, Any]], schema: Any) -> Any:
    """Rows as a table; what a row does not have is missing there."""
    import pyarrow as pa

    columns = [array_of([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def numbers_in(array: Any, width: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The numbers of a primitive array, 0 where there is none, and where there is one."""
    if not len(array):
        return np.zeros(0, width), np.zeros(0, bool)
    begin, end = array.offset, array.offset + len(array)
    valid, values = array.buffers()
    numbers = np.frombuffer(values, width, count=end)[begin:]
    if valid is None:
        return numbers, np.ones(len(array), bool)
    known = np.unpackbits(np.frombuffer(valid, np.uint8), count=end, bitorder="little")[begin:].astype(bool)
    return np.where(known, numbers, 0), known


def _bits(flags: np.ndarray[Any, Any]) -> Any:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def _offsets(pieces: Sequence[Any]) -> Any:
    import pyarrow as pa

    return pa.py_buffer(np.fromiter(accumulate(map(len, pieces), initial=0), np.int32, len(pieces) + 1))
