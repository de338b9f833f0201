"""Thinking budget of one request: how many tokens its thoughts have had, and when their end mark is due."""

from __future__ import annotations

from maitred.request import ThinkingLimit


class ThoughtCounter:
    """Told of each output token by `append`; the tokens of marks do not count as thoughts."""

    __slots__ = ("_inside", "_limit", "_num_tokens", "_tail")

    def __init__(self, limit: ThinkingLimit) -> None:
        self._limit = limit
        self._inside = limit.opened
        self._num_tokens = 0
        self._tail: tuple[int, ...] = ()  # what came last, as far as it may be part of a mark

    @property
    def due(self) -> int | None:
        """The token of the end mark that has to come next, if its grammar allows it; None while thoughts may go on."""
        end = self._limit.end
        if not self._inside or not end:
            return None
        num_begun = next(n for n in range(len(end) - 1, -1, -1) if self._tail[len(self._tail) - n :] == end[:n])
        return end[num_begun] if self._num_tokens - num_begun >= self._limit.num_tokens else None

    def append(self, token_id: int) -> None:
        limit = self._limit
        mark = limit.end if self._inside else limit.begin
        self._num_tokens += self._inside
        self._tail = (*self._tail, token_id)[-len(mark) :] if mark else ()
        if mark and self._tail == mark:
            self._num_tokens -= len(mark) if self._inside else 0
            self._inside, self._tail = not self._inside, ()
