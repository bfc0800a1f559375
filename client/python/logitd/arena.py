"""Memory that a server on this machine leases: rows that lie there are named in requests, and not sent."""

from __future__ import annotations

import mmap
import operator
import os
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, List, Optional, Sequence, Tuple, Type, Union

import grpc
import numpy as np

from logitd import _arrays, _cuda
from logitd.errors import Internal, InvalidArgument, ResourceExhausted, Unavailable, error_of

if TYPE_CHECKING:
    import torch

    from logitd.params import DType
    from logitd.ring import Ring

# The protocol, see formats/arena_protocol.h.
_MAGIC, _VERSION, _HOST, _CUDA = b"LDAR", 1, 1, 2
_ASK = struct.Struct("<4sIIIQ")  # magic, version, kind, device, bytes
_ANSWER = struct.Struct("<4sIIIQ16s")  # magic, version, code, text bytes, bytes, lease
_DEVICE = struct.Struct("<16sII")  # after the answer, of a GPU: uuid, number, unused
_MAX_TEXT = 1024

_MAX_PATH = 107  # bytes, of a Unix socket
_ALIGNMENT = 64  # of what empty() gives: a cache line
_CODES = {code.value[0]: code for code in grpc.StatusCode}

Shape = Union[int, Sequence[int]]


@dataclass(frozen=True)
class Place:
    """Where rows lie: row i begins at offset + i * row_stride bytes of the lease."""

    lease: bytes
    offset: int
    row_stride: int


