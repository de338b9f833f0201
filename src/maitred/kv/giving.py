"""KV that other engines may read: found by its hashes, leased, and growing while it is computed.

What can be read of a prompt under way grows with each step, and layer by layer within one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from maitred.core.clock import Clock
from maitred.core.errors import RequestError
from maitred.core.request import RequestSpec, RequestState, RequestStatus
from maitred.core.step import ModelOutput, RequestProgress, ScheduledRow, SchedulerOutput
from maitred.kv.layout import LayerIO, layers_of_next_run
from maitred.kv.leases import Readable
from maitred.kv.source import KVSource, Offers
from maitred.kv.transports import Agent
from maitred.kv.wire import Identity, Offered
from maitred.scheduler.engine_core import EngineCore, StepListener, StepTimes
from maitred.scheduler.reservations import GivenUp

ANSWER_S = 5.0  # within which a peer that asks for blocks is answered: the engine's thread looks between two steps
TIMEOUT_S = 5.0  # without a word from a peer

IsOneRun = Callable[[SchedulerOutput], bool]


class PeerConfig(NamedTuple):
    """Settings for moving KV between engines."""

    identity: Identity
    transport: str = "auto"
    staging_bytes: int = 256 * 2**20
    lease_s: float = 30.0
    listen: tuple[str, int] | None = None  # host and port for engines of other hosts


class _PeerAsk(NamedTuple):
    hashes: Sequence[bytes]
    tell: Callable[[Offered], None]


@dataclass(slots=True, eq=False)
class _Growing:
    hashes: Sequence[bytes]  # of all that there will be
    blocks: list[int]  # told so far; of windows what is seen after the end alone
    is_in_step: bool = False  # the step under way computes some of it


class GivenKV(StepListener):
    """KV that one engine gives. For the engine's thread, but for what connections ask in theirs.

    Steps are followed while a lease grows. Blocks of finished steps are held by their hashes, those of the step under
    way are their request's until it ends.
    """

    follows_steps = False

    def __init__(
        self,
        io: LayerIO,
        config: PeerConfig,
        here: Iterable[RequestState],
        *,
        knows: Callable[[bytes], bool],
        block_size: int,
        clock: Clock,
        is_one_run: IsOneRun,
    ) -> None:
        """`here` are the requests there are; `knows` tells whether a tier has a block that the pool has not."""
        self._io, self._config, self._here, self._knows = io, config, here, knows
        self._block_size, self._clock, self._is_one_run = block_size, clock, is_one_run
        self.offers = Offers(io, lease_s=config.lease_s, clock=clock, find=self._find, on_end=self._unlease)
        self._source = KVSource(config.identity, self.offers, staging_bytes=config.staging_bytes, timeout_s=TIMEOUT_S)
        self.growing: dict[str, _Growing] = {}  # by lease
        self._num_leases = 0
        self._loading: dict[str, _PeerAsk] = {}  # by the request that brings it

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

    def without(self, request_id: str) -> None:
        """A request has ended, and what it would have computed is not to come; what it has loaded is there."""
        for lease, growing in list(self.growing.items()):
            if not self._is_computed_here(growing.hashes):
                self._end(lease)
        asked = self._loading.pop(request_id, None)
        if asked is not None:
            asked.tell(self._lease(asked.hashes))

    def given_up(self, given_up: GivenUp) -> None:
        """End leases; no thread reads their blocks after this returns."""
        for lease in given_up.leases:
            self._forget(lease)
            self.offers.revoke(lease)

    def close(self) -> None:
        self._source.close()

    # -- peers ask

    def _find(self, hashes: Sequence[bytes]) -> Offered:
        found: SimpleQueue[Offered] = SimpleQueue()
        self._core.call_soon(partial(self._look, _PeerAsk(hashes, found.put)))
        try:
            return found.get(timeout=ANSWER_S)
        except Empty:
            return Offered("", 0)

    def _look(self, asked: _PeerAsk) -> None:
        """Answer a peer; blocks in a tier alone are brought into the pool first, by a request that computes nothing."""
        offered = self._lease(asked.hashes)
        rest = asked.hashes[offered.num_blocks :]
        if not rest or not self._knows(rest[0]):
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
            self.without(load.request_id)
        if not is_coming:
            self._core.abort(load.request_id)
        return None

    def _lease(self, hashes: Sequence[bytes]) -> Offered:
        self._num_leases += 1
        lease = f"peer-{self.offers.epoch}-{self._num_leases}"
        blocks = self._core.hold(lease, hashes)
        num_blocks = len(blocks)
        if num_blocks < len(hashes) and self._is_computed_here(hashes):
            self.growing[lease] = _Growing(hashes, list(blocks))
            self._core.follow(self, True)
            num_blocks = len(hashes)
        if num_blocks:
            places = self._core.scheduler.kv_cache.places(blocks, 0, num_blocks * self._block_size)
            self.offers.offer(lease, num_blocks, places, Readable(len(blocks)))
        return Offered(lease, num_blocks)

    def _unlease(self, lease: str, why: str) -> None:
        def end() -> None:
            self._forget(lease)
            self._core.release(lease)

        self._core.call_soon(end)

    # -- prompts are computed

    def scheduled(self, plan: SchedulerOutput) -> None:
        layers = layers_of_next_run(self._io) if self._is_one_run(plan) else None
        for row in plan.rows:
            request = self._core.scheduler.request(row.request_id)
            for lease, growing in self.growing.items():
                if request is not None and _computes(request, growing.hashes):
                    growing.is_in_step = True
                    if layers is not None and not request.spec.adapter:  # the executor may refuse an adapter's row
                        self._offer_step(lease, growing, request, row, layers)

    def _offer_step(
        self, lease: str, growing: _Growing, request: RequestState, row: ScheduledRow, layers: Callable[[], int]
    ) -> None:
        end = min((row.start + row.num_tokens) // self._io.layout.block_size, len(growing.hashes))
        if end > len(growing.blocks):
            blocks, readable = request.block_table[:end], Readable(len(growing.blocks), end)
            self.offers.grow(lease, readable, self._more_places(growing, blocks), layers)
            growing.blocks = blocks

    def stepped(
        self, plan: SchedulerOutput, output: ModelOutput, progress: list[RequestProgress], times: StepTimes
    ) -> None:
        for lease, growing in list(self.growing.items()):
            if not growing.is_in_step:
                continue
            growing.is_in_step = False
            if not self.offers.has(lease):
                self._forget(lease)
                continue
            num_told = len(growing.blocks)
            blocks = self._core.hold(lease, growing.hashes)
            if list(blocks[:num_told]) != growing.blocks:  # another request's of the same tokens, or it did not get on
                self._end(lease)
                continue
            self.offers.grow(lease, Readable(len(blocks)), self._more_places(growing, blocks))
            growing.blocks = list(blocks)
            if len(blocks) == len(growing.hashes):
                self._forget(lease)

    def _more_places(self, growing: _Growing, blocks: Sequence[int]) -> Sequence[Any]:
        end = len(growing.hashes) * self._block_size
        return self._core.scheduler.kv_cache.places(blocks, len(growing.blocks), end)

    def _is_computed_here(self, hashes: Sequence[bytes]) -> bool:
        return any(_computes(request, hashes) and not request.finished for request in self._here)

    def _forget(self, lease: str) -> None:
        """Forget that a lease grows."""
        self.growing.pop(lease, None)
        self._core.follow(self, bool(self.growing))

    def _end(self, lease: str) -> None:
        self._forget(lease)
        self.offers.revoke(lease)
        self._core.release(lease)


def _computes(request: RequestState, hashes: Sequence[bytes]) -> bool:
    """Whether all of this prefix belongs to the request's prompt."""
    last = len(hashes) - 1
    return not request.spec.kv_only and last < len(request.block_hashes) and request.block_hashes[last] == hashes[last]
