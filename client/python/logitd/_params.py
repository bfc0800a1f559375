"""The parameters of rows as fields of a request, generic over the message type: the proto says which there are."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from logitd import _arrays
from logitd._messages import Codec
from logitd.errors import InvalidArgument
from logitd.results import Ragged

_LIST_COUNTS = {
    "history": "history_count",
    "logit_bias": "logit_bias_count",
    "extra_ids": "extra_count",
    "support_ids": "support_count",
}
_LISTS = {count: name for name, count in _LIST_COUNTS.items()}
_WITH_LISTS = {*_LIST_COUNTS.values(), "logit_bias_ids"}  # set together with a list
_SPREAD = {"seed": ["seed", "seeds"]}  # `seeds` is the client's own: one number, of which seed is made


def names(codec: Codec) -> List[str]:
    """The parameters that a caller may give: fields 16 to 39, those from 50 on and supports, without those that a list
    brings along; and seeds."""
    rows = [f.name for f in codec.fields.values() if 16 <= f.number < 40 or f.number >= 50 or f.name in _LIST_COUNTS]
    fields = [name for name in rows if name not in _WITH_LISTS]
    return [name for field in fields for name in _SPREAD.get(field, [field])]


def spread_seeds(seeds: int, rows: int) -> np.ndarray:
    """[rows] uint64, the first outputs of SplitMix64 that starts at `seeds`; docs/semantics.md has the formula."""
    z = np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seeds)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def lists(name: str, value: Any) -> Tuple[Optional[np.ndarray], np.ndarray]:
    """Token ids as one list for all rows (no counts), or as lists with their counts."""
    if isinstance(value, Ragged):
        return value.counts, _arrays.integers(name, value.values, np.dtype(np.int32))
    if not hasattr(value, "dtype"):
        value = _arrays.sequence(name, value, "a list of token ids, or a list of them per row")
        if not all(isinstance(x, int) or getattr(x, "ndim", None) == 0 for x in value):
            parts = [_arrays.integers(name, part, np.dtype(np.int32)) for part in value]
            for part in parts:
                if part.ndim != 1:
                    got = "one number" if part.ndim == 0 else f"{part.ndim} dimensions"
                    raise InvalidArgument(f"{name}: got {got} for a row, allowed a list of token ids")
            return np.array([part.size for part in parts]), np.concatenate(parts)
    array = _arrays.integers(name, value, np.dtype(np.int32))
    if array.ndim == 2:
        return np.full(array.shape[0], array.shape[1]), array.reshape(-1)
    if array.ndim == 1:
        return None, array
    raise InvalidArgument(f"{name}: got {array.ndim} dimensions, allowed 1 (for all rows) or 2 (a list per row)")


class RowParams:
    """The parameters of a request of `rows` rows, with those of some of its rows on demand.

    vocab: of the rows, where it is known here. InvalidArgument: no such value, or not one per row.
    """

    def __init__(self, codec: Codec, call: str, params: Mapping[str, Any], rows: int, vocab: Optional[int]) -> None:
        self._codec = codec
        self._vocab = vocab
        self._rows: Dict[str, np.ndarray] = {}  # one value, or one per row
        self._lists: Dict[str, Tuple[Optional[np.ndarray], Dict[str, np.ndarray]]] = {}  # by name of the counts
        self._single: Dict[str, Any] = {}
        allowed = names(codec)
        if params.get("seed") is not None and params.get("seeds") is not None:
            raise InvalidArgument("seeds: got a number beside seed, allowed one of them")
        for name, value in params.items():
            if name not in allowed:
                raise TypeError(f"{call}: got an unknown parameter {name!r}, allowed {', '.join(allowed)}")
            if value is not None:
                self._add(name, value, rows)
        if "targets" in params and "targets" not in self._rows:
            raise InvalidArgument(f"targets: got none, allowed {rows} (rows)")
        self._check(rows)

    def _add(self, name: str, value: Any, rows: int) -> None:
        if name == "allowed_tokens":
            self._single[name] = _mask(value, self._vocab)
        elif name == "seeds":
            self._rows["seed"] = spread_seeds(_arrays.one(name, value, self._codec.dtype("seed")), rows)
        elif name == "logit_bias":
            count, ids, biases = _biases(value)
            self._lists["logit_bias_count"] = count, {"logit_bias_ids": ids, "logit_bias": biases}
        elif name in _LIST_COUNTS:
            counts, flat = lists(name, value)
            self._lists[_LIST_COUNTS[name]] = counts, {name: flat}
        elif not self._codec.is_repeated(name):
            self._single[name] = _arrays.one(name, value, self._codec.dtype(name))
        else:
            self._rows[name] = self._row_values(name, value)

    def _row_values(self, name: str, value: Any) -> np.ndarray:
        allowed = self._codec.enum(name)
        if allowed:
            return words(name, value, allowed)
        array = _arrays.numbers(name, value, self._codec.dtype(name))
        if array.ndim > 1:
            raise InvalidArgument(f"{name}: got {array.ndim} dimensions, allowed one value, or one per row")
        return array.reshape(-1)

    def all(self) -> Dict[str, Any]:
        """The fields of the whole request."""
        out: Dict[str, Any] = {**self._single, **self._rows}
        for count_name, (counts, parts) in self._lists.items():
            out.update(parts)
            if counts is not None:
                out[count_name] = counts
        return out

    def _check(self, rows: int) -> None:
        """InvalidArgument: sizes that do not fit the rows, so that cut() cannot be called."""
        for name, array in self._rows.items():
            if name == "targets" and array.size != rows:  # one is not for all
                raise InvalidArgument(f"{name}: got {array.size} values, allowed {rows} (rows)")
            if array.size not in (0, 1, rows):
                allowed = "none or 1" if rows == 1 else f"none, 1 or {rows}"
                raise InvalidArgument(f"{name}: got {array.size} values, allowed {allowed} (rows)")
        for name, (counts, _) in self._lists.items():
            if counts is not None and counts.size not in (1, rows):
                raise InvalidArgument(f"{_LISTS[name]}: got {counts.size} lists, allowed one, or {rows} (rows)")

    def cut(self, first: int, rows: int) -> Dict[str, Any]:
        """The fields for some of the rows."""
        out: Dict[str, Any] = dict(self._single)
        for name, array in self._rows.items():
            out[name] = array if array.size <= 1 else array[first : first + rows]
        for name, (counts, parts) in self._lists.items():
            if counts is None or counts.size == 1:
                out.update(parts)
                continue
            begin, end = int(counts[:first].sum()), int(counts[: first + rows].sum())
            out[name] = counts[first : first + rows]
            out.update({part: array[begin:end] for part, array in parts.items()})
        return out

    def row_bytes(self) -> int:
        """Encoded bytes of a row's values, at most, without its lists."""
        return sum(_value_bytes(array) for array in self._rows.values() if array.size > 1) + 10 * sum(
            counts is not None and counts.size > 1 for counts, _ in self._lists.values()
        )

    def largest(self, name: str) -> int:
        """The largest value of a parameter of numbers; 0 without one."""
        array = self._rows.get(name)
        return 0 if array is None or array.size == 0 else max(0, int(array.max()))

    def longest(self, count_name: str) -> Tuple[int, bool]:
        """Length of the longest list, and whether rows have lists of their own."""
        if count_name not in self._lists:
            return 0, False
        counts, parts = self._lists[count_name]
        if counts is None or counts.size == 1:
            return next(iter(parts.values())).size, False
        return int(counts.max()), True


