"""Queued request: what a policy may ask of it. No token is in it, so any kind of work can stand in one queue.

Inputs and outputs are counted in what the work is made of: tokens of a text; rows of a tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol


class Queued(Protocol):
    """A request as its policy sees it: tenant, deadlines, cost and progress. All to be read only."""

    # -- the tenant

    @property
    def request_id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def weight(self) -> float:
        """Weight of its tenant: twice the weight, twice the fair share."""

    @property
    def priority(self) -> int:
        """0 is most urgent."""

    # -- by when, in s of the clock, or s after its arrival where `_s` says so

    @property
    def arrived_at(self) -> float: ...

    @property
    def ttft_slo_s(self) -> float | None:
        """Objective from arrival to the first output."""

    @property
    def start_by(self) -> float | None: ...

    @property
    def finish_by(self) -> float | None: ...

    # -- what it costs

    @property
    def num_inputs(self) -> int: ...

    @property
    def max_outputs(self) -> int: ...

    @property
    def expected_outputs(self) -> float | None:
        """Output tokens as predicted, whatever the predictor said; None without a prediction."""

    @property
    def block_hashes(self) -> Sequence[Hashable]:
        """Hashes of the parts of its input, in order, that a cache may hold; empty where there are none."""

    # -- how far it has come

    @property
    def first_scheduled_at(self) -> float | None: ...

    @property
    def num_computed(self) -> int:
        """Inputs and outputs that are computed or planned; 0 while it waits."""

    @property
    def num_outputs(self) -> int: ...


class UsedQuanta(NamedTuple):
    """Quanta of one request under a policy that has quanta."""

    num_used: int
    ended_at: float  # s, when the last of them was used up


class KVNeed(NamedTuple):
    """KV that one request needs, found when it was last looked for; nothing where there is no cache."""

    num_cached: int = 0  # of its inputs and outputs, those whose KV it would find
    num_cached_blocks: int = 0
    num_blocks: int = 0  # that it will hold at its end, as predicted, cached ones among them
    max_blocks: int = 0  # the most that it can hold


NO_KV_NEED = KVNeed()
