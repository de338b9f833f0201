"""Links between simulated workers: transfers that run at once share a link's bandwidth evenly (processor sharing)."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from maitred.core.errors import ConfigError, did_you_mean

GB = 1e9
DRY, DRY_S = 0.5, 1e-9  # bytes, or time to send them: with less left, nothing is


class SimulatedLink(NamedTuple):
    """A kind of link, by what a transfer gets of it when it is alone, checksums included."""

    bandwidth: float  # bytes/s
    latency_s: float
    is_shared: bool = False  # all transfers of the host share it; else each worker has a port each way


# Of one host as first measured (memory copies, plain sockets over loopback); of a network nine tenths of its rate.
LINKS: dict[str, SimulatedLink] = {
    "shm": SimulatedLink(4 * GB, 50e-6, is_shared=True),
    "tcp": SimulatedLink(2 * GB, 200e-6, is_shared=True),
    "10gbe": SimulatedLink(1.125 * GB, 200e-6),
    "25gbe": SimulatedLink(2.8 * GB, 200e-6),
    "100gbe": SimulatedLink(11.25 * GB, 100e-6),
    "400g": SimulatedLink(45 * GB, 20e-6),
    "infiniband": SimulatedLink(45 * GB, 5e-6),  # NVIDIA Quantum-2 NDR, 400 Gb/s a port; latency is an assumption
    "nvlink": SimulatedLink(400 * GB, 10e-6),  # of an H100's 450 GB/s each way
}
DISK = SimulatedLink(2 * GB, 200e-6, is_shared=True)  # a local NVMe drive, read in blocks
_RATE = re.compile(r"(\d+(?:\.\d+)?)([MG])B/s")


def link_named(name: str) -> SimulatedLink | None:
    """A name of LINKS, a rate such as 100MB/s, or none. Raises ConfigError."""
    if name == "none":
        return None
    rate = _RATE.fullmatch(name)
    if rate is not None and float(rate[1]) > 0:
        return SimulatedLink(float(rate[1]) * (1e6 if rate[2] == "M" else GB), 200e-6, is_shared=True)
    if name not in LINKS:
        choices = ", ".join(LINKS)
        raise ConfigError(
            f"--link is {name!r}{did_you_mean(name, LINKS)}; choose {choices}, a rate as 100MB/s, or none"
        )
    return LINKS[name]


@dataclass(slots=True, eq=False)
class LinkFlow:
    """One transfer; bytes may join it while it runs."""

    ports: tuple[str, ...]
    left: float = 0.0  # bytes
    rate: float = 0.0  # bytes/s, while some are left


class Links:
    """All transfers over links of one kind. `now` (s) never goes back."""

    def __init__(self, link: SimulatedLink) -> None:
        self.link = link
        self.next_at: float | None = None  # when the next flow has run dry
        self.num_bytes = 0  # that were sent
        self._flows: dict[LinkFlow, None] = {}  # with bytes left
        self._now = 0.0

    def open(self, sender: str, receiver: str) -> LinkFlow:
        return LinkFlow(("all",) if self.link.is_shared else (f"out {sender}", f"in {receiver}"))

    def send(self, flow: LinkFlow, num_bytes: int, now: float) -> None:
        self._pass(now)
        flow.left += num_bytes
        self.num_bytes += num_bytes
        self._flows[flow] = None
        self._share()

    def cut(self, flow: LinkFlow, now: float) -> None:
        """Cut the transfer; the rest of it does not come."""
        self._pass(now)
        flow.left = 0.0
        self._flows.pop(flow, None)
        self._share()

    def advance(self, now: float) -> list[LinkFlow]:
        """Flows that have run dry by now."""
        self._pass(now)
        dry = [flow for flow in self._flows if flow.left < max(DRY, DRY_S * flow.rate)]
        for flow in dry:
            flow.left = 0.0
            del self._flows[flow]
        self._share()
        return dry

    def _pass(self, now: float) -> None:
        passed_s, self._now = max(0.0, now - self._now), max(now, self._now)
        for flow in self._flows:
            flow.left -= flow.rate * passed_s

    def _share(self) -> None:
        """Share each port evenly among its flows; a flow is as fast as the fuller of its ports."""
        users: dict[str, int] = {}
        for flow in self._flows:
            for port in flow.ports:
                users[port] = users.get(port, 0) + 1
        for flow in self._flows:
            flow.rate = self.link.bandwidth / max(users[port] for port in flow.ports)
        ends = [self._now + max(0.0, flow.left) / flow.rate for flow in self._flows]
        self.next_at = min(ends, default=None)


class SimulatedDisk:
    """Blocks on disk by their names, the least recently used dropped first; written behind the engines."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def num_known(self, names: Sequence[bytes]) -> int:
        """Return how many from the front are there."""
        return next((i for i, name in enumerate(names) if name not in self._kept), len(names))

    def store(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):  # so that a chain is dropped from its end
            self._kept[name] = None
            self._kept.move_to_end(name)
        while len(self._kept) > self._max_blocks:
            self._kept.popitem(last=False)
