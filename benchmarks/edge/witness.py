"""Who watches an attack on the HTTP edge: a good client's waits, clients in processes of their own, a line of figures.

What good clients wait is told without the time in which the server, or who measures, was ready to run and other work
had the processors, so that the bounds are the same on a busy machine and on a quiet one.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple

KIB, MIB = 1024, 1024 * 1024


class Line(NamedTuple):
    """What one attack came to."""

    name: str
    figures: str
    good: bool


def in_line_s(task: str) -> float:
    """How long a thread has been ready to run and others had the processors (`schedstat` of proc(5)); 0 if not told."""
    try:
        return int(Path(f"/proc/{task}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def stopwatch(*tasks: str) -> Callable[[], float]:
    """Seconds since now, without those that these threads stood in line."""
    began, before = time.perf_counter(), sum(map(in_line_s, tasks))
    return lambda: max(0.0, time.perf_counter() - began - (sum(map(in_line_s, tasks)) - before))


@dataclass
class Visitor:
    """A good client that asks for `/health` all the while; seconds of each answer, without what others' work took."""

    url: str
    pid: int  # of the server, whose first thread has the event loop
    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def visit(self) -> None:
        web = HTTPConnection(self.url.removeprefix("http://"), timeout=30)
        while not self._stop.is_set():
            waited_s = stopwatch(str(self.pid), "thread-self")
            try:
                web.request("GET", "/health")
                answer = web.getresponse()
                answer.read()
                self.failed += answer.status != 200
            except (OSError, HTTPException):
                self.failed += 1
                web.close()
            self.seconds.append(waited_s())
            time.sleep(0.005)
        web.close()

    def p50_ms(self) -> float:
        return statistics.median(self.seconds) * 1000

    def p99_ms(self) -> float:
        return sorted(self.seconds)[math.ceil(len(self.seconds) * 0.99) - 1] * 1000

    @contextmanager
    def visiting(self) -> Iterator[None]:
        thread = threading.Thread(target=self.visit)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


def visits(url: str, pid: int, seconds: float) -> Visitor:
    visitor = Visitor(url, pid)
    with visitor.visiting():
        time.sleep(seconds)
    return visitor


@contextmanager
def client(*words: str) -> Iterator[Callable[[], str]]:
    """Clients in a process of their own, so that they do not slow down who measures; what they say, line by line."""
    asking = [sys.executable, sys.argv[0], *words]
    with subprocess.Popen(asking, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            heard = process.stdout
            assert heard.readline(), "the clients ended"
            yield lambda: heard.readline().strip()
        finally:
            process.kill()


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


@contextmanager
def served(*more: str) -> Iterator[tuple[str, int]]:
    """The built-in model, or what `more` says, in an engine of its own: its URL, and the HTTP process."""
    words = [sys.executable, "-m", "maitred", "serve", "maitred-mini", "--port", "0", "--log-level", "info", *more]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(line.split(" on ")[1].split()[0] for line in process.stderr if " on http" in line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield url, process.pid
        process.terminate()


def wait_for(condition: Callable[[], bool]) -> None:
    """Half a minute at most."""
    ends_at = time.perf_counter() + 30
    while not condition() and time.perf_counter() < ends_at:
        time.sleep(0.1)
