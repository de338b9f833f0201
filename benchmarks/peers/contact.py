"""Starts contenders: a worker process that is asked cells over pipes, or a server that is asked over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from peers.entries import Entry, Server
from peers.http_load import run_http_loop

BENCHMARKS = Path(__file__).resolve().parents[1]
REPLY_LIMIT_S, READY_LIMIT_S = 900.0, 600.0
END_LIMIT_S = 30.0


class Worker:
    """A contender's process; `first_token_s` is from its launch to its first token.

    Raises RuntimeError when it ends or says nothing for 15 minutes; what it printed is in `log`.
    """

    def __init__(self, entry: Entry, log: Path, **sizes: int) -> None:
        began = time.perf_counter()
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(entry.python), "-m", "peers.worker", str(entry.module), json.dumps(sizes | entry.options)],
                cwd=BENCHMARKS,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(entry),
            )
        self._read()
        self.first_token_s = time.perf_counter() - began

    def ask(self, between: Callable[[], None] | None = None, **cell: Any) -> dict[str, Any]:
        """`between` is called whenever the worker pauses in the middle of a cell."""
        self._write(json.dumps(cell))
        while (reply := self._read()).get("pause"):
            if between is not None:
                between()
            self._write("")
        return reply

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        limit = threading.Timer(REPLY_LIMIT_S, self._process.kill)
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            raise RuntimeError(f"its process ended with {self._process.wait()}: {last_line(self._log)}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        _end(self._process)


class Served:
    """A contender that is a server alone, asked over HTTP what others are asked over pipes."""

    def __init__(self, server: Server, port: int, process: int, began: float) -> None:
        self._server, self._port, self._process = server, port, process
        self._run([list(range(400, 416))], 1)
        self.first_token_s = time.perf_counter() - began

    def _run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, float]:
        return run_http_loop(self._port, "bench", prompts, len(prompts), num_tokens, self._server.dialect)

    def ask(
        self,
        between: Callable[[], None] = lambda: None,
        *,
        cell: str,
        prompts: Sequence[Sequence[int]],
        num_tokens: int = 1,
        **_: Any,
    ) -> dict[str, Any]:
        if cell == "memory":
            idle = resident_mb(self._process)
            self._run(prompts, num_tokens)
            return {"peak_mb": idle, "used_mb": resident_mb(self._process)}
        between()
        figures = self._run(prompts, num_tokens)
        between()
        if cell == "prefill":
            return {"first_s": figures["ttft_p50"]}
        if not figures["together"]:
            raise RuntimeError(f"its first request ended before the last of {len(prompts)} had a token")
        return {"segments_s": [[len(prompts) / figures["together"]]]}


def resident_mb(process: int) -> float:
    """Of the process and those that it started, each with what they share."""
    found = 0
    for each in [process, *map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]:
        status = Path(f"/proc/{each}/status").read_text()
        found += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    return found / 1024


class Workers:
    """Processes for cells: a fresh one each time."""

    def __init__(self, logs: Path) -> None:
        logs.mkdir(exist_ok=True)
        self._logs = logs

    def log(self, entry: Entry) -> Path:
        return self._logs / f"{entry.name}.log"

    @contextmanager
    def working(self, entry: Entry, **sizes: int) -> Iterator[Worker | Served]:
        if entry.module is None:
            assert entry.server is not None
            began = time.perf_counter()
            with serving(entry, sizes["sequences"], sizes["context"], self.log(entry)) as (port, process):
                yield Served(entry.server, port, process, began)
            return
        worker = Worker(entry, self.log(entry), **{name: sizes[name] for name in entry.sizes if name in sizes})
        try:
            yield worker
        finally:
            worker.close()


@contextmanager
def serving(entry: Entry, clients: int, context: int, log: Path) -> Iterator[tuple[int, int]]:
    """The contender's server, ready, for so many requests of at most `context` tokens; its port and its process."""
    assert entry.server is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*entry.server.command, *entry.server.slots(clients, context), "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=BENCHMARKS, stdout=output, stderr=output, env=_environment(entry), process_group=0
        )
    try:
        _wait_until_ready(port, entry.server.ready, process, log)
        yield port, process.pid
    finally:
        process.terminate()
        _end(process)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the server left behind


def last_line(log: Path) -> str:
    """What a contender said last, for messages."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:300] if lines else 'it printed nothing'} ({log})"


def _environment(entry: Entry) -> dict[str, str]:
    programs = f"{entry.python.parent}{os.pathsep}{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, "PATH": programs}  # modules are compiled once, as an installed package's are


def _wait_until_ready(port: int, path: str, process: subprocess.Popen[bytes], log: Path) -> None:
    began = time.monotonic()
    while time.monotonic() - began < READY_LIMIT_S:
        if process.poll() is not None:
            raise RuntimeError(f"its server ended with {process.returncode}: {last_line(log)}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # not listening yet, or loading
        finally:
            connection.close()
        time.sleep(0.05)
    raise RuntimeError(f"its server was not ready within {READY_LIMIT_S:g} s: {last_line(log)}")


def _end(process: subprocess.Popen[Any]) -> None:
    try:
        process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