class Arena:
    """A lease of memory, which the server reads where it lies. Made by Arena.lease.

    Arrays from empty() and array() lie in the arena, and so do their views. With `arena=`, a call names the place of
    its rows, and neither copies nor sends them. Until the call has ended, what is written to its rows may change its
    answer. A call that ended by an error may still read them for a moment. The answers of attention come in an array
    of the arena too where `out=` is one; after an error the server may still write it for a moment.

    The lease ends with close(), with the process, or with the server; then calls that name it get NotFound, and the
    server takes the memory back as soon as no call uses it. Arrays may still be used, but what they held becomes zeros:
    copy before close() what you need later. A child that os.fork() made holds the lease too, until its parent calls
    close().

    Thread-safe, as far as memory is. Close it after use, or use it in a `with` statement.
    """

    def __init__(self, connection: socket.socket, memory: mmap.mmap, lease_id: bytes) -> None:
        """Not for callers: use Arena.lease."""
        self._connection = connection  # the lease lives as long as it
        self._process = os.getpid()
        # Nobody calls memory.close(): the mapping ends when the last array over it is gone.
        self._bytes: Optional[np.ndarray] = np.frombuffer(memory, np.uint8)
        self._start = _address(self._bytes)
        self._nbytes = len(memory)
        self._lease_id = lease_id
        self._lock = threading.Lock()
        self._taken = 0  # by empty() and ring()
        self._has_ring = False

    @classmethod
    def lease(cls, address: str, nbytes: int, timeout: float = 10.0) -> "Arena":
        """Leases memory from the server whose --arena-listen is `address`. It is all zero. Blocks, one attempt.

        address: unix:PATH.
        nbytes: 1 or more; the arena has at least as many, in whole pages.
        timeout: seconds until the server's answer.

        Unavailable: nobody listens there, or there was no answer in time. InvalidArgument: no such address, or a size
        that the server never leases. ResourceExhausted: no memory or no lease is left, here or on the server.
        PermissionDenied: the server does not lease to this user. Internal: the answer is not one of this protocol, or
        the memory is not sealed.
        """
        path, nbytes = _checked_wish(address, nbytes, timeout)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            data, files = _ask(connection, path, (_HOST, 0, nbytes), timeout)
            try:
                size, lease_id, _ = _checked(address, data, files, nbytes, _HOST)
                memory = _mapped(files[0], size)
            finally:
                for file in files:
                    os.close(file)
            return cls(connection, memory, lease_id)
        except BaseException:
            connection.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the arena, whole pages."""
        return self._nbytes

    @property
    def lease_id(self) -> bytes:
        """The 16 bytes that name the lease in requests. Whoever knows them may use the memory in requests."""
        return self._lease_id

    def empty(self, shape: Shape, dtype: DType = "f32") -> np.ndarray:
        """An array of `shape` in bytes of the arena that empty() and empty_tensor() have not handed out yet.

        dtype: "f32", "f16" or "bf16". An array of bf16 is one of ml_dtypes.bfloat16 where that is installed, else of
            uint16, for calls with dtype="bf16".

        Bytes that were handed out do not come back: make arrays once, and fill them again and again. The array begins
        at a multiple of 64 bytes. InvalidArgument: there are not so many bytes left.
        """
        return self.array(self._take(shape, dtype), shape, dtype)

    def array(self, offset: int, shape: Shape, dtype: DType = "f32") -> np.ndarray:
        """The array of `shape` at `offset` bytes, for a caller that lays the arena out without empty().

        offset: a multiple of the element's size. dtype: as in empty(). InvalidArgument: it does not lie in the arena.
        """
        raw, sizes = self._raw(offset, shape, dtype)
        return raw.view(_arrays.numpy_type(dtype)).reshape(sizes)

    def empty_tensor(self, shape: Shape, dtype: DType = "f32") -> torch.Tensor:
        """As empty(), a torch tensor of float32, float16 or bfloat16. Imports torch."""
        return self.tensor(self._take(shape, dtype), shape, dtype)

    def tensor(self, offset: int, shape: Shape, dtype: DType = "f32") -> torch.Tensor:
        """As array(), a torch tensor of float32, float16 or bfloat16. Imports torch."""
        import torch

        raw, sizes = self._raw(offset, shape, dtype)
        kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        return torch.from_numpy(raw).view(kinds[dtype]).reshape(sizes)

    def ring(
        self,
        *,
        slots: int = 64,
        entry_bytes: int = 4096,
        answer_bytes: int = 16384,
        priority: str = "interactive",
        spin: float = 100e-6,
        deadline: float = 30.0,
        timeout: float = 10.0,
    ) -> Ring:
        """Ring.open of this arena: TopK and Sample of a decode loop through its memory."""
        from logitd.ring import Ring  # which imports this module

        return Ring.open(
            self,
            slots=slots,
            entry_bytes=entry_bytes,
            answer_bytes=answer_bytes,
            priority=priority,
            spin=spin,
            deadline=deadline,
            timeout=timeout,
        )

    def close(self) -> None:
        """Ends the lease. What its arrays hold becomes zeros soon: copy before what you need later.

        Calls that the server has begun read their rows to the end. Safe to call again.
        """
        self._bytes = None
        _close(self._connection, self._process)

    def __enter__(self) -> "Arena":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def place(self, name: str, array: np.ndarray) -> Place:
        """Where the rows of `array`, [N, width] or [width], lie. For calls, which name it in their requests.

        InvalidArgument: not in the arena; or elements of a row that do not touch, or rows that are not at equal,
        ascending distances; or a closed arena.
        """
        self._open()
        if array.dtype.byteorder == ">":
            raise InvalidArgument(f"{name}: got big-endian elements, allowed little-endian ones with an arena")
        at = _address(array) - self._start
        return _place(name, array.shape, array.strides, array.itemsize, at, self._nbytes, self._lease_id)

    def overlaps(self, array: np.ndarray) -> bool:
        """Whether any of a contiguous array lies in the arena."""
        return self._start - array.nbytes < _address(array) < self._start + self._nbytes and array.nbytes > 0

    def _open(self) -> np.ndarray:
        if self._bytes is None:
            raise _is_closed()
        return self._bytes

    def _take(self, shape: Shape, dtype: str) -> int:
        """The offset of new bytes."""
        sizes, wanted = _extent(shape, dtype)
        return self._reserve(wanted, f"shape: got {list(sizes)} of {dtype}, {wanted} bytes")

    def _reserve(self, wanted: int, got: str) -> int:
        """The offset of `wanted` new bytes. got: how the refusal begins where there are not so many."""
        with self._lock:
            offset = -(-self._taken // _ALIGNMENT) * _ALIGNMENT
            if wanted > self._nbytes - offset:
                raise InvalidArgument(
                    f"{got}, allowed the {max(0, self._nbytes - offset)} bytes that are left of the arena's "
                    f"{self._nbytes}"
                )
            self._taken = offset + wanted
        return offset

    def _return(self, offset: int, nbytes: int) -> None:
        """Gives reserved bytes back, where none were reserved after them."""
        with self._lock:
            if self._taken == offset + nbytes:
                self._taken = offset

    def _raw(self, offset: int, shape: Shape, dtype: str) -> Tuple[np.ndarray, Tuple[int, ...]]:
        """The bytes of an array, and its shape."""
        every = self._open()
        sizes, wanted = _extent(shape, dtype)
        offset = operator.index(offset)
        if not 0 <= offset <= self._nbytes - wanted or offset % _arrays.SIZES[dtype]:
            raise InvalidArgument(
                f"offset: got {offset} for {wanted} bytes, allowed a multiple of {_arrays.SIZES[dtype]} in an arena of "
                f"{self._nbytes}"
            )
        return every[offset : offset + wanted], sizes


class CudaArena:
    """A lease of memory of a GPU, which the server reads where it lies. Made by CudaArena.lease.

    As Arena, with tensors in place of arrays: those from empty_tensor() and tensor() are of torch, on the GPU, and lie
    in the arena. top_k, sample, verify, score and their streams take them, and views of them, with `arena=`; attention
    does not.

    The server does not wait for kernels of this process: synchronize the stream that wrote the rows before the call
    (torch.cuda.current_stream().synchronize()).

    Tensors keep the memory, also after close(); the GPU has it back when the last of them is gone. Thread-safe, as far
    as memory is.
    """

    def __init__(self, connection: socket.socket, mapping: _cuda.Mapping, lease_id: bytes) -> None:
        """Not for callers: use CudaArena.lease."""
        self._connection = connection
        self._process = os.getpid()
        self._mapping: Optional[_cuda.Mapping] = mapping
        self._start = mapping.address
        self._nbytes = mapping.nbytes
        self._device = mapping.device
        self._lease_id = lease_id
        self._lock = threading.Lock()
        self._taken = 0

    @classmethod
    def lease(cls, address: str, nbytes: int, device: Optional[int] = None, timeout: float = 10.0) -> "CudaArena":
        """As Arena.lease, of a GPU that is the server's and this process's.

        device: its number, as the server's operator counts. None: the server chooses.

        Unimplemented: the server has no GPU, or is of a version without this. Unavailable: also that this process has
        no CUDA driver, or cannot see the GPU. NotFound: the server has no such device.
        """
        path, nbytes = _checked_wish(address, nbytes, timeout)
        number = 0 if device is None else operator.index(device) + 1
        if not 0 <= number < 2**32 or (device is not None and number == 0):
            raise InvalidArgument(f"device: got {device}, allowed None, or 0 or more")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            data, files = _ask(connection, path, (_CUDA, number, nbytes), timeout)
            try:
                size, lease_id, rest = _checked(address, data, files, nbytes, _CUDA)
                mapping = _cuda.Mapping(files[0], _DEVICE.unpack(rest)[0], size)
            finally:
                for file in files:
                    os.close(file)
            return cls(connection, mapping, lease_id)
        except BaseException:
            connection.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the arena, a multiple of 2 MiB."""
        return self._nbytes

    @property
    def lease_id(self) -> bytes:
        """As in Arena."""
        return self._lease_id

    @property
    def device(self) -> int:
        """The GPU, as this process counts: torch's cuda:N."""
        return self._device

    def empty_tensor(self, shape: Shape, dtype: DType = "f32") -> torch.Tensor:
        """A tensor in bytes of the arena that were not handed out yet, at a multiple of 64 bytes. Imports torch."""
        sizes, wanted = _extent(shape, dtype)
        with self._lock:
            offset = -(-self._taken // _ALIGNMENT) * _ALIGNMENT
            if wanted > self._nbytes - offset:
                raise InvalidArgument(
                    f"shape: got {list(sizes)} of {dtype}, {wanted} bytes, allowed the {max(0, self._nbytes - offset)} "
                    f"bytes that are left of the arena's {self._nbytes}"
                )
            self._taken = offset + wanted
        return self.tensor(offset, shape, dtype)

    def tensor(self, offset: int, shape: Shape, dtype: DType = "f32") -> torch.Tensor:
        """The tensor of `shape` at `offset` bytes, a multiple of the element's size. Imports torch."""
        import torch

        return torch.from_dlpack(self.dlpack(offset, shape, dtype))

    def dlpack(self, offset: int, shape: Shape, dtype: DType = "f32") -> _cuda.Exported:
        """The same for the from_dlpack of any library."""
        mapping = self._open()
        sizes, wanted = _extent(shape, dtype)
        offset = operator.index(offset)
        if not 0 <= offset <= self._nbytes - wanted or offset % _arrays.SIZES[dtype]:
            raise InvalidArgument(
                f"offset: got {offset} for {wanted} bytes, allowed a multiple of {_arrays.SIZES[dtype]} in an arena of "
                f"{self._nbytes}"
            )
        return _cuda.Exported(mapping, offset, sizes, dtype)

    def find(self, name: str, tensor: Any) -> Tuple[Place, str, Tuple[int, ...]]:
        """Where the rows of a torch tensor on the GPU lie, their type, and its shape. For calls, as Arena.place."""
        self._open()
        dtype = _TORCH_DTYPES.get(str(tensor.dtype)) if _arrays.is_torch(tensor) else None
        if dtype is None or tensor.dim() not in (1, 2):
            raise InvalidArgument(
                f"{name}: got {type(tensor).__name__}, allowed with an arena of a GPU a torch tensor of float32, float16 "
                "or bfloat16, [rows, width] or [width]"
            )
        size = _arrays.SIZES[dtype]
        shape = tuple(tensor.shape)
        at = tensor.data_ptr() - self._start
        return _place(name, shape, [n * size for n in tensor.stride()], size, at, self._nbytes, self._lease_id), dtype, shape

    def close(self) -> None:
        """Ends the lease. Calls that the server has begun read their rows to the end. Safe to call again."""
        self._mapping = None
        _close(self._connection, self._process)

    def __enter__(self) -> "CudaArena":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def _open(self) -> _cuda.Mapping:
        if self._mapping is None:
            raise _is_closed()
        return self._mapping


_TORCH_DTYPES = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}


