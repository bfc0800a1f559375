"""The caller's arrays, from NumPy or torch, as memory; and answers as arrays of the same library."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from numbers import Integral
from typing import AbstractSet as Set
from typing import Any, Iterable, Mapping, Optional, Sequence, Tuple

import numpy as np

from logitd.errors import InvalidArgument

DTYPES = {"f32": 1, "f16": 2, "bf16": 3}  # as in types.proto
SIZES = {"f32": 4, "f16": 2, "bf16": 2}
_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported torch
    return torch is not None and isinstance(value, torch.Tensor)


def as_numpy(name: str, value: Any, bits: bool = False) -> np.ndarray:
    """The numbers of any array-like; a tensor of another device is copied to the host.

    bfloat16 becomes float32, which holds each of its numbers; with `bits`, it stays as it lies in memory (of torch:
    uint16). InvalidArgument: what is no array.
    """
    try:
        if is_torch(value):
            return _of_torch(value, bits)
        if _has_tensors(value):
            value = [as_numpy(name, part) for part in value]
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError, NotImplementedError) as error:
        raise InvalidArgument(
            f"{name}: got {_described(value)}, allowed an array with one length in each dimension, or a dense tensor "
            f"with memory of its own ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidArgument(f"{name}: got a masked array, allowed one without a mask: it would be lost")
    return array.astype(np.float32) if array.dtype.name == "bfloat16" and not bits else array


def _has_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(map(is_torch, value))


def _of_torch(tensor: Any, bits: bool) -> np.ndarray:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError("only dense numbers can be sent")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16 and bits:
        return tensor.view(torch.int16).numpy().view(np.uint16)  # type: ignore[no-any-return]
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()  # type: ignore[no-any-return]


def _described(value: Any) -> str:
    if is_torch(value):
        return f"a tensor of {_type_name(value)} ({value.layout}, {value.device})"
    return f"a {type(value).__name__}"


def _type_name(value: Any) -> str:
    return str(value.dtype).replace("torch.", "")


@dataclass(frozen=True)
class Tensor:
    """An array of floats of the caller's: its bytes, and what answers must know of it."""

    data: np.ndarray  # uint8, one dimension
    dtype: str  # "f32", "f16" or "bf16"
    shape: Tuple[int, ...]
    torch: bool
    bf16: Optional[np.dtype[Any]] = None  # how NumPy callers hold bf16, where the array is bf16


def floats(name: str, value: Any, dtype: Optional[str] = None) -> Tuple[np.ndarray, str]:
    """An f32, f16 or bf16 array as it lies in memory, not copied where it is on the host; and which of them it is.

    bf16: a torch tensor, an array of ml_dtypes.bfloat16, or a uint16 array of the bits with dtype="bf16".
    InvalidArgument: another type.
    """
    if dtype is not None:
        check_dtype("dtype", dtype)
    array = as_numpy(name, value, bits=True)
    kind = _type_name(value) if is_torch(value) else array.dtype.name
    bits = kind in ("uint16", "int16") and dtype == "bf16"
    found = "bf16" if bits else _NAMES.get(kind)
    if found is None:
        raise InvalidArgument(
            f"{name}: got an array of {kind}, allowed float32, float16 and bfloat16 "
            '(or uint16 with dtype="bf16"); convert it first'
        )
    if dtype not in (None, found):
        raise InvalidArgument(f"{name}: got an array of {kind} with dtype={dtype!r}, allowed dtype={found!r}")
    return array, found


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The elements as they go over the wire, not copied where they are contiguous and little-endian."""
    array = np.ascontiguousarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8)


def tensor(name: str, value: Any, dtype: Optional[str] = None) -> Tensor:
    """As floats(), with the array's bytes."""
    array, found = floats(name, value, dtype)
    held = array.dtype if found == "bf16" and not is_torch(value) else None
    return Tensor(as_bytes(array), found, array.shape, is_torch(value), held)


