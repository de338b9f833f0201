"""Keys, unknown paths, methods, CORS, request ids: what stands before every route."""

from __future__ import annotations

import socket

import httpx
import openai
import pytest

from maitred.api.http.auth import Authenticator
from maitred.api.routes import make_routes
from maitred.core.errors import InvalidApiKey
from tests.api.conftest import MESSAGES, strict_client
from tests.fakes_api import FakeTenants, running_server, table_of
from tests.waiting import HANGS_S

ROUTES = make_routes()

KEYS = ("first-key", "second-kéy")


@pytest.fixture(scope="module")
def locked():
    with running_server(api_keys=KEYS, cors_origins=("https://app.example",)) as server:
        yield server


def raw(port: int, request: bytes) -> bytes:
    """The first bytes a server answers to exactly these."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANGS_S) as connection:
        connection.sendall(request)
        return connection.recv(4096)


@pytest.fixture(scope="module")
def of_tenants():
    with running_server(tenants=FakeTenants(table_of({"a": {}}))) as server:
        yield server


@pytest.mark.parametrize(("method", "path"), [(route.method, route.path) for route in ROUTES.routes])
def test_every_route_but_the_open_ones_needs_a_key(locked, of_tenants, method, path):
    servers = (locked, of_tenants)
    response, other = (
        httpx.request(method, each.url + path.replace("{model:path}", "tiny"), json={}) for each in servers
    )
    assert other.status_code == response.status_code
    if not ROUTES.look("GET", path).needs_key:
        assert response.status_code == 200
    else:
        assert response.status_code == 401
        told = response.json()["error"]
        if isinstance(told, str):  # of KServe v2 and of Ollama
            assert "key" in told
        else:
            assert told["type"] == "authentication_error"
            assert told.get("code") == (None if path.startswith("/v1/messages") else "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(locked, key):
    response = httpx.get(f"{locked.url}/v1/models", headers={"authorization": f"Bearer {key}".encode()})
    assert response.status_code == 200


def test_the_client_raises_what_it_raises_for_openai(locked):
    with pytest.raises(openai.AuthenticationError):
        strict_client(locked.url, "wrong").models.list()
    assert strict_client(locked.url, "first-key").models.list().data


@pytest.mark.parametrize(
    "header", [b"", b"Bearer", b"Bearer  x", b"Basic first-key", b"first-key", b"Bearer first-ke", b"Bearer first-keyy"]
)
def test_a_wrong_key_does_not_open(locked, header):
    assert httpx.get(f"{locked.url}/v1/models", headers={"authorization": header}).status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_has_no_case(scheme):
    Authenticator(KEYS).check(f"{scheme} first-key".encode())


def test_a_bytes_key_that_is_no_text_is_only_wrong():
    with pytest.raises(InvalidApiKey):
        Authenticator(KEYS).check(b"Bearer \xff\xfe")


@pytest.mark.parametrize("target", [
    b"/v1//models", b"//v1/models", b"/v1/models;x", b"/v1/%6dodels", b"/%76%31/models", b"/health/../v1/models",
    b"/v1/models/..%2f", b"http://x/v1/models", b"http://x/health/../v1/models", b"/health/",
    b"/health;/../v1/models", b"/health%2f..%2fv1%2fmodels", b"/nothing", b"*", b"/metrics?x=/health",
    b"/v1/models#/health",
])  # fmt: skip
@pytest.mark.parametrize("host", [b"x", b"health", b"x/health?", b"a@b:8000/health#", b""])
def test_no_spelling_of_a_path_or_host_passes_the_key_check(locked, target, host):
    status = raw(locked.port, b"GET " + target + b" HTTP/1.1\r\nhost: " + host + b"\r\n\r\n").split(b" ")[1]
    assert status in (b"401", b"400", b"404")


def test_a_preflight_needs_no_key_and_errors_are_readable_across_origins(locked):
    preflight = httpx.options(
        f"{locked.url}/v1/chat/completions",
        headers={
            "origin": "https://app.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        },
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    refused = httpx.get(f"{locked.url}/v1/models", headers={"origin": "https://app.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    other = httpx.get(f"{locked.url}/health", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_there_is_no_cors_by_default(http):
    answer = http.get("/v1/models", headers={"origin": "https://app.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    preflight = http.options("/v1/models", headers={"origin": "x", "access-control-request-method": "GET"})
    assert preflight.status_code == 405


@pytest.mark.parametrize(("method", "path", "status", "code"), [
    ("GET", "/nothing", 404, "not_found"),
    ("GET", "/v1/models/", 404, "model_not_found"),
    ("GET", "/v1/models/other/name", 404, "model_not_found"),
    ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
    ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ("POST", "/health", 405, "method_not_allowed"),
    ("PATCH", "/v1/completions", 405, "method_not_allowed"),
])  # fmt: skip
def test_paths_and_methods_that_are_not_there_get_the_usual_error(http, method, path, status, code):
    response = http.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert response.headers["allow"]


def test_a_path_names_all_its_methods_head_has_no_body_and_no_redirect_is_made_from_the_host_header(http, served):
    response = http.delete("/admin/policy")
    assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD, POST")
    assert (http.head("/health").status_code, http.head("/v1/models").text) == (200, "")
    answer = raw(served.port, b"GET /health/ HTTP/1.1\r\nhost: evil.example\r\n\r\n")
    assert b" 404 " in answer
    assert b"evil" not in answer


@pytest.mark.parametrize("sent", ["", "a b", "a\tb", "x" * 129, "a;b", "a/b", 'a"b', "${jndi:ldap://x}"])
def test_a_request_id_that_could_forge_something_is_replaced(http, sent):
    got = http.get("/version", headers={"x-request-id": sent}).headers["x-request-id"]
    assert got != sent
    assert len(got) == 32
    assert got.isalnum()


@pytest.mark.parametrize("sent", ["a", "x" * 128, "A.b_c-9"])
def test_a_good_request_id_comes_back_with_every_answer(http, sent):
    for path in ("/version", "/nothing", "/v1/models"):
        assert http.get(path, headers={"x-request-id": sent}).headers["x-request-id"] == sent
    stream = http.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": MESSAGES, "stream": True},
        headers={"x-request-id": sent},
    )
    assert stream.headers["x-request-id"] == sent
