"""Decides what each step computes: requests have known tokens and computed tokens, and the second catch up.

There is no prefill phase and no decode phase: chunked prefill mixed with decode (Sarathi-Serve, arXiv:2403.02310),
prefix hits, preemption by recompute (PagedAttention, arXiv:2309.06180) and iteration-level batching (Orca, OSDI 2022)
are all this one rule within `max_num_batched_tokens`. Pure: time is an argument, nothing is read or written elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain

from maitred.config import SchedulerConfig
from maitred.errors import InvalidRequest
from maitred.kvcache.manager import Allocation, KVCacheManager, PrefixHit
from maitred.request import FinishReason, Request, RequestStatus, timing_of
from maitred.scheduler.admission import refuse_impossible
from maitred.scheduler.deadlines import Deadlines
from maitred.scheduler.draft import Draft, Removed, describe
from maitred.scheduler.notes import Blocked, Lack, Preemption, PreemptionCause
from maitred.scheduler.order import ServiceOrder
from maitred.scheduler.policies import POLICIES, policy_for
from maitred.scheduler.policy import PolicyFactory
from maitred.scheduler.predictor import Predictor, bounded_prediction, predictor_named
from maitred.scheduler.samples import SampleFamilies
from maitred.scheduler.stats import SchedulerCounters, SchedulerStats
from maitred.scheduler.stop import StopRule, stop_at_token
from maitred.scheduler.swap import SwapCosts, worth_swapping
from maitred.step import ModelOutput, RequestProgress, SampledRow, ScheduledRow, SchedulerOutput

RUNNING, WAITING, FINISHED = RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.FINISHED
ENDED_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


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
    ) -> None:
        self._kv = kv_cache
        self._stop_rule = stop_rule
        self._requests: dict[str, Request] = {}  # all that have not finished
        self._prefilling: dict[str, Request] = {}  # running, more than one token behind
        self._decoding: dict[str, Request] = {}  # running, one token behind
        self._families = SampleFamilies()
        self._forgotten: list[str] = []  # since the last plan
        self._in_flight: list[Request] = []  # of the last plan, row by row
        self._prompt_logprobs_until: dict[str, int] = {}  # last prompt position whose logprobs were handed out
        self._step = 0
        self.blocked: Blocked | None = None  # in the last step
        self.preemptions: tuple[Preemption, ...] = ()  # in the last step
        self._swap_costs: SwapCosts | None = None
        self._counters = SchedulerCounters()
        self._config = config
        self._policies = policies
        self._order = ServiceOrder(policy_for(config, policies), self._find_prefix)
        kv_cache.on_cached = self._order.block_cached if self._order.policy.scores_prefix else None
        self._deadlines = Deadlines()
        self._predictor = predictor if predictor is not None else predictor_named(config.predictor)

    # -- what callers ask

    @property
    def config(self) -> SchedulerConfig:
        return self._config

    @property
    def policy_names(self) -> tuple[str, ...]:
        """What `configure` may choose from, installed policies included."""
        return tuple(sorted(self._policies))

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_queued(self) -> int:
        """Those that could run if there were room: neither running, nor waiting for the prompt of another sample."""
        return len(self._order.queue)

    def waits_to_start(self, request_id: str) -> bool:
        """Whether it is here and was in no step yet."""
        request = self._requests.get(request_id)
        return request is not None and request.first_scheduled_at is None

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(self._running())

    @property
    def waiting(self) -> tuple[Request, ...]:
        """In order, then the samples that wait for their leader; for people to look at."""
        return (*self._order.queue.in_order(), *self._families.waiting())

    def next_in_line(self, count: int) -> list[Request]:
        """The first `count` of `waiting`, without sorting all of it."""
        found = self._order.queue.first(count)
        return found + self._families.waiting()[: count - len(found)]

    @property
    def kv_cache(self) -> KVCacheManager:
        """To look at: whose blocks, which can be found by prefix."""
        return self._kv

    @property
    def order(self) -> ServiceOrder:
        """To look at: the policy at work, the queue, and everybody's key."""
        return self._order

    def request(self, request_id: str) -> Request | None:
        """One that has not finished."""
        return self._requests.get(request_id)

    def terms(self, request_id: str) -> dict[str, float]:
        """The parts of a request's place in the policy's order, by name; empty for one that is not here or waits for
        its leader. For people to look at.
        """
        request = self._requests.get(request_id)
        if request is None or request_id not in self._order.keys:
            return {}
        return dict(self._order.policy.terms(request))

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=len(self._order.queue) + self._families.num_waiting,
            num_blocks=self._kv.num_blocks,
            num_blocks_used=self._kv.num_used,
            num_blocks_cached=self._kv.num_cached,
            **asdict(self._counters),
        )

    def check_invariants(self) -> None:
        """Asserts what must hold between any two calls; slow."""
        queued, followers, running = list(self._order.queue), self._families.waiting(), list(self._running())
        everyone = sorted(r.request_id for r in [*queued, *followers, *running])
        assert everyone == sorted(self._requests)
        self._order.check_invariants(running)
        assert all(r.status is WAITING for r in queued)
        assert all(r.status is RUNNING for r in running)
        assert not any(r.block_table or r.num_computed_tokens for r in [*queued, *followers])
        self._kv.check_invariants(running)
        self._kv.check_host(queued)

    # -- what happens to requests

    def add(self, request: Request, now: float) -> None:
        """Takes a request in; its `block_hashes` are computed already.

        Raises PromptTooLong when it could not run even alone, InvalidRequest when its id is in use.
        """
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        refuse_impossible(request, self._kv)
        self._requests[request.request_id] = request
        self._deadlines.add(request)
        if request.predicted_output_tokens is None:  # else it was recorded, or a simulator knows better
            request.predicted_output_tokens = bounded_prediction(self._predictor, request)
        if self._families.join(request):
            request.status = RequestStatus.WAITING_FOR_LEADER
        else:
            self._enqueue(request)

    def abort(self, request_id: str, now: float) -> RequestProgress | None:
        """Ends a request and frees its blocks at once; None when it is not here (any more)."""
        return self.finish(request_id, FinishReason.ABORT, now)

    def finish(
        self, request_id: str, reason: FinishReason, now: float, *, stop_reason: int | str | None = None
    ) -> RequestProgress | None:
        """Ends a request for a reason found outside, such as a stop string; its last progress, or None if unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.stop_reason = stop_reason
        self._end(request, reason, now)
        return _last_progress(RequestProgress(request_id), request, now)

    def expire(self, now: float) -> list[RequestProgress]:
        """Ends those whose `start_by` or `finish_by` has passed; their last progress. Call it before `schedule`."""
        return [
            progress
            for request, reason in self._deadlines.missed(now)
            if (progress := self.finish(request.request_id, reason, now)) is not None
        ]

    def set_policy(self, name: str) -> None:
        """Orders everything by another policy from now on. Raises ConfigError when there is none of that name."""
        self.configure(replace(self._config, policy=name))

    def set_swap_costs(self, costs: SwapCosts | None) -> None:
        """What copying and computing take on this machine; None never copies."""
        self._swap_costs = costs

    def configure(self, config: SchedulerConfig) -> None:
        """Changes policy and limits between steps; no request is lost. Raises ConfigError and changes nothing."""
        order = self._order
        if _rules_of(config) != _rules_of(self._config):  # else keep it, and what it knows of service given
            order = order.successor(policy_for(config, self._policies), self._running())
        if config.predictor != self._config.predictor:
            self._predictor = predictor_named(config.predictor)
        self._order, self._config = order, config
        self._kv.on_cached = order.block_cached if order.policy.scores_prefix else None

    # -- a step

    def schedule(self, now: float) -> SchedulerOutput:
        """The next plan. What is planned counts as computed from here on, so `update` must follow."""
        draft = Draft(self._config.max_num_batched_tokens)
        self._order.begin_step()
        self._kv.begin_step()
        self._give_up_slots(draft, now)
        self._plan_decodes(draft)
        self._plan_prefills(draft, now)
        self._plan_admissions(draft, now)
        self.blocked, self.preemptions = self._why_blocked(draft), tuple(draft.preemptions)
        return self._issue(draft)

    def update(self, plan: SchedulerOutput, output: ModelOutput, now: float) -> list[RequestProgress]:
        """Takes in the outcome of the last plan; progress of each request that got something, in the plan's order."""
        assert plan.step == self._step - 1, f"update of step {plan.step} after schedule of step {self._step - 1}"
        results = {row.request_id: row for row in output.rows}
        progress: list[RequestProgress] = []
        ended: list[tuple[int, Request, FinishReason]] = []
        for row, request in zip(plan.rows, self._in_flight, strict=True):
            if request.status is not RUNNING:
                continue  # aborted meanwhile
            result = results.get(row.request_id)
            if result is None:
                if not row.samples:
                    self._kv.commit(request, row.start, row.start + row.num_tokens)
                    continue
                result = SampledRow(row.request_id, (), error="the executor gave no token")
            told, reason = self._take_in(request, row, result, now)
            if reason is not None:
                ended.append((len(progress), request, reason))
            elif not told.new_token_ids and not told.prompt_logprobs:
                continue
            progress.append(told)
        self._in_flight = []
        # A second pass, so that blocks are freed in the plan's order whoever decided that the request ends.
        for index, request, reason in ended:
            self._end(request, reason, now)
            progress[index] = _last_progress(progress[index], request, now)
        return progress

    # -- planning

    def _give_up_slots(self, draft: Draft, now: float) -> None:
        while self.num_running > self._config.max_num_seqs:  # after `configure`
            self._preempt(self._worst_running(), draft, PreemptionCause.LIMITS)
        if self._order.policy.quantum_end is not None:
            for request in self._order.take_expired(self._running(), now, self._num_replaceable()):
                self._preempt(request, draft, PreemptionCause.QUANTUM)

    def _num_replaceable(self) -> int:
        """How many may leave for those that wait: none if the first finds room without that, else at least one, and
        as many as the budget has tokens to replace, so that not all leave at once and their slots stay idle.
        """
        head = self._order.head()
        if head is None:
            return 0
        hit = self._reusable(head)
        if self.num_running < self._config.max_num_seqs and not self._kv.num_blocks_short(head, hit):
            return 0
        budget = self._config.max_num_batched_tokens - self.num_running
        return max(1, budget // max(1, head.num_tokens - hit.num_tokens))

    def _plan_decodes(self, draft: Draft) -> None:
        rows, requests = draft.rows, draft.requests
        ref_counts, block_size = self._kv.ref_counts, self._kv.block_size
        for request in list(self._decoding.values()):
            start, table = request.num_computed_tokens, request.block_table
            block = start // block_size
            if block < len(table) and ref_counts[table[block]] == 1:
                rows.append(ScheduledRow(request.request_id, start, 1, True))
            elif request.status is not RUNNING:
                continue  # preempted for the sake of a row before it
            else:
                grown = self._grow(request, draft)
                if grown is None:
                    continue
                draft.copies += grown.copies
                rows.append(
                    ScheduledRow(request.request_id, start, 1, True, grown.new_block_ids, grown.replaced_blocks)
                )
            requests.append(request)
            request.num_computed_tokens = start + 1
        draft.budget = self._config.max_num_batched_tokens - len(rows)

    def _grow(self, request: Request, draft: Draft) -> Allocation | None:
        """Room for one more token, taken from the worst running requests if need be; None if it is itself the worst."""
        while (allocation := self._kv.allocate(request, 1)) is None:
            victim = self._worst_running()
            draft.out_of_blocks = True
            self._preempt(victim, draft, PreemptionCause.BLOCKS, by=request)
            if victim is request:
                return None
        return allocation

    def _plan_prefills(self, draft: Draft, now: float) -> None:
        """Further chunks of prompts already begun; their blocks were allocated when they were admitted."""
        for request in sorted(self._prefilling.values(), key=self._order.place):
            self._plan_admissions(draft, now, ahead_of=request)
            if draft.budget > 0 and request.status is RUNNING and request.request_id not in draft.settled:
                self._plan_chunk(request, draft)

    def _plan_chunk(self, request: Request, draft: Draft, block_ids: tuple[int, ...] = ()) -> None:
        start = request.num_computed_tokens
        num_tokens = min(draft.budget, request.num_tokens - start)
        samples = start + num_tokens == request.num_tokens
        draft.rows.append(ScheduledRow(request.request_id, start, num_tokens, samples, block_ids))
        draft.requests.append(request)
        draft.budget -= num_tokens
        request.num_computed_tokens = start + num_tokens

    def _plan_admissions(self, draft: Draft, now: float, ahead_of: Request | None = None) -> None:
        """Strictly in order: if the first has no room, nobody behind it is admitted, so large ones do not starve.

        With `ahead_of`, only those that outrank a running request, so that its long prompt does not keep them waiting.
        """
        while draft.budget > 0 and not draft.out_of_blocks:
            head = self._order.head()
            if head is None or (ahead_of is not None and not self._order.outranked(head, [ahead_of])):
                return
            if self.num_running >= self._config.max_num_seqs and not self._make_room(head, draft):
                return
            hit = self._reusable(head)
            draft.num_blocks_short = self._kv.num_blocks_short(head, hit)
            if draft.num_blocks_short:
                if not self._make_room(head, draft):
                    return
                hit = self._reusable(head)
            self._start(head, hit, draft, now)

    def _why_blocked(self, draft: Draft) -> Blocked | None:
        """What the first in the queue lacks, now that admission has stopped."""
        head = self._order.queue.peek()
        if head is None:
            return None
        if draft.out_of_blocks:
            return Blocked(Lack.RUNNING_LACK_BLOCKS, head.request_id)
        if self.num_running >= self._config.max_num_seqs:
            return Blocked(Lack.SLOTS, head.request_id)
        if draft.budget <= 0:
            return Blocked(Lack.BUDGET, head.request_id)
        return Blocked(Lack.BLOCKS, head.request_id, draft.num_blocks_short)

    def _reusable(self, request: Request) -> PrefixHit:
        hit = self._kv.find_prefix(request)
        source = self._families.source_for(request)
        if source is not None and request.num_prompt_tokens - 1 >= max(hit.num_tokens, request.num_swapped_tokens):
            return self._kv.fork(source, request)
        return self._kv.swapped(request, hit)

    def _make_room(self, head: Request, draft: Draft) -> bool:
        """Preempts requests that `head` outranks, the worst first, for a slot and blocks; nobody if in vain."""
        outranked = [r for r in self._order.outranked(head, self._running()) if r.request_id not in draft.settled]
        hit = self._reusable(head)
        short = self._kv.num_blocks_short(head, hit)
        if not outranked or short > sum(len(r.block_table) for r in outranked):
            return False
        victims = []
        for victim in outranked:
            victims.append(victim)
            short -= self._kv.num_freed_by(victim, hit)
            if short <= 0:
                break
        if short > 0:
            return False
        for victim in victims:
            self._preempt(victim, draft, PreemptionCause.OUTRANKED, by=head)
        return not self._kv.num_blocks_short(head, self._reusable(head))

    def _start(self, request: Request, hit: PrefixHit, draft: Draft, now: float) -> None:
        allocation = self._kv.admit(request, hit)
        assert allocation is not None, "admitted without checking for blocks"
        request.status = RUNNING
        self._prefilling[request.request_id] = request
        self._order.started(request)
        if request.first_scheduled_at is None:
            request.first_scheduled_at = now
            request.num_cached_tokens = min(hit.num_tokens, request.num_prompt_tokens)
            if not hit.forked:  # else the prompt was counted with the sample it is shared with
                self._counters.count_prompt(request)
        draft.settled.add(request.request_id)
        draft.new_requests.append(describe(request))
        draft.copies += allocation.copies
        draft.swap_ins += allocation.swap_ins
        self._counters.num_swapped_in_blocks += len(allocation.swap_ins)
        self._plan_chunk(request, draft, allocation.new_block_ids)

    def _issue(self, draft: Draft) -> SchedulerOutput:
        plan = SchedulerOutput(
            step=self._step,
            rows=tuple(draft.rows),
            new_requests=tuple(draft.new_requests),
            forgotten_request_ids=tuple(self._forgotten),
            block_copies=tuple(draft.copies),
            swap_outs=tuple(draft.swap_outs),
            swap_ins=tuple(draft.swap_ins),
        )
        self._step += 1
        self._in_flight = draft.requests
        self._forgotten = []
        self._counters.num_steps += bool(draft.rows)
        self._counters.num_scheduled_tokens += self._config.max_num_batched_tokens - draft.budget
        self._order.issued(draft)
        return plan

    # -- outcomes

    def _take_in(
        self, request: Request, row: ScheduledRow, result: SampledRow, now: float
    ) -> tuple[RequestProgress, FinishReason | None]:
        """One row's outcome; its KV becomes findable unless the row failed."""
        request_id, token_ids, logprobs, prompt_logprobs, error = result
        if error is None and row.samples and not token_ids:
            error = "the executor gave no token"
        if error is not None:
            request.error = error
            return RequestProgress(request_id), FinishReason.ERROR
        end = row.start + row.num_tokens
        self._kv.commit(request, row.start, end)
        reason = None
        if token_ids:
            num_taken, reason = self._append(request, token_ids, now)
            if num_taken < len(token_ids):
                token_ids, logprobs = token_ids[:num_taken], logprobs and logprobs[:num_taken]
        if prompt_logprobs is not None:
            # A prompt computed again after a preemption is not reported again: entry i is of position start + 1 + i.
            told_until = self._prompt_logprobs_until.get(request_id, 0)
            prompt_logprobs = prompt_logprobs[max(0, told_until - row.start) :]
            self._prompt_logprobs_until[request_id] = max(told_until, min(end, request.num_prompt_tokens - 1))
        cached = request.num_cached_tokens
        return RequestProgress(request_id, token_ids, logprobs, prompt_logprobs, None, None, None, cached), reason

    def _append(self, request: Request, token_ids: tuple[int, ...], now: float) -> tuple[int, FinishReason | None]:
        """Appends tokens until one ends the request; how many, and why it ended."""
        if request.request_id in self._prefilling:
            self._decoding[request.request_id] = self._prefilling.pop(request.request_id)
            for follower in self._families.prompt_computed(request):
                self._enqueue(follower)
        if request.first_token_at is None:
            request.first_token_at = now
        request.last_token_at = now
        for count, token in enumerate(token_ids, 1):
            request.output_token_ids.append(token)
            self._counters.num_generated_tokens += 1
            reason = self._stop_rule(request)
            if reason is not None:
                return count, reason
        return len(token_ids), None

    def _end(self, request: Request, reason: FinishReason, now: float) -> None:
        request_id = request.request_id
        if request.status is RUNNING:
            self._leave_running(request)
        request.status, request.finish_reason, request.finished_at = FINISHED, reason, now
        del self._requests[request_id]
        self._order.ended(request)
        self._deadlines.ended(request)
        if reason in ENDED_BY_ITSELF:
            self._predictor.observe(request)
        self._kv.drop_swapped(request)
        self._prompt_logprobs_until.pop(request_id, None)
        self._counters.num_finished[reason] += 1
        heir = self._families.left(request)
        if heir is not None:
            self._enqueue(heir)

    def _preempt(self, request: Request, draft: Draft, cause: PreemptionCause, *, by: Request | None = None) -> None:
        """Back to the queue, to its old place; what it computed is lost, but for what the prefix cache keeps."""
        draft.preemptions.append(Preemption(request.request_id, cause, by.request_id if by is not None else None))
        self._swap_out(request, draft, draft.remove(request), cause)
        self._leave_running(request)
        self._families.preempted(request)
        request.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._enqueue(request)

    def _swap_out(self, request: Request, draft: Draft, removed: Removed, cause: PreemptionCause) -> None:
        """To the host, what was computed before this plan, if that takes less time than computing it again will."""
        num_tokens = request.num_computed_tokens - removed.num_tokens
        lacking = cause is PreemptionCause.BLOCKS or (cause is PreemptionCause.OUTRANKED and draft.num_blocks_short)
        if not lacking and self._kv.finds_again(request):
            return  # while no blocks lack, the prefix cache keeps what was computed
        if self._swap_costs is None or not self._kv.can_swap_out(num_tokens):
            return
        if worth_swapping(self._swap_costs, self._kv.num_blocks_for(num_tokens), num_tokens):
            copies = self._kv.swap_out(request, num_tokens, removed.copied_from)
            draft.swap_outs += copies
            self._counters.num_swapped_out_blocks += len(copies)

    def _leave_running(self, request: Request) -> None:
        if self._decoding.pop(request.request_id, None) is None:
            del self._prefilling[request.request_id]
        self._kv.free(request)
        self._forgotten.append(request.request_id)

    # -- small things

    def _running(self) -> Iterator[Request]:
        return chain(self._prefilling.values(), self._decoding.values())

    def _worst_running(self) -> Request:
        return max(self._running(), key=self._order.victim_key)

    def _find_prefix(self, request: Request) -> tuple[int, int]:
        hit = self._kv.find_prefix(request)
        return len(hit.blocks), hit.num_tokens

    def _enqueue(self, request: Request) -> None:
        request.status = WAITING
        self._order.enqueue(request)


def _rules_of(config: SchedulerConfig) -> SchedulerConfig:
    """What a policy is made of: all but the limits and the predictor."""
    return replace(config, max_num_seqs=1, max_num_batched_tokens=1, predictor="")


def _last_progress(progress: RequestProgress, request: Request, now: float) -> RequestProgress:
    return progress._replace(
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
        num_cached_tokens=request.num_cached_tokens,
        timing=timing_of(request, now),
    )
