"""The requests of several workers: what the core decides of them is done, what the workers tell is told to the core."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from maitred.core.clock import Clock
from maitred.core.errors import EngineDead, MaitredError, QueueTimeout, RequestTimeout
from maitred.core.request import FinishReason
from maitred.core.step import RequestProgress
from maitred.engine.live_requests import LiveRequest
from maitred.engine.replica import OnProgress
from maitred.fleet.actions import Action, Bind, Move, Refuse
from maitred.fleet.balance import Choice
from maitred.fleet.choices import Choices
from maitred.fleet.core import ClusterCore
from maitred.fleet.fleet_request import Failure, FailureKind, FleetRequest, Usage
from maitred.fleet.worker import Prompt, Worker, prompt_of

NOBODYS_FAULT = Failure(FailureKind.FULL, retry_after_s=0.0)  # it is bound again as if it had come now
REASONS = {QueueTimeout: FinishReason.QUEUE_TIMEOUT, RequestTimeout: FinishReason.TIMEOUT}


class WorkerRequests:
    """Requests from their arrival to their end: held by the core, or with a worker. On one event loop."""

    def __init__(
        self,
        core: ClusterCore,
        workers: Sequence[Worker],
        clock: Clock,
        on_held: Callable[[], None],
    ) -> None:
        """`on_held` is told that a request waits for a worker."""
        self._core, self._workers, self._clock, self._on_held = core, workers, clock, on_held
        self.choices = Choices()
        self.on_progress: OnProgress = lambda progress, num_queued, now: None
        self.prompts: dict[str, Prompt] = {}  # by the id of each sample, in order of arrival
        self._by_id: dict[str, Prompt] = {}  # by the core's
        self.ended: Counter[FinishReason] = Counter()  # of those that no worker had
        self.is_closed = False  # no request is bound any more

    @property
    def num_held(self) -> int:
        """Samples that wait for a worker."""
        return sum(len(prompt.samples) for prompt in self._by_id.values() if prompt.worker is None)

    def held(self) -> Iterator[tuple[FleetRequest, LiveRequest]]:
        """Samples that wait for a worker, with their requests, the next first; sorts."""
        for request in self._core.held():
            for live in self._by_id[request.request_id].samples.values():
                yield request, live

    def living(self) -> Iterator[LiveRequest]:
        """All living samples, in order of arrival."""
        return (prompt.samples[request_id] for request_id, prompt in self.prompts.items())

    def enter(self, live: LiveRequest) -> None:
        """Send a sample to the worker that has those before it; the first is the core's to place."""
        prompt_id = live.spec.parent_id or live.request_id
        prompt = self._by_id.get(prompt_id)
        if prompt is not None:
            self.prompts[live.request_id], prompt.samples[live.request_id] = prompt, live
            if prompt.worker is not None:
                prompt.worker.client.enter(live)
            return
        prompt = prompt_of(prompt_id, live)
        self.prompts[live.request_id] = self._by_id[prompt_id] = prompt
        self.do(self._core.arrived(prompt.request, self._clock.now()))

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """Abort a request as `Replica.abort`."""
        prompt = self.prompts.get(request_id)
        if prompt is None:
            return
        live = prompt.samples[request_id]
        if prompt.worker is not None:
            prompt.worker.client.abort(request_id, reason)
        elif reason is not FinishReason.SHED or live.charges.first_scheduled_at is None:
            self._end_here(live, reason)

    def put_back(self, worker: Worker) -> None:
        """Put back requests of a worker whose engine is gone; those that may, go on with another when there is room."""
        movable, now = worker.client.movable(), self._clock.now()
        for prompt in dict.fromkeys(self.prompts[request_id] for request_id in movable):
            if prompt.samples.keys() <= movable.keys():
                for live in prompt.samples.values():
                    worker.client.let_go(live.request_id)
                    if live.charges.first_scheduled_at is not None:
                        prompt.request.start_by = None  # it was in a step in time
                prompt.worker = None
                self.do(self._core.failed(prompt.request.request_id, NOBODYS_FAULT, now))

    # -- what the core decides

    def do(self, actions: Sequence[Action]) -> None:
        if self.is_closed:
            return
        for action in actions:
            match action:
                case Bind(request_id, choice):
                    self._note(self._by_id[request_id], action)
                    self._bind(self._by_id[request_id], choice)
                case Move(request_id):
                    self._take_back(self._by_id[request_id])
                case Refuse(request_id, error):
                    self._refuse(self._by_id[request_id], error)
        if self._core.num_held:
            self._on_held()

    def _note(self, prompt: Prompt, bind: Bind) -> None:
        """Remember the choice for people who ask later."""
        request = prompt.request
        assert request.bound_at is not None, "the core has just bound it"
        prompt.held_s += request.bound_at - request.held_at
        self.choices.bound(bind, prompt.held_s)

    def _bind(self, prompt: Prompt, choice: Choice) -> None:
        worker = self._named(choice.replica)
        computes = worker if choice.prefill is None else self._named(choice.prefill)
        if not computes.is_up:
            computes = worker
        self._expect_no_kv(prompt)
        prompt.worker, prompt.goes_to = computes, worker if computes is not worker else None
        finds = () if choice.fetch_from is None else self._named(choice.fetch_from).client.kv_addresses
        for live in list(prompt.samples.values()):
            live.kv_from = finds
            computes.client.enter(live)
        if prompt.goes_to is not None:
            prompt.goes_to.client.expect_kv(prompt.spec, computes.client.kv_addresses)

    def _named(self, name: str) -> Worker:
        return self._workers[int(name)]

    def _take_back(self, prompt: Prompt) -> None:
        """Take a prompt from a worker that is to end: it goes on with the next that it is bound to."""
        self._expect_no_kv(prompt)
        worker, prompt.worker = prompt.worker, None
        if worker is not None:
            _taken_from(worker, prompt)

    def _expect_no_kv(self, prompt: Prompt) -> None:
        """Tell the receiver that the KV will not come: the request ends, or is placed anew, before the hand-over."""
        if prompt.goes_to is not None:
            prompt.goes_to.client.expect_no_kv(prompt.spec)
            prompt.goes_to = None

    def _hand_over(self, prompt: Prompt) -> None:
        """Hand over a request whose prompt is computed: the worker that is to answer goes on, with the KV it pulls. A
        request stays where that worker is not up; so do samples that are being aborted.
        """
        sender, receiver, prompt.goes_to = prompt.worker, prompt.goes_to, None
        if sender is None or receiver is None or not prompt.samples:
            return  # it was done already, or has ended
        if receiver.is_up:
            prompt.worker = receiver
            for live in _taken_from(sender, prompt):
                live.kv_from = sender.client.kv_addresses
                receiver.client.enter(live)
        else:
            receiver.client.expect_no_kv(prompt.spec)
        self.do(self._core.handed_over(prompt.request.request_id, self._clock.now()))

    def _refuse(self, prompt: Prompt, error: MaitredError) -> None:
        """End a prompt whose time is up. A worker that has it ends it, with what it had come to."""
        for live in list(prompt.samples.values()):
            reason = REASONS.get(type(error), FinishReason.ERROR)
            if prompt.worker is not None:
                prompt.worker.client.abort(live.request_id, reason)
            else:
                self._end_here(live, reason, error if reason is FinishReason.ERROR else None)

    # -- what the workers tell

    def hear(self, worker: Worker, progress: list[RequestProgress], num_queued: int, now: float) -> None:
        worker.num_queued = num_queued
        self._account(progress, now)
        for item in progress:
            prompt = self.prompts.get(item.request_id)
            if prompt is not None and prompt.goes_to is not None and prompt.has_begun:
                asyncio.get_running_loop().call_soon(self._hand_over, prompt)  # once its stream has what came

    def _account(self, progress: list[RequestProgress], now: float) -> None:
        """Report progress to the core, and to the listener of all of it; ended prompts make room for others."""
        done: list[tuple[Prompt, FinishReason]] = []
        for item in progress:
            prompt = self.prompts.get(item.request_id)
            if prompt is None:
                continue
            if item.new_token_ids:
                self._core.progressed(prompt.request.request_id, len(item.new_token_ids), now)
            if item.finish_reason is not None:
                del self.prompts[item.request_id], prompt.samples[item.request_id]
                if not prompt.samples:
                    done.append((prompt, item.finish_reason))
        self.on_progress(progress, self._core.num_held + sum(worker.num_queued for worker in self._workers), now)
        for prompt, reason in done:
            self._let_go(prompt, reason, now)

    def _let_go(self, prompt: Prompt, reason: FinishReason, now: float) -> None:
        prompt_id = prompt.request.request_id
        self._expect_no_kv(prompt)
        del self._by_id[prompt_id]
        is_complete = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if prompt.worker is None:
            self.do(self._core.aborted(prompt_id, now))
        else:
            self.do(self._core.ended(prompt_id, Usage(complete=is_complete), now))

    def _end_here(self, live: LiveRequest, reason: FinishReason, error: MaitredError | None = None) -> None:
        """No worker has it."""
        now = self._clock.now()
        ended = live.ended(reason, now, None if error is None else str(error))
        self.ended[reason] += 1
        self._account([ended], now)
        if error is None:
            live.stream.put(ended)
        else:
            live.stream.fail(error)

    def end_held(self, error: EngineDead) -> None:
        """No worker will come."""
        for name, prompt in list(self.prompts.items()):
            if prompt.worker is None:
                self._end_here(prompt.samples[name], FinishReason.ERROR, error)


def _taken_from(worker: Worker, prompt: Prompt) -> list[LiveRequest]:
    """Take a prompt's samples to go on elsewhere; those that are being aborted end where they are."""
    going_on = [request_id for request_id, live in prompt.samples.items() if live.ending is None]
    return [worker.client.hand_over(request_id) for request_id in going_on]
