"""Large weights of an ONNX model, kept outside of its protobuf message.

A protobuf message holds the bytes of its tensors, parsing makes a copy of them, and so does each look at ``raw_data``.
Here the message is read without them: a file's large initializers, whether they lie in it or in others beside it, are
places in a file, read once, when their numbers are wanted, into the memory that becomes the compiler's constant.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from mlc.errors import ModelError

if TYPE_CHECKING:
    import onnx

__all__ = ["Model", "Weight", "light_message", "outside", "take_external", "tensor_of"]

#: bytes from which a weight is kept outside
_LARGE = 1 << 16
#: numbers of protobuf's fields: ModelProto.graph, GraphProto.initializer, TensorProto.raw_data
_GRAPH, _INITIALIZER, _RAW = 7, 5, 9
#: its wire types, of which groups are none that ONNX uses
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
#: TVM's code wants tensors to begin at multiples of so many bytes
_ALIGNMENT = 64


class Weight:
    """A tensor whose elements are read when they are wanted; as long as somebody has them, they are not read again."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any], read: Callable[[np.ndarray], None]) -> None:
        """``read`` fills a vector of bytes."""
        self.shape, self.dtype, self._read = tuple(shape), dtype, read
        self._array: weakref.ref[np.ndarray] | None = None

    def array(self) -> np.ndarray:
        """The elements, aligned for compiled code; not to be written to. Raises :class:`ModelError` where they cannot
        be read."""
        array = self._array() if self._array is not None else None
        if array is None:
            size = math.prod(self.shape) * self.dtype.itemsize
            memory = np.empty(size + _ALIGNMENT, np.uint8)
            start = -memory.ctypes.data % _ALIGNMENT
            data = memory[start : start + size]
            self._read(data)
            array = data.view(self.dtype).reshape(self.shape)
            self._array = weakref.ref(array)
        return array


@dataclass(frozen=True)
class Model:
    """An ONNX model. ``weights`` are the initializers, by name, that ``proto`` lists without their elements."""

    proto: onnx.ModelProto
    weights: Mapping[str, Weight] = field(default_factory=dict)


def outside(model: onnx.ModelProto) -> Model:
    """The model with its large weights outside: its message is left as it is, and none of their bytes are copied."""
    import onnx

    if not _names_differ(model.graph.initializer):
        return Model(model)
    weights: dict[str, Weight] = {}
    light = onnx.ModelProto()
    _copy_fields(model, light, "graph")
    _copy_fields(model.graph, light.graph, "initializer")
    for tensor in model.graph.initializer:
        stub = light.graph.initializer.add()
        _copy_fields(tensor, stub, "raw_data")
        if not tensor.HasField("raw_data"):
            continue
        dtype = _stored_whole(stub)
        size = 0 if dtype is None else math.prod(stub.dims) * dtype.itemsize
        field_bytes = len(_key(_RAW)) + len(_varint(size)) + size
        if dtype is not None and size >= _LARGE and tensor.ByteSize() - stub.ByteSize() == field_bytes:
            weights[tensor.name] = Weight(stub.dims, dtype, partial(_from_message, tensor))
        else:
            stub.raw_data = tensor.raw_data
    return Model(light, weights)


def tensor_of(array: np.ndarray) -> Any:
    """A tensor of TVM's with the array's elements: its memory, where compiled code can read it there.

    Nobody writes to the array afterwards.
    """
    import tvm

    kept = array.flags.writeable and array.flags.c_contiguous and array.ctypes.data % _ALIGNMENT == 0 and array.size
    if kept and array.dtype.kind in "fiub":
        return tvm.runtime.from_dlpack(array)
    return tvm.runtime.tensor(array)


def light_message(path: Path) -> tuple[bytes, Mapping[str, Weight]] | None:
    """The bytes of an ONNX file without those of its large weights, and these; None where there are none, or where the
    file is not the plain message of one graph, about which others complain better."""
    file = _File(path)
    if sys.byteorder != "little" or file.size < _LARGE:
        return None
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory, memoryview(memory) as data:
        try:
            return _split(data, file)
        except ValueError:
            return None


def take_external(model: onnx.ModelProto, folder: Path) -> dict[str, Weight]:
    """Take out the large initializers that lie in files of ``folder``; others stay as they are.

    Raises what ``onnx.load_external_data_for_model`` does for files that are not there or elsewhere.
    """
    import onnx
    from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor

    weights: dict[str, Weight] = {}
    if sys.byteorder != "little" or not _names_differ(model.graph.initializer):
        return weights
    files: dict[str, _File] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        info, dtype = ExternalDataInfo(tensor), _stored_whole(tensor, external=True)
        size = 0 if dtype is None else math.prod(tensor.dims) * dtype.itemsize
        if dtype is None or size < _LARGE or info.length not in (None, size):
            continue
        if info.location not in files:
            probe = onnx.TensorProto(name=tensor.name, data_location=onnx.TensorProto.EXTERNAL)
            for key, value in (("location", info.location), ("length", "0")):
                probe.external_data.add(key=key, value=value)
            load_external_data_for_tensor(probe, str(folder))  # onnx knows which places it may be in
            files[info.location] = _File(folder / info.location)
        start, whole = info.offset or 0, files[info.location].size
        if start + size > whole or (info.length is None and start + size != whole):
            continue
        weights[tensor.name] = Weight(tensor.dims, dtype, partial(files[info.location].read, start))
        for name in ("external_data", "data_location", "raw_data"):
            tensor.ClearField(name)
    return weights


