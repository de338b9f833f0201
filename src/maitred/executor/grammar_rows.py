"""Rows with a grammar in a step: they are sampled under its masks, and take the tokens that it forces."""

from __future__ import annotations

import math
from collections.abc import Sequence

from maitred.executor.grammar import Grammars
from maitred.executor.sampler import SampledToken
from maitred.executor.state import HeldRequest, RowWork

PATIENCE_S = 0.02  # that rows without a grammar wait for the masks of those with one


def wait_for_masks(states: Sequence[HeldRequest], grammars: Grammars | None) -> bool:
    """Wait for masks before rows are sampled. False when masks are late: rows with a grammar are then postponed, so
    that others need not wait; where there are no others, nothing is gained by that.
    """
    bound = [state for state in states if state.grammar is not None]
    if grammars is None or not bound:
        return True
    return grammars.wait(PATIENCE_S if len(bound) < len(states) else math.inf)


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
