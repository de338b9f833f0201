"""What comes of a replica, right or wrong, through one connection or a kept one."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from maitred.api.route.router import resolve
from maitred.core.errors import ConfigError
from maitred.fleet import upstream as u
from maitred.fleet.config import Origin, RouteTarget, parse_target
from maitred.fleet.upstream import Broken, ConnectionCounts, Upstream, UpstreamAsk, UpstreamFailed, request_head
from tests.fleet.routers import LAST_CHUNK, STREAM_HEAD, Seen, chunk, fake_upstream, says, whole
from tests.waiting import until_async


@pytest.mark.parametrize(("text", "target"), [
    ("http://one:8000", RouteTarget(Origin("one", 8000))),
    ("http://one:8000/v1/", RouteTarget(Origin("one", 8000))),
    ("https://one", RouteTarget(Origin("one", 443, is_tls=True))),
    ("http://[::1]:9000=2.5", RouteTarget(Origin("::1", 9000), weight=2.5)),
    ("https://gateway/team/v1=1", RouteTarget(Origin("gateway", 443, is_tls=True, prefix="/team"))),
    ("dns://replicas:8000", RouteTarget(Origin("replicas", 8000), follows_name=True)),
])  # fmt: skip
def test_an_address_is_read(text, target):
    assert parse_target(text) == target


@pytest.mark.parametrize(("text", "complaint"), [
    ("one:8000", "no URL of a server"), ("ftp://one", "no URL of a server"), ("http://", "no URL of a server"),
    ("http://one:99999", "no URL"), ("http://one:8000=fast", "is a weight"), ("http://one:8000=0", "above 0"),
    ("http://one:8000=nan", "above 0"), ("http://user:word@one", "no user"),
    ("http://one/?a", "no user, query or fragment"), ("dns://one", "has a port"),
    ("dns://one:80/path", "no path"), ("http://o ne:80", "no URL of a server"),
])  # fmt: skip
def test_what_is_no_address_says_how_one_looks(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_target(text)


async def test_an_origin_writes_itself_as_a_url_and_a_name_stands_for_its_addresses():
    assert Origin("::1", 80, prefix="/a").url == "http://[::1]:80/a"
    assert Origin("127.0.0.1", 8000) in await resolve(Origin("localhost", 8000))


CERTIFICATES = Path(__file__).parent.parent / "api" / "certificates"


def client(port: int, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Upstream:
    return Upstream(Origin(host, port, is_tls=tls is not None), counts=ConnectionCounts(), tls=tls)


def ask(upstream: Upstream, body: bytes = b"{}", method: str = "POST") -> UpstreamAsk:
    head = request_head(method, "/v1/completions", upstream.origin, [(b"x-request-id", b"7")], len(body))
    return UpstreamAsk(head, body, is_head=method == "HEAD")


async def answered(upstream: Upstream, max_bytes: int = 1 << 20) -> bytes:
    return await (await upstream.send(ask(upstream))).whole(max_bytes)


async def failed(upstream: Upstream) -> Broken:
    with pytest.raises(UpstreamFailed) as error:
        await answered(upstream)
    return error.value.broken


async def test_one_connection_serves_one_after_another():
    async with fake_upstream(says(whole(b"yes"))) as fake:
        upstream = client(fake.port)
        assert ([await answered(upstream) for _ in range(5)], fake.num_connections) == ([b"yes"] * 5, 1)
        assert (upstream._counts.num_new, upstream._counts.num_reused) == (1, 4)
        seen = fake.requests[0]
        assert (seen.start, seen.body) == ("POST /v1/completions HTTP/1.1", b"{}")
        assert seen.headers == {"host": f"127.0.0.1:{fake.port}", "content-length": "2", "x-request-id": "7"}
        upstream.close()


async def test_pieces_are_given_as_they_come():
    turn = asyncio.Event()

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b"one"))
        await turn.wait()
        writer.write(chunk(b"two") + chunk(b"three") + LAST_CHUNK)

    async with fake_upstream(script) as fake:
        answer = await (upstream := client(fake.port)).send(ask(upstream))
        assert answer.status == 200
        assert (b"content-type", b"text/event-stream") in answer.headers
        assert await answer.piece() == b"one"
        turn.set()
        assert (await answer.piece(), await answer.piece(), upstream.num_idle) == (b"twothree", b"", 1)


async def test_a_kept_connection_that_died_costs_a_retry_and_a_closed_one_is_not_used_again():
    async with fake_upstream(says(whole(b"yes"))) as fake:
        upstream = client(fake.port)
        await answered(upstream)

        async def hang_up(seen: Seen, writer: asyncio.StreamWriter) -> None:
            if seen.connection == 0:
                writer.transport.abort()  # it came on the old one
            else:
                writer.write(whole(b"again"))

        fake.script = hang_up
        assert (await answered(upstream), fake.num_connections) == (b"again", 2)
    async with fake_upstream(says(whole(b"yes"), then="close")) as fake:
        upstream = client(fake.port)
        await answered(upstream)
        await until_async(lambda: upstream.num_idle == 0)
        assert (await answered(upstream), upstream._counts.num_reused) == (b"yes", 0)


@pytest.mark.parametrize(("script", "broken"), [
    (says(then="reset"), Broken.RESET),
    (says(then="close"), Broken.RESET),
    (says(b"HTTP/1.1 200 OK\r\ncontent-le", then="close"), Broken.RESET),
    (says(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", then="close"), Broken.RESET),
    (says(STREAM_HEAD + chunk(b"one"), then="close"), Broken.RESET),
    (says(b"SSH-2.0-OpenSSH\r\n"), Broken.WRONG),
    (says(STREAM_HEAD + b"zz\r\nno\r\n"), Broken.WRONG),
    (says(b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"), Broken.WRONG),
    (says(b"HTTP/1.1 777 What\r\ncontent-length: 0\r\n\r\n"), Broken.WRONG),
    (says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n"), Broken.WRONG),
    (says(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi"), Broken.WRONG),
    (says(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nhi"), Broken.WRONG),
    (says(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 101 + b"\r\n"), Broken.WRONG),
    (says(b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000, then="wait"), Broken.WRONG),
    (says(b"HTTP/1.1 200 OK\r\n", *[b"a: " + b"b" * 100 + b"\r\n"] * 1000, then="wait"), Broken.WRONG),
    (says(STREAM_HEAD + b"1;" + b"x" * 70_000, then="wait"), Broken.WRONG),
    (says(STREAM_HEAD + chunk(b"one") + b"0\r\n" + b"a: b\r\n" * 20_000, then="wait"), Broken.WRONG),
])  # fmt: skip
async def test_what_is_no_whole_answer_has_a_name(script, broken):
    async with fake_upstream(script) as fake:
        upstream = client(fake.port)
        assert await failed(upstream) is broken
        assert upstream.num_idle == 0


async def test_half_a_head_nobody_listening_and_too_long_an_answer_are_told(monkeypatch):
    monkeypatch.setattr(u, "HEAD_TIMEOUT_S", 0.01)
    async with fake_upstream(says(b"HTTP/1.1 200 OK\r\ncontent-", then="wait")) as fake:
        assert await failed(client(fake.port)) is Broken.WRONG
    async with fake_upstream(says()) as fake:
        port = fake.port
    with pytest.raises(UpstreamFailed, match=f"cannot connect to http://127.0.0.1:{port}") as error:
        await answered(client(port))
    assert error.value.broken is Broken.REFUSED
    async with fake_upstream(says(whole(b"x" * 1000))) as fake:
        with pytest.raises(UpstreamFailed, match="over 999 bytes"):
            await answered(client(fake.port), max_bytes=999)


async def test_answers_without_a_length_interim_ones_and_to_head_are_understood():
    async with fake_upstream(says(b"HTTP/1.0 200 OK\r\n\r\nold", b" style", then="close")) as fake:
        assert await answered(client(fake.port)) == b"old style"
    async with fake_upstream(says(b"HTTP/1.1 100 Continue\r\n\r\n" + whole(b"yes"))) as fake:
        upstream = client(fake.port)
        assert (await answered(upstream), upstream.num_idle) == (b"yes", 1)
    async with fake_upstream(says(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n")) as fake:
        answer = await (upstream := client(fake.port)).send(ask(upstream, b"", "HEAD"))
        assert (b"content-length", b"10") in answer.headers
        assert await answer.piece() == b""
    async with fake_upstream(says(whole(b"yes") + whole(b"and more"))) as fake:
        upstream = client(fake.port)
        assert await answered(upstream) == b"yes"
        await until_async(lambda: upstream.num_idle == 0 and fake.num_open == 0)


async def test_an_answer_that_nobody_takes_stops_coming():
    sent = 0

    async def flood(seen: Seen, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM_HEAD)
        while not writer.is_closing():
            writer.write(chunk(b"x" * 65_536))
            sent += 65_536
            await writer.drain()

    async with fake_upstream(flood) as fake:
        answer = await (upstream := client(fake.port)).send(ask(upstream))
        before = -1
        while before != sent:  # what the kernel holds is bounded too
            before = sent
            await asyncio.sleep(0.05)
        assert answer._num_bytes <= u.MAX_UNREAD_BYTES + 262_144
        for _ in range(100):
            assert await answer.piece()
        answer.abort()
        await until_async(lambda: fake.num_open == 0)


async def test_who_stops_waiting_hangs_up():
    async with fake_upstream(says(then="wait")) as fake:
        task = asyncio.create_task(answered(client(fake.port)))
        await until_async(lambda: fake.requests)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()


async def test_a_replica_behind_tls_is_verified():
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(CERTIFICATES / "first.pem", CERTIFICATES / "first.key")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(whole(b"secret"))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=served)
    port = server.sockets[0].getsockname()[1]
    trusting = ssl.create_default_context(cafile=str(CERTIFICATES / "first.pem"))
    trusting.check_hostname = False  # the certificate's name is the test's affair
    assert await answered(client(port, tls=trusting)) == b"secret"
    assert await failed(client(port, tls=ssl.create_default_context())) is Broken.REFUSED
    server.close()


async def test_ipv6():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"{}")
        writer.write(whole(b"host" if b"host: [::1]:" in head else head))

    try:
        server = await asyncio.start_server(serve, "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert await answered(client(server.sockets[0].getsockname()[1], host="::1")) == b"host"
    server.close()


async def test_ten_thousand_answers_to_32_clients_over_4_replicas_open_at_most_128_connections():
    counts = ConnectionCounts()
    fakes = [fake_upstream(says(whole(b"yes"))) for _ in range(4)]
    replicas = [await fake.__aenter__() for fake in fakes]
    upstreams = [Upstream(Origin("127.0.0.1", fake.port), counts=counts) for fake in replicas]

    async def one_client(number: int) -> None:
        for turn in range(number, 10_000, 32):
            assert await answered(upstreams[turn % 7 % 4]) == b"yes"

    await asyncio.gather(*(one_client(number) for number in range(32)))
    assert counts.num_new <= 128
    assert counts.num_new + counts.num_reused == 10_000
    for upstream, fake in zip(upstreams, fakes, strict=True):
        upstream.close()
        await fake.__aexit__(None, None, None)
