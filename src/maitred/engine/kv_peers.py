"""KV of other engines: given to those that ask for it by its hashes, and pulled for requests that say who has it.

The engine's thread decides, reserves and holds; threads of connections copy. Whatever does not come is computed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from maitred.clock import Clock
from maitred.engine.core import EngineCore
from maitred.engine.kv_threads import ThreadOfJobs
from maitred.executor.layer_io import LayerIO
from maitred.kvcache.prefix_cache import hash_blocks, known_tokens, root_hash
from maitred.replica import HandoverCounts
from maitred.request import RequestState, RequestStatus
from maitred.scheduler.reservations import GivenUp
from maitred.transfer.blocks import HeldBlocks
from maitred.transfer.handshake import Identity
from maitred.transfer.leases import Readable
from maitred.transfer.offers import Offers
from maitred.transfer.pieces import Offered, Refusal
from maitred.transfer.puller import Pulled, Puller, connect_any
from maitred.transfer.source import Source

logger = logging.getLogger(__name__)
ANSWER_S = 5.0  # to who asks for blocks: the engine's thread looks between two steps
TIMEOUT_S = 5.0  # without a word from a peer


class PeerConfig(NamedTuple):
    """How KV moves between engines."""

    identity: Identity
    transport: str = "auto"
    staging_bytes: int = 256 * 2**20
    lease_s: float = 30.0
    listen: tuple[str, int] | None = None  # host and port for engines of other hosts


@dataclass(slots=True, eq=False)
class _Pull:
    request: RequestState
    namespace: str  # that its blocks may be of
    addresses: Sequence[str]
    keys: Sequence[bytes]  # from the first block on
    start: int  # block
    held: HeldBlocks
    began_at: float  # s
    transport: str = ""  # once it is connected


class _OfNamespace(Exception):
    """The source's blocks are of a namespace that the pull is not for."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self.namespace = namespace


