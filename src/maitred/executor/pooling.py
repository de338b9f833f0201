"""Pooling: numbers in place of tokens, made of the last states of a prompt, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.executor.native_program import NativeProgram, RaggedStep
from maitred.executor.sampler import SampledToken
from maitred.executor.state import HeldRequest
from maitred.model.pooling import PooledLayer

Floats = NDArray[np.float32]

ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "sigmoid": lambda x: (1 / (1 + np.exp(-x))).astype(np.float32),
}


def apply(layer: PooledLayer, x: Floats) -> Floats:
    """The layer's values for a vector."""
    y = layer.weight @ x
    return ACTIVATIONS[layer.activation](y if layer.bias is None else y + layer.bias)


class PoolingRow(NamedTuple):
    """Part of a prompt in a step: tokens [start, start + num_tokens), `first` in the step; `samples` if it is the last
    one."""

    row: int  # in the plan
    state: HeldRequest
    start: int
    first: int
    num_tokens: int
    samples: bool


class Pooler:
    """Makes vectors of the states that a program's step leaves. `kind` is mean, cls or last."""

    def __init__(
        self,
        runner: NativeProgram,
        kind: str,
        *,
        norm: Floats | None = None,
        eps: float = 0.0,
        layers: Sequence[PooledLayer] = (),
    ) -> None:
        """`norm` is the weight of a decoder's last RMS norm; `layers` are behind pooling."""
        self._runner, self._kind, self._norm, self._eps, self._layers = runner, kind, norm, np.float32(eps), layers
        encoder = runner.program.spec.encoder
        self._has_types = encoder is not None and encoder.num_types > 1

    def tell_types(self, rows: Iterable[PoolingRow], step: RaggedStep) -> None:
        """Let the ids of an encoder's tokens tell their types too (`program.EmbedMore`)."""
        for row in rows:
            asked = row.state.pooling
            if asked is not None and asked.second_from and self._has_types:
                step.token_ids[row.first + asked.second_from : row.first + row.num_tokens] += self._runner.vocab_size

    def pool(self, rows: Sequence[PoolingRow], tokens: dict[int, SampledToken]) -> None:
        """Put the vectors of prompts that end into `tokens`; the step has just run."""
        runner, scored, states = self._runner, list[PoolingRow](), list[PoolingRow]()
        for row in rows:
            if row.state.pooling is not None and row.state.pooling.task == "logits":
                scored.append(row)
            elif self._kind == "mean":
                self._sum(row)
                if row.samples:
                    mean: Floats = row.state.pooled_sum / np.float32(row.start + row.num_tokens)
                    tokens[row.row] = self._finished(mean)
            else:
                states.append(row)
        for row, logits_V in self._each(scored, runner.more_logits):
            tokens[row.row] = _token(logits_V[list(row.state.sampler.sampling.allowed_token_ids or ())])
        for row, state_D in self._each(states, runner.last_states):
            tokens[row.row] = self._finished(self._normed(state_D[None])[0])

    def _each(
        self, rows: Sequence[PoolingRow], compute: Callable[[Sequence[int]], Floats]
    ) -> Iterable[tuple[PoolingRow, Floats]]:
        """Values of the token that stands for each prompt that ends, as many at once as there is room for."""
        ends, most = [row for row in rows if row.samples], self._runner.max_logits
        for at in range(0, len(ends), most):
            some = ends[at : at + most]
            is_first = self._kind == "cls"
            places = [row.first if is_first else row.first + row.num_tokens - 1 for row in some]
            yield from zip(some, compute(places), strict=True)

    def _sum(self, row: PoolingRow) -> None:
        """Add rows one by one, so that the sum is the same however a prompt was cut."""
        normed, state = self._normed(self._runner.all_states[row.first : row.first + row.num_tokens]), row.state
        if row.start == 0:
            state.pooled_sum = np.zeros(normed.shape[1], np.float32)
        elif state.num_pooled != row.start:
            raise KernelError(f"request {state.request_id} goes on at {row.start}, and {state.num_pooled} are summed")
        total: Floats = np.add.reduce(np.concatenate([state.pooled_sum[None], normed]), axis=0)
        state.pooled_sum = total
        state.num_pooled = row.start + row.num_tokens

    def _normed(self, states_nD: Floats) -> Floats:
        if self._norm is None:
            return states_nD
        squares_n1 = np.mean(np.square(states_nD), axis=1, keepdims=True, dtype=np.float32)
        return np.asarray(states_nD / np.sqrt(squares_n1 + self._eps) * self._norm, np.float32)

    def _finished(self, vector_D: Floats) -> SampledToken:
        for layer in self._layers:
            vector_D = apply(layer, vector_D)
        return _token(vector_D)


def _token(vector_D: Floats) -> SampledToken:
    if not np.isfinite(vector_D).all():
        return SampledToken(0, error="the model's states are not finite numbers")
    return SampledToken(0, is_missing=True, complete=True, vector=vector_D.astype(np.float32).tobytes())
