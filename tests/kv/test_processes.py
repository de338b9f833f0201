"""Two real processes: one is killed or stopped before, amid and after a transfer, and the socket between them cut."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from maitred.core.errors import ConfigError
from maitred.kv.leases import Refusal
from maitred.kv.puller import Pulled, Puller, connect, connect_any
from maitred.kv.transports import Agent
from tests.kv import source_process
from tests.kv.relay import Relay, Strike, cut, flip
from tests.kv.worlds import LAYERS, STAGING, Pool, dial, hold, identity, make_layout
from tests.waiting import joined, until

ROOT = Path(__file__).resolve().parents[2]
THERE = Pool(make_layout(), seed=source_process.SEED)
ALL = source_process.COUNT


class Peer:
    """The process, and where it serves."""

    def __init__(self, *transports: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv.source_process", *transports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        self.addresses = {each.partition(":")[0]: each for each in self.process.stdout.readline().split()}

    def tell_more(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with closing(Peer()) as started:
        yield started


def start_pull(puller: Puller, pool: Pool) -> tuple[threading.Thread, list[Pulled]]:
    results: list[Pulled] = []
    thread = threading.Thread(target=lambda: results.append(puller.pull("prompt", LAYERS, range(ALL), hold(pool, ALL))))
    thread.start()
    return thread, results


def check_verified(pool: Pool, count: int) -> None:
    """So many blocks are what the other process has."""
    assert np.array_equal(pool.rows(range(4, 4 + count)), THERE.rows(source_process.blocks()[:count]))


def leftovers() -> set[str]:
    """What is held of shared memory and sockets by this process, and named on the machine."""
    ours = psutil.Process()
    maps = {m.path for m in ours.memory_maps(grouped=False) if "maitred-kv" in m.path}
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the listing's own
            continue
    named = {name for name in os.listdir("/dev/shm") if "maitred-kv" in name}  # tensors of other servers have names
    return maps | {link for link in links if "maitred-kv" in link} | named


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_source_that_is_killed_before_amid_and_after_leaves_what_was_verified(peer: Peer, transport: str) -> None:
    pool, address = Pool(make_layout()), peer.addresses[transport]
    puller = dial(address)
    thread, results = start_pull(puller, pool)
    until(lambda: pool.writes)
    peer.tell_more()
    until(lambda: len(pool.writes) > 1)
    peer.kill()  # amid
    joined(thread)
    assert results[0].failure == "cut"
    assert results[0].num_blocks == 4
    check_verified(pool, 4)
    with pytest.raises(Refusal) as refused:  # before
        dial(address)
    assert refused.value.reason == "cut"
    check_verified(pool, 4)  # after
    assert leftovers() == set()
    assert address.partition(":")[2] not in Path("/proc/net/unix").read_text()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_source_that_stands_still_is_left_and_what_it_sends_later_reaches_nobody(peer: Peer, transport: str) -> None:
    pool = Pool(make_layout())
    puller = dial(peer.addresses[transport], timeout_s=0.3)
    thread, results = start_pull(puller, pool)
    until(lambda: pool.writes)
    peer.process.send_signal(signal.SIGSTOP)
    joined(thread)
    assert results[0].failure == "silent"
    assert results[0].num_blocks == source_process.FIRST
    written = len(pool.writes)
    peer.tell_more()
    peer.process.send_signal(signal.SIGCONT)
    other = Pool(make_layout())
    again = dial(peer.addresses[transport])  # it lives, and serves others
    for _ in range(5):
        peer.tell_more()
    assert again.pull("prompt", LAYERS, range(ALL), hold(other, ALL)).num_blocks == ALL
    check_verified(other, ALL)
    assert len(pool.writes) == written
    again.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_receiver_that_is_killed_leaves_the_source_serving(peer: Peer, transport: str) -> None:
    address = peer.addresses[transport]
    code = (
        "from tests.kv.worlds import *\n"
        "pool = Pool(make_layout())\n"
        "pool.before_write = lambda: print('written', flush=True)\n"
        f"dial({address!r}).pull('prompt', LAYERS, range({ALL}), hold(pool, {ALL}))\n"
    )
    receiver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == b"written\n"
    receiver.kill()
    receiver.wait()
    receiver.stdout.close()
    for _ in range(5):
        peer.tell_more()
    pool = Pool(make_layout())
    puller = dial(address)
    assert puller.pull("prompt", LAYERS, range(ALL), hold(pool, ALL)).num_blocks == ALL
    check_verified(pool, ALL)
    puller.close()
    until(lambda: not leftovers())


def test_the_fastest_way_that_reaches_a_source_is_taken(peer: Peer) -> None:
    nowhere = ["shm:maitred-kv-nobody", "tcp:127.0.0.1:1"]

    def reached(addresses: list[str], transport: str) -> str:
        puller = connect_any(addresses, identity(), transport=transport, staging_bytes=STAGING, timeout_s=5.0)
        family = puller._channel.is_unix
        puller.close()
        return "shm" if family else "tcp"

    tcp, shm = peer.addresses["tcp"], peer.addresses["shm"]
    assert reached([tcp, shm], "auto") == "shm"
    assert reached([tcp, shm], "tcp") == "tcp"
    assert reached([nowhere[0], tcp], "auto") == "tcp"  # on another host
    for addresses, transport in ((nowhere, "auto"), ([tcp], "shm"), ([], "auto"), ([tcp], "nixl")):
        with pytest.raises(Refusal) as refused:
            reached(addresses, transport)
        assert refused.value.reason == "cut"


# ---- what happens to bytes on their way


@contextmanager
def between(address: str, strike: Strike, after: int) -> Iterator[str]:
    """The address of a relay to a TCP source that strikes after so many of its bytes."""
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    with closing(Relay((host, int(port)))) as relay:
        relay.fault(strike, after=after)
        yield f"tcp:127.0.0.1:{relay.port}"


def test_a_socket_that_is_cut_in_the_middle_of_a_layer_is_found_out(peer: Peer) -> None:
    pool = Pool(make_layout())
    with between(peer.addresses["tcp"], cut, 9000) as address:
        puller = dial(address)
        pulled = puller.pull("prompt", LAYERS, range(ALL), hold(pool, ALL))
    assert pulled.failure == "cut"
    assert pulled.num_blocks == 0
    assert not pool.writes


def test_a_bit_that_flips_on_its_way_is_found_out_wherever_it_is(peer: Peer) -> None:
    for _ in range(5):
        peer.tell_more()
    total = ALL * len(LAYERS) * THERE.layout.layer_bytes
    seen = set()
    for after in [*range(0, 900, 61), 1000, total // 2, total]:
        pool = Pool(make_layout())
        with between(peer.addresses["tcp"], flip, after) as address:
            try:
                puller = dial(address, timeout_s=0.2)
            except Refusal as refusal:
                seen.add(refusal.reason)
                continue
            pulled = puller.pull("prompt", LAYERS, range(ALL), hold(pool, ALL))
            puller.close()
        seen.add(pulled.failure)
        check_verified(pool, pulled.num_blocks)
    assert {"stranger", "damaged", "garbage"} <= seen
    assert seen - {"stranger", "damaged", "garbage", "oversized", "silent", "cut", "old_epoch", "unlike", ""} == set()


# ---- NIXL, where it is installed: `pip install --no-deps nixl-cu12==1.5.1`


def test_without_nixl_one_line_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(ConfigError, match="pip install --no-deps nixl-cu12"):
        Agent()


@pytest.fixture
def nixl_peer() -> Iterator[Peer]:
    pytest.importorskip("nixl_cu12", reason="nixl-cu12 is not installed")
    with closing(Peer("nixl")) as started:
        yield started


def meet(peer: Peer, *, timeout_s: float = 5.0) -> Puller:
    return connect(peer.addresses["nixl"], identity(), staging_bytes=STAGING, timeout_s=timeout_s, agent=Agent())


def test_blocks_arrive_over_nixl_as_they_were_and_torch_stays_out(nixl_peer: Peer) -> None:
    pool, puller = Pool(make_layout()), meet(nixl_peer)
    thread, results = start_pull(puller, pool)
    for _ in range(5):
        nixl_peer.tell_more()
    joined(thread)
    assert results[0].num_blocks == ALL
    check_verified(pool, ALL)
    puller.close()
    nixl_peer.tell_more()
    assert nixl_peer.process.stdout is not None
    assert nixl_peer.process.stdout.readline() == "torch: False\n"


def test_a_nixl_source_that_is_killed_leaves_what_was_verified(nixl_peer: Peer) -> None:
    pool, puller = Pool(make_layout()), meet(nixl_peer, timeout_s=1.0)
    thread, results = start_pull(puller, pool)
    until(lambda: pool.writes)
    nixl_peer.kill()
    joined(thread)
    assert results[0].failure in ("cut", "silent")
    assert results[0].num_blocks == source_process.FIRST
    check_verified(pool, source_process.FIRST)
