"""Attacks on the edge in long: connections, slow clients, large bodies of text and tensors, grammars, calls left early.

    python benchmarks/soak_edge.py [--share 0.05] [--only NAME]

Each prints one line with its figures; the exit code is 1 when one is out of bounds. `--share 0.05` makes a small one
in seconds. The server is a process of its own: without a model (`tests.reliability.edge_server`), with the built-in
model for grammars, or with tensor models. What good clients wait is told without
the time in which the server, or the measuring thread, was ready to run and other work had the processors, so that the
bounds are the same on a busy machine and on a quiet one.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import psutil
from harness import served
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from maitred.api.grpc.inference import InferenceService
from maitred.api.grpc.server import HealthService, ModelService, PredictionService
from maitred.api.tensor.extensions import Extensions
from maitred.config import ServerConfig
from maitred.tenancy.keys import Key, KeyRing, digest_of
from maitred.tensor.protocol_fields import MESSAGES
from tests.conftest import free_port, start_server
from tests.reliability import test_edge as attacks
from tests.reliability.edge_server import Attacked, attacked
from tests.reliability.grammar_bombs import BOMBS as GRAMMARS
from tests.tensor.models import model_of, write_model

KIB, MIB = 1024, 1024 * 1024
LIMIT = ServerConfig().max_body_bytes


class Line(NamedTuple):
    """What one attack came to."""

    name: str
    figures: str
    good: bool


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


# ---- a good client


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


# ---- connections


def many_connections(share: float) -> Iterator[Line]:
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
    yield Line(f"{idle} idle and {streaming} streaming connections", figures, good)


NOISE_MS = 10.0  # of one p99 against another, on a machine with other work
SLOW: dict[str, Callable[[Attacked], socket.socket]] = {
    kind.__name__: kind for kind in (attacks.silent, attacks.slow_head, attacks.slow_body, attacks.slow_reader)
}


def slow_clients(share: float) -> Iterator[Line]:
    for kind in SLOW:
        yield slow_clients_of(kind, int((60 if kind == "slow_reader" else 2000) * share))


def slow_clients_of(kind: str, count: int) -> Line:
    with attacked(send_timeout_s=10.0) as server:
        server.is_well()
        calm, before = visits(server.url, server.process.pid, 5), server.rss_bytes()
        began = time.perf_counter()
        bad = [SLOW[kind](server) for _ in range(count)]
        while server.num_files() < count and time.perf_counter() - began < 30:
            time.sleep(0.01)
        visitor, most = Visitor(server.url, server.process.pid), 0
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
        f"gone {closed_s:.1f} s later, {max(0, most - before) / max(1, count) / KIB:.0f} KiB each; "
        f"good clients' p99 {calm.p99_ms():.1f} -> {visitor.p99_ms():.1f} ms, {visitor.failed} failed"
    )
    if kind == "slow_reader":  # while it writes to them, the loop is as busy as with any so many streams
        is_quick, is_bounded = visitor.p99_ms() < 100 and closed_s < 60, most - before < count * MIB
    else:  # ten seconds, and those to open and close so many
        is_quick, is_bounded = visitor.p99_ms() < 2 * calm.p99_ms() + NOISE_MS and closed_s < 15, True
    return Line(f"{count} of kind {kind}", figures, is_quick and is_bounded and visitor.failed == 0)


# ---- large bodies


class Body(NamedTuple):
    """`head`, as many items as the limit has room for, `tail`; COUNT in the tail is how many."""

    path: str
    head: bytes
    item: bytes
    tail: bytes

    def content(self) -> bytes:
        count = (LIMIT - len(self.head) - len(self.tail) - 8) // len(self.item)
        return self.head + self.item * count + self.tail.replace(b"COUNT", str(count + 1).encode())


PROMPT = b'{"model":"tiny","prompt":'
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT_BODIES = {
    "lists": Body(COMPLETE, PROMPT + b"[", b"[],", b"[]]}"),
    "texts": Body(COMPLETE, PROMPT + b"[", b'"",', b'""]}'),
    "tokens": Body(COMPLETE, PROMPT + b"[", b"1,", b"1]}"),
    "messages": Body(CHAT, b'{"model":"tiny","messages":[', b'{"role":""},', b"{}]}"),
    "keys": Body(COMPLETE, PROMPT + b'"a",', b'"a":0,', b'"a":0}'),
    "unknown": Body(COMPLETE, PROMPT + b'"a","x":[', b"[],", b"[]]}"),
    "escapes": Body(COMPLETE, PROMPT + b'"', b"\\u0061", b'"}'),
    "stop tokens": Body(COMPLETE, PROMPT + b'"a","stop_token_ids":[', b"300,", b"1]}"),
    "numbers in vain": Body(COMPLETE, PROMPT + b'"a",', b'"top_p":1e300%b,' % (b" " * 20), b'"top_p":2}'),
}
INFER, PREDICT = "/v2/models/any/infer", "/v1/models/any:predict"
INPUT, SHAPE = b'{"inputs":[{"name":"IN","datatype":"FP32","data":[', b'],"shape":[1,COUNT]}]}'
ELEMENTS = {
    "flat": b"0.25",
    "digits": b"0.12345678",
    "powers": b"1e300",
    "not finite": b"NaN",
    "pairs": b"[1,2]",
    "deep": b"[" * 100 + b"1" + b"]" * 100,
    "empty": b"[]",
    "objects": b"{}",
    "no texts": b'""',
}
TEXT = b'"' + b"x" * 90 + b'"'
TENSOR_BODIES = {
    **{name: Body(INFER, INPUT, each + b",", each + SHAPE) for name, each in ELEMENTS.items()},
    "many texts": Body("/v2/models/text/infer", INPUT.replace(b"FP32", b"BYTES"), TEXT + b",", TEXT + SHAPE),
    "dimensions": Body(INFER, INPUT + b'1],"shape":[', b"4611686018427387904,", b"9]}]}"),
    "columns": Body(PREDICT, b'{"inputs":[[', b"0.25,", b"0.25]]}"),
    "instances": Body(PREDICT, b'{"instances":[', b"[0.25,1.5],", b"[0.25,1.5]]}"),
    "named rows": Body(PREDICT, b'{"instances":[', b'{"IN":[%b]},' % b",".join([b"0.5"] * 1000), b'{"IN":[0.5]}]}'),
    "named numbers": Body(PREDICT, b'{"instances":[', b'{"IN":1.5},', b'{"IN":1.5}]}'),
    "index": Body("/v2/repository/index", b'{"x":[', b"[],", b"[]]}"),
}
LONGEST_MS = {"text": 150.0, "tensor": 200.0}
NUM_TRIES = 3  # a thread that has the lock of Python may be in line too, which no figure of the loop's thread tells


def bodies(kind: str, url: str, pid: int) -> Iterator[Line]:
    """How long each holds the event loop is how long it keeps another client waiting."""
    for name in TEXT_BODIES if kind == "text" else TENSOR_BODIES:
        asking = [sys.executable, sys.argv[0], "--send", url, name]  # so that it does not slow down the measuring one
        for _ in range(NUM_TRIES):
            visitor = Visitor(url, pid)
            with visitor.visiting():
                status = subprocess.run(asking, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1]
            longest_ms = max(visitor.seconds) * 1000
            good = not status.startswith("5") and visitor.failed == 0 and longest_ms < LONGEST_MS[kind]
            if good:
                break
        yield Line(f"{LIMIT // MIB} MiB of {name}", f"{status}, others wait {longest_ms:.0f} ms at most", good)


def send_body(url: str, name: str) -> None:
    body = (TEXT_BODIES | TENSOR_BODIES)[name]
    content = body.content()
    with httpx.Client(base_url=url, timeout=600) as web:
        say("begun")
        time.sleep(0.2)  # so that the good client is there before
        say(web.post(body.path, content=content, headers={"content-type": "application/json"}).status_code)


def text_bodies(share: float) -> Iterator[Line]:
    with attacked() as server:
        server.is_well()
        yield from bodies("text", server.url, server.process.pid)


# ---- tensor calls

WAYS = ("at once", "after its message", "amid answers", "half closed", "channel", "late")
LATE_S = 0.05
WAITS = "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 300000 }"


def tensors(share: float) -> Iterator[Line]:
    """Every gRPC call left in every way, then large bodies; server and engine must stay the same processes."""
    port = free_port()
    with tempfile.TemporaryDirectory() as root:
        write_model(Path(root), "add", config=WAITS)
        write_model(Path(root), "any", config="max_batch_size: 4194304", model=echo(TensorProto.FLOAT))
        write_model(Path(root), "text", config="max_batch_size: 8", model=echo(TensorProto.STRING))
        server = start_server("none", "--model-repository", root, "--grpc-port", str(port))
        engines = psutil.Process(server.process.pid).children()
        num_left = asyncio.run(leave_all(f"127.0.0.1:{port}", max(1, int(10 * share))))
        yield from bodies("tensor", server.url, server.process.pid)
        lives = server.process.poll() is None and psutil.Process(server.process.pid).children() == engines
        good = server.stop() == 0 and lives
    yield Line(f"{num_left} gRPC calls left early", f"the server {'lives' if lives else 'has ended'}", good)


def echo(kind: int) -> Any:
    ends = [helper.make_tensor_value_info(name, kind, ("n", "m")) for name in ("IN", "OUT")]
    return model_of(helper.make_graph([helper.make_node("Identity", ["IN"], ["OUT"])], "echo", ends[:1], ends[1:]))


async def leave_all(address: str, times: int) -> int:
    app: Any = None  # names of methods need none
    services = (InferenceService(app, Extensions("", None)), PredictionService(app), ModelService(app))
    paths = [f"/{each.name}/{method}" for each in (*services, HealthService(app, ())) for method in each.methods]
    message = MESSAGES["ModelInferRequest"](model_name="add")
    for name in ("INPUT0", "INPUT1"):
        message.inputs.add(name=name, datatype="FP32", shape=[1, 16]).contents.fp32_contents.extend([1.0] * 16)
    asks = message.SerializeToString()
    for _ in range(times):
        for way in WAYS:
            await asyncio.gather(*(leave(address, p, asks if p.endswith("Infer") else b"", way) for p in paths))
    return times * len(WAYS) * len(paths)


async def leave(address: str, path: str, content: bytes, way: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(path)(timeout=LATE_S if way == "late" else None)
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError, asyncio.InvalidStateError):
            if way != "at once":
                await call.write(content)
                await call.write(content)
            if way == "amid answers":
                await asyncio.wait_for(call.read(), 1)
            if way == "half closed":
                await call.done_writing()
            if way == "late":
                await call.code()
        if way == "channel":
            await channel.close()
        call.cancel()


# ---- grammars

NUM_STREAMS, QUIET_S, ANSWERED_S, GAP_MS = 8, 4.0, 6.0, 100.0
MESSAGES_ASKED = [{"role": "user", "content": "What can I eat?"}]
PLAIN = {"messages": MESSAGES_ASKED, "ignore_eos": True, "max_tokens": 1500, "temperature": 1, "stream": True}


def grammars(share: float) -> Iterator[Line]:
    """How long each hostile grammar takes to be answered, and the longest gap of eight plain streams meanwhile."""
    longest_ms, done = [0.0], threading.Event()

    def stream_on(url: str) -> None:
        while not done.is_set():
            with httpx.stream("POST", url + CHAT, json=PLAIN, timeout=60) as answer:
                told_at = time.perf_counter()
                for _ in answer.iter_raw():
                    now = time.perf_counter()
                    longest_ms[0], told_at = max(longest_ms[0], (now - told_at) * 1000), now
                    if done.is_set():
                        return

    def longest() -> float:
        told, longest_ms[0] = longest_ms[0], 0.0
        return told

    with served("maitred-mini") as server, httpx.Client(base_url=server.url, timeout=60) as web:
        ask = {"messages": MESSAGES_ASKED, "max_tokens": 20}
        web.post(
            CHAT, json={**ask, "response_format": {"type": "json_object"}}
        ).raise_for_status()  # begins its process
        threads = [threading.Thread(target=stream_on, args=(server.url,)) for _ in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        time.sleep(QUIET_S / 4)
        longest()
        time.sleep(QUIET_S)
        calm_ms = longest()
        for name, asked in GRAMMARS.items():
            began = time.perf_counter()
            status = web.post(CHAT, json={**ask, **asked}).status_code
            took_s, gap_ms = time.perf_counter() - began, longest()
            figures = f"{status} after {took_s:.2f} s, longest gap {gap_ms:.0f} ms (calm {calm_ms:.0f})"
            yield Line(f"grammar {name}", figures, took_s < ANSWERED_S and gap_ms < calm_ms + GAP_MS and status < 500)
        done.set()
        for thread in threads:
            thread.join()


# ---- keys

SECRET_BYTES = 32


def key_timing(share: float) -> Iterator[Line]:
    """Wrong keys that share 0 to 31 leading bytes with the right one: does the time rise or fall with how many?

    The same of a comparison that leaves at the first wrong byte, to show that it would be seen.
    """
    num_samples, secret = int(100_000 * min(1.0, share * 10)), b"k" * SECRET_BYTES
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

    Keys come in random order, all made alike and before any is sent, so that nothing but the likeness differs. The
    slowest twentieth of each number of bytes is left out: those are the machine's other work.
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
    points = [
        (float(shared), ns) for shared, all_ns in enumerate(samples) for ns in sorted(all_ns)[: int(len(all_ns) * 0.95)]
    ]
    x, y = zip(*points, strict=True)
    slope, intercept = statistics.linear_regression(x, y)
    rest = sum((ns - intercept - slope * shared) ** 2 for shared, ns in points) / (len(points) - 2)
    return slope, math.sqrt(rest / (statistics.pvariance(x) * len(points)))


ATTACKS: dict[str, Callable[[float], Iterator[Line]]] = {
    attack.__name__: attack
    for attack in (*(many_connections, slow_clients, text_bodies, tensors, grammars, key_timing),)
}


def main() -> int:
    if sys.argv[1:2] == ["--send"]:
        send_body(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of the full numbers")
    parser.add_argument("--only", default="", help=f"attacks that have this in their names: {', '.join(ATTACKS)}")
    arguments = parser.parse_args()
    good = True
    for name, attack in ATTACKS.items():
        for line in attack(arguments.share) if arguments.only in name else ():
            good &= line.good
            say(f"{'ok  ' if line.good else 'BAD '} {line.name}: {line.figures}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
