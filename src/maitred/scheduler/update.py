"""Update after a step: tokens are appended, full blocks enter the prefix cache, requests end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from maitred.core.request import FinishReason, RequestState, RequestStatus
from maitred.core.step import ModelOutput, RequestProgress, SampledRow, ScheduledRow, SchedulerOutput
from maitred.scheduler.reserving import forget
from maitred.scheduler.state import SchedulerState
from maitred.scheduler.timing import timing_of

TELL_US = 500_000  # of its computing; so much is lost at most of a request whose engine or server is killed
ENDED_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


class Update(NamedTuple):
    """Outcome of a plan, in its order."""

    progress: list[RequestProgress]  # of each request that got something
    ended: list[tuple[int, RequestState, FinishReason]]  # index in `progress`, request to end, why; none has ended yet


def apply_output(
    state: SchedulerState, plan: SchedulerOutput, in_flight: Sequence[RequestState], output: ModelOutput, now: float
) -> Update:
    """Apply the executor's output; `in_flight` are the requests of the plan's rows."""
    running = RequestStatus.RUNNING
    results = {row.request_id: row for row in output.rows}
    progress: list[RequestProgress] = []
    ended: list[tuple[int, RequestState, FinishReason]] = []
    for row, request in zip(plan.rows, in_flight, strict=True):
        if request.status is not running:
            continue  # aborted meanwhile
        result = results.get(row.request_id)
        if result is None:
            if not row.samples:
                state.kv.commit(request, row.start, row.start + row.num_tokens)
                continue
            result = SampledRow(row.request_id, (), error="the executor gave no token")
        told, reason = _apply_row(state, request, row, result, now)
        if reason is not None:
            ended.append((len(progress), request, reason))
        elif not told.new_token_ids and not told.prompt_logprobs:
            continue
        progress.append(told)
    return Update(progress, ended)


def decode_on(
    state: SchedulerState, requests: Sequence[RequestState], num_steps: int, token: int, now: float
) -> list[tuple[RequestState, FinishReason]]:
    """Decode so many tokens of each request, as as many steps would; the requests that end with it, none before."""
    kv, size, blocks = state.kv, state.kv.block_size, list[tuple[int, bool, int]]()
    kv.begin_step()
    state.order.begin_step()
    state.forgotten = []
    starts = [request.num_computed_tokens for request in requests]
    for number, start in enumerate(starts):
        first = -start % size  # the step that begins a block; the one before it has filled another
        blocks += [(step, False, number) for step in range(first, num_steps, size)]
        blocks += [(step, True, number) for step in range((first - 1) % size, num_steps, size)]
        requests[number].output_token_ids += [token] * num_steps
    for step, is_full, number in sorted(blocks):
        request, at = requests[number], starts[number] + step
        request.num_computed_tokens = at + is_full
        if is_full:
            kv.commit(request, at, at + 1)
        elif at // size == len(request.block_table):
            allocation = kv.allocate(request, 1)
            assert allocation is not None, "steps were foreseen that lack blocks"
    for request, start in zip(requests, starts, strict=True):
        request.num_computed_tokens, request.last_token_at = start + num_steps, now
    counters, num_tokens = state.counters, num_steps * len(requests)
    counters.num_steps += num_steps
    counters.num_scheduled_tokens += num_tokens
    counters.num_generated_tokens += num_tokens
    reasons = ((request, state.stop_rule(request)) for request in requests)
    return [(request, reason) for request, reason in reasons if reason is not None]


def end(state: SchedulerState, request: RequestState, reason: FinishReason, now: float) -> None:
    """Wherever it stands."""
    request_id = request.request_id
    if request.status is RequestStatus.RUNNING:
        state.leave_running(request)
    elif request.status is RequestStatus.WAITING_FOR_KV:
        forget(state, request)
    request.status, request.finish_reason, request.finished_at = RequestStatus.FINISHED, reason, now
    del state.requests[request_id]
    state.books_of(request).order.ended(request)
    if reason in ENDED_BY_ITSELF and request.spec.pooling is None:
        state.predictor.observe(request)
    if request.host_block_table:
        state.kv.drop_swapped(request)
    state.prompt_logprobs_until.pop(request_id, None)
    state.counters.num_finished[reason] += 1
    if state.sample_groups.groups:
        state.sample_groups.left(request)


def last_progress(progress: RequestProgress, request: RequestState, now: float) -> RequestProgress:
    """Return the last progress of a request that has ended."""
    return progress._replace(
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
        charges=request.charges,
        timing=timing_of(request, now),
    )


def _apply_row(
    state: SchedulerState, request: RequestState, row: ScheduledRow, result: SampledRow, now: float
) -> tuple[RequestProgress, FinishReason | None]:
    """Apply one row's outcome; its KV becomes findable unless the row failed."""
    request_id, token_ids, logprobs, prompt_logprobs, error = result[:5]
    if error is None and row.samples and not (token_ids or result.complete or result.postponed):
        error = "the executor gave no token"
    if error is not None:
        request.error = error
        return RequestProgress(request_id), FinishReason.ERROR
    row_end = row.start + row.num_tokens
    reason = None
    if token_ids:
        num_taken, reason = _take(state, request, row, result, now)
        token_ids, logprobs = token_ids[:num_taken], logprobs and logprobs[:num_taken]
        num_accepted = min(num_taken - 1, result.num_accepted)
        if result.num_drafts:
            state.counters.count_drafts(request, result.num_drafts, num_accepted)
        row_end -= row.num_drafts - num_accepted
    elif result.postponed:
        row_end = _postpone(state, request, row)
    elif result.complete:
        reason = FinishReason.STOP
    state.kv.commit(request, row.start, row_end)
    if prompt_logprobs is not None:
        # A prompt computed again after a preemption is not reported again: entry i is of position start + 1 + i.
        told_until = state.prompt_logprobs_until.get(request_id, 0)
        prompt_logprobs = prompt_logprobs[max(0, told_until - row.start) :]
        state.prompt_logprobs_until[request_id] = max(told_until, min(row_end, request.num_prompt_tokens - 1))
    charges = None
    if request.compute_us >= request.tell_at_us and (token_ids or prompt_logprobs or reason is not None):
        request.tell_at_us, charges = request.compute_us + TELL_US, request.charges
    num_forced = max(0, len(token_ids) - 1 - result.num_accepted)
    told = RequestProgress(
        request_id, token_ids, logprobs, prompt_logprobs, charges=charges, num_forced=num_forced, vector=result.vector
    )
    return told, reason


