"""Scheduler: decides what each step computes. Requests have known and computed tokens; the second catch up.

There is no prefill phase and no decode phase: chunked prefill mixed with decode (Sarathi-Serve, arXiv:2403.02310),
prefix hits, preemption by recompute (PagedAttention, arXiv:2309.06180) and iteration-level batching (Orca, OSDI 2022)
are all this one rule within `max_num_batched_tokens`. Pure: time is an argument, nothing is read or written elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import ceil
from operator import sub
from typing import Any

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel, SwapCosts
from maitred.core.errors import InvalidRequest
from maitred.core.request import FinishReason, RequestState
from maitred.core.step import ModelOutput, RequestProgress, SchedulerOutput
from maitred.core.tensor_request import Batch, BatchOutcome, TensorRequest
from maitred.kv.manager import KVCacheManager
from maitred.kv.prefix_cache import TokenHasher
from maitred.policy.order import ServiceOrder
from maitred.policy.policies import POLICIES, expected_outputs, policy_for
from maitred.policy.policy import KVNeed, PolicyFactory
from maitred.policy.predictor import Predictor, bounded_prediction, predictor_named
from maitred.scheduler.background import join
from maitred.scheduler.deadlines import Deadlines
from maitred.scheduler.lanes import Lanes
from maitred.scheduler.notes import Blocked, Preemption
from maitred.scheduler.planning import PlanBuilder, build_plan, service_of, steady_requests, why_blocked
from maitred.scheduler.reservations import NOTHING_GIVEN_UP, GivenUp, ReservedBlocks
from maitred.scheduler.reserving import arrived, can_step, hold, join_fellow, release, reserve
from maitred.scheduler.speculation import NumDrafts, Speculation, plan_drafts, speculate
from maitred.scheduler.state import Background, SchedulerState, SchedulerStats, StopRule, check_state, stop_at_token
from maitred.scheduler.timing import split_us
from maitred.scheduler.update import apply_output, decode_on, end, last_progress


class Scheduler:
    """One engine's requests, from `add` to the last progress.

    Call `schedule`, carry out the plan, call `update` with its outcome; in between, `abort` and `finish` are allowed.
    Every request finishes: the first running one in policy order is never preempted for blocks, and `add` refuses what
    could not run alone.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        stop_rule: StopRule = stop_at_token,
        predictor: Predictor | None = None,  # None makes the one that `config` names
        policies: Mapping[str, PolicyFactory] = POLICIES,  # what `config.policy` may name
        num_drafts: NumDrafts | None = None,  # how many drafts there are to be, as a record has it
        speculation: Speculation | None = None,  # or their chooser; without both nothing is drafted
    ) -> None:
        self._policies = policies
        self._kv = kv_cache
        order, background = (ServiceOrder(policy_for(config, policies), self._find_kv) for _ in range(2))
        self._state = SchedulerState(
            config=config,
            kv=kv_cache,
            order=order,
            background=Background(background),
            predictor=predictor if predictor is not None else predictor_named(config.predictor),
            stop_rule=stop_rule,
        )
        self.num_drafts = num_drafts
        # Of the class background, what was drafted tells nothing of the others' drafts, nor the other way.
        self._speculations = () if speculation is None else (speculation, Speculation(speculation.most))
        self._drafting: Speculation | None = None  # that gave the last plan drafts
        self._watch_cache()
        self._deadlines = Deadlines(self.awaits_leader)
        self.lanes = Lanes(
            self._state.order, lambda: self._shares_machine, config.tensor_share
        )  # models are loaded here
        self._step = 0
        self._in_flight: list[RequestState] = []  # of the last plan, row by row
        self._charged_us = 0  # of the executor's time
        self.blocked: Blocked | None = None  # in the last step
        self.preemptions: tuple[Preemption, ...] = ()  # in the last step
        self.given_up: GivenUp = NOTHING_GIVEN_UP  # in the last `schedule`, `finish` or `expire`

    # -- what callers ask

    @property
    def config(self) -> SchedulerConfig:
        return self._state.config

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Names that `configure` may choose from, installed policies included."""
        return tuple(sorted(self._policies))

    @property
    def has_work(self) -> bool:
        return bool(self._state.requests)

    @property
    def can_step(self) -> bool:
        """Return whether a plan would hold anything: not while every request waits for KV from elsewhere."""
        state = self._state
        if state.num_running or not state.reservations.reserved:
            return state.num_running > 0 or state.peek() is not None
        return can_step(state)

    @property
    def next_deadline(self) -> float | None:
        """Return when `expire` may have something to do (s)."""
        return self._deadlines.next_at if self._deadlines.heap else None

    @property
    def num_running(self) -> int:
        return self._state.num_running

    @property
    def num_queued(self) -> int:
        """Number of requests that could run with room: not running, nor waiting for KV or a sample's prompt; without
        those of the class background.
        """
        groups = self._state.sample_groups
        return len(self._state.order.queue) - (groups.num_awaiting if groups.groups else 0)

    def awaits_leader(self, request: RequestState) -> bool:
        """Return whether the request waits for another sample that is computing the prompt of both."""
        return self._state.sample_groups.awaits_leader(request)

    def waits_to_start(self, request_id: str) -> bool:
        """Return whether the request is here and was in no step yet."""
        request = self._state.requests.get(request_id) or self.lanes.request(request_id)
        return request is not None and request.first_scheduled_at is None

    @property
    def running(self) -> tuple[RequestState, ...]:
        return (*self._state.running(), *self._state.background.running())

    @property
    def waiting(self) -> tuple[RequestState, ...]:
        """Waiting requests in order; for people to look at."""
        return (*self._state.order.queue.in_order(), *self._state.background.order.queue.in_order())

    @property
    def waiting_for_kv(self) -> tuple[RequestState, ...]:
        """Requests out of the queue: those with a reservation, and other samples of their prompts."""
        return tuple(self._state.reservations.waiting.values())

    def waits_along(self, request_id: str) -> str | None:
        """The request that the KV it waits for is on its way to, where that is another one."""
        return self._state.reservations.along.get(request_id)

    def next_in_line(self, count: int) -> list[RequestState]:
        """The first `count` of `waiting`, without sorting all of it."""
        first = self._state.order.queue.first(count)
        return first + self._state.background.order.queue.first(count - len(first))

    @property
    def kv_cache(self) -> KVCacheManager:
        """Holders and findable blocks of the KV cache; to look at."""
        return self._kv

    @property
    def order(self) -> ServiceOrder[RequestState]:
        """The policy at work, the queue, and every request's key, without the class background; to look at."""
        return self._state.order

    def request(self, request_id: str) -> RequestState | None:
        """Return a request that has not finished."""
        return self._state.requests.get(request_id)

    def terms(self, request_id: str) -> dict[str, float]:
        """Parts of a request's place in the policy's order, by name, for people; empty for one that is not here."""
        request = self._state.requests.get(request_id)
        if request is None:
            return {}
        return dict(self._state.books_of(request).order.policy.terms(request))

    @property
    def stats(self) -> SchedulerStats:
        background, away = self._state.background, self._state.reservations.waiting
        num_waiting = len(background.order.queue)
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=len(self._state.order.queue) + num_waiting + len(away),
            num_background_running=background.num_running,
            num_background_waiting=num_waiting + sum([request.background for request in away.values()]),
            num_blocks=self._kv.num_pages,
            num_blocks_used=self._kv.num_pages_used,
            num_blocks_cached=self._kv.num_cached,
            num_state_snapshots=self._kv.num_snapshots,
            num_state_evictions=self._kv.num_evictions,
            **asdict(self._state.counters),
        )

    def check_invariants(self) -> None:
        """Asserts what must hold between any two calls; slow."""
        check_state(self._state, step_under_way=bool(self._in_flight))
        self.lanes.check_invariants()

    # -- what happens to requests

    def add(self, request: RequestState, now: float) -> None:
        """Takes a request in; its `block_hashes` are computed already.

        Raises PromptTooLong when it could not run even alone, InvalidRequest when its id is in use.
        """
        if request.request_id in self._state.requests or (self.lanes.has_models and request.request_id in self.lanes):
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        self._kv.check_fits(request)
        if request.output_token_ids:
            self._kv.hash_known(request)
        self._state.requests[request.request_id] = request
        if _has_deadline(request):
            self._deadlines.add(request)
        self._predict(request)
        if request.spec.parent_id is not None:
            self._state.sample_groups.joined(request)
        self._state.enqueue(request)
        if self._state.reservations.reserved or self._state.reservations.leases:
            join_fellow(self._state, request)

    def place_of_newcomer(self, request: RequestState) -> tuple[Any, ...]:
        """Return the place in the policy's order of a request that was not added; smaller is served first."""
        self._predict(request)
        return (request.background, *self._state.books_of(request).order.place_of_newcomer(request))

    def _predict(self, request: RequestState) -> None:
        if request.predicted_output_tokens is None:  # else it was recorded, or a simulator knows better
            request.predicted_output_tokens = bounded_prediction(self._state.predictor, request)

    def abort(self, request_id: str, now: float) -> RequestProgress | None:
        """Ends a request and frees its blocks at once; None when it is not here (any more)."""
        return self.finish(request_id, FinishReason.ABORT, now)

    def finish(
        self, request_id: str, reason: FinishReason, now: float, *, stop_reason: int | str | None = None
    ) -> RequestProgress | None:
        """End a request for a reason found outside, such as a stop string; return its last progress. None if unknown,
        and for a tensor request with a running batch, with which it ends.
        """
        request = self._state.requests.get(request_id)
        if request is None:
            return self.lanes.finish(request_id, reason, now)
        progress = self._finish(request, reason, now, stop_reason)
        self._note_given_up()
        return progress

    def expire(self, now: float) -> list[RequestProgress]:
        """End requests past their `start_by` or `finish_by`; return their last progress. Call it before `schedule`."""
        missed = self._deadlines.missed(now) if self._deadlines.heap else ()
        expired = [self._finish(request, reason, now) for request, reason in missed]
        self._note_given_up()
        return expired

    def _finish(
        self, request: RequestState, reason: FinishReason, now: float, stop_reason: int | str | None = None
    ) -> RequestProgress:
        request.stop_reason = stop_reason
        self._end(request, reason, now)
        return last_progress(RequestProgress(request.request_id), request, now)

    def set_policy(self, name: str) -> None:
        """Orders everything by another policy from now on. Raises ConfigError when there is none of that name."""
        self.configure(replace(self._state.config, policy=name, policy_args={}))

    def set_swap_costs(self, costs: SwapCosts | None) -> None:
        """Set the times of copying and computing on this machine; None never copies."""
        self._state.swap_costs = costs

    def set_step_costs(self, costs: CostModel) -> None:
        """Set the times of steps on this machine: they decide how many tokens are drafted, if any are, and how many of
        background requests go beside others.
        """
        self._state.step_costs = costs
        for speculation in self._speculations:
            speculation.costs = costs

    def configure(self, config: SchedulerConfig) -> None:
        """Changes policy and limits between steps; no request is lost. Raises ConfigError and changes nothing."""
        state = self._state
        order, background = state.order, state.background
        if _rules_of(config) != _rules_of(state.config):  # else keep it, and what it knows of service given
            policy, other, away = *(policy_for(config, self._policies) for _ in range(2)), self.waiting_for_kv
            order = order.successor(policy, state.running(), [r for r in away if not r.background])
            after = [r for r in away if r.background]
            background.order = background.order.successor(other, background.running(), after)
        if config.predictor != state.config.predictor:
            state.predictor = predictor_named(config.predictor)
        state.order, state.config = order, config
        self.lanes.reorder(order, config.tensor_share)
        self._watch_cache()

    # -- KV from elsewhere

    def reserve(self, request_id: str, num_tokens: int, now: float) -> ReservedBlocks | None:
        """Blocks for the KV of the first `num_tokens` tokens of a request that waits in the queue, rounded down to
        whole blocks, and to less than all that it knows. It leaves the queue until `kv_arrived`, or until its blocks
        are given up. None, with nothing changed, when blocks lack, or when it would gain nothing.
        """
        return reserve(self._state, request_id, num_tokens)

    def kv_arrived(self, request_id: str, num_tokens: int, now: float) -> bool:
        """Take positions [0, num_tokens) as verified KV: a multiple of block_size from `Reserved.start`, where nothing
        came, to `Reserved.end`. The request queues again, at its old place. False, with nothing changed, for one that
        is gone or whose blocks were given up.
        """
        return arrived(self._state, request_id, num_tokens)

    def hold(self, lease: str, block_hashes: Sequence[bytes], now: float) -> tuple[int, ...]:
        """Blocks of the longest cached prefix of a chain of hashes; they stay what they are until `release`, or until
        they are given up. A lease that holds some already holds these instead, if there are any.
        """
        return hold(self._state, lease, block_hashes)

    def release(self, lease: str, now: float) -> bool:
        """Ends a lease; False when there is none of that name (any more)."""
        return release(self._state, lease)

    # -- a step

    def schedule(self, now: float) -> SchedulerOutput:
        """The next plan. What is planned counts as computed from here on, so `update` must follow."""
        state = self._state
        builder = build_plan(state, now)
        self.blocked = why_blocked(state, builder, state.order.queue.peek())
        state.order.issued(builder.requests, service_of(builder.rows, state.prefilling))
        is_alone = not builder.rows
        if not is_alone:
            self._plan_drafts(builder, False)  # of the others alone, and before it is seen what room they leave
        if not state.background.is_empty:
            join(state, builder)
            self.blocked = self.blocked or why_blocked(state, builder, state.background.order.queue.peek())
        if is_alone:
            self._plan_drafts(builder, True)
        self.preemptions = tuple(builder.preemptions)
        self._note_given_up()
        plan = builder.plan(self._step, state.forgotten, self._kv.take_pool_changes(builder.rows, builder.requests))
        self._step += 1
        self._in_flight = builder.requests
        state.forgotten = []
        state.counters.num_steps += bool(builder.rows)
        state.counters.num_scheduled_tokens += state.config.token_budget - builder.budget
        return plan

    def _plan_drafts(self, builder: PlanBuilder, background: bool) -> None:
        if self.num_drafts is not None:
            plan_drafts(self._state, builder, [self.num_drafts(one, len(builder.rows)) for one in builder.requests])
        elif self._speculations:
            speculation = self._speculations[background]
            self._drafting = speculation if speculate(self._state, speculation, builder) else None

    def charge(self, plan: SchedulerOutput, execute_s: float) -> None:
        """Splits the executor's time over the last plan's rows by their tokens; `execute_s` is its total so far. Before
        `update`, which tells it of those that end.
        """
        if not plan.rows:  # the next ones are charged with it
            return
        whole_us = round(execute_s * 1e6)
        parts = split_us(whole_us - self._charged_us, [row.num_tokens for row in plan.rows])
        self._charged_us = whole_us
        for request, part_us in zip(self._in_flight, parts, strict=True):
            request.compute_us += part_us

    @property
    def steady_requests(self) -> list[RequestState]:
        """Running requests, in the order of their rows, if steps decode one token of each and do nothing else until
        one ends, free blocks lack, a deadline passes, or something is called; else none.
        """
        drafts = self.num_drafts is not None or self._speculations
        return [] if drafts or self.lanes.has_models else steady_requests(self._state)

    def decode_on(self, charged_s: Sequence[float], token: int, now: float) -> list[RequestProgress]:
        """Do what `schedule`, `charge` and `update` would for so many steps of the `steady_requests`, whose executor's
        total time was `charged_s` after each; the last ends `now`. Progress of those that it ends.
        """
        state, num_steps = self._state, len(charged_s)
        requests = list(state.decoding.values())
        wholes = [self._charged_us, *(round(each * 1e6) for each in charged_s)]
        self._charged_us = wholes[-1]
        steps_us = Counter(map(sub, wholes[1:], wholes))
        num_rows = len(requests)
        ends = [sum([us * at // num_rows * n for us, n in steps_us.items()]) for at in range(num_rows + 1)]
        for request, part_us in zip(requests, map(sub, ends[1:], ends), strict=True):
            request.compute_us += part_us
        self._step += num_steps
        ended = decode_on(state, requests, num_steps, token, now)
        for request, reason in ended:
            self._end(request, reason, now)
        told = [RequestProgress(request.request_id, (token,)) for request, _ in ended]
        return [last_progress(each, request, now) for each, (request, _) in zip(told, ended, strict=True)]

    def update(self, plan: SchedulerOutput, output: ModelOutput, now: float) -> list[RequestProgress]:
        """Takes in the outcome of the last plan; progress of each request that got something, in the plan's order."""
        assert plan.step == self._step - 1, f"update of step {plan.step} after schedule of step {self._step - 1}"
        if self._drafting is not None:
            self._drafting.learn_of(plan, output)
        progress, ended = apply_output(self._state, plan, self._in_flight, output, now)
        self._in_flight = []
        # A second pass, so that blocks are freed in the plan's order, whatever ended the request.
        for index, request, reason in ended:
            self._end(request, reason, now)
            progress[index] = last_progress(progress[index], request, now)
        return progress

    # -- tensor requests

    def add_tensor(self, request: TensorRequest, now: float) -> None:
        """Takes one in. Raises InvalidRequest, ModelNotFound, or Overloaded where its model's queue is full."""
        if request.request_id in self._state.requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        self.lanes.add(request, now)

    def expire_tensors(self, now: float) -> list[RequestProgress]:
        """Do as `expire` for requests that wait for a batch. Call it before `dispatch`."""
        return self.lanes.expire(now)

    def dispatch(self, now: float) -> tuple[Batch, ...]:
        """Return all batches that may go now; call it also while a step is under way, and after every event."""
        return self.lanes.dispatch(now)

    def completed(self, batch: Batch, outcome: BatchOutcome, now: float) -> list[RequestProgress]:
        """Takes in the outcome of a batch; the last progress of those that may be told."""
        return self.lanes.completed(batch, outcome, now)

    def next_wake(self, now: float) -> float | None:
        """Return when `expire_tensors` or `dispatch` may have something to do (s), if nothing happens before."""
        return self.lanes.next_wake(now)

    # -- small things

    @property
    def _shares_machine(self) -> bool:
        """Whether there would be a step without the class background."""
        return self.can_step and (self.num_running > self._state.background.num_running or self.num_queued > 0)

    def _note_given_up(self) -> None:
        reservations = self._state.reservations
        has_news = reservations.given_up_requests or reservations.given_up_leases
        self.given_up = reservations.take_given_up() if has_news else NOTHING_GIVEN_UP

    def _watch_cache(self) -> None:
        order, background = self._state.order, self._state.background.order

        def tell(digest: bytes) -> None:
            order.block_cached(digest)
            background.block_cached(digest)

        self._kv.on_cached = tell if order.policy.kv_needs is not None else None

    def _find_kv(self, request: RequestState) -> KVNeed:
        kv, hit, num_inputs = self._kv, self._kv.find_prefix(request), request.num_prompt_tokens
        return KVNeed(
            hit.num_tokens,
            len(hit.blocks),
            kv.num_blocks_for(num_inputs + ceil(expected_outputs(request))),
            kv.num_blocks_for(num_inputs + request.max_tokens),
        )

    def _end(self, request: RequestState, reason: FinishReason, now: float) -> None:
        end(self._state, request, reason, now)
        for speculation in self._speculations:
            speculation.ended(request.request_id)
        if _has_deadline(request):
            self._deadlines.ended(request)


def _has_deadline(request: RequestState) -> bool:
    return request.terms.start_by is not None or request.terms.finish_by is not None


def _rules_of(config: SchedulerConfig) -> SchedulerConfig:
    """Return the parts that make a policy: all but the limits and the predictor."""
    return replace(
        config, max_num_seqs=1, max_num_batched_tokens=1, predictor="max_tokens", tensor_share=1.0, batch_slack=0
    )


def lone_scheduler(config: SchedulerConfig) -> Scheduler:
    """Scheduler without a language model: it has lanes alone, and no prompt fits it."""
    kv = KVCacheManager(num_blocks=1, block_size=1, hasher=TokenHasher(1, ""), enable_prefix_caching=False)
    return Scheduler(config, kv)
