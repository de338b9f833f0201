"""Lane: the queue of what may share a batch; by Triton's rules when its next batch may go, and how large it is.

Source: triton-inference-server/core, dynamic_batch_scheduler.cc (GetDynamicBatch), docs/user_guide/batcher.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Any, NamedTuple

from maitred.core.request import RequestStatus
from maitred.core.tensor_request import BatchRules, LaneKey, TensorRequest
from maitred.policy.policy import Policy
from maitred.policy.queue import MIN_DEAD_ENTRIES, RequestQueue
from maitred.scheduler.pace import LanePace

WAITING = RequestStatus.WAITING


class NextBatch(NamedTuple):
    """A lane's next batch: at most so many rows, from `at` (s) on."""

    num_rows: int
    at: float


class _Prefix(NamedTuple):
    """The first waiting requests, in order."""

    num_rows: int  # that fit into a batch
    preferred: int  # rows of the part that is to go at once, if there is one
    closed: bool  # no other request can join


class Lane:
    """Requests that wait, in the policy's order; within a group of it the model's priority levels come first."""

    def __init__(self, key: LaneKey, rules: BatchRules, policy: Policy, pace: LanePace) -> None:
        self.key, self.pace = key, pace
        self.set_rules(rules)
        self.queue: RequestQueue[TensorRequest] = RequestQueue(policy.groups)
        self._grouped = policy.groups is not None
        self.num_rows = 0  # that wait
        self.is_ready = False  # its batch may go, as `look` found; callers of `look` are told of changes
        self.wake_at: float | None = None  # s, when its batch may go, if it waits for that
        self._num_alone = 0  # of those that wait, they share no batch, because one with them was lost
        self._by_age: deque[TensorRequest] = deque()  # the longest here first, and some that have gone

    def __len__(self) -> int:
        return len(self.queue)

    def set_rules(self, rules: BatchRules) -> None:
        self.rules, self._sizes = rules, rules.sizes

    def push(self, request: TensorRequest) -> None:
        """Queue a new request, or one whose batch was lost."""
        self.queue.push(request, _key(request))
        self.num_rows += request.num_rows
        if request.num_losses:
            self._num_alone += 1
            self._by_age.appendleft(request)
        else:
            self._by_age.append(request)
        if len(self._by_age) > 2 * len(self.queue) + MIN_DEAD_ENTRIES:
            self._by_age = deque(one for one in self._by_age if one.status is WAITING)

    def pop(self) -> TensorRequest:
        request = self.queue.pop()
        self._left(request)
        return request

    def remove(self, request: TensorRequest) -> None:
        self.queue.remove(request.request_id)
        self._left(request)

    def place_again(self, request: TensorRequest) -> None:
        """Queue the request again under its changed key."""
        self.queue.remove(request.request_id)
        self.queue.push(request, _key(request))

    def reorder(self, policy: Policy) -> None:
        """Re-sort under a new policy; keys must have been recomputed."""
        waiting, self.queue = self.queue, RequestQueue(policy.groups)
        self._grouped = policy.groups is not None
        for request in waiting:
            self.queue.push(request, _key(request))

    def look(self, now: float) -> None:
        """Notes whether its batch may go, or when."""
        batch = self.next_batch(now)
        self.is_ready = batch is not None and batch.at <= now
        self.wake_at = None if batch is None or self.is_ready else batch.at

    def next_batch(self, now: float) -> NextBatch | None:
        """Return the next batch; None when no request waits. Its time depends on the set of waiting requests, and under
        policies with groups not on their order, which changes with the service of others.
        """
        if not self.queue:
            return None
        if not self.rules.batches:
            return NextBatch(1, now)
        num_rows, preferred, closed = self._prefix()
        enough, delay_s = self._wait()
        due_at = self._oldest().queued_at + delay_s
        if delay_s > 0.0 and due_at <= now:
            return NextBatch(num_rows, now)  # not a preferred size only: overdue requests go
        if preferred:
            return NextBatch(preferred, now)
        return NextBatch(num_rows, now if closed or num_rows >= enough else due_at)

    def _wait(self) -> tuple[int, float]:
        """Rows that need not wait for more, and how long (s) fewer of them wait."""
        if self.rules.auto_delay:
            return self.pace.wait(self.rules.max_batch_size)
        delay_s = self.rules.delay_s
        return (1 if delay_s <= 0.0 else self.rules.max_batch_size), delay_s

    def _prefix(self) -> _Prefix:
        sizes, most = self._sizes, self.rules.max_batch_size
        num_rows = min(self.num_rows, most)
        if self._num_alone:
            return _Prefix(num_rows, 0, closed=True)
        if not self._grouped and self.num_rows != len(self.queue):
            return self._walk(sizes, most)
        preferred = sizes[bisect_right(sizes, num_rows) - 1] if sizes[0] <= num_rows else 0
        return _Prefix(num_rows, preferred, self.num_rows > most or num_rows >= sizes[-1])

    def _walk(self, sizes: tuple[int, ...], most: int) -> _Prefix:
        """Request by request, where they have unlike numbers of rows."""
        num_rows = preferred = 0
        for request in self.queue.first(most):
            after = num_rows + request.num_rows
            if num_rows and after > most:
                return _Prefix(num_rows, self._or_below(preferred, num_rows, after, sizes), closed=True)
            preferred = self._or_below(preferred, num_rows, after, sizes) if num_rows else 0
            num_rows = after
            if num_rows in sizes:
                preferred = num_rows
        return _Prefix(num_rows, preferred, num_rows >= sizes[-1])

    def _or_below(self, preferred: int, num_rows: int, after: int, sizes: tuple[int, ...]) -> int:
        """Return the rows before the next request when that passes all preferred sizes and none was met."""
        return num_rows if not preferred and after > sizes[-1] else preferred

    def _oldest(self) -> TensorRequest:
        while self._by_age[0].status is not WAITING:
            self._by_age.popleft()
        return self._by_age[0]

    def _left(self, request: TensorRequest) -> None:
        self.num_rows -= request.num_rows
        self._num_alone -= request.num_losses > 0


def _key(request: TensorRequest) -> tuple[Any, ...]:
    return (request.level, request.behind, *request.key)
