"""Attacks on the HTTP edge in long: ten thousand connections, slow clients of four kinds, bombs of JSON and text.

Each prints one line with its figures, and the exit code is 1 when one is out of bounds. `--share 0.05` makes a small
one in seconds. The server is a process of its own without a model (`tests.reliability.edge_server`), except for
tokenising, which the built-in model does.
"""

from __future__ import annotations

import argparse
import json
import math
import random
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

sys.path.insert(0, ".")
from maitred.config import ServerConfig
from maitred.tenancy.keys import Key, KeyRing, digest_of
from tests.conftest import copied_model
from tests.reliability import test_edge as attacks
from tests.reliability.edge_server import Attacked, attacked

KIB = 1024


class Line(NamedTuple):
    """What one attack came to."""

    name: str
    figures: str
    good: bool


@dataclass
class Visitor:
    """A good client that asks for `/health` all the while; seconds of each answer."""

    url: str
    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def visit(self) -> None:
        web = HTTPConnection(self.url.removeprefix("http://"), timeout=30)
        while not self._stop.is_set():
            began = time.perf_counter()
            try:
                web.request("GET", "/health")
                answer = web.getresponse()
                answer.read()
                self.failed += answer.status != 200
            except (OSError, HTTPException):
                self.failed += 1
                web.close()
            self.seconds.append(time.perf_counter() - began)
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


def visits(url: str, seconds: float) -> Visitor:
    visitor = Visitor(url)
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
        visitor = visits(server.url, 10)
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
    count = int((200 if kind == "slow reader" else 2000) * share)  # that server writes as fast as the loop turns
    with attacked(send_timeout_s=10.0) as server:
        server.is_well()
        calm, before = visits(server.url, 5), server.rss_bytes()
        began = time.perf_counter()
        bad = [KINDS[kind](server) for _ in range(count)]
        while server.num_files() < count and time.perf_counter() - began < 30:
            time.sleep(0.01)
        opened_s = time.perf_counter() - began
        visitor = Visitor(server.url)
        most = 0
        with visitor.visiting():
            began = time.perf_counter()
            # two are the visitor's and our own question's, the others the server's own
            while server.num_files() > 40 and time.perf_counter() - began < 120:
                most = max(most, server.rss_bytes())
                time.sleep(0.2)
        closed_s = time.perf_counter() - began
        for connection in bad:
            connection.close()
    figures = (
        f"opened in {opened_s:.1f} s, gone {closed_s:.1f} s later, {max(0, most - before) / count / KIB:.0f} KiB each; "
        f"good clients' p99 {calm.p99_ms():.1f} -> {visitor.p99_ms():.1f} ms, {visitor.failed} failed"
    )
    in_time = closed_s < (60 if kind == "slow reader" else 15)  # ten seconds, and those to open and close so many
    is_quick = visitor.p99_ms() < 2 * calm.p99_ms() + NOISE_MS
    return Line(f"{count} of kind {kind}", figures, in_time and is_quick and visitor.failed == 0)


BOMBS = {
    "lists": (b'{"model":"tiny","prompt":[', b"[],", b"[]]}"),
    "texts": (b'{"model":"tiny","prompt":[', b'"",', b'""]}'),
    "tokens": (b'{"model":"tiny","prompt":[', b"1,", b"1]}"),
    "messages": (b'{"model":"tiny","messages":[', b'{"role":""},', b"{}]}"),
    "keys": (b'{"model":"tiny","prompt":"a",', b'"a":0,', b'"a":0}'),
    "unknown": (b'{"model":"tiny","prompt":"a","x":[', b"[],", b"[]]}"),
    "escapes": (b'{"model":"tiny","prompt":"', b"\\u0061", b'"}'),
}


