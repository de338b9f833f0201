"""Deadlines and limits of one connection, on a loop whose time the test turns and a transport that only remembers."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import tomllib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import uvicorn
from packaging.specifiers import SpecifierSet
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from maitred.api.http import connection
from maitred.api.http.connection import (
    MAX_FRAMING_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MAX_PIPELINED_BYTES,
    MIN_BODY_BYTES_PER_S,
    GuardedConnection,
)
from maitred.api.serving import create_app
from maitred.config import ServerConfig
from tests.conftest import ROOT
from tests.fakes_api import FakeReplica, make_model

GET = b"GET /version HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@dataclass
class Timer:
    at: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Task:
    def add_done_callback(self, done: Callable[[Any], None]) -> None:
        """It is never done."""


@dataclass
class FakeLoop:
    now: float = 0.0
    timers: list[Timer] = field(default_factory=list)
    num_requests: int = 0

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> Timer:
        self.timers.append(Timer(self.now + seconds, partial(call, *arguments)))
        return self.timers[-1]

    def create_task(self, answering: Coroutine[Any, Any, None]) -> Task:
        answering.close()
        self.num_requests += 1
        return Task()

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [timer for timer in self.timers if not timer.cancelled and timer.at <= until]:
            timer = min(due, key=lambda timer: timer.at)
            self.timers.remove(timer)
            self.now = max(self.now, timer.at)
            timer.call()
        self.now = until

    @property
    def num_waiting(self) -> int:
        return sum(not timer.cancelled for timer in self.timers)


@dataclass
class FakeTransport:
    written: bytes = b""
    num_writes: int = 0
    closed: bool = False
    aborted: bool = False
    num_buffered: int = 0  # bytes

    def get_write_buffer_size(self) -> int:
        return self.num_buffered

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else None

    def write(self, data: bytes) -> None:
        self.written += data
        self.num_writes += 1

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class World:
    """A connection just made."""

    def __init__(self, num_others: int = 0, **limits: Any) -> None:
        app = create_app(FakeReplica(), make_model(), ServerConfig(**limits))
        self.loop, self.transport = FakeLoop(), FakeTransport()
        state = ServerState()
        state.connections |= {object() for _ in range(num_others)}  # type: ignore[arg-type]
        config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_keep_alive=75)
        self.connection = GuardedConnection(
            app.app.config, app.routes.format, lambda status: None, config, state, {}, self.loop
        )  # type: ignore[arg-type]
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def send(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.connection.data_received(data)

    def trickle(self, data: bytes, every_s: float) -> None:
        """A byte at a time."""
        for byte in data:
            self.send(bytes([byte]))
            self.loop.advance(every_s)

    @property
    def status(self) -> int | None:
        """Of the answer below the application."""
        return int(self.transport.written.split(b" ")[1]) if self.transport.written else None

    @property
    def code(self) -> str:
        return str(json.loads(self.transport.written.partition(b"\r\n\r\n")[2])["error"]["code"])

    def answered(self) -> None:
        """As when the application ended its answer."""
        self.connection.cycle.response_started = self.connection.cycle.response_complete = True
        self.connection.on_response_complete()


def test_who_connects_and_says_nothing_is_hung_up_on():
    world = World()
    world.loop.advance(9.9)
    assert not world.transport.closed
    world.loop.advance(0.2)
    assert world.transport.closed
    assert world.status is None


@pytest.mark.parametrize("head", [GET + b"x-a: " + b"b" * 100, b"\r\n" * 100, b"G", POST[:20] * 3])
def test_a_head_that_comes_a_byte_a_second_is_answered_408_after_its_time(head):
    world = World()
    world.trickle(head, 1.0)
    world.loop.advance(10.0)
    assert world.transport.closed
    assert (world.status, world.code) == (408, "request_too_slow")
    assert world.loop.now < 10.0 + len(head) + 10.0
    assert world.loop.num_requests == 0


def test_a_body_that_comes_a_byte_a_second_is_answered_408_after_its_time():
    world = World()
    world.send(POST + b"content-length: 1000\r\n\r\n")
    assert world.loop.num_requests == 1
    world.trickle(b"x" * 9, 1.0)
    assert not world.transport.closed
    world.loop.advance(1.1)
    assert (world.status, world.code, world.transport.closed) == (408, "request_too_slow", True)


def test_a_large_body_gets_the_time_that_it_needs_and_one_that_we_do_not_take_all_of_it():
    world = World()
    world.send(POST + b"content-length: %d\r\n\r\n" % (100 * MIN_BODY_BYTES_PER_S))
    for _ in range(99):
        world.loop.advance(1.0)
        world.send(b"x" * MIN_BODY_BYTES_PER_S)
        world.connection.flow.resume_reading()  # as the application does when it takes what came
    assert not world.transport.is_closing()
    world.send(b"x" * MIN_BODY_BYTES_PER_S)
    assert world.loop.num_waiting == 0, "it is whole, so nothing is waited for"
    world = World()
    world.send(POST + b"content-length: 1000000\r\n\r\n" + b"x" * 100_000)  # reading pauses until it is taken
    world.loop.advance(100.0)
    assert not world.transport.is_closing()


def test_a_request_that_comes_whole_leaves_no_timer_and_a_stray_line_end_cuts_no_answer():
    world = World()
    world.send(GET + b"\r\n")
    assert world.loop.num_waiting == 0
    world.loop.advance(1000.0)
    assert not world.transport.is_closing(), "its answer may take as long as it takes"
    world = World()
    world.send(POST + b"content-length: 2\r\n\r\n{}")
    world.send(b"\r\n")
    world.loop.advance(500.0)
    assert not world.transport.is_closing()
    assert world.transport.written == b""


def test_a_second_request_has_the_same_deadline_and_an_idle_connection_is_kept_for_a_while():
    world = World()
    world.send(GET + b"\r\n")
    world.answered()
    world.loop.advance(50.0)
    world.send(GET)
    world.loop.advance(10.1)
    assert world.status == 408
    world = World()
    world.send(GET + b"\r\n")
    world.answered()
    world.loop.advance(74.0)
    assert not world.transport.closed
    world.loop.advance(100.0)
    assert world.transport.closed


def test_an_answer_that_did_not_wait_for_the_body_does_not_make_it_endless():
    world = World()
    world.send(POST + b"content-length: 99999999\r\n\r\n" + b"x")
    world.answered()
    for _ in range(8):
        world.send(b"x" * 1_000_000)
        world.loop.advance(1.0)
    assert world.transport.closed


TOO_LARGE, NO_HTTP = (431, "head_too_large"), (400, "invalid_http")


@pytest.mark.parametrize(("head", "told"), [
    (b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: x\r\n\r\n", TOO_LARGE),
    (b"GET /" + b"a" * MAX_HEAD_BYTES, TOO_LARGE),
    (GET + b"x: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n", TOO_LARGE),
    (GET + b"a" * (MAX_HEAD_BYTES + 1), TOO_LARGE),
    (GET + b"".join(b"x-%d: %s\r\n" % (i, b"a" * 1000) for i in range(70)) + b"\r\n", TOO_LARGE),
    (GET + b"x: y\r\n" * MAX_HEADERS + b"\r\n", TOO_LARGE),
    (b"\r\n" * MAX_HEAD_BYTES, TOO_LARGE),
    *((b"GET /health%b\r\nhost: x\r\n\r\n" % version, NO_HTTP) for version in (b"", b" HTTP/0.9", b" HTTP/2.0")),
    *(
        (b"GET /version HTTP/1.1\r\n%b\r\n" % hosts, (400, None))
        for hosts in (b"", b"host: a\r\nhost: b\r\n", b"host: a/b\r\n", b"host: a b\r\n", b"host: a@b\r\n")
    ),
    (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n" + GET + b"\r\n", (400, None)),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", NO_HTTP),
])  # fmt: skip
@pytest.mark.parametrize("piece", [10**9, 5000])
def test_a_head_without_measure_or_sense_is_refused_and_reaches_nobody(head, told, piece):
    world = World()
    for start in range(0, len(head), piece):
        world.send(head[start : start + piece])
    assert (world.status, world.code if told[1] else None, world.transport.closed) == (*told, True)
    assert world.loop.num_requests == 0
    if head.startswith(b"\x16"):
        assert b"HTTP/1.1" in world.transport.written.partition(b"\r\n\r\n")[2]


def test_a_large_head_within_the_limits_is_taken_and_trailers_are_bounded():
    world = World()
    headers = b"".join(b"x-%d: %s\r\n" % (i, b"a" * 600) for i in range(MAX_HEADERS - 1))
    world.send(GET + headers + b"\r\n")
    assert world.loop.num_requests == 1
    assert not world.transport.is_closing()
    world = World()
    world.send(POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nauthorization: Bearer x\r\n")
    assert b"authorization" not in dict(world.connection.scope["headers"])
    world.send(b"x: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n")
    assert world.transport.closed


CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("endless", [b"0\r\nx: ", b"0\r\n", b"0\r\nx", b"2;x=", b"0" * 1000])
def test_what_comes_of_a_body_without_a_byte_of_it_is_bounded(endless):
    world = World()
    world.send(CHUNKED + b"2\r\n{}\r\n" + endless)
    for _ in range(2 * MAX_HEAD_BYTES // 1000):
        world.send(b"x: y\r\n" * 200 if endless == b"0\r\n" else b"0" * 1000)
    assert (world.status, world.code, world.transport.closed) == (431, "head_too_large", True)


def test_a_body_of_hardly_more_than_what_frames_it_is_refused():
    world = World()
    world.send(CHUNKED)
    for _ in range(2 * MAX_FRAMING_BYTES // 1000):
        world.send(b"1;%s\r\nx\r\n" % (b"y" * 1000))
    assert (world.status, world.code, world.transport.closed) == (400, "too_many_chunks", True)
    assert world.connection._num_framing_bytes < MAX_FRAMING_BYTES + 2000


@pytest.mark.parametrize(("size", "count"), [(1, 65_537), (64, 200_000)])
def test_small_chunks_are_taken(size, count):
    world = World()
    world.send(CHUNKED)
    chunk = b"%x\r\n%s\r\n" % (size, b"x" * size)
    for _ in range(count):
        world.send(chunk)
    world.send(b"0\r\n\r\n")
    assert not world.transport.is_closing()
    assert len(world.connection.cycle.body) == size * count


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("piece", [10**9, 1])
@pytest.mark.parametrize(("framing", "body"), [
    (b"content-length: 34\r\n", GET + b"\r\n"),
    (b"transfer-encoding: chunked\r\n", b"22\r\n" + GET + b"\r\n\r\n0\r\n\r\n"),
])  # fmt: skip
def test_who_offers_another_protocol_is_answered_in_this_one_and_no_request_is_in_the_body(framing, body, piece):
    """As Java's own client does with every request."""
    world = World()
    sent = POST + UPGRADE + framing + b"\r\n" + body
    for start in range(0, len(sent), piece):
        world.send(sent[start : start + piece])
    assert (world.loop.num_requests, world.connection.cycle.body) == (1, GET + b"\r\n")
    assert not world.connection.cycle.more_body
    assert world.connection.scope["path"] == "/v1/completions"
    world.answered()
    world.send(GET + b"\r\n")
    assert (world.loop.num_requests, world.connection.scope["path"]) == (2, "/version")


