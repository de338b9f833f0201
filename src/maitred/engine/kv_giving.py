"""KV that other engines may read: found by its hashes, leased, and growing while it is computed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from maitred.clock import Clock
from maitred.engine.core import EngineCore
from maitred.engine.kv_growth import GrowingLeases, IsOneRun
from maitred.executor.layer_io import LayerIO
from maitred.request import RequestState
from maitred.transfer.handshake import Identity
from maitred.transfer.leases import Readable
from maitred.transfer.nixl import Agent
from maitred.transfer.offers import Offers
from maitred.transfer.pieces import Offered
from maitred.transfer.source import Source

ANSWER_S = 5.0  # to who asks for blocks: the engine's thread looks between two steps
TIMEOUT_S = 5.0  # without a word from a peer


class PeerConfig(NamedTuple):
    """How KV moves between engines."""

    identity: Identity
    transport: str = "auto"
    staging_bytes: int = 256 * 2**20
    lease_s: float = 30.0
    listen: tuple[str, int] | None = None  # host and port for engines of other hosts


class GivenKV:
    """What one engine gives. The engine thread's, but for what connections ask in theirs."""

    def __init__(
        self,
        core: EngineCore,
        io: LayerIO,
        config: PeerConfig,
        here: Iterable[RequestState],
        *,
        clock: Clock,
        is_one_run: IsOneRun,
    ) -> None:
        """`here` are the requests there are."""
        self._core, self._config = core, config
        self.offers = Offers(io, lease_s=config.lease_s, clock=clock, find=self._find, on_end=self._unlease)
        self._source = Source(config.identity, self.offers, staging_bytes=config.staging_bytes, timeout_s=TIMEOUT_S)
        self.addresses = self._listen()
        self._growing = GrowingLeases(core, io, self.offers, here, is_one_run=is_one_run)
        self._num_leases = 0

    def _listen(self) -> tuple[str, ...]:
        source, listen = self._source, self._config.listen
        host, port = listen or ("127.0.0.1", 0)
        if self._config.transport == "tcp":
            return (source.listen_tcp(host, port),)
        if self._config.transport == "nixl":
            return (source.listen_nixl(host, port),)
        shm = source.listen_shm()
        return (shm,) if listen is None else (shm, source.listen_tcp(host, port))

    @property
    def agent(self) -> Agent | None:
        """NIXL's, once it listens for that; whoever pulls in this process shares it."""
        return self._source.agent

    def look(self) -> None:
        """A request has ended, and what it would have computed is not to come."""
        self._growing.look()

    def given_up(self, lease: str) -> None:
        """Returns when nobody reads its blocks any more."""
        self._growing.forget(lease)
        self.offers.revoke(lease)

    def close(self) -> None:
        self._source.close()

    def _find(self, hashes: Sequence[bytes]) -> Offered:
        found: list[Offered] = []
        is_found = threading.Event()

        def look() -> None:
            found.append(self._lease(hashes))
            is_found.set()

        self._core.call_soon(look)
        return found[0] if is_found.wait(ANSWER_S) else Offered("", 0)

    def _lease(self, hashes: Sequence[bytes]) -> Offered:
        self._num_leases += 1
        lease = f"peer-{self.offers.epoch}-{self._num_leases}"
        blocks = self._core.hold(lease, hashes)
        num_blocks = len(blocks)
        if num_blocks < len(hashes) and self._growing.begin(lease, hashes, blocks):
            num_blocks = len(hashes)
        if num_blocks:
            self.offers.offer(lease, num_blocks, blocks, Readable(len(blocks)))
        return Offered(lease, num_blocks)

    def _unlease(self, lease: str, why: str) -> None:
        def end() -> None:
            self._growing.forget(lease)
            self._core.release(lease)

        self._core.call_soon(end)
