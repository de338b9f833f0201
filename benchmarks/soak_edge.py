"""Attacks on the HTTP edge in long: ten thousand connections, slow clients of four kinds, bombs of JSON and text.

Each prints one line with its figures, and the exit code is 1 when one is out of bounds. `--share 0.05` makes a small
one in seconds. The server is a process of its own without a model (`tests.reliability.edge_server`), except for
tokenising and for readers of an engine's streams, where it serves the built-in model.

What good clients wait is told without the time in which the server, or who measures, was ready to run and other work
had the processors, so that the bounds are the same on a busy machine and on a quiet one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import httpx
import psutil

sys.path.insert(0, ".")
from maitred.config import ServerConfig
from maitred.tenancy.keys import Key, KeyRing, digest_of
from tests.conftest import copied_model
from tests.reliability import test_edge as attacks
from tests.reliability.edge_server import Attacked, attacked

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


def many_connections(share: float) -> Line:
    idle, streaming = int(9000 * share), int(1000 * share)
    with attacked(header_timeout_s=600, sse_keep_alive_s=5.0) as server:
        server.is_well()
        before = server.rss_bytes()
        held = [attacks.connect(server) for _ in range(idle)]
        held += [attacks.ask(server, "hold") for _ in range(streaming)]
        while server.in_flight() < streaming:
            time.sleep(0.1)
        each = (server.rss_bytes() - before) / (idle + streaming)
        visitor = visits(server.url, server.process.pid, 10)
        for connection in held:
            connection.close()
    good = each < 60 * KIB and visitor.failed == 0 and visitor.p99_ms() < 100
    figures = f"{each / KIB:.1f} KiB each, /health p99 {visitor.p99_ms():.1f} ms, {visitor.failed} failed"
    return Line(f"{idle} idle and {streaming} streaming connections", figures, good)


NOISE_MS = 10.0  # of one p99 against another, on a machine with other work
KINDS: dict[str, Callable[[Attacked], socket.socket]] = {
    "silent": attacks.silent,
    "slow head": attacks.slow_head,
    "slow body": attacks.slow_body,
    "slow reader": attacks.slow_reader,
}


def slow_clients(kind: str, share: float) -> Line:
    count = int((60 if kind == "slow reader" else 2000) * share)  # that server writes as fast as the loop turns
    with attacked(send_timeout_s=10.0) as server:
        server.is_well()
        calm, before = visits(server.url, server.process.pid, 5), server.rss_bytes()
        began = time.perf_counter()
        bad = [KINDS[kind](server) for _ in range(count)]
        while server.num_files() < count and time.perf_counter() - began < 30:
            time.sleep(0.01)
        opened_s = time.perf_counter() - began
        visitor = Visitor(server.url, server.process.pid)
        most = 0
        with visitor.visiting():
            closing_s = stopwatch(str(server.process.pid))
            # two are the visitor's and our own question's, the others the server's own
            while server.num_files() > 40 and closing_s() < 60:
                most = max(most, server.rss_bytes())
                time.sleep(0.2)
            closed_s = closing_s()
        for connection in bad:
            connection.close()
    figures = (
        f"opened in {opened_s:.1f} s, gone {closed_s:.1f} s later, {max(0, most - before) / count / KIB:.0f} KiB each; "
        f"good clients' p99 {calm.p99_ms():.1f} -> {visitor.p99_ms():.1f} ms, {visitor.failed} failed"
    )
    if kind == "slow reader":  # while it writes to them, the loop is as busy as with any so many streams
        is_quick, is_bounded = visitor.p99_ms() < 100 and closed_s < 60, most - before < count * MIB
    else:  # ten seconds, and those to open and close so many
        is_quick, is_bounded = visitor.p99_ms() < 2 * calm.p99_ms() + NOISE_MS and closed_s < 15, True
    return Line(f"{count} of kind {kind}", figures, is_quick and is_bounded and visitor.failed == 0)


BOMBS = {
    "lists": (b'{"model":"tiny","prompt":[', b"[],", b"[]]}"),
    "texts": (b'{"model":"tiny","prompt":[', b'"",', b'""]}'),
    "tokens": (b'{"model":"tiny","prompt":[', b"1,", b"1]}"),
    "messages": (b'{"model":"tiny","messages":[', b'{"role":""},', b"{}]}"),
    "keys": (b'{"model":"tiny","prompt":"a",', b'"a":0,', b'"a":0}'),
    "unknown": (b'{"model":"tiny","prompt":"a","x":[', b"[],", b"[]]}"),
    "escapes": (b'{"model":"tiny","prompt":"', b"\\u0061", b'"}'),
}


LONGEST_MS = 200.0


def bombs() -> Iterator[Line]:
    """Bodies at the default limit; how long each holds the loop is how long it keeps somebody else waiting."""
    with attacked() as server:
        server.is_well()
        for name in BOMBS:
            visitor = Visitor(server.url, server.process.pid)
            with client("--send", server.url, name) as sender, visitor.visiting():
                status = sender()
            longest_ms = max(visitor.seconds) * 1000
            good = status in ("200", "400", "413") and visitor.failed == 0 and longest_ms < LONGEST_MS
            size = f"{ServerConfig().max_body_bytes // KIB // KIB} MiB of {name}"
            yield Line(size, f"{status}, others wait {longest_ms:.0f} ms at most", good)


def send_bomb(url: str, name: str) -> None:
    head, item, tail = BOMBS[name]
    limit = ServerConfig().max_body_bytes
    body = head + item * ((limit - len(head) - len(tail)) // len(item)) + tail
    path = "/v1/chat/completions" if name == "messages" else "/v1/completions"
    with httpx.Client(base_url=url, timeout=600) as web:
        say("begun")
        time.sleep(0.2)  # so that somebody else is there before
        say(web.post(path, content=body, headers={"content-type": "application/json"}).status_code)


@contextmanager
def client(*words: str) -> Iterator[Callable[[], str]]:
    """Clients in a process of their own, so that they do not slow down who measures; what they say, line by line."""
    asking = [sys.executable, __file__, *words]
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


LOOP_STALL_MS = 20.0
NUM_TRIES = 5  # a thread that has Python's lock may be in line too, which no figure of the loop's thread tells
LONG_CONTEXT = 1_000_000
TEXTS = {"a": "a", "an emoji": "\U0001f468", "letters": "qwfpgjluyarstdhneiozxcvbkm", "words": "the cat sat on a mat. "}
NUM_TOKENISING = 20


@contextmanager
def served(*more: str) -> Iterator[tuple[str, int]]:
    """The built-in model, or what `more` says, in an engine of its own: its URL, and the HTTP process."""
    words = [sys.executable, "-m", "maitred", "serve", "--port", "0", "--log-level", "info", *more]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(line.split(" on ")[1].split()[0] for line in process.stderr if " on http" in line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield url, process.pid
        process.terminate()


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
        is_bounded = read.here_bytes < 512 * KIB and read.kernel_bytes < 640 * KIB
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


def wait_for(condition: Callable[[], bool]) -> None:
    """Half a minute at most."""
    ends_at = time.perf_counter() + 30
    while not condition() and time.perf_counter() < ends_at:
        time.sleep(0.1)


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


def tokenising() -> Iterator[Line]:
    """Twenty clients send long texts without pause: such as are tokenised and told, and such as are too long; then to a
    model with so much context that all of them are tokenised.
    """
    with served() as (url, pid):
        yield from _tokenising(url, pid, "", (30_000, 500_000))
    with tempfile.TemporaryDirectory() as folder:
        copied_model(Path(folder), max_position_embeddings=LONG_CONTEXT)
        with served(folder, "--kv-cache-memory-bytes", "3GB") as (url, pid):
            yield from _tokenising(url, pid, f", context {LONG_CONTEXT}", (500_000,))


def _tokenising(url: str, pid: int, where: str, sizes: tuple[int, ...]) -> Iterator[Line]:
    calm_ms = visits(url, pid, 3).p99_ms()  # the machine's own noise
    for name in TEXTS:
        for num_chars in sizes:
            for _ in range(NUM_TRIES):
                visitor = Visitor(url, pid)
                with client("--ask", url, name, str(num_chars)) as clients, visitor.visiting():
                    statuses = clients()
                p50_ms, p99_ms = visitor.p50_ms(), visitor.p99_ms()
                good = visitor.failed == 0 and p99_ms < LOOP_STALL_MS + calm_ms
                if good:
                    break
            figures = f"others' p50 {p50_ms:.1f}, p99 {p99_ms:.1f} ms (calm {calm_ms:.1f}); {statuses}"
            yield Line(f"{NUM_TOKENISING} x {num_chars} of {name}{where}", figures, good)


def ask_for_tokens(url: str, name: str, num_chars: str, seconds: float = 3.0) -> None:
    body = json.dumps({"prompt": (TEXTS[name] * int(num_chars))[: int(num_chars)]}, ensure_ascii=False).encode()
    statuses: Counter[int] = Counter()
    ends_at = time.perf_counter() + seconds

    def ask() -> None:
        web = HTTPConnection(url.removeprefix("http://"), timeout=600)  # a busy machine takes its time for so many
        while time.perf_counter() < ends_at:
            web.request("POST", "/tokenize", body, {"content-type": "application/json"})
            answer = web.getresponse()
            answer.read()
            statuses[answer.status] += 1

    asking = [threading.Thread(target=ask) for _ in range(NUM_TOKENISING)]
    for thread in asking:
        thread.start()
    say("begun")
    for thread in asking:
        thread.join()
    say(", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())))


SECRET_BYTES = 32


def key_timing(num_samples: int) -> Iterator[Line]:
    """Wrong keys that share 0 to 31 leading bytes with the right one: does the time rise or fall with how many?

    The same of a comparison that leaves at the first wrong byte, to show that it would be seen.
    """
    secret = b"k" * SECRET_BYTES
    ring = KeyRing([Key(id="a", tenant="t", digest=digest_of(secret), admin=False)])

    def leaves_early(sent: bytes) -> bool:
        return all(one == other for one, other in zip(sent, secret, strict=True))

    slope, error = trend_of_time(ring.find, secret, num_samples)
    figures = f"{slope:+.3f} ns for each byte, standard error {error:.3f}, t = {slope / error:.2f}"
    yield Line(f"{num_samples} wrong keys, 0 to 31 of 32 bytes right", figures, abs(slope / error) < 4.5)
    slope, error = trend_of_time(leaves_early, secret, num_samples // 10)
    figures = f"{slope:+.1f} ns for each byte, t = {slope / error:.0f}: it would be seen"
    yield Line(f"{num_samples // 10} of them, by a comparison that leaves early", figures, slope / error > 4.5)


def trend_of_time(find: Callable[[bytes], object], secret: bytes, num_samples: int) -> tuple[float, float]:
    """Slope, in ns for each leading byte that is right, of the line through all times, and its standard error.

    Keys come in random order, all made alike and before any is sent, so that nothing but the likeness differs (making
    one between two measurements showed as 1.6 ns for each byte). Of each number of bytes
    the slowest twentieth is left out: those are the machine's other work.
    """
    chooser = random.Random(5)
    samples: list[list[float]] = [[] for _ in range(len(secret))]
    keys: list[tuple[int, bytes]] = []
    for _ in range(num_samples):
        shared, noise = chooser.randrange(len(secret)), bytes(chooser.choices(b"abcdefghij", k=len(secret)))
        keys.append((shared, bytes((*secret[:shared], *noise[shared:]))))
    for shared, wrong in keys:
        began = time.perf_counter_ns()
        find(wrong)
        samples[shared].append(float(time.perf_counter_ns() - began))
    points = [(float(shared), ns) for shared, all_ns in enumerate(samples) for ns in quickest(all_ns)]
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*points, strict=True))
    spread_x = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread_x
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points) / (len(points) - 2)
    return slope, math.sqrt(rest / spread_x)


def quickest(all_ns: list[float]) -> list[float]:
    return sorted(all_ns)[: int(len(all_ns) * 0.95)]


CLIENTS: dict[str, Callable[..., None]] = {
    "--send": send_bomb,
    "--ask": ask_for_tokens,
    "--read-slow": read_slowly,
    "--read-quick": read_quickly,
}


def main() -> int:
    if sys.argv[1:] and sys.argv[1] in CLIENTS:
        CLIENTS[sys.argv[1]](*sys.argv[2:])
        return 0

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the full numbers")
    parser.add_argument("--only", default="", help="attacks that have this in their names")
    arguments = parser.parse_args()
    share, only = arguments.share, arguments.only

    attacks_by_name: dict[str, Callable[[], Iterator[Line]]] = {
        "many_connections": lambda: iter((many_connections(share),)),
        **{kind.replace(" ", "_"): lambda kind=kind: iter((slow_clients(kind, share),)) for kind in KINDS},
        "slow_engine_readers": lambda: slow_readers_of_an_engine(share),
        "engine_readers": lambda: iter((readers_of_an_engine(share),)),
        "bombs": bombs,
        "tokenising": tokenising,
        "key_timing": lambda: key_timing(int(100_000 * min(1.0, share * 10))),
    }
    good = True
    for name, attack in attacks_by_name.items():
        for line in attack() if only in name else ():
            good &= line.good
            say(f"{'ok  ' if line.good else 'BAD '} {line.name}: {line.figures}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
