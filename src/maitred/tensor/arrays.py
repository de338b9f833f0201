"""Tensors as arrays and back; and tensors that the server makes itself, for warm-ups and for sequences."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np

from maitred.core.errors import CheckpointError, InvalidRequest
from maitred.core.tensor_request import Buffer, Tensor
from maitred.tensor.config import ANY_MESSAGE, SCHEMA, DeclaredTensor, inputs_of, type_name
from maitred.tensor.instance import NUMPY_TYPES, Arrays

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


# ---- arrays that the server makes itself, for warm-ups


MOST_BYTES = 1 << 30  # of one input of a warm-up, or of one state
WARMUP_FOLDER = "warmup"  # beside the versions; holds the files that a config names


def warmup_batches(config: ANY_MESSAGE, folder: Path) -> Iterator[tuple[str, int, Arrays]]:
    """Name, how often it is run, and the batch. Raises CheckpointError for data that does not fit."""
    for at, warmup in enumerate(config.model_warmup):
        rows = max(warmup.batch_size, 1) if config.max_batch_size > 0 else None
        where = f"model_warmup[{at}]"
        absent = sorted({spec.name for spec in inputs_of(config) if not spec.optional} - {*warmup.inputs})
        if absent:
            raise CheckpointError(f"{where} has no input {absent[0]!r}")
        batch = {name: _array(f"{where} input {name!r}", given, rows, folder) for name, given in warmup.inputs.items()}
        batch |= {name: _rows(row, rows) for name, row in _kept(config) if name not in batch}
        yield warmup.name or where, max(warmup.count, 1), batch


def _array(where: str, given: ANY_MESSAGE, rows: int | None, folder: Path) -> np.ndarray:
    """The same data for each row of a batch."""
    kind, dims = NUMPY_TYPES[type_name(given.data_type)], tuple(given.dims)
    check_size(where, kind, (rows or 1, *dims))
    if given.WhichOneof("input_data_type") == "input_data_file":
        row = array_from_file(where, folder / WARMUP_FOLDER / given.input_data_file, kind, dims)
    else:
        row = made_array(kind, dims, random=given.random_data)
    return _rows(row, rows)


def _rows(row: np.ndarray, rows: int | None) -> np.ndarray:
    return row if rows is None else np.repeat(row[np.newaxis], rows, axis=0)


def check_size(where: str, kind: np.dtype, dims: tuple[int, ...]) -> None:
    """Raises CheckpointError, before anything of that size is allocated."""
    num_bytes = prod(dims) * kind.itemsize
    if num_bytes > MOST_BYTES:
        raise CheckpointError(f"{where} of shape {list(dims)} takes {num_bytes} bytes; make it {MOST_BYTES} at most")


def _kept(config: ANY_MESSAGE) -> Iterator[tuple[str, np.ndarray]]:
    """Zeros for what the server itself gives a sequence: its state, and its controls."""
    for state in config.sequence_batching.state:
        kind, dims = NUMPY_TYPES[type_name(state.data_type)], tuple(max(dim, 1) for dim in state.dims)
        check_size(f"state {state.input_name!r}", kind, (max(config.max_batch_size, 1), *dims))
        yield state.input_name, np.zeros(dims, kind)
    for tensor in config.sequence_batching.control_input:
        for control in tensor.control:
            yield tensor.name, np.zeros(1, NUMPY_TYPES[control_type(control)])


def control_type(control: ANY_MESSAGE) -> str:
    """Return the type of the tensor that a control of sequences fills."""
    if control.int32_false_true:
        return "TYPE_INT32"
    if control.fp32_false_true:
        return "TYPE_FP32"
    return "TYPE_BOOL" if control.bool_false_true else type_name(control.data_type)


def made_array(kind: np.dtype, dims: tuple[int, ...], *, random: bool) -> np.ndarray:
    """Zeros, or numbers from 0 to 1 that are the same at every start; whole ones may be places in a table."""
    if kind.hasobject:
        return np.full(dims, b"", object)
    if not random:
        return np.zeros(dims, kind)
    numbers = np.random.default_rng(0)
    return numbers.random(dims).astype(kind) if kind.kind == "f" else numbers.integers(0, 2, dims).astype(kind)


def array_from_file(where: str, path: Path, kind: np.dtype, dims: tuple[int, ...]) -> np.ndarray:
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{where}: cannot read {path}: {error.strerror}") from None
    count = int(np.prod(dims, dtype=np.int64))
    if kind.hasobject:
        return np.array([*_texts_of_file(where, content, count), None], object)[:-1].reshape(dims)
    if len(content) != count * kind.itemsize:
        raise CheckpointError(
            f"{where}: {path} has {len(content)} bytes, and dims {list(dims)} need {count * kind.itemsize}"
        )
    return np.frombuffer(content, kind).reshape(dims)


def _texts_of_file(where: str, content: bytes, count: int) -> list[bytes]:
    """Each text has its length before it, in four bytes, the lowest first."""
    texts, at = [], 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "little")
        texts.append(content[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(content) or len(texts) != count:
        raise CheckpointError(f"{where}: {len(content)} bytes hold {len(texts)} texts, and dims need {count}")
    return texts


# ---- tensors of sequences: controls, and states before the first request


STATE_FOLDER = "initial_state"  # beside the versions; holds the files that a config names
MOST_ID_BYTES = 128  # of a correlation id that is a text, as Triton has it
_KINDS = SCHEMA.enums["ModelSequenceBatching.Control.Kind"]
_CORRID, _READY = _KINDS["CONTROL_SEQUENCE_CORRID"], _KINDS["CONTROL_SEQUENCE_READY"]
_START, _END = _KINDS["CONTROL_SEQUENCE_START"], _KINDS["CONTROL_SEQUENCE_END"]


def initial_states(config: ANY_MESSAGE, folder: Path) -> dict[str, Tensor]:
    """Return initial states by the names of inputs. Raises CheckpointError for a file that does not fit."""
    batched = config.max_batch_size > 0
    states = {}
    for state in config.sequence_batching.state:
        given = state.initial_state[0] if state.initial_state else state
        kind = NUMPY_TYPES[type_name(state.data_type)]
        dims = tuple(max(1, dim) for dim in given.dims)
        check_size(f"state {state.input_name!r}", kind, dims)
        if state.initial_state and given.WhichOneof("state_data") == "data_file":
            where = f"state {state.input_name!r}"
            array = array_from_file(where, folder / STATE_FOLDER / given.data_file, kind, dims)
        else:
            array = made_array(kind, dims, random=False)
        array = array[np.newaxis] if batched else array
        states[state.input_name] = tensor_of(state.input_name, array, type_name(state.data_type))
    return states


def kept_specs(config: ANY_MESSAGE) -> tuple[dict[str, DeclaredTensor], dict[str, DeclaredTensor]]:
    """Inputs and outputs that the server gives and keeps, by name."""
    batching = config.sequence_batching
    inputs = {
        each.name: DeclaredTensor(each.name, control_type(each.control[0]), (1,))
        for each in batching.control_input
        if each.control
    }
    outputs = {}
    for state in batching.state:
        kind, dims = type_name(state.data_type), tuple(state.dims)
        inputs[state.input_name] = DeclaredTensor(state.input_name, kind, dims)
        outputs[state.output_name] = DeclaredTensor(state.output_name, kind, dims)
    return inputs, outputs


def control_tensors(config: ANY_MESSAGE, correlation_id: int | str, *, start: bool, end: bool) -> Iterator[Tensor]:
    """Raises InvalidRequest for a correlation id that does not fit the model's type."""
    shape = (1, 1) if config.max_batch_size > 0 else (1,)
    is_true: Mapping[int, bool] = {_START: start, _END: end, _READY: True}
    for each in config.sequence_batching.control_input:
        for control in each.control:
            kind = control_type(control)
            if control.kind == _CORRID:
                array = _id_array(config.name, correlation_id, kind)
            else:
                pair = control.int32_false_true or control.fp32_false_true or control.bool_false_true
                array = np.array([pair[is_true[control.kind]]], NUMPY_TYPES[kind])
            yield tensor_of(each.name, array.reshape(shape), kind)


def _id_array(model: str, correlation_id: int | str, kind: str) -> np.ndarray:
    wanted = NUMPY_TYPES[kind]
    if wanted.hasobject:
        return np.array([str(correlation_id).encode()], object)
    if isinstance(correlation_id, str):
        raise InvalidRequest(f"model {model!r} takes correlation ids of {kind}, and {correlation_id!r} is a text")
    limits = np.iinfo(wanted)
    if not limits.min <= correlation_id <= limits.max:
        raise InvalidRequest(f"model {model!r} takes correlation ids of {kind}, which cannot hold {correlation_id}")
    return np.array([correlation_id], wanted)
