"""An instance of an ONNX model: runs one batch, arrays in and arrays out, in the shapes that the config tells clients.

Numbers are not copied on their way in: the runtime is given the very address of an array that is contiguous. An array
of BYTES is of objects of type bytes; one of BF16 is of uint16, its bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np

from maitred.core.errors import CheckpointError, InvalidRequest
from maitred.tensor.config import ANY_MESSAGE, WILDCARD, inputs_of, outputs_of
from maitred.tensor.fill import kept_tensors, mismatches
from maitred.tensor.session import Value, graph_of, run_error

Arrays = Mapping[str, np.ndarray]

NUMPY_TYPES: Mapping[str, np.dtype] = {  # of the arrays that an instance takes and gives
    "TYPE_BOOL": np.dtype(bool),
    "TYPE_UINT8": np.dtype(np.uint8),
    "TYPE_UINT16": np.dtype(np.uint16),
    "TYPE_UINT32": np.dtype(np.uint32),
    "TYPE_UINT64": np.dtype(np.uint64),
    "TYPE_INT8": np.dtype(np.int8),
    "TYPE_INT16": np.dtype(np.int16),
    "TYPE_INT32": np.dtype(np.int32),
    "TYPE_INT64": np.dtype(np.int64),
    "TYPE_FP16": np.dtype(np.float16),
    "TYPE_FP32": np.dtype(np.float32),
    "TYPE_FP64": np.dtype(np.float64),
    "TYPE_STRING": np.dtype(object),
    "TYPE_BF16": np.dtype(np.uint16),
}
_ONNX_BF16 = 16


class ModelInstance(Protocol):
    """Runs batches of a model, whatever it is made of."""

    def prepare(self) -> None:
        """Prepare before a batch, outside its time. Raises InstanceLost where no process can be started again."""

    def run(self, inputs: Arrays, wanted: Collection[str] = ()) -> dict[str, np.ndarray]:
        """Run as `Instance.run`; raises InstanceLost too, then the batch is run again."""

    def close(self) -> None:
        """Gives back what the collector would not."""


class SessionInstance:
    """A session that runs batches, one at a time or several: threads may share it."""

    def __init__(self, session: Any, config: ANY_MESSAGE) -> None:
        """Raises CheckpointError where the graph, as the runtime sees it, differs from the config."""
        graph = graph_of(session)
        differing = mismatches(config, graph)
        if differing:
            raise CheckpointError("; ".join(differing))
        kept_in, kept_out = kept_tensors(config)
        self._session, self._batched = session, config.max_batch_size > 0
        self._tensors = {each.name: each for each in (*graph.inputs, *graph.defaults, *graph.outputs)}
        self._inputs = {spec.name: spec for spec in inputs_of(config)}
        self._outputs = {spec.name: spec for spec in outputs_of(config)}
        self._needed = {each.name for each in graph.inputs if not self._is_optional(each.name)}
        self._given = [*self._outputs, *sorted(kept_out - {*self._outputs})]
        self._types = {name: self._tensors[name].data_type for name in (*self._inputs, *kept_in)}
        self._half = any(each.data_type == "TYPE_BF16" for each in self._tensors.values())

    def _is_optional(self, name: str) -> bool:
        return name in self._inputs and self._inputs[name].optional

    @property
    def providers(self) -> tuple[str, ...]:
        """Providers of the session, which may be fewer than were asked for."""
        return tuple(self._session.get_providers())

    def prepare(self) -> None:
        """A session is always ready."""

    def close(self) -> None:
        """Close; a session gives its memory back when it has no holder."""

    def run(self, inputs: Arrays, wanted: Collection[str] = ()) -> dict[str, np.ndarray]:
        """Outputs by name: those `wanted`, or all with states of sequences. Shapes begin with the rows of a batch.

        Raises InvalidRequest for names, types, texts and values that are not the model's, KernelError where the
        machine fails.
        """
        check_inputs(inputs, self._types, self._needed)
        names = [name for name in self._given if not wanted or name in wanted]
        feeds = {name: self._fed(name, array) for name, array in inputs.items()}
        try:
            values = self._run_half(names, feeds) if self._half else self._session.run(names, feeds)
        except Exception as error:  # the runtime's own have no root but this
            raise run_error(error) from None
        return {name: self._answered(name, value) for name, value in zip(names, values, strict=True)}

    def _fed(self, name: str, array: np.ndarray) -> np.ndarray:
        spec = self._inputs.get(name)
        array = np.ascontiguousarray(array).reshape(array.shape)  # the former makes [1] of no dimensions
        try:
            if spec is not None and spec.reshape is not None:
                array = array.reshape(self._between(array.shape, spec.dims, spec.reshape))
            elif self._tensors[name].shape == ():
                array = array.reshape(())
        except ValueError:
            raise InvalidRequest(
                f"input {name!r} of shape {list(array.shape)} has another number of elements"
            ) from None
        return _texts(name, array) if array.dtype.hasobject else array

    def _answered(self, name: str, value: np.ndarray) -> np.ndarray:
        spec = self._outputs.get(name)
        if spec is not None and spec.reshape is not None:
            value = value.reshape(self._between(value.shape, spec.reshape, spec.dims))
        elif spec is not None and self._tensors[name].shape == ():
            value = value.reshape((1,) * len(spec.dims))
        return _bytes(value) if value.dtype.hasobject else value

    def _between(self, shape: tuple[int, ...], dims: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
        return reshaped(shape, dims, wanted, batched=self._batched)

    def _run_half(self, names: list[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """numpy has no bfloat16, so that tensors cross as the runtime's own values."""
        values = {}
        for name, array in feeds.items():
            half = self._tensors[name].data_type == "TYPE_BF16"
            make = Value.ortvalue_from_numpy
            values[name] = Value.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BF16) if half else make(array)
        found = self._session.run_with_ort_values(names, values)
        return [_bits(value) if value.element_type() == _ONNX_BF16 else value.numpy() for value in found]


