"""Where a request ends, over raw sockets: what can be read in two ways is refused, what it hides is never answered."""

from __future__ import annotations

import contextlib
import random
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from maitred.api.routes import make_routes
from tests.fleet.test_end_to_end import start_router
from tests.reliability.edge_server import Attacked, attacked
from tests.reliability.test_edge import MIB, POST, answer_of, connect
from tests.waiting import HANGS_S, until

BODY = b'{"model":"tiny","prompt":"hi"}'
HIDDEN = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"  # where one of two readings begins a second request
ENDS = b"1e\r\n" + BODY + b"\r\n0\r\n\r\n"
TE = POST + b"transfer-encoding: chunked\r\n"
CHUNKED = TE + b"\r\n"


@pytest.fixture(scope="module", params=["serve", "route"])
def server(request: pytest.FixtureRequest) -> Iterator[Attacked]:
    """A server, and a router before one."""
    with attacked() as server:
        if request.param == "serve":
            yield server
            return
        router = start_router(server.url)
        attacked_router = Attacked(router.process, int(router.url.rpartition(":")[2]))
        until(attacked_router.is_well)
        yield attacked_router
        router.stop()


def with_length(*values: bytes) -> bytes:
    """A request whose body is of thirty bytes, whatever it says."""
    return POST + b"".join(b"content-length: %b\r\n" % value for value in values) + b"\r\n" + BODY


def with_coding(*values: bytes) -> bytes:
    """A request in chunks, whatever it says."""
    return POST + b"".join(b"transfer-encoding: %b\r\n" % value for value in values) + b"\r\n" + ENDS


def chunk(size_line: bytes, tail: bytes = b"\r\n0\r\n\r\n") -> bytes:
    return CHUNKED + size_line + BODY + tail


