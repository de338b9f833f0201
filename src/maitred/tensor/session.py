"""An ONNX Runtime session: its settings as a config gives them, its providers in order with fallback, and its graph."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maitred.core.errors import CheckpointError, InvalidRequest, KernelError, MaitredError
from maitred.tensor.config import ANY_MESSAGE, WILDCARD, parameters_of
from maitred.tensor.config_fields import SCHEMA
from maitred.tensor.extra import missing
from maitred.tensor.onnx_graph import ELEMENT_TYPES, Graph, GraphTensor

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
