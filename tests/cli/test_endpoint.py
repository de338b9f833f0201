from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.cli.endpoint import (
    DONE,
    AppEndpoint,
    HttpEndpoint,
    ServerRefused,
    SSEParser,
    TimedOut,
    Unreachable,
    Untrusted,
    base_url,
    error_text,
    first_model,
)
from maitred.core.errors import ConfigError, ServerError
from tests.cli.fake_server import FakeServer, serving
from tests.cli.running import maitred_process
from tests.fakes_api import running_server

CERTIFICATE = Path(__file__).parents[1] / "api/certificates/first.pem"  # self-signed


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://a:1", "http://a:1"),
        ("http://a:1/v1/", "http://a:1"),
        ("https://a/openai/v1", "https://a/openai"),
        ("localhost:8000", "http://localhost:8000"),
    ],
)
def test_a_url_may_come_with_or_without_v1(given, base):
    assert base_url(given) == base


@pytest.mark.parametrize("given", ["ftp://a", "http://", "http:///v1"])
def test_a_url_that_is_none_is_refused(given):
    with pytest.raises(ConfigError):
        base_url(given)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no"}}', "no"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<html>bad gateway</html>", "<html>bad gateway</html>"),
        (b"", "status 502 without a message"),
    ],
)
def test_the_cause_is_found_in_any_shape_of_error(body, text):
    assert error_text(502, body) == text


async def test_the_key_is_sent_and_a_wrong_one_is_told():
    async with serving(FakeServer(api_key="k")) as fake:
        async with HttpEndpoint(fake.url, api_key="k") as endpoint:
            assert await first_model(endpoint) == "fake"
        async with HttpEndpoint(fake.url, api_key="other") as endpoint:
            with pytest.raises(ServerRefused, match=r"401: wrong key.*--api-key"):
                await first_model(endpoint)


async def test_nobody_there_is_unreachable_with_a_remedy():
    async with HttpEndpoint("http://127.0.0.1:9") as endpoint:
        with pytest.raises(Unreachable, match=r"cannot reach .*: Connection refused; start a server there"):
            await first_model(endpoint)


async def test_a_certificate_that_nobody_vouches_for_is_told_with_a_remedy():
    with running_server(ssl_certfile=str(CERTIFICATE), ssl_keyfile=str(CERTIFICATE.with_suffix(".key"))) as server:
        url = f"127.0.0.1:{server.port}"
        async with HttpEndpoint(f"https://{url}") as endpoint:
            with pytest.raises(Untrusted, match=r"not trusted: self-signed certificate; .*SSL_CERT_FILE"):
                await first_model(endpoint)
        async with HttpEndpoint(f"http://{url}") as endpoint:
            with pytest.raises(Unreachable, match="write https:// if it has a certificate"):
                await first_model(endpoint)
        trusting = maitred_process("ps", f"https://{url}", SSL_CERT_FILE=str(CERTIFICATE))
        assert (trusting.code, trusting.err) == (0, "")


async def test_a_server_without_a_certificate_is_not_asked_for_one():
    async with serving(FakeServer()) as fake, HttpEndpoint(fake.url.replace("http:", "https:")) as endpoint:
        with pytest.raises(Untrusted, match="without a certificate it is http://"):
            await first_model(endpoint)


async def test_no_answer_in_time_is_timed_out():
    async with serving(FakeServer(first_token_s=60)) as fake, HttpEndpoint(fake.url, timeout_s=0.05) as endpoint:
        with pytest.raises(TimedOut):
            async with endpoint.post("/v1/completions", b'{"model": "fake"}') as reply:
                await reply.read()


class App:
    """A small ASGI application that remembers what became of it."""

    def __init__(self) -> None:
        self.disconnected = self.finished = False
        self.heard: list[bytes] = []

    async def __call__(self, scope, receive, send) -> None:
        assert (scope["type"], scope["method"]) == ("http", "POST")
        self.heard.append((await receive())["body"])
        if scope["path"] == "/raise":
            raise ZeroDivisionError
        await send({"type": "http.response.start", "status": 201, "headers": [(b"X-Request-Id", b"7")]})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        if scope["path"] == "/slow":
            self.disconnected = (await receive())["type"] == "http.disconnect"
            return
        await send({"type": "http.response.body", "body": b"two"})
        await asyncio.sleep(0.01)
        self.finished = True


async def test_an_application_answers_as_a_server_would():
    app = App()
    async with AppEndpoint(app).post("/quick", b"hello") as reply:
        assert (reply.status, reply.headers) == (201, {"x-request-id": "7"})
        assert await reply.read() == b"onetwo"
    assert app.heard == [b"hello"]
    assert app.finished  # also what comes after the last byte

    app = App()
    async with AppEndpoint(app).post("/slow", b"") as reply:
        assert await anext(reply.body) == b"one"
    assert not app.finished

    with pytest.raises(ZeroDivisionError):
        async with AppEndpoint(App()).post("/raise", b""):
            pass


async def test_a_list_of_models_that_is_none_is_told():
    class Silly(App):
        async def __call__(self, scope, receive, send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": msgspec.json.encode({"data": []})})

    with pytest.raises(ServerError, match="--model"):
        await first_model(AppEndpoint(Silly()))


STREAM = b': keep-alive\n\ndata: {"a": 1}\n\nevent: x\ndata: one\ndata: two\n\ndata:[DONE]\n\n'
EVENTS = [b'{"a": 1}', b"one\ntwo", DONE]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8), st.booleans())
def test_events_do_not_depend_on_where_the_bytes_were_cut(cuts, carriage_returns):
    stream = STREAM.replace(b"\n", b"\r\n") if carriage_returns else STREAM
    edges = [0, *sorted(cuts), len(stream)]
    parser = SSEParser()
    pieces = [stream[start:end] for start, end in pairwise(edges)]
    assert [event for piece in pieces for event in parser.feed(piece)] == EVENTS
