"""Records of a replica: its state at one moment, counters, KV tiers and workers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from itertools import zip_longest
from operator import add
from typing import Any

import msgspec

from maitred.core.metrics import HANDOVER_WAIT
from maitred.core.request import FinishReason


class DraftCounts(msgspec.Struct, array_like=True):
    """Tokens that were made up, and what came of them. They only grow."""

    num_rows: int = 0  # of steps, those for which tokens were made up
    num_tokens: int = 0  # in them
    accepted: list[int] = []  # of the first, second ... tokens of rows, those that became output

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    def count(self, num_made: int, num_accepted: int) -> None:
        """Count a row's drafts: so many made up, at least one, of which the first so many became output."""
        self.num_rows += 1
        self.num_tokens += num_made
        self.accepted += [0] * (num_made - len(self.accepted))
        for place in range(num_accepted):
            self.accepted[place] += 1

    def __add__(self, other: DraftCounts) -> DraftCounts:
        accepted = [mine + theirs for mine, theirs in zip_longest(self.accepted, other.accepted, fillvalue=0)]
        return DraftCounts(self.num_rows + other.num_rows, self.num_tokens + other.num_tokens, accepted)


class HandoverCounts(msgspec.Struct, array_like=True):
    """Requests whose KV another engine had, and what was pulled for them. They only grow."""

    outcomes: dict[str, int] = {}  # of request.HANDOVER_OUTCOMES
    num_bytes: dict[str, int] = {}  # by transport
    seconds: float = 0.0  # that requests waited for them
    dropped: dict[str, int] = {}  # blocks that did not come, by what went wrong
    waits: list[int] = []  # requests in each of HANDOVER_WAIT's buckets, and beyond the last, whatever came
    waited_s: float = 0.0  # all of them
    num_tokens: int = 0  # that need not be computed

    def waited(self, seconds: float) -> None:
        bounds = HANDOVER_WAIT.buckets
        self.waits = self.waits or [0] * (len(bounds) + 1)
        self.waits[bisect_left(bounds, seconds)] += 1
        self.waited_s += seconds

    def moved(self, transport: str, num_bytes: int, seconds: float) -> None:
        """A request waited so long for so much."""
        self.num_bytes[transport] = self.num_bytes.get(transport, 0) + num_bytes
        self.seconds += seconds

    def add(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def drop(self, reason: str, num_blocks: int) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + num_blocks

    def __add__(self, other: HandoverCounts) -> HandoverCounts:
        outcomes, dropped = _sums(self.outcomes, other.outcomes), _sums(self.dropped, other.dropped)
        num_bytes = _sums(self.num_bytes, other.num_bytes)
        waits = [mine + theirs for mine, theirs in zip_longest(self.waits, other.waits, fillvalue=0)]
        waited_s = self.waited_s + other.waited_s
        num_tokens = self.num_tokens + other.num_tokens
        return HandoverCounts(outcomes, num_bytes, self.seconds + other.seconds, dropped, waits, waited_s, num_tokens)


def _sums(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


class TierFigures(msgspec.Struct, array_like=True, frozen=True):
    """A KV tier, for metrics; tokens and drops only grow."""

    num_bytes: int  # that it holds
    hit_tokens: int  # fetched in place of computing
    dropped: dict[str, int]  # blocks by reason

    def __add__(self, other: TierFigures) -> TierFigures:
        num_bytes, hit_tokens = self.num_bytes + other.num_bytes, self.hit_tokens + other.hit_tokens
        return TierFigures(num_bytes, hit_tokens, _sums(self.dropped, other.dropped))


class KVFigures(msgspec.Struct, array_like=True, frozen=True):
    """KV tiers, by name."""

    tiers: dict[str, TierFigures] = {}

    def __add__(self, other: KVFigures) -> KVFigures:
        both = self.tiers.keys() & other.tiers.keys()
        return KVFigures(self.tiers | other.tiers | {name: self.tiers[name] + other.tiers[name] for name in both})

    def counters(self) -> KVFigures:
        """Counters that an engine leaves behind when it ends."""
        return KVFigures({n: TierFigures(0, tier.hit_tokens, tier.dropped) for n, tier in self.tiers.items()})


class TierView(msgspec.Struct, frozen=True):
    """A KV tier as people look at it."""

    name: str
    num_bytes: int
    num_blocks: int
    hit_tokens: int  # fetched in place of computing
    stored_blocks: int  # written so far
    waiting_blocks: int  # to be stored
    evicted_blocks: int
    dropped: dict[str, int]  # blocks by reason
    bytes_per_s: float  # of fetches; a guess before the first
    latency_s: float
    break_even_tokens: int | None  # fewest that are fetched; None where computing is faster, or was not measured yet


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """A replica at one moment. Counters only grow; gauges are as of the last step."""

    alive: bool = True
    error: str | None = None  # why it is not alive
    loading: bool = False  # not alive yet, or not yet again
    lacking: str | None = None  # why new requests are not welcome all the same: what serves a part of them is not there
    asleep: bool = False  # alive, with no engine: it has ended on purpose, and the next request starts another
    # gauges
    num_running: int = 0
    num_waiting: int = 0
    num_background_running: int = 0  # of both, those of the class background
    num_background_waiting: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0  # held by requests; cached but free blocks do not count
    num_blocks_cached: int = 0  # findable by prefix, in use or free
    num_state_snapshots: int = 0  # of recurrent layers
    expert_load_ratio: float = 0.0  # of the busiest expert to the mean, in the layer where it is largest; 0: no experts
    prefill_tokens_per_s: float = 0.0  # as its steps have shown, while a router wants to know; 0 before
    decode_tokens_per_s: float = 0.0
    # counters
    num_steps: int = 0
    num_prompt_tokens: int = 0  # prompts admitted to a first step
    num_generated_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_background_tokens: int = 0  # of them, those of the class background
    adapter_bytes: int = 0  # of LoRA adapters in memory
    adapter_loads: int = 0
    adapter_evictions: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)  # of its proposer
    handovers: HandoverCounts = field(default_factory=HandoverCounts)
    predicted_drafts: DraftCounts = field(default_factory=DraftCounts)  # of texts that requests predicted
    num_preemptions: int = 0
    num_swapped_out_blocks: int = 0  # KV of preempted requests, copied to the host
    num_swapped_in_blocks: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_state_evictions: int = 0  # of snapshots
    kv_tiers: KVFigures = field(default_factory=KVFigures)
    num_finished: Mapping[FinishReason, int] = field(default_factory=dict)
    last_step_age_s: float = 0.0  # since a step last ended, or 0 when idle
    execute_s: float = 0.0  # total time spent in the executor
    host_s: float = 0.0  # total time of steps outside the executor
    heartbeat_age_s: float = 0.0  # since the engine's process said that it is there; 0 without one of its own
    num_restarts: int = 0  # of the engine's process
    num_sleeps: int = 0  # ends of the engine's process on purpose
    wake_s: float = 0.0  # what the last start out of sleep took
    num_resumed: int = 0  # samples that went on with another engine
    num_wrong_frames: int = 0  # messages from the engine's process that were none, and were dropped


_LARGEST = frozenset({"last_step_age_s", "heartbeat_age_s", "wake_s", "expert_load_ratio"})
_BY_ITSELF = frozenset({"alive", "error", "loading", "lacking", "asleep", "num_finished"})


def state_of_all(states: Sequence[ReplicaState], num_held: int, ended: Mapping[FinishReason, int]) -> ReplicaState:
    """Alive while one of them is. `num_held` wait for a worker, and of those that did so many have `ended`."""
    told: dict[str, Any] = {}
    for name in (each.name for each in fields(ReplicaState) if each.name not in _BY_ITSELF):
        values = [getattr(state, name) for state in states]
        told[name] = max(values) if name in _LARGEST else reduce(add, values)
    told["num_waiting"] += num_held
    living = [state for state in states if state.alive]
    errors = [f"worker {number}: {state.error}" for number, state in enumerate(states)]
    return ReplicaState(
        alive=bool(living),
        error=None if living else "; ".join(errors),
        loading=not living and any(state.loading for state in states),
        asleep=bool(living) and all(state.asleep for state in living),
        num_finished={r: ended.get(r, 0) + sum(s.num_finished.get(r, 0) for s in states) for r in FinishReason},
        **told,
    )


class WorkerView(msgspec.Struct, frozen=True):
    """An engine's process as `GET /admin/roles` lists it; a server has one of them or several."""

    worker: int  # 0, 1 ...
    pid: int | None
    role: str  # what is sent there: mixed is everything
    alive: bool
    error: str | None
    asleep: bool
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_cached: int
    num_restarts: int

    @classmethod
    def of(cls, worker: int, pid: int | None, state: ReplicaState, role: str = "mixed") -> WorkerView:
        told = {name: getattr(state, name) for name in cls.__struct_fields__[3:]}
        return cls(worker, pid, role, **told)
