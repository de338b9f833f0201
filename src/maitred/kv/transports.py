"""Transports of KV pieces: sockets between hosts, shared memory within one, and NIXL (extra `nixl`).

Over TCP a piece's bytes come behind its header. Shared memory is a ring of slots in a memfd, which the receiver maps
read-only. The descriptor passes over a unix socket in the abstract namespace, so that nothing has a name in a file
system and nothing is left by `kill -9`. The memory is sealed before it is shown: the receiver can neither write nor
resize it, and the source cannot shrink it under the reader. With NIXL the ring lies in registered memory of the source,
and the receiver reads it there. Only NIXL's binding is called: its Python layer logs to stdout, and has helpers that
unpickle. Control, proof of the token and leases go over TCP as always; what is registered is told to a proven peer
alone. A ring is of one connection.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import time
from ipaddress import ip_address
from typing import Any, Protocol

import numpy as np

from maitred.core.errors import ConfigError
from maitred.kv.leases import Refusal
from maitred.kv.wire import Ack, AnyMessage, Channel, PieceHeader, Renew, Ring, Welcome, expect

NUM_SLOTS = 8
SLOT_BYTES = 2**19  # a copy, its checksum and the kernel's copy of it stay in a second-level cache
_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, 5.1; Python has no name for it
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0


class Outbox(Protocol):
    """Memory that pieces are sent from, in slots; `ring` is what first contact tells of it."""

    slot_bytes: int
    num_bytes: int
    ring: Ring

    def slot(self, num_bytes: int) -> tuple[int, memoryview]:
        """Number and memory of a slot that is free; waits for one."""

    def take(self, message: AnyMessage) -> None:
        """Take the receiver's news of slots. Raises Refusal for what it cannot have said."""

    def send(self, piece: PieceHeader, rows: memoryview) -> None: ...

    def close(self) -> None: ...


class Inbox(Protocol):
    """Memory that pieces arrive in."""

    def rows_of(self, piece: PieceHeader) -> memoryview: ...

    def done_with(self, piece: PieceHeader) -> None: ...

    def close(self) -> None: ...


class TcpOutbox:
    """A source's memory for one piece at a time, which is in the kernel's hands when `send` returns."""

    def __init__(self, channel: Channel, slot_bytes: int) -> None:
        self._channel, self._slot, self.slot_bytes = channel, memoryview(bytearray(slot_bytes)), slot_bytes
        self.ring, self.num_bytes = Ring(slot_bytes), slot_bytes

    def slot(self, num_bytes: int) -> tuple[int, memoryview]:
        return 0, self._slot[:num_bytes]

    def take(self, message: AnyMessage) -> None:
        """Take the news that the receiver waits."""
        expect(message, Renew)

    def send(self, piece: PieceHeader, rows: memoryview) -> None:
        self._channel.send(piece, rows)

    def close(self) -> None:
        """Nothing outlives the connection."""


class TcpInbox:
    """A receiver's memory for a piece's bytes, which is reused."""

    def __init__(self, channel: Channel, welcome: Welcome) -> None:
        self._channel, self._slot = channel, memoryview(bytearray(welcome.slot_bytes))

    def rows_of(self, piece: PieceHeader) -> memoryview:
        rows = self._slot[: piece.num_bytes]
        self._channel.read_into(rows)
        return rows

    def done_with(self, piece: PieceHeader) -> None:
        """Nothing to send: the memory is ours."""

    def close(self) -> None:
        """Nothing outlives the connection."""


def listen_tcp(host: str, port: int, *, has_token: bool) -> socket.socket:
    """Raises ConfigError for an address that is not here, or that strangers reach without a token."""
    if not has_token and not _is_loopback(host):
        raise ConfigError(
            f"KV transfers listen on {host}, where others reach them, without a fleet token; "
            "give every worker --fleet-token-file, or listen on 127.0.0.1"
        )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=16)
    except OSError as error:
        raise ConfigError(f"KV transfers cannot listen on {host}:{port}: {error.strerror or error}") from None


def dial_tcp(host: str, port: int, *, timeout_s: float) -> socket.socket:
    """Raises Refusal."""
    try:
        return socket.create_connection((host, port), timeout_s)
    except OSError as error:
        raise Refusal("cut", f"cannot reach {host}:{port}: {error.strerror or error}") from None


def tcp_address(listener: socket.socket, transport: str = "tcp") -> str:
    host, port = listener.getsockname()[:2]
    return f"{transport}:{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class RingOutbox:
    """A slot is used again only when the receiver is done with it, so what a slow one reads never changes under it."""

    def __init__(self, channel: Channel, slot_bytes: int, memory: memoryview) -> None:
        self._channel, self.slot_bytes, self._memory = channel, slot_bytes, memory
        self.num_bytes = NUM_SLOTS * slot_bytes
        self._free = list(range(NUM_SLOTS))

    def slot(self, num_bytes: int) -> tuple[int, memoryview]:
        """One that is free, once there is one."""
        while not self._free:
            self.take(self._channel.receive())
        number = self._free.pop(0)
        return number, self._memory[number * self.slot_bytes :][:num_bytes]

    def take(self, message: AnyMessage) -> None:
        """An Ack, or news that the receiver waits. Raises Refusal for anything else."""
        if isinstance(message, Renew):
            return
        number = expect(message, Ack).slot
        if not 0 <= number < NUM_SLOTS or number in self._free:
            raise Refusal("garbage", f"slot {number} of the ring came back, which was not out")
        self._free.append(number)


