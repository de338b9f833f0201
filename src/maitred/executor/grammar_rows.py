"""Rows with a grammar in a step: they are sampled under its masks, and take the tokens that it forces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from maitred.executor.grammar import Grammars
from maitred.executor.sampler import SampledToken
from maitred.executor.state import HeldRequest, RowWork


def wait_for_masks(states: Iterable[HeldRequest], grammars: Grammars | None) -> None:
    """Before rows are sampled."""
    if grammars is not None and any(state.grammar is not None for state in states):
        grammars.wait()


def keep(state: HeldRequest, token: SampledToken) -> SampledToken:
    """Adds a sampled token to the request's state; what came of the row."""
    if state.grammar is not None and state.grammar.error:  # its mask meant nothing
        return SampledToken(0, error=state.grammar.error)
    if token.error is None:
        state.append(token.token_id)
    return token


def follow_grammars(works: Sequence[RowWork], tokens: dict[int, SampledToken], grammars: Grammars | None) -> None:
    """After a step's rows were sampled: puts what their grammars say of it into `tokens` (by row) and the states."""
    if grammars is None:
        return
    rows = [row for row, token in tokens.items() if token.error is None and works[row].state.grammar is not None]
    if not rows:
        return
    slots = [works[row].state.grammar for row in rows]
    sampled = [(slot, tokens[row].token_id) for row, slot in zip(rows, slots, strict=True) if slot is not None]
    for row, outcome in zip(rows, grammars.advance(sampled), strict=True):
        if outcome.error:
            tokens[row] = SampledToken(0, error=outcome.error)
            continue
        for token_id in outcome.forced:
            works[row].state.append(token_id)
        tokens[row] = tokens[row]._replace(forced=tuple(outcome.forced), complete=outcome.complete)
