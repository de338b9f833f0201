"""Texts as an encoder's inputs, and its output as their vectors: pooling, normalising, fewer dimensions. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maitred.core.errors import KernelError
from maitred.core.tensor_request import Tensor
from maitred.engine.vectors import check_dimensions, unit
from maitred.executor.pooling import divided, with_states
from maitred.model.pooling import OF_ONE_TOKEN
from maitred.tensor.arrays import array_of, tensor_of
from maitred.tensor.encoder_config import IDS, MASK, Encoder
from maitred.tensor.instance import NUMPY_TYPES


def inputs_for(encoder: Encoder, token_ids: Sequence[int]) -> tuple[Tensor, ...]:
    """One text as a row of each input, [1, length]."""
    num_tokens = len(token_ids)
    row = np.zeros((1, encoder.fixed_length or num_tokens), np.int64)
    values: dict[str, np.ndarray | int] = {
        IDS: np.asarray(token_ids, np.int64),
        MASK: 1,
        "position_ids": np.arange(num_tokens),
    }
    found = []
    for spec in encoder.inputs:
        row[0, :num_tokens] = values.get(spec.name, 0)
        found.append(tensor_of(spec.name, row.astype(NUMPY_TYPES[spec.data_type]), spec.data_type))
    return tuple(found)


def vector_of(encoder: Encoder, output: Tensor, num_tokens: int, num_dimensions: int | None = None) -> np.ndarray:
    """A text's vector, float32 [width], or its first `num_dimensions`; of length 1 where it is normalised.

    Raises InvalidRequest for more dimensions than there are, KernelError for an output without the text's tokens.
    """
    values = array_of(output)
    if values.ndim != (3 if encoder.pooling else 2) or len(values) != 1 or (values.ndim == 3 and not values.shape[1]):
        raise KernelError(f"output {output.name!r} has shape {list(values.shape)} for a text of {num_tokens} tokens")
    vector = _pooled(encoder.pooling, values[0], num_tokens).astype(np.float32)  # a copy: the frame goes
    check_dimensions(num_dimensions, len(vector))
    vector = vector[:num_dimensions]
    return unit(vector) if encoder.normalize else vector


def _pooled(pooling: str, values: np.ndarray, num_tokens: int) -> np.ndarray:
    """`values` are [length, width], of which the first tokens are the text's; [width] where the graph has pooled."""
    if pooling in OF_ONE_TOKEN:
        values = values[0 if pooling == "cls" else min(num_tokens, len(values)) - 1]
    elif pooling:
        values = values[:num_tokens].astype(np.float32)
        values = divided(pooling, with_states(pooling, None, values, 0), len(values))
    return values