def test_requests_sent_ahead_are_bounded_also_with_offers_of_another_protocol():
    world = World()
    world.send((GET + b"\r\n") * 10_000)
    assert world.transport.closed
    assert len(world.connection.pipeline) == MAX_PIPELINED
    world = World()
    world.send((GET + UPGRADE + b"\r\n") * 1000)
    assert world.transport.closed
    assert len(world.connection.pipeline) == MAX_PIPELINED


def test_bodies_sent_ahead_of_their_answers_are_read_within_bounds():
    """Only who reads on sees that the client went away."""
    world = World()
    world.send(GET + b"\r\n" + POST + b"content-length: 99999999\r\n\r\n")
    while len(world.connection.cycle.body) < MAX_PIPELINED_BYTES:
        assert not world.connection.flow.read_paused
        assert not world.transport.closed
        world.send(b"x" * 60_000)
    assert (world.status, world.code, world.transport.closed) == (400, "too_many_pipelined", True)


def test_a_body_sent_ahead_may_be_late_while_the_answer_before_it_is_made():
    world = World()
    world.send(GET + b"\r\n" + POST + b"content-length: 100\r\n\r\n")
    world.loop.advance(100.0)
    assert not world.transport.closed
    world.connection._in_work.response_complete = True
    world.connection.on_response_complete()
    assert world.loop.num_requests == 2
    world.loop.advance(20.0)
    assert world.status == 408


