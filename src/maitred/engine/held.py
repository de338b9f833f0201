"""Held requests: what a request needs is made in other threads, and it is the scheduler's when all of it is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from maitred.core.request import FinishReason, RequestSpec

Done = Callable[[str], None]
"""Told what is wrong, or nothing; in any thread."""
Prepare = Callable[[str, Callable[[str, bool], None]], None]
"""Compiles a grammar, then tells what is wrong with it, or nothing, and whether that is the request's own fault."""


class _Done(Protocol):
    def __call__(self, error: str, is_requests_fault: bool = False) -> None: ...


Need = Callable[[_Done], None]
"""Begins to make something, such as a compiled grammar; returns at once."""


class Ready(NamedTuple):
    """A request that waits no more, and what is wrong with what it needs; empty when nothing is."""

    spec: RequestSpec
    error: str
    is_requests_fault: bool


@dataclass(slots=True, eq=False)
class _Held:
    spec: RequestSpec
    num_needs: int  # that are not there yet


class HeldRequests:
    """Used by the engine loop's thread; `wake` is called in another one when something is there."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.waiting: dict[str, _Held] = {}  # by request
        self.done: deque[tuple[_Held, str, bool]] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    def hold(self, spec: RequestSpec, needs: Sequence[Need]) -> None:
        """Hold a request until all needs are met."""
        held = self.waiting[spec.request_id] = _Held(spec, len(needs))

        def done(error: str, is_requests_fault: bool = False) -> None:
            self.done.append((held, error, is_requests_fault))
            self._wake()

        for need in needs:
            need(done)

    def drop(self, request_id: str) -> bool:
        """Ended from outside; whether it was here."""
        return self.waiting.pop(request_id, None) is not None

    def ready(self) -> Iterator[Ready]:
        """Requests whose needs are met, or failed, in that order."""
        while self.done:
            held, error, is_requests_fault = self.done.popleft()
            held.num_needs -= 1
            if (error or not held.num_needs) and self.waiting.get(held.spec.request_id) is held:
                del self.waiting[held.spec.request_id]
                yield Ready(held.spec, error, is_requests_fault)

    def expired(self, now: float) -> list[tuple[str, FinishReason]]:
        """Drop the requests whose time is over; their ids, and why."""
        over = [(request_id, reason) for request_id, held in self.waiting.items() if (reason := _over(held.spec, now))]
        for request_id, _ in over:
            del self.waiting[request_id]
        return over


def _over(spec: RequestSpec, now: float) -> FinishReason | None:
    terms = spec.terms
    if terms.finish_by is not None and now >= terms.finish_by:
        return FinishReason.TIMEOUT
    if terms.start_by is not None and spec.resumed is None and now >= terms.start_by:
        return FinishReason.QUEUE_TIMEOUT
    return None
