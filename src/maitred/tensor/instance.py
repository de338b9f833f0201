"""An instance of an ONNX model: runs one batch, arrays in and arrays out, in the shapes that the config tells clients.

Numbers are not copied on their way in: the runtime is given the very address of an array that is contiguous. An array
of BYTES is of objects of type bytes; one of BF16 is of uint16, its bits.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from maitred.core.errors import CheckpointError, InvalidRequest, KernelError, MaitredError
from maitred.tensor.config import ANY_MESSAGE, SCHEMA, WILDCARD, inputs_of, outputs_of, parameters_of
from maitred.tensor.fill import kept_tensors, mismatches
from maitred.tensor.onnx_graph import ELEMENT_TYPES, Graph, GraphTensor
from maitred.tensor.schema import missing

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read at the import: no uploads, and no .ses file in TMPDIR
try:
    import onnxruntime
except ImportError:
    raise missing("onnxruntime") from None

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
ACCELERATORS = {"cuda": CUDA, "openvino": "OpenVINOExecutionProvider"}  # by Triton's names
_GPU = SCHEMA.enums["ModelInstanceGroup.Kind"]["KIND_GPU"]
_LEVELS = {-1: "ORT_ENABLE_BASIC", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}  # optimization.graph.level; else all
_TRUE = ("1", "true")
# The runtime's names of types, as a config has them.
_RUNTIME_TYPES = {
    "float": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "string": 8, "bool": 9,
    "float16": 10, "double": 11, "uint32": 12, "uint64": 13, "bfloat16": 16,
}  # fmt: skip

Value = onnxruntime.OrtValue  # a tensor of the runtime's own
Provider = tuple[str, Mapping[str, str]]  # a name, and its options


_RAISED = onnxruntime.capi.onnxruntime_pybind11_state
_REFUSALS = (_RAISED.Fail, _RAISED.InvalidArgument, _RAISED.RuntimeException)
_OF_MACHINE = re.compile("allocate memory|bad_alloc|CUDA|CUDNN|CUBLAS", re.IGNORECASE)


# Threads that spin while they wait take cores from the reader of requests, and from a language model's steps.
_ENTRIES = {"session.intra_op.allow_spinning": "0"}


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Settings that a session is opened with."""

    providers: tuple[Provider, ...] = ((CPU, {}),)  # the first that can run a node does
    fell_back: tuple[str, ...] = ()  # accelerators that the config asks for and this machine does not have
    graph_level: str = "ORT_ENABLE_ALL"
    intra_op_threads: int = 0  # 0 is the runtime's choice: a thread for each core
    inter_op_threads: int = 0
    parallel: bool = False  # nodes that do not wait for each other run beside each other
    memory_arena: bool = True
    memory_pattern: bool = True
    entries: tuple[tuple[str, str], ...] = ()  # the runtime's own, such as session.intra_op.allow_spinning


def settings_for(
    config: ANY_MESSAGE, group: ANY_MESSAGE, gpu: int | None, available: Collection[str]
) -> SessionSettings:
    """Return the settings of one group's instances on one device; `available` are the runtime's providers here."""
    parameters = parameters_of(config)
    providers, fell_back = _providers(config, group, gpu, available)
    return SessionSettings(
        providers=providers,
        fell_back=fell_back,
        graph_level=_LEVELS.get(config.optimization.graph.level, "ORT_ENABLE_ALL"),
        intra_op_threads=int(parameters.get("intra_op_thread_count", "0")),
        inter_op_threads=int(parameters.get("inter_op_thread_count", "0")),
        parallel=parameters.get("execution_mode", "0") == "1",
        memory_arena=parameters.get("enable_mem_arena", "1") in _TRUE,
        memory_pattern=parameters.get("enable_mem_pattern", "1") in _TRUE,
        entries=tuple((_ENTRIES | {k: v for k, v in parameters.items() if k.startswith("session.")}).items()),
    )


def _providers(
    config: ANY_MESSAGE, group: ANY_MESSAGE, gpu: int | None, available: Collection[str]
) -> tuple[tuple[Provider, ...], tuple[str, ...]]:
    """Accelerators in the config's order, then the device's own, then the CPU, which is always there."""
    asked = config.optimization.execution_accelerators
    on_gpu = group.kind == _GPU
    accelerators = asked.gpu_execution_accelerator if on_gpu else asked.cpu_execution_accelerator
    wanted = [(each.name, ACCELERATORS.get(each.name, ""), dict(each.parameters)) for each in accelerators]
    if on_gpu:
        wanted.append(("cuda", CUDA, {} if gpu is None else {"device_id": str(gpu)}))
    providers = tuple((provider, options) for _, provider, options in wanted if provider in available)
    return (*providers, (CPU, {})), tuple(name for name, provider, _ in wanted if provider not in available)


def open_session(path: Path, settings: SessionSettings, also: Callable[[Any], None] = lambda options: None) -> Any:
    """Make an onnxruntime.InferenceSession; `also` changes its options. Raises CheckpointError in one line."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what the runtime cannot do is raised, and told in one line
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, settings.graph_level)
    options.intra_op_num_threads = settings.intra_op_threads
    options.inter_op_num_threads = settings.inter_op_threads
    modes = onnxruntime.ExecutionMode
    options.execution_mode = modes.ORT_PARALLEL if settings.parallel else modes.ORT_SEQUENTIAL
    options.enable_cpu_mem_arena = settings.memory_arena
    options.enable_mem_pattern = settings.memory_pattern
    try:
        for key, value in settings.entries:
            options.add_session_config_entry(key, value)
        also(options)
        return onnxruntime.InferenceSession(str(path), options, providers=[*settings.providers])
    except Exception as error:  # the runtime's own have no root but this
        raise CheckpointError(f"{path}: onnxruntime cannot load it: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """The runtime's message without its head `[ONNXRuntimeError] : 10 : INVALID_GRAPH :`."""
    text = " ".join(str(error).split())
    return text.rpartition("[ONNXRuntimeError] : ")[2].partition(" : ")[2] or text


def run_error(error: Exception) -> MaitredError:
    """InvalidRequest for values that a node refuses (an index out of bounds, shapes that do not go together);
    KernelError where memory or a device fails.
    """
    told = f"onnxruntime cannot run the batch: {one_line(error)}"
    is_refusal = isinstance(error, _REFUSALS) and not _OF_MACHINE.search(told)
    return InvalidRequest(told) if is_refusal else KernelError(told)


def available_providers() -> Sequence[str]:
    names: list[str] = onnxruntime.get_available_providers()
    return names


def graph_of(session: Any) -> Graph:
    """Inputs and outputs with the shapes that the runtime inferred. Raises CheckpointError for what is no tensor."""
    return Graph(
        inputs=tuple(map(_tensor, session.get_inputs())),
        outputs=tuple(map(_tensor, session.get_outputs())),
        defaults=tuple(map(_tensor, session.get_overridable_initializers())),
        exact=True,
    )


def _tensor(node: Any) -> GraphTensor:
    kind = node.type.removeprefix("tensor(").removesuffix(")")
    if kind not in _RUNTIME_TYPES:
        raise CheckpointError(f"{node.name!r} is {node.type}, which has no name in a config")
    shape = tuple(dim if isinstance(dim, int) and dim >= 0 else WILDCARD for dim in node.shape)
    return GraphTensor(node.name, ELEMENT_TYPES[_RUNTIME_TYPES[kind]], shape)


# ---- instances: one batch, arrays in and arrays out


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
