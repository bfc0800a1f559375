"""Memory of a GPU that the server shares by a file descriptor, through the CUDA driver and ctypes."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Callable, Dict, Optional, Tuple

from logitd.errors import Internal, Unavailable

_POSIX_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class _Access(ctypes.Structure):
    _fields_ = [("location_type", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]


class _Driver:
    """The functions of libcuda.so.1, by their names."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unavailable(f"arena: there is no CUDA driver here: {error}", attempts=1) from error
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, name: str, *values: Any) -> None:
        """Raises Internal if the driver does not say success."""
        result = getattr(self._library, name)(*values)
        if result == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(result, ctypes.byref(text))
        raise Internal(f"arena: {name}: {(text.value or b'error').decode()} ({result})", attempts=1)

    def device(self, uuid: bytes) -> int:
        """The device of this process that has the uuid."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        for i in range(count.value):
            device, own = ctypes.c_int(), ctypes.create_string_buffer(16)
            self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(i))
            self.call("cuDeviceGetUuid", own, device)
            if own.raw == uuid:
                return device.value
        raise Unavailable(
            f"arena: got memory of a GPU that is none of the {count.value} devices of this process", attempts=1
        )


class Mapping:
    """The memory, mapped in its device's primary context, which torch uses too. Unmapped with its last user."""

    def __init__(self, file: int, uuid: bytes, nbytes: int) -> None:
        driver = _Driver()
        self.device = driver.device(uuid)
        self.nbytes = nbytes
        device, size = ctypes.c_int(self.device), ctypes.c_size_t(nbytes)
        undo: list[Callable[[], None]] = []
        context, handle, address = ctypes.c_void_p(), ctypes.c_ulonglong(), ctypes.c_ulonglong()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        undo.append(lambda: driver.call("cuDevicePrimaryCtxRelease_v2", device))
        driver.call("cuCtxPushCurrent_v2", context)
        try:
            driver.call(
                "cuMemImportFromShareableHandle",
                ctypes.byref(handle),
                ctypes.c_void_p(file),
                ctypes.c_int(_POSIX_FILE_DESCRIPTOR),
            )
            undo.append(lambda: driver.call("cuMemRelease", handle))
            zero = ctypes.c_ulonglong(0)
            driver.call(
                "cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero
            )
            undo.append(lambda: driver.call("cuMemAddressFree", address, size))
            driver.call("cuMemMap", address, size, ctypes.c_size_t(0), handle, zero)
            undo.append(lambda: driver.call("cuMemUnmap", address, size))
            access = _Access(_ON_DEVICE, self.device, _READ_AND_WRITE)
            driver.call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        except BaseException:
            _undo(undo)
            raise
        finally:
            popped = ctypes.c_void_p()
            driver.call("cuCtxPopCurrent_v2", ctypes.byref(popped))
        self.address = int(address.value)
        # At the end of the process the driver does it.
        weakref.finalize(self, _close, driver, context, undo).atexit = False


def _undo(steps: "list[Callable[[], None]]") -> None:
    for step in reversed(steps):
        step()


def _close(driver: _Driver, context: ctypes.c_void_p, undo: "list[Callable[[], None]]") -> None:
    popped = ctypes.c_void_p()
    driver.call("cuCtxPushCurrent_v2", context)
    driver.call("cuCtxSynchronize")  # what still uses it ends first
    _undo(undo[1:])
    driver.call("cuCtxPopCurrent_v2", ctypes.byref(popped))
    _undo(undo[:1])


# ---- DLPack, version 0: how libraries exchange arrays without a copy


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_CUDA = 2  # kDLCUDA
_TYPES = {"f32": (2, 32), "f16": (2, 16), "bf16": (4, 16)}  # code and bits
_alive: Dict[int, Tuple[Any, ...]] = {}  # what tensors that were handed out refer to, by their address


def _delete(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


_DELETER = _Deleter(_delete)

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.restype = ctypes.c_int
_is_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_NAME = b"dltensor"
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _destroy(capsule: int) -> None:
    """Frees a capsule that no library took."""
    if _is_capsule(capsule, _NAME):
        _alive.pop(_pointer_of(capsule, _NAME), None)


_DESTRUCTOR = _Destructor(_destroy)


class Exported:
    """An array in a mapping, for the `from_dlpack` of any library. What it makes keeps the mapping."""

    def __init__(self, mapping: Mapping, offset: int, shape: Tuple[int, ...], dtype: str) -> None:
        self._mapping, self._offset, self._shape, self._dtype = mapping, offset, shape, dtype

    def __dlpack_device__(self) -> Tuple[int, int]:
        return _CUDA, self._mapping.device

    def __dlpack__(self, stream: Optional[int] = None, **unused: Any) -> Any:
        """The memory is not written by any stream of this process when it is handed out, so none is waited for."""
        shape = (ctypes.c_int64 * max(1, len(self._shape)))(*self._shape)
        managed = _DLManagedTensor()
        code, bits = _TYPES[self._dtype]
        at = self._mapping.address + self._offset  # torch takes no byte_offset
        managed.tensor = _DLTensor(at, _CUDA, self._mapping.device, len(self._shape), code, bits, 1, shape, None, 0)
        managed.deleter = _DELETER
        key = ctypes.addressof(managed)
        _alive[key] = (managed, shape, self._mapping)
        return _new_capsule(key, _NAME, ctypes.cast(_DESTRUCTOR, ctypes.c_void_p))
