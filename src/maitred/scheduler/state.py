"""Scheduler state: waiting, running and swapped requests, shared by planning, preemption and update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel, SwapCosts
from maitred.core.replica import DraftCounts
from maitred.core.request import FinishReason, RequestState, RequestStatus
from maitred.kv.manager import NO_HIT, KVCacheManager, PrefixHit
from maitred.policy.order import ServiceOrder
from maitred.policy.predictor import Predictor
from maitred.scheduler.reservations import Reservations
from maitred.scheduler.samples import SampleGroups


@dataclass(slots=True, kw_only=True)
class SchedulerCounters:
    """Counters that only grow."""

    num_steps: int = 0  # plans with at least one row
    num_prompt_tokens: int = 0  # prompts admitted to a first step; that of n samples counts once
    num_generated_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_background_tokens: int = 0  # of them, those of the class background
    drafts: DraftCounts = field(default_factory=DraftCounts)  # of the executor's proposer
    predicted_drafts: DraftCounts = field(default_factory=DraftCounts)  # of texts that requests predicted
    num_preemptions: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def count_drafts(self, request: RequestState, num_made: int, num_accepted: int) -> None:
        """Count so many drafts of a row, of which so many became output."""
        request.num_draft_tokens += num_made
        request.num_accepted_tokens += num_accepted
        counts = self.predicted_drafts if request.spec.prediction_token_ids else self.drafts
        counts.count(num_made, num_accepted)

    def count_prompt(self, request: RequestState) -> None:
        """Count a prompt admitted to a first step; `num_cached_tokens` is set."""
        request.num_charged_prompt_tokens = request.num_prompt_tokens
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_prefix_queried_tokens += request.num_prompt_tokens
        self.num_prefix_hit_tokens += request.num_cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A moment's gauges, and a copy of the counters, named as in `ReplicaState`."""

    num_running: int
    num_waiting: int
    num_background_running: int  # of those before
    num_background_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_cached: int
    num_state_snapshots: int
    num_state_evictions: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_scheduled_tokens: int
    num_background_tokens: int
    drafts: DraftCounts
    predicted_drafts: DraftCounts
    num_preemptions: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_finished: Mapping[FinishReason, int]


StopRule = Callable[[RequestState], FinishReason | None]
"""Asked after each new output token; may set `stop_reason`. Replay has its own, that answers from the log."""


def stop_at_token(request: RequestState) -> FinishReason | None:
    """End-of-sequence, then stop tokens, then length. The first two count only from `min_tokens` tokens on."""
    sampling, num_output = request.spec.sampling, len(request.output_token_ids)
    if num_output >= sampling.min_tokens:
        token = request.output_token_ids[-1]
        if token in request.spec.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if token in sampling.stop_token_ids:
            request.stop_reason = token
            return FinishReason.STOP
    return FinishReason.LENGTH if num_output >= request.max_tokens else None


@dataclass(slots=True, eq=False)
class Background:
    """Requests of the class background. Their order is another one of the same policy, with a state of its own, so that
    their service counts for no other request.
    """

    order: ServiceOrder[RequestState]
    prefilling: dict[str, RequestState] = field(default_factory=dict)
    decoding: dict[str, RequestState] = field(default_factory=dict)

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def running(self) -> Iterator[RequestState]:
        return chain(self.prefilling.values(), self.decoding.values())

    @property
    def is_empty(self) -> bool:
        """Whether none runs or waits in the queue."""
        return not (self.prefilling or self.decoding or self.order.queue)


