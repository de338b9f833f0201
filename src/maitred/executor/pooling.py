"""Pooling: numbers in place of tokens, made of the last states of a prompt, and of nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.executor.sampler import SampledToken
from maitred.executor.state import HeldRequest
from maitred.model.pooling import OF_ONE_TOKEN, PooledLayer

Floats = NDArray[np.float32]

ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "sigmoid": lambda x: (1 / (1 + np.exp(-x))).astype(np.float32),
}

_DIVISORS: dict[str, Callable[[int], float]] = {  # of sums over so many tokens
    "mean": float,
    "max": lambda num_tokens: 1.0,
    "mean_sqrt_len": math.sqrt,
    "weightedmean": lambda num_tokens: num_tokens * (num_tokens + 1) / 2,
}


def with_states(kind: str, so_far: Floats | None, states_nD: Floats, start: int) -> Floats:
    """The sum of states, or the largest of each value (`max`), with those from token `start` on. They are added one by
    one, so that the sum is the same however a prompt was cut."""
    if kind == "weightedmean":
        states_nD = states_nD * np.arange(start + 1, start + len(states_nD) + 1, dtype=np.float32)[:, None]
    rows = states_nD if so_far is None else np.concatenate([so_far[None], states_nD])
    found: Floats = (np.maximum if kind == "max" else np.add).reduce(rows, axis=0)
    return found


def divided(kind: str, total_D: Floats, num_tokens: int) -> Floats:
    """What such a sum becomes at a prompt's end."""
    return total_D / np.float32(_DIVISORS[kind](num_tokens))


class PoolingRow(NamedTuple):
    """Part of a prompt in a step: tokens [start, start + num_tokens), `first` in the step; `samples` if it is the last
    one."""

    row: int  # in the plan
    state: HeldRequest
    start: int
    first: int
    num_tokens: int
    samples: bool


class StepStates(NamedTuple):
    """What a step left of its tokens, good until the next one."""

    all_states: Callable[[], Floats]  # [tokens, hidden size], where they were wanted
    last_states: Callable[[Sequence[int]], Floats]  # of some tokens, at most `most` at once
    more_logits: Callable[[Sequence[int]], Floats]  # likewise
    most: int


class Pooler:
    """Makes vectors of the states that steps leave. `kind` is one of `model.pooling.KINDS`."""

    def __init__(
        self,
        kind: str,
        *,
        norm: Floats | None = None,
        eps: float = 0.0,
        layers: Sequence[PooledLayer] = (),
        second_ids: int = 0,
    ) -> None:
        """`norm` is the weight of a decoder's last RMS norm, where states come without; `layers` are behind pooling;
        `second_ids` is added to ids of a pair's second text, by which an encoder knows its types."""
        self._kind, self._norm, self._eps, self._layers = kind, norm, np.float32(eps), layers
        self._second_ids = second_ids

    def tell_types(self, rows: Iterable[PoolingRow], token_ids: NDArray[np.int32]) -> None:
        """Let the ids of an encoder's tokens tell their types too (`program.EmbedMore`)."""
        for row in rows:
            asked = row.state.pooling
            if asked is not None and asked.second_from:
                token_ids[row.first + asked.second_from : row.first + row.num_tokens] += self._second_ids

    def pool(self, rows: Sequence[PoolingRow], step: StepStates, tokens: dict[int, SampledToken]) -> None:
        """Put the vectors of prompts that end into `tokens`."""
        scored, states = list[PoolingRow](), list[PoolingRow]()
        for row in rows:
            if row.state.pooling is not None and row.state.pooling.task == "logits":
                scored.append(row)
            elif self._kind in OF_ONE_TOKEN:
                states.append(row)
            else:
                self._add(row, step.all_states())
                if row.samples:
                    tokens[row.row] = self._finished(divided(self._kind, row.state.pooled_sum, row.state.num_pooled))
        for row, logits_V in self._each(scored, step.most, step.more_logits):
            tokens[row.row] = _token(logits_V[list(row.state.sampler.sampling.allowed_token_ids or ())])
        for row, state_D in self._each(states, step.most, step.last_states):
            tokens[row.row] = self._finished(self._normed(state_D[None])[0])

    def _each(
        self, rows: Sequence[PoolingRow], most: int, compute: Callable[[Sequence[int]], Floats]
    ) -> Iterable[tuple[PoolingRow, Floats]]:
        """Values of the token that stands for each prompt that ends, as many at once as there is room for."""
        ends = [row for row in rows if row.samples]
        for at in range(0, len(ends), most):
            some = ends[at : at + most]
            is_first = self._kind == "cls"
            places = [row.first if is_first else row.first + row.num_tokens - 1 for row in some]
            yield from zip(some, compute(places), strict=True)

    def _add(self, row: PoolingRow, all_states: Floats) -> None:
        normed, state = self._normed(all_states[row.first : row.first + row.num_tokens]), row.state
        if row.start and state.num_pooled != row.start:
            raise KernelError(f"request {state.request_id} goes on at {row.start}, and {state.num_pooled} are summed")
        state.pooled_sum = with_states(self._kind, state.pooled_sum if row.start else None, normed, row.start)
        state.num_pooled = row.start + row.num_tokens

    def _normed(self, states_nD: Floats) -> Floats:
        if self._norm is None:
            return states_nD
        squares_n1 = np.mean(np.square(states_nD), axis=1, keepdims=True, dtype=np.float32)
        return np.asarray(states_nD / np.sqrt(squares_n1 + self._eps) * self._norm, np.float32)

    def _finished(self, vector_D: Floats) -> SampledToken:
        for layer in self._layers:
            made = layer.weight @ vector_D
            vector_D = ACTIVATIONS[layer.activation](made if layer.bias is None else made + layer.bias)
        return _token(vector_D)


def _token(vector_D: Floats) -> SampledToken:
    if not np.isfinite(vector_D).all():
        return SampledToken(0, error="the model's states are not finite numbers")
    return SampledToken(0, is_missing=True, complete=True, vector=vector_D.astype(np.float32).tobytes())