def bombs() -> Iterator[Line]:
    """Bodies at the default limit; how long each holds the loop is how long it keeps somebody else waiting."""
    with attacked() as server, httpx.Client(base_url=server.url, timeout=60) as web:
        server.is_well()
        limit = ServerConfig().max_body_bytes
        for name, (head, item, tail) in BOMBS.items():
            body = head + item * ((limit - len(head) - len(tail)) // len(item)) + tail
            path = "/v1/chat/completions" if name == "messages" else "/v1/completions"
            visitor = Visitor(server.url)
            with visitor.visiting():
                time.sleep(0.2)
                answer = web.post(path, content=body, headers={"content-type": "application/json"})
            longest_ms = max(visitor.seconds) * 1000
            good = answer.status_code in (200, 400, 413) and longest_ms < 1000
            yield Line(
                f"{limit // KIB // KIB} MiB of {name}",
                f"{answer.status_code}, others wait {longest_ms:.0f} ms at most",
                good,
            )


LOOP_STALL_MS = 20.0
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
        before, most, visitor = server.rss_bytes(), 0, Visitor(url)
        with attacks.opened([attacks.unread(server, body) for _ in range(count)]), visitor.visiting():
            ends_at = time.perf_counter() + seconds
            while time.perf_counter() < ends_at:
                most = max(most, server.rss_bytes())
                time.sleep(0.2)
        left = "maitred_kv_blocks_used 0.0"
        ends_at = time.perf_counter() + 30
        while left not in web.get("/metrics").text and time.perf_counter() < ends_at:
            time.sleep(0.1)
        is_free = left in web.get("/metrics").text
    figures = (
        f"{(most - before) / count / KIB:.0f} KiB each, {'every block came back' if is_free else 'blocks are lost'}; "
        f"others' p99 {visitor.p99_ms():.1f} ms, {visitor.failed} failed"
    )
    good = is_free and visitor.failed == 0 and most - before < count * 512 * KIB
    return Line(f"{count} readers of an engine's streams", figures, good)


def tokenising() -> Iterator[Line]:
    """Twenty clients send long texts without pause: such as are tokenised and told, and such as are too long; then to a
    model with so much context that all of them are tokenised.
    """
    with served() as (url, _):
        yield from _tokenising(url, "", (30_000, 500_000))
    with tempfile.TemporaryDirectory() as folder:
        copied_model(Path(folder), max_position_embeddings=LONG_CONTEXT)
        with served(folder, "--kv-cache-memory-bytes", "3GB") as (url, _):
            yield from _tokenising(url, f", context {LONG_CONTEXT}", (500_000,))


def _tokenising(url: str, where: str, sizes: tuple[int, ...]) -> Iterator[Line]:
    calm_ms = visits(url, 3).p99_ms()  # the machine's own noise
    for name in TEXTS:
        for num_chars in sizes:
            asking = [sys.executable, __file__, "--ask", f"{url} {name.replace(' ', '_')} {num_chars}"]
            visitor = Visitor(url)
            with subprocess.Popen(asking, stdout=subprocess.PIPE, text=True) as clients:
                assert clients.stdout is not None
                clients.stdout.readline()  # they have begun
                with visitor.visiting():
                    statuses = clients.stdout.readline().strip()
            p50_ms, p99_ms = visitor.p50_ms(), visitor.p99_ms()
            figures = f"others' p50 {p50_ms:.1f}, p99 {p99_ms:.1f} ms (calm {calm_ms:.1f}); {statuses}"
            good = visitor.failed == 0 and p99_ms < LOOP_STALL_MS + calm_ms
            yield Line(f"{NUM_TOKENISING} x {num_chars} of {name}{where}", figures, good)


def ask_for_tokens(url: str, name: str, num_chars: str, seconds: float = 3.0) -> None:
    """The clients, in a process of their own so that they do not slow down who measures."""
    text = TEXTS[name.replace("_", " ")]
    body = json.dumps({"prompt": (text * int(num_chars))[: int(num_chars)]}, ensure_ascii=False).encode()
    statuses: Counter[int] = Counter()
    ends_at = time.perf_counter() + seconds

    def ask() -> None:
        web = HTTPConnection(url.removeprefix("http://"), timeout=60)
        while time.perf_counter() < ends_at:
            web.request("POST", "/tokenize", body, {"content-type": "application/json"})
            answer = web.getresponse()
            answer.read()
            statuses[answer.status] += 1

    asking = [threading.Thread(target=ask) for _ in range(NUM_TOKENISING)]
    for thread in asking:
        thread.start()
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    for thread in asking:
        thread.join()
    sys.stdout.write(", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())) + "\n")


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the full numbers")
    parser.add_argument("--only", default="", help="attacks that have this in their names")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    share, only = arguments.share, arguments.only
    if arguments.ask:
        ask_for_tokens(*arguments.ask.split())
        return 0

    attacks_by_name: dict[str, Callable[[], Iterator[Line]]] = {
        "many_connections": lambda: iter((many_connections(share),)),
        **{kind.replace(" ", "_"): lambda kind=kind: iter((slow_clients(kind, share),)) for kind in KINDS},
        "engine_readers": lambda: iter((readers_of_an_engine(share),)),
        "bombs": bombs,
        "tokenising": tokenising,
        "key_timing": lambda: key_timing(int(100_000 * min(1.0, share * 10))),
    }
    good = True
    for name, attack in attacks_by_name.items():
        for line in attack() if only in name else ():
            good &= line.good
            sys.stdout.write(f"{'ok  ' if line.good else 'BAD '} {line.name}: {line.figures}\n")
            sys.stdout.flush()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
