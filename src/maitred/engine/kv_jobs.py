"""What an engine's KV tiers have under way: fetches, stores, and what is known of each tier beside its own books."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from maitred.engine.kv_threads import Guard
from maitred.kvcache.tiers import DropReason, FetchMeter, KVTier
from maitred.request import RequestState

FIRST_GUESS = (0.5e9, 0.002)  # bytes/s, s; until a fetch was measured


@dataclass(slots=True, eq=False)
class Fetch:
    request_id: str
    tier: TierAtWork
    keys: Sequence[bytes]
    blocks: Sequence[int]
    start: int  # tokens that were there
    began_at: float  # s
    most_s: float  # after which computing would have been faster
    guard: Guard = field(default_factory=Guard)
    num_done: int = 0  # blocks, written by the thread
    took_s: float = 0.0
    watch: threading.Timer | None = None

    def end(self) -> None:
        """Its thread writes no more."""
        self.guard.end()
        if self.watch is not None:
            self.watch.cancel()


@dataclass(slots=True, eq=False)
class Store:
    lease: str
    tier: TierAtWork
    keys: Sequence[bytes]
    blocks: Sequence[int]
    guard: Guard = field(default_factory=Guard)
    num_copied: int = 0  # blocks, by the thread
    has_failed: bool = False  # what follows a block that is not stored is not found


@dataclass(slots=True, eq=False)
class TierAtWork:
    tier: KVTier
    meter: FetchMeter = field(default_factory=lambda: FetchMeter(bandwidth=FIRST_GUESS[0], latency_s=FIRST_GUESS[1]))
    hit_tokens: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)  # before they came to the tier
    on_the_way: set[bytes] = field(default_factory=set)  # keys of blocks that it will have, unless something fails
    is_stuck: bool = False  # a fetch of it does not end


class Found(NamedTuple):
    request: RequestState
    tier: TierAtWork
    first: int  # block from which on it was asked
    num_blocks: int
