"""Next lane: among lanes with a batch that may go and a free instance of their model, the one with the best head.

Kept in heaps, of a model's lanes and of models, so that a batch costs a few comparisons however many lanes wait.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

from maitred.policy.order import ServiceOrder
from maitred.scheduler.lane import Candidates, Lane
from maitred.scheduler.notes import LaneWait
from maitred.scheduler.tensor_limits import Resources, TensorShare
from maitred.scheduler.tensor_models import TensorModel

Models = dict[tuple[str, int], TensorModel]  # by name and version


class ReadyLanes:
    """Everything that decides whether a batch may go: waits, instances, resources, turns, the share beside the LLM."""

    def __init__(
        self, models: Models, order: ServiceOrder[Any], llm_has_rows: Callable[[], bool], tensor_share: float
    ) -> None:
        self._models, self._order, self._llm_has_rows = models, order, llm_has_rows
        self._share = TensorShare(tensor_share)
        self._best: Candidates[TensorModel] = Candidates(self._place_of_model)
        self._touched: dict[TensorModel, None] = {}  # whose lanes or instances have changed
        self._timers: list[tuple[float, int, Lane]] = []  # when a lane's batch has waited for others
        self._num_timers = 0
        self._resources = Resources()
        self._short: dict[TensorModel, None] = {}  # of resources
        self._turns_now = 0  # of the limited model that was served last

    def next_at(self, now: float) -> float | None:
        """Return when a batch may go (s); None until an event."""
        if any(model.instances for model in self._touched):
            return now
        if self._best.best() is not None:
            return max(now, self._share.next_at) if self._llm_has_rows() else now
        while self._timers and not self._is_set(self._timers[0]):
            heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    # -- what happens

    def touch(self, model: TensorModel) -> None:
        """Note a model with changed lanes or instances."""
        self._touched[model] = None

    def waits_anew(self, model: TensorModel) -> None:
        """Restart a model that was empty at the present minimum of turns; idleness earns no credit."""
        model.turns = max(model.turns, self._turns_now)

    def models_changed(self) -> None:
        self._resources.count(one for model in self._models.values() for one in model.instances.all)
        self._touched = {model: None for model in self._touched if model.key in self._models}

    def reorder(self, order: ServiceOrder[Any]) -> None:
        """Re-sort under a new policy; keys must have been recomputed."""
        self._order = order
        self._best = Candidates(self._place_of_model)
        for model in self._models.values():
            model.reorder(order.policy, self.place_of_lane)
            self._touched[model] = None

    def set_share(self, tensor_share: float) -> None:
        self._share.share = tensor_share

    # -- a batch

    def look(self, now: float) -> None:
        """Takes in what has changed, before `find`."""
        for model in self._short:  # turns and free resources may have changed
            model.short = False
        self._touched |= self._short
        self._short.clear()
        while self._timers and self._timers[0][0] <= now:
            timer = heappop(self._timers)
            if self._is_set(timer):
                model = self._models[timer[2].key[:2]]
                model.touched[timer[2]] = self._touched[model] = None
        for model in self._touched:
            self.offer(model, now)
        self._touched.clear()

    def offer(self, model: TensorModel, now: float) -> None:
        """Offer the model by its changed lanes; note when to look again at waiting ones."""
        for lane in model.offer_touched(now):
            assert lane.wake_at is not None
            self._num_timers += 1
            heappush(self._timers, (lane.wake_at, self._num_timers, lane))
        self._best.offer(model)

    def find(self, now: float) -> tuple[TensorModel, Lane, int] | None:
        """The next lane and the instance that its batch goes to; None when nothing may go now."""
        while not (self._share.next_at > now and self._llm_has_rows()):
            model = self._best.best()
            if model is None:
                return None
            turn = self._whose_turn(model)
            lane = turn.ready.best()
            number = None if turn.short else turn.instances.find(self._resources)
            if number is not None and lane is not None:
                return turn, lane, number
            model.short = turn.short = True  # what the one lacks is kept for it
            self._short |= {model: None, turn: None}
        return None

    def begin(self, model: TensorModel, lane: Lane, number: int, num_rows: int, now: float) -> float | None:
        """A batch of the lane's; how long (s) it is to take, where the LLM has rows beside it."""
        instance = model.instances.begin(number)
        if instance.resources:
            self._resources.take(instance)
            self._turns_now = model.turns
            model.turns += max(1, instance.weight)
        if not self._llm_has_rows():
            return None
        beside_s = lane.pace.seconds(num_rows)
        self._share.begin(beside_s * model.rules.machine_share, now)
        return beside_s

    def end(self, model: TensorModel, number: int) -> None:
        """A batch: its instance is free."""
        instance = model.instances.end(number)
        self._touched[model] = None
        if instance.resources:
            self._resources.give_back(instance)

    def correct(self, more_s: float) -> None:
        """A batch beside the LLM took so much more of the machine's time than was foretold."""
        self._share.correct(more_s)

    # -- small things

    def why_not(self, model: TensorModel, lane: Lane, now: float) -> tuple[LaneWait, float]:
        """Why its next batch does not go now, and until when at most (s), if nothing happens. For people to look at."""
        if not model.instances:
            return LaneWait.INSTANCES, inf
        batch = lane.next_batch(now)
        if batch is not None and batch.at > now:
            return LaneWait.DELAY, batch.at
        if model.short or model.instances.find(self._resources) is None:
            return LaneWait.RESOURCES, inf
        if self._llm_has_rows() and self._share.next_at > now:
            return LaneWait.SHARE, self._share.next_at
        return LaneWait.TURN, inf

    def place_of_lane(self, lane: Lane) -> tuple[Any, ...] | None:
        """Return the place of the lane's head, if its batch may go."""
        placed = lane.queue.peek_placed() if lane.is_ready else None
        return None if placed is None else (placed[0], placed[1], placed[2].key)

    def _place_of_model(self, model: TensorModel) -> tuple[Any, ...] | None:
        return None if model.short or not model.instances else self._place_of_best(model)

    def _place_of_best(self, model: TensorModel) -> tuple[Any, ...] | None:
        first = model.ready.first()
        return None if first is None else first[0]

    def _is_set(self, timer: tuple[float, int, Lane]) -> bool:
        return timer[2].wake_at == timer[0] and bool(timer[2])

    def _whose_turn(self, model: TensorModel) -> TensorModel:
        """Return the model, or another that waits for the same resources and has had fewer turns."""
        if model.instances.any_unlimited:
            return model
        names = model.instances.resource_names
        rivals = [one for one in self._models.values() if names & one.instances.resource_names and self._waits(one)]
        return min(rivals, key=lambda one: (one.turns, self._place_of_best(one)))

    def _waits(self, model: TensorModel) -> bool:
        """Return whether the model waits for resources."""
        instances = model.instances
        return bool(instances) and not instances.any_unlimited and model.ready.best() is not None
