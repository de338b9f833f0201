"""Tensor model: what the scheduler keeps of a loaded model, its lanes and instances, and the order of its answers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from maitred.core.errors import InvalidRequest, ModelNotFound, Overloaded
from maitred.core.tensor_request import Batch, BatchRules, LaneKey, TensorRequest, TensorSpec
from maitred.policy.policy import Policy
from maitred.policy.queue import MIN_DEAD_ENTRIES
from maitred.scheduler.lane import Candidates, Lane, LanePace
from maitred.scheduler.tensor_limits import Instances

MAX_PACES = 1024  # buckets of a model whose pace is remembered

PlaceOfLane = Callable[[Lane], tuple[Any, ...] | None]


class ModelKey(NamedTuple):
    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name} version {self.version}"


class TensorModel:
    """A version of a model, from its load until the last of its requests has ended."""

    def __init__(self, key: ModelKey, rules: BatchRules, place_of_lane: PlaceOfLane) -> None:
        self.key, self.rules = key, rules
        self.instances = Instances(rules)
        self.lanes: dict[str, Lane] = {}  # with waiting requests, by bucket
        self.ready: Candidates[Lane] = Candidates(place_of_lane)  # those whose batch may go, while instances are free
        self.touched: dict[Lane, None] = {}  # to be looked at when an instance is free
        self.unloaded = False  # takes no more requests
        self.num_requests = 0  # that have not ended
        self.turns = 0  # that its instances had, each counted by its weight (rate limiter)
        self.short = False  # resources lack for the next batch
        self._paces: dict[str, LanePace] = {}  # by bucket
        self._num_waiting: Counter[int] = Counter()  # by level
        self._unanswered: dict[str, deque[TensorRequest]] = {}  # by tenant, where answers come in order

    @property
    def num_waiting(self) -> int:
        return sum(self._num_waiting.values())

    def check(self, spec: TensorSpec) -> None:
        """Raises InvalidRequest, ModelNotFound or Overloaded for one that it cannot take."""
        if self.unloaded:
            raise ModelNotFound(f"model {self.key} is being unloaded", param="model")
        rules = self.rules
        if spec.num_rows < 1 or (rules.max_batch_size and spec.num_rows > rules.max_batch_size):
            raise InvalidRequest(
                f"batch-size must be from 1 to {rules.max_batch_size} for {self.key.name}, and is {spec.num_rows}"
            )
        level = rules.level_of(spec)
        limit = rules.queue_of(level).max_size
        if limit and self._num_waiting[level] >= limit:
            raise Overloaded(f"Exceeds maximum queue size of {limit}: model {self.key.name!r}", reason="queue_size")

    def lane(self, key: LaneKey, policy: Policy) -> Lane:
        """Return the bucket's lane, a new one where none has waiting requests."""
        lane = self.lanes.get(key.bucket)
        if lane is None:
            lane = self.lanes[key.bucket] = Lane(key, self.rules, policy, self.pace(key.bucket))
        return lane

    def pace(self, bucket: str) -> LanePace:
        pace = self._paces.get(bucket)
        if pace is None:
            if len(self._paces) >= MAX_PACES:
                del self._paces[next(iter(self._paces))]
            pace = self._paces[bucket] = LanePace()
        return pace

    def rows_per_s(self, now: float) -> dict[str, float]:
        """Rows a second by bucket, of those that are remembered; for people to look at."""
        return {bucket: pace.rows_per_s(now) for bucket, pace in self._paces.items()}

    def ran(self, batch: Batch, seconds: float, now: float) -> None:
        self.pace(batch.lane.bucket).ran(batch.num_rows, seconds, now)
        lane = self.lanes.get(batch.lane.bucket)
        if lane is not None:
            self.touched[lane] = None  # it may wait longer now, or less long

    def reload(self, rules: BatchRules) -> None:
        """Other rules from now on, for those that wait too; a level or a timeout that they have stays."""
        self.rules, self.unloaded = rules, False
        self.instances.replace(rules)
        for lane in self.lanes.values():
            lane.set_rules(rules)
            self.touched[lane] = None

    def reorder(self, policy: Policy, place_of_lane: PlaceOfLane) -> None:
        """Re-sort under a new policy; keys must have been recomputed."""
        self.ready = Candidates(place_of_lane)
        for lane in self.lanes.values():
            lane.reorder(policy)
            self.touched[lane] = None

    def offer_touched(self, now: float) -> list[Lane]:
        """Looks at lanes that changed, if an instance is free; those that wait for others to come."""
        if not self.instances:
            return []
        touched, self.touched = self.touched, {}
        for lane in touched:
            lane.look(now)
            self.ready.offer(lane)
        return [lane for lane in touched if lane.wake_at is not None]

    def joined(self, lane: Lane, request: TensorRequest) -> None:
        lane.push(request)
        self._num_waiting[request.level] += 1
        self.touched[lane] = None

    def left(self, lane: Lane, requests: Sequence[TensorRequest]) -> None:
        """Note requests that left their lane's queue."""
        for request in requests:
            self._num_waiting[request.level] -= 1
        if lane:
            self.touched[lane] = None
        else:
            del self.lanes[lane.key.bucket]
            self.touched.pop(lane, None)

    # -- the order of answers

    def expect_answer(self, request: TensorRequest) -> None:
        self.num_requests += 1
        request.in_order = self.rules.preserve_ordering
        if request.in_order:
            self._unanswered.setdefault(request.tenant, deque()).append(request)

    def answerable(self, request: TensorRequest) -> Iterator[TensorRequest]:
        """Return the requests to be told once `request` has ended: several where answers come in order."""
        if not request.in_order:
            if not request.finished:
                yield request
            return
        waiting = self._unanswered[request.tenant]
        while waiting and (waiting[0].finished or waiting[0].answered):
            first = waiting.popleft()
            if not first.finished:
                yield first
        if not waiting:
            del self._unanswered[request.tenant]

    def check_invariants(self) -> None:
        """Asserts what must hold between any two calls; slow."""
        assert all(self.lanes.values()), "a lane that nobody waits in is kept"
        assert self.num_waiting == sum(map(len, self.lanes.values()))
        for lane in self.lanes.values():
            assert lane.num_rows == sum(one.num_rows for one in lane.queue)
            assert lane.queue.num_entries <= 2 * len(lane) + MIN_DEAD_ENTRIES + 1
