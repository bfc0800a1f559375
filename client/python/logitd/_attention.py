"""A tensor of an attention call as the messages of a stream, and its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from logitd import _arrays, _wire, results
from logitd._messages import Codec
from logitd._rows import add_timings, timings_of
from logitd.arena import Arena, CudaArena, Place
from logitd.errors import Internal, InvalidArgument
from logitd.options import Options
from logitd.params import Float

_FORWARD = Codec("AttentionSoftmaxRequest"), Codec("AttentionSoftmaxResponse")
_BACKWARD = Codec("AttentionSoftmaxBackwardRequest"), Codec("AttentionSoftmaxBackwardResponse")
_MASK_KINDS = {"bool": 1, "additive": 2}
_ANSWER_ROW_BYTES = 12  # status and logsumexp of a row of an answer, as the server counts them
_FIELD_HEAD_BYTES = 4 * 8  # tags and lengths of a message's large fields, at most
_MAX_PAYLOAD = 2**31 - 1 - (64 << 20)


@dataclass(frozen=True)
class Mask:
    """[B or 1, H or 1, Sq or 1, Sk]."""

    kind: str
    tensor: _arrays.Tensor
    shape: Tuple[int, int, int, int]
    row_bytes: int


def shape_of(name: str, shape: Sequence[int]) -> Tuple[int, int, int, int]:
    """[B, H, Sq, Sk] of an array with these dimensions, of which the leading ones may be missing."""
    if not 2 <= len(shape) <= 4 or min(shape) < 1:
        raise InvalidArgument(
            f"{name}: got shape {list(shape)}, allowed [queries, keys], [heads, queries, keys] or "
            "[batch, heads, queries, keys], 1 or more of each"
        )
    batch, heads, queries, keys = (1,) * (4 - len(shape)) + tuple(shape)
    return batch, heads, queries, keys


def mask_of(value: Any, full: Tuple[int, int, int, int], dtype: Optional[str]) -> Mask:
    """bool: True masks a key. Floats: added after the scale."""
    array = _arrays.as_numpy("mask", value, bits=True)
    if array.dtype.kind in "iu" and array.dtype not in (np.uint16, np.int16):  # these may be the bits of bfloat16
        raise InvalidArgument(f"mask: got an array of {array.dtype}, allowed bool, float32, float16 and bfloat16")
    kind = "bool" if array.dtype == np.bool_ else "additive"
    given = array.shape
    shape = (1,) * (4 - len(given)) + given
    if len(shape) != 4 or shape[3] != full[3] or any(s not in (1, f) for s, f in zip(shape, full)):
        raise InvalidArgument(
            f"mask: got shape {list(given)}, allowed [{full[0]} or 1, {full[1]} or 1, {full[2]} or 1, "
            f"{full[3]}]; leading ones may be left out"
        )
    if kind == "bool":
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        tensor = _arrays.Tensor(raw, "bool", given, False)
    else:
        tensor = _arrays.tensor("mask", value, dtype)
    batch, heads, queries, keys = shape
    return Mask(
        kind, tensor, (batch, heads, queries, keys), keys * (1 if kind == "bool" else _arrays.SIZES[tensor.dtype])
    )


def window_of(window: Any, causal: bool) -> Tuple[Optional[int], Optional[int]]:
    """(left, right): how many keys before and after its own a query sees; None: no bound."""
    pair = (None, None) if window is None else window
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise InvalidArgument(f"window: got {window!r:.80}, allowed (left, right), each None or a number of keys")
    left, right = (None if side is None else _arrays.one("window", side, np.int64) for side in pair)
    for side in (left, right):
        if side is not None and side < -1:
            raise InvalidArgument(f"window: got {side} keys, allowed 0 or more, or None (or -1) for no bound")
    if not _arrays.one("causal", causal, np.bool_):
        return left, right
    if right not in (None, -1, 0):
        raise InvalidArgument(f"window: got {right} keys to the right with causal=True, allowed None or 0")
    return left, 0


class AttentionMessages:
    """Cuts a tensor into messages of whole rows, and puts the answers into one array."""

    def __init__(
        self,
        limits: results.Limits,
        options: Options,
        *,
        payload: _arrays.Tensor,
        scale: Float,
        window: Tuple[Optional[int], Optional[int]],
        sinks: Any,
        out_dtype: Optional[str],
        out: Any,
        mask: Optional[Mask] = None,
        want_logsumexp: bool = False,
        d_probs: Optional[_arrays.Tensor] = None,
        logsumexp: Any = None,
        arena: Optional[Arena] = None,
    ) -> None:
        self.backward = d_probs is not None
        self._request, self._response = _BACKWARD if self.backward else _FORWARD
        self._payload, self._d_probs, self._mask = payload, d_probs, mask
        self._shape = shape_of("probs" if self.backward else "scores", payload.shape)
        self._want_logsumexp = _arrays.one("want_logsumexp", want_logsumexp, np.bool_)
        self._out_dtype = payload.dtype
        if out_dtype is not None:
            self._out_dtype = _arrays.check_dtype("out_dtype", out_dtype)
        self._sinks = None if sinks is None else _arrays.numbers("sinks", sinks, np.dtype("<f4")).reshape(-1)
        self._logsumexp = None
        if logsumexp is not None:
            self._logsumexp = _arrays.numbers("logsumexp", logsumexp, np.dtype("<f4")).reshape(-1)
        self._check_sizes()
        self._fields: Dict[str, Any] = {
            "dtype": _arrays.DTYPES[payload.dtype],
            "scale": _arrays.one("scale", scale, np.float32),
            "window_left": window[0],
            "window_right": window[1],
            "out_dtype": _arrays.DTYPES[self._out_dtype],
            "sinks": self._sinks,
            **dict(zip(("batch", "heads", "queries", "keys"), self._shape)),
        }
        if not self.backward:
            self._fields["want_logsumexp"] = self._want_logsumexp
        if mask is not None:
            self._fields.update(
                mask_kind=_MASK_KINDS[mask.kind],
                mask_shape=np.array(mask.shape),
                mask_dtype=_arrays.DTYPES.get(mask.tensor.dtype, 0),
            )
        self._chunks = self._plan(limits, options)
        self._out = out
        self._into = None if out is None else self._check_out(out)
        self._places: Dict[str, Tuple[Place, int]] = {}  # of arrays in the arena, with the bytes of a row
        if isinstance(arena, CudaArena):
            raise InvalidArgument("arena: got one of a GPU, allowed one of the host: attention takes arrays of the host")
        _arrays.instance("arena", arena, (Arena, type(None)), "an Arena")
        if arena is not None:
            self._place(arena)
        self._answer: Any = out
        self._parts: List[Tuple[Any, Dict[str, np.ndarray]]] = []

    @property
    def _rows(self) -> int:
        return self._shape[0] * self._shape[1] * self._shape[2]

    @property
    def count(self) -> int:
        return len(self._chunks)

    def _check_sizes(self) -> None:
        """What is cut must have the right size. The server checks the rest."""
        if self._d_probs is not None:
            if self._d_probs.shape != self._payload.shape or self._d_probs.dtype != self._payload.dtype:
                raise InvalidArgument(
                    f"d_probs: got {list(self._d_probs.shape)} of {self._d_probs.dtype}, allowed the shape and type of "
                    f"probs: {list(self._payload.shape)} of {self._payload.dtype}"
                )
            wanted = self._rows if self._sinks is not None and self._sinks.size else 0
            got = 0 if self._logsumexp is None else self._logsumexp.size
            if got != wanted:
                raise InvalidArgument(
                    f"logsumexp: got {got} values, allowed {wanted}: one per row with sinks, else none"
                )

    def _place(self, arena: Arena) -> None:
        """Finds the input in the arena, and the answer where `out` lies there too."""
        inputs = [("shared", "probs" if self.backward else "scores", self._payload)]
        if self._d_probs is not None:
            inputs.append(("shared_d_probs", "d_probs", self._d_probs))
        row = self._row(self._payload.dtype)
        for field, name, tensor in inputs:
            self._places[field] = (arena.place(name, tensor.data.reshape(-1, row)), row)
        if self._into is None or not arena.overlaps(self._into):
            return
        for _, name, tensor in inputs:
            if np.may_share_memory(tensor.data, self._into):
                raise InvalidArgument(f"out: got an array that overlaps {name}, allowed one apart from it")
        row = self._row(self._out_dtype)
        self._places["shared_output"] = (arena.place("out", self._into.reshape(-1, row)), row)

    def _check_out(self, out: Any) -> np.ndarray:
        name = "d_scores" if self.backward else "probs"
        words = getattr(out, "dtype", None) == np.uint16 and self._out_dtype == "bf16"
        array, dtype = _arrays.floats("out", out, "bf16" if words else None)
        if array.shape != self._payload.shape or dtype != self._out_dtype:
            raise InvalidArgument(
                f"out: got {list(array.shape)} of {dtype}, allowed {list(self._payload.shape)} "
                f"of {self._out_dtype} ({name})"
            )
        if not isinstance(out, np.ndarray) and not _arrays.is_torch(out):
            raise InvalidArgument(f"out: got a {type(out).__name__}, allowed a NumPy array or a torch tensor")
        if not (array.flags.c_contiguous and array.flags.writeable) or (
            _arrays.is_torch(out) and str(out.device) != "cpu"
        ):
            raise InvalidArgument(
                "out: got an array that cannot be written in order, allowed one that is contiguous, "
                "writable and on the host"
            )
        return array.reshape(-1).view(np.uint8)

    # Cutting.

    def _plan(self, limits: results.Limits, options: Options) -> List[Tuple[int, int]]:
        sinks = 0 if self._sinks is None else self._sinks.size
        room = min(_MAX_PAYLOAD, limits.max_request_bytes or _MAX_PAYLOAD) - 4 * sinks
        if options.max_message_bytes > 0:
            room = min(room, options.max_message_bytes - len(self._request.encode(self._fields)) - _FIELD_HEAD_BYTES)
        rows = self._rows
        if limits.max_answer_bytes > 0:
            # The server writes an answer of the input's type over the input; it does not count.
            answer_row = _ANSWER_ROW_BYTES + (
                0 if self._out_dtype == self._payload.dtype else self._row(self._out_dtype)
            )
            rows = min(rows, (limits.max_answer_bytes - 8 * sinks) // answer_row)
        try:
            return self._cut(min(room, options.attention_message_bytes), rows)
        except InvalidArgument:
            return self._cut(room, rows)  # one row may be larger than the size that the options ask for

    def _row(self, dtype: str) -> int:
        return self._shape[3] * _arrays.SIZES[dtype]

    def _row_bytes(self) -> int:
        row = self._row(self._payload.dtype)
        return 2 * row + (4 if self._logsumexp is not None else 0) if self.backward else row

    def _cut(self, max_bytes: int, max_rows: int) -> List[Tuple[int, int]]:
        """Cuts at whole heads where several fit, so that a mask that they share is sent once for them."""
        queries, row_bytes, total = self._shape[2], self._row_bytes(), self._rows
        mask_row = 0 if self._mask is None else self._mask.row_bytes
        per_query = self._mask is not None and self._mask.shape[2] > 1
        chunks: List[Tuple[int, int]] = []
        row = 0
        while row < total:
            of_head = queries - row % queries
            rows = min(total - row, max_rows, max_bytes // row_bytes)
            if of_head < rows < total - row:
                rows -= (rows - of_head) % queries
            if rows > of_head and self._bytes(row, rows) > max_bytes:
                rows = of_head
            if rows > 0 and self._bytes(row, rows) > max_bytes:
                rows = max_bytes // (row_bytes + mask_row) if per_query else (max_bytes - mask_row) // row_bytes
            if rows < 1:
                raise InvalidArgument(
                    f"a row of {row_bytes} bytes, with its mask {row_bytes + mask_row}, is more than one "
                    f"message carries: {max(max_bytes, 0)} bytes, or {max_rows} rows of answer"
                )
            chunks.append((row, rows))
            row += rows
        return chunks

    def _bytes(self, first: int, rows: int) -> int:
        mask = 0 if self._mask is None else self._mask_rows(first, rows)[1] * self._mask.row_bytes
        return rows * self._row_bytes() + mask

    def _mask_rows(self, first: int, rows: int) -> Tuple[int, int]:
        """The rows of the mask from the first that the chunk uses to the last: where they begin, and how many."""
        assert self._mask is not None
        _, heads, queries, _ = self._shape
        mask = self._mask.shape
        low, high, row, end = 1 << 62, 0, first, first + rows
        while row < end:
            query = row % queries
            count = min(queries - query, end - row)  # of this head
            item = 0 if mask[0] == 1 else row // queries // heads
            head = 0 if mask[1] == 1 else row // queries % heads
            start = (item * mask[1] + head) * mask[2]
            low = min(low, start + (0 if mask[2] == 1 else query))
            high = max(high, start + (0 if mask[2] == 1 else query + count - 1))
            row += count
        return low, high - low + 1

    # Messages.

    def encode(self) -> Iterator[bytes]:
        row = self._row(self._payload.dtype)
        for i, (first, rows) in enumerate(self._chunks):
            fields: Dict[str, Any] = dict(self._fields) if i == 0 else {}
            part = slice(first * row, (first + rows) * row)
            for name, (place, row_bytes) in self._places.items():
                fields[name] = {"lease": place.lease, "offset": place.offset + first * row_bytes}
            if self._places:
                fields["shared_rows"] = rows
            if self._d_probs is not None:
                if self._logsumexp is not None:
                    fields["logsumexp"] = self._logsumexp[first : first + rows].view(np.uint8)
                if not self._places:
                    fields["probs"], fields["d_probs"] = self._payload.data[part], self._d_probs.data[part]
            else:
                if self._mask is not None:
                    low, count = self._mask_rows(first, rows)
                    size = self._mask.row_bytes
                    fields["mask"] = self._mask.tensor.data[low * size : (low + count) * size]
                if not self._places:
                    fields["scores"] = self._payload.data[part]
            yield self._request.encode(fields)

    def begin(self) -> None:
        """Before the first message of an attempt."""
        self._parts = []

    def take(self, i: int, data: bytes) -> None:
        """Internal: the answer does not fit the message."""
        first, rows = self._chunks[i]
        try:
            arrays, message = self._response.decode(data)
        except _wire.WireError as error:
            raise Internal(f"the server's answer is not a {self._response.name}: {error}", attempts=1) from error
        values = arrays.pop("d_scores" if self.backward else "probs")
        row = self._row(self._out_dtype)
        faults = {arrays[name].size for name in ("fault_rows", "fault_status", "fault_positions")}
        sinks = 0 if self._sinks is None else self._sinks.size
        written = "shared_output" in self._places
        small = ("d_sinks", sinks) if self.backward else ("logsumexp", 4 * rows if self._want_logsumexp else 0)
        if (
            (message.first_row, message.rows, message.dtype, values.size, message.output_bytes)
            != (first, rows, _arrays.DTYPES[self._out_dtype], *((0, rows * row) if written else (rows * row, 0)))
            or len(faults) != 1
            or (arrays[small[0]].size != small[1])
        ):
            raise Internal(
                f"the server's answer does not fit the message: asked for rows {first} to {first + rows - 1} of "
                f"{self._shape[3]} keys in {self._out_dtype}",
                attempts=1,
            )
        self._parts.append((message, arrays))
        if written:
            return
        if self._into is None and self.count == 1 and not self._payload.torch:
            self._answer = _arrays.shaped(values, self._out_dtype, self._payload.shape, self._payload)
            return
        if self._into is None:
            self._answer, self._into = _arrays.empty(self._out_dtype, self._payload.shape, self._payload)
        self._into[first * row : (first + rows) * row] = values

    def finish(self, seconds: float, attempts: int) -> Any:
        """The result. After the last answer."""
        torch = self._payload.torch
        timings = add_timings([timings_of(message.timings) for message, _ in self._parts])
        arrays = [part for _, part in self._parts]
        faults = tuple(
            results.AttentionFault(int(row), results.RowStatus(int(status)), int(position))
            for part in arrays
            for row, status, position in zip(part["fault_rows"], part["fault_status"], part["fault_positions"])
        )
        call: Dict[str, Any] = {
            "timings": timings,
            "round_trip": seconds,
            "attempts": attempts,
            "faults": faults,
            "messages": self.count,
        }
        if self.backward:
            d_sinks = (
                None
                if self._sinks is None
                else _arrays.output(np.sum([part["d_sinks"] for part in arrays], axis=0), torch)
            )
            return results.AttentionBackwardResult(d_scores=self._answer, d_sinks=d_sinks, **call)
        logsumexp = None
        if self._want_logsumexp:
            joined = (
                np.concatenate([part["logsumexp"] for part in arrays]) if self.count > 1 else arrays[0]["logsumexp"]
            )
            logsumexp = _arrays.output(joined.view("<f4").reshape(self._payload.shape[:-1]), torch)
        return results.AttentionResult(probs=self._answer, logsumexp=logsumexp, **call)
