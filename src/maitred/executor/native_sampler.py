"""`sampler.sample_rows` by the native library: the same tokens and errors for the same rows, in a fraction of the time.

Differences: a draw whose random number falls within rounding (1e-14) of the edge between two tokens, and logprobs
in their last bits, because sums run in another order than numpy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maitred.core.step import TokenLogprobs
from maitred.executor.sampler import SampledToken, uniform
from maitred.executor.sampler_state import RequestSampler
from maitred.kernels.sampler import FAULTS, NO_LOGPROBS, Sampled, Sampler


class NativeSampler:
    """Samples on the threads of `pool`, a _native.ThreadPool; one call at a time."""

    def __init__(self, pool: Any, *, isa: str = "auto") -> None:
        self._sampler = Sampler(pool, isa=isa)

    def sample_rows(self, logits_RV: NDArray[np.float32], samplers: Sequence[RequestSampler]) -> list[SampledToken]:
        """Sample as `sampler.sample_rows`: a token for each of R rows, which may be overwritten; the caller appends."""
        assert logits_RV.shape[0] == len(samplers), (logits_RV.shape, len(samplers))
        logits_RV = np.asarray(logits_RV, dtype=np.float32)
        if logits_RV.strides[1] != logits_RV.itemsize or not logits_RV.flags.writeable:
            logits_RV = np.array(logits_RV, order="C")
        sampled = self._sampler.sample(
            logits_RV,
            np.array([_settings(sampler) for sampler in samplers], dtype=np.float64).reshape(-1, 5),
            [sampler.changes() if sampler.changes_logits else None for sampler in samplers],
            np.array([_num_top(sampler) for sampler in samplers], dtype=np.int32),
        )
        tokens = zip(sampled.tokens.tolist(), sampled.faults.tolist(), samplers, strict=True)
        return [_outcome(sampled, row, *token) for row, token in enumerate(tokens)]


def _settings(sampler: RequestSampler) -> tuple[float, float, float, float, float]:
    p = sampler.sampling
    if p.greedy:
        return (0.0, 0.0, 1.0, 0.0, 0.0)
    share = uniform(sampler.seed, sampler.sample_index, sampler.position)
    return (p.temperature, p.top_k, p.top_p, p.min_p, share)


def _num_top(sampler: RequestSampler) -> int:
    num_top = sampler.sampling.logprobs
    return NO_LOGPROBS if num_top is None else num_top


def _outcome(sampled: Sampled, row: int, token_id: int, fault: int, sampler: RequestSampler) -> SampledToken:
    if fault:
        return SampledToken(0, error=FAULTS[fault])
    num_top = sampler.sampling.logprobs
    if num_top is None:
        return SampledToken(token_id)
    num_top = min(num_top, sampler.vocab_size)
    ids = (token_id, *sampled.top_ids[row, :num_top].tolist())
    ranks = (int(sampled.ranks[row]), *range(1, num_top + 1))
    return SampledToken(token_id, TokenLogprobs(ids, tuple(sampled.logprobs[row, : num_top + 1].tolist()), ranks))
