"""A tensor request's history in plain words, for `maitred why`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from maitred.cli.console import inert
from maitred.core.request import FinishReason
from maitred.core.tensor_request import Batch
from maitred.decisions.tensor_history import LoggedBatch, TensorHistory, TensorWait
from maitred.scheduler.notes import LaneWait

LEAST_S = 0.00005  # that is told
_REASONS = {
    LaneWait.DELAY: "for the delay of its batch",
    LaneWait.RESOURCES: "for resources that instances share",
    LaneWait.SHARE: "for its share of the machine beside the language model",
    LaneWait.TURN: "until the engine came to it",
}
_ENDS = {
    FinishReason.STOP: "it has its answer",
    FinishReason.ABORT: "the client went away",
    FinishReason.QUEUE_TIMEOUT: "it was in no batch by its queue timeout",
    FinishReason.TIMEOUT: "it was not done by its timeout",
    FinishReason.SHED: "it made room in the queue for a more urgent one",
}


def tell(history: TensorHistory) -> str:
    """Some ten lines; times are from arrival."""
    lines = [f"request {history.request.request_id}", _arrival(history)]
    for index, wait in enumerate(history.waits):
        lines += _waiting(history, wait, is_first=index == 0)
        if index < len(history.runs):
            lines += _run(history, history.runs[index])
    return inert("\n".join([*lines, _end(history)]))


def _arrival(history: TensorHistory) -> str:
    request = history.request
    name, version, bucket = request.spec.lane
    whose = f" of {request.tenant}" if request.tenant else ""
    shape = f", shape {bucket}" if bucket else ""
    return _line(
        "arrived",
        f"{request.arrived_at:.3f} s on the log's clock: {_count(request.num_rows, 'row')} for {name} version {version}"
        f"{shape}; priority {request.priority}{whose}; policy {history.policy}",
    )


def _waiting(history: TensorHistory, wait: TensorWait, *, is_first: bool) -> Iterator[str]:
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


def _run(history: TensorHistory, run: LoggedBatch) -> Iterator[str]:
    batch = run.batch
    alone = "alone" if len(batch.request_ids) == 1 else f"in a batch of {len(batch.request_ids)} requests"
    yield _line(
        "started",
        f"{_at(history, run.began_at)}: {alone}, {_count(batch.num_rows, 'row')}, on instance {batch.instance}",
    )
    if run.lost and run.ended_at is not None:
        yield _line("lost", f"{_at(history, run.ended_at)}: the instance died or hung, and it ran again")
    elif run.ended_at is not None:
        own = f", {_ms(history.request.compute_us / 1e6)} of it its own" if len(batch.request_ids) > 1 else ""
        yield _line("computed", f"{_ms(run.compute_us / 1e6)}{own}")


def _end(history: TensorHistory) -> str:
    request, runs = history.request, history.runs
    if request.finished_at is None or request.finish_reason is None:
        return _line("", "the log ends here")
    reason = request.finish_reason
    why = request.error or _ENDS.get(reason, "it ended")
    held_s = request.finished_at - (runs[-1].ended_at or request.finished_at) if runs else 0.0
    held = f", {_ms(held_s)} after its batch, for answers before its own" if held_s >= LEAST_S else ""
    return _line("finished", f"{_at(history, request.finished_at)}: {reason.value}, {why}{held}")


def _line(label: str, text: str) -> str:
    return f"  {label:<9}  {text}"


def _at(history: TensorHistory, at: float) -> str:
    return f"+{_ms(at - history.request.arrived_at)}"


def _ms(seconds: float) -> str:
    return f"{max(0.0, seconds) * 1e3:,.1f} ms"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
