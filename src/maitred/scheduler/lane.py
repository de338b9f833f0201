"""Lane: the queue of what may share a batch; by Triton's rules when its next batch may go, and how large it is.

Source: triton-inference-server/core, dynamic_batch_scheduler.cc (GetDynamicBatch), docs/user_guide/batcher.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import exp
from typing import Any, Generic, NamedTuple, TypeVar

from maitred.core.request import RequestStatus
from maitred.core.tensor_request import BatchRules, LaneKey, TensorRequest
from maitred.policy.policy import Policy
from maitred.policy.queue import MIN_DEAD_ENTRIES, RequestQueue

RATE_S = 5.0  # that the rate of rows is taken over, about; for people to look at
REMEMBERED = 64.0  # batches, or arrivals, that count
UTILISATION = 0.8  # a batch waits until it is so large that its instance would be busy no more than this


class BatchWait(NamedTuple):
    """Wait for so many rows, or so long (s), whichever is first."""

    num_rows: int
    at_most_s: float


class LanePace:
    """Batch times are fitted by a line, seconds = fixed + per_row * rows, with weights that fade."""

    __slots__ = ("_count", "_gap_s", "_last_at", "_recent", "_rows", "_rows_s", "_seconds", "_squares")

    def __init__(self) -> None:
        self._last_at: float | None = None  # s, of the last arrival
        self._gap_s: float | None = None  # from a row to the next
        self._recent = (0.0, 0.0)  # rows that ran, the older the less they count; and as of when (s)
        self._count = self._rows = self._squares = self._seconds = self._rows_s = 0.0  # sums over batches

    def came(self, num_rows: int, now: float) -> None:
        last, self._last_at = self._last_at, now
        if last is None:
            return
        gap_s = max(0.0, now - last) / num_rows
        self._gap_s = gap_s if self._gap_s is None else self._gap_s + (gap_s - self._gap_s) / REMEMBERED

    def ran(self, num_rows: int, seconds: float, now: float) -> None:
        self._recent = (self._recent_rows(now) + num_rows, now)
        keep = 1.0 - 1.0 / REMEMBERED
        self._count = keep * self._count + 1.0
        self._rows = keep * self._rows + num_rows
        self._squares = keep * self._squares + num_rows * num_rows
        self._seconds = keep * self._seconds + seconds
        self._rows_s = keep * self._rows_s + num_rows * seconds

    def rows_per_s(self, now: float) -> float:
        """Return the rows a second of the last RATE_S, about."""
        return self._recent_rows(now) / RATE_S

    def _recent_rows(self, now: float) -> float:
        num_rows, at = self._recent
        return num_rows * exp(min(0.0, at - now) / RATE_S) if num_rows else 0.0

    def seconds(self, num_rows: int) -> float:
        """Return the seconds that a batch is expected to take; 0 until one was seen."""
        fixed_s, row_s = self._line()
        return fixed_s + row_s * num_rows

    def wait(self, max_rows: int) -> BatchWait:
        """Return the wait for the smallest batch that keeps its instance below UTILISATION at the present rate of rows,
        and no longer than such rows take to come, or than the batch takes. At a calm pace that is one row, without a
        wait.
        """
        gap_s, (fixed_s, row_s) = self._gap_s, self._line()
        if not gap_s or not self._count:
            return BatchWait(1, 0.0)
        spare_s = UTILISATION * gap_s - row_s  # that each row leaves for the fixed part
        num_rows = max_rows if spare_s * max_rows <= fixed_s else max(1, -int(-fixed_s // spare_s))
        at_most_s = min((num_rows - 1) * gap_s, fixed_s + row_s * num_rows)
        return BatchWait(num_rows, at_most_s)

    def _line(self) -> tuple[float, float]:
        """(fixed, per row) in s, neither below 0."""
        if not self._count:
            return 0.0, 0.0
        spread = self._count * self._squares - self._rows * self._rows
        if spread <= 1e-9 * self._squares * self._count:  # batches of one size tell nothing of the others
            return 0.0, self._seconds / self._rows
        row_s = (self._count * self._rows_s - self._rows * self._seconds) / spread
        row_s = min(max(row_s, 0.0), self._seconds / self._rows)
        return (self._seconds - row_s * self._rows) / self._count, row_s


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


T = TypeVar("T", bound=Hashable)


class Candidates(Generic[T]):
    """`key_of` gives a thing's key now, or None while it is no candidate; a fall, and a return, must be offered."""

    def __init__(self, key_of: Callable[[T], tuple[Any, ...] | None]) -> None:
        self._key_of = key_of
        self._heap: list[tuple[tuple[Any, ...], int, T]] = []
        self._listed: dict[T, tuple[Any, ...]] = {}  # the key of the entry that counts
        self._sequence = count()

    def __len__(self) -> int:
        """Return an upper bound on the number of candidates."""
        return len(self._listed)

    def offer(self, thing: T) -> None:
        """Take in a new candidate, or one with a key that may have fallen."""
        key, listed = self._key_of(thing), self._listed.get(thing)
        if key is not None and (listed is None or key < listed):
            self._listed[thing] = key
            heappush(self._heap, (key, next(self._sequence), thing))
            if len(self._heap) > 2 * len(self._listed) + MIN_DEAD_ENTRIES:
                self._heap = [(key, next(self._sequence), thing) for thing, key in self._listed.items()]
                heapify(self._heap)

    def best(self) -> T | None:
        """The one with the smallest key, which stays."""
        first = self.first()
        return None if first is None else first[1]

    def first(self) -> tuple[tuple[Any, ...], T] | None:
        """Return the smallest key and its item, which stays."""
        while self._heap:
            listed, _, thing = self._heap[0]
            if self._listed.get(thing) is not listed:
                heappop(self._heap)
                continue
            key = self._key_of(thing)
            if key == listed:
                return listed, thing
            if key is None:
                heappop(self._heap)
                del self._listed[thing]
                continue
            self._listed[thing] = key
            heapreplace(self._heap, (key, next(self._sequence), thing))
        return None
