"""Message types of proto/logitd/v1, made at import from the descriptors that the package ships.

The types live in a descriptor pool of their own: code that protoc generated from the same files can run beside them.
"""

from __future__ import annotations

import pkgutil
from typing import Any, Dict, List, Mapping, Tuple, Type

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from logitd import _wire
from logitd.errors import InvalidArgument

_MAX_MESSAGE = 2**31 - 1 - 16  # protobuf's own limit
_Field = descriptor_pb2.FieldDescriptorProto
_FIXED = {
    _Field.TYPE_FLOAT: "<f4",
    _Field.TYPE_DOUBLE: "<f8",
    _Field.TYPE_FIXED64: "<u8",
    _Field.TYPE_SFIXED64: "<i8",
    _Field.TYPE_FIXED32: "<u4",
    _Field.TYPE_SFIXED32: "<i4",
}
_ALLOWED = {
    _Field.TYPE_STRING: "a string",
    _Field.TYPE_BOOL: "True or False",
    _Field.TYPE_FLOAT: "a number",
    _Field.TYPE_MESSAGE: "other values",
}
_VARINT = {
    _Field.TYPE_INT32: np.int32,
    _Field.TYPE_INT64: np.int64,
    _Field.TYPE_ENUM: np.int32,
    _Field.TYPE_BOOL: np.bool_,
}


def _load() -> Tuple[Any, Dict[str, Any]]:
    try:
        data = pkgutil.get_data("logitd", "descriptors.binpb")
    except FileNotFoundError as error:
        raise ImportError(
            "logitd/descriptors.binpb: missing; the build makes it: pip install ./client/python"
        ) from error
    pool = descriptor_pool.DescriptorPool()
    described: Dict[str, Any] = {}
    files: Any = descriptor_pb2.FileDescriptorSet.FromString(data or b"")
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
        for kind in (*file.message_type, *file.enum_type):
            described[f"{file.package}.{kind.name}"] = kind
    return pool, described


_POOL, _DESCRIBED = _load()


def _message_class(name: str) -> Type[Any]:
    descriptor = _POOL.FindMessageTypeByName(name)
    factory: Any = message_factory
    if hasattr(factory, "GetMessageClass"):
        return factory.GetMessageClass(descriptor)  # type: ignore[no-any-return]
    return factory.MessageFactory(_POOL).GetPrototype(descriptor)  # type: ignore[no-any-return]  # before 4.22


def enum_values(name: str) -> Dict[str, int]:
    """The values of an enum by their short names in lower case: of LOGPROB_MODE_RAW, "raw"."""
    described = _DESCRIBED[f"logitd.v1.{name}"]
    prefixes = [value.name for value in described.value]
    common = prefixes[0][: prefixes[0].rindex("_") + 1]
    while not all(prefix.startswith(common) for prefix in prefixes):
        common = common[: common[:-1].rindex("_") + 1]
    return {value.name[len(common) :].lower(): value.number for value in described.value}


def check_size(total: int) -> None:
    """InvalidArgument: protobuf cannot carry a message of so many bytes."""
    if total > _MAX_MESSAGE:
        raise InvalidArgument(f"request: got {total} bytes, allowed 0 to {_MAX_MESSAGE}; send fewer rows a call")


class Codec:
    """Encodes and decodes one message type. Repeated numbers and bytes are NumPy arrays; protobuf does the rest."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._class = _message_class(f"logitd.v1.{name}")
        self.fields: Dict[str, Any] = {field.name: field for field in _DESCRIBED[f"logitd.v1.{name}"].field}
        self._arrays = {f.number: f for f in self.fields.values() if self._is_array(f)}

    @staticmethod
    def _is_array(field: Any) -> bool:
        repeated = field.label == _Field.LABEL_REPEATED
        return field.type == _Field.TYPE_BYTES or (repeated and (field.type in _FIXED or field.type in _VARINT))

    def is_repeated(self, name: str) -> bool:
        return bool(self.fields[name].label == _Field.LABEL_REPEATED)

    def dtype(self, name: str) -> np.dtype[Any]:
        """The NumPy type of the elements of a field of numbers."""
        kind = self.fields[name].type
        return np.dtype(_FIXED[kind] if kind in _FIXED else _VARINT[kind])

    def enum(self, name: str) -> Dict[str, int]:
        """The values that the field allows, by short name; none where it is not an enum."""
        field = self.fields[name]
        return enum_values(field.type_name.rsplit(".", 1)[-1]) if field.type == _Field.TYPE_ENUM else {}

    def encode(self, values: Mapping[str, Any]) -> bytes:
        """The message. An array's bytes are copied once, into the message; of `values`, None leaves a field out."""
        message = self._class()
        pieces: List[_wire.Bytes] = [b""]
        for name, value in values.items():
            field = self.fields[name]
            if value is None:
                continue
            if not self._is_array(field):
                try:
                    if isinstance(value, Mapping):
                        getattr(message, name).MergeFrom(type(getattr(message, name))(**value))
                    elif isinstance(value, list):  # of messages
                        for item in value:
                            getattr(message, name).add(**item)
                    else:
                        setattr(message, name, value)
                except (TypeError, ValueError) as error:
                    raise InvalidArgument(
                        f"{name}: got {value!r:.80}, allowed {_ALLOWED.get(field.type, 'a whole number')}"
                    ) from error
                continue
            data: _wire.Bytes
            if field.type == _Field.TYPE_BYTES:
                data = memoryview(value)
            elif field.type in _FIXED:
                data = np.ascontiguousarray(value, _FIXED[field.type]).reshape(-1).view(np.uint8).data
            else:
                data = _wire.pack_varints(np.asarray(value))
            if len(data) > 0:
                pieces += (_wire.head(field.number, len(data)), data)
        pieces[0] = message.SerializeToString()
        check_size(sum(map(len, pieces)))
        return b"".join(pieces)

    def decode(self, data: bytes) -> Tuple[Dict[str, np.ndarray], Any]:
        """The arrays by name (bytes as uint8), and a protobuf message with the other fields.

        Arrays of fixed-width numbers and bytes are read-only views of `data`. WireError: not such a message.
        """
        found: Dict[int, List[memoryview]] = {}
        rest: List[memoryview] = []
        for number, value, whole in _wire.fields(data):
            if number in self._arrays:
                found.setdefault(number, []).append(value)
            else:
                rest.append(whole)
        message = self._class()
        try:
            message.ParseFromString(b"".join(rest))
        except DecodeError as error:
            raise _wire.WireError(str(error)) from error
        return {f.name: self._array(f, found.get(number, [])) for number, f in self._arrays.items()}, message

    @staticmethod
    def _array(field: Any, parts: List[memoryview]) -> np.ndarray:
        raw = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        if field.type == _Field.TYPE_BYTES:
            return np.frombuffer(parts[-1] if parts else b"", np.uint8)  # of a bytes field the last one holds
        if field.type in _VARINT:
            return _wire.unpack_varints(raw).astype(_VARINT[field.type])
        dtype = np.dtype(_FIXED[field.type])
        if len(raw) % dtype.itemsize:
            raise _wire.WireError(f"{field.name}: got {len(raw)} bytes, allowed multiples of {dtype.itemsize}")
        return np.frombuffer(raw, dtype)
