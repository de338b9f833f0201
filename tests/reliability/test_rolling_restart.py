"""Two servers behind a real HAProxy are restarted one after the other under load, and no request is lost.

HAProxy with what its manual offers for this: health checks of /ready, `retry-on` for refused connections, hung-up idle
ones and the 503 of a server that drains, `option redispatch` to the other server, and whole requests in its buffer,
without which nothing can be sent a second time.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import MESSAGES
from tests.conftest import free_port
from tests.reliability.gated_server import ANSWER, GatedServer
from tests.waiting import HANGS_S, joined, until

CONFIG = """
global
    stats socket {folder}/admin mode 600 level admin
defaults
    mode http
    timeout connect 60s
    timeout client 120s
    timeout server 120s
    timeout check 60s
    retries 10
    option redispatch 1
    option http-buffer-request
    retry-on conn-failure empty-response 503
    option httpchk GET /ready
    http-check expect status 200
    default-server check inter 50ms fall 1 rise 1
frontend all
    bind fd@{fd}
    default_backend servers
backend servers
    server a 127.0.0.1:{a}
    server b 127.0.0.1:{b}
"""
haproxy = pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")


class Proxy:
    def __init__(self, folder: Path, a: int, b: int) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            config = folder / "haproxy.cfg"
            config.write_text(CONFIG.format(folder=folder, fd=listener.fileno(), a=a, b=b))
            self._process = subprocess.Popen(
                ["haproxy", "-W", "-db", "-f", str(config)], pass_fds=(listener.fileno(),), stderr=subprocess.DEVNULL
            )

    def is_up(self, server: str) -> bool:
        """As its own health check has it."""
        try:
            with socket.socket(socket.AF_UNIX) as admin:
                admin.connect(str(self._folder / "admin"))
                admin.sendall(b"show stat\n")
                table = b"".join(iter(lambda: admin.recv(65536), b"")).decode()
        except OSError:
            return False
        return any(line.startswith(f"servers,{server},") and ",UP," in line for line in table.splitlines())

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(HANGS_S)


class Clients:
    """Ask without a pause until told to stop; every other request is streamed."""

    def __init__(self, url: str, count: int) -> None:
        self.num_served = 0
        self.failures: list[str] = []
        self._url, self._stopping = url, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        number = 0
        with httpx.Client(base_url=self._url, timeout=HANGS_S) as client:
            while not self._stopping.is_set():
                number += 1
                try:
                    self._ask(client, stream=number % 2 == 0)
                except (httpx.HTTPError, AssertionError) as error:
                    self.failures.append(repr(error))

    def _ask(self, client: httpx.Client, *, stream: bool) -> None:
        body = {"model": "tiny", "messages": MESSAGES, "stream": stream}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        if stream:
            assert answer.text.endswith("data: [DONE]\n\n"), answer.text
            assert answer.text.count('"content":"x"') == len(ANSWER), answer.text
        else:
            assert answer.json()["choices"][0]["message"]["content"] == ANSWER
        self.num_served += 1

    def served_more(self, count: int) -> None:
        """Return when so many further requests were answered."""
        target = self.num_served + count
        until(lambda: self.num_served >= target or self.failures)

    def stop(self) -> None:
        self._stopping.set()
        joined(*self._threads)


@contextmanager
def two_servers() -> Iterator[dict[str, GatedServer]]:
    servers = {name: GatedServer(port=free_port(), is_open=True) for name in "ab"}
    try:
        yield servers
    finally:
        for server in servers.values():
            server.kill()


@haproxy
def test_no_request_is_lost_when_both_servers_are_restarted_in_turn(tmp_path: Path):
    with two_servers() as servers:
        proxy = Proxy(tmp_path, servers["a"].port, servers["b"].port)
        until(lambda: proxy.is_up("a") and proxy.is_up("b"))
        clients = Clients(proxy.url, 6)
        try:
            for name in "ab":
                clients.served_more(20)
                port = servers[name].port
                servers[name].signal(signal.SIGTERM)
                assert servers[name].end() == (0, "ended\n")
                clients.served_more(20)
                servers[name] = GatedServer(port=port, is_open=True)
                until(lambda name=name: proxy.is_up(name))  # type: ignore[misc]
        finally:
            clients.stop()
            proxy.stop()
    assert clients.failures == []
    assert clients.num_served >= 80