def test_a_refused_request_and_nonsense_add_nothing_to_the_answer_before_them():
    world = World()
    world.send(GET + b"\r\n")
    world.connection.cycle.response_started = True
    world.send(GET + b"\r\n" + b"GET /version HTTP/1.1\r\nhost: a/b\r\n\r\n")
    assert (world.transport.written, world.transport.closed) == (b"", True)
    world = World()
    world.send(GET + b"\r\n")
    world.connection.cycle.response_started = True
    world.send(b"\x00\x01\x02\r\n\r\n")
    assert world.transport.closed
    assert world.transport.written == b""


def test_who_takes_nothing_of_an_answer_is_dropped():
    world = World()
    world.send(GET + b"\r\n")
    world.connection.pause_writing()  # what the transport calls when its buffer is full
    world.loop.advance(59.0)
    world.connection.resume_writing()
    world.loop.advance(100.0)
    assert not world.transport.aborted
    world.connection.pause_writing()
    world.loop.advance(60.1)
    assert world.transport.aborted


@pytest.mark.parametrize("head", [GET, GET + b"connection: close\r\n"])
def test_who_does_not_read_the_end_of_an_answer_is_dropped(head):
    """It is too little for the transport to say that its buffer is full, and a closed one would wait for ever."""
    world = World()
    world.send(head + b"\r\n")
    world.transport.num_buffered = 10
    world.answered()
    world.connection.pause_writing()
    world.loop.advance(59.0)
    world.connection.resume_writing()
    world.loop.advance(59.0)
    assert not world.transport.aborted
    world.loop.advance(2.0)
    assert world.transport.aborted


