"""Token sampling: a function of one row of logits, of the request's own state and of nothing else.

The order is the one vLLM documents (`vllm.v1.sample.sampler`), so that the same parameters mean the same here:

 1. raw logprobs are those of the untouched logits;
 2. logits in float32;
 3. a grammar's mask, then allowed tokens;      (sampler_state.RequestSampler.apply)
 4. bad words;                                 ( " )
 5. min_tokens, then logit bias;               ( " )
 6. repetition, frequency, presence penalty;   ( " )
 7. greedy rows take the largest logit, the lowest id of equals; others go on:
 8. temperature;
 9. min-p, top-k, top-p;
10. one draw by inverse CDF, token ids ascending, in float64.

Rows never see each other: no reduction crosses a row, so the batch, its order and its size change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.core.request import SamplingParams, check_sampling_tokens
from maitred.core.step import TokenLogprobs
from maitred.executor.sampler_state import LogitsRow, RequestSampler, TokenIds

__all__ = ["RequestSampler", "SampledToken", "check_sampling_tokens", "sample_rows", "token_logprobs", "uniform"]

_MASK_64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
# Up to this many candidates a sort is cheaper than finding where to cut first.
_SORT_AT_MOST = 4096
# A weight's bits above this one, exponent and 4 bits of mantissa, name its bucket; at most 16,369 buckets.
_BUCKET_SHIFT = 48
# Weights added up as one in the first pass of a draw.
_BLOCK = 1024


class SampledToken(NamedTuple):
    """One row's outcome; `error` is set when the row gave no token, and then `token_id` is 0 and means nothing."""

    token_id: int
    logprobs: TokenLogprobs | None = None  # when sampling.logprobs asks for them
    error: str | None = None
    forced: tuple[int, ...] = ()  # that its grammar leaves no choice for after it
    complete: bool = False  # its grammar lets nothing follow these
    is_missing: bool = False  # there is none: its grammar is complete already, or the mask is not there
    before: tuple[SampledToken, ...] = ()  # in the same step: accepted drafts
    vector: bytes = b""  # of a request that pools, in place of a token


def sample_rows(logits_RV: NDArray[np.float32], samplers: Sequence[RequestSampler]) -> list[SampledToken]:
    """Sample one token for each of R rows over V tokens. Rows may be overwritten; no sampler is: the caller appends.

    A row with a NaN, with +inf or with nothing but -inf gives `error`; the others are not affected.
    """
    assert logits_RV.shape[0] == len(samplers), (logits_RV.shape, len(samplers))
    logits_RV = np.asarray(logits_RV, dtype=np.float32)
    return [_sample_row(logits_V, sampler) for logits_V, sampler in zip(logits_RV, samplers, strict=True)]


def _sample_row(logits_V: LogitsRow, sampler: RequestSampler) -> SampledToken:
    best = int(logits_V.argmax())  # numpy's argmax gives the first of equals, and a NaN counts as largest
    fault = _fault(logits_V[best])
    if fault is not None:
        return SampledToken(0, error=fault)
    p = sampler.sampling
    raw_V = logits_V
    if sampler.changes_logits:
        raw_V = logits_V.copy() if p.logprobs is not None else logits_V
        sampler.apply(logits_V)
        best = int(logits_V.argmax())
        if logits_V[best] == -np.inf:
            return SampledToken(0, error="no token can be sampled: the parameters leave none that the model allows")
    token_id = best if p.greedy else _draw(logits_V, float(logits_V[best]), sampler)
    logprobs = None if p.logprobs is None else token_logprobs(raw_V, token_id, p.logprobs)
    return SampledToken(token_id, logprobs)