def _is_closed() -> InvalidArgument:
    return InvalidArgument("arena: got one that is closed, allowed an open one")


def _close(connection: socket.socket, process: int) -> None:
    if connection.fileno() >= 0 and os.getpid() == process:
        try:
            connection.shutdown(socket.SHUT_RDWR)  # also where a forked child holds the connection
        except OSError:
            pass  # the server has ended it
    connection.close()


def _place(
    name: str, shape: Sequence[int], strides: Sequence[int], size: int, offset: int, nbytes: int, lease_id: bytes
) -> Place:
    """Where the rows of [N, width] or [width] elements of `size` bytes lie, which begin at `offset` of the lease."""
    rows, width = (1, *shape)[-2:]
    row_stride, step = (width * size, *strides)[-2:]
    if rows <= 1:
        row_stride = width * size
    if (width > 1 and step != size) or row_stride < width * size:
        raise InvalidArgument(
            f"{name}: got strides {list(strides)} of shape {list(shape)}, allowed with an arena "
            f"elements of {size} bytes that touch, in rows at equal distances of {width * size} bytes or more"
        )
    extent = (rows - 1) * row_stride + width * size if rows > 0 and width > 0 else 0
    if not 0 <= offset <= nbytes - extent:
        raise InvalidArgument(
            f"{name}: got an array that does not lie in the arena, allowed one from its empty() or array(), or a "
            "view of one"
        )
    return Place(lease_id, offset, row_stride)


