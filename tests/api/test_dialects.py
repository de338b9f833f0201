"""Another dialect beside OpenAI's: its own fields, its own stream, its own errors, on the same way to the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import httpx
import msgspec
import pytest

from maitred.api.generate.complete import complete
from maitred.api.generate.dialect import Dialect, GenerationAsk
from maitred.api.generate.outcome import Outcome, Sample
from maitred.api.http.app import App
from maitred.api.http.bodies import BodyDecoder
from maitred.api.http.errors import HttpError
from maitred.api.http.exchange import Exchange
from maitred.api.http.routes import Route, RouteTable, StreamFormat
from maitred.api.ops.openapi import openapi_document
from maitred.api.routes import make_routes
from maitred.core.errors import UnsupportedParameter
from maitred.core.request import SamplingParams
from maitred.engine.output import TextDelta
from tests.fakes_api import FakeReplica, running_server, says

KEY = {"authorization": "Bearer letmein"}


class Question(msgspec.Struct, kw_only=True):
    words: str
    budget: int | None = None
    piecemeal: bool = False
    hurry: int | None = None
    poems: bool | None = None


QUESTION = BodyDecoder(Question)


class Complaint(msgspec.Struct):
    complaint: str
    about: str | None


class Lines:
    """A line of JSON for each event, and nothing to keep a stream open with."""

    stream = StreamFormat(b'{"over":true}\n', ((b"content-type", b"application/x-ndjson"),), b"")
    error_schema = Complaint
    statuses: Mapping[str | None, int] = {}
    id_headers = (b"x-request-id",)

    def error_body(self, error: HttpError) -> bytes:
        return msgspec.json.encode(Complaint(error.message, error.param))

    def error_event(self, error: HttpError) -> bytes:
        return self.error_body(error) + b"\n"


@dataclass
class Reply:
    def whole(self, outcome: Outcome) -> bytes:
        used = outcome.usage()
        return msgspec.json.encode({"reply": outcome.samples[0].text, "spent": used.num_generated_tokens})

    def stream(self, outcome: Outcome) -> Reply:
        return self

    def delta(self, sample: Sample, delta: TextDelta) -> bytes:
        return msgspec.json.encode({"more": delta.text}) + b"\n" if delta.text else b""

    def last(self) -> bytes:
        return b""


def decode(app: App, exchange: Exchange, sent: bytes) -> GenerationAsk:
    question = QUESTION.decode(sent).body
    if question.poems:
        raise UnsupportedParameter("poems are not written here", param="poems")
    exchange.field_names = lambda: {"prompt": "words", "max_tokens": "budget"}
    return GenerationAsk(
        id=exchange.request_id, answer=Reply(), stream=question.piecemeal,
        sampling=SamplingParams(max_tokens=question.budget), prompts=lambda: [question.words],
        add_special_tokens=False, priority=question.hurry, default_max_tokens=4,
    )  # fmt: skip


LINES = Dialect(Lines(), decode)
ROUTE = Route(method="POST", path="/ask", handler=partial(complete, LINES), format=LINES.format, summary="Ask.")
OURS = make_routes()
BOTH = RouteTable((*OURS.routes, ROUTE), OURS.format)


@pytest.fixture(scope="module")
def replica() -> FakeReplica:
    return FakeReplica(says("A table by the window."))


@pytest.fixture(scope="module")
def http(replica: FakeReplica) -> Iterator[httpx.Client]:
    with (
        running_server(replica, routes=BOTH, api_keys=("letmein",)) as server,
        httpx.Client(base_url=server.url, headers=KEY) as client,
    ):
        yield client


def test_its_words_reach_the_engine_and_the_engine_s_come_back_in_its_own(http: httpx.Client, replica: FakeReplica):
    answer = http.post("/ask", json={"words": "A table?", "budget": 7, "hurry": 2})
    assert answer.json() == {"reply": "A table", "spent": 7}
    request = replica.submitted[-1]
    assert (bytes(request.prompt_token_ids), request.max_tokens, request.terms.priority) == (b"A table?", 7, 2)
    assert http.post("/ask", json={"words": "A table?"}).json()["spent"] == 4  # its own default


@pytest.mark.parametrize(("asked", "meant"), [
    ("/chat/completions", "/v1/chat/completions"),  # a base URL without /v1
    ("/v1/v1/chat/completions", "/v1/chat/completions"),  # and with one too many
    ("/v1/chat/completions/", "/v1/chat/completions"),
    ("/v1/chat/completion", "/v1/chat/completions"),
    ("/models", "/v1/models"),
    ("/api/tokenize", "/tokenize"),
])  # fmt: skip
def test_a_path_that_is_not_there_is_told_the_one_that_was_meant(http: httpx.Client, asked: str, meant: str):
    answer = http.post(asked, json={})
    assert answer.status_code == 404
    assert f"there is nothing at {asked} (did you mean {meant}?);" in answer.json()["error"]["message"]


@pytest.mark.parametrize("asked", ["/wp-admin.php", "/" + "a" * 5000, "/s", "/zz/x"])
def test_a_path_like_no_other_is_told_where_the_list_is(http: httpx.Client, asked: str):
    message = http.get(asked).json()["error"]["message"]
    assert "did you mean" not in message
    assert "GET /openapi.json lists what there is" in message


def test_its_stream_has_its_own_content_type_events_and_end(http: httpx.Client):
    answer = http.post("/ask", json={"words": "A table?", "budget": 3, "piecemeal": True})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text == '{"more":"A"}\n{"more":" "}\n{"more":"t"}\n{"over":true}\n'


@pytest.mark.parametrize(
    ("sent", "status", "about"),
    [
        ({"json": {"words": "x" * 600}}, 400, "words"),
        ({"json": {"words": "Hi", "budget": 600}}, 400, "budget"),
        ({"json": {"words": 3}}, 400, "words"),
        ({"json": {"words": "Hi", "poems": True}}, 400, "poems"),
        ({"content": b"{"}, 415, None),
        ({"json": {"words": "Hi"}, "headers": {"authorization": "Bearer wrong"}}, 401, None),
    ],
    ids=["too long", "of the engine", "a wrong type", "not built", "no JSON", "no key"],
)
def test_its_errors_have_its_own_body_and_name_its_own_fields(http: httpx.Client, sent, status: int, about: str | None):
    answer = http.post("/ask", **sent)
    assert (answer.status_code, answer.json().keys()) == (status, {"complaint", "about"})
    assert answer.json()["about"] == about


def test_errors_of_methods_of_streams_and_in_the_document_are_its_own(http: httpx.Client):
    assert "complaint" in http.get("/ask").json()
    assert http.post("/v1/chat/completions", json={}).json()["error"]["param"] == "messages"
    assert "error" in http.get("/nowhere").json()
    with running_server(FakeReplica(fail_after=1), routes=BOTH) as server:
        answer = httpx.post(f"{server.url}/ask", json={"words": "Hi", "budget": 5, "piecemeal": True})
    first, broken, end = answer.text.splitlines()
    assert (first, end) == ('{"more":"H"}', '{"over":true}')
    assert msgspec.json.decode(broken, type=Complaint).complaint == "logits are NaN"
    errors = openapi_document(BOTH)["paths"]["/ask"]["post"]["responses"]["401"]["content"]["application/json"]
    assert errors["schema"] == {"$ref": "#/components/schemas/Complaint"}
