"""Lanes: the tensor requests of a scheduler, from `add` to their last progress, and the batches that they run in.

They stand under the chats' policy: its order key, and its counters of groups. Each lane has a queue of its own; among
lanes with a batch that may go, the one with the best head is first, so no lane holds up another. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from maitred.core.errors import InvalidRequest, ModelNotFound
from maitred.core.request import FinishReason, RequestStatus
from maitred.core.step import RequestProgress
from maitred.core.tensor_request import Batch, BatchOutcome, BatchRules, LaneKey, TensorRequest
from maitred.policy.order import ServiceOrder
from maitred.policy.policy import Policy
from maitred.scheduler.deadlines import Deadlines
from maitred.scheduler.lane import Lane
from maitred.scheduler.notes import LaneWait
from maitred.scheduler.ready import Models, ReadyLanes
from maitred.scheduler.tensor_models import ModelKey, TensorModel
from maitred.scheduler.timing import split_us

WAITING, RUNNING, FINISHED = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED


@dataclass(slots=True, eq=False)
class _Running:
    batch: Batch
    requests: list[TensorRequest]
    machine_share: float
    foretold_s: float | None  # what the share beside the LLM was charged with; None where it had no rows


class Lanes:
    """`order` is the chats', with every request's policy; `llm_has_rows` tells whether chats need the machine."""

    def __init__(self, order: ServiceOrder[Any], llm_has_rows: Callable[[], bool], tensor_share: float) -> None:
        self._order = order
        self.has_models = False  # or had
        self._models: Models = {}
        self._ready = ReadyLanes(self._models, order, llm_has_rows, tensor_share)
        self._requests: dict[str, TensorRequest] = {}
        self._running: dict[int, _Running] = {}  # by number of the batch
        self._next_number = 0
        self._delays: list[tuple[float, int, TensorRequest]] = []  # when a request goes behind the others
        self._num_delays = 0
        self._deadlines: Deadlines[TensorRequest] = Deadlines()
        self._released: list[RequestProgress] = []  # held answers that were not told yet

    # -- what callers ask

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def models(self) -> tuple[TensorModel, ...]:
        """Loaded models, and unloaded ones with unfinished requests; to look at."""
        return tuple(self._models.values())

    @property
    def requests(self) -> tuple[TensorRequest, ...]:
        """Requests that have not ended, in no order."""
        return tuple(self._requests.values())

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Running batches."""
        return tuple(running.batch for running in self._running.values())

    def place(self, request: TensorRequest) -> tuple[Any, ...]:
        """Return the place among all waiting requests, chats too (`ServiceOrder.place`); smaller is served first."""
        groups = self._policy.groups
        if groups is None:
            return request.key
        group = groups.group_of(request)
        return (groups.rank(group), group, request.key)

    def request(self, request_id: str) -> TensorRequest | None:
        """Return a request that has not ended."""
        return self._requests.get(request_id)

    def why_not(self, key: LaneKey, now: float) -> tuple[LaneWait, float]:
        """Return why the next batch of a lane with waiting requests does not go now, and until when at most (s)."""
        model = self._models[key[:2]]
        return self._ready.why_not(model, model.lanes[key.bucket], now)

    def next_wake(self, now: float) -> float | None:
        """Return when `expire` or `dispatch` may have something to do (s); None until an event."""
        if self._released:
            return now
        while self._delays and self._delays[0][2].status is not WAITING:
            heappop(self._delays)
        delayed_at = self._delays[0][0] if self._delays else None
        times = [at for at in (self._deadlines.next_at, self._ready.next_at(now), delayed_at) if at is not None]
        return max(now, min(times)) if times else None

    # -- models

    def load(self, name: str, version: int, rules: BatchRules) -> None:
        """A model takes requests from now on; one that is loaded has other rules."""
        self.has_models = True
        model = self._models.get((name, version))
        if model is None:
            key = ModelKey(name, version)
            model = self._models[key] = TensorModel(key, rules, self._ready.place_of_lane)
        else:
            model.reload(rules)
        self._order.on_rank_fall = self._note_rank
        self._ready.models_changed()
        self._ready.touch(model)

    def unload(self, name: str, version: int) -> None:
        """Take no more requests for the model; present ones come to their end."""
        model = self._models.get((name, version))
        if model is not None:
            model.unloaded = True
            self._drop_unloaded(model)

    # -- requests

    def add(self, request: TensorRequest, now: float) -> None:
        """Raises InvalidRequest, ModelNotFound or Overloaded, and changes nothing then."""
        spec = request.spec
        if spec.request_id in self._requests:
            raise InvalidRequest(f"request id {spec.request_id!r} is in use", param="request_id")
        model = self._models.get(spec.lane[:2])
        if model is None:
            raise ModelNotFound(f"model {spec.lane.model!r} version {spec.lane.version} is not loaded", param="model")
        model.check(spec)
        request.level, request.queued_at = model.rules.level_of(spec), now
        self._limit_wait(model.rules, request, now)
        self._requests[spec.request_id] = request
        self._deadlines.add(request)
        model.pace(spec.lane.bucket).came(spec.num_rows, now)
        model.expect_answer(request)
        if not model.lanes:
            self._ready.waits_anew(model)
        self._enqueue(model, request)

    def finish(self, request_id: str, reason: FinishReason, now: float) -> RequestProgress | None:
        """Ends a request; None when it is not here, or when its batch runs, with which it ends."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is RUNNING and not request.answered:
            request.finish_reason = request.finish_reason or reason
            return None
        model = self._model_of(request)
        if request.status is WAITING:
            lane = model.lanes[request.spec.lane.bucket]
            lane.remove(request)
            model.left(lane, (request,))
            self._ready.touch(model)
        request.finish_reason = reason
        progress = self._end(model, request, now)
        self._released += [self._end(model, one, now) for one in model.answerable(request)]
        self._drop_unloaded(model)
        return progress

    def expire(self, now: float) -> list[RequestProgress]:
        """End requests past their `start_by` or `finish_by`. Returns their last progress, and that of requests with
        answers held for one of them.
        """
        told = []
        for request, reason in self._deadlines.missed(now):
            if request.status is WAITING or request.answered:  # one that runs ends with its batch
                told += [progress] if (progress := self.finish(request.request_id, reason, now)) is not None else []
        told, self._released = told + self._released, []
        return told

    # -- batches

    def dispatch(self, now: float) -> tuple[Batch, ...]:
        """Return all batches that may go now, each for a free instance of its model."""
        self._go_behind(now)
        batches: list[Batch] = []
        num_before = -1
        while len(batches) > num_before:  # a batch changes turns and places, so what lacked resources is asked again
            num_before = len(batches)
            self._ready.look(now)
            while (found := self._ready.find(now)) is not None:
                batches.append(self._start(*found, now))
        return tuple(batches)

    def completed(self, batch: Batch, outcome: BatchOutcome, now: float) -> list[RequestProgress]:
        """Takes in the outcome of a batch; the last progress of those that may be told. What was lost waits again, at
        its old place and alone, so that one that loses two instances is found.
        """
        running, model = self._running.pop(batch.number), self._models[batch.lane[:2]]
        self._ready.end(model, batch.instance)
        if running.foretold_s is not None:
            self._ready.correct((outcome.compute_us / 1e6 - running.foretold_s) * running.machine_share)
        parts = split_us(outcome.compute_us, [one.num_rows for one in running.requests])
        for request, part_us in zip(running.requests, parts, strict=True):
            request.compute_us += part_us
        if outcome.lost:
            told = self._lost(model, running.requests, now)
        else:
            model.ran(batch, outcome.compute_us / 1e6, now)
            errors = dict(outcome.errors)
            told = []
            for request in running.requests:
                told += self._answered(model, request, outcome.error or errors.get(request.request_id), now)
        self._drop_unloaded(model)
        return told

    # -- the policy

    def reorder(self, order: ServiceOrder[Any], tensor_share: float) -> None:
        """Re-sort under another policy or share; keys are made of what requests carry, so no waiting time is lost."""
        self._ready.set_share(tensor_share)
        if order is self._order:
            return
        waiting = sorted((one for one in self._requests.values() if one.status is WAITING), key=self.place)
        self._order, groups = order, order.policy.groups
        if self._models:
            order.on_rank_fall = self._note_rank
        if groups is not None:
            for request in waiting:
                order.tell_groups(groups.on_queued, request)
        for request in self._requests.values():
            request.key = self._policy.order(request)
        self._ready.reorder(order)

    def check_invariants(self) -> None:
        """Asserts what must hold between any two calls; slow."""
        in_batches = [request for running in self._running.values() for request in running.requests]
        held = [one for one in self._requests.values() if one.answered]
        waiting = [one for model in self._models.values() for lane in model.lanes.values() for one in lane.queue]
        assert sorted(one.request_id for one in (*waiting, *in_batches, *held)) == sorted(self._requests)
        assert all(one.status is WAITING for one in waiting)
        assert all(one.status is RUNNING for one in (*in_batches, *held))
        for model in self._models.values():
            model.check_invariants()
            batches = [running.batch for running in self._running.values() if running.batch.lane[:2] == model.key]
            assert model.instances.busy == sorted(batch.instance for batch in batches)

    # -- small things

    @property
    def _policy(self) -> Policy:
        return self._order.policy

    def _model_of(self, request: TensorRequest) -> TensorModel:
        return self._models[request.spec.lane[:2]]

    def _limit_wait(self, rules: BatchRules, request: TensorRequest, now: float) -> None:
        queue = rules.queue_of(request.level)
        timeout_s = queue.timeout_of(request.spec)
        if timeout_s <= 0.0:
            return
        if queue.delays:
            self._num_delays += 1
            heappush(self._delays, (now + timeout_s, self._num_delays, request))
        elif request.start_by is None or now + timeout_s < request.start_by:
            request.start_by = now + timeout_s

    def _go_behind(self, now: float) -> None:
        while self._delays and self._delays[0][0] <= now:
            _, _, request = heappop(self._delays)
            if request.status is WAITING and request.first_scheduled_at is None:
                model = self._model_of(request)
                lane = model.lanes[request.spec.lane.bucket]
                request.behind = True
                lane.place_again(request)
                model.touched[lane] = None
                self._ready.touch(model)

    def _enqueue(self, model: TensorModel, request: TensorRequest) -> None:
        if self._policy.groups is not None:
            self._order.tell_groups(self._policy.groups.on_queued, request)
        if not request.key:
            request.key = self._policy.order(request)
        model.joined(model.lane(request.spec.lane, self._policy), request)
        self._ready.touch(model)

    def _note_rank(self, group: str) -> None:
        """The rank of a group of the policy has fallen."""
        for model in self._models.values():
            for lane in model.lanes.values():
                lane.queue.note_rank(group)
                model.touched[lane] = None
            self._ready.touch(model)

    def _start(self, model: TensorModel, lane: Lane, instance: int, now: float) -> Batch:
        requests = self._take(lane, now)
        num_rows = sum([one.num_rows for one in requests])
        foretold_s = self._ready.begin(model, lane, instance, num_rows, now)
        batch = Batch(self._next_number, lane.key, instance, tuple([one.request_id for one in requests]), num_rows)
        self._running[self._next_number] = _Running(batch, requests, model.rules.machine_share, foretold_s)
        self._next_number += 1
        model.left(lane, requests)
        lane.is_ready = False
        self._ready.offer(model, now)
        return batch

    def _take(self, lane: Lane, now: float) -> list[TensorRequest]:
        """Take one request after another, each counted by the policy's groups before the next is looked for."""
        batch, groups = lane.next_batch(now), self._policy.groups
        assert batch is not None, "a lane that nobody waits in is not ready"
        taken: list[TensorRequest] = []
        left = batch.num_rows
        while left > 0 and (head := lane.queue.peek()) is not None:
            if taken and (head.num_rows > left or head.num_losses or taken[0].num_losses):
                break
            lane.pop()
            left -= head.num_rows
            taken.append(head)
            if groups is not None:
                groups.on_started(head)
            head.status, head.num_computed = RUNNING, head.num_inputs
            if head.first_scheduled_at is None:  # what was lost counts once
                head.first_scheduled_at = now
                if groups is not None:
                    groups.on_scheduled(head, head.num_inputs)
        return taken

    def _lost(self, model: TensorModel, requests: list[TensorRequest], now: float) -> list[RequestProgress]:
        told: list[RequestProgress] = []
        for request in requests:
            request.num_losses += 1
            late = request.finish_by is not None and request.finish_by <= now
            if request.finish_reason is None and request.num_losses == 1 and not late:
                request.status, request.num_computed = WAITING, 0
                self._enqueue(model, request)
            else:
                told += self._answered(model, request, "the instance was lost twice while it ran this request", now)
        return told

    def _answered(
        self, model: TensorModel, request: TensorRequest, error: str | None, now: float
    ) -> list[RequestProgress]:
        """End the request with its answer; return the last progress of all that may be told now."""
        request.answered = True
        if request.finish_reason is None and request.finish_by is not None and request.finish_by <= now:
            request.finish_reason = FinishReason.TIMEOUT
        elif request.finish_reason is None:
            request.finish_reason = FinishReason.STOP if error is None else FinishReason.ERROR
            request.error = error
        return [self._end(model, one, now) for one in model.answerable(request)]

    def _end(self, model: TensorModel, request: TensorRequest, now: float) -> RequestProgress:
        request.status, request.finished_at = FINISHED, now
        del self._requests[request.request_id]
        model.num_requests -= 1
        self._deadlines.ended(request)
        if self._policy.groups is not None:
            self._order.tell_groups(self._policy.groups.on_finished, request)
        return RequestProgress(
            request.request_id,
            finish_reason=request.finish_reason,
            error=request.error,
            charges=request.charges,
            timing=request.timing,
        )

    def _drop_unloaded(self, model: TensorModel) -> None:
        if model.unloaded and not model.num_requests:
            del self._models[model.key]
            self._ready.models_changed()
