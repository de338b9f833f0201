"""KV hand-over, measured: what the transports reach against the plainest loop that moves the same bytes.

    python benchmarks/disagg.py --transport [--tokens 2048] [--rounds 5]

A second process holds a native pool of Qwen3-0.6B's shape (28 layers, 8 KV heads of 128, bfloat16) and serves it. In
turn, within one run: sockets that only send and receive as many bytes, `tcp`; a copy of as many bytes in one thread,
`shm`; where NIXL is installed, its own reads and `nixl` over them (UCX_TLS=tcp keeps it to sockets). Transfers read a
pool, checksum, verify, and write a pool. The ratios are of the rounds' medians.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np

from maitred.kernels.kv_pool import make_kv_pool
from maitred.kv.blocks import HeldBlocks
from maitred.kv.layout import NativeLayers
from maitred.kv.leases import Readable
from maitred.kv.puller import connect
from maitred.kv.source import KVSource, Offers
from maitred.kv.transports import SLOT_BYTES, Agent
from maitred.kv.wire import Agreed, Channel, Identity, Layout

LAYOUT = Layout(
    agreed=Agreed(
        revision="Qwen3-0.6B's shape",
        positions="rope",
        kv_dtype="bfloat16",
        num_layers=28,
        num_kv_heads=8,
        head_dim=128,
        weight_dtype="int8",
        executor="native",
        isa="",
    ),
    block_size=16,
)
IDENTITY = Identity(LAYOUT, b"a token of a benchmark")
STAGING_BYTES, CHUNK_BYTES = 256 * 2**20, 2**20
LEASE = "prompt"
HAS_NIXL = find_spec("nixl_cu12") is not None


def make_io(num_blocks: int) -> NativeLayers:
    agreed = LAYOUT.agreed
    pool = make_kv_pool(
        dtype=agreed.kv_dtype,
        num_layers=agreed.num_layers,
        num_blocks=num_blocks,
        block_size=LAYOUT.block_size,
        num_kv_heads=agreed.num_kv_heads,
        head_dim=agreed.head_dim,
    )
    for layer in range(agreed.num_layers):
        for block in range(num_blocks):
            pool.block_view(layer, block)[:] = (layer * 31 + block) % 251
    return NativeLayers(pool, LAYOUT.of_layer())


# ---- the process that is pulled from


def serve(num_blocks: int, *, with_nixl: bool) -> None:
    """Prints its addresses; ends with its input."""
    source = KVSource(IDENTITY, Offers(make_io(num_blocks), lease_s=600.0), staging_bytes=STAGING_BYTES)
    source.offers.offer(LEASE, num_blocks, range(num_blocks), Readable(num_blocks))
    if with_nixl:
        agent, memory = Agent(), np.ones(SLOT_BYTES, np.uint8)
        regions = agent.register(memory)
        told = [source.listen_nixl("127.0.0.1", 0), str(memory.ctypes.data), agent.described(regions).hex()]
    else:
        bare = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=send_bare, args=(bare,), daemon=True).start()
        told = [str(bare.getsockname()[1]), source.listen_tcp("127.0.0.1", 0), source.listen_shm()]
    print(*told, flush=True)
    sys.stdin.read()
    source.close()


def send_bare(listener: socket.socket) -> None:
    chunk = memoryview(bytearray(CHUNK_BYTES))
    while True:
        sock, _ = listener.accept()
        with sock:
            while wanted := int.from_bytes(sock.recv(8), "little"):
                for first in range(0, wanted, CHUNK_BYTES):
                    sock.sendall(chunk[: wanted - first])


# ---- the process that pulls


def measure(args: argparse.Namespace) -> None:
    """NIXL last, and with a source of its own: at both ends a thread of its looks for news all the time."""
    io = make_io(args.tokens // LAYOUT.block_size)
    num_bytes = args.tokens // LAYOUT.block_size * io.num_layers * io.layout.layer_bytes
    seconds: dict[str, list[float]] = {}
    for ways_of in (plain_ways, nixl_ways) if HAS_NIXL else (plain_ways,):
        command = [sys.executable, __file__, "--tokens", str(args.tokens), "--serve", ways_of.__name__]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdin is not None
            told = child.stdout.readline().split()
            seconds |= timed(ways_of(told, io, args.tokens // LAYOUT.block_size, num_bytes), args.rounds)
            child.stdin.close()
    report(num_bytes, seconds)


Ways = dict[str, Callable[[], None]]


def plain_ways(told: list[str], io: NativeLayers, num_blocks: int, num_bytes: int) -> Ways:
    bare, tcp, shm = told
    return {
        "bare socket loop": bare_socket(int(bare), num_bytes),
        "tcp": pulls(tcp, io, num_blocks),
        "memcpy": memcpy(num_bytes),
        "shm": pulls(shm, io, num_blocks),
    }


def nixl_ways(told: list[str], io: NativeLayers, num_blocks: int, num_bytes: int) -> Ways:
    address, base, described = told
    agent = Agent()
    return {
        "bare NIXL loop": bare_nixl(agent, bytes.fromhex(described), int(base), num_bytes),
        "nixl": pulls(address, io, num_blocks, agent),
    }


def timed(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of each; one before them touches the memory."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def bare_nixl(agent: Agent, described: bytes, base: int, num_bytes: int) -> Callable[[], None]:
    """Reads of the same slot again and again."""
    memory, peer = np.zeros(SLOT_BYTES, np.uint8), agent.meet(described)
    agent.register(memory)
    channel = Channel(socket.socketpair()[0], timeout_s=30.0)

    def run() -> None:
        for _ in range(0, num_bytes, SLOT_BYTES):
            agent.read(peer, base, memory.ctypes.data, SLOT_BYTES, channel)

    return run


def bare_socket(port: int, num_bytes: int) -> Callable[[], None]:
    sock, chunk = socket.create_connection(("127.0.0.1", port)), memoryview(bytearray(CHUNK_BYTES))

    def run() -> None:
        sock.sendall(num_bytes.to_bytes(8, "little"))
        left = num_bytes
        while left:
            left -= sock.recv_into(chunk[: min(left, CHUNK_BYTES)])

    return run


def pulls(address: str, io: NativeLayers, num_blocks: int, agent: Agent | None = None) -> Callable[[], None]:
    puller = connect(address, IDENTITY, staging_bytes=STAGING_BYTES, timeout_s=30.0, agent=agent)
    into = HeldBlocks(io, tuple(range(num_blocks)))

    def run() -> None:
        pulled = puller.pull(LEASE, range(io.num_layers), range(num_blocks), into)
        assert pulled.num_blocks == num_blocks, pulled

    return run


def memcpy(num_bytes: int) -> Callable[[], None]:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    return lambda: np.copyto(target, source)


PEERS = {"tcp": ("bare socket loop", 0.85), "shm": ("memcpy", 0.33), "nixl": ("bare NIXL loop", 0.9)}


def report(num_bytes: int, seconds: dict[str, list[float]]) -> None:
    rates = {name: num_bytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    for name, rate in rates.items():
        print(f"{name:20} {rate:6.2f} GB/s")
    for name, (peer, aim) in PEERS.items():
        if name in rates:
            print(f"{name} / {peer}: {rates[name] / rates[peer]:.2f} (aim {aim})")
    if "nixl" in rates:
        print(f"tcp / nixl: {rates['tcp'] / rates['nixl']:.2f} (aim 2 with UCX_TLS=tcp)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", action="store_true", help="the transports against plain loops")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.tokens // LAYOUT.block_size, with_nixl=args.serve == nixl_ways.__name__)
    else:
        measure(args)


if __name__ == "__main__":
    main()
