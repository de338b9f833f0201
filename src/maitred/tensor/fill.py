"""Gaps of a config, filled as Triton does: from the files of a version, and from its graph.

A config that names its inputs and its outputs is taken as it stands; in any other the missing side comes from the
graph, and max_batch_size and dynamic_batching where every tensor's first dimension is of any length.
Source: `AutoCompleteBackendFields` of Triton's `core`, `AutoCompleteConfig` of its `onnxruntime_backend`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from maitred.core.errors import CheckpointError
from maitred.tensor.config import (
    ANY_MESSAGE,
    DATA_TYPES,
    SCHEMA,
    WILDCARD,
    DeclaredTensor,
    ModelConfig,
    inputs_of,
    outputs_of,
)
from maitred.tensor.config_checks import BACKENDS, is_ensemble
from maitred.tensor.encoder_config import is_encoder
from maitred.tensor.onnx_graph import Graph, GraphTensor

MODEL_FILES = {"onnxruntime": "model.onnx", "python": "model.py"}
DEFAULT_MAX_BATCH_SIZE = 4  # Triton's --backend-config=default-max-batch-size
ENCODER_BATCH_SIZE = 32  # texts are short, and come by the list
ONNX_CPU_INSTANCES = 2  # of a group that does not say how many
SEQUENCE_IDLE_US = 1_000_000  # after which an idle sequence is forgotten
_KINDS = SCHEMA.enums["ModelInstanceGroup.Kind"]


def filled_from_files(config: ANY_MESSAGE, name: str, files: Collection[str]) -> ANY_MESSAGE:
    """A copy with name, backend, platform, file name and version policy. `files`: of the highest version's folder."""
    filled = ModelConfig()
    filled.CopyFrom(config)
    filled.name = filled.name or name
    if not filled.HasField("version_policy"):
        filled.version_policy.latest.num_versions = 1
    if not is_ensemble(filled):
        _fill_backend(filled, files)
    if filled.HasField("sequence_batching") and not filled.sequence_batching.max_sequence_idle_microseconds:
        filled.sequence_batching.max_sequence_idle_microseconds = SEQUENCE_IDLE_US
    return filled


def _fill_backend(config: ANY_MESSAGE, files: Collection[str]) -> None:
    config.backend = config.backend or _backend(config, files)
    config.platform = config.platform or BACKENDS.get(config.backend, "")
    config.default_model_filename = config.default_model_filename or MODEL_FILES.get(config.backend, "")


def _backend(config: ANY_MESSAGE, files: Collection[str]) -> str:
    """Return the backend by the platform, else by the model's file name, else by the files there; else empty."""
    if config.platform:
        return next((name for name, platform in BACKENDS.items() if platform == config.platform), "")
    named = [config.default_model_filename] if config.default_model_filename else files
    return next((backend for backend, file in MODEL_FILES.items() if file in named), "")


def filled_from_graph(config: ANY_MESSAGE, graph: Graph, gpus: Sequence[int] = ()) -> ANY_MESSAGE:
    """A copy with inputs, outputs, max_batch_size, dynamic_batching and defaults. Raises CheckpointError."""
    filled = ModelConfig()
    filled.CopyFrom(config)
    if not filled.input or not filled.output:
        _fill_batching(filled, graph)
        kept_in, kept_out = kept_tensors(filled)
        for have, tensors, kept in ((filled.input, graph.inputs, kept_in), (filled.output, graph.outputs, kept_out)):
            if not have:
                for tensor in tensors:
                    if tensor.name not in kept:
                        _add(have, tensor, batched=filled.max_batch_size > 0)
    return with_defaults(filled, gpus)


def kept_tensors(config: ANY_MESSAGE) -> tuple[set[str], set[str]]:
    """Inputs that the server fills and outputs that it keeps: controls of sequences, and their states."""
    batching = config.sequence_batching
    controls = {control.name for control in batching.control_input}
    return controls | {state.input_name for state in batching.state}, {state.output_name for state in batching.state}


def with_defaults(config: ANY_MESSAGE, gpus: Sequence[int] = ()) -> ANY_MESSAGE:
    """The config itself, with what holds for every backend; `gpus` are the numbers of those that are there."""
    for batching in _batchings(config):
        if not batching.preferred_batch_size and config.max_batch_size > 0:
            batching.preferred_batch_size.append(config.max_batch_size)
    if not is_ensemble(config):
        _fill_instances(config, gpus)
        for memory in ("input_pinned_memory", "output_pinned_memory"):  # hints, told as Triton tells them
            if not config.optimization.HasField(memory):
                getattr(config.optimization, memory).enable = True
    return config


def _fill_instances(config: ANY_MESSAGE, gpus: Sequence[int]) -> None:
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for at, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{at}"
        if group.kind == _KINDS["KIND_AUTO"]:
            group.kind = _KINDS["KIND_GPU" if gpus and set(group.gpus) <= set(gpus) else "KIND_CPU"]
        if group.kind == _KINDS["KIND_GPU"] and not group.gpus:
            group.gpus.extend(gpus)
        on_cpu = group.kind == _KINDS["KIND_CPU"] and config.backend == "onnxruntime"
        group.count = group.count or (ONNX_CPU_INSTANCES if on_cpu else 1)