def _fault(largest: np.float32) -> str | None:
    if np.isfinite(largest):
        return None
    if np.isnan(largest):
        return "logits are NaN"
    return "logits hold +inf" if largest > 0 else "every logit is -inf"


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1), a function of its arguments only (taken modulo 2**64), with 53 random bits.

    Three rounds of SplitMix64's output function (Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014; constants of Vigna's splitmix64.c), each fed with the last one's result:

        h = mix(seed + G);  h = mix((h ^ sample_index) + G);  h = mix((h ^ position) + G);  (h >> 11) / 2**53

    in unsigned 64-bit arithmetic, G = 0x9E3779B97F4A7C15. There is no state to save, hand over or replay.
    """
    state = _mix64(seed + _GOLDEN_GAMMA)
    state = _mix64((state ^ (sample_index & _MASK_64)) + _GOLDEN_GAMMA)
    state = _mix64((state ^ (position & _MASK_64)) + _GOLDEN_GAMMA)
    return (state >> 11) * 2.0**-53


def _mix64(z: int) -> int:
    z &= _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


def _draw(logits_V: LogitsRow, largest: float, sampler: RequestSampler) -> int:
    """Draw one token by inverse CDF over the candidates, ids ascending: the first with a cumulated weight over u."""
    ids, weights = _candidates(logits_V, largest, sampler.sampling)
    index = _first_over(weights, uniform(sampler.seed, sampler.sample_index, sampler.position))
    return index if ids is None else int(ids[index])


def _first_over(weights_C: NDArray[np.float64], share: float) -> int:
    """The first index at which the weights so far exceed `share` (in [0, 1)) of all; never one of weight 0.

    First among sums of blocks, then inside one block: cumulating all C would cost as much as the exponentials.
    """
    block_ends = np.cumsum(np.add.reduceat(weights_C, np.arange(0, weights_C.size, _BLOCK)))
    target = share * block_ends[-1]
    block = int(np.searchsorted(block_ends, target, side="right"))
    start = block * _BLOCK
    inside = np.cumsum(weights_C[start : start + _BLOCK])
    below = block_ends[block - 1] if block else 0.0
    # The block's own sum may differ from `inside` in the last bit, so a target just under its end could fall off.
    last = int(np.searchsorted(inside, inside[-1]))
    return start + min(int(np.searchsorted(inside, target - below, side="right")), last)


def _candidates(logits_V: LogitsRow, largest: float, p: SamplingParams) -> tuple[TokenIds | None, NDArray[np.float64]]:
    """Token ids, ascending (None: every token), and weights, exp((logit - largest) / temperature), not normalised.

    Top-k goes before min-p here because it is cheap on raw logits: both keep the upper end of one order, so which
    is first changes nothing. Top-p counts the mass that they left.
    """
    ids: TokenIds | None = None
    if 0 < p.top_k < logits_V.size:
        ids = _top_ids(logits_V, p.top_k)
    weights = (logits_V if ids is None else logits_V[ids]).astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature: -inf is the answer wanted
        weights -= largest
        weights /= p.temperature
    np.exp(weights, out=weights)
    if p.min_p > 0.0:  # arXiv:2407.01082: the largest weight is exactly 1
        ids, weights = _keep(ids, weights, weights >= p.min_p)
    if p.top_p < 1.0:
        ids, weights = _keep(ids, weights, _nucleus(weights, p.top_p))
    return ids, weights


def _keep(
    ids: TokenIds | None, weights: NDArray[np.float64], keep: NDArray[np.bool_]
) -> tuple[TokenIds, NDArray[np.float64]]:
    return (np.flatnonzero(keep) if ids is None else ids[keep]), weights[keep]


def _top_ids(logits_V: LogitsRow, k: int) -> TokenIds:
    """The ids, ascending, of the k largest logits; of equals at the edge, the lowest ids. 0 < k < V."""
    edge = np.partition(logits_V, logits_V.size - k)[logits_V.size - k]
    ids = np.flatnonzero(logits_V >= edge)
    if ids.size == k:
        return ids
    at_edge = logits_V[ids] == edge
    spare = ids.size - k
    return np.delete(ids, np.flatnonzero(at_edge)[-spare:])


def _nucleus(weights_C: NDArray[np.float64], top_p: float) -> NDArray[np.bool_]:
    """Nucleus sampling (arXiv:1904.09751): which of C weights make the smallest set with `top_p` of the mass.

    Of equal weights at the edge the first are kept; at least one always is. Only weights near the edge are sorted:
    a bucket for each leading bits of the (positive) doubles orders all others, so the cost is a few passes.
    """
    needed = top_p * float(weights_C.sum())
    if weights_C.size <= _SORT_AT_MOST:
        keep = np.zeros(weights_C.size, dtype=np.bool_)
        edge_ids, above = np.arange(weights_C.size), 0.0
    else:
        bucket_C = weights_C.view(np.int64) >> _BUCKET_SHIFT
        mass_B = np.bincount(bucket_C, weights=weights_C)
        mass_from_B = np.append(np.cumsum(mass_B[::-1])[::-1], 0.0)  # of this bucket and all above it
        edge = max(int(np.count_nonzero(mass_from_B >= needed)) - 1, 0)
        keep, above = bucket_C > edge, mass_from_B[edge + 1]
        edge_ids = np.flatnonzero(bucket_C == edge)
    by_weight = edge_ids[np.argsort(-weights_C[edge_ids], kind="stable")]
    cumulated = above + np.cumsum(weights_C[by_weight])
    keep[by_weight[: int(np.searchsorted(cumulated, needed)) + 1]] = True
    return keep


def token_logprobs(logits_V: LogitsRow, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-softmax (natural log, float64) of raw logits: `token_id` first, then the `num_top` likeliest, best first.

    Equal logits rank by id, so ranks are 1..num_top and the chosen token has the rank it would be listed at. A row
    that cannot be sampled from (NaN, +inf, only -inf) gives NaN for the chosen token.
    """
    largest = float(logits_V.max())
    weights = logits_V.astype(np.float64)
    with np.errstate(invalid="ignore"):
        weights -= largest
    log_total = largest + float(np.log(np.exp(weights, out=weights).sum()))
    chosen = logits_V[token_id]
    rank = 1 + int(np.count_nonzero(logits_V > chosen)) + int(np.count_nonzero(logits_V[:token_id] == chosen))
    top = _best_first(logits_V, num_top)
    ids = (token_id, *top.tolist())
    return TokenLogprobs(ids, tuple(float(logits_V[i]) - log_total for i in ids), (rank, *range(1, len(top) + 1)))


def _best_first(logits_V: LogitsRow, num_top: int) -> TokenIds:
    if num_top == 0:
        return np.empty(0, dtype=np.int64)
    ids = _top_ids(logits_V, num_top) if num_top < logits_V.size else np.arange(logits_V.size)
    return ids[np.argsort(-logits_V[ids], kind="stable")]
