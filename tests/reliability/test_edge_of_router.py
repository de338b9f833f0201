"""The edge of a router before a server: what attacks a server on its own attacks a router too, and gets no further."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from maitred.api.route.routes import ROUTES
from tests.api.test_access import raw
from tests.api.test_bodies import AT_THE_LIMIT, BROKEN, FULL, body_at_the_limit
from tests.fleet.test_end_to_end import start_router
from tests.reliability.edge_server import Attacked, attacked
from tests.reliability.test_edge import (
    HOSTILE,
    MIB,
    has_begun,
    hung_up_on,
    opened,
    refused_hostile,
    silent,
    slow_body,
    slow_head,
    slow_reader,
)
from tests.waiting import HANGS_S, until

PATHS = ("/v1/chat/completions", "/v1/completions")
JSON = {"content-type": "application/json"}
QUICK = ("escapes", "empty texts", "messages", "variables", "digits", "depth")  # the rest is for soak


@contextlib.contextmanager
def attacked_router(*flags: str) -> Iterator[tuple[Attacked, Attacked]]:
    """A router, and the server that it routes to."""
    with attacked() as server:
        router = start_router(server.url, *flags)
        try:
            yield Attacked(router.process, int(router.url.rpartition(":")[2])), server
        finally:
            assert router.stop() == 0


@pytest.fixture(scope="module")
def routed() -> Iterator[tuple[Attacked, Attacked]]:
    with attacked_router("--max-body-bytes", str(8 * MIB)) as (router, server):
        until(router.is_well)
        yield router, server


def test_slow_clients_are_all_hung_up_on_while_good_ones_are_served():
    """R14."""
    with attacked_router("--header-timeout-s", "2", "--body-timeout-s", "2") as (router, _):
        until(router.is_well)
        with opened([kind(router) for kind in (silent, slow_head, slow_body) for _ in range(100)]) as bad:
            hung_up_on(router, bad)
        page = httpx.get(f"{router.url}/metrics", timeout=HANGS_S).text
    counted = re.findall(r'maitred_http_requests_total{route="(.*)",status="408"} (.*)', page)
    assert sorted(counted) == [("/v1/completions", "100.0"), ("other", "100.0")]


@pytest.mark.soak
def test_slow_readers_are_dropped_and_what_is_kept_for_them_is_bounded_at_router_and_server():
    """R15: what a client does not take its router does not take either, and the server hears of its end."""
    with attacked_router("--send-timeout-s", "2", "--sse-keep-alive-s", "0") as (router, server):
        until(router.is_well)
        before = router.rss_bytes(), server.rss_bytes()
        with opened([slow_reader(router) for _ in range(20)]) as readers:
            most = [0, 0]
            for connection in readers:
                has_begun(connection)
            while router.in_flight() > 0:
                most = [max(most[0], router.rss_bytes()), max(most[1], server.rss_bytes())]
                assert router.is_well()
        until(lambda: server.in_flight() == 0)
    for now, then in zip(most, before, strict=True):
        assert now - then < 20 * MIB, f"{(now - then) / 20 / 1024:.0f} KiB for each reader"


def refusal(server: Attacked, path: str, body: bytes) -> tuple[int, bytes]:
    answer = httpx.post(server.url + path, content=body, headers=JSON, timeout=HANGS_S)
    return answer.status_code, answer.content


@pytest.mark.parametrize("name", [*BROKEN, *FULL])
def test_what_is_wrong_with_a_body_its_server_says(routed: tuple[Attacked, Attacked], name: str):
    """R16."""
    router, server = routed
    body = BROKEN.get(name) or FULL.get(name, b"")
    for path in PATHS:
        told, expected = refusal(router, path, body), refusal(server, path, body)
        assert told[0] == expected[0]
        assert told == expected or name in ("lone_surrogate", "nul", "not_utf8", "surrogate_in_text")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in AT_THE_LIMIT]
)
def test_a_wrong_body_at_the_limit_is_refused_whatever_is_in_it(routed: tuple[Attacked, Attacked], name: str):
    router, _ = routed
    path, body = body_at_the_limit(name)
    assert refusal(router, path, body)[0] == 400
    assert router.is_well()


def test_a_body_over_the_limit_is_refused_declared_or_counted(routed: tuple[Attacked, Attacked]):
    router, _ = routed
    body = b'{"model":"tiny","prompt":"%b"}' % (b"x" * 8 * MIB)
    pieces = (body[at : at + MIB] for at in range(0, len(body), MIB))
    for content in (body, pieces):
        assert httpx.post(router.url + PATHS[1], content=content, headers=JSON, timeout=HANGS_S).status_code == 413
    assert router.is_well()


@pytest.fixture(scope="module")
def locked() -> Iterator[Attacked]:
    """It asks for a key."""
    with attacked_router("--api-key", "the-key") as (router, _):
        yield router


def test_every_route_but_the_open_ones_needs_a_key(locked: Attacked):
    """S1, and every path of a replica's."""
    told = [(route.method, route.path) for route in ROUTES.routes]
    for method, path in [
        *told,
        ("POST", "/tokenize"),
        ("GET", "/nothing"),
        ("POST", "/sleep"),
        ("POST", "/fleet/resume"),
    ]:
        needs_key = ROUTES.look(method, path).needs_key
        status = httpx.request(method, locked.url + path.replace("{", "").replace("}", ""), json={}).status_code
        assert (status == 401) is needs_key, (method, path, status)


SPELLINGS = (
    b"/v1//models",
    b"//v1/models",
    b"/v1/models;x",
    b"/v1/%6dodels",
    b"/health/../v1/models",
    b"/v1/models/..%2f",
    b"http://x/v1/models",
    b"/health/",
    b"/health;/../v1/models",
    b"/health%2f..%2fadmin%2ffleet",
    b"*",
    b"/metrics?x=/health",
    b"/v1/models#/health",
    b"/admin/fleet#/ready",
)


def test_no_spelling_of_a_path_or_host_passes_the_key_check(locked: Attacked):
    """S2."""
    for target in SPELLINGS:
        for host in (b"x", b"health", b"x/health?", b"a@b:8000/health#", b""):
            status = raw(locked.port, b"GET " + target + b" HTTP/1.1\r\nhost: " + host + b"\r\n\r\n").split(b" ")[1]
            assert status in (b"401", b"400", b"404"), (target, host)


@pytest.mark.parametrize("log_format", ["text", pytest.param("json", marks=pytest.mark.soak)])
def test_what_a_client_names_reaches_no_header_and_forges_no_line(log_format: str):
    """S6."""
    with attacked() as server:
        router = start_router(server.url, "--log-format", log_format)
        until(Attacked(router.process, int(router.url.rpartition(":")[2])).is_well)
        assert set(refused_hostile(router.url)) == {404}
        assert router.stop() == 0
    lines = [line for line in router.lines if "/v1/completions" in line and "404" in line]
    assert len(lines) == len(HOSTILE)
    assert "\x1b" not in "".join(router.lines)
    assert log_format == "text" or all(json.loads(line) for line in router.lines if line.startswith("{"))


def test_a_connection_that_ends_within_a_request_leaves_nothing(routed: tuple[Attacked, Attacked]):
    router, server = routed
    before = router.num_files(), server.num_files()
    for sent in (b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", router.port), timeout=HANGS_S) as connection:
            connection.sendall(sent)
    until(lambda: router.num_files() <= before[0] + 2 and server.num_files() <= before[1] + 2)
    assert router.is_well()
