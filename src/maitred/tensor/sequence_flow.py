"""Requests of sequences: each waits for the one before it, and gets its controls and the state that is kept for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import msgspec

from maitred.core.clock import Clock
from maitred.core.errors import InvalidRequest, MaitredError
from maitred.core.request import FinishReason
from maitred.core.tensor_request import InferRequest, InferResponse, SequenceControl, Tensor
from maitred.scheduler.deadlines import Deadlines
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.fill import kept_tensors
from maitred.tensor.runner import Answer, Done, why_ended
from maitred.tensor.sequence_tensors import MOST_ID_BYTES, control_tensors
from maitred.tensor.sequences import SequenceBook, SequenceTurn
from maitred.tensor.served_models import LoadedVersion

US = 1e-6


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
        return self.request.start_by

    @property
    def finish_by(self) -> float | None:
        return self.request.finish_by

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
        key = (request.tenant, control.correlation_id)
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
                held.done(Answer(error, FinishReason.ERROR))

    def _answered(self, held: _Held, answer: Answer) -> None:
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
        held.done(Answer(why_ended(held.request.model, reason), reason))


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