def _checked_wish(address: str, nbytes: int, timeout: float) -> Tuple[str, int]:
    """The path of `address`, and `nbytes` as a number."""
    path = address[len("unix:") :] if address.startswith("unix:") else ""
    if not 0 < len(os.fsencode(path)) <= _MAX_PATH or "\0" in path:
        raise InvalidArgument(f"address: got {address!r}, allowed unix:PATH with a path of 1 to {_MAX_PATH} bytes")
    nbytes = operator.index(nbytes)
    if not 1 <= nbytes < 2**63:
        raise InvalidArgument(f"nbytes: got {nbytes}, allowed 1 or more, below 2^63")
    if not 0 < timeout <= 24 * 3600:
        raise InvalidArgument(f"timeout: got {timeout} s, allowed above 0 and up to a day")
    return path, nbytes


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _extent(shape: Shape, dtype: str) -> Tuple[Tuple[int, ...], int]:
    """The shape as a tuple, and its bytes. InvalidArgument: no such shape or type."""
    _arrays.check_dtype("dtype", dtype)
    sizes = tuple(map(operator.index, shape if isinstance(shape, Sequence) else (shape,)))
    wanted = _arrays.SIZES[dtype]
    for size in sizes:
        if size < 0:
            raise InvalidArgument(f"shape: got {list(sizes)}, allowed sizes of 0 or more")
        wanted *= size
    return sizes, wanted


