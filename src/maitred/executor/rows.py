"""Rows of a step, whichever library computes them: their drafts and grammars, and what is kept and reported of them.

What a proposer makes up becomes part of the step, and of what was sampled the right drafts stay: every position is
sampled as if the drafts before it were output, and a draft counts while it equals what was sampled at the position
before it. So output has the bits of a run without drafts, whatever was proposed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from maitred.core.errors import KernelError
from maitred.core.step import SampledRow, TokenLogprobs
from maitred.executor.grammar import Grammars
from maitred.executor.sampler import SampledToken
from maitred.executor.sampler_state import RequestSampler
from maitred.executor.state import DraftAsk, HeldRequest, Proposer, RowWork


def with_drafts(
    works: list[RowWork], proposer: Proposer | None, vocab_size: int, most: int, grammars: Grammars | None = None
) -> list[RowWork]:
    """Return the works, each row as long as its drafts: at most `most`. Grammars are told of theirs. Without planned
    drafts the result is `works` itself.

    Raises KernelError for rows with drafts where there is no proposer.
    """
    asked = [index for index, work in enumerate(works) if work.row.num_drafts]
    if not asked:
        return works
    if proposer is None:
        row = works[asked[0]].row
        raise KernelError(
            f"request {row.request_id}: {row.num_drafts} of {row.num_tokens} planned tokens are drafts, and this "
            "executor has no proposer to make them up; give its scheduler no drafts"
        )
    may = {i: _may_draft(works[i].state, grammars) for i in asked}
    asks = [DraftAsk(works[i].state, min(works[i].row.num_drafts, most)) for i in asked if may[i]]
    made = iter(proposer.propose(asks)) if asks else iter(())
    drafted = list(works)
    for index in asked:
        work = works[index]
        tokens = next(made) if may[index] else ()
        drafted[index] = _with(work, [t for t in tokens[: min(work.row.num_drafts, most)] if 0 <= t < vocab_size])
    bound = [(slot, drafted[i].drafts) for i in asked if drafted[i].drafts and (slot := works[i].state.grammar)]
    if bound and grammars is not None:
        grammars.draft(bound)
    return drafted


def _may_draft(state: HeldRequest, grammars: Grammars | None) -> bool:
    """A grammar's worker that is late with masks has no time for more of them."""
    grammar = state.grammar
    if grammar is None:
        return True
    return grammars is not None and grammars.may_draft and not (grammar.error or grammar.complete)


def _with(work: RowWork, drafts: Sequence[int]) -> RowWork:
    row = work.row._replace(num_tokens=work.row.num_known + len(drafts), num_drafts=len(drafts))
    return RowWork(row, work.state, tuple(drafts))


def samplers_of(work: RowWork) -> Iterator[RequestSampler]:
    """Return, for the last known token and each draft, the sampler of the token after it, were the drafts output."""
    sampler, grammar = work.state.sampler, work.state.grammar
    yield sampler
    if grammar is None and sampler.is_alike_ahead:  # a copy for each draft takes a tenth of a small model's step
        yield from (sampler for _ in work.drafts)
        return
    for index, draft in enumerate(work.drafts):
        sampler = sampler.ahead(draft)
        if grammar is not None and index < grammar.num_allowed:
            sampler.mask = grammar.draft_masks[index]
        yield sampler


def accepted(drafts: Sequence[int], sampled: Sequence[SampledToken]) -> list[SampledToken]:
    """Return the samples that stand, of those at the last known token and at each draft, as if sampled in steps of
    their own.

    A fault behind accepted drafts is left to the next step, which meets it first.
    """
    kept = [sampled[0]]
    for draft, token in zip(drafts, sampled[1:], strict=True):
        if not _is_token(kept[-1]) or kept[-1].token_id != draft or not _is_token(token):
            break
        kept.append(token)
    return kept


def _is_token(token: SampledToken) -> bool:
    return token.error is None and not token.is_missing


PATIENCE_S = 0.02  # that rows without a grammar wait for the masks of those with one


def wait_for_masks(states: Sequence[HeldRequest], grammars: Grammars | None, *, is_patient: bool = False) -> bool:
    """Wait for masks before rows are sampled. False when masks are late: rows with a grammar are then postponed, so
    that others need not wait; where there are no others, nothing is gained by that. Always True if `is_patient`.
    """
    bound = [state for state in states if state.grammar is not None]
    if grammars is None or not bound:
        return True
    return grammars.wait(PATIENCE_S if len(bound) < len(states) and not is_patient else math.inf)


def num_checked(work: RowWork, has_masks: bool) -> int:
    """Return how many of a row's drafts, from the first, it can be sampled after."""
    grammar = work.state.grammar
    if grammar is None:
        return len(work.drafts)
    is_bound = has_masks and not (grammar.error or grammar.complete)
    return min(len(work.drafts), grammar.num_allowed) if is_bound else 0


def keep(state: HeldRequest, token: SampledToken, has_mask: bool) -> SampledToken:
    """Adds a sampled token to the request's state; what came of the row."""
    if state.grammar is not None:
        if state.grammar.error:
            return SampledToken(0, error=state.grammar.error)
        if state.grammar.complete or not has_mask:
            return SampledToken(0, is_missing=True, complete=state.grammar.complete)
    if token.error is None:
        state.append(token.token_id)
    return token


def follow_grammars(works: Sequence[RowWork], tokens: dict[int, SampledToken], grammars: Grammars | None) -> None:
    """Put what the grammars say of a step's sampled rows into `tokens` (by row) and the states."""
    if grammars is None:
        return
    sampled = {
        row: (slot, [one.token_id for one in (*token.before, token)])
        for row, token in tokens.items()
        if token.error is None and not token.is_missing and (slot := works[row].state.grammar) is not None
    }
    if not sampled:
        return
    for row, outcome in zip(sampled, grammars.advance(list(sampled.values())), strict=True):
        if outcome.error:
            tokens[row] = SampledToken(0, error=outcome.error)
            continue
        for token_id in outcome.forced:
            works[row].state.append(token_id)
        tokens[row] = tokens[row]._replace(forced=tuple(outcome.forced), complete=outcome.complete)


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
        (*[one.token_id for one in sampled], *token.forced),
        logprobs=tuple([one.logprobs for one in sampled if one.logprobs is not None]) or None,
        prompt_logprobs=prompt_logprobs,
        num_accepted=len(token.before),
        num_forced=len(token.forced),
        complete=token.complete,
        postponed=token.is_missing and not token.complete,
        num_drafts=work.row.num_drafts,
        vector=token.vector,
    )
