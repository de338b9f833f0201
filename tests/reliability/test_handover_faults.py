"""A live hand-over and all that may befall it: workers that stand still or die, wires that cut and flip, strangers.

Each story happens to a greedy request and to four seeded samples at once, and both end as a lone engine ends them.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import httpx
import psutil
import pytest

from maitred.kv.wire import MAGIC, MAX_FIRST_BYTES, PREFIX
from tests.conftest import ServerProcess, start_server
from tests.kv.relay import RECEIVER, SOURCE, Relay, Strike, cut, flip
from tests.reliability import faulty_server
from tests.reliability.test_hosts import text_of
from tests.waiting import HANGS_S, is_gone, until

MODEL = "maitred-mini"
STORY = "The maître d' decides who is seated next, keeps every table full, and knows the regulars. " * 4
KINDS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "n": 4})
MOMENTS: dict[str, dict[str, Any]] = {
    "before": {"towards": SOURCE, "after": b"Pull"},
    "amid": {"towards": RECEIVER, "after": 20_000},
    "after": {"towards": SOURCE, "after": b"Release"},
}
ROLES = ("prefill", "decode")
# Each role and each moment; the other pairs are for `make soak`.
WHO_AND_WHEN = [
    ("prefill", "before"),
    ("decode", "amid"),
    ("prefill", "after"),
    pytest.param("decode", "before", marks=pytest.mark.soak),
    pytest.param("prefill", "amid", marks=pytest.mark.soak),
    pytest.param("decode", "after", marks=pytest.mark.soak),
]
Alone = Callable[[dict[str, Any]], list[Any]]
"""What an engine says to a body that nothing happens to."""


def complete(server: ServerProcess, body: dict[str, Any], request_id: str = "") -> list[Any]:
    headers = {"x-request-id": request_id} if request_id else {}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        return [text for _, text in sorted(text_of(answer.text).items())]
    choices: list[Any] = answer.json()["choices"]
    return choices


@dataclass
class Asked:
    """The same of two servers; `answers` are those of the one that things happen to."""

    answers: list[Future[list[Any]]]
    expected: list[Future[list[Any]]]

    @property
    def is_done(self) -> bool:
        return all(answer.done() for answer in self.answers)

    def check(self) -> None:
        for answer, expected in zip(self.answers, self.expected, strict=True):
            assert answer.result(HANGS_S) == expected.result(HANGS_S)


@dataclass
class Apart:
    """A prefill and a decode worker, between them a relay; beside them an engine that is alone."""

    server: ServerProcess
    alone: Alone
    relay: Relay
    pool: ThreadPoolExecutor
    kinds: tuple[dict[str, Any], ...] = KINDS

    def body(self, title: str, **kind: Any) -> dict[str, Any]:
        return {"model": MODEL, "prompt": f"{title}. {STORY}", "max_tokens": 48, "ignore_eos": True, **kind}

    def ask(self, title: str) -> Asked:
        bodies = [self.body(f"{title} {number}", **kind) for number, kind in enumerate(self.kinds)]
        both = (partial(complete, self.server), self.alone)
        return Asked(*([self.pool.submit(ask, body) for body in bodies] for ask in both))

    def struck(self, title: str, strike: Strike, **where: Any) -> Asked:
        """Those during whose transfers it happened."""
        fault = self.relay.fault(strike, **where)
        for number in count():
            asked = self.ask(f"{title} {number}")
            until(lambda: fault.struck.is_set() or asked.is_done)  # noqa: B023
            if fault.struck.is_set():
                return asked
            asked.check()  # on a busy machine one of them was silent, so nothing moved
        raise AssertionError

    def worker(self, role: str) -> dict[str, Any]:
        (found,) = (worker for worker in self.workers if worker["role"] == role)
        return found

    @property
    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.server.url}/admin/roles").json()["workers"]
        return found

    def settle(self) -> None:
        """Everybody is there, and nothing is left: no request, no lease, no reservation, no block."""
        until(lambda: all(worker["alive"] and not in_use(worker) for worker in self.workers))

    def dropped(self, reason: str) -> float:
        return self.figure(f'kv_dropped_total{{reason="{reason}",tier="peer"}}')

    def figure(self, name: str) -> float:
        return figure_of(self.server, name)


def figure_of(server: ServerProcess, name: str) -> float:
    """Of /metrics; 0 for what was not counted yet."""
    told = httpx.get(f"{server.url}/metrics").text.partition(f"\nmaitred_{name} ")[2]
    return float(told.split("\n")[0] or 0)


def in_use(worker: dict[str, Any]) -> int:
    return int(worker["num_running"] + worker["num_waiting"] + worker["num_blocks_used"])


def by(number: int, pid: int) -> Strike:
    """Bytes pass; the process gets a signal."""

    def strike(data: bytes) -> bytes:
        os.kill(pid, number)
        return data

    return strike


@dataclass
class Hold:
    """Bytes pass when the test says so."""

    goes_on: threading.Event

    def __call__(self, data: bytes) -> bytes:
        self.goes_on.wait(HANGS_S)
        return data


@contextmanager
def workers_apart(alone: Alone, *, pull_timeout_s: float = 4.0) -> Iterator[Apart]:
    relay = Relay()
    words = ("--prefill-workers", "1", "--decode-workers", "1", "--handover", "always")
    words += ("--kv-transport", "tcp", "--kv-lease-s", "0.5")
    with ThreadPoolExecutor(16) as pool:
        server = start_server(*words, command=faulty_server.command(relay.port, pull_timeout_s))
        made = Apart(server, alone, relay, pool)
        made.settle()
        yield made
        if server.process.poll() is None:
            assert server.stop() == 0
        relay.close()


@pytest.fixture(scope="module")
def apart(server: ServerProcess) -> Iterator[Apart]:
    with workers_apart(partial(complete, server)) as made:
        yield made


@pytest.mark.parametrize(("role", "moment"), WHO_AND_WHEN)
def test_a_worker_that_stands_still_costs_no_token_and_the_other_answers_alone(apart: Apart, role: str, moment: str):
    pid = apart.worker(role)["pid"]
    asked = apart.struck(f"Stand still, {role}, {moment}", by(signal.SIGSTOP, pid), **MOMENTS[moment])
    until(lambda: not apart.worker(role)["alive"])
    apart.ask(f"Meanwhile, {role}, {moment}").check()
    os.kill(pid, signal.SIGCONT)
    asked.check()
    apart.settle()
    assert apart.worker(role)["pid"] == pid


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_that_stands_still_costs_no_token(apart: Apart, moment: str):
    pid = apart.server.process.pid
    asked = apart.struck(f"Stand still, server, {moment}", by(signal.SIGSTOP, pid), **MOMENTS[moment])
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    os.kill(pid, signal.SIGCONT)
    asked.check()
    apart.settle()


@pytest.mark.parametrize(("role", "moment"), WHO_AND_WHEN)
def test_a_worker_that_is_killed_costs_no_token(apart: Apart, role: str, moment: str):
    pid = apart.worker(role)["pid"]
    apart.struck(f"Killed, {role}, {moment}", by(signal.SIGKILL, pid), **MOMENTS[moment]).check()
    until(lambda: apart.worker(role)["pid"] not in (pid, None))
    apart.settle()


def test_late_frames_of_a_worker_that_was_killed_reach_nobody(apart: Apart):
    pid, late = apart.worker("prefill")["pid"], []

    def kill(data: bytes) -> bytes:
        late.append(data)
        os.kill(pid, signal.SIGKILL)
        return data

    apart.struck("Killed in a piece", kill, after=b"Piece").check()
    apart.settle()
    before = apart.dropped("old_epoch")
    apart.struck("Late frames", lambda data: late[0] + data, after=b"Piece").check()
    until(lambda: apart.dropped("old_epoch") > before)
    apart.settle()


@pytest.mark.parametrize(("fault", "reason"), [(cut, "cut"), (flip, "damaged")])
def test_what_is_cut_or_damaged_in_mid_layer_is_computed_again_and_counted(apart: Apart, fault: Strike, reason: str):
    before = apart.dropped(reason)
    apart.struck(f"On the way: {reason}", fault, after=20_000).check()
    until(lambda: apart.dropped(reason) > before)
    apart.settle()


def test_a_lease_that_expires_while_it_is_read_costs_no_token(apart: Apart):
    hold = Hold(threading.Event())
    asked = apart.struck("Slowly", hold, after=20_000)
    until(lambda: not in_use(apart.worker("prefill")))
    hold.goes_on.set()
    asked.check()
    apart.settle()


@pytest.mark.parametrize(
    "place",
    [
        "a token",
        pytest.param(b"Ask", marks=pytest.mark.soak),
        b"Pull",
        pytest.param(20_000, marks=pytest.mark.soak),
        b"Release",
    ],
)
def test_who_leaves_at_any_moment_is_computed_no_longer_and_leaves_nothing(apart: Apart, place: Any):
    hold, whole = Hold(threading.Event()), apart.figure('requests_finished_total{reason="length"}')
    after = place.encode() if isinstance(place, str) else place  # no message has that name
    fault = apart.relay.fault(hold, towards=RECEIVER if isinstance(place, int) else SOURCE, after=after)
    body = {**apart.body(f"Leaving at {place!r}", **KINDS[1]), "max_tokens": 1500, "stream": True}
    with httpx.stream("POST", f"{apart.server.url}/v1/completions", json=body, timeout=HANGS_S) as left:
        lines = left.iter_lines()  # kept, for its end is that of the answer
        next(lines)
        until(lambda: fault.struck.is_set() or place == "a token")
    until(lambda: not in_use(apart.worker("decode")))
    hold.goes_on.set()
    apart.settle()
    assert apart.figure('requests_finished_total{reason="length"}') == whole


STRANGE = {
    "pickle": pickle.dumps(print) * 20,
    "oversized": PREFIX.pack(MAGIC, MAX_FIRST_BYTES + 1),
    "a pickle in a frame": PREFIX.pack(MAGIC, 40) + pickle.dumps(os.system).ljust(40, b"."),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


def test_strangers_at_a_worker_s_socket_are_shown_the_door_and_nobody_else_notices(apart: Apart):
    for port in [port for role in ROLES for port in listening(apart.worker(role)["pid"])]:
        for sent in STRANGE.values():
            with socket.create_connection(("127.0.0.1", port), HANGS_S) as sock:
                sock.sendall(sent)
                while read(sock):
                    pass
    apart.ask("Strangers were here").check()
    until(lambda: sum("a peer that pulls KV" in line for line in apart.server.lines) >= 2 * len(STRANGE))
    apart.settle()


def listening(pid: int) -> list[int]:
    """Ports."""
    listeners = (each for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN)
    return [each.laddr.port for each in listeners]


def read(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionResetError:
        return b""


def test_a_server_killed_amid_a_transfer_leaves_no_process(apart: Apart):
    server = psutil.Process(apart.server.process.pid)
    family = [server, *server.children(recursive=True)]
    asked = apart.struck("The end", by(signal.SIGKILL, server.pid), after=20_000)
    assert all(isinstance(answer.exception(HANGS_S), httpx.TransportError) for answer in asked.answers)
    apart.server.process.wait(HANGS_S)
    until(lambda: all(map(is_gone, family)))
