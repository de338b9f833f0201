"""Work of a fleet's workers, as their router counts it: the numbers that `disagg` foretells from.

A worker's queue shrinks as its cost model says, and is set right by each first token; its KV is that of all tokens
known there, reservations included. Nothing is asked of a worker, so a log of the core replays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp

from maitred.fleet.disagg import Option, WorkerFacts, WorkerLoad, chunks_s
from maitred.fleet.fleet_request import FleetRequest
from maitred.policy.rules.cost import remaining_outputs

SHARE_S = 5.0  # time constant of the share of time that goes to prompts
NUM_REMEMBERED = 100.0  # answers over which their length is averaged


@dataclass(slots=True, eq=False)
class _Work:
    """Work of one worker."""

    queued: dict[str, float] = field(default_factory=dict)  # request -> uncached tokens, until its first token
    queued_tokens: float = 0.0
    moved_on_at: float = 0.0  # s, when the queue last lost or got a first one
    rows: int = 0
    context_tokens: int = 0  # of those
    held_tokens: int = 0  # known tokens of all that are there
    num_here: int = 0
    bytes_in_flight: float = 0.0
    bytes_queued: float = 0.0
    prompts_s: float = 0.0  # of prompts lately, the older the less; as of `prompts_at`
    prompts_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Part:
    """Work of one request."""

    replica: str
    prefill: str  # where its prompt is computed
    num_tokens: int  # known when it was bound
    kv_bytes: float  # of a hand-over, until it is done
    num_samples: int = 1
    num_new: int = 0  # tokens since
    has_begun: bool = False


class WorkBook:
    """Written by `Binder` and the core as requests come and go."""

    def __init__(self) -> None:
        self._work: dict[str, _Work] = {}
        self._parts: dict[str, _Part] = {}
        self._bytes_in_flight = 0.0  # of all
        self._num_answers, self._mean_outputs = 0.0, 0.0

    # -- to look at

    def outputs_left(self, request: FleetRequest) -> float:
        """Output tokens left: as predicted, else as answers have been lately; at least 1."""
        left = remaining_outputs(request)
        if request.expected_outputs is not None or not self._num_answers:
            return left
        return max(1.0, min(left, self._mean_outputs - request.num_outputs))

    @property
    def mean_outputs(self) -> float:
        """Mean output tokens of the last answers; at least 1."""
        return max(1.0, self._mean_outputs)

    def load(self, name: str, facts: WorkerFacts, now: float) -> WorkerLoad:
        work = self._work.get(name)
        if work is None:
            return WorkerLoad(name, facts, free_blocks=facts.num_blocks)
        held = work.held_tokens // facts.block_size + work.num_here  # half a block too much for each, at most one
        load = WorkerLoad(
            name,
            facts,
            work.queued_tokens,
            work.rows,
            work.context_tokens,
            max(0, facts.num_blocks - held),
            min(1.0, work.prompts_s * exp((work.prompts_at - now) / SHARE_S) / SHARE_S),
            self._bytes_in_flight if facts.shares_link else work.bytes_in_flight,
            work.bytes_queued,
        )
        return load._replace(queued_tokens=self._left(work, load, now))

    def prompts_at(self, name: str) -> list[str]:
        """Requests whose prompts are computed there for others."""
        return [name_of for name_of, part in self._parts.items() if part.prefill == name != part.replica]

    def num_here(self, name: str) -> int:
        """Requests that have KV there, or are to."""
        work = self._work.get(name)
        return work.num_here if work is not None else 0

    # -- what happens

    def bound(self, request: FleetRequest, option: Option, facts: WorkerFacts, now: float) -> None:
        """`facts` are those of the worker that computes the prompt."""
        name = option.prefill or option.replica
        num_tokens = request.num_inputs + request.num_outputs
        num_uncached = max(1, num_tokens - request.num_cached)
        moved = num_tokens * facts.bytes_per_token if name != option.replica else 0.0
        part = _Part(option.replica, name, num_tokens, moved, request.num_samples)
        self._parts[request.request_id] = part
        for there in {option.replica, name}:
            self._add(there, part, 1)
        work = self._work[name]
        prompt_s = chunks_s(WorkerLoad(name, facts), num_uncached, request.num_cached)
        work.prompts_s = work.prompts_s * exp((work.prompts_at - now) / SHARE_S) + prompt_s
        work.prompts_at = now
        if not work.queued:
            work.moved_on_at = now
        self._queue(part, request.request_id, num_uncached)

    def progressed(self, request_id: str, num_tokens: int, now: float) -> None:
        part = self._parts.get(request_id)
        if part is None:
            return
        work = self._work[part.replica]
        if not part.has_begun:
            part.has_begun = True
            self._unqueue(request_id, part).moved_on_at = now
            self._move(part, 1)
            work.rows += part.num_samples
            work.context_tokens += part.num_samples * part.num_tokens
        part.num_new += num_tokens
        work.context_tokens += num_tokens
        work.held_tokens += num_tokens

    def prefilled(self, request_id: str) -> str | None:
        """Return the worker that computed the prompt for another and drops it now; the other computes what is left."""
        part = self._parts.get(request_id)
        if part is None or part.prefill == part.replica:
            return None
        name, left = part.prefill, self._work[part.prefill].queued.get(request_id)
        if left is not None:
            self._unqueue(request_id, part)
        self._add(name, part, -1)
        self._move(part, -part.has_begun)
        part.kv_bytes, part.prefill = 0.0, part.replica
        if left is not None:
            self._queue(part, request_id, left)
        return name

    def released(self, request_id: str) -> None:
        """The request is on no worker any more."""
        part = self._parts.get(request_id)
        if part is None:
            return
        if not part.has_begun:
            self._unqueue(request_id, part)
        self.prefilled(request_id)
        work = self._work[part.replica]
        if part.has_begun:
            self._num_answers = min(self._num_answers + 1, NUM_REMEMBERED)
            self._mean_outputs += (part.num_new / part.num_samples - self._mean_outputs) / self._num_answers
            work.rows -= part.num_samples
            work.context_tokens -= part.num_samples * part.num_tokens + part.num_new
        work.held_tokens -= part.num_new
        self._add(part.replica, part, -1)
        del self._parts[request_id]

    def gone(self, name: str) -> None:
        """Forget the work of a worker that has no requests."""
        if not self.num_here(name):
            self._work.pop(name, None)

    def _add(self, name: str, part: _Part, times: int) -> None:
        work = self._work.setdefault(name, _Work())
        work.num_here += times
        work.held_tokens += times * part.num_tokens

    def _move(self, part: _Part, times: int) -> None:
        """Its KV is on its way once its prompt is computed: what was sent before that is about there."""
        self._bytes_in_flight += times * part.kv_bytes
        for name in (part.replica, part.prefill):
            self._work[name].bytes_in_flight += times * part.kv_bytes

    def _queue(self, part: _Part, request_id: str, num_tokens: float) -> None:
        work = self._work[part.prefill]
        work.queued[request_id] = num_tokens
        work.queued_tokens += num_tokens
        work.bytes_queued += part.kv_bytes

    def _unqueue(self, request_id: str, part: _Part) -> _Work:
        work = self._work[part.prefill]
        work.queued_tokens -= work.queued.pop(request_id)
        work.bytes_queued -= part.kv_bytes
        return work

    def _left(self, work: _Work, load: WorkerLoad, now: float) -> float:
        """Tokens left in the queue, less those computed since the last first token; the first request is not done."""
        if not work.queued:
            return 0.0
        computed = (now - work.moved_on_at) * load.facts.token_budget / chunks_s(load, load.facts.token_budget, 0)
        return work.queued_tokens - min(computed, next(iter(work.queued.values())))

    def check_invariants(self) -> None:
        """Asserts that sums are those of the requests; slow."""
        for name, work in self._work.items():
            there = [part for part in self._parts.values() if name in (part.replica, part.prefill)]
            own = [part for part in there if part.replica == name]
            assert work.num_here == len(there)
            assert work.rows == sum(part.has_begun * part.num_samples for part in own)
            assert work.held_tokens == sum(p.num_tokens for p in there) + sum(p.num_new for p in own)
            assert abs(work.queued_tokens - sum(work.queued.values())) < 1e-3
