"""Readers of a real engine's streams that read nothing, ten bytes a second, or all that comes."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import httpx
import psutil
from edge.witness import KIB, MIB, Line, Visitor, client, say, served, wait_for

from tests.reliability import test_edge as attacks
from tests.reliability.edge_server import Attacked


def readers_of_an_engine(share: float, seconds: float = 60.0) -> Line:
    """Streams with twenty log-probabilities a token, of which nobody reads a byte; then everybody leaves."""
    count = int(2000 * share)
    with served() as (url, pid), httpx.Client(base_url=url, timeout=60) as web:
        model = web.get("/v1/models").json()["data"][0]["id"]
        fields = {"model": model, "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        body = json.dumps({**fields, "logprobs": 20}).encode()
        server = Attacked(cast(Any, SimpleNamespace(pid=pid)), int(url.rsplit(":", 1)[1]))
        before, most, visitor = server.rss_bytes(), 0, Visitor(url, pid)
        with attacks.opened([attacks.unread(server, body) for _ in range(count)]), visitor.visiting():
            ends_at = time.perf_counter() + seconds
            while time.perf_counter() < ends_at:
                most = max(most, server.rss_bytes())
                time.sleep(0.2)
        left = "maitred_kv_blocks_used 0.0"
        wait_for(lambda: left in web.get("/metrics").text)
        is_free = left in web.get("/metrics").text
    figures = (
        f"{(most - before) / count / KIB:.0f} KiB each, {'every block came back' if is_free else 'blocks are lost'}; "
        f"others' p99 {visitor.p99_ms():.1f} ms, {visitor.failed} failed"
    )
    good = is_free and visitor.failed == 0 and most - before < count * 512 * KIB
    return Line(f"{count} readers of an engine's streams", figures, good)


# So many bytes of events that neither the kernel nor the connection holds them all.
READ_FIELDS: dict[str, Any] = {
    "prompt": "Once",
    "max_tokens": 300,
    "n": 2,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 20,
}


class Read(NamedTuple):
    """What readers of an engine's streams came to."""

    num_tokens: int
    seconds: float  # until the engine had all of them
    processor_s: float  # of the server and the engine
    here_bytes: float  # the server's memory, for each reader
    kernel_bytes: float
    is_free: bool  # then no block was held
    num_there: int  # then had not read all
    newcomer_s: float  # then, for five tokens
    num_left: int  # answers under way after everybody had gone
    visitor: Visitor

    def figures(self) -> str:
        return (
            f"{self.num_tokens / self.seconds:.0f} tokens/s, {self.num_tokens / self.processor_s:.0f} in a second of "
            f"processor time; then {'every block is free' if self.is_free else 'blocks are held'}, {self.num_there} "
            f"still read, and a newcomer's five tokens take {self.newcomer_s * 1000:.0f} ms; "
            f"{self.here_bytes / KIB:.0f} KiB each here, {self.kernel_bytes / KIB:.0f} in the kernel; "
            f"others' p99 {self.visitor.p99_ms():.1f} ms, {self.visitor.failed} failed, {self.num_left} left"
        )


def slow_readers_of_an_engine(share: float) -> Iterator[Line]:
    """Clients that read ten bytes a second of what a real engine writes, and quick ones to compare with."""
    count = max(1, int(200 * share))
    quick, slow = readers_of("quick", count), readers_of("slow", count)
    for kind, read in (("quick", quick), ("slow", slow)):
        goes_on = read.is_free and read.num_left + read.visitor.failed == 0 and read.processor_s < 2 * quick.processor_s
        is_bounded = read.here_bytes < 512 * KIB + 4 * MIB / count and read.kernel_bytes < 640 * KIB
        good = goes_on and is_bounded and read.num_there == (0 if kind == "quick" else count)
        yield Line(f"{count} {kind} readers of an engine's streams", read.figures(), good)


def readers_of(kind: str, count: int) -> Read:
    with served("--send-timeout-s", "600") as (url, pid), httpx.Client(base_url=url, timeout=60) as web:
        server = Attacked(cast(Any, SimpleNamespace(pid=pid)), int(url.rsplit(":", 1)[1]))
        model = web.get("/v1/models").json()["data"][0]["id"]
        seconds_for(web, model)
        visitor, here, kernel = Visitor(url, pid), [server.rss_bytes()], [0]
        with client(f"--read-{kind}", url, model, str(count)), visitor.visiting():
            began, before_s = time.perf_counter(), processor_s(pid)
            while num_finished(web) < 2 * count + 1 and time.perf_counter() - began < 600:
                here.append(server.rss_bytes())
                kernel.append(num_queued(server.port))
                time.sleep(0.2)
            seconds, spent_s = time.perf_counter() - began, processor_s(pid) - before_s
            if kind == "quick":  # they have it soon
                wait_for(lambda: server.in_flight() == 0)
            is_free, num_there = "maitred_kv_blocks_used 0.0" in web.get("/metrics").text, server.in_flight()
            newcomer_s = seconds_for(web, model)
        wait_for(lambda: server.in_flight() == 0)
        return Read(
            2 * count * READ_FIELDS["max_tokens"],
            seconds,
            spent_s,
            (max(here) - here[0]) / count,
            max(kernel) / count,
            is_free,
            num_there,
            newcomer_s,
            server.in_flight(),
            visitor,
        )


def seconds_for(web: httpx.Client, model: str) -> float:
    began = time.perf_counter()
    body = {"model": model, "prompt": "Once", "max_tokens": 5, "ignore_eos": True}
    web.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - began


def processor_s(pid: int) -> float:
    """Of the server and its engine."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def num_finished(web: httpx.Client) -> int:
    page = web.get("/metrics").text
    return int(float(page.split('maitred_requests_finished_total{reason="length"} ')[1].split("\n")[0]))


def num_queued(port: int) -> int:
    """Bytes that the kernel keeps for those who are connected to `port`."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].split(":")[0], 16) for row in rows if int(row[1].split(":")[1], 16) == port)


def readers(url: str, model: str, count: str) -> list[socket.socket]:
    server = Attacked(cast(Any, None), int(url.rsplit(":", 1)[1]))
    body = json.dumps({"model": model, **READ_FIELDS}).encode()
    connections = [attacks.unread(server, body) for _ in range(int(count))]
    for connection in connections:
        connection.setblocking(False)
    say("begun")
    return connections


def read_slowly(url: str, model: str, count: str) -> None:
    """Until the process is ended."""
    connections = readers(url, model, count)
    while True:
        for connection in select.select(connections, [], [], 0)[0]:
            connection.recv(10)
        time.sleep(1.0)


def read_quickly(url: str, model: str, count: str) -> None:
    connections = readers(url, model, count)
    while True:
        for connection in select.select(connections, [], [])[0]:
            if not connection.recv(1 << 20):
                connections.remove(connection)


CLIENTS: dict[str, Callable[..., None]] = {"--read-slow": read_slowly, "--read-quick": read_quickly}