def _postpone(state: SchedulerState, request: RequestState, row: ScheduledRow) -> int:
    """The last known position is computed again; how many are computed now."""
    request.num_computed_tokens = request.num_tokens
    if row.num_drafts:
        state.kv.trim(request)
    request.num_computed_tokens -= 1
    return request.num_computed_tokens


def _take(
    state: SchedulerState, request: RequestState, row: ScheduledRow, result: SampledRow, now: float
) -> tuple[int, FinishReason | None]:
    """Appends a row's tokens up to one that ends the request; how many, and why it ended.

    Policies hear of each as if it had been sampled in a step of its own. Accepted drafts are computed, forced tokens
    are not yet.
    """
    token_ids, num_accepted = result.token_ids, result.num_accepted
    num_sampled = len(token_ids) - result.num_forced
    assert num_sampled - 1 == num_accepted <= row.num_drafts, f"{result} for {row}"
    request.num_computed_tokens -= row.num_drafts
    num_taken, reason = 1, _append(state, request, token_ids[0], now)
    while num_taken < len(token_ids) and reason is None:
        request.num_computed_tokens += 1
        state.books_of(request).order.accepted(request)
        reason = _append(state, request, token_ids[num_taken], now)
        num_taken += 1
    request.num_computed_tokens -= max(0, num_taken - 1 - num_accepted)
    if row.num_drafts:
        state.kv.trim(request)
    if result.complete and num_taken == len(token_ids) and reason in (None, FinishReason.LENGTH):
        reason = FinishReason.STOP
    return num_taken, reason


def _append(state: SchedulerState, request: RequestState, token: int, now: float) -> FinishReason | None:
    """Append one known token; return why it ended the request, if it did."""
    books = state if request.request_id in state.prefilling else state.background
    if request.request_id in books.prefilling:
        books.decoding[request.request_id] = books.prefilling.pop(request.request_id)
        if state.sample_groups.groups:
            state.sample_groups.prompt_computed(request)
    if request.first_token_at is None:
        request.first_token_at = now
    request.last_token_at = now
    request.output_token_ids.append(token)
    state.counters.num_generated_tokens += 1
    return state.stop_rule(request)
