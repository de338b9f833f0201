"""Sampled rows: what an executor reports of a row, whichever library computed it."""

from __future__ import annotations

import math

from maitred.core.step import SampledRow, TokenLogprobs
from maitred.executor.sampler import SampledToken
from maitred.executor.state import RowWork

# Prompt logprobs need a row of logits for each position; this many at a time bounds the memory (128 x vocabulary).
PROMPT_LOGPROBS_CHUNK = 128
NAN_LOGITS = "logits are NaN"


def prompt_tokens_due(work: RowWork) -> list[int]:
    """Return the prompt tokens after those the row computes whose logprobs were asked for; empty when none were."""
    row, state, _ = work
    if state.prompt_logprobs is None:
        return []
    last = min(row.start + row.num_tokens, state.num_prompt_tokens - 1)
    due: list[int] = state.tokens.array[row.start + 1 : last + 1].tolist()
    return due


def report(
    work: RowWork, token: SampledToken | None, prompt_logprobs: tuple[TokenLogprobs, ...] | None
) -> SampledRow | None:
    """Return the row's report; None when it has nothing to say."""
    if token is None and prompt_logprobs is None:
        return None
    error = token.error if token is not None else None
    if error is None and prompt_logprobs and any(math.isnan(p.logprobs[0]) for p in prompt_logprobs):
        error = NAN_LOGITS
    if error is not None:
        return SampledRow(work.row.request_id, (), error=error)
    if token is None:
        return SampledRow(work.row.request_id, (), prompt_logprobs=prompt_logprobs)
    sampled = () if token.is_missing else (*token.before, token)
    return SampledRow(
        work.row.request_id,
        (*(one.token_id for one in sampled), *token.forced),
        logprobs=tuple(one.logprobs for one in sampled if one.logprobs is not None) or None,
        prompt_logprobs=prompt_logprobs,
        num_accepted=len(token.before),
        num_forced=len(token.forced),
        complete=token.complete,
        postponed=token.is_missing and not token.complete,
        num_drafts=work.row.num_drafts,
    )
