"""Grammar queue: requests whose grammar is being compiled. They are the scheduler's when that is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from maitred.request import RequestSpec

Prepare = Callable[[str, Callable[[str], None]], None]
"""(grammar, told what is wrong with it, in any thread)."""


class GrammarQueue:
    """Used by the engine loop's thread; `wake` is called in another one when a request is ready."""

    def __init__(self, prepare: Prepare, wake: Callable[[], None]) -> None:
        self._prepare, self._wake = prepare, wake
        self._held: dict[str, RequestSpec] = {}
        self._done: deque[tuple[RequestSpec, str]] = deque()

    def hold(self, spec: RequestSpec) -> None:
        """Until its grammar is compiled."""

        def done(error: str) -> None:
            self._done.append((spec, error))
            self._wake()

        self._held[spec.request_id] = spec
        self._prepare(spec.grammar, done)

    def drop(self, request_id: str) -> bool:
        """Ended from outside; whether it was here."""
        return self._held.pop(request_id, None) is not None

    def ready(self) -> Iterator[tuple[RequestSpec, str]]:
        """Those that wait no more, in order, each with what is wrong with its grammar; empty when nothing is."""
        while self._done:
            spec, error = self._done.popleft()
            if self._held.get(spec.request_id) is spec:
                del self._held[spec.request_id]
                yield spec, error
