"""Sequences: requests that a model sees in order, one after another, with what it remembers between them.

`SequenceBook` decides, purely: a request may go when the one before it was answered; a sequence has a slot of its model
from its first request to its last one, and others wait for slots in the order in which they began. What failed never
happened: the state stays as it was, and a START that was not answered is the next request's.
Source: `SequenceBatchScheduler` of Triton's `core`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import msgspec

from maitred.core.clock import Clock
from maitred.core.errors import InvalidRequest, MaitredError
from maitred.core.request import FinishReason
from maitred.core.tensor_request import InferRequest, InferResponse, SequenceControl, Tensor
from maitred.scheduler.deadlines import Deadlines
from maitred.tensor.arrays import MOST_ID_BYTES, control_tensors
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.fill import kept_tensors
from maitred.tensor.runner import Done, TensorAnswer, why_ended
from maitred.tensor.served_models import LoadedVersion

US = 1e-6
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


# ---- the flow: each request waits for the one before it, and gets its controls and the state that is kept for it


@dataclass(slots=True, eq=False)
class _Model:
    """A loaded version with its sequences; another load of it has others."""

    loaded: LoadedVersion
    book: SequenceBook[Tensor]
    outputs: dict[str, str]  # states by the outputs that they come from, as inputs
    told: tuple[str, ...]  # outputs that clients see

    @property
    def config(self) -> ANY_MESSAGE:
        return self.loaded.config


@dataclass(slots=True, eq=False)
class _Held:
    """A request that is not in its lane yet, as its deadlines see it."""

    request: InferRequest
    control: SequenceControl
    model: _Model
    done: Done
    finished: bool = False  # or begun: then the lane has its deadlines

    @property
    def start_by(self) -> float | None:
        return self.request.terms.start_by

    @property
    def finish_by(self) -> float | None:
        return self.request.terms.finish_by

    @property
    def first_scheduled_at(self) -> float | None:
        return None


class SequenceFlow:
    """A Flow. `stand` puts a request in its lane."""

    def __init__(self, stand: Callable[[InferRequest, Done], None], clock: Clock) -> None:
        self._stand, self._clock = stand, clock
        self._models: dict[int, _Model] = {}  # by the id of what was loaded, which they hold
        self._held: dict[str, _Held] = {}
        self._deadlines: Deadlines[_Held] = Deadlines()

    def __len__(self) -> int:
        """Requests that wait for others, and sequences that have not ended: both are lost with the engine."""
        return len(self._held) + sum(len(model.book) for model in self._models.values())

    def take(self, loaded: LoadedVersion, request: InferRequest, done: Done) -> Done | None:
        if not loaded.config.HasField("sequence_batching"):
            return done
        model = self._model(loaded)
        control = _checked(request, loaded.config)
        key = (request.terms.tenant, control.correlation_id)
        turns = model.book.add(request.request_id, key, start=control.start, end=control.end)
        held = self._held[request.request_id] = _Held(request, control, model, done)
        self._deadlines.add(held)
        self._begin(turns)
        return None

    def cancel(self, request_id: str, reason: FinishReason) -> bool:
        """Cancel a request; one that is begun has its place in a lane."""
        held = self._held.get(request_id)
        if held is None:
            return False
        self._give_up(held, reason)
        return True

    def turn(self) -> None:
        """Fail requests past their queue timeout and close idle sequences."""
        now = self._clock.now()
        for held, reason in self._deadlines.missed(now):
            self._give_up(held, reason)
        for number, model in tuple(self._models.items()):
            self._begin(model.book.expire(now))
            if model.loaded.replaced and not model.book:
                del self._models[number]

    @property
    def next_at(self) -> float | None:
        times = [self._deadlines.next_at, *(model.book.next_at for model in self._models.values())]
        return min((at for at in times if at is not None), default=None)

    # -- small things

    def _model(self, loaded: LoadedVersion) -> _Model:
        """Return the model's sequences. Another load of a version begins new ones; the old ones come to their end."""
        model = self._models.get(id(loaded))
        if model is None:
            model = self._models[id(loaded)] = _model_of(loaded)
        return model

    def _begin(self, turns: Iterable[SequenceTurn[Tensor]]) -> None:
        """Begin turns; one that a refused request held back goes in its stead."""
        left = deque(turns)
        while left:
            turn = left.popleft()
            held = self._held.pop(turn.request_id)
            held.finished = True
            self._deadlines.ended(held)
            try:
                self._stand(_step_request(held, turn), partial(self._answered, held))
            except MaitredError as error:
                left += held.model.book.answered(turn.request_id, None, self._clock.now())
                held.done(TensorAnswer(error, FinishReason.ERROR))

    def _answered(self, held: _Held, answer: TensorAnswer) -> None:
        """The next one goes before this one is told."""
        model, states = held.model, None
        if isinstance(answer.result, InferResponse):
            given = {tensor.name: tensor for tensor in answer.result.outputs}
            states = {name: _as(name, given[output]) for output, name in model.outputs.items() if output in given}
            told = held.request.outputs or model.told
            outputs = tuple(given[name] for name in told if name in given)
            answer = answer._replace(result=msgspec.structs.replace(answer.result, outputs=outputs))
        self._begin(model.book.answered(held.request.request_id, states, self._clock.now()))
        held.done(answer)

    def _give_up(self, held: _Held, reason: FinishReason) -> None:
        request_id = held.request.request_id
        del self._held[request_id]
        held.finished = True
        self._deadlines.ended(held)
        self._begin(held.model.book.give_up(request_id, self._clock.now()))
        held.done(TensorAnswer(why_ended(held.request.model, reason), reason))


