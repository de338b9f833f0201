"""Reservations: blocks set aside for KV that comes from elsewhere, or held under a lease until they are copied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from maitred.core.request import RequestState


class ReservedBlocks(NamedTuple):
    """Blocks of a request that waits for KV: positions [0, start) are cached, `block_ids` are for [start, end)."""

    start: int  # both are multiples of block_size
    end: int
    block_ids: tuple[int, ...]


class GivenUp(NamedTuple):
    """Requests and leases whose blocks are free again; every copy has stopped."""

    request_ids: tuple[str, ...] = ()
    leases: tuple[str, ...] = ()


NOTHING_GIVEN_UP = GivenUp()


@dataclass(slots=True, eq=False)
class Reservations:
    """Blocks set aside now; false while there are none."""

    reserved: dict[str, ReservedBlocks] = field(default_factory=dict)  # by request
    # requests with the status WAITING_FOR_KV: those above, and samples that wait for the same prompt
    waiting: dict[str, RequestState] = field(default_factory=dict)
    along: dict[str, str] = field(default_factory=dict)  # waits for the same blocks -> owner of the reservation
    leases: dict[str, tuple[int, ...]] = field(default_factory=dict)  # -> blocks, the newest last
    given_up_requests: list[str] = field(default_factory=list)  # not told yet
    given_up_leases: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reserved or self.leases)

    def take_given_up(self) -> GivenUp:
        """Return the requests and leases given up since the last call."""
        given_up = GivenUp(tuple(self.given_up_requests), tuple(self.given_up_leases))
        self.given_up_requests, self.given_up_leases = [], []
        return given_up
