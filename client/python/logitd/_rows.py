"""Requests of rows (TopK, Sample, Verify, Score, Divergence): their input, and results from answers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from logitd import _arrays, results
from logitd._messages import Codec
from logitd.arena import Arena, CudaArena, Place
from logitd.errors import Internal, InvalidArgument

REQUESTS: Dict[str, Tuple[str, Codec]] = {
    "top_k": ("/logitd.v1.Sampler/TopK", Codec("TopKRequest")),
    "sample": ("/logitd.v1.Sampler/Sample", Codec("SampleRequest")),
    "verify": ("/logitd.v1.Sampler/Verify", Codec("VerifyRequest")),
    "score": ("/logitd.v1.Scorer/Score", Codec("ScoreRequest")),
    "divergence": ("/logitd.v1.Scorer/Divergence", Codec("DivergenceRequest")),
}
ANSWERS: Dict[str, Codec] = {
    "top_k": Codec("TopKResponse"),
    "sample": Codec("SampleResponse"),
    "verify": Codec("VerifyResponse"),
    "score": Codec("ScoreResponse"),
    "divergence": Codec("DivergenceResponse"),
}
_KINDS: Dict[str, Any] = {
    "top_k": results.TopKResult,
    "sample": results.SampleResult,
    "verify": results.VerifyResult,
    "score": results.ScoreResult,
    "divergence": results.DivergenceResult,
}


@dataclass(frozen=True)
class RowInput:
    """Logits [N, V], or hidden states [N, D] for a head."""

    data: Union[np.ndarray, Place]  # uint8, one dimension; or where the rows lie in an arena
    dtype: str  # "f32", "f16" or "bf16"
    torch: bool
    rows: int
    width: int
    head: Optional[str]
    head_version: int = 0  # that it must have; 0: any

    def fields(self, rows: Optional[int] = None) -> Dict[str, Any]:
        """The fields of a message with so many of the rows; None: with all."""
        shape = {"dtype": _arrays.DTYPES[self.dtype], "rows": self.rows if rows is None else rows}
        if self.head is None:
            return {**shape, "vocab": self.width}
        return {**shape, "head": self.head, "hidden_size": self.width, "head_version": self.head_version}

    def payload(self, first: int = 0, rows: Optional[int] = None) -> Dict[str, Any]:
        """The bytes of some of the rows, not copied, or where they lie; None: all from `first` on."""
        if isinstance(self.data, Place):
            stride = self.data.row_stride
            return {
                "shared": {
                    "lease": self.data.lease,
                    "offset": self.data.offset + first * stride,
                    "row_stride": stride,
                }
            }
        end = None if rows is None else (first + rows) * self.row_bytes
        return {"logits" if self.head is None else "hidden": self.data[first * self.row_bytes : end]}

    @property
    def row_bytes(self) -> int:
        return self.width * _arrays.SIZES[self.dtype]

    @property
    def sent_row_bytes(self) -> int:
        """Bytes of a row in a message."""
        return 0 if isinstance(self.data, Place) else self.row_bytes

    @property
    def counted_row_bytes(self) -> int:
        """Bytes of a row as the server counts them for its limits."""
        return self.row_bytes

    def of_versions(self, answer: Any) -> "RowInput":
        """These rows with the demand for the heads that served an answer."""
        return replace(self, head_version=answer.head_version)


@dataclass(frozen=True)
class PairInput(RowInput):
    """Two inputs per row: logits or hidden states, and beside them the reference's."""

    reference: Optional[RowInput] = None

    @property
    def _reference(self) -> RowInput:
        assert self.reference is not None
        return self.reference

    def fields(self, rows: Optional[int] = None) -> Dict[str, Any]:
        other = {name: value for name, value in self._reference.fields().items() if name not in ("rows", "vocab")}
        return {**super().fields(rows), **_of_reference(other)}

    def payload(self, first: int = 0, rows: Optional[int] = None) -> Dict[str, Any]:
        return {**super().payload(first, rows), **_of_reference(self._reference.payload(first, rows))}

    @property
    def sent_row_bytes(self) -> int:
        return super().sent_row_bytes + self._reference.sent_row_bytes

    @property
    def counted_row_bytes(self) -> int:
        return self.row_bytes + -(-self._reference.row_bytes // 16) * 16

    def of_versions(self, answer: Any) -> "RowInput":
        reference = replace(self._reference, head_version=answer.reference_head_version)
        return replace(self, head_version=answer.head_version, reference=reference)


def _of_reference(fields: Mapping[str, Any]) -> Dict[str, Any]:
    return {f"reference_{name}": value for name, value in fields.items()}


def row_input(
    logits: Any,
    hidden: Any = None,
    head: Optional[str] = None,
    dtype: Optional[str] = None,
    arena: Union[Arena, CudaArena, None] = None,
    head_version: Optional[int] = None,
) -> RowInput:
    """InvalidArgument: not exactly one of logits, and hidden with head; an array that is not [N, V] or [V]; or one that
    the arena cannot name."""
    name, value = ("logits", logits) if hidden is None else ("hidden", hidden)
    if value is None or (logits is not None and hidden is not None):
        raise InvalidArgument(
            "input: got "
            + ("none" if value is None else "both logits and hidden")
            + ", allowed logits, or hidden with head"
        )
    if (head is None) != (hidden is None) or not isinstance(head, (str, type(None))):
        raise InvalidArgument(f"head: got {head!r} with {name}, allowed the name of a loaded head, with hidden only")
    version = 0 if head_version is None else int(_arrays.one("head_version", head_version, np.dtype(np.int64)))
    if version != 0 and head is None:
        raise InvalidArgument(f"head_version: got {version} with {name}, allowed with hidden only")
    _arrays.instance("arena", arena, (Arena, CudaArena, type(None)), "an Arena or a CudaArena")
    return _located(name, value, dtype, arena, head, version)


def _located(
    name: str,
    value: Any,
    dtype: Optional[str],
    arena: Union[Arena, CudaArena, None],
    head: Optional[str] = None,
    version: int = 0,
) -> RowInput:
    if isinstance(arena, CudaArena):
        place, found, shape = arena.find(name, value)
        if dtype not in (None, found):
            raise InvalidArgument(f"{name}: got a tensor of {found} with dtype={dtype!r}, allowed dtype={found!r}")
        return RowInput(place, found, True, *_rows_of(name, shape), head, version)
    array, found = _arrays.floats(name, value, dtype)
    rows, width = _rows_of(name, array.shape)
    data = _arrays.as_bytes(array) if arena is None else arena.place(name, array)
    return RowInput(data, found, _arrays.is_torch(value), rows, width, head, version)


HeadPieces = Union[Any, Sequence[Tuple[int, Any]]]
_PARTS = {"weight": 0, "bias": 1, "norm": 2}  # logitd.v1.HeadPart


def head_rows(
    part: str, pieces: HeadPieces, dtype: Optional[str], arena: Union[Arena, CudaArena, None]
) -> List[Dict[str, Any]]:
    """A part of a head as HeadRows: one array for its first rows, or pairs of a first row and an array.

    InvalidArgument: no such pairs, or an array that the arena cannot name.
    """
    if arena is None:
        raise InvalidArgument(f"{part}: got arrays without an arena, allowed with the arena in which they lie")
    _arrays.instance("arena", arena, (Arena, CudaArena), "an Arena or a CudaArena")
    pairs = pieces if isinstance(pieces, (list, tuple)) else [(0, pieces)]
    out = []
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise InvalidArgument(
                f"{part}: got a list with {pair!r:.80}, allowed an array, or pairs of a first row and an array"
            )
        first, value = _arrays.whole(f"{part}, a first row", pair[0], 0), pair[1]
        rows = _located(part, value, dtype if part == "weight" else None, arena)
        assert isinstance(rows.data, Place)
        place = {"lease": rows.data.lease, "offset": rows.data.offset, "row_stride": rows.data.row_stride}
        count, width = rows.rows, rows.width
        if part == "bias":  # a row for each token
            if count != 1:
                raise InvalidArgument(f"bias: got {count} rows, allowed one dimension")
            count, width, place["row_stride"] = width, 1, 0
        out.append(
            {
                "shared": place,
                "part": _PARTS[part],
                "dtype": _arrays.DTYPES[rows.dtype],
                "width": width,
                "first_row": first,
                "rows": count,
            }
        )
    return out


def _rows_of(name: str, shape: Tuple[int, ...]) -> Tuple[int, int]:
    """Rows, and the width of one."""
    if len(shape) not in (1, 2):
        raise InvalidArgument(f"{name}: got shape {list(shape)}, allowed [rows, width], or [width] for one row")
    rows, width = (1, *shape)[-2:]
    if rows == 0 or width == 0:
        raise InvalidArgument(
            f"rows: got {rows} of {width} values ({name} of shape {list(shape)}), allowed 1 or more of each"
        )
    return rows, width


def result_of(
    kind: str, arrays: Mapping[str, np.ndarray], message: Any, seconds: float, attempts: int, rows: RowInput
) -> Any:
    """Internal: the answer's arrays do not fit each other, or the request."""
    _check_sizes(kind, arrays, rows.rows)
    values = {name: _arrays.output(arrays[name], rows.torch) for name in arrays}

    def ragged(name: str, counts: str) -> results.Ragged[Any]:
        return results.Ragged(values[name], arrays[counts])

    found: Dict[str, Any] = {
        "timings": timings_of(message.timings),
        "round_trip": seconds,
        "attempts": attempts,
        "status": values["status"],
        "status_position": values["status_position"],
        "head_version": getattr(message, "head_version", 0),
        "logsumexp": values["logsumexp"],
    }
    if kind == "top_k":
        return results.TopKResult(**found, indices=ragged("indices", "k"), probs=ragged("probs", "k"))
    if kind == "divergence":
        found.update({name: values[name] for name in _DIVERGENCES})
        found.update({name: values[name] if arrays[name].size else None for name in _LOGPROBS})
        found.update({name: ragged(name, counts) for name, counts in _DIVERGENCE_TOPS.items()})
        found["reference_head_version"] = message.reference_head_version
        return results.DivergenceResult(
            **found, totals=totals_of(results.DivergenceTotals, message.totals), offset=message.offset
        )
    found["top_ids"], found["top_logprobs"] = ragged("top_ids", "top_count"), ragged("top_logprobs", "top_count")
    found["extra_logprobs"] = ragged("extra_logprobs", "extra_count")
    if kind == "score":
        for name in ("losses", "target_logprobs"):
            found[name] = values[name]
        for name in ("ranks", "entropies"):
            found[name] = values[name] if arrays[name].size else None
        found["totals"] = totals_of(results.ScoreTotals, message.totals)
        found["offset"] = message.offset
    else:
        for name in ("tokens", "logprobs", "ranks") + (("accepted",) if kind == "verify" else ()):
            found[name] = values[name]
        for name in ("support_size", "entropies", "raw_entropies"):
            found[name] = values[name] if arrays[name].size else None
        for name, counts in _wanted_lists(kind).items():
            found[name] = ragged(name, counts) if arrays[counts].size else None
        if kind == "verify":
            found["draw_tokens"] = found["draw_logprobs"] = None
    return _KINDS[kind](**found)


_DIVERGENCES = ("forward_kl", "reverse_kl", "entropies", "reference_entropies", "reference_logsumexp")
_LOGPROBS = ("target_logprobs", "reference_target_logprobs")
_DIVERGENCE_TOPS = {
    "top_ids": "top_count",
    "top_logprobs": "top_count",
    "reference_top_ids": "reference_top_count",
    "reference_top_logprobs": "reference_top_count",
}


def _wanted_lists(kind: str) -> Dict[str, str]:
    """Lists of Sample and Verify that an answer has only where a row wants them, and the names of their counts."""
    support = {"support_ids": "support_count", "support_logprobs": "support_count"}
    return support if kind == "verify" else {**support, "draw_tokens": "draw_count", "draw_logprobs": "draw_count"}


def _check_sizes(kind: str, arrays: Mapping[str, np.ndarray], rows: int) -> None:
    sizes = {name: rows for name in ("status", "status_position", "logsumexp")}
    if kind == "top_k":
        sizes.update(k=rows)
        lists = {"indices": "k", "probs": "k"}
    elif kind == "divergence":
        lists = dict(_DIVERGENCE_TOPS)
        sizes.update({name: rows for name in (*_DIVERGENCES, "top_count", "reference_top_count")})
    else:
        lists = {"top_ids": "top_count", "top_logprobs": "top_count", "extra_logprobs": "extra_count"}
        names = ("losses", "target_logprobs") if kind == "score" else ("tokens", "logprobs", "ranks")
        sizes.update({name: rows for name in (*names, "top_count", "extra_count")})
    wanted: Tuple[str, ...] = ("ranks", "entropies")
    if kind in ("sample", "verify"):
        wanted = ("support_size", "entropies", "raw_entropies", *set(_wanted_lists(kind).values()))
        lists.update(_wanted_lists(kind))
    elif kind == "divergence":
        wanted = _LOGPROBS
    if kind != "top_k":
        sizes.update({name: rows for name in wanted if arrays[name].size})
    sizes.update({name: int(arrays[counts].sum()) for name, counts in lists.items()})
    for name, size in sizes.items():
        if arrays[name].size != size or any(arrays[counts].min(initial=0) < 0 for counts in lists.values()):
            raise Internal(
                f"the server's answer does not fit the request of {rows} rows: {name} has "
                f"{arrays[name].size} values, allowed {size}",
                attempts=1,
            )


def timings_of(message: Any) -> results.Timings:
    return results.Timings(**{f.name: getattr(message, f.name) for f in fields(results.Timings)})


def totals_of(kind: Any, message: Any) -> Any:
    return kind(**{f.name: getattr(message, f.name) for f in fields(kind)})


def add_timings(parts: List[results.Timings]) -> results.Timings:
    """Sums, and the largest batch."""
    added = {f.name: sum(getattr(part, f.name) for part in parts) for f in fields(results.Timings)}
    return results.Timings(**{**added, "batch_rows": max((part.batch_rows for part in parts), default=0)})


_OF_THE_CALL = {"timings", "round_trip", "attempts", "head_version", "reference_head_version", "offset", "totals"}


def joined(parts: List[Any]) -> Any:
    """The rows of several answers of a sequence as one; the totals of the last."""
    if len(parts) == 1:
        return parts[0]

    def join(arrays: List[Any]) -> Any:
        if arrays[0] is None:
            return None
        if isinstance(arrays[0], results.Ragged):
            return results.Ragged(join([a.values for a in arrays]), np.concatenate([a.counts for a in arrays]))
        if _arrays.is_torch(arrays[0]):
            import torch

            return torch.cat(arrays)
        return np.concatenate(arrays)

    rows = {f.name for f in fields(parts[0])} - _OF_THE_CALL
    return replace(
        parts[0],
        **{name: join([getattr(part, name) for part in parts]) for name in rows},
        totals=parts[-1].totals,
        timings=add_timings([part.timings for part in parts]),
    )
