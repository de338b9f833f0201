"""The router's own cost: processor time of a whole answer and of a streamed chunk, and the latency that it adds.

In front of replicas that cost nothing: they answer every completion with the same 1 KB, or 64 chunks at once. Clients,
replicas and router are processes of their own; the router's processor time is read from the system, which other work on
the machine changes less than a rate. Peers take turns where they are there: `--setup` installs them into the folder
`--work`, HAProxy is taken from the path.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import httptools
import psutil
import uvloop

MODEL = "m"
NUM_CHUNKS = 64
PACE_S = 0.004  # between two chunks of a stream, so that each is an event of its own on its way
TEXT = "The old captain looked at the sea and said nothing for a while. " * 12  # 1 KB of body
WHOLE = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * 700}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 200, "completion_tokens": 150, "total_tokens": 350},
    }
).encode()
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" sea"},"finish_reason":null}]}\n\n'
)
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CARDS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "nobody"}]}).encode()


def whole(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class Replica(asyncio.Protocol):
    """Answers without looking."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._streams = b"", False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._streams = url, False

    def on_body(self, body: bytes) -> None:
        self._streams = self._streams or b'"stream": true' in body or b'"stream":true' in body

    def on_message_complete(self) -> None:
        write = self._transport.write  # type: ignore[attr-defined]
        if self._path == b"/v1/models":
            write(whole(CARDS))
        elif not self._path.startswith((b"/v1/chat", b"/health")):
            write(whole(b'{"error":"none"}', "404 Not Found"))
        elif self._streams:
            write(SSE_HEAD)
            self._next(0)
        else:
            write(whole(WHOLE))

    def _next(self, number: int) -> None:
        if self._transport.is_closing():
            return
        last = number + 1 == NUM_CHUNKS
        self._transport.write(chunk(EVENT) + (chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n" if last else b""))  # type: ignore[attr-defined]
        if not last:
            asyncio.get_running_loop().call_later(PACE_S, self._next, number + 1)


def run_replicas(ports: list[int]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for port in ports:
            await loop.create_server(Replica, "127.0.0.1", port, backlog=1024)
        await asyncio.Event().wait()

    uvloop.run(main())


class Client(asyncio.Protocol):
    """One connection, one request after another; `done` hears the seconds to the first byte of each answer."""

    def __init__(self, request: bytes, done: Callable[[Client, float], None]) -> None:
        self._request, self._done = request, done
        self._parser = httptools.HttpResponseParser(self)
        self._first: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def ask(self) -> None:
        self._began, self._first = time.perf_counter(), None
        self._transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if self._first is None:
            self._first = time.perf_counter() - self._began
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        assert self._parser.get_status_code() == 200, self._parser.get_status_code()
        self._done(self, self._first or 0.0)

    def connection_lost(self, exc: Exception | None) -> None:
        assert not self._transport.get_extra_info("socket") or exc is None, exc


CHAT = "/v1/chat/completions"


def request_of(port: int, fields: Mapping[str, Any], path: str = CHAT) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nuser-agent: bench\r\naccept: */*\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def whole_of(number: int, *, stream: bool = False) -> dict[str, Any]:
    """What a client asks for."""
    return {"model": MODEL, "messages": [{"role": "user", "content": f"{number} {TEXT}"}], "stream": stream}


def stream_of(number: int) -> dict[str, Any]:
    return whole_of(number, stream=True)


async def load(
    port: int,
    num_clients: int,
    num_answers: int,
    asks: Callable[[int], Mapping[str, Any]],
    rate: float | None = None,
    *,
    path: str = CHAT,
) -> list[float]:
    """Seconds to the first byte of each; `asks` has the fields by the client's number, a `rate` is an open loop's."""
    loop = asyncio.get_running_loop()
    seconds: list[float] = []
    left = num_answers - num_clients
    end = loop.create_future()
    idle: asyncio.Queue[Client] = asyncio.Queue()

    def done(client: Client, first: float) -> None:
        nonlocal left
        seconds.append(first)
        if len(seconds) == num_answers:
            end.set_result(None)
        elif rate is not None:
            idle.put_nowait(client)
        elif left > 0:
            left -= 1
            client.ask()

    clients = []
    for number in range(num_clients):
        request = request_of(port, asks(number), path=path)
        _, client = await loop.create_connection(lambda r=request: Client(r, done), "127.0.0.1", port)
        clients.append(client)
    if rate is None:
        for client in clients:
            client.ask()
    else:
        for client in clients:
            idle.put_nowait(client)
        began = loop.time()
        for number in range(num_answers):
            await asyncio.sleep(max(0.0, began + number / rate - loop.time()))
            (await idle.get()).ask()
    await asyncio.wait_for(end, 120)
    for client in clients:
        client._transport.close()
    return seconds


# -- routers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def maitred(work: Path, port: int, replicas: list[int]) -> list[str]:
    urls = [f"http://127.0.0.1:{p}" for p in replicas]
    return [sys.executable, "-m", "maitred", "route", *urls, "--port", str(port), "--log-level", "warning"]


def sglang(work: Path, port: int, replicas: list[int]) -> list[str] | None:
    python = work / "sglang" / "bin" / "python"
    if not python.exists():
        return None
    urls = [f"http://127.0.0.1:{p}" for p in replicas]
    words = ["-m", "sglang_router.launch_router", "--worker-urls", *urls, "--policy", "cache_aware"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warn", "--prometheus-port", str(free_port())]
    return [str(python), *words]


def haproxy(work: Path, port: int, replicas: list[int]) -> list[str] | None:
    if shutil.which("haproxy") is None:
        return None
    servers = "".join(f"  server s{p} 127.0.0.1:{p}\n" for p in replicas)
    path = work / "haproxy.cfg"
    path.write_text(
        "global\n  nbthread 1\ndefaults\n  mode http\n  timeout connect 1s\n  timeout client 60s\n"
        "  timeout server 60s\n"
        f"  http-reuse always\nfrontend f\n  bind 127.0.0.1:{port}\n  default_backend b\nbackend b\n"
        f"  balance leastconn\n{servers}"
    )
    return ["haproxy", "-f", str(path)]


PEERS: dict[str, Callable[[Path, int, list[int]], list[str] | None]] = {
    "maitred": maitred,
    "sglang-router": sglang,
    "haproxy": haproxy,
}


def set_up(work: Path) -> None:
    """What is not on the path, into an environment of its own."""
    subprocess.run([sys.executable, "-m", "venv", str(work / "sglang")], check=True)
    pip = [str(work / "sglang/bin/python"), "-m", "pip", "install", "-q", "sglang-router==0.3.2"]
    subprocess.run(pip, check=True)


@contextmanager
def running(command: list[str], port: int) -> Iterator[psutil.Process]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_well(port)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


def _wait_until_well(port: int) -> None:
    """Until a completion is answered."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode(),
        headers={"content-type": "application/json"},
    )
    ends_at = time.monotonic() + 40
    while time.monotonic() < ends_at:
        with suppress(OSError):
            if urllib.request.urlopen(request, timeout=5).status == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"nobody answers on port {port}")


def cpu_s(process: psutil.Process) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in [process, *process.children(recursive=True)])


class Figures(NamedTuple):
    whole_us: float  # processor time of an answer
    chunk_us: float
    p50_ms: float  # to the first byte, at half the load that one client process makes
    p99_ms: float
    rss_mb: float


def measure(process: psutil.Process, port: int, num_answers: int) -> Figures:
    uvloop.run(load(port, 32, num_answers // 4, whole_of))  # warm
    began, cpu = time.perf_counter(), cpu_s(process)
    uvloop.run(load(port, 32, num_answers, whole_of))
    whole_s, rate = cpu_s(process) - cpu, num_answers / (time.perf_counter() - began)
    cpu, num_streams = cpu_s(process), max(32, num_answers // 16)
    uvloop.run(load(port, 32, num_streams, stream_of))
    stream_us = (cpu_s(process) - cpu) / num_streams * 1e6
    whole_us = whole_s / num_answers * 1e6
    firsts = uvloop.run(load(port, 64, num_answers, whole_of, rate / 2))
    cut = quantiles(firsts, n=100)
    rss = sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
    return Figures(whole_us, (stream_us - whole_us) / NUM_CHUNKS, median(firsts) * 1e3, cut[98] * 1e3, rss / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "bench_route")
    parser.add_argument("--setup", action="store_true")
    parser.add_argument("--peers", default="maitred,sglang-router,haproxy")
    parser.add_argument("--answers", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.setup:
        set_up(options.work)
    replicas = [free_port() for _ in range(4)]
    serving = multiprocessing.get_context("fork").Process(target=run_replicas, args=(replicas,), daemon=True)
    serving.start()
    for port in replicas:
        _wait_until_well(port)
    direct = uvloop.run(load(replicas[0], 16, options.answers, whole_of, 1000.0))
    print(f"straight to a replica, 1,000 a second: first byte after {median(direct) * 1e3:.2f} ms (median)")
    titles = ("whole us", "chunk us", "p50 ms", "p99 ms", "RSS MB")
    print(" " * 16 + "".join(f"{title:>10}" for title in titles) + f"   load {os.getloadavg()[0]:.1f}")
    for _ in range(options.rounds):
        for name in options.peers.split(","):
            port = free_port()
            peer = PEERS[name](options.work, port, replicas)
            if peer is None:
                print(f"{name:16} is not there; --setup installs it")
                continue
            with running(peer, port) as process:
                print(f"{name:16}" + "".join(f"{value:10.2f}" for value in measure(process, port, options.answers)))


if __name__ == "__main__":
    main()
