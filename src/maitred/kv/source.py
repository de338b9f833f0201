"""Source of KV: listens for receivers and gives each a thread, which serves what is offered."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable

from maitred.core.errors import ConfigError
from maitred.kv import nixl, shm, tcp
from maitred.kv.channel import Channel
from maitred.kv.compat import Terms
from maitred.kv.handshake import Identity, Ring, greet
from maitred.kv.offers import Offers
from maitred.kv.pieces import Refusal
from maitred.kv.serving import Outbox, serve

logger = logging.getLogger(__name__)
MAX_CONNECTIONS = 256
TIMEOUT_S = 5.0
_LOOK_S = 1.0  # for leases that are over

MakeOutbox = Callable[[Channel, int], Outbox]


class KVSource:
    """Serves `offers` where it was told to listen, until `close`."""

    def __init__(self, identity: Identity, offers: Offers, *, staging_bytes: int, timeout_s: float = TIMEOUT_S) -> None:
        """Raises ConfigError for memory that does not hold one layer of a block."""
        least = offers.io.layout.layer_bytes
        if staging_bytes < least:
            raise ConfigError(f"--kv-staging-bytes {staging_bytes} is below one layer of a block; give {least} or more")
        self.offers = offers
        self._identity, self._timeout_s = identity, timeout_s
        self._staging_bytes, self._num_staged = staging_bytes, 0
        self._lock = threading.Lock()  # of what is staged, and of the open connections
        self._channels: set[Channel] = set()
        self._threads: list[threading.Thread] = []
        self.agent: nixl.Agent | None = None  # once it listens for NIXL; all pulls in this process may share it
        self._stopped, self._stop = os.pipe()

    def listen_tcp(self, host: str, port: int) -> str:
        """The address for `puller.connect`. Raises ConfigError."""
        listener = tcp.listen(host, port, has_token=self._identity.token is not None)
        self._listen(listener, tcp.TcpOutbox)
        return tcp.address_of(listener)

    def listen_shm(self) -> str:
        """The same, for processes of this host and user."""
        listener = shm.listen()
        self._listen(listener, shm.ShmOutbox)
        return shm.address_of(listener)

    def listen_nixl(self, host: str, port: int) -> str:
        """The same, for bytes over NIXL; its control is over TCP. Raises ConfigError."""
        agent = self.agent = nixl.Agent()
        listener = tcp.listen(host, port, has_token=self._identity.token is not None)
        self._listen(listener, lambda channel, slot_bytes: nixl.NixlOutbox(channel, slot_bytes, agent))
        return tcp.address_of(listener, "nixl")

    def close(self) -> None:
        """End every connection and lease; idempotent."""
        if self._stop < 0:
            return
        os.write(self._stop, b"x")
        with self._lock:
            channels, threads = list(self._channels), list(self._threads)
        for channel in channels:
            channel.abort()
        for thread in threads:
            thread.join()
        self.offers.close()
        os.close(self._stopped)
        os.close(self._stop)
        self._stop = -1

    def _listen(self, listener: socket.socket, make_outbox: MakeOutbox) -> None:
        self._start(lambda: self._accept(listener, make_outbox), "maitred-kv-listen")

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads = [known for known in self._threads if known.is_alive()] + [thread]
            thread.start()

    def _accept(self, listener: socket.socket, make_outbox: MakeOutbox) -> None:
        poll = select.poll()
        for fd in (listener.fileno(), self._stopped):
            poll.register(fd, select.POLLIN)
        with listener:
            while True:
                ready = [fd for fd, _ in poll.poll(_LOOK_S * 1000)]
                if self._stopped in ready:
                    return
                self.offers.expire()
                if ready:
                    self._welcome(listener, make_outbox)

    def _welcome(self, listener: socket.socket, make_outbox: MakeOutbox) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # no descriptor left, or it has gone again
            logger.warning("a peer that pulls KV could not be accepted: %s", error.strerror)
            return
        if len(self._channels) >= MAX_CONNECTIONS:
            self.offers.count("busy")
            sock.close()
            return
        channel = Channel(sock, timeout_s=self._timeout_s)
        with self._lock:
            self._channels.add(channel)
        self._start(lambda: self._meet(channel, make_outbox), "maitred-kv-send")

    def _meet(self, channel: Channel, make_outbox: MakeOutbox) -> None:
        """One connection, from first contact to its end."""
        outboxes: list[Outbox] = []

        def ring_for(terms: Terms) -> Ring:
            outbox = make_outbox(channel, max(tcp.SLOT_BYTES, terms.unit * terms.source.layer_bytes))
            outboxes.append(outbox)
            self._stage(outbox.num_bytes)
            return outbox.ring

        try:
            if channel.is_unix:
                shm.check_user(channel.peer_user())
            greet(channel, self._identity, self.offers.epoch, ring_for)
            serve(self.offers, channel, outboxes[0])
        except Refusal as refusal:
            if refusal.reason not in ("cut", "aborted"):
                self.offers.count(refusal.reason)
                logger.warning("a peer that pulls KV: %s", refusal)
        finally:
            for outbox in outboxes:
                outbox.close()
            with self._lock:
                self._num_staged -= sum(outbox.num_bytes for outbox in outboxes)
                self._channels.discard(channel)
            channel.close()

    def _stage(self, num_bytes: int) -> None:
        """Raises Refusal when others have taken what there is; given back with the connection."""
        with self._lock:
            self._num_staged += num_bytes
            taken = self._num_staged
        if taken > self._staging_bytes:
            raise Refusal("busy", f"all of --kv-staging-bytes {self._staging_bytes} is in use by other receivers")
