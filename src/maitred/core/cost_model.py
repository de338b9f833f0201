"""Cost model of a step: a few linear terms of what is in the plan, and a floor for reading the weights.

A fitted model (`maitred profile`) and a datasheet's (`sim/devices.py`) are the same thing with other numbers.
The floor is the roofline's (Williams et al. 2009): a step takes as long as reading the weights once, or as long as the
arithmetic of its tokens, whichever is more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from maitred.core.step import DEFAULT_TOKEN_BUDGET, ScheduledRow

ALIKE_TOKENS = 64  # shorter contexts are padded to one length
LEAST_TOKEN_BUDGET, TOKENS_PER_THREAD = 128, 64


class StepShape(NamedTuple):
    """Shape of a step: all of a plan that its duration depends on."""

    rows: int = 0
    prefill_tokens: int = 0  # of rows with more than one known token
    decode_tokens: int = 0  # rows of one known token, and drafts
    context_tokens: int = 0  # sum of the positions each row attends to: its K/V are read once
    prefill_attention: int = 0  # sum over prefill rows of tokens x context, in pairs of query and key
    samples: int = 0  # positions sampled: rows that sample, and drafts
    groups: int = 0  # chunks, and doublings of context among decode rows: what a padding kernel calls apart

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens


def shape_of(rows: Iterable[ScheduledRow]) -> StepShape:
    num_rows = prefill = decode = drafts = context = attention = samples = doublings = 0
    for _, start, num_tokens, row_samples, _, _, num_drafts in rows:
        num_rows += 1
        samples += row_samples
        context += start + num_tokens
        drafts += num_drafts
        known = num_tokens - num_drafts
        if known == 1:
            decode += 1
            doublings |= 1 << start.bit_length() if start > ALIKE_TOKENS else 1
        else:
            prefill += known
            attention += known * start + known * (known + 1) // 2
    groups = doublings.bit_count() + num_rows - decode
    return StepShape(num_rows, prefill, decode + drafts, context, attention, samples + drafts, groups)


class Slowness(NamedTuple):
    """Slowness of a machine at some moment: how many times as long as modelled it takes."""

    prompts: float = 1.0  # for the arithmetic of prompt chunks
    rest: float = 1.0


class Band(NamedTuple):
    """Short steps stutter more than long ones, in relation: each has its own spread."""

    below_s: float  # modelled time of the steps it is for
    quantiles: tuple[float, ...]  # of measured over modelled time, evenly spaced


class Knot(NamedTuple):
    """A measured point of a curve that is linear between such points."""

    size: float
    seconds: float


def between(knots: tuple[Knot, ...], size: float) -> float:
    """The curve at `size`: flat before the first knot, and behind the last one as steep as between the last two."""
    if size <= knots[0].size or len(knots) == 1:
        return knots[0].seconds
    right = min(bisect_left(knots, (size,)), len(knots) - 1)
    first, last = knots[right - 1], knots[right]
    return last.seconds + (last.seconds - first.seconds) / (last.size - first.size) * (size - last.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds for each unit of `StepShape`; 0 where a device does not feel it."""

    fixed_s: float = 0.0
    """Time of each step, whatever is in it: dispatch, launch, synchronisation."""
    row_s: float = 0.0
    weights_s: float = 0.0
    """Floor under the tokens' arithmetic: reading once all weights that every token meets."""
    experts_s: float = 0.0
    """Time of reading all routed experts once, of which a step reads those that its tokens are sent to."""
    experts_missed: float = 0.0
    """Share of the experts that one token is not sent to."""
    prefill_token_s: float = 0.0
    decode_token_s: float = 0.0
    exchange_token_s: float = 0.0
    """Time of a token in what parallel devices send each other, beside the arithmetic."""
    context_token_s: float = 0.0
    prefill_attention_s: float = 0.0
    window: int = 0
    """Tokens that layers with a window look back on; the next two are these layers' alone."""
    window_token_s: float = 0.0
    window_attention_s: float = 0.0
    sample_s: float = 0.0
    group_s: float = 0.0
    between_s: float = 0.0
    """Time between the end of a step and the start of the next, besides what follows: progress out, requests in."""
    between_row_s: float = 0.0
    jitter: tuple[Band, ...] = ()
    """Spread of measured step times about modelled ones; empty is a machine that never stutters."""
    gap_jitter: tuple[float, ...] = ()
    """The same for the time between steps: quantiles of measured over modelled."""
    steps: tuple[Knot, ...] = ()
    """Measured steps by their number of tokens; where there are any, they stand in place of the tokens' terms above."""
    drafts: tuple[Knot, ...] = ()
    """Time of making up one token each for so many requests, the host's part included; none takes no time."""
    catch_up_token_s: float = 0.0
    """Time of a known token that the proposer has not computed yet."""

    def step_s(self, shape: StepShape) -> float:
        """Return the time of a plan that has rows."""
        rows, prefill, decode, context, attention, samples, groups = shape
        return (
            self.fixed_s
            + rows * self.row_s
            + self.tokens_s(prefill, decode)
            + (prefill + decode) * self.exchange_token_s
            + context * self.context_token_s
            + attention * self.prefill_attention_s
            + samples * self.sample_s
            + groups * self.group_s
            + min(context, rows * self.window) * self.window_token_s  # as if contexts were alike
            + min(attention, prefill * self.window) * self.window_attention_s
        )

    def tokens_s(self, prefill: float, decode: float) -> float:
        """Return the time of a step's tokens, or of reading the weights for them."""
        if self.steps:
            return between(self.steps, prefill + decode)
        read_s: float = self.weights_s + self.experts_s * (1 - self.experts_missed ** (prefill + decode))
        return max(prefill * self.prefill_token_s + decode * self.decode_token_s, read_s)

    def draft_s(self, rows: float) -> float:
        """Return the time of one draft each for so many requests."""
        return between(self.drafts, rows) if self.drafts and rows else 0.0

    def slowed_s(self, shape: StepShape, slowness: Slowness) -> float:
        """`step_s` on a machine that is so slow."""
        step_s = self.step_s(shape)
        prompts_s = shape.prefill_tokens * self.prefill_token_s + shape.prefill_attention * self.prefill_attention_s
        prompts_s = min(prompts_s, step_s)
        return prompts_s * slowness.prompts + (step_s - prompts_s) * slowness.rest

    def expected_s(self, shape: StepShape) -> float:
        """`step_s` with the mean of its jitter."""
        modelled_s = self.step_s(shape)
        for below_s, quantiles in self.jitter:
            if modelled_s < below_s:
                return modelled_s * sum(quantiles) / len(quantiles)
        return modelled_s

    def gap_s(self, rows: int) -> float:
        """Return the time between a step of so many rows and the next."""
        return self.between_s + rows * self.between_row_s


def native_token_budget(num_threads: int, *, tiles: bool = False) -> int:
    """Return the native executor's budget. From 128 tokens on its products are about as fast as at 512, and decoding
    requests wait for the whole step; more threads take as long for as many tokens more, and so do processors with
    `tiles` (AMX) for twice as many.
    """
    budget = max(LEAST_TOKEN_BUDGET, TOKENS_PER_THREAD * num_threads)
    return min(DEFAULT_TOKEN_BUDGET, 2 * budget if tiles else budget)


class SwapCosts(NamedTuple):
    """Costs of swapping and of recomputing on this machine; measured by the engine, told to the scheduler."""

    bytes_per_block: int
    out_bytes_per_s: float  # device to host
    in_bytes_per_s: float  # host to device
    prefill_s_per_token: float  # of a long prompt