def _value_bytes(array: np.ndarray) -> int:
    return array.itemsize if array.dtype.kind in "fb" else 10


def words(name: str, value: Any, allowed: Mapping[str, int]) -> np.ndarray:
    """The numbers of one word, or of several."""
    texts = [value] if isinstance(value, str) else _arrays.sequence(name, value, ", ".join(map(repr, allowed)))
    return np.array([allowed[_arrays.choice(name, text, allowed)] for text in texts], np.int32)


def _mask(value: Any, vocab: Optional[int]) -> np.ndarray:
    """[M, V] or [V] of bool as words of 32 bits, least significant first; words (uint32 or int32) stay as they are."""
    array = _arrays.as_numpy("allowed_tokens", value)
    wide, width = ("V", "ceil(V / 32)") if vocab is None else (str(vocab), str(-(-vocab // 32)))
    fits = vocab is None or array.shape[-1:] == ((vocab,) if array.dtype == np.bool_ else (-(-vocab // 32),))
    kind = array.dtype.newbyteorder("=")
    if kind not in (np.bool_, np.uint32, np.int32) or array.ndim not in (1, 2) or not fits:
        raise InvalidArgument(
            f"allowed_tokens: got shape {list(array.shape)} of {array.dtype}, allowed bool [{wide}] or [M, {wide}], or "
            f"words [{width}] or [M, {width}] of uint32 or int32; of numbers that are 0 or 1 make bool first"
        )
    if array.dtype != np.bool_:
        return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    packed = np.packbits(np.atleast_2d(array), axis=1, bitorder="little")
    return np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4))).reshape(-1)


def _biases(value: Any) -> Tuple[Optional[np.ndarray], np.ndarray, np.ndarray]:
    allowed = "a dict of token id to bias, or one per row"
    shared = isinstance(value, Mapping)
    rows = [value] if shared else _arrays.sequence("logit_bias", value, allowed)
    rows = [{} if row is None else row for row in rows]
    for row in rows:
        if not isinstance(row, Mapping):
            raise InvalidArgument(f"logit_bias: got {row!r:.80}, allowed {allowed}")
    ids = _arrays.integers("logit_bias", [token for row in rows for token in row], np.dtype(np.int32))
    biases = _arrays.numbers("logit_bias", [bias for row in rows for bias in row.values()], np.dtype(np.float32))
    if biases.ndim != 1:
        raise InvalidArgument(f"logit_bias: got a bias of {biases.ndim - 1} dimensions, allowed one number")
    return None if shared else np.array([len(row) for row in rows]), ids, biases
