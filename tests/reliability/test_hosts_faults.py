"""Workers on hosts of their own behind a router: in each phase of a transfer one stands still, dies, is out of reach.

Each story happens to streams and to whole answers, greedy and seeded, one and four at once; all end as a lone engine's.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.conftest import ServerProcess, free_port, start_server
from tests.fleet.test_end_to_end import RealFleet, real_fleet
from tests.kv.relay import Relay, Strike, cut
from tests.reliability import faulty_server
from tests.reliability.test_handover_faults import (
    MOMENTS,
    ROLES,
    STORY,
    WHO_AND_WHEN,
    Alone,
    Apart,
    by,
    complete,
    figure_of,
)
from tests.waiting import HANGS_S, until

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "stream": True},
    {"temperature": 0.9, "seed": 5, "n": 4, "stream": True},
    {"temperature": 0.9, "seed": 6},
    {"temperature": 0, "n": 4},
)


@dataclass
class Hosts(Apart):
    """A prefill and a decode worker, each a server of its own; `server` is the router before them."""

    kinds: tuple[dict[str, Any], ...] = KINDS
    hosts: dict[str, ServerProcess] = field(default_factory=dict)  # by role
    begins: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the words of each
    fleet: RealFleet | None = None
    pull_timeout_s: float = 1.0

    @property
    def workers(self) -> list[dict[str, Any]]:
        asked = [httpx.get(f"{host.url}/admin/roles") for host in self.hosts.values()]
        return [worker for answer in asked for worker in answer.json()["workers"]]

    def settle(self) -> None:
        """The router knows both again, and nobody has anything of anyone: no request, lease, reservation, block."""
        assert self.fleet is not None
        until(lambda: self.fleet.states == ["ready"] * len(ROLES))
        until(lambda: len(self.fleet.client.get("/admin/roles").json()["workers"]) == len(ROLES))
        super().settle()
        view = self.fleet.view()
        assert view["held"] == sum(replica["in_flight"] for replica in view["replicas"]) == 0
        for host in self.hosts.values():
            tiers = httpx.get(f"{host.url}/admin/kv").json()["tiers"]
            assert [tier["waiting_blocks"] for tier in tiers] == [0] * len(tiers)

    def figure(self, name: str) -> float:
        """Of both."""
        return sum(figure_of(host, name) for host in self.hosts.values())

    def stands_still(self, role: str) -> list[psutil.Process]:
        """All processes of a host."""
        server = psutil.Process(self.hosts[role].process.pid)
        return [server, *server.children(recursive=True)]

    def begin_again(self, role: str) -> None:
        """After it was killed, at the same address."""
        assert self.fleet is not None
        gone = self.hosts[role]
        gone.process.wait(HANGS_S)
        command = faulty_server.command(self.relay.port, self.pull_timeout_s)
        self.hosts[role] = start_server(*self.begins[role], command=command)
        self.fleet.replicas[self.fleet.replicas.index(gone)] = self.hosts[role]


def stopped(processes: list[psutil.Process]) -> Strike:
    def strike(data: bytes) -> bytes:
        for process in processes:
            process.suspend()
        return data

    return strike


@contextmanager
def hosts_apart(folder: Path, alone: Alone) -> Iterator[Hosts]:
    relay = Relay()
    token = ("--fleet-token-file", str(folder / "token"))
    worker = ("--kv-listen", "127.0.0.1:0", "--kv-transport", "tcp", "--kv-lease-s", "0.5")
    flags = {role: (*token, "--role", role, *worker, "--port", str(free_port())) for role in ROLES}
    router = ("--handover", "always", "--silence-s", "1.5")
    command = faulty_server.command(relay.port, Hosts.pull_timeout_s)
    with ThreadPoolExecutor(16) as pool, real_fleet(folder, list(flags.values()), *router, command=command) as fleet:
        hosts = dict(zip(ROLES, fleet.replicas, strict=True))
        made = Hosts(fleet.router, alone, relay, pool, hosts=hosts, begins=flags, fleet=fleet)
        made.settle()
        yield made
    relay.close()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, server: ServerProcess) -> Iterator[Hosts]:
    with hosts_apart(tmp_path_factory.mktemp("hosts"), partial(complete, server)) as made:
        yield made


@pytest.mark.parametrize("seconds", [0.0, pytest.param(60.0, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("role", "moment"), WHO_AND_WHEN)
def test_a_host_that_stands_still_costs_no_token_and_is_not_waited_for(hosts, role, moment, seconds):
    still = hosts.stands_still(role)
    try:
        hosts.struck(f"Stands still, {role}, {moment}, {seconds}", stopped(still), **MOMENTS[moment]).check()
        time.sleep(seconds)
    finally:  # or every test after a failure would wait for this host
        for process in still:
            process.resume()
    hosts.settle()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "moment", [pytest.param("before", marks=pytest.mark.soak), "amid", pytest.param("after", marks=pytest.mark.soak)]
)
def test_a_host_that_is_killed_costs_no_token(hosts: Hosts, role: str, moment: str):
    pid = hosts.hosts[role].process.pid
    hosts.struck(f"Killed, {role}, {moment}", by(signal.SIGKILL, pid), **MOMENTS[moment]).check()
    hosts.begin_again(role)
    hosts.settle()


def knows_of_kv(hosts: Hosts) -> bool:
    """Whether the router was told of a prefix that some host has."""
    assert hosts.fleet is not None
    return any(replica["prefix_keys"] for replica in hosts.fleet.view()["replicas"])


@pytest.mark.parametrize("strike", [bytes, pytest.param(cut, marks=pytest.mark.soak)])
def test_a_turn_whose_kv_lies_at_another_host_is_fetched_from_there_first(hosts: Hosts, strike: Strike):
    for host in hosts.hosts.values():  # nobody has measured a transfer
        host.process.kill()
    hosts.begin_again("decode")
    assert hosts.fleet is not None
    until(lambda: hosts.fleet.states.count("ready") == 1)
    first = {**hosts.body(f"A turn, {strike.__name__}", temperature=0), "max_tokens": 64, "stream": True}
    first["prompt"] = first["prompt"] * 12  # takes several times as long to compute as to fetch
    told = hosts.alone(first)
    until(lambda: complete(hosts.server, first) == told and knows_of_kv(hosts))
    hosts.begin_again("prefill")
    hosts.settle()
    before = hosts.dropped("cut")
    hosts.relay.fault(strike, after=100_000)
    second = {**first, "prompt": f"{first['prompt']}{told[0]} And then? {STORY}"}
    name = f"second-turn-{strike.__name__}"
    assert complete(hosts.server, second, name) == hosts.alone(second)
    (choice,) = hosts.fleet.client.get(f"/admin/fleet/choices/{name}").json()["choices"]
    prefill, decode = (urlsplit(hosts.hosts[role].url).netloc for role in ROLES)
    assert choice["ways"][0]["name"] == f"{prefill} > {decode} < {decode}"
    if strike is cut:
        until(lambda: hosts.dropped("cut") > before)
    else:
        assert figure_of(hosts.hosts["prefill"], 'kv_tier_hit_tokens_total{tier="peer"}') > len(first["prompt"]) / 10
    hosts.settle()
