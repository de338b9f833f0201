"""Shared memory between processes of a host: a ring of slots in a memfd, which the receiver maps read-only.

The descriptor passes over a unix socket in the abstract namespace, so that nothing has a name in a file system and
nothing is left by `kill -9`. The memory is sealed before it is shown: the receiver can neither write nor resize it, and
the source cannot shrink it under the reader. A ring is of one connection and a slot is used again only when the
receiver is done with it, so what a slow reader sees never changes under it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket

from maitred.kv.channel import Channel
from maitred.kv.handshake import Ring
from maitred.kv.pieces import Piece, Refusal, Welcome
from maitred.kv.slots import NUM_SLOTS, RingInbox, RingOutbox

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, 5.1; Python has no name for it
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0


class ShmOutbox(RingOutbox):
    """A source's ring, written here and shown to the receiver."""

    def __init__(self, channel: Channel, slot_bytes: int) -> None:
        """Raises Refusal where the system has no such memory."""
        num_bytes = slot_bytes * NUM_SLOTS
        try:
            self._fd = os.memfd_create("maitred-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, AttributeError):
            raise Refusal("unlike", "this system has no sealed shared memory; use --kv-transport tcp") from None
        os.ftruncate(self._fd, num_bytes)
        self._map = mmap.mmap(self._fd, num_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _FIXED | _F_SEAL_FUTURE_WRITE)
        super().__init__(channel, slot_bytes, memoryview(self._map))
        self.ring = Ring(slot_bytes, NUM_SLOTS, self._fd)

    def send(self, piece: Piece, rows: memoryview) -> None:
        rows.release()
        self._channel.send(piece)

    def close(self) -> None:
        """The memory lives on for a reader that has it mapped."""
        os.close(self._fd)
        self._memory.release()
        self._map.close()


class ShmInbox(RingInbox):
    """A receiver's view of the source's ring."""

    def __init__(self, channel: Channel, welcome: Welcome) -> None:
        """Raises Refusal for memory that the source could take away, or that is smaller than it says."""
        super().__init__(channel, welcome)
        fd = channel.take_fd()
        if fd is None:
            raise Refusal("garbage", "the source told of shared memory and sent none")
        try:
            size = welcome.slot_bytes * welcome.num_slots
            if os.fstat(fd).st_size != size or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise Refusal("garbage", "the source's shared memory has another size, or is not sealed")
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise Refusal("garbage", f"the source's shared memory cannot be mapped: {error}") from None
        finally:
            os.close(fd)
        self._memory = memoryview(self._map)

    def rows_of(self, piece: Piece) -> memoryview:
        return self._memory[self.offset_of(piece) :][: piece.num_bytes]

    def close(self) -> None:
        self._memory.release()
        self._map.close()


def listen() -> socket.socket:
    """Listen under a name of its own that no file system knows."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0maitred-kv-{secrets.token_hex(12)}")
    listener.listen(16)
    return listener


def dial(name: str, *, timeout_s: float) -> socket.socket:
    """Raises Refusal."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(f"\0{name}")
    except (OSError, ValueError) as error:
        sock.close()
        raise Refusal("cut", f"no worker of this host listens as {name[:60]!r}: {error}") from None
    return sock


def check_user(user: int) -> None:
    """Raises Refusal for another than ours."""
    if user != os.geteuid():
        raise Refusal("stranger", f"the peer runs as user {user}, this worker as {os.geteuid()}")


def address_of(listener: socket.socket) -> str:
    return f"shm:{listener.getsockname()[1:].decode()}"
