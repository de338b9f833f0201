"""Attacks on the HTTP edge in long: ten thousand connections, slow clients of four kinds, bombs of JSON and text.

Each prints one line with its figures, and the exit code is 1 when one is out of bounds. `--share 0.05` makes a small
one in seconds. The server is a process of its own without a model (`tests.reliability.edge_server`), except for
tokenising and for readers of an engine's streams, where it serves the built-in model.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import httpx

sys.path.insert(0, ".")
from edge.keys import key_timing
from edge.readers import CLIENTS as READERS
from edge.readers import readers_of_an_engine, slow_readers_of_an_engine
from edge.witness import KIB, MIB, Line, Visitor, client, say, served, stopwatch, visits

from maitred.config import ServerConfig
from tests.conftest import copied_model
from tests.reliability import test_edge as attacks
from tests.reliability.edge_server import Attacked, attacked


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
    "stop tokens": (b'{"model":"tiny","prompt":"a","stop_token_ids":[', b"300,", b"1]}"),
    "numbers in vain": (
        b'{"model":"tiny","prompt":"a",',
        b'"top_p":1e300%b,' % (b" " * 20),
        b'"top_p":2}',
    ),  # as many as texts may be
}


LONGEST_MS = 150.0


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


LOOP_STALL_MS = 20.0
NUM_TRIES = 5  # a thread that has Python's lock may be in line too, which no figure of the loop's thread tells
LONG_CONTEXT = 1_000_000
TEXTS = {"a": "a", "an emoji": "\U0001f468", "letters": "qwfpgjluyarstdhneiozxcvbkm", "words": "the cat sat on a mat. "}
NUM_TOKENISING = 20


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


CLIENTS: dict[str, Callable[..., None]] = {"--send": send_bomb, "--ask": ask_for_tokens, **READERS}


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
