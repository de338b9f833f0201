"""Requests that a model runs before it serves: `model_warmup` of its config, as arrays of whole batches."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

from maitred.core.errors import CheckpointError
from maitred.tensor.config import ANY_MESSAGE, inputs_of, type_name
from maitred.tensor.instance import NUMPY_TYPES, Arrays

MOST_BYTES = 1 << 30  # of one input of a warm-up, or of one state
FOLDER = "warmup"  # beside the versions; holds the files that a config names


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
        row = array_from_file(where, folder / FOLDER / given.input_data_file, kind, dims)
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
        return np.array([*_texts(where, content, count), None], object)[:-1].reshape(dims)
    if len(content) != count * kind.itemsize:
        raise CheckpointError(
            f"{where}: {path} has {len(content)} bytes, and dims {list(dims)} need {count * kind.itemsize}"
        )
    return np.frombuffer(content, kind).reshape(dims)


def _texts(where: str, content: bytes, count: int) -> list[bytes]:
    """Each text has its length before it, in four bytes, the lowest first."""
    texts, at = [], 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "little")
        texts.append(content[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(content) or len(texts) != count:
        raise CheckpointError(f"{where}: {len(content)} bytes hold {len(texts)} texts, and dims need {count}")
    return texts
