"""Anything at all as a field's value, and bytes that are hardly HTTP: never a 5xx, never a crash."""

from __future__ import annotations

import contextlib
import socket
import string
from collections.abc import Collection
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maitred.api.dialects.kserve.generate import GenerateRequest
from maitred.api.dialects.openai.refusals import CHAT_REFUSED, COMPLETION_REFUSED, TOKENIZE_REFUSED
from maitred.api.dialects.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.api.conftest import MESSAGES
from tests.waiting import HANGS_S

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 256, 257, 512]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-300, 1e300, 5e-324, 0.5, 1.0, 2.0]),
    st.text(max_size=5),
    st.sampled_from(["", "none", "auto", "tiny", "text", "x" * 2000, "\u202e\x1b[31m", "</s>", "\x00"]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.text(string.ascii_lowercase, max_size=4), st.integers(-2, 300).map(str)), inner),
        st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", "json_object"]), "text": inner}),
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", "x"]), "content": inner}),
    ),
    max_leaves=5,
)


def names_of(body: type[msgspec.Struct], refused: Collection[str] = ()) -> list[str]:
    return [*body.__struct_fields__, *refused, "nobody_knows"]


BASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "/v1/chat/completions": (
        names_of(ChatCompletionRequest, CHAT_REFUSED),
        {"model": "tiny", "messages": MESSAGES, "max_tokens": 2},
    ),
    "/v1/completions": (
        names_of(CompletionRequest, COMPLETION_REFUSED),
        {"model": "tiny", "prompt": "ab", "max_tokens": 2},
    ),
    "/v2/models/tiny/generate": (
        names_of(GenerateRequest, [*CompletionRequest.__struct_fields__, *COMPLETION_REFUSED]),
        {"text_input": "ab", "parameters": {"max_tokens": 2}},
    ),
    "/tokenize": (names_of(TokenizeRequest, TOKENIZE_REFUSED), {"prompt": "ab"}),
    "/detokenize": (names_of(DetokenizeRequest), {"tokens": [1, 2]}),
}


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        if isinstance(error, str):  # of a dialect with nothing but its text
            error = dict.fromkeys(("type", "param", "code"), None) | {"message": error}
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert len(error["message"]) < 1200


@pytest.mark.parametrize("path", BASES)
def test_no_value_of_any_field_makes_a_5xx(http, path):
    names, base = BASES[path]

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(st.sampled_from(names), anything, min_size=1, max_size=3))
    def run(fields: dict[str, Any]) -> None:
        check(http.post(path, json={**base, **fields}))

    run()


@pytest.mark.parametrize("path", BASES)
def test_no_body_at_all_makes_a_5xx(http, path):
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=200))
    def run(body: bytes) -> None:
        check(http.post(path, content=body, headers={"content-type": "application/json"}))

    run()


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /%ff%fe%00 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/models/%00%0d%0aset-cookie:x HTTP/1.1\r\nhost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT evil:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"BREW /pot HTTP/1.1\r\nhost: x\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"content-length: 1e3\r\n\r\n",
        POST + b"content-length: 99999999999999999999999\r\n\r\n",
        POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}   ",
        POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}",
        POST + b"transfer-encoding: gzip\r\n\r\n{}",
        POST + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b",
        POST + b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: x\r\ncontent-length: 2\r\n\r\n{}",
        POST + b"x-request-id: a\r\nx-request-id: b\r\ncontent-length: 2\r\n\r\n{}",
        POST + b"bad header\r\ncontent-length: 2\r\n\r\n{}",
        POST + b"x: a\x00b\r\ncontent-length: 2\r\n\r\n{}",
        POST + b"content-length: 2\r\n\r\n{}" * 3,
    ],
)
def test_bytes_that_are_hardly_http_do_no_harm(served, request_bytes):
    with socket.create_connection(("127.0.0.1", served.port), timeout=HANGS_S) as connection:
        connection.sendall(request_bytes)
        answer = b""
        with contextlib.suppress(OSError):  # the server may have hung up already
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer
    assert b"set-cookie" not in answer.split(b"\r\n\r\n")[0]
    assert httpx.get(f"{served.url}/health").status_code == 200