class KVPeers:
    """One engine's end of all transfers. All methods are the engine thread's."""

    def __init__(self, core: EngineCore, io: LayerIO, config: PeerConfig, *, block_size: int, clock: Clock) -> None:
        self._core, self._io, self._config, self._block_size = core, io, config, block_size
        self._clock = clock
        self._offers = Offers(io, lease_s=config.lease_s, clock=clock, find=self._find, on_end=self._unlease)
        self._source = Source(config.identity, self._offers, staging_bytes=config.staging_bytes, timeout_s=TIMEOUT_S)
        self.addresses = self._listen()
        self.counts = core.kv_handovers = HandoverCounts()
        self._pulls: dict[str, _Pull] = {}
        self._pullers: dict[tuple[str, ...], Puller] = {}  # the pulling thread's
        self._namespaces: dict[tuple[str, ...], str] = {}  # of peers whose bits are not ours
        self._refused: set[tuple[str, ...]] = set()  # the pulling thread's: whose first contact was told of
        self._silent_at: dict[tuple[str, ...], float] = {}  # also: s, when one was last found to say nothing
        self._pulling = ThreadOfJobs("maitred-kv-pull")
        self._num_leases = 0
        core.kv_followers.append(self)

    def _listen(self) -> tuple[str, ...]:
        source, listen = self._source, self._config.listen
        host, port = listen or ("127.0.0.1", 0)
        if self._config.transport == "tcp":
            return (source.listen_tcp(host, port),)
        if self._config.transport == "nixl":
            return (source.listen_nixl(host, port),)
        shm = source.listen_shm()
        return (shm,) if listen is None else (shm, source.listen_tcp(host, port))

    # -- requests

    def entered(self, request: RequestState) -> None:
        """One that says where its KV is waits for it, if there are blocks to bring it into."""
        addresses = request.spec.kv_from
        if not addresses:
            request.handover = "local" if request.spec.resumed is None else "recomputed"
        elif request.status is not RequestStatus.WAITING_FOR_KV:  # else it waits for what another sample pulls
            self._begin(request, self._namespaces.get(tuple(addresses), ""))

    def _begin(self, request: RequestState, namespace: str) -> None:
        """A pull, from a peer whose blocks are of that namespace as far as is known."""
        if namespace and not self._core.accept(request.request_id, namespace):
            return self._came(request, "recomputed")
        reserved = self._core.reserve(request.request_id, request.num_tokens - 1)
        if reserved is None:
            return self._came(request, self._without_pull(request))
        first = reserved.start // self._block_size
        keys = request.block_hashes[: reserved.end // self._block_size]
        pull = _Pull(
            request,
            request.kv_namespace,
            request.spec.kv_from,
            keys,
            first,
            HeldBlocks(self._io, reserved.block_ids, first=first),
            self._clock.now(),
        )
        self._pulls[request.request_id] = pull
        return self._pulling.give(partial(self._pull, pull))

    def ended(self, request_id: str) -> None:
        """Of one that waits for KV, `given_up` tells."""

    def given_up(self, given_up: GivenUp) -> None:
        """Returns when nobody touches those blocks any more."""
        for request_id in given_up.request_ids:
            pull = self._pulls.pop(request_id, None)
            if pull is not None:
                pull.held.give_up()
                self.counts.waited(self._clock.now() - pull.began_at)
                self._came(pull.request, "recomputed")
        for lease in given_up.leases:
            self._offers.revoke(lease)

    def close(self) -> None:
        for pull in self._pulls.values():
            pull.held.give_up()
        self._source.close()
        self._pulling.end(0.0)
        for puller in list(self._pullers.values()):
            puller.abort()

    def _without_pull(self, request: RequestState) -> str:
        hit = self._core.scheduler.kv_cache.find_prefix(request)
        if request.num_tokens - hit.num_tokens > self._block_size:
            return "recomputed"
        return "mixed" if hit.blocks and request.kv_namespace else "local"

    def _begin_again(self, pull: _Pull, namespace: str) -> None:
        """First contact says that the peer's bits are not ours: with the names that such blocks have here."""
        request_id = pull.request.request_id
        if self._pulls.get(request_id) is not pull:
            return  # its blocks were given up
        del self._pulls[request_id]
        self._namespaces[tuple(pull.addresses)] = namespace
        self._core.kv_arrived(request_id, pull.start * self._block_size)
        self._begin(pull.request, namespace)

    # -- giving, asked in threads of connections

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
        lease = f"peer-{self._offers.epoch}-{self._num_leases}"
        blocks = self._core.hold(lease, hashes)
        if blocks:
            self._offers.offer(lease, len(blocks), blocks, Readable(len(blocks)))
        return Offered(lease, len(blocks))

    def _unlease(self, lease: str, why: str) -> None:
        self._core.call_soon(partial(self._core.release, lease))

    # -- taking, in the thread that pulls

    def _pull(self, pull: _Pull) -> None:
        """Whatever comes of it, the engine's thread is told."""
        then: Callable[[], None] = partial(self._pulled, pull, Pulled(0, 0))
        try:
            then = partial(self._pulled, pull, self._pull_unless_silent(pull))
        except _OfNamespace as found:
            then = partial(self._begin_again, pull, found.namespace)
        finally:
            self._core.call_soon(then)

    def _pull_unless_silent(self, pull: _Pull) -> Pulled:
        peer = tuple(pull.addresses)
        if pull.began_at < self._silent_at.get(peer, pull.began_at):  # it need not find that out once more
            return Pulled(0, 0, "silent")
        pulled = self._pull_from(peer, pull)
        if pulled.failure == "silent":
            self._silent_at[peer] = self._clock.now()
        if pulled.failure == "unlike" and peer not in self._refused:
            self._refused.add(peer)
            logger.warning("KV of a peer is computed again; first contact said: %s", pulled.text)
        return pulled

    def _pull_from(self, peer: tuple[str, ...], pull: _Pull) -> Pulled:
        """Raises _OfNamespace."""
        pulled = Pulled(0, 0)
        try:
            puller = self._puller(peer)
            pull.transport = puller.transport
            if puller.terms.namespace not in ("", pull.namespace):
                raise _OfNamespace(puller.terms.namespace)
            size = puller.terms.source.block_size
            offered = puller.ask(self._keys(pull, size))
            wanted = range(pull.start, min(offered.num_blocks * size // self._block_size, len(pull.keys)))
            if wanted:
                pulled = puller.pull(offered.lease, range(puller.terms.num_layers), wanted, pull.held)
            if offered.num_blocks:
                puller.release(offered.lease)
        except Refusal as refusal:
            pulled = Pulled(0, 0, refusal.reason, str(refusal))
        return pulled

    def _keys(self, pull: _Pull, block_size: int) -> Sequence[bytes]:
        """As the source names its blocks: the same tokens in blocks of its size."""
        if block_size == self._block_size:
            return pull.keys
        tokens = known_tokens(pull.request, 0, len(pull.keys) * self._block_size)
        revision = self._config.identity.layout.agreed.revision
        return hash_blocks(tokens, block_size, root_hash(revision, pull.request.spec.cache_salt))

    def _puller(self, addresses: tuple[str, ...]) -> Puller:
        """Raises Refusal."""
        puller = self._pullers.get(addresses)
        if puller is None or puller.is_closed:
            puller = self._pullers[addresses] = connect_any(
                addresses,
                self._config.identity,
                transport=self._config.transport,
                staging_bytes=self._config.staging_bytes,
                timeout_s=TIMEOUT_S,
                agent=self._source.agent,
            )
        return puller

    def _pulled(self, pull: _Pull, pulled: Pulled) -> None:
        num_blocks, waited_s = pulled.num_blocks, self._clock.now() - pull.began_at
        if pulled.failure:
            self.counts.drop(pulled.failure, len(pull.keys) - pull.start - num_blocks)
        if num_blocks:  # all of its wait: asking and queueing behind others are part of what a hand-over takes
            self.counts.moved(pull.transport, pulled.num_bytes, waited_s)
        request_id = pull.request.request_id
        if self._pulls.get(request_id) is not pull:
            return  # its blocks were given up
        del self._pulls[request_id]
        self.counts.waited(waited_s)
        self._came(pull.request, "recomputed" if not num_blocks else "mixed" if pull.namespace else "moved")
        self._core.kv_arrived(request_id, (pull.start + num_blocks) * self._block_size)

    def _came(self, request: RequestState, outcome: str) -> None:
        self.counts.add(outcome)
        request.handover = outcome
