"""The caller's arrays, from NumPy or torch, as memory; and answers as arrays of the same library."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Optional, Sequence, Tuple

import numpy as np

from logitd.errors import InvalidArgument

DTYPES = {"f32": 1, "f16": 2, "bf16": 3}  # as in types.proto
SIZES = {"f32": 4, "f16": 2, "bf16": 2}
_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported torch
    return torch is not None and isinstance(value, torch.Tensor)


def as_numpy(value: Any) -> np.ndarray:
    """Any array-like as a NumPy array; a tensor of another device is copied to the host. bf16 tensors become int16."""
    if is_torch(value):
        tensor = value.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.view(sys.modules["torch"].int16)
        return tensor.numpy()  # type: ignore[no-any-return]
    return np.asarray(value)


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
    if dtype is not None and dtype not in DTYPES:
        raise InvalidArgument(f"dtype: got {dtype!r}, allowed {', '.join(DTYPES)}")
    array = as_numpy(value)
    kind = str(value.dtype).replace("torch.", "") if is_torch(value) else array.dtype.name
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
    try:
        array = as_numpy(value)
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(f"{name}: {error}") from error
    if array.size == 0:
        return np.zeros(array.shape, dtype)
    if dtype == np.bool_:
        if array.dtype.kind != "b":
            raise InvalidArgument(f"{name}: got an array of {array.dtype}, allowed True and False")
        return array
    if array.dtype.kind == "O" or (array.dtype.kind == "f" and not isinstance(value, np.ndarray)):
        array = np.array(value, object)  # NumPy makes floats of numbers near 2^64
        if not all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in array.flat):
            raise InvalidArgument(f"{name}: got {_shown(array)}, allowed whole numbers")
    elif array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name}: got an array of {array.dtype}, allowed whole numbers")
    limits = np.iinfo(dtype)
    for extreme in (int(array.min()), int(array.max())):
        if not limits.min <= extreme <= limits.max:
            raise InvalidArgument(f"{name}: got {extreme}, allowed {limits.min} to {limits.max}")
    return array.astype(dtype)


def numbers(name: str, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """As integers(), for an integer `dtype`; else numbers as an array of a floating-point `dtype`."""
    if dtype.kind in "iub":
        return integers(name, value, dtype)
    try:
        array = as_numpy(value)
    except ValueError as error:
        raise InvalidArgument(f"{name}: {error}") from error
    if array.size > 0 and array.dtype.kind not in "iuf":
        raise InvalidArgument(f"{name}: got an array of {array.dtype}, allowed numbers")
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _shown(array: np.ndarray) -> str:
    text = ", ".join(map(repr, array.flat[:4]))
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