class RingInbox:
    """A receiver's side of a ring: where in the source's ring a piece lies, and that it was read."""

    def __init__(self, channel: Channel, welcome: Welcome) -> None:
        self._channel, self._welcome = channel, welcome

    def offset_of(self, piece: PieceHeader) -> int:
        """(bytes) Raises Refusal for a slot that is none."""
        if not 0 <= piece.slot < self._welcome.num_slots:
            raise Refusal("garbage", f"slot {piece.slot} of a ring of {self._welcome.num_slots}")
        return piece.slot * self._welcome.slot_bytes

    def done_with(self, piece: PieceHeader) -> None:
        self._channel.send(Ack(piece.slot))


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

    def send(self, piece: PieceHeader, rows: memoryview) -> None:
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

    def rows_of(self, piece: PieceHeader) -> memoryview:
        return self._memory[self.offset_of(piece) :][: piece.num_bytes]

    def close(self) -> None:
        self._memory.release()
        self._map.close()


def listen_shm() -> socket.socket:
    """Listen under a name of its own that no file system knows."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0maitred-kv-{secrets.token_hex(12)}")
    listener.listen(16)
    return listener


def dial_shm(name: str, *, timeout_s: float) -> socket.socket:
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


def shm_address(listener: socket.socket) -> str:
    return f"shm:{listener.getsockname()[1:].decode()}"


class Agent:
    """NIXL's end in this process. Raises ConfigError without the extra, or where it cannot start."""

    def __init__(self) -> None:
        try:
            from nixl_cu12 import _bindings as binding  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                f"--kv-transport nixl needs NIXL ({error}); install it without the PyTorch it would bring along: "
                "pip install --no-deps nixl-cu12==1.5.1"
            ) from None
        config = binding.nixlAgentConfig()
        config.useProgThread, config.syncMode = True, binding.NIXL_THREAD_SYNC_STRICT
        try:
            agent = binding.nixlAgent(f"maitred-{secrets.token_hex(8)}", config)
            self._backends = [agent.createBackend("UCX", {})]
        except Exception as error:  # the binding's own, without a common base
            raise ConfigError(f"NIXL cannot start: {error}; use --kv-transport tcp") from None
        self._binding, self._agent = binding, agent

    def register(self, memory: np.ndarray[Any, Any]) -> Any:
        """Register memory; returns what `forget` takes back."""
        region = (memory.ctypes.data, memory.nbytes, 0, "")
        regions = self._binding.nixlRegDList(self._binding.DRAM_SEG, [region])
        self._agent.registerMem(regions, self._backends)
        return regions

    def forget(self, regions: Any) -> None:
        self._agent.deregisterMem(regions, self._backends)

    def described(self, regions: Any) -> bytes:
        """Description by which a peer reaches this memory."""
        return bytes(self._agent.getLocalPartialMD(regions, True, self._backends))

    def meet(self, described: bytes) -> str:
        """The name of a peer. Raises Refusal for what describes none."""
        try:
            name = self._agent.loadRemoteMD(described)
        except Exception as error:
            raise Refusal("garbage", f"the source told of no NIXL memory: {error}") from None
        return str(name.decode() if isinstance(name, bytes) else name)

    def leave(self, name: str) -> None:
        self._agent.invalidateRemoteMD(name)

    def read(self, name: str, source: int, target: int, num_bytes: int, channel: Channel) -> None:
        """Read from a peer's address to one of ours. Raises Refusal when it fails, stalls or is aborted."""
        binding, agent = self._binding, self._agent
        here, there = (binding.nixlXferDList(binding.DRAM_SEG, [(at, num_bytes, 0)]) for at in (target, source))
        try:
            handle = agent.createXferReq(binding.NIXL_READ, here, there, name, b"", self._backends)
            try:
                status = agent.postXferReq(handle, b"")
                until = time.monotonic() + channel.timeout_s
                while status == binding.NIXL_IN_PROG:
                    channel.check(until)
                    status = agent.getXferStatus(handle)
            finally:
                agent.releaseXferReq(handle)
        except Refusal:
            raise
        except Exception as error:
            raise Refusal("cut", f"NIXL could not read the source's memory: {error}") from None
        if status != binding.NIXL_SUCCESS:
            raise Refusal("cut", f"NIXL could not read the source's memory: status {status}")


class NixlOutbox(RingOutbox):
    """A source's ring of registered memory, which the receiver reads."""

    def __init__(self, channel: Channel, slot_bytes: int, agent: Agent) -> None:
        memory = np.zeros(NUM_SLOTS * slot_bytes, np.uint8)
        super().__init__(channel, slot_bytes, memory.data)
        self._agent, self._regions = agent, agent.register(memory)
        self.ring = Ring(slot_bytes, NUM_SLOTS, agent=agent.described(self._regions), base=memory.ctypes.data)

    def send(self, piece: PieceHeader, rows: memoryview) -> None:
        self._channel.send(piece)

    def close(self) -> None:
        self._agent.forget(self._regions)


class NixlInbox(RingInbox):
    """A receiver's memory for pieces, read out of the source's ring into registered memory of ours."""

    def __init__(self, channel: Channel, welcome: Welcome, agent: Agent) -> None:
        super().__init__(channel, welcome)
        self._agent = agent
        self._memory = np.zeros(welcome.slot_bytes, np.uint8)
        self._regions = agent.register(self._memory)
        self._peer = agent.meet(welcome.agent)

    def rows_of(self, piece: PieceHeader) -> memoryview:
        at = self._welcome.base + self.offset_of(piece)
        self._agent.read(self._peer, at, self._memory.ctypes.data, piece.num_bytes, self._channel)
        return self._memory.data[: piece.num_bytes]

    def close(self) -> None:
        self._agent.leave(self._peer)
        self._agent.forget(self._regions)
