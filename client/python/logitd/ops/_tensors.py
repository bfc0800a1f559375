"""torch tensors as the library takes them, checked with its error grammar."""

from __future__ import annotations

import ctypes
import math
from typing import Any, Optional, Sequence, Tuple, Union

import torch

from logitd.errors import InvalidArgument
from logitd.ops import _structs

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
Parameter = Union[float, torch.Tensor]


def dtype_of(name: str, tensor: torch.Tensor) -> int:
    """The library's number of a tensor's dtype."""
    code = DTYPES.get(tensor.dtype)
    if code is None:
        raise InvalidArgument(f"{name} dtype: got {str(tensor.dtype)[6:]}, allowed float32, float16, bfloat16")
    return code


def check_tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise InvalidArgument(f"{name}: got layout {value.layout}, allowed torch.strided")
        return value
    raise InvalidArgument(f"{name}: got {type(value).__name__}, allowed a torch tensor")


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int], of: str) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise InvalidArgument(f"{name}: got shape {list(tensor.shape)}, allowed {list(shape)} ({of})")


def check_device(name: str, tensor: torch.Tensor, like: torch.Tensor, of: str) -> None:
    if tensor.device != like.device:
        raise InvalidArgument(f"{name}: got device {tensor.device}, allowed {like.device} ({of}'s)")


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """[..., cols] as [rows, cols], each row contiguous."""
    if tensor.dim() != 2:
        tensor = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    if tensor.stride(1) == 1 and (tensor.shape[0] < 2 or tensor.stride(0) >= tensor.shape[1]):
        return tensor
    return tensor.contiguous()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows begin on 16-byte borders: itself, or a copy where it has to be."""
    tensor = rows_of(tensor)
    size = tensor.element_size()
    if tensor.data_ptr() % 16 == 0 and (tensor.shape[0] < 2 or tensor.stride(0) * size % 16 == 0):
        return tensor
    return new_matrix(tensor, *tensor.shape).copy_(tensor)


def new_matrix(like: torch.Tensor, rows: int, cols: int, *, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """An uninitialised [rows, cols] whose rows begin on 16-byte borders; contiguous where `cols` allows it."""
    dtype = dtype or like.dtype
    unit = 16 // dtype.itemsize
    stride = (cols + unit - 1) // unit * unit
    memory = torch.empty((rows, stride), dtype=dtype, device=like.device)
    return memory if stride == cols else memory[:, :cols]


def gradients_of(rows: torch.Tensor, weight: Any, wants: Sequence[bool], dtype: Optional[torch.dtype] = None) -> Any:
    """Memory for gradients of rows, weight and bias, or None where one is not wanted. dtype: of that of the rows."""
    return (
        new_matrix(rows, *rows.shape, dtype=dtype) if wants[0] else None,
        new_matrix(weight, *weight.shape) if wants[1] else None,
        torch.empty(weight.shape[0], dtype=torch.float32, device=rows.device) if wants[2] else None,
    )


def or_empty(rows: torch.Tensor, gradients: Any) -> Tuple[torch.Tensor, ...]:
    """Gradients as torch's ops return them: empty where they are not wanted."""
    return tuple(rows.new_empty(0) if of is None else of for of in gradients)


def view(tensor: torch.Tensor) -> _structs.Tensor:
    """A matrix of rows_of or new_matrix, as the library sees it."""
    rows, cols = tensor.shape
    stride = tensor.stride(0) if rows > 1 else cols
    return _structs.Tensor(tensor.data_ptr(), rows, cols, max(stride, cols), DTYPES[tensor.dtype], 0)


def pointer(tensor: Optional[torch.Tensor]) -> Optional[int]:
    return None if tensor is None else tensor.data_ptr()


def as_f32(name: str, tensor: Optional[torch.Tensor], count: int, like: torch.Tensor, of: str) -> Any:
    """A vector of `count` numbers in float32, contiguous; None stays None."""
    if tensor is None:
        return None
    check_shape(name, check_tensor(name, tensor), (count,), of)
    check_device(name, tensor, like, "the input")
    if not tensor.is_floating_point():
        raise InvalidArgument(f"{name} dtype: got {str(tensor.dtype)[6:]}, allowed a floating-point type")
    return tensor.detach().float().contiguous()


def head_of(weight: torch.Tensor, bias: Optional[torch.Tensor], scale: float, softcap: float) -> Any:
    """A pointer to a head of the library; it holds no reference to the tensors."""
    return ctypes.pointer(_structs.Head(view(weight), pointer(bias), None, 0.0, scale, softcap, 0))


def scalar(name: str, value: Any) -> float:
    """One number for all rows."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgument(f"{name}: got {type(value).__name__}, allowed one number") from None


def count_of(name: str, value: Any, low: int, high: int) -> int:
    """A whole number from `low` to `high`."""
    try:
        whole = value.__index__()
    except (AttributeError, TypeError):
        raise InvalidArgument(f"{name}: got {type(value).__name__}, allowed {low}..{high}") from None
    if not low <= whole <= high:
        raise InvalidArgument(f"{name}: got {whole}, allowed {low}..{high}")
    return whole  # type: ignore[no-any-return]


def number(name: str, value: Parameter, rows: int, like: torch.Tensor) -> Tuple[float, Any]:
    """A parameter of rows: one number and None, or 0 and float32 [rows], a number for each row."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return 0.0, as_f32(name, value.reshape(-1), rows, like, "one for each row")
    try:
        return float(value), None
    except (TypeError, ValueError):
        raise InvalidArgument(f"{name}: got {type(value).__name__}, allowed a number, or a tensor of numbers") from None


def integer(name: str, value: Any, rows: int, like: torch.Tensor) -> Tuple[int, Any]:
    """Like number, for integers. Unsigned 64-bit values keep their bits."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        check_shape(name, value.reshape(-1), (rows,), "one for each row")
        check_device(name, value, like, "the input")
        if value.is_floating_point() or value.is_complex():
            raise InvalidArgument(f"{name} dtype: got {str(value.dtype)[6:]}, allowed an integer type")
        return 0, value.reshape(-1).to(torch.int64).contiguous()
    try:
        whole = value.__index__()
    except (AttributeError, TypeError):
        raise InvalidArgument(
            f"{name}: got {type(value).__name__}, allowed a whole number, or a tensor of them"
        ) from None
    if not -(2**63) <= whole < 2**64:
        raise InvalidArgument(f"{name}: got {whole}, allowed -2^63..2^64-1")
    return (whole - 2**64 if whole >= 2**63 else whole), None
