"""Gaps of a config, filled as Triton does: from the files of a version, and from its graph.

A config that names its inputs and its outputs is taken as it stands; in any other the missing side comes from the graph, and
max_batch_size and dynamic_batching where every tensor's first dimension is of any length.
Source: `AutoCompleteBackendFields` of Triton's `core`, `AutoCompleteConfig` of its `onnxruntime_backend`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from maitred.errors import CheckpointError
from maitred.tensor.config import ANY_MESSAGE, WILDCARD, TensorSpec, inputs_of, outputs_of
from maitred.tensor.config_checks import BACKENDS, ENSEMBLE
from maitred.tensor.config_fields import DATA_TYPES, ModelConfig
from maitred.tensor.onnx_graph import Graph, GraphTensor

MODEL_FILES = {"onnxruntime": "model.onnx", "python": "model.py"}
DEFAULT_MAX_BATCH_SIZE = 4  # Triton's --backend-config=default-max-batch-size
SEQUENCE_IDLE_US = 1_000_000  # after which a sequence that nobody continues is forgotten


def filled_from_files(config: ANY_MESSAGE, name: str, files: Collection[str]) -> ANY_MESSAGE:
    """A copy with name, backend, platform, file name and version policy. `files` are those of the highest version's folder."""
    filled = ModelConfig()
    filled.CopyFrom(config)
    filled.name = filled.name or name
    if not filled.HasField("version_policy"):
        filled.version_policy.latest.num_versions = 1
    if filled.platform != ENSEMBLE and not filled.HasField("ensemble_scheduling"):
        _fill_backend(filled, files)
    if filled.HasField("sequence_batching") and not filled.sequence_batching.max_sequence_idle_microseconds:
        filled.sequence_batching.max_sequence_idle_microseconds = SEQUENCE_IDLE_US
    return filled


def _fill_backend(config: ANY_MESSAGE, files: Collection[str]) -> None:
    config.backend = config.backend or _backend(config, files)
    config.platform = config.platform or BACKENDS.get(config.backend, "")
    config.default_model_filename = config.default_model_filename or MODEL_FILES.get(config.backend, "")


def _backend(config: ANY_MESSAGE, files: Collection[str]) -> str:
    """By the platform, else by the name of the model's file, else by what lies there; empty where nothing tells."""
    if config.platform:
        return next((name for name, platform in BACKENDS.items() if platform == config.platform), "")
    named = [config.default_model_filename] if config.default_model_filename else files
    return next((backend for backend, file in MODEL_FILES.items() if file in named), "")


def filled_from_graph(config: ANY_MESSAGE, graph: Graph) -> ANY_MESSAGE:
    """A copy with inputs, outputs, max_batch_size and dynamic_batching. Raises CheckpointError."""
    filled = ModelConfig()
    filled.CopyFrom(config)
    if not filled.input or not filled.output:
        _fill_batching(filled, graph)
        for have, tensors in ((filled.input, graph.inputs), (filled.output, graph.outputs)):
            if not have:
                for tensor in sorted(tensors, key=lambda each: each.name):
                    _add(have, tensor, batched=filled.max_batch_size > 0)
    return with_defaults(filled)


def with_defaults(config: ANY_MESSAGE) -> ANY_MESSAGE:
    """What holds for every backend: preferred sizes are the largest one, a group of instances has a name and one instance."""
    for each in (config.dynamic_batching, config.sequence_batching.oldest):
        if _is_set(config, each) and not each.preferred_batch_size and config.max_batch_size > 0:
            each.preferred_batch_size.append(config.max_batch_size)
    if config.platform != ENSEMBLE and not config.instance_group:
        config.instance_group.add(name=config.name)
    for at, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{at}"
        group.count = group.count or 1
    return config


def _is_set(config: ANY_MESSAGE, batching: ANY_MESSAGE) -> bool:
    if config.HasField("dynamic_batching"):
        return bool(batching.DESCRIPTOR == config.dynamic_batching.DESCRIPTOR)
    return bool(
        config.HasField("sequence_batching")
        and config.sequence_batching.HasField("oldest")
        and batching.DESCRIPTOR == config.sequence_batching.oldest.DESCRIPTOR
    )


