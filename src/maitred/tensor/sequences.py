"""Sequences: requests that a model sees in order, one after another, with what it remembers between them.

Pure bookkeeping. A request may go when the one before it was answered; a sequence has a slot of its model from its
first request to its last one, and others wait for slots in the order in which they began. What failed never happened:
the state stays as it was, and a START that was not answered is the next request's.
Source: `SequenceBatchScheduler` of Triton's `core`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from maitred.core.errors import InvalidRequest

S = TypeVar("S")  # what a model remembers: its state tensors by the names of its inputs

SequenceKey = tuple[str, int | str]  # tenant, correlation id


@dataclass(slots=True, eq=False)
class _Request:
    request_id: str
    start: bool
    end: bool


@dataclass(slots=True, eq=False)
class _Sequence(Generic[S]):
    key: SequenceKey
    states: Mapping[str, S]
    waiting: deque[_Request] = field(default_factory=deque)
    running: _Request | None = None
    fresh: bool = True  # no request of it was answered since it began
    closed: bool = False  # its last request is here
    has_slot: bool = False
    idle_since: float = 0.0  # s


class SequenceTurn(NamedTuple, Generic[S]):
    """A request that may go now, and what its model is told of its place."""

    request_id: str
    start: bool
    end: bool
    states: Mapping[str, S]


class SequenceBook(Generic[S]):
    """The sequences of one model."""

    def __init__(self, model: str, num_slots: int, idle_s: float, initial: Mapping[str, S]) -> None:
        self._model, self._idle_s, self._initial = model, idle_s, initial
        self._free_slots = num_slots
        self._open: dict[SequenceKey, _Sequence[S]] = {}  # that take requests
        self._of_request: dict[str, _Sequence[S]] = {}
        self._backlog: deque[_Sequence[S]] = deque()  # without a slot, the first to begin first
        self._idle: dict[_Sequence[S], None] = {}  # with a slot and without a request, the longest idle first

    def __len__(self) -> int:
        """Sequences that have begun and not ended."""
        return len({*self._open.values(), *self._of_request.values()})

    def add(self, request_id: str, key: SequenceKey, *, start: bool, end: bool) -> list[SequenceTurn[S]]:
        """Return requests that may go now. Raises InvalidRequest, and changes nothing, for one of no sequence."""
        if request_id in self._of_request:
            raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
        sequence = self._open.get(key)
        if sequence is None and not start:
            raise InvalidRequest(
                f"inference request for sequence {key[1]} to model {self._model!r} must specify the START flag on the "
                "first request of the sequence"
            )
        if sequence is None:
            sequence = self._open[key] = _Sequence(key, self._initial)
            self._backlog.append(sequence)
        sequence.waiting.append(_Request(request_id, start, end))
        self._of_request[request_id] = sequence
        self._idle.pop(sequence, None)
        if end:  # another START of this id is another sequence
            sequence.closed = True
            del self._open[key]
        return self._go_on(sequence)

    def answered(self, request_id: str, states: Mapping[str, S] | None, now: float) -> list[SequenceTurn[S]]:
        """Note an answer: the model's new state, or None where the request failed."""
        sequence = self._of_request.pop(request_id)
        if states is not None:
            sequence.states, sequence.fresh = {**sequence.states, **states}, False
        sequence.running = None
        return self._settled(sequence, now)

    def is_held(self, request_id: str) -> bool:
        """Return whether the request waits for the one before it, or for a slot."""
        sequence = self._of_request.get(request_id)
        return sequence is not None and (sequence.running is None or sequence.running.request_id != request_id)

    def give_up(self, request_id: str, now: float) -> list[SequenceTurn[S]]:
        """Give up a held request."""
        sequence = self._of_request.pop(request_id)
        given_up = next(each for each in sequence.waiting if each.request_id == request_id)
        after = [*sequence.waiting][sequence.waiting.index(given_up) + 1 :]
        if given_up.start and after:
            after[0].start = True
        sequence.waiting.remove(given_up)
        return self._settled(sequence, now)

    def expire(self, now: float) -> list[SequenceTurn[S]]:
        """Forget idle sequences; return requests that may go in their slots."""
        turns: list[SequenceTurn[S]] = []
        while (at := self.next_at) is not None and at <= now:
            sequence = next(iter(self._idle))
            del self._idle[sequence], self._open[sequence.key]
            turns += self._free(sequence)
        return turns

    @property
    def next_at(self) -> float | None:
        """When the next sequence will have been idle for too long (s)."""
        return next((each.idle_since + self._idle_s for each in self._idle), None)

    # -- small things

    def _settled(self, sequence: _Sequence[S], now: float) -> list[SequenceTurn[S]]:
        """Go on with a sequence one of whose requests has gone."""
        if sequence.running is not None:
            return []
        if sequence.waiting:
            return self._go_on(sequence)
        if sequence.closed:
            return self._free(sequence)
        if sequence.has_slot:
            sequence.idle_since = now
            self._idle[sequence] = None
        else:  # nothing of it ever ran
            self._backlog.remove(sequence)
            del self._open[sequence.key]
        return []

    def _free(self, sequence: _Sequence[S]) -> list[SequenceTurn[S]]:
        if not sequence.has_slot:
            self._backlog.remove(sequence)
            return []
        sequence.has_slot = False
        self._free_slots += 1
        return self._go_on(self._backlog[0]) if self._backlog else []

    def _go_on(self, sequence: _Sequence[S]) -> list[SequenceTurn[S]]:
        """Begin the sequence's first request, where it has a slot or gets one."""
        if not sequence.has_slot and (not self._free_slots or self._backlog[0] is not sequence):
            return []
        if not sequence.has_slot:
            self._backlog.popleft()
            self._free_slots -= 1
            sequence.has_slot = True
        if sequence.running is not None:
            return []
        request = sequence.running = sequence.waiting.popleft()
        if request.start and not sequence.fresh:  # the one before was not ended
            sequence.states, sequence.fresh = self._initial, True
        return [SequenceTurn(request.request_id, sequence.fresh, request.end, sequence.states)]

    def check_invariants(self) -> None:
        """Asserts what must hold between any two calls; slow."""
        every = {*self._open.values(), *self._of_request.values()}
        with_slot = [each for each in every if each.has_slot]
        assert self._free_slots >= 0
        assert not (self._free_slots and self._backlog), "a slot is free, and a sequence waits for one"
        assert {*self._backlog} == {each for each in every if not each.has_slot}
        assert {*self._idle} == {each for each in with_slot if each.running is None}
        assert all(each.running is None or each.has_slot for each in every)
        assert all(not each.closed or each.waiting or each.running for each in every)
