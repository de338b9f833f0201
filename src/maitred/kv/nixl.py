"""NIXL between hosts (extra `nixl`): pieces lie in registered memory of the source, and the receiver reads them there.

Only the binding is called: NIXL's Python layer logs to stdout, and has helpers that unpickle. Control, proof of the
token and leases go over TCP as always; what is registered is one ring, told to a proven peer alone.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import numpy as np

from maitred.core.errors import ConfigError
from maitred.kv.channel import Channel
from maitred.kv.handshake import Ring
from maitred.kv.pieces import Piece, Refusal, Welcome
from maitred.kv.slots import NUM_SLOTS, RingInbox, RingOutbox


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

    def send(self, piece: Piece, rows: memoryview) -> None:
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

    def rows_of(self, piece: Piece) -> memoryview:
        at = self._welcome.base + self.offset_of(piece)
        self._agent.read(self._peer, at, self._memory.ctypes.data, piece.num_bytes, self._channel)
        return self._memory.data[: piece.num_bytes]

    def close(self) -> None:
        self._agent.leave(self._peer)
        self._agent.forget(self._regions)