def test_who_reads_the_end_of_an_answer_and_asks_on_is_not_dropped():
    world = World()
    for _ in range(10):
        world.send(GET + b"\r\n")
        world.transport.num_buffered = 10
        world.answered()
        world.loop.advance(50.0)
    world.transport.num_buffered = 0
    world.loop.advance(60.0)
    assert not world.transport.aborted


def test_one_connection_too_many_is_told_so_and_for_one_that_left_nothing_is_waited_for():
    world = World(num_others=5, max_connections=5)
    assert (world.status, world.transport.closed) == (503, True)
    assert b"retry-after: 1\r\n" in world.transport.written
    world = World()
    world.send(POST + b"content-length: 10\r\n\r\n")
    world.connection.pause_writing()
    world.connection.connection_lost(None)
    assert world.loop.num_waiting == 0


# what of uvicorn 0.53 and 0.54 connection.py overrides, with the arguments, and what it reads or calls
OVERRIDDEN = {
    "__init__": "config server_state app_state _loop", "_start_asgi_task": "cycle app",
    "connection_made": "transport", "connection_lost": "exc", "data_received": "data", "on_message_begin": "",
    "on_url": "url", "on_header": "name value", "on_headers_complete": "", "on_body": "body",
    "on_message_complete": "", "on_response_complete": "", "pause_writing": "", "resume_writing": "",
}  # fmt: skip
READ = {
    "self": {
        *("_unset_keepalive_if_required", "client", "connections", "cycle", "flow", "headers", "loop", "parser"),
        *("pipeline", "scope", "transport", "url"),
    },
    "cycle": {
        *("body", "default_headers", "disconnected", "flow", "keep_alive", "message_event", "on_response"),
        *("response_complete", "response_started", "scope", "send", "transport", "waiting_for_100_continue"),
    },
    "flow": {"drain", "read_paused", "resume_reading", "write_paused"},
}


