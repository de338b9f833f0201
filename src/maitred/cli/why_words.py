"""Histories of requests in plain words, for `maitred why`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from maitred.cli.console import inert
from maitred.core.request import FinishReason, RequestState
from maitred.core.tensor_request import Batch
from maitred.decisions.history import PreemptionAt, RequestHistory, Start, Wait
from maitred.decisions.tensor_history import LoggedBatch, TensorHistory, TensorWait
from maitred.scheduler.notes import Lack, LaneWait, PreemptionCause

_ENDS = {
    FinishReason.STOP: "it said what it had to say",
    FinishReason.LENGTH: "it reached max_tokens",
    FinishReason.ABORT: "the client went away",
    FinishReason.ERROR: "the model gave no usable logits",
    FinishReason.QUEUE_TIMEOUT: "it was in no step by its queue timeout",
    FinishReason.TIMEOUT: "it was not done by its timeout",
    FinishReason.SHED: "it made room in the queue for a more urgent one",
}


def tell(history: RequestHistory) -> str:
    """Some ten lines; times are seconds from arrival."""
    lines = [f"request {history.request.request_id}", *_arrival(history)]
    for index, wait in enumerate(history.waits):
        lines += _waiting(history, wait, is_first=index == 0)
        if index < len(history.starts):
            lines += _start(history, history.starts[index], is_first=index == 0)
        if index < len(history.preemptions):
            lines.append(_preemption(history, history.preemptions[index]))
    lines += [_line("changed", f"{_at(history, at)}: policy {name}") for at, name in history.policy_changes]
    lines += [_line("put out", f"{_at(history, by.at)}: {_named(by.other)}") for by in history.preempted_others]
    return inert("\n".join([*lines, *_end(history)]))


def _arrival(history: RequestHistory) -> Iterator[str]:
    request = history.request
    predicted = request.predicted_output_tokens
    guess = f", predicted {predicted:g}" if predicted is not None else ""
    yield _line(
        "arrived",
        f"{history.arrived_at:.3f} s on the log's clock: {request.num_prompt_tokens:,} prompt tokens, at most "
        f"{request.max_tokens:,} output tokens{guess}; {_kind(request)}; policy {history.policy}",
    )


def _waiting(history: RequestHistory, wait: Wait, *, is_first: bool) -> Iterator[str]:
    behind = (
        f" behind {_crowd(history.ahead)} and {_count(history.num_running_then, 'request')} running" if is_first else ""
    )
    overtaken = f"; {len(wait.overtaking)} that came later started before it" if wait.overtaking else ""
    yield _line("waited", f"{wait.total_s:.3f} s{behind}{overtaken}")
    lacking = {
        Lack.SLOTS: f"all {history.max_num_seqs} slots were taken",
        Lack.BLOCKS: f"KV blocks were lacking for the first in line (at most {wait.most_blocks_short})",
        Lack.SLACK: "steps had requests that are no background work, and no room beside them by --batch-slack",
        Lack.LEADER: "the first in line waited for another sample to compute its prompt",
        Lack.BUDGET: "the tokens of each step went to others",
        Lack.RUNNING_LACK_BLOCKS: "running requests lacked KV blocks, so nobody was admitted",
    }
    reasons = [(seconds, f"because {lacking[lack]}") for lack, seconds in wait.for_lack.items()]
    reasons.append((wait.for_leader_s, "because another sample computed the prompt they share"))
    reasons.append((wait.for_kv_s, "for KV from elsewhere"))
    reasons.append((wait.until_step_s, "until the step under way had ended"))
    for seconds, reason in sorted(reasons, reverse=True):
        if seconds > 0:
            yield _line("", f"{seconds:.3f} s {reason}")
    if wait.as_first_s > 0:
        yield _line("", f"({wait.as_first_s:.3f} s of it as the first in line)")


def _start(history: RequestHistory, start: Start, *, is_first: bool) -> Iterator[str]:
    total = history.request.num_prompt_tokens
    reused = (
        f"{start.num_reused_tokens:,} tokens" if not is_first else f"{start.num_reused_tokens:,} of {total:,} tokens"
    )
    found = f"KV of {reused} was there already" if start.num_reused_tokens else "no KV was there to reuse"
    yield _line("started", f"{_at(history, start.at)}, by policy {start.policy}: {found}")
    if is_first and history.terms and history.terms != start.terms:
        yield _line("score", f"{_score(history.terms)} when it came")
    if start.terms:
        when = "" if is_first and history.terms == start.terms else " when it started"
        yield _line("score", f"{_score(start.terms)}{when}")


def _preemption(history: RequestHistory, event: PreemptionAt) -> str:
    causes = {
        PreemptionCause.BLOCKS: "a running request needed its KV blocks",
        PreemptionCause.OUTRANKED: "a request that outranks it took its place",
        PreemptionCause.QUANTUM: "its turn was over, and others waited",
        PreemptionCause.LIMITS: "fewer requests may run at once",
    }
    by = event.preemption.by
    if by == event.preemption.request_id:
        who = ": itself, as the last in order"
    else:
        who = f": {_named(event.other)}" if event.other is not None else ""
    return _line("preempted", f"{_at(history, event.at)}, because {causes[event.preemption.cause]}{who}")


def _end(history: RequestHistory) -> Iterator[str]:
    if history.first_token_at is not None:
        yield _line("1st token", _at(history, history.first_token_at))
    if history.finish_reason is None or history.ended_at is None:
        yield _line("", f"the log ends here; {_count(history.num_tokens, 'token')} so far")
        return
    reason = history.finish_reason
    tokens = _count(history.num_tokens, "token")
    yield _line(
        "finished", f"{_at(history, history.ended_at)}, {tokens}: {reason.value}, {_ENDS.get(reason, 'it ended')}"
    )


def _line(label: str, text: str) -> str:
    return f"  {label:<9}  {text}"


def _at(history: RequestHistory, at: float) -> str:
    return f"{at - history.arrived_at:+.3f} s"


def _score(terms: dict[str, float]) -> str:
    return " + ".join(f"{name} {value:,.6g}" for name, value in terms.items())


def _crowd(requests: Iterable[RequestState]) -> str:
    """`4 waiting requests (3 of priority 0, 1 of priority 2 of acme)`."""
    kinds = Counter(_kind(request) for request in requests)
    if not kinds:
        return "nobody"
    listed = ", ".join(f"{count} of {kind}" for kind, count in sorted(kinds.items()))
    return f"{_count(sum(kinds.values()), 'waiting request')} ({listed})"


def _kind(request: RequestState) -> str:
    of_class = "background work, " if request.background else ""
    return f"{of_class}priority {request.priority}" + (f" of {request.tenant}" if request.tenant else "")


def _named(request: RequestState | None) -> str:
    return f"{request.request_id} ({_kind(request)})" if request is not None else "a request that has ended"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


LEAST_S = 0.00005  # that is told
_REASONS = {
    LaneWait.DELAY: "for the delay of its batch",
    LaneWait.RESOURCES: "for resources that instances share",
    LaneWait.SHARE: "for its share of the machine beside the language model",
    LaneWait.TURN: "until the engine came to it",
}
_TENSOR_ENDS = {
    **{reason: _ENDS[reason] for reason in (FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.SHED)},
    FinishReason.STOP: "it has its answer",
    FinishReason.QUEUE_TIMEOUT: "it was in no batch by its queue timeout",
}


def tell_tensor(history: TensorHistory) -> str:
    """Some ten lines; times are from arrival."""
    lines = [f"request {history.request.request_id}", _tensor_arrival(history)]
    for index, wait in enumerate(history.waits):
        lines += _tensor_waiting(history, wait, is_first=index == 0)
        if index < len(history.runs):
            lines += _batch_run(history, history.runs[index])
    return inert("\n".join([*lines, _tensor_end(history)]))


def _tensor_arrival(history: TensorHistory) -> str:
    request = history.request
    name, version, bucket = request.spec.lane
    whose = f" of {request.tenant}" if request.tenant else ""
    shape = f", shape {bucket}" if bucket else ""
    return _line(
        "arrived",
        f"{request.arrived_at:.3f} s on the log's clock: {_count(request.num_rows, 'row')} for {name} version {version}"
        f"{shape}; priority {request.priority}{whose}; policy {history.policy}",
    )


def _tensor_waiting(history: TensorHistory, wait: TensorWait, *, is_first: bool) -> Iterator[str]:
    behind = ""
    if is_first and history.num_ahead:
        rows = _count(history.num_rows_ahead, "row")
        behind = f" with {_count(history.num_ahead, 'other request')} ({rows}) in its lane when it came"
    yield _line("waited", _ms(wait.total_s) + behind)
    reasons = [(seconds, _REASONS[why]) for why, seconds in wait.for_reason.items() if why in _REASONS]
    reasons += [(seconds, f"because {who}") for who, seconds in _who_ran(wait.for_batches).items()]
    if is_first:
        reasons.append((wait.began_at - history.request.arrived_at, "on its way to the engine"))
    for seconds, reason in sorted(reasons, reverse=True):
        if seconds >= LEAST_S:
            yield _line("", f"{_ms(seconds)} {reason}")


def _who_ran(for_batches: Mapping[tuple[Batch, ...], float]) -> dict[str, float]:
    """`instance 0 ran 8 rows of resnet` -> s; those of the same instances told as one."""
    grouped: dict[tuple[int, ...], dict[int, Batch]] = {}
    spent: dict[tuple[int, ...], float] = {}
    for batches, seconds in for_batches.items():
        instances = tuple(sorted(batch.instance for batch in batches))
        grouped.setdefault(instances, {}).update((batch.number, batch) for batch in batches)
        spent[instances] = spent.get(instances, 0.0) + seconds
    return {_ran(instances, list(grouped[instances].values())): seconds for instances, seconds in spent.items()}


def _ran(instances: tuple[int, ...], batches: list[Batch]) -> str:
    names = " and ".join(filter(None, [", ".join(map(str, instances[:-1])), str(instances[-1])]))
    rows = _count(sum(batch.num_rows for batch in batches), "row")
    many = f" in {len(batches)} batches" if len(batches) > len(instances) else ""
    return f"instance{'s' if len(instances) > 1 else ''} {names} ran {rows} of {batches[0].lane.model}{many}"


def _batch_run(history: TensorHistory, run: LoggedBatch) -> Iterator[str]:
    batch = run.batch
    alone = "alone" if len(batch.request_ids) == 1 else f"in a batch of {len(batch.request_ids)} requests"
    yield _line(
        "started",
        f"{_tensor_at(history, run.began_at)}: {alone}, {_count(batch.num_rows, 'row')}, on instance {batch.instance}",
    )
    if run.lost and run.ended_at is not None:
        yield _line("lost", f"{_tensor_at(history, run.ended_at)}: the instance died or hung, and it ran again")
    elif run.ended_at is not None:
        own = f", {_ms(history.request.compute_us / 1e6)} of it its own" if len(batch.request_ids) > 1 else ""
        yield _line("computed", f"{_ms(run.compute_us / 1e6)}{own}")


def _tensor_end(history: TensorHistory) -> str:
    request, runs = history.request, history.runs
    if request.finished_at is None or request.finish_reason is None:
        return _line("", "the log ends here")
    reason = request.finish_reason
    why = request.error or _TENSOR_ENDS.get(reason, "it ended")
    held_s = request.finished_at - (runs[-1].ended_at or request.finished_at) if runs else 0.0
    held = f", {_ms(held_s)} after its batch, for answers before its own" if held_s >= LEAST_S else ""
    return _line("finished", f"{_tensor_at(history, request.finished_at)}: {reason.value}, {why}{held}")


def _tensor_at(history: TensorHistory, at: float) -> str:
    return f"+{_ms(at - history.request.arrived_at)}"


def _ms(seconds: float) -> str:
    return f"{max(0.0, seconds) * 1e3:,.1f} ms"
