"""Arrow columns from Python values, through numpy buffers.

`pyarrow.array` imports pandas, when that is installed, to see whether it was given a Series: 50 MB and 0.4 s in every
process that writes one file. Here values go straight into buffers; the result equals that of `pyarrow.array`.
"""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

_FIXED_WIDTH = {pa.int32(): np.int32, pa.int64(): np.int64, pa.float64(): np.float64}


def column(values: Sequence[Any], kind: pa.DataType) -> "pa.Array[Any]":
    """Return an array of `kind`; None becomes null.

    Raises:
        ValueError: A decimal has more digits than `kind` keeps, or a number or the whole column is too large.
    """
    num_values = len(values)
    validity = None
    if any(value is None for value in values):
        validity = _bits([value is not None for value in values])
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        parts = [value.encode("utf-8") if isinstance(value, str) else value or b"" for value in values]
        buffers = [validity, _offsets([len(part) for part in parts]), pa.py_buffer(b"".join(parts))]
        return pa.Array.from_buffers(kind, num_values, buffers)
    if isinstance(kind, pa.ListType) and kind.value_type in _FIXED_WIDTH:
        lists = [value if value is not None else () for value in values]
        items = column([item for part in lists for item in part], kind.value_type)
        buffers = [validity, _offsets([len(part) for part in lists])]
        return pa.Array.from_buffers(kind, num_values, buffers, children=[items])
    if pa.types.is_boolean(kind):
        return pa.Array.from_buffers(kind, num_values, [validity, _bits([bool(value) for value in values])])
    if isinstance(kind, pa.Decimal128Type):
        numbers = b"".join(_scaled(Decimal(value or 0), kind) for value in values)
        return pa.Array.from_buffers(kind, num_values, [validity, pa.py_buffer(numbers)])
    if kind in _FIXED_WIDTH:
        try:
            numbers = np.array([0 if value is None else value for value in values], dtype=_FIXED_WIDTH[kind])
        except OverflowError as exc:
            raise ValueError(f"a number does not fit {kind}: {exc}") from exc
        return pa.Array.from_buffers(kind, num_values, [validity, pa.py_buffer(numbers)])
    return pa.array(values, type=kind)


def _bits(flags: Sequence[bool]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.array(flags, dtype=np.bool_), bitorder="little"))


def _offsets(lengths: Sequence[int]) -> pa.Buffer:
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    if ends[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{ends[-1]} bytes or items in one column chunk, more than an Arrow array of this kind holds")
    return pa.py_buffer(ends.astype(np.int32))


def _scaled(value: Decimal, kind: "pa.Decimal128Type[Any, Any]") -> bytes:
    scaled = value.scaleb(kind.scale)
    number = int(scaled)
    if number != scaled or abs(number) >= 10**kind.precision:
        raise ValueError(f"{value} does not fit decimal({kind.precision}, {kind.scale}) exactly")
    return number.to_bytes(16, "little", signed=True)
