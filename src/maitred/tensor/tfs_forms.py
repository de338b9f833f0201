"""TensorProto of TensorFlow as a tensor of ours, and back; and the names of its types."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from maitred.core.errors import InvalidRequest
from maitred.core.tensor_request import Tensor
from maitred.tensor.arrays import MOST_DIMS, array_of, data_type_of, numbers_as_bytes, texts_as_bytes
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.instance import NUMPY_TYPES
from maitred.tensor.tfs_fields import MESSAGES

TYPES: Mapping[str, tuple[int, str]] = {  # by datatype: the number of DataType, and the field that holds values
    "FP32": (1, "float_val"),
    "FP64": (2, "double_val"),
    "INT32": (3, "int_val"),
    "UINT8": (4, "int_val"),
    "INT16": (5, "int_val"),
    "INT8": (6, "int_val"),
    "BYTES": (7, "string_val"),
    "INT64": (9, "int64_val"),
    "BOOL": (10, "bool_val"),
    "BF16": (14, "half_val"),
    "UINT16": (17, "int_val"),
    "FP16": (19, "half_val"),
    "UINT32": (22, "uint32_val"),
    "UINT64": (23, "uint64_val"),
}
MOST_REPEATED = 1 << 20  # a value may stand for so many: few bytes must not take much memory
_DATATYPES = {number: datatype for datatype, (number, _) in TYPES.items()}


def tensor_from_proto(name: str, proto: ANY_MESSAGE) -> Tensor:
    """Raises InvalidRequest for a type that no model here has, and where shape and values do not go together."""
    datatype = _DATATYPES.get(proto.dtype)
    if datatype is None:
        raise InvalidRequest(f"input {name!r} has the dtype {proto.dtype}, which no model here takes")
    shape = tuple(dim.size for dim in proto.tensor_shape.dim)
    if proto.tensor_shape.unknown_rank or len(shape) > MOST_DIMS or any(size < 0 for size in shape):
        raise InvalidRequest(f"input {name!r} must have a shape, of sizes of 0 or more")
    if proto.tensor_content and datatype != "BYTES":
        return Tensor(name, datatype, shape, proto.tensor_content)
    return Tensor(name, datatype, shape, _values(name, proto, datatype, prod(shape)))


def _values(name: str, proto: ANY_MESSAGE, datatype: str, count: int) -> bytes:
    values = getattr(proto, TYPES[datatype][1])
    if len(values) == 1 < count <= MOST_REPEATED:
        values = list(values) * count  # one value stands for all
    if len(values) != count:
        raise InvalidRequest(f"input {name!r} has {len(values)} values, and its shape needs {count}")
    if datatype == "BYTES":
        return texts_as_bytes(values)
    kind = np.dtype(np.uint16) if datatype == "FP16" else NUMPY_TYPES[data_type_of(datatype)]  # half_val has bits
    try:
        return numbers_as_bytes(values, kind)
    except OverflowError:
        raise InvalidRequest(f"input {name!r} has a value that is no {datatype}") from None


def tensor_to_proto(tensor: Tensor) -> ANY_MESSAGE:
    """Numbers as their bytes, which is the shorter of the two forms."""
    proto = MESSAGES["TensorProto"](dtype=TYPES[tensor.datatype][0])
    for size in tensor.shape:
        proto.tensor_shape.dim.add(size=size)
    if tensor.datatype == "BYTES":
        proto.string_val.extend(array_of(tensor).reshape(-1).tolist())
    else:
        proto.tensor_content = bytes(tensor.data)
    return proto
