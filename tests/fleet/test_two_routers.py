"""Two routers of one fleet behind a real HAProxy; one of them is killed, and the other has the requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ServerProcess, start_server
from tests.fleet.test_end_to_end import start_router
from tests.reliability.test_rolling_restart import Proxy, haproxy
from tests.waiting import HANGS_S, until

ASKED = {"prompt": "Once upon", "max_tokens": 4, "temperature": 0}
LONG = ASKED | {"max_tokens": 1900, "stream": True, "ignore_eos": True}
PATH = "/v1/completions"


@dataclass(slots=True)
class Behind:
    """HAProxy, and behind it two routers before one replica."""

    proxy: Proxy
    routers: dict[str, ServerProcess]
    client: httpx.Client

    def kill(self, name: str) -> None:
        os.kill(self.routers[name].process.pid, signal.SIGKILL)

    def with_stream(self) -> str:
        """The router that has one under way."""
        return next(name for name, router in self.routers.items() if self._num_in_flight(router) > 1)

    def _num_in_flight(self, router: ServerProcess) -> float:
        lines = httpx.get(router.url + "/metrics", timeout=HANGS_S).text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith("maitred_http_requests_in_flight "))


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Behind]:
    replica = start_server()
    routers = {name: start_router(replica.url) for name in "ab"}
    ports = [int(router.url.rpartition(":")[2]) for router in routers.values()]
    proxy = Proxy(tmp_path, *ports)
    try:
        until(lambda: proxy.is_up("a") and proxy.is_up("b"))
        with httpx.Client(base_url=proxy.url, timeout=HANGS_S) as client:
            yield Behind(proxy, routers, client)
    finally:
        proxy.stop()
        for each in (*routers.values(), replica):
            each.stop()


def answered(client: httpx.Client, **fields: Any) -> str:
    answer = client.post(PATH, json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@haproxy
def test_when_a_router_is_killed_the_other_has_all_that_comes_and_a_stream_of_its_is_asked_again(behind: Behind):
    expected = answered(behind.client)
    with behind.client.stream("POST", PATH, json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        killed = behind.with_stream()
        behind.kill(killed)
        with httpx.Client(base_url=behind.proxy.url, timeout=HANGS_S) as others:
            assert {answered(others) for _ in range(20)} == {expected}, "HAProxy sends nobody to the dead one twice"
        with pytest.raises(httpx.RemoteProtocolError):  # cut, and not ended as if it were whole
            list(lines)
    again = behind.client.post(PATH, json=LONG)
    assert again.text.endswith("data: [DONE]\n\n")
    until(lambda: not behind.proxy.is_up(killed))