def _ask(
    connection: socket.socket, path: str, wish: Tuple[int, int, int], timeout: float
) -> Tuple[bytes, List[int]]:
    """Asks for a kind of memory, on a device, of a size. The server's packet, and the descriptors that came with it, which the caller closes."""
    end = time.monotonic() + timeout

    def limit(option: int) -> None:
        # Not settimeout(): a Unix socket that does not block fails at once where it would have to wait to connect.
        seconds, rest = divmod(max(0.000001, end - time.monotonic()), 1)
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(rest * 1e6) or 1))

    connection.settimeout(None)
    doing = "cannot connect"
    try:
        limit(socket.SO_SNDTIMEO)
        connection.connect(path)
        doing = "no answer"
        try:
            connection.send(_ASK.pack(_MAGIC, _VERSION, *wish))
        except (BrokenPipeError, ConnectionResetError):
            pass  # a server that has already refused this process no longer reads; its answer is there
        limit(socket.SO_RCVTIMEO)
        try:
            data, files, _, _ = socket.recv_fds(connection, _ANSWER.size + _MAX_TEXT, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # said once, before the answer of a server that has not read the request
            data, files, _, _ = socket.recv_fds(connection, _ANSWER.size + _MAX_TEXT, 1, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError as error:
        raise Unavailable(f"arena: unix:{path}: {doing} in {timeout:g} s", attempts=1) from error
    except OSError as error:
        raise Unavailable(f"arena: unix:{path}: {doing}: {error.strerror}", attempts=1) from error
    if not data:
        raise Unavailable(f"arena: unix:{path}: no answer: the server closed the connection", attempts=1)
    return data, files


def _checked(
    address: str, data: bytes, files: List[int], nbytes: int, kind: int
) -> Tuple[int, bytes, bytes]:
    """Size and name of the lease that the server answered with, and what follows. Raises its refusal."""

    def strange(why: str) -> Internal:
        return Internal(f"arena: {address}: the answer is not a lease: {why}", attempts=1)

    if len(data) < _ANSWER.size or data[:4] != _MAGIC:
        raise strange(f"got {len(data)} bytes that begin with {data[:4]!r}, allowed {_ANSWER.size} from {_MAGIC!r}")
    _, version, code, text_bytes, size, lease_id = _ANSWER.unpack_from(data)
    text = data[_ANSWER.size :]
    if text_bytes != len(text):
        raise strange(f"got {len(text)} bytes of text, allowed {text_bytes}")
    if code != 0:
        raise error_of(_CODES.get(code, grpc.StatusCode.UNKNOWN), text.decode(errors="replace"), attempts=1)
    if version != _VERSION or size < nbytes or size > sys.maxsize or len(files) != 1:
        raise strange(
            f"got version {version}, {size} bytes and {len(files)} descriptors, allowed version {_VERSION}, {nbytes} "
            "bytes or more, and one descriptor"
        )
    if kind == _CUDA:
        if len(text) != _DEVICE.size:
            raise strange(f"got {len(text)} bytes that name a GPU, allowed {_DEVICE.size}")
        return size, lease_id, text
    if os.fstat(files[0]).st_size < size:
        raise strange(f"got a file of {os.fstat(files[0]).st_size} bytes, allowed {size} or more")
    if not _is_sealed(files[0]):
        raise strange("got a file that can shrink, allowed one that is sealed")
    return size, lease_id, b""


def _is_sealed(file: int) -> bool:
    """A file that the server could make shorter would end this process by SIGBUS."""
    import fcntl  # not everywhere, and calls without an arena do not need it

    if not hasattr(fcntl, "F_GET_SEALS"):
        return True  # cannot be asked
    try:
        return fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK != 0
    except OSError:
        return False  # no memfd


def _mapped(file: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(file, size)  # has a descriptor of its own
    except OSError as error:
        raise ResourceExhausted(f"nbytes: got {size}, which cannot be mapped: {error.strerror}") from error