WHOLE = with_length(b"30")
LENGTHS = {
    "negative": (b"-1",),
    "negative nothing": (b"-0",),
    "with a sign": (b"+30",),
    "hexadecimal": (b"0x1e",),
    "with a space": (b"3 0",),
    "empty": (b"",),
    "blank": (b" ",),
    "2**64": (b"18446744073709551616",),
    "2**64 + 30": (b"18446744073709551646",),
    "fraction": (b"30.0",),
    "exponent": (b"3e1",),
    "list of equals": (b"30, 30",),
    "twice": (b"30", b"30"),
    "two, the first is right": (b"30", b"64"),
    "two, the second is right": (b"64", b"30"),
    "on a line of its own": (b"\r\n 30",),
    "vertical tab": (b"30\x0b",),
    "NUL": (b"30\x00",),
}
CODINGS = {
    "identity": (b"identity",),
    "chunked twice in one": (b"chunked, chunked",),
    "chunked twice": (b"chunked", b"chunked"),
    "chunked is not last": (b"chunked, identity",),
    "identity before": (b"identity, chunked",),
    "identity before, apart": (b"identity", b"chunked"),
    "identity after, apart": (b"chunked", b"identity"),
    "one that nobody undoes": (b"gzip, chunked",),
    "unknown": (b"xchunked",),
    "folded": (b"\r\n chunked",),
    "folded with a tab": (b"\r\n\tchunked",),
    "folded after": (b"chunked\r\n ",),
    "with a parameter": (b"chunked;q=1",),
    "quoted": (b'"chunked"',),
    "empty": (b"",),
    "empty item before": (b",chunked",),
    "empty item after": (b"chunked,",),
    "vertical tab": (b"\x0bchunked",),
    "NUL": (b"chun\x00ked",),
}
BOTH = {
    "length, chunks": POST + b"content-length: 39\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks, length": POST + b"transfer-encoding: chunked\r\ncontent-length: 39\r\n\r\n0\r\n\r\n",
    "short length, chunks": POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n" + ENDS,
    "chunks, short length": POST + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n" + ENDS,
    "length, unknown coding": POST + b"content-length: 40\r\ntransfer-encoding: xchunked\r\n\r\n" + ENDS,
    "length, identity": POST + b"content-length: 40\r\ntransfer-encoding: identity\r\n\r\n" + ENDS,
    "length, folded chunks": POST + b"content-length: 40\r\ntransfer-encoding:\r\n chunked\r\n\r\n" + ENDS,
    "and the connection ends": POST + b"connection: close\r\ncontent-length: 4\r\n" + TE[len(POST) :] + b"\r\n" + ENDS,
    "and an upgrade": POST
    + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 4\r\n"
    + TE[len(POST) :]
    + b"\r\n",
    "chunks in HTTP/1.0": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + ENDS,
}
CHUNKS = {
    "negative": chunk(b"-1e\r\n"),
    "with a sign": chunk(b"+1e\r\n"),
    "0x": chunk(b"0x1e\r\n"),
    "over 64 bits": chunk(b"1000000000000001e\r\n"),
    "no digit": chunk(b"\r\n"),
    "only an extension": chunk(b";a\r\n"),
    "space before": chunk(b" 1e\r\n"),
    "space after": chunk(b"1e \r\n"),
    "no line end after the size": chunk(b"1e"),
    "bare LF after the size": chunk(b"1e\n"),
    "bare CR after the size": chunk(b"1e\r"),
    "bare LF after an extension": chunk(b"1e;a\n"),
    "bare CR in an extension": chunk(b"1e;a\rb\r\n"),
    "NUL in an extension": chunk(b"1e;a\x00b\r\n"),
    "no line end after the bytes": chunk(b"1e\r\n", b"0\r\n\r\n"),
    "bare LF after the bytes": chunk(b"1e\r\n", b"\n0\r\n\r\n"),
    "bare CR after the bytes": chunk(b"1e\r\n", b"\r0\r\n\r\n"),
    "bare LFs at the end": chunk(b"1e\r\n", b"\r\n0\n\n"),
    "bare LF at the very end": chunk(b"1e\r\n", b"\r\n0\r\n\n"),
    "a length as trailer": chunk(b"1e\r\n", b"\r\n0\r\ncontent-length: 34\r\n\r\n"),
    "a coding as trailer": chunk(b"1e\r\n", b"\r\n0\r\ntransfer-encoding: chunked\r\n\r\n"),
}
BYTES = {
    "two hosts": WHOLE.replace(b"host: x\r\n", b"host: x\r\nhost: y\r\n"),
    "one host twice": WHOLE.replace(b"host: x\r\n", b"host: x\r\nhost: x\r\n"),
    "no host": WHOLE.replace(b"host: x\r\n", b""),
    "NUL in the method": WHOLE.replace(b"POST", b"PO\x00ST"),
    "NUL in the path": WHOLE.replace(b"/v1", b"/v1\x00"),
    "NUL in the version": WHOLE.replace(b"1.1", b"1.1\x00"),
    "NUL in a name": WHOLE.replace(b"host", b"x\x00y: z\r\nhost"),
    "NUL in a value": WHOLE.replace(b"host", b"x: y\x00z\r\nhost"),
    "NUL after the body": WHOLE + b"\x00",
    "bare LF everywhere": WHOLE.replace(b"\r\n", b"\n"),
    "bare LF after the first line": WHOLE.replace(b"1.1\r\n", b"1.1\n"),
    "bare LF between headers": WHOLE.replace(b"host", b"x: y\nz: a\r\nhost"),
    "bare LFs at the head's end": WHOLE.replace(b"\r\n\r\n", b"\n\n"),
    "bare LF at the head's very end": WHOLE.replace(b"\r\n\r\n", b"\r\n\n"),
    "bare CR everywhere": WHOLE.replace(b"\r\n", b"\r"),
    "bare CR after the first line": WHOLE.replace(b"1.1\r\n", b"1.1\r"),
    "bare CR in a value": WHOLE.replace(b"host", b"x: y\rz: a\r\nhost"),
    "bare CR at the head's end": WHOLE.replace(b"\r\n\r\n", b"\r\n\r"),
    "CR twice": WHOLE.replace(b"host", b"x: y\r\r\nhost"),
    "a length with a space before the colon": WHOLE.replace(b"length:", b"length :"),
    "a coding with a space before the colon": with_coding(b"chunked").replace(b"encoding:", b"encoding :"),
    "a coding with a tab before the colon": with_coding(b"chunked").replace(b"encoding:", b"encoding\t:"),
    "a header without a name": WHOLE.replace(b"host", b": a\r\nhost"),
    "a first header with a space before": WHOLE.replace(b"host", b" x: y\r\nhost"),
    "a folded header": WHOLE.replace(b"host", b"x: y\r\n z\r\nhost"),
    "HTTP/1.2": WHOLE.replace(b"1.1", b"1.2"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a tunnel": b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n",
}
REFUSED = {
    **{f"length {name}": with_length(*values) for name, values in LENGTHS.items()},
    **{f"coding {name}": with_coding(*values) for name, values in CODINGS.items()},
    **{f"both, {name}": sent for name, sent in BOTH.items()},
    **{f"chunk, {name}": sent for name, sent in CHUNKS.items()},
    **BYTES,
}


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d\d\d) ", received)]