@dataclass(slots=True, eq=False)
class SchedulerState:
    """One scheduler's requests from `add` to their end; `config` and `order` change when it is configured."""

    config: SchedulerConfig
    kv: KVCacheManager
    order: ServiceOrder[RequestState]  # holds the queue, as all here without those of the class background
    background: Background
    predictor: Predictor
    stop_rule: StopRule
    swap_costs: SwapCosts | None = None
    step_costs: CostModel | None = None  # None until they were measured
    requests: dict[str, RequestState] = field(default_factory=dict)  # all that have not finished
    prefilling: dict[str, RequestState] = field(default_factory=dict)  # running, more than one token behind
    decoding: dict[str, RequestState] = field(default_factory=dict)  # running, one token behind
    sample_groups: SampleGroups = field(default_factory=SampleGroups)
    reservations: Reservations = field(default_factory=Reservations)
    forgotten: list[str] = field(default_factory=list)  # left their slots since the last plan
    prompt_logprobs_until: dict[str, int] = field(default_factory=dict)  # last position whose logprobs were handed out
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)

    @property
    def num_running(self) -> int:
        """Of all classes."""
        return len(self.prefilling) + len(self.decoding) + self.background.num_running

    def running(self) -> Iterator[RequestState]:
        """Running requests, without those of the class background."""
        return chain(self.prefilling.values(), self.decoding.values())

    def worst_running(self) -> RequestState:
        """Return the first to be preempted: one of the class background while any runs."""
        books = self.background if self.background.num_running else self
        return max(books.running(), key=books.order.victim_key)

    def outranked(self, head: RequestState) -> list[RequestState]:
        """Return the running requests that a waiting one may displace, the first to be preempted first."""
        background = self.background
        if head.background:
            return []  # none of its class gives way to another, and no other to it
        first = sorted(background.running(), key=background.order.victim_key, reverse=True)
        return first + self.order.outranked(head, self.running())

    def books_of(self, request: RequestState) -> SchedulerState | Background:
        """Return the order and running requests of the request's class."""
        return self.background if request.background else self

    def place(self, request: RequestState) -> tuple[Any, ...]:
        """Smaller is served first, of all classes."""
        return (request.background, *self.books_of(request).order.place(request))

    def peek(self) -> RequestState | None:
        """Return the first in the queue, of all classes."""
        return self.order.queue.peek() or self.background.order.queue.peek()

    def reusable(self, request: RequestState) -> PrefixHit:
        """Return the KV that a waiting request finds: in the prefix cache, with another sample, or on the host."""
        hit = self.kv.find_prefix(request)
        groups = self.sample_groups
        source = groups.source_for(request) if groups.groups else None
        if source is not None and request.num_prompt_tokens - 1 >= max(hit.num_tokens, request.num_swapped_tokens):
            forked = self.kv.fork(source, request)
            if forked is not NO_HIT:
                return forked
        return self.kv.swapped(request, hit) if request.num_swapped_tokens else hit

    def enqueue(self, request: RequestState) -> None:
        request.status = RequestStatus.WAITING
        self.books_of(request).order.enqueue(request)

    def start(self, request: RequestState) -> None:
        """Move the request out of the queue into a slot; its blocks are allocated."""
        request.status = RequestStatus.RUNNING
        books = self.books_of(request)
        books.prefilling[request.request_id] = request
        books.order.started(request)
        if self.sample_groups.groups:
            self.sample_groups.started(request)

    def leave_running(self, request: RequestState) -> None:
        """Take the request out of its slot; its blocks are free."""
        books = self.books_of(request)
        if books.decoding.pop(request.request_id, None) is None:
            del books.prefilling[request.request_id]
        self.kv.free(request)
        self.forgotten.append(request.request_id)


def check_state(state: SchedulerState, *, step_under_way: bool) -> None:
    """Asserts; slow."""
    queued, running = list(state.order.queue), list(state.running())
    kv, reservations, groups = state.kv, state.reservations, state.sample_groups
    assert groups.num_awaiting == sum(groups.awaits_leader(r) for r in queued)
    away = list(reservations.waiting.values())
    state.order.check_invariants([*(r for r in away if state.books_of(r) is state), *running])
    of_class = [*(r for r in away if r.background), *state.background.running()]
    state.background.order.check_invariants(of_class)
    assert all(r.background for r in (*of_class, *state.background.order.queue))
    queued, running = [*queued, *state.background.order.queue], [*running, *state.background.running()]
    everyone = sorted(r.request_id for r in [*queued, *away, *running])
    assert everyone == sorted(state.requests)
    assert all(r.status is RequestStatus.WAITING for r in queued)
    assert all(r.status is RequestStatus.WAITING_FOR_KV and not r.num_computed_tokens for r in away)
    assert {r.request_id for r in away if r.block_table} == set(reservations.reserved)
    assert all(reservations.waiting[name].block_table for name in reservations.reserved)
    assert all(r.status is RequestStatus.RUNNING for r in running)
    assert not any(r.block_table or r.num_computed_tokens for r in queued)
    if not step_under_way:  # drafts have left no trace
        decoding = [*state.decoding.values(), *state.background.decoding.values()]
        assert all(r.num_computed_tokens < r.num_tokens for r in decoding)
        for r in decoding:  # a postponed row may have begun a block
            fewest, most = map(kv.num_blocks_for, (r.num_computed_tokens, r.num_tokens))
            assert fewest <= len(r.block_table) <= most
    kv.check_invariants([*away, *running], reservations.leases.values())
    kv.check_host([*queued, *away])
