"""Fields that nobody knows: the answer names them, the log guesses what was meant, and a strict server refuses them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import httpx
import pytest

from maitred.api.http.bodies import SMALL_BYTES
from maitred.api.http.exchange import MAX_LOGGED, names_told
from tests.api.conftest import MESSAGES
from tests.api.test_refusals import refused
from tests.fakes_api import RunningServer, running_server

HEADER = "x-maitred-ignored-fields"
BASES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "ab"},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [97]},
}
CHAT, TEXT = list(BASES)[:2]


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    with running_server(strict_fields=True) as server:
        yield server


@pytest.mark.parametrize("path", BASES)
def test_an_unknown_field_is_served_and_named(http: httpx.Client, path: str):
    answer = http.post(path, json=BASES[path] | {"temprature": 0.5, "poems": [1]})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "temprature, poems"
    assert HEADER not in http.post(path, json=BASES[path]).headers


def test_a_stream_and_an_error_name_it_as_well(http: httpx.Client):
    with http.stream("POST", CHAT, json=BASES[CHAT] | {"poems": 1, "stream": True}) as answer:
        assert answer.headers[HEADER] == "poems"
        assert answer.read().endswith(b"data: [DONE]\n\n")
    wrong = http.post(CHAT, json=BASES[CHAT] | {"poems": 1, "temperature": 9})
    assert (wrong.status_code, wrong.headers[HEADER]) == (400, "poems")


def test_an_unknown_field_of_the_stream_options_is_named_by_its_path(http: httpx.Client):
    options = {"include_usage": True, "include_usages": True, "chunk": None}
    for more in ({}, {"user": "x" * SMALL_BYTES}):
        answer = http.post(CHAT, json=BASES[CHAT] | more | {"stream": True, "stream_options": options})
        assert answer.headers[HEADER] == "stream_options.include_usages"


def test_null_is_as_good_as_absent(http: httpx.Client):
    assert HEADER not in http.post(CHAT, json=BASES[CHAT] | {"poems": None}).headers


def test_what_is_refused_elsewhere_is_not_told_as_unknown(http: httpx.Client):
    assert HEADER not in http.post(CHAT, json=BASES[CHAT] | {"typical_p": 1.0, "tools": []}).headers


@pytest.mark.parametrize("more", [{}, {"user": "x" * SMALL_BYTES}], ids=["small", "large"])
def test_no_more_than_ten_plain_names_are_told_and_the_rest_is_counted(http: httpx.Client, more: dict[str, str]):
    fields = {'a"b': 1, "ä": 1, "x" * 65: 1, "": 1} | {f"f{number}": 1 for number in range(12)}
    told = http.post(CHAT, json=BASES[CHAT] | more | fields).headers[HEADER]
    assert told == ", ".join([*(f"f{number}" for number in range(10)), "+6 more"])


def test_names_that_no_header_may_have_are_only_counted():
    assert names_told(["a\r\nset-cookie: x", "", "a b"]) == b"+3 more"
    assert names_told(["a.b-c_D", "x" * 64]) == b"a.b-c_D, " + b"x" * 64


def test_the_log_guesses_once_what_was_meant(caplog: pytest.LogCaptureFixture):
    with running_server() as server, caplog.at_level(logging.INFO, "maitred.api"):
        for _ in range(2):
            httpx.post(f"{server.url}{CHAT}", json=BASES[CHAT] | {"temprature": 0.5, "poems": 1})
    told = [(r.levelname, r.getMessage()) for r in caplog.records if "unknown" in r.getMessage()]
    assert told == [
        ("WARNING", "field temprature is unknown and was ignored (did you mean temperature?)"),
        ("INFO", "field poems is unknown and was ignored"),
    ]


def test_a_flood_of_names_does_not_fill_the_log(caplog: pytest.LogCaptureFixture):
    with running_server() as server, caplog.at_level(logging.INFO, "maitred.api"):
        for first in range(0, MAX_LOGGED + 100, 10):
            fields = {f"f{number}": 1 for number in range(first, first + 10)}
            httpx.post(f"{server.url}/detokenize", json=BASES["/detokenize"] | fields)
    assert sum("unknown" in r.getMessage() for r in caplog.records) == MAX_LOGGED


@pytest.mark.parametrize("path", BASES)
def test_a_strict_server_refuses_it_and_says_what_may_be_meant(strict: RunningServer, path: str):
    with httpx.Client(base_url=strict.url) as http:
        answer = http.post(path, json=BASES[path] | {"mdel": "tiny"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "unknown_parameter", "mdel")
        assert "did you mean model?" in error["message"]
        assert http.post(path, json=BASES[path] | {"poems": None}).status_code == 200
    assert strict.replica.aborted == []


def test_a_strict_server_says_of_a_refused_field_why(strict: RunningServer):
    with httpx.Client(base_url=strict.url) as http:
        assert refused(http, CHAT, {"poems": 1, "typical_p": 0.5})["param"] == "typical_p"


def test_a_strict_server_never_repeats_a_name_that_is_none(strict: RunningServer):
    with httpx.Client(base_url=strict.url) as http:
        error = http.post(TEXT, json=BASES[TEXT] | {"\x1b" * 100_000: 1}).json()["error"]
    assert error["param"] is None
    assert len(error["message"]) < 300


def test_the_document_tells_of_the_header(http: httpx.Client):
    paths = http.get("/openapi.json").json()["paths"]
    told = {path for path, methods in paths.items() for operation in methods.values() if _tells(operation)}
    assert told == {*BASES, "/v1/embeddings"}


def _tells(operation: dict[str, dict[str, dict[str, object]]]) -> bool:
    return HEADER in str(operation["responses"]["200"].get("headers", {}))