def answered(world: World, *bodies: bytes, length: int | None = None, head: str = "POST / HTTP/1.1") -> FakeTransport:
    """An answer whose body comes in these pieces."""
    world.send(head.encode() + b"\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}")
    headers = [] if length is None else [(b"content-length", str(length).encode())]

    async def answer(cycle: RequestResponseCycle) -> None:
        await cycle.receive()
        await cycle.send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, body in enumerate(bodies, 1):
            await cycle.send({"type": "http.response.body", "body": body, "more_body": number < len(bodies)})

    assert world.connection.cycle is not None
    asyncio.run(answer(world.connection.cycle))
    return world.transport


def test_a_whole_answer_leaves_in_one_write_and_the_head_of_a_stream_with_its_first_piece():
    sent = answered(World(), b"{}", length=2)
    before, head, body = sent.written.split(b"\r\n\r\n")
    assert (before, head[:15], body, sent.num_writes) == (b"HTTP/1.1 100 Continue", b"HTTP/1.1 200 OK", b"{}", 2)
    sent = answered(World(), b"one", b"two", b"")
    assert sent.written.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
    assert sent.num_writes == 4  # 100 Continue, the head with the first piece, the second, the end
    for version in ("1.1", "1.0"):
        sent = answered(World(), b"", length=2, head=f"HEAD / HTTP/{version}")
        assert sent.written.endswith(b"\r\n\r\n")
        assert b"200 OK" in sent.written
        assert sent.closed == (version == "1.0")


def test_an_answer_whose_header_would_be_two_or_whose_length_is_another_is_an_error():
    for value in (b"1\r\nset-cookie: a", b"1\nset-cookie: a", b"1\0"):
        world = World()
        world.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        start = {"type": "http.response.start", "status": 200, "headers": [(b"x-told", value)]}
        with pytest.raises(RuntimeError, match="taken for two"):
            asyncio.run(world.connection.cycle.send(start))
        assert not world.transport.written
    for body in (b"{", b"{}}"):
        with pytest.raises(RuntimeError, match="not as long"):
            answered(World(), body, length=2)


def test_uvicorn_is_held_to_the_minors_whose_internals_are_overridden_as_they_are():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (held,) = [SpecifierSet(name.removeprefix("uvicorn")) for name in dependencies if name.startswith("uvicorn")]
    assert [minor for minor in range(40, 70) if f"0.{minor}.9" in held] == [53, 54]
    assert uvicorn.__version__ in held
    overridden = {name: inspect.signature(call) for name, call in vars(HttpToolsProtocol).items() if callable(call)}
    overridden = {name: told for name, told in overridden.items() if name in vars(GuardedConnection)}
    assert {name: " ".join([*told.parameters][1:]) for name, told in overridden.items()} == OVERRIDDEN


def test_the_internals_that_are_read_are_there():
    """Whatever of it connection.py and connection.py name: nothing is used that the table does not have."""
    protocol, transport = World().connection, FakeTransport()
    plain = HttpToolsProtocol(protocol.config, ServerState(), {}, FakeLoop())  # type: ignore[arg-type]
    plain.on_message_begin()
    cycle = RequestResponseCycle(*[None] * 11)  # type: ignore[arg-type]
    theirs = {"self": plain, "cycle": cycle, "flow": FlowControl(transport)}  # type: ignore[arg-type]
    named: dict[str, set[str]] = {owner: set() for owner in theirs}
    for node in ast.walk(ast.parse(inspect.getsource(connection))):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).removeprefix("self.").replace("_in_work", "cycle").removeprefix("_")
            owner = owner.removeprefix("cycle.") if owner == "cycle.flow" else owner
            if owner in theirs and hasattr(theirs[owner], node.attr) and node.attr not in OVERRIDDEN:
                named[owner].add(node.attr)
    assert named == READ
