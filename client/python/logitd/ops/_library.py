"""liblogitd.so: where it is, its contexts and workspaces, and calls."""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import pathlib
import threading
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch

from logitd.errors import Internal, InvalidArgument, LogitdError, ResourceExhausted, Unavailable
from logitd.ops import _structs

NAME = "liblogitd.so.1"
_ERRORS = {1: InvalidArgument, 2: Unavailable, 3: ResourceExhausted, 4: Internal}
_LEAST_ROWS = 4096  # of a workspace: it grows by powers of 2 from there


def _find() -> ctypes.CDLL:
    """The library of LOGITD_LIBRARY, else the package's own, else the system's."""
    named = os.environ.get("LOGITD_LIBRARY")
    own = pathlib.Path(__file__).resolve().parent.parent / "liblogitd.so"
    path = named or (str(own) if own.exists() else NAME)
    try:
        library = ctypes.CDLL(path)
        version = library.logitd_abi_version()
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"logitd.ops: got no {path} ({error}), allowed the library in this package (pip builds it where a C++ "
            "compiler, Abseil and Highway are installed), the system's (Debian package logitd), or the path in "
            "LOGITD_LIBRARY"
        ) from error
    if version != _structs.ABI_VERSION:
        raise ImportError(f"logitd.ops: got version {version} in {path}, allowed {_structs.ABI_VERSION}")
    return library


_FUNCTIONS = _structs.declare(_find())
_RUN = {name: _FUNCTIONS[f"run_{name}"] for name in _structs.OPS}
_byref = ctypes.byref
_lock = threading.Lock()
_scratch_bytes = 0
_checks = False


def set_scratch_bytes(count: int) -> None:
    """Memory that ops use for intermediate results on each CUDA device and stream, in bytes: at least 96 MiB.

    0, as at the start: 256 MiB. It holds for devices that no op has used yet. InvalidArgument: a device is in use.
    """
    global _scratch_bytes
    if _CUDA:
        raise InvalidArgument("scratch_bytes: got a change after the first op on a CUDA device, allowed before it")
    _scratch_bytes = count


def check(on: bool) -> None:
    """Says whether ops on CUDA tensors wait for their rows' statuses and raise InvalidArgument for refused ones.

    Off, as at the start: a row with a parameter that is not allowed, a target outside the vocabulary for instance, has
    NaN for a loss, -1 for a token. On the CPU such rows always raise.
    """
    global _checks
    _checks = on


def _raise(code: int) -> None:
    text = _FUNCTIONS["error"]().decode()
    raise _ERRORS.get(code, LogitdError)(text)


def _open(kind: bytes, device: int, threads: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    code = _FUNCTIONS["open"](kind, device, threads, _scratch_bytes, _byref(context))
    if code != 0:
        _raise(code)
    return context


class _Cpu:
    """The context of the CPU. Its calls have no workspace."""

    def __init__(self) -> None:
        self.context = _open(b"cpu", 0, torch.get_num_threads())
        self.call = _structs.Call()


class _Cuda:
    """The context of a CUDA device, with a workspace for each stream."""

    def __init__(self, index: int) -> None:
        self.context = _open(b"cuda", index, 0)
        self.device = torch.device("cuda", index)
        self.calls: Dict[int, Tuple[int, _structs.Call]] = {}
        self.turn = threading.Lock()  # held until the op is enqueued: another thread may replace the workspace

    def call(self, stream: int, rows: int) -> _structs.Call:
        """The place of a call with so many rows. It holds its workspace.

        A captured call has workspace of its own, in the memory of the graph, so that replays share none with other
        calls. It is prepared again for each call: another may have had the memory in between.
        """
        if torch.cuda.is_current_stream_capturing():
            return self._prepared(stream, torch.empty(self._bytes(rows), dtype=torch.uint8, device=self.device))
        room, call = self.calls.get(stream, (-1, None))
        if rows <= room and call is not None:
            return call
        current = torch.cuda.current_stream(self.device)
        if call is not None:
            call.memory.record_stream(current)
        room = max(_LEAST_ROWS, 1 << (rows - 1).bit_length())
        with concurrent.futures.ThreadPoolExecutor(1) as elsewhere:
            # torch sends what this thread allocates to a graph's memory while torch.compile warms up for a graph.
            memory = elsewhere.submit(self._allocated, room).result()
        current.wait_stream(torch.cuda.default_stream(self.device))  # whose memory it was
        call = self._prepared(stream, memory)
        self.calls[stream] = (room, call)
        return call

    def _bytes(self, rows: int) -> int:
        return _FUNCTIONS["workspace_bytes"](self.context, rows)  # type: ignore[no-any-return]

    def _allocated(self, room: int) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.default_stream(self.device)):
            return torch.empty(self._bytes(room), dtype=torch.uint8, device=self.device)

    def _prepared(self, stream: int, memory: torch.Tensor) -> _structs.Call:
        call = _structs.Call(stream, memory.data_ptr(), memory.numel())
        call.memory = memory
        code = _FUNCTIONS["prepare_workspace"](self.context, _byref(call))
        if code != 0:
            _raise(code)
        return call


_cpu: Optional[_Cpu] = None
_CUDA: Dict[int, _Cuda] = {}
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


def run(name: str, op: ctypes.Structure, like: torch.Tensor, rows: int, sums: Sequence[Any] = ()) -> None:
    """Runs an op where `like` is: on the current stream of its device, or on the CPU.

    sums: outputs, or None, that add up over the rows. Without rows they become 0, and nothing runs.
    Raises the library's errors: what, got, allowed.
    """
    global _cpu
    if rows == 0:
        for output in sums:
            if output is not None:
                output.zero_()
        return
    op.struct_size = ctypes.sizeof(op)
    if like.is_cuda:
        index = like.get_device()
        place = _CUDA.get(index)
        if place is None:
            with _lock:
                place = _CUDA.setdefault(index, _CUDA.get(index) or _Cuda(index))
        with place.turn:
            code = _RUN[name](place.context, _byref(place.call(_current_stream(index), rows)), _byref(op))
    else:
        if _cpu is None:
            with _lock:
                _cpu = _cpu or _Cpu()
        code = _RUN[name](_cpu.context, _byref(_cpu.call), _byref(op))
    if code != 0:
        _raise(code)


def wants_status(like: torch.Tensor) -> bool:
    """True where refused rows of this device raise."""
    return _checks or not like.is_cuda


def raise_refused(
    status: torch.Tensor, parameters: Tuple[str, ...], values: Dict[str, Any], allowed: Dict[str, str]
) -> None:
    """InvalidArgument where a row was refused.

    status: int32 [rows, 2]. parameters: the names of the op's parameters, from number 1. values: the caller's, by name.
    allowed: the values that a parameter may have, by name.
    """
    codes = status[:, 0]
    refused = (codes == 4).nonzero()
    if refused.numel() == 0:
        return
    row = int(refused[0])
    name = parameters[int(status[row, 1]) - 1]
    value = values.get(name)
    got = f"{value[row].item()}" if isinstance(value, torch.Tensor) and value.dim() == 1 else "a value or a list"
    raise InvalidArgument(f"{name}: got {got} at row {row}, allowed {allowed[name]}")