def _model_of(loaded: LoadedVersion) -> _Model:
    config, batching = loaded.config, loaded.config.sequence_batching
    oldest = batching.HasField("oldest")
    slots = max(1, batching.oldest.max_candidate_sequences if oldest else config.max_batch_size)
    idle_s = batching.max_sequence_idle_microseconds * US
    book = SequenceBook(loaded.name, slots * max(1, len(loaded.instances)), idle_s, loaded.states)
    outputs = {state.output_name: state.input_name for state in batching.state}
    return _Model(loaded, book, outputs, tuple(each.name for each in config.output))


def _checked(request: InferRequest, config: ANY_MESSAGE) -> SequenceControl:
    """Raises InvalidRequest for a request of no sequence, and for tensors that are the server's."""
    control = request.sequence
    if control is None or control.correlation_id in (0, ""):
        raise InvalidRequest(
            f"inference request to model {request.model!r} must specify a non-zero or non-empty correlation ID"
        )
    if isinstance(control.correlation_id, str) and len(control.correlation_id.encode()) > MOST_ID_BYTES:
        raise InvalidRequest(f"a correlation ID has at most {MOST_ID_BYTES} bytes")
    kept_in, kept_out = kept_tensors(config)
    for tensor in request.inputs:
        if tensor.name in kept_in:
            raise InvalidRequest(f"unexpected inference input {tensor.name!r} for model {request.model!r}")
    for name in sorted(kept_out & {*request.outputs}):
        if all(each.name != name for each in config.output):
            raise InvalidRequest(f"unexpected inference output {name!r} for model {request.model!r}")
    for _ in control_tensors(config, control.correlation_id, start=control.start, end=control.end):
        pass  # an id that does not fit is found before anything is changed
    return control


def _step_request(held: _Held, turn: SequenceTurn[Tensor]) -> InferRequest:
    request, config = held.request, held.model.config
    controls = control_tensors(config, held.control.correlation_id, start=turn.start, end=turn.end)
    wanted = tuple(dict.fromkeys((*request.outputs, *held.model.outputs))) if request.outputs else ()
    return msgspec.structs.replace(
        request,
        version=held.model.loaded.number,
        label="",
        inputs=(*request.inputs, *controls, *turn.states.values()),
        outputs=wanted,
    )


def _as(name: str, tensor: Tensor) -> Tensor:
    return msgspec.structs.replace(tensor, name=name)