def _fill_batching(config: ANY_MESSAGE, graph: Graph) -> None:
    fixed = next((each for each in (*graph.inputs, *graph.outputs) if not _batches(each)), None)
    if fixed is not None:
        if config.max_batch_size > 0:
            raise CheckpointError(
                f"max_batch_size is {config.max_batch_size}, and the first dimension of {fixed.name!r}, "
                f"{_shape(fixed.shape)}, is not of any length, so that the model takes no batches"
            )
        return
    config.max_batch_size = config.max_batch_size or DEFAULT_MAX_BATCH_SIZE
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()


def _batches(tensor: GraphTensor) -> bool:
    return bool(tensor.shape) and tensor.shape[0] == WILDCARD  # type: ignore[index]


def _add(side: ANY_MESSAGE, tensor: GraphTensor, *, batched: bool) -> None:
    """A tensor without dimensions of its own is declared as [1], and reshaped where there is a batch."""
    dims = (tensor.shape or ())[int(batched) :]
    added = side.add(name=tensor.name, data_type=DATA_TYPES[tensor.data_type], dims=dims or (1,))
    if not dims and batched:
        added.reshape.SetInParent()


# ---- config against graph


def mismatches(config: ANY_MESSAGE, graph: Graph) -> tuple[str, ...]:
    """Where config and graph differ, each with what both say."""
    known = {each.name: each for each in (*graph.inputs, *graph.defaults)}
    controlled = {control.name for control in config.sequence_batching.control_input}
    controlled |= {state.input_name for state in config.sequence_batching.state}
    states = {state.output_name for state in config.sequence_batching.state}
    inputs, outputs, batched = inputs_of(config), outputs_of(config), config.max_batch_size > 0
    return tuple(
        chain(
            _missing("input", {each.name for each in inputs} | controlled, graph.inputs),
            _differing("input", inputs, known, batched, exact=False),
            _differing("output", outputs, {each.name: each for each in graph.outputs}, batched, exact=graph.exact),
            _unknown("control or state", controlled, known),
            _unknown("state", states, {each.name: each for each in graph.outputs}),
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
    side: str, specs: Sequence[TensorSpec], tensors: dict[str, GraphTensor], batched: bool, *, exact: bool
) -> Iterator[str]:
    yield from _unknown(side, [spec.name for spec in specs], tensors)
    for spec in specs:
        tensor = tensors.get(spec.name)
        if tensor is not None and spec.data_type != tensor.data_type:
            yield f"{side} {spec.name!r} is {spec.data_type} in the config, {tensor.data_type} in the model"
        elif tensor is not None and tensor.shape is not None:
            yield from _other_shape(side, spec, tensor.shape, batched, exact=exact)


def _other_shape(side: str, spec: TensorSpec, shape: tuple[int, ...], batched: bool, *, exact: bool) -> Iterator[str]:
    """`exact`: a dimension of any length in the model is of any length in the config too, as the runtime's outputs are."""
    dims = (WILDCARD, *spec.model_dims) if batched else spec.model_dims
    where, batch = f"{side} {spec.name!r}", ", with the batch before dims" if batched else ""
    if batched and (not shape or shape[0] != WILDCARD):
        yield f"{where}: max_batch_size is over 0, and the model's shape {_shape(shape)} begins with no dimension of any length"
    elif not shape and all(dim == 1 for dim in dims):
        return
    elif len(dims) != len(shape):
        yield f"{where} has {len(dims)} dimensions in the config ({_shape(dims)}{batch}), {len(shape)} in the model ({_shape(shape)})"
    else:
        for at, (dim, own) in enumerate(zip(dims, shape, strict=True)):
            if dim != own and (exact or own != WILDCARD):
                yield f"{where} has {dim} as dimension {at} in the config ({_shape(dims)}{batch}), {own} in the model ({_shape(shape)})"


def _shape(shape: Sequence[int] | None) -> str:
    return "unknown" if shape is None else str(list(shape))