def answer_to(server: Attacked, sent: bytes) -> bytes:
    """Everything until the server hangs up."""
    with connect(server) as connection:
        connection.sendall(sent)
        return answer_of(connection)


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_be_read_in_two_ways_is_refused_and_ends_the_connection(server, name):
    assert statuses(answer_to(server, REFUSED[name] + HIDDEN)) == [400]


TAKEN = {
    "as usual": WHOLE,
    "length with zeros before": with_length(b"030"),
    "length with spaces around": with_length(b" \t30 \t"),
    "coding in capitals": with_coding(b"CHUNKED"),
    "chunk size with zeros before": chunk(b"0" * 1000 + b"1E\r\n"),
    "extension": chunk(b"1e;a=b\r\n"),
    "trailer": chunk(b"1e\r\n", b"\r\n0\r\nx: y\r\n\r\n"),
    "trailer that names a key": chunk(b"1e\r\n", b"\r\n0\r\nauthorization: Bearer x\r\n\r\n"),
    "a name with an underscore is another": WHOLE.replace(b"host", b"transfer_encoding: chunked\r\nhost"),
    "an upgrade with a body": WHOLE.replace(b"host", b"connection: upgrade\r\nupgrade: websocket\r\nhost"),
    "an upgrade with chunks": (CHUNKED + ENDS).replace(b"host", b"connection: upgrade\r\nupgrade: h2c\r\nhost"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_can_be_read_in_one_way_is_answered_and_so_is_what_follows(server, name):
    assert statuses(answer_to(server, TAKEN[name] + HIDDEN.replace(b"host", b"connection: close\r\nhost"))) == [
        200,
        200,
    ]


WAITS = POST + b"expect: 100-continue\r\n"
UPGRADE = b"connection: upgrade\r\nupgrade: websocket\r\n"
IN_CHUNKS = b"22\r\n" + HIDDEN + b"\r\n0\r\n\r\n"
BODIES = {
    "POST": (WAITS + b"content-length: 34\r\n\r\n", HIDDEN, [100, 400]),
    "GET": (b"GET /version HTTP/1.1\r\nhost: x\r\ncontent-length: 34\r\n\r\n", HIDDEN, [200]),
    "chunks": (WAITS + b"transfer-encoding: chunked\r\n\r\n", IN_CHUNKS, [100, 400]),
    "upgrade": (WAITS + UPGRADE + b"content-length: 34\r\n\r\n", HIDDEN, [100, 400]),
    "upgrade, chunks": (WAITS + UPGRADE + b"transfer-encoding: chunked\r\n\r\n", IN_CHUNKS, [100, 400]),
    "longer than any may be": (WAITS + b"content-length: 18446744073709551615\r\n\r\n", HIDDEN, [413]),
    "a chunk without end": (WAITS + b"transfer-encoding: chunked\r\n\r\n", b"f" * 16 + b"\r\n" + HIDDEN, [100]),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_stands_in_a_body_is_no_request(server, name):
    head, body, told = BODIES[name]
    with connect(server) as connection:
        connection.sendall(head)
        begun = connection.recv(65536)  # the head has been read, so the body comes alone
        connection.sendall(body)
        while len(statuses(begun)) < len(told) and (more := connection.recv(65536)):
            begun += more
        connection.shutdown(socket.SHUT_WR)
        assert statuses(begun + answer_of(connection)) == told


ENDLESS = {
    "an extension of a MiB": (chunk(b"1e;a=" + b"x" * MIB + b"\r\n"), 431),
    "a trailer of a MiB": (chunk(b"1e\r\n", b"\r\n0\r\nx: " + b"x" * MIB + b"\r\n\r\n"), 431),
    "200,000 trailers": (chunk(b"1e\r\n", b"\r\n0\r\n" + b"x: y\r\n" * 200_000 + b"\r\n"), 431),
    "a chunk size of a MiB": (chunk(b"0" * MIB + b"1e\r\n"), 431),
    "10,000 extensions of a KiB": (CHUNKED + (b"1;" + b"x" * 1024 + b"\r\n \r\n") * 10_000 + ENDS, 400),
    "a header of a MiB": (WHOLE.replace(b"host", b"x: " + b"x" * MIB + b"\r\nhost"), 431),
    "200,000 headers": (WHOLE.replace(b"host", b"x: y\r\n" * 200_000 + b"host"), 431),
    "a path of a MiB": (WHOLE.replace(b"/v1", b"/v1" + b"x" * MIB), 431),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_has_no_measure_is_refused_while_it_comes(server, name):
    sent, status = ENDLESS[name]
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent + HIDDEN)
        assert statuses(answer_of(connection)) in ([status], [])  # it may be lost, as the server hangs up meanwhile
    assert server.is_well()


def test_a_trailer_without_end_costs_no_memory(server):
    assert server.is_well()
    before = server.rss_bytes()
    with connect(server) as connection:
        connection.sendall(chunk(b"1e\r\n", b"\r\n0\r\nx: "))
        with contextlib.suppress(ConnectionError):
            while server.rss_bytes() - before < 16 * MIB:
                connection.sendall(b"x" * 65536)
    assert server.rss_bytes() - before < 16 * MIB


def test_none_of_them_ten_times_over_leaves_anything(server):
    def attack(count: int) -> None:
        for sent in [*REFUSED.values()] * count:
            answer_to(server, sent + HIDDEN)

    attack(2)
    before, num_files = server.rss_bytes(), server.num_files()
    attack(10)
    assert server.rss_bytes() - before < 8 * MIB
    until(lambda: server.in_flight() == 0 and server.num_files() <= num_files + 2)


def test_a_body_in_65537_chunks_of_a_byte_is_read(server):
    head, tail = b'{"model":"tiny","prompt":"hi","user":"', b'"}'
    body = head + b"u" * (65_537 - len(head) - len(tail)) + tail
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    received = answer_to(server, TE + b"connection: close\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert statuses(received) == [200]
    assert len(body) == chunks.count(b"1\r\n") == 65_537


def test_no_method_on_any_path_makes_a_5xx(server):
    routes = make_routes().routes
    known = {route.path.replace("{model:path}", "tiny").replace("{name}", "x.js") for route in routes}
    paths = [*known, "/x", "/%00"]
    endless = {route.path for route in routes if route.method == "GET" and route.event is not None} | {"/health/decode"}
    with httpx.Client(base_url=server.url, timeout=HANGS_S) as web:
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            for path in paths:
                if path in endless and method in ("GET", "HEAD"):
                    continue
                for body in (b"", b"{}", b"[" * 1000):
                    answer = web.request(method, path, content=body, headers={"content-type": "application/json"})
                    assert answer.status_code < 500 or path.startswith(("/admin", "/ready")), (
                        method,
                        path,
                        answer.text,
                    )
                    if answer.status_code >= 400 and method != "HEAD":
                        told = answer.json()["error"]
                        assert isinstance(told, str) == path.startswith(("/v2/", "/api/")), (
                            "KServe v2's errors and Ollama's are texts"
                        )
                        more = set() if path.startswith("/v1/messages") else {"param", "code"}  # Anthropic has none
                        assert isinstance(told, str) or set(told) == {"message", "type", *more}
                        assert len(answer.content) < 2000


IN_TWO = CHUNKED + ENDS
SPLICES = (
    b"\r\n",
    b"\x00",
    b"\xff",
    b" ",
    b":",
    b"\r",
    b"\n",
    b"content-length: 5\r\n",
    b"transfer-encoding: chunked\r\n",
)


def test_requests_with_damage_in_any_place_crash_nothing_and_leak_nothing(server):
    """A thousand, each with a few bytes changed, dropped, doubled or put in; always the same ones."""
    chooser = random.Random(13)
    for _ in range(200):
        attack(server, chooser)
    before = server.rss_bytes()
    for _ in range(800):
        attack(server, chooser)
    assert server.is_well()
    assert server.rss_bytes() - before < 16 * MIB
    until(lambda: server.in_flight() == 0)


def attack(server: Attacked, chooser: random.Random) -> None:
    damaged = bytearray(chooser.choice((WHOLE, IN_TWO, WHOLE + IN_TWO)))
    for _ in range(chooser.randint(1, 4)):
        at = chooser.randrange(len(damaged))
        how = chooser.randrange(4)
        if how == 0:
            damaged[at] = chooser.randrange(256)
        elif how == 1:
            del damaged[at : at + chooser.randint(1, 10)]
        elif how == 2:
            damaged[at:at] = damaged[at : at + 20]
        else:
            damaged[at:at] = chooser.choice(SPLICES)
    with connect(server) as connection:
        connection.sendall(bytes(damaged))
        with contextlib.suppress(OSError):  # the server may have hung up already
            connection.shutdown(socket.SHUT_WR)
        received = answer_of(connection)
    assert set(re.findall(rb"HTTP/1\.1 (\d)\d\d ", received)) <= {b"2", b"4"}, (bytes(damaged), received)
