"""Tensors that the server itself gives a model of sequences: its controls, and the states that it is to remember."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from maitred.core.errors import InvalidRequest
from maitred.core.tensor_request import Tensor
from maitred.tensor.arrays import tensor_of
from maitred.tensor.config import ANY_MESSAGE, TensorSpec, type_name
from maitred.tensor.config_fields import SCHEMA
from maitred.tensor.instance import NUMPY_TYPES
from maitred.tensor.warmup import array_from_file, check_size, control_type, made_array

FOLDER = "initial_state"  # beside the versions; holds the files that a config names
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
            array = array_from_file(where, folder / FOLDER / given.data_file, kind, dims)
        else:
            array = made_array(kind, dims, random=False)
        array = array[np.newaxis] if batched else array
        states[state.input_name] = tensor_of(state.input_name, array, type_name(state.data_type))
    return states


def kept_specs(config: ANY_MESSAGE) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """Inputs and outputs that the server gives and keeps, by name."""
    batching = config.sequence_batching
    inputs = {
        each.name: TensorSpec(each.name, control_type(each.control[0]), (1,))
        for each in batching.control_input
        if each.control
    }
    outputs = {}
    for state in batching.state:
        kind, dims = type_name(state.data_type), tuple(state.dims)
        inputs[state.input_name] = TensorSpec(state.input_name, kind, dims)
        outputs[state.output_name] = TensorSpec(state.output_name, kind, dims)
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