def integers(name: str, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Whole numbers as an array of `dtype`. InvalidArgument: others, or a number that the type cannot hold."""
    array = as_numpy(name, value)
    if array.size == 0:
        return np.zeros(array.shape, dtype)
    if dtype == np.bool_:
        if array.dtype.kind != "b":
            raise InvalidArgument(f"{name}: got {_shown(value, array)}, allowed True and False")
        return array
    if array.dtype.kind in "Of" and not hasattr(value, "dtype") and not _has_tensors(value):
        array = np.array(value, object)  # NumPy makes floats of numbers near 2^64
        if not all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in array.flat):
            raise InvalidArgument(f"{name}: got {_shown(value, array)}, allowed whole numbers")
    elif array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name}: got {_shown(value, array)}, allowed whole numbers")
    limits = np.iinfo(dtype)
    for extreme in (int(array.min()), int(array.max())):
        if not limits.min <= extreme <= limits.max:
            raise InvalidArgument(f"{name}: got {extreme}, allowed {limits.min} to {limits.max}")
    return array.astype(dtype)


def numbers(name: str, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """As integers(), for an integer `dtype`; else numbers as an array of a floating-point `dtype`, each the nearest."""
    if dtype.kind in "iub":
        return integers(name, value, dtype)
    array = as_numpy(name, value)
    if array.size > 0 and array.dtype.kind not in "iuf":
        raise InvalidArgument(f"{name}: got {_shown(value, array)}, allowed numbers")
    if array.dtype == np.uint16 and array.size > 0:  # as logits, it would be bits of bfloat16
        raise InvalidArgument(
            f"{name}: got an array of uint16, allowed numbers; bits of bfloat16 only as logits, hidden states, or "
            "arrays of attention"
        )
    with np.errstate(over="ignore"):
        out = array.astype(dtype)
    lost = np.isinf(out) & np.isfinite(array)
    if lost.any():
        raise InvalidArgument(f"{name}: got {array[lost].flat[0]}, allowed up to {np.finfo(dtype).max:g} ({dtype})")
    return out


def one(name: str, value: Any, dtype: Any) -> Any:
    """One number, or one bool, as Python has it. InvalidArgument: another number of them; and as numbers()."""
    array = numbers(name, value, np.dtype(dtype))
    if array.size != 1:
        raise InvalidArgument(f"{name}: got {array.size} values, allowed one")
    return array.item()


def number(name: str, value: Any, kind: type, low: float, high: float, allowed: str) -> Any:
    """A Python number, of an option. kind: numbers.Real, or numbers.Integral for whole ones."""
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:  # type: ignore[operator]
        raise InvalidArgument(f"{name}: got {value!r:.80}, allowed {allowed}")
    return value


def whole(name: str, value: Any, low: int, high: int = 2**63 - 1) -> int:
    """A whole number, of an option."""
    bound = f"{low} to {high}" if high != 2**63 - 1 else f"{low} or more"
    return int(number(name, value, Integral, low, high, f"whole numbers, {bound}"))


def instance(name: str, value: Any, kinds: Tuple[type, ...], allowed: str) -> None:
    if not isinstance(value, kinds):
        raise InvalidArgument(f"{name}: got {value!r:.80}, allowed {allowed}")


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidArgument(f"{name}: got {value!r:.80}, allowed {', '.join(map(repr, allowed))}")
    return value


def check_dtype(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in DTYPES:
        raise InvalidArgument(f"{name}: got {value!r:.80}, allowed {', '.join(DTYPES)}")
    return value


def sequence(name: str, value: Any, allowed: str) -> Sequence[Any]:
    """What has a length, and elements in order; no string."""
    if isinstance(value, (str, bytes, Mapping, Set)) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
        raise InvalidArgument(f"{name}: got {value!r:.80}, allowed {allowed}")
    try:
        return list(value)
    except TypeError as error:  # of an array without dimensions
        raise InvalidArgument(f"{name}: got {value!r:.80}, allowed {allowed}") from error


def _shown(value: Any, array: np.ndarray) -> str:
    """The caller's value in an error: an array by its type, anything else by its first numbers."""
    if hasattr(value, "dtype"):
        return f"an array of {_type_name(value)}"
    text = ", ".join(f"{x!r:.80}" for x in array.reshape(-1)[:4].tolist())
    return text + (", ..." if array.size > 4 else "")


def output(array: np.ndarray, torch: bool) -> Any:
    """An array of an answer as the request's library has it. For torch it is copied: tensors must be writable."""
    if not torch:
        return array
    return sys.modules["torch"].from_numpy(np.array(array))


def empty(dtype: str, shape: Sequence[int], like: Tensor) -> Tuple[Any, np.ndarray]:
    """A new array of `dtype` for an answer to `like`, and its bytes."""
    size = SIZES[dtype]
    raw = np.empty(int(np.prod(shape, dtype=np.int64)) * size, np.uint8)
    return shaped(raw, dtype, shape, like), raw


def shaped(raw: np.ndarray, dtype: str, shape: Sequence[int], like: Tensor) -> Any:
    """Bytes as an array of `dtype` for an answer to `like`; shares their memory, which torch needs writable."""
    if like.torch:
        torch = sys.modules["torch"]
        kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        return torch.from_numpy(raw).view(kinds[dtype]).reshape(tuple(shape))
    return raw.view(like.bf16 if dtype == "bf16" and like.bf16 is not None else numpy_type(dtype)).reshape(shape)


def numpy_type(dtype: str) -> np.dtype[Any]:
    """The NumPy type of "f32", "f16" or "bf16": for the last, that of ml_dtypes, or uint16 where it is missing."""
    if dtype != "bf16":
        return np.dtype({"f32": np.float32, "f16": np.float16}[dtype])
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(np.uint16)
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found
