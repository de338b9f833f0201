"""KV that other engines may read: found by its hashes, leased, and growing while it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from maitred.core.clock import Clock
from maitred.core.errors import RequestError
from maitred.core.request import RequestSpec, RequestState, RequestStatus
from maitred.engine.kv_growth import GrowingLeases, IsOneRun
from maitred.engine.kv_tiers import KVTiers
from maitred.kv.layout import LayerIO
from maitred.kv.leases import Readable
from maitred.kv.source import KVSource, Offers
from maitred.kv.transports import Agent
from maitred.kv.wire import Identity, Offered
from maitred.scheduler.engine_core import EngineCore

ANSWER_S = 5.0  # within which a peer that asks for blocks is answered: the engine's thread looks between two steps
TIMEOUT_S = 5.0  # without a word from a peer


class PeerConfig(NamedTuple):
    """Settings for moving KV between engines."""

    identity: Identity
    transport: str = "auto"
    staging_bytes: int = 256 * 2**20
    lease_s: float = 30.0
    listen: tuple[str, int] | None = None  # host and port for engines of other hosts


class _Asked(NamedTuple):
    hashes: Sequence[bytes]
    tell: Callable[[Offered], None]


class GivenKV:
    """KV that one engine gives. For the engine's thread, but for what connections ask in theirs."""

    def __init__(
        self,
        io: LayerIO,
        config: PeerConfig,
        here: Iterable[RequestState],
        *,
        tiers: KVTiers | None,
        block_size: int,
        clock: Clock,
        is_one_run: IsOneRun,
    ) -> None:
        """`here` are the requests there are; `tiers` may have what the pool has not."""
        self._config, self._tiers, self._block_size, self._clock = config, tiers, block_size, clock
        self.offers = Offers(io, lease_s=config.lease_s, clock=clock, find=self._find, on_end=self._unlease)
        self._source = KVSource(config.identity, self.offers, staging_bytes=config.staging_bytes, timeout_s=TIMEOUT_S)
        self.growing = GrowingLeases(io, self.offers, here, is_one_run=is_one_run)
        self._num_leases = 0
        self._loading: dict[str, _Asked] = {}  # by the request that brings it

    def begin(self, core: EngineCore) -> None:
        """Listen for other engines."""
        self._core = core
        self.addresses = self._listen()

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
        """The NIXL agent, once this engine listens for NIXL; all pulls of this process share it."""
        return self._source.agent

    def ended(self, request_id: str) -> None:
        """A request, and what it would have computed is not to come; what it has loaded is there."""
        self.growing.look()
        asked = self._loading.pop(request_id, None)
        if asked is not None:
            asked.tell(self._lease(asked.hashes))

    def given_up(self, lease: str) -> None:
        """End a lease; no thread reads its blocks after this returns."""
        self.growing.forget(lease)
        self.offers.revoke(lease)

    def close(self) -> None:
        self._source.close()

    def _find(self, hashes: Sequence[bytes]) -> Offered:
        found: SimpleQueue[Offered] = SimpleQueue()
        self._core.call_soon(partial(self._look, _Asked(hashes, found.put)))
        try:
            return found.get(timeout=ANSWER_S)
        except Empty:
            return Offered("", 0)

    def _look(self, asked: _Asked) -> None:
        """Answer a peer; blocks in a tier alone are brought into the pool first, by a request that computes nothing."""
        offered, tiers = self._lease(asked.hashes), self._tiers
        rest = asked.hashes[offered.num_blocks :]
        if not rest or tiers is None or not tiers.knows(rest[0]):
            return asked.tell(offered)
        self.offers.end(offered.lease, "loading")
        load = RequestSpec(
            request_id=f"{offered.lease}~load",
            arrived_at=self._clock.now(),
            num_prompt_tokens=len(asked.hashes) * self._block_size + 1,
            max_tokens=1,
            block_hashes=asked.hashes,
            kv_only=True,
        )
        self._loading[load.request_id] = asked
        try:
            is_coming = self._core.add(load).status is RequestStatus.WAITING_FOR_KV
        except RequestError:
            is_coming = False
            self.ended(load.request_id)
        if not is_coming:
            self._core.abort(load.request_id)
        return None

    def _lease(self, hashes: Sequence[bytes]) -> Offered:
        self._num_leases += 1
        lease = f"peer-{self.offers.epoch}-{self._num_leases}"
        blocks = self._core.hold(lease, hashes)
        num_blocks = len(blocks)
        if num_blocks < len(hashes) and self.growing.grow(lease, hashes, blocks):
            num_blocks = len(hashes)
        if num_blocks:
            self.offers.offer(lease, num_blocks, blocks, Readable(len(blocks)))
        return Offered(lease, num_blocks)

    def _unlease(self, lease: str, why: str) -> None:
        def end() -> None:
            self.growing.forget(lease)
            self._core.release(lease)

        self._core.call_soon(end)