class _File:
    """A file that is kept open, so that another one of its name is not taken for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] = path.open("rb", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size

    def fileno(self) -> int:
        """The descriptor of the file."""
        return self._file.fileno()

    def read(self, start: int, into: np.ndarray) -> None:
        """Fill ``into``, bytes, from ``start`` on."""
        done, view = 0, into.data
        while done < len(view):
            try:
                got = os.preadv(self._file.fileno(), [view[done:]], start + done)
            except OSError as error:
                raise ModelError(f"the weights in {self._path} must be readable, but are not: {error.strerror}; copy "
                                 "the file again") from error
            if not got:
                raise ModelError(f"{self._path} must stay as it is while its model is compiled, but became shorter; "
                                 "compile the model again")
            done += got


def _from_message(tensor: onnx.TensorProto, into: np.ndarray) -> None:
    data = np.frombuffer(tensor.raw_data, np.uint8)
    if data.size != into.size:
        raise ModelError(f"the model must stay as it is while it is compiled, but {tensor.name} has changed; compile "
                         "the model again")
    np.copyto(into, data)


def _stored_whole(tensor: onnx.TensorProto, external: bool = False) -> np.dtype[Any] | None:
    """The type of numpy's that the bytes of a tensor without its ``raw_data`` are an array of; None for tensors that
    are stored otherwise."""
    from onnx import TensorProto, helper

    known = {"dims", "data_type", "name", "doc_string", "data_location"} | ({"external_data"} if external else set())
    if any(spec.name not in known for spec, _ in tensor.ListFields()) or not all(d > 0 for d in tensor.dims):
        return None
    if (tensor.data_location == TensorProto.EXTERNAL) is not external:
        return None
    if tensor.data_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        return None
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    except (KeyError, TypeError, ValueError):
        return None
    return dtype if dtype.name in _WHOLE else None


#: types whose elements are stored as they lie in memory
_WHOLE = frozenset({
    "bfloat16", "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16",
    "uint32", "uint64",
})


def _names_differ(tensors: Sequence[onnx.TensorProto]) -> bool:
    return len({tensor.name for tensor in tensors}) == len(tensors)


def _copy_fields(message: Any, into: Any, left_out: str) -> None:
    """Copy all fields but one."""
    for spec, value in message.ListFields() if left_out != "raw_data" else _fields_without_raw(message):
        if spec.name == left_out:
            continue
        if hasattr(value, "extend"):
            getattr(into, spec.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(into, spec.name).CopyFrom(value)
        else:
            setattr(into, spec.name, value)


def _fields_without_raw(tensor: onnx.TensorProto) -> Iterator[tuple[Any, Any]]:
    """``tensor.ListFields()`` without a copy of ``raw_data``."""
    for spec in tensor.DESCRIPTOR.fields:
        if spec.name == "raw_data":
            continue
        value = getattr(tensor, spec.name)
        if len(value) if hasattr(value, "extend") else tensor.HasField(spec.name):
            yield spec, value


# The wire format


def _split(data: memoryview, file: _File) -> tuple[bytes, Mapping[str, Weight]] | None:
    """:func:`light_message` of the bytes of a file; raises ValueError for what is no such message."""
    kept: list[bytes] = []
    graph: list[bytes] | None = None
    weights: dict[str, Weight] = {}
    for number, start, begin, end in _fields(data, 0, len(data)):
        if number != _GRAPH:
            kept.append(bytes(data[start:end]))
            continue
        if graph is not None:
            raise ValueError("a message of two parts, which are to be merged")
        graph = list(_light_graph(data, begin, end, file, weights))
        kept += [_key(_GRAPH), _varint(sum(map(len, graph))), *graph]
    return (b"".join(kept), weights) if weights else None


def _light_graph(
    data: memoryview, start: int, end: int, file: _File, weights: dict[str, Weight]
) -> Iterator[bytes]:
    names = set[str]()
    for number, at, begin, after in _fields(data, start, end):
        if number != _INITIALIZER:
            yield bytes(data[at:after])
            continue
        from onnx import TensorProto

        pieces = list(_fields(data, begin, after))
        rest = b"".join(data[at:stop] for field_, at, _, stop in pieces if field_ != _RAW)
        try:
            stub = TensorProto.FromString(rest)
        except Exception as error:  # protobuf's own
            raise ValueError(str(error)) from error
        if stub.name in names:
            raise ValueError("two tensors of one name")
        names.add(stub.name)
        raw = [(place, stop) for field_, _, place, stop in pieces if field_ == _RAW]
        dtype = _stored_whole(stub) if len(raw) == 1 else None
        size = 0 if dtype is None else math.prod(stub.dims) * dtype.itemsize
        if dtype is None or size < _LARGE or raw[0][1] - raw[0][0] != size:
            yield bytes(data[at:after])
            continue
        weights[stub.name] = Weight(stub.dims, dtype, partial(file.read, raw[0][0]))
        yield _key(_INITIALIZER) + _varint(len(rest)) + rest


def _fields(data: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: the number, and where each begins, its value begins, and it ends."""
    while start < end:
        key, at = _read_varint(data, start, end)
        kind, begin = key & 7, at
        if kind == _VARINT:
            _, stop = _read_varint(data, at, end)
        elif kind == _BYTES:
            size, begin = _read_varint(data, at, end)
            stop = begin + size
        elif kind in (_FIXED64, _FIXED32):
            stop = at + (8 if kind == _FIXED64 else 4)
        else:
            raise ValueError(f"a field of wire type {kind}")
        if stop > end or not key >> 3:
            raise ValueError("a field that does not end")
        yield key >> 3, start, begin, stop
        start = stop


def _read_varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    """A number of 7 bits in each byte, the lowest first, and where it ends."""
    value = 0
    for place in range(at, min(end, at + 10)):
        value |= (data[place] & 127) << 7 * (place - at)
        if data[place] < 128:
            return value, place + 1
    raise ValueError("a number that does not end")


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _key(number: int) -> bytes:
    return _varint(number << 3 | _BYTES)