def check_inputs(inputs: Arrays, types: Mapping[str, str], needed: Collection[str]) -> None:
    """`types` are of all that a model takes, `needed` those that it must be given. Raises InvalidRequest."""
    for name, array in inputs.items():
        if name not in types:
            raise InvalidRequest(f"{name!r} is no input of the model, which has {', '.join(types)}")
        asked = NUMPY_TYPES[types[name]]
        if array.dtype != asked:
            raise InvalidRequest(f"input {name!r} is an array of {array.dtype}, and must be of {asked}")
    absent = {*needed} - {*inputs}
    if absent:
        raise InvalidRequest(f"input {min(absent)!r} is missing")


def reshaped(
    shape: tuple[int, ...], dims: tuple[int, ...], wanted: tuple[int, ...], *, batched: bool
) -> tuple[int, ...]:
    """The shape of an array of `dims` as one of `wanted`: their dimensions of any length answer each other in order."""
    rows, sizes = (shape[:1], shape[1:]) if batched else ((), shape)
    if len(sizes) != len(dims):
        raise InvalidRequest(f"an array of shape {list(shape)} does not have dims {list(dims)}")
    open_sizes = iter([size for size, dim in zip(sizes, dims, strict=True) if dim == WILDCARD])
    return (*rows, *(next(open_sizes) if dim == WILDCARD else dim for dim in wanted))


def _texts(name: str, array: np.ndarray) -> np.ndarray:
    """The runtime takes text, and the wire has bytes."""
    try:
        return _each(array, lambda value: value.decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"input {name!r} has a text that is no UTF-8: byte 0x{error.object[error.start]:02x}"
        ) from None


def _bytes(array: np.ndarray) -> np.ndarray:
    return _each(array, lambda value: value.encode())


def _each(array: np.ndarray, change: Any) -> np.ndarray:
    changed = np.empty(array.shape, object)
    changed.reshape(-1)[:] = [change(value) for value in array.reshape(-1)]
    return changed


def _bits(value: Any) -> np.ndarray:
    """A copy, for the memory is the value's."""
    shape = value.shape()
    size = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(ctypes.string_at(value.data_ptr(), 2 * size), np.uint16).reshape(shape)
