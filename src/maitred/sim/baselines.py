"""Baselines of the simulator: how models were served before requests joined and left at every step, and before pages.

They lie around the same scheduler. A batch waits outside the engine until the last one has ended, and each of its
requests is padded to the longest prompt and the longest answer of them, so all end in one step (request-level
scheduling: Orca, OSDI 2022, section 3). A contiguous reservation is made at admission, for the prompt and all output
tokens that the client allows (PagedAttention, arXiv:2309.06180, section 3.1). Without a KV cache each output token
computes all tokens before it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from maitred.core.cost_model import StepShape, shape_of
from maitred.core.request import RequestState
from maitred.core.step import ScheduledRow, SchedulerOutput
from maitred.kv.manager import Allocation, KVCacheManager, PrefixHit
from maitred.scheduler.engine_core import EngineCore, StepListener
from maitred.sim.clients import SimulatedRequest
from maitred.sim.workload import Arrival

BATCHINGS = ("continuous", "static", "dynamic")
KV_LAYOUTS = ("paged", "contiguous", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Batching and KV layout in place of batches that change at every step, and of pages."""

    batching: str = "continuous"
    batch_delay_s: float = 0.1
    """Longest wait (s) of a request for a dynamic batch to fill."""
    kv_layout: str = "paged"

    @property
    def keeps_prefixes(self) -> bool:
        """Return whether a prefix cache has a meaning: padding moves tokens, and without pages none are shared."""
        return self.batching == "continuous" and self.kv_layout == "paged"


class Batches:
    """Requests that wait until a batch of them begins: once the last batch has ended and as many requests wait as the
    engine has slots, or in dynamic batching the oldest has waited long enough, or no request is to come. The policy's
    order says which ones make up the batch, as many as have KV blocks if all answers are as long as clients allow.
    """

    def __init__(
        self, core: EngineCore, live: dict[str, SimulatedRequest], baseline: Baseline, padded: dict[str, Arrival]
    ) -> None:
        self._live = live  # in the engine, or waiting here
        self._core, self._kv, self._size = core, core.scheduler.kv_cache, core.scheduler.config.max_num_seqs
        self._delay_s = baseline.batch_delay_s if baseline.batching == "dynamic" else None
        self._padded = padded  # what each request of the batch under way asked for
        self._waiting: list[SimulatedRequest] = []

    def hold(self, live: SimulatedRequest) -> None:
        self._waiting.append(live)
        self._live[live.spec.request_id] = live

    def begins_at(self, next_at: float | None) -> float | None:
        """Return when the next batch begins, if it does before a request comes at `next_at`."""
        if self._core.has_work or not self._waiting:
            return None
        if len(self._waiting) >= self._size or next_at is None:
            return 0.0
        return None if self._delay_s is None else self._waiting[0].arrival.at + self._delay_s

    def take(self) -> list[SimulatedRequest]:
        """Take the requests of the next batch, padded."""
        order = {id(one): self._core.place_of_newcomer(one.spec)() for one in self._waiting}
        longest: tuple[int, ...] = (0, 0, 0)
        members = list[SimulatedRequest]()
        for one in sorted(self._waiting, key=lambda one: order[id(one)])[: self._size]:
            asked = one.arrival
            lengths = zip(longest, (asked.prompt_tokens, asked.output_tokens, asked.max_tokens), strict=True)
            prompt, output, allowed = wider = tuple(map(max, lengths))
            blocks = self._kv.num_blocks_for(prompt + allowed - 1)
            if members and (len(members) + 1) * blocks > self._kv.num_blocks:
                break
            longest = wider
            members.append(one)
        prompt, output, allowed = longest
        taken = {id(one) for one in members}
        self._waiting = [one for one in self._waiting if id(one) not in taken]
        for one in members:
            self._padded[one.spec.request_id] = one.arrival
            one.arrival = replace(one.arrival, prompt_tokens=prompt, output_tokens=output, max_tokens=allowed)
            one.spec = msgspec.structs.replace(one.spec, num_prompt_tokens=prompt, max_tokens=allowed, block_hashes=[])
        return members

    def end(self, live: SimulatedRequest) -> None:
        """Take the padding off a request that has ended, so that its client's figures are of its own tokens."""
        live.arrival = self._padded.pop(live.spec.request_id)
        if live.state is not None:
            del live.state.output_token_ids[live.arrival.output_tokens :]


class ContiguousKVCacheManager(KVCacheManager):
    """Bookkeeping where a request has all the room that it may ever need, side by side, from its admission on. No room
    is lost between reservations, so the layout does better here than it did.
    """

    def num_blocks_needed(self, request: RequestState, hit: PrefixHit) -> int:
        return self.num_blocks_for(request.num_prompt_tokens + request.max_tokens - 1)  # the last is never computed

    def admit(self, request: RequestState, hit: PrefixHit) -> Allocation | None:
        if super().admit(request, hit) is None:
            return None
        self.allocate(request, request.num_prompt_tokens + request.max_tokens - 1)
        return Allocation(tuple(request.block_table))

    def trim(self, request: RequestState) -> None:
        """Give nothing back."""


def shape_without_kv(rows: Iterable[ScheduledRow]) -> StepShape:
    """Shape of a step in which rows that sample compute all their tokens again, and no other row computes any."""
    again = [row._replace(start=0, num_tokens=row.start + row.num_tokens) for row in rows if row.samples]
    return shape_of(again)._replace(context_tokens=0)


class KVWaste(StepListener):
    """KV slots that requests held in steps, and those among them that no token of theirs filled."""

    def __init__(self, padded: Mapping[str, Arrival]) -> None:
        self._padded = padded
        self._num_slots = self._num_empty = 0

    def begin(self, core: EngineCore) -> None:
        self._scheduler = core.scheduler

    def scheduled(self, plan: SchedulerOutput) -> None:
        kv = self._scheduler.kv_cache
        self._num_slots += kv.num_used * kv.block_size
        for request in self._scheduler.running:
            filled, own = request.num_tokens, self._padded.get(request.request_id)
            if own is not None:
                filled = min(filled - request.num_prompt_tokens, own.output_tokens) + own.prompt_tokens
            self._num_empty += len(request.block_table) * kv.block_size - filled

    @property
    def share(self) -> float:
        """Share of the held slots that were empty, over all steps."""
        return self._num_empty / self._num_slots if self._num_slots else 0.0
