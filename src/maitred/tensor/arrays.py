"""Tensors of the wire as arrays, and back. Numbers are looked at where they lie; only texts are copied."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod

import numpy as np

from maitred.core.errors import InvalidRequest
from maitred.core.tensor_request import Buffer, Tensor
from maitred.tensor.instance import NUMPY_TYPES

MOST_DIMS = 32  # numpy has no more
MOST_ELEMENTS = 2**40
_LENGTH = struct.Struct("<I")
_PIECE = 64 * 1024


def datatype_of(data_type: str) -> str:
    """`FP32` of `TYPE_FP32`, as KServe v2 calls it."""
    return "BYTES" if data_type == "TYPE_STRING" else data_type.removeprefix("TYPE_")


def data_type_of(datatype: str) -> str:
    """`TYPE_FP32` of `FP32`."""
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def array_of(tensor: Tensor) -> np.ndarray:
    """Raises InvalidRequest where type, shape and bytes do not go together; nothing of their size is allocated then."""
    kind = NUMPY_TYPES.get(data_type_of(tensor.datatype))
    if kind is None:
        raise InvalidRequest(f"input {tensor.name!r} has datatype {tensor.datatype!r}, which there is not")
    count = _count(tensor)
    data = memoryview(tensor.data).cast("B")
    if kind.hasobject:
        return _texts(tensor.name, data, count).reshape(tensor.shape)
    if data.nbytes != count * kind.itemsize:
        raise InvalidRequest(
            f"input {tensor.name!r} has {data.nbytes} bytes, and {tensor.datatype} of shape {list(tensor.shape)} "
            f"needs {count * kind.itemsize}"
        )
    return np.frombuffer(data, kind).reshape(tensor.shape)


def _count(tensor: Tensor) -> int:
    if len(tensor.shape) > MOST_DIMS or any(size < 0 for size in tensor.shape):
        raise InvalidRequest(f"input {tensor.name!r} has shape {list(tensor.shape)}; sizes are 0 or more")
    count = prod(tensor.shape)
    if count > MOST_ELEMENTS:
        raise InvalidRequest(f"input {tensor.name!r} has shape {list(tensor.shape)}, which is more than there can be")
    return count


def _texts(name: str, data: memoryview, count: int) -> np.ndarray:
    """Each element after its length in four bytes."""
    if count * _LENGTH.size > data.nbytes:
        raise InvalidRequest(f"input {name!r} has {data.nbytes} bytes, too few for {count} BYTES elements")
    found, at = np.empty(count, object), 0
    for index in range(count):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(data, at)[0] if start <= data.nbytes else data.nbytes + 1
        if at > data.nbytes:
            raise InvalidRequest(f"input {name!r} ends within element {index} of {count}")
        found[index] = bytes(data[start:at])
    if at != data.nbytes:
        raise InvalidRequest(f"input {name!r} has {data.nbytes - at} bytes after its {count} elements")
    return found


def tensor_of(name: str, array: np.ndarray, data_type: str) -> Tensor:
    """`data_type` is the config's: of BF16 an array has the bits."""
    shape = tuple(int(size) for size in array.shape)
    if array.dtype.hasobject:
        return Tensor(name, "BYTES", shape, texts_as_bytes(array.reshape(-1).tolist()))
    data: Buffer = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""
    return Tensor(name, datatype_of(data_type), shape, data)


def numbers_as_bytes(values: Sequence[float], kind: np.dtype) -> bytes:
    """A message's repeated field, in pieces: one call has the interpreter to itself. Raises OverflowError."""
    pieces = range(0, len(values), _PIECE)
    return b"".join(np.array(values[at : at + _PIECE], kind).tobytes() for at in pieces)


def texts_as_bytes(texts: Sequence[bytes]) -> bytes:
    """Elements of BYTES, each after its length."""
    return b"".join(part for text in texts for part in (_LENGTH.pack(len(text)), text))
