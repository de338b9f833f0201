"""A real redis-server on a free port for one test, and a proxy before it that keeps what it answers for a while."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.waiting import until

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None or find_spec("redis") is None,
    reason="redis-server or the package redis is not installed",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64) != b""
    except OSError:
        return False


@dataclass
class RunningRedis:
    """`options` are those of redis-server's command line."""

    folder: Path
    port: int = field(default_factory=free_port)
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [*command, "--dir", str(self.folder), *self.options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(lambda: answers(self.port))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)


@contextmanager
def running_redis(folder: Path, *options: str) -> Iterator[RunningRedis]:
    server = RunningRedis(folder, options=options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@dataclass
class SlowProxy:
    """Passes bytes on at once towards Redis, and back only while it is not held."""

    port: int
    passing: asyncio.Event


@asynccontextmanager
async def slow_proxy(to_port: int) -> AsyncIterator[SlowProxy]:
    passing = asyncio.Event()
    passing.set()
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        try:
            while piece := await reader.read(65536):
                if is_answer:
                    await passing.wait()
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", to_port)
        tasks.add(asyncio.create_task(pump(reader, to_writer, is_answer=False)))
        tasks.add(asyncio.create_task(pump(to_reader, writer, is_answer=True)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield SlowProxy(server.sockets[0].getsockname()[1], passing)
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