def _batchings(config: ANY_MESSAGE) -> Iterator[ANY_MESSAGE]:
    if config.HasField("dynamic_batching"):
        yield config.dynamic_batching
    if config.HasField("sequence_batching") and config.sequence_batching.HasField("oldest"):
        yield config.sequence_batching.oldest


def _fill_batching(config: ANY_MESSAGE, graph: Graph) -> None:
    fixed = next((each for each in (*graph.inputs, *graph.outputs) if not _batches(each)), None)
    if fixed is not None:
        if config.max_batch_size > 0:
            raise CheckpointError(
                f"max_batch_size is {config.max_batch_size}, and the first dimension of {fixed.name!r}, "
                f"{_told(fixed.shape)}, is not of any length, so that the model takes no batches"
            )
        return
    usual = ENCODER_BATCH_SIZE if is_encoder(config) else DEFAULT_MAX_BATCH_SIZE
    config.max_batch_size = config.max_batch_size or usual
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()


def _batches(tensor: GraphTensor) -> bool:
    return bool(tensor.shape) and tensor.shape[0] == WILDCARD  # type: ignore[index]


def _told(shape: Sequence[int] | None) -> str:
    return "unknown" if shape is None else str(list(shape))


def _add(side: ANY_MESSAGE, tensor: GraphTensor, *, batched: bool) -> None:
    """A tensor without dimensions of its own is declared as [1], and reshaped where there is a batch."""
    dims = (tensor.shape or ())[int(batched) :]
    added = side.add(name=tensor.name, data_type=DATA_TYPES[tensor.data_type], dims=dims or (1,))
    if not dims and batched:
        added.reshape.SetInParent()


# ---- config against graph


def mismatches(config: ANY_MESSAGE, graph: Graph) -> tuple[str, ...]:
    """Differences of config and graph, each with what both say."""
    known = {each.name: each for each in (*graph.inputs, *graph.defaults)}
    kept_in, kept_out = kept_tensors(config)
    inputs, outputs, batched = inputs_of(config), outputs_of(config), config.max_batch_size > 0
    return tuple(
        chain(
            _missing("input", {each.name for each in inputs} | kept_in, graph.inputs),
            _differing("input", inputs, known, batched, exact=False),
            _differing("output", outputs, {each.name: each for each in graph.outputs}, batched, exact=graph.exact),
            _unknown("control or state", kept_in, known),
            _unknown("state", kept_out, {each.name: each for each in graph.outputs}),
        )
    )


def _missing(side: str, declared: Collection[str], tensors: Sequence[GraphTensor]) -> Iterator[str]:
    left = [each.name for each in tensors if each.name not in declared]
    if left:
        yield (
            f"the config declares {len(tensors) - len(left)} of the model's {len(tensors)} {side}s; "
            f"missing {', '.join(map(repr, left))}"
        )


def _unknown(side: str, names: Collection[str], tensors: Collection[str]) -> Iterator[str]:
    for name in sorted(set(names) - set(tensors)):
        yield f"{side} {name!r} is no tensor of the model, which has {', '.join(map(repr, tensors))}"


def _differing(
    side: str, specs: Sequence[DeclaredTensor], tensors: dict[str, GraphTensor], batched: bool, *, exact: bool
) -> Iterator[str]:
    yield from _unknown(side, [spec.name for spec in specs], tensors)
    for spec in specs:
        tensor = tensors.get(spec.name)
        if tensor is not None and spec.data_type != tensor.data_type:
            yield f"{side} {spec.name!r} is {spec.data_type} in the config, {tensor.data_type} in the model"
        elif tensor is not None and tensor.shape is not None:
            yield from _other_shape(side, spec, tensor.shape, batched, exact=exact)


def _other_shape(
    side: str, spec: DeclaredTensor, shape: tuple[int, ...], batched: bool, *, exact: bool
) -> Iterator[str]:
    """`exact`: a dimension of any length in the model is so in the config too, as Triton asks of outputs."""
    dims = (WILDCARD, *spec.model_dims) if batched else spec.model_dims
    where = f"{side} {spec.name!r}"
    ours = f"in the config ({list(dims)}{', the batch before dims' if batched else ''})"
    if batched and (not shape or shape[0] != WILDCARD):
        yield f"{where}: max_batch_size is over 0, and the model's shape {list(shape)} has no batch of any size first"
    elif not shape and all(dim == 1 for dim in dims):
        return
    elif len(dims) != len(shape):
        yield f"{where} has {len(dims)} dimensions {ours}, {len(shape)} in the model ({list(shape)})"
    else:
        for at, (dim, own) in enumerate(zip(dims, shape, strict=True)):
            if dim != own and (exact or own != WILDCARD):
                yield f"{where} has {dim} as dimension {at} {ours}, {own} in the model ({list(shape)})"
