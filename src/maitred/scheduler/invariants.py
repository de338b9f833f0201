"""Invariants of a scheduler's state: what holds between any two calls."""

from __future__ import annotations

from maitred.request import RequestStatus
from maitred.scheduler.state import SchedulerState


def check_state(state: SchedulerState, *, step_under_way: bool) -> None:
    """Asserts; slow."""
    queued, running = list(state.order.queue), list(state.running())
    kv, reservations, groups = state.kv, state.reservations, state.sample_groups
    away = list(reservations.waiting.values())
    everyone = sorted(r.request_id for r in [*queued, *away, *running])
    assert everyone == sorted(state.requests)
    state.order.check_invariants([*away, *running])
    assert all(r.status is RequestStatus.WAITING for r in queued)
    assert all(r.status is RequestStatus.WAITING_FOR_KV and not r.num_computed_tokens for r in away)
    assert {r.request_id for r in away if r.block_table} == set(reservations.reserved)
    assert all(reservations.waiting[name].block_table for name in reservations.reserved)
    assert all(r.status is RequestStatus.RUNNING for r in running)
    assert not any(r.block_table or r.num_computed_tokens for r in queued)
    assert groups.num_awaiting == sum(groups.awaits_leader(r) for r in queued)
    if not step_under_way:  # drafts have left no trace
        decoding = state.decoding.values()
        assert all(r.num_computed_tokens < r.num_tokens for r in decoding)
        for r in decoding:  # a postponed row may have begun a block
            fewest, most = map(kv.num_blocks_for, (r.num_computed_tokens, r.num_tokens))
            assert fewest <= len(r.block_table) <= most
    kv.check_invariants([*away, *running], [b for blocks in reservations.leases.values() for b in blocks])
    kv.check_host([*queued, *away])
