"""Faults of a live hand-over in long, for `make soak`: silences of seconds and of a minute, servers killed in
each phase, anything at random, and load under which workers of both roles are killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import psutil
import pytest

from benchmarks.soak_server import Tally, is_idle, load
from tests.conftest import ServerProcess, start_server
from tests.kv.relay import RECEIVER, SOURCE, Strike, cut, flip
from tests.reliability.test_handover_faults import MOMENTS, ROLES, Apart, by, complete, workers_apart
from tests.waiting import HANGS_S, is_gone, until

pytestmark = pytest.mark.soak
RANDOM_S, LOAD_S, KILL_EVERY_S = 180.0, 180.0, 15.0
SEED = random.SystemRandom().randrange(10**6)
PLACES: tuple[tuple[str, bytes | int], ...] = (
    (SOURCE, b"Ask"),
    (SOURCE, b"Pull"),
    (SOURCE, b"Release"),
    (RECEIVER, b"Piece"),
    (RECEIVER, 300),
    (RECEIVER, 20_000),
    (RECEIVER, 300_000),
)


@pytest.fixture(scope="module")
def apart(server: ServerProcess) -> Iterator[Apart]:
    with workers_apart(partial(complete, server), pull_timeout_s=2.0) as made:
        yield made


@pytest.mark.parametrize(("seconds", "moment"), [*((5.0, moment) for moment in MOMENTS), (60.0, "amid")])
@pytest.mark.parametrize("who", [*ROLES, "server"])
def test_a_long_silence_costs_no_token(apart: Apart, who: str, moment: str, seconds: float):
    pid = apart.server.process.pid if who == "server" else apart.worker(who)["pid"]
    asked = apart.struck(f"Silent, {who}, {moment}, {seconds}", by(signal.SIGSTOP, pid), **MOMENTS[moment])
    time.sleep(seconds)
    if who != "server":
        apart.ask(f"Meanwhile, {who}, {moment}, {seconds}").check()
    os.kill(pid, signal.SIGCONT)
    asked.check()
    apart.settle()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_killed_at_any_moment_leaves_nothing_and_the_next_one_serves(server: ServerProcess, moment: str):
    with workers_apart(partial(complete, server)) as apart:
        killed = psutil.Process(apart.server.process.pid)
        family = [killed, *killed.children(recursive=True)]
        apart.struck(f"The end, {moment}", by(signal.SIGKILL, killed.pid), **MOMENTS[moment])
        apart.server.process.wait(HANGS_S)
        until(lambda: all(map(is_gone, family)))
    with workers_apart(partial(complete, server)) as apart:
        apart.ask(f"The end, {moment} 0").check()


def strikes(apart: Apart, chooser: random.Random) -> list[Strike]:
    def signalled(number: int) -> Callable[[bytes], bytes]:
        def strike(data: bytes) -> bytes:
            pid = apart.worker(chooser.choice(ROLES))["pid"]
            if pid is not None:
                os.kill(pid, number)
                threading.Timer(chooser.uniform(0.0, 4.0), wake, [pid]).start()
            return data

        return strike

    return [cut, flip, signalled(signal.SIGKILL), signalled(signal.SIGSTOP)]


def wake(pid: int) -> None:
    if psutil.pid_exists(pid):
        os.kill(pid, signal.SIGCONT)


def test_whatever_happens_no_token_is_wrong(apart: Apart):
    chooser, ends_at = random.Random(SEED), time.monotonic() + RANDOM_S
    number = 0
    while time.monotonic() < ends_at:
        towards, after = chooser.choice(PLACES)
        apart.relay.fault(chooser.choice(strikes(apart, chooser)), towards=towards, after=after)
        asked = [apart.ask(f"{SEED}, {number}, {each}") for each in range(3)]
        for each in asked:
            each.check()
        number += 1
    apart.settle()
    assert all(worker["num_restarts"] for worker in apart.workers), f"seed {SEED}"


def test_under_load_workers_of_both_roles_are_killed_and_every_answer_is_whole():
    server = start_server("--prefill-workers", "1", "--decode-workers", "1", "--handover", "always")
    try:
        tally = Tally()
        asyncio.run(load(server, tally, num_clients=8, seconds=LOAD_S, kill_every_s=KILL_EVERY_S))
        assert not tally.wrong
        assert tally.kills >= LOAD_S / KILL_EVERY_S / 2
        until(lambda: is_idle(server))
    finally:
        ended = server.stop()
    assert ended == 0
