"""Rows with drafts: what their proposer makes up becomes part of the step, and of what was sampled the right ones stay.

Every position is sampled as if the drafts before it were output, and a draft counts while it equals what was sampled at
the position before it. So output has the bits of a run without drafts, whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from maitred.core.errors import KernelError
from maitred.executor.grammar import Grammars
from maitred.executor.sampler import SampledToken
from maitred.executor.sampler_state import RequestSampler
from maitred.executor.state import HeldRequest, RowWork
from maitred.speculative.proposer import DraftAsk, Proposer


def with_drafts(
    works: list[RowWork],
    proposer: Proposer | None,
    vocab_size: int,
    most: int,
    grammars: Grammars | None = None,
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
