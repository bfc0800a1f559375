"""The protobuf wire format, as far as arrays need it.

Arrays go between NumPy and the wire here, without one Python object per element. protobuf does everything else.
"""

from __future__ import annotations

from typing import Iterator, Tuple, Union

import numpy as np

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5

Bytes = Union[bytes, memoryview]


class WireError(ValueError):
    """The bytes are not a protobuf message."""


def varint(value: int) -> bytes:
    """One number, 0 or more, as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def head(number: int, size: int) -> bytes:
    """Tag and length of a length-delimited field: what comes before its bytes."""
    return varint(number << 3 | _LEN) + varint(size)


def _read_varint(data: memoryview, at: int) -> Tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise WireError("a varint is cut off or too long")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def fields(data: Bytes) -> Iterator[Tuple[int, memoryview, memoryview]]:
    """The top-level fields in order: number, value, and the whole field with its tag. Views of `data`, not copies."""
    view = memoryview(data)
    at = 0
    while at < len(view):
        start = at
        tag, at = _read_varint(view, at)
        kind = tag & 7
        if kind == _LEN:
            size, at = _read_varint(view, at)
            end = at + size
        elif kind == _VARINT:
            _, end = _read_varint(view, at)
        elif kind in (_I32, _I64):
            end = at + (4 if kind == _I32 else 8)
        else:
            raise WireError(f"wire type: got {kind}, allowed 0, 1, 2, 5")
        if end > len(view):
            raise WireError(f"a field of {end - at} bytes is cut off after {len(view) - at}")
        yield tag >> 3, view[at:end], view[start:end]
        at = end


def pack_varints(values: np.ndarray) -> bytes:
    """Integers, one varint each. Negative ones take ten bytes, as protobuf has it."""
    wide = np.ascontiguousarray(values, np.int64).view(np.uint64)
    if wide.size == 0 or int(wide.max()) < 0x80:
        return wide.astype(np.uint8).tobytes()
    septets = (wide[:, None] >> np.arange(0, 70, 7, dtype=np.uint64)) & np.uint64(0x7F)
    last = 9 - np.argmax(septets[:, ::-1] != 0, axis=1)  # of zero: 9, mended below
    last[wide == 0] = 0
    columns = np.arange(10)
    out = septets.astype(np.uint8) | np.where(columns < last[:, None], np.uint8(0x80), np.uint8(0))
    packed: bytes = out[columns <= last[:, None]].tobytes()
    return packed


def unpack_varints(data: memoryview) -> np.ndarray:
    """The varints of a packed field, as int64."""
    octets = np.frombuffer(data, np.uint8)
    if octets.size == 0 or int(octets.max()) < 0x80:
        return octets.astype(np.int64)
    if octets[-1] >= 0x80:
        raise WireError("a varint is cut off")
    last = np.flatnonzero(octets < 0x80)
    first = np.concatenate(([0], last[:-1] + 1))
    place = np.arange(octets.size) - np.repeat(first, last - first + 1)
    if int(place.max()) > 9:
        raise WireError("a varint is too long")
    parts = (octets & np.uint8(0x7F)).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(parts, first).view(np.int64)
