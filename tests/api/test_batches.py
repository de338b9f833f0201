"""Files and batches as OpenAI's own client asks for them: answers by custom_id, ends of all kinds, tenants apart."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from maitred.api.batches import batches_of
from maitred.api.common_routes import resume_batches
from maitred.api.http.asgi import AsgiApp
from maitred.api.serving import create_app
from maitred.config import AdmissionConfig, ServerConfig
from maitred.gate.admission import AdmissionController
from tests.api.conftest import strict_client
from tests.fakes_api import FakeReplica, FakeTenants, RunningServer, make_model, running_server, says, table_of
from tests.fleet.routers import MODEL, Seen, completion, routed, whole
from tests.waiting import HANGS_S, until, until_async

CHAT, EMPTY = "/v1/chat/completions", {"anchor": "created_at", "seconds": 3600}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    tenants = FakeTenants(table_of({"ada": {}, "bob": {}, "poor": {"token_budget": 60}}))
    admission = AdmissionController(AdmissionConfig(), max_num_seqs=4)
    with running_server(FakeReplica(), tenants=tenants, admission=admission, max_file_bytes=300_000) as server:
        yield server


@pytest.fixture
def ada(server: RunningServer) -> Iterator[openai.OpenAI]:
    with strict_client(server.url, "ada") as client:
        yield client


def line(custom_id: object, url: str = CHAT, **body: object) -> bytes:
    asked = {"model": "tiny", "max_tokens": 20} | body
    asked["messages"] = [{"role": "user", "content": "hi"}]
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": asked}).encode() + b"\n"


def left(client: openai.OpenAI, content: bytes, **of: Any) -> Any:
    return client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch", **of)


def batch_of(client: openai.OpenAI, content: bytes, **of: Any) -> Any:
    of = {"endpoint": CHAT, "completion_window": "24h"} | of
    return client.batches.create(input_file_id=left(client, content).id, **of)


def ended(client: openai.OpenAI, batch: Any) -> Any:
    def is_over() -> bool:
        return client.batches.retrieve(batch.id).status in ("completed", "failed", "expired", "cancelled")

    until(is_over)
    return client.batches.retrieve(batch.id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    found = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert len({answer["custom_id"] for answer in found}) == len(found)
    return {answer["custom_id"]: answer for answer in found}


def test_a_file_is_left_listed_read_and_deleted(ada):
    content = b"x" * 200_000 + b"\r\n--\r\n" + bytes(range(256))
    first = left(ada, content)
    assert (first.bytes, first.filename, first.purpose, first.status) == (
        len(content),
        "in.jsonl",
        "batch",
        "processed",
    )
    assert first.expires_at == first.created_at + 30 * 24 * 3600
    assert ada.files.content(first.id).read() == content
    second = left(ada, b"", expires_after={"anchor": "created_at", "seconds": 3600})
    assert second.expires_at == second.created_at + 3600
    third = ada.files.create(file=("ü.txt", b"hi"), purpose="user_data")
    assert (third.filename, third.expires_at) == ("ü.txt", None)
    assert [file.id for file in ada.files.list()] == [third.id, second.id, first.id]
    assert [file.id for file in ada.files.list(order="asc", limit=2).data] == [first.id, second.id]
    assert [file.id for file in ada.files.list(limit=1)] == [third.id, second.id, first.id]  # in three pages
    assert [file.id for file in ada.files.list(purpose="user_data")] == [third.id]
    assert ada.files.retrieve(second.id) == second
    for file in (first, second, third):
        assert ada.files.delete(file.id).deleted
    assert ada.files.list().data == []
    with pytest.raises(openai.NotFoundError):
        ada.files.content(first.id)


def test_a_response_waits_for_the_store_and_nobody_else_does(ada, server):
    replica, store = server.replica, server.server.app.stored
    num_before = len(replica.submitted)
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, timeout=HANGS_S) as http:
        with store.together():  # as an upload's thread does
            response = pool.submit(ada.responses.create, model="tiny", input="hi")
            until(lambda: len(replica.submitted) > num_before and not replica.live)
            assert http.get("/health").status_code == 200
            assert not response.done()
        assert response.result(HANGS_S).status == "completed"


FORM = {"content-type": "multipart/form-data; boundary=x"}
ODD_FORM = {"content-type": 'multipart/form-data; boundary="a,b:c"'}


def form_with(filename: str) -> bytes:
    head = f"content-disposition: form-data; name=file; {filename}"
    return f"--x\r\n{head}\r\n\r\nhi\r\n--x--\r\n".encode()


@pytest.mark.parametrize(
    ("form", "status", "words"),
    [
        ({"files": {"file": b"x" * 300_001}, "data": {"purpose": "batch"}}, 413, "--max-file-bytes"),
        ({"files": {"file": b"x"}, "data": {"purpose": "fun"}}, 400, "purpose"),
        ({"files": {"other": b"x"}, "data": {"purpose": "batch"}}, 400, "as `file`"),
        ({"files": [("file", b"x"), ("file", b"y")], "data": {"purpose": "batch"}}, 400, "'file' twice"),
        ({"content": form_with("filename*=unicode_escape''%5Cud800"), "headers": FORM}, 400, "cannot be read"),
        ({"content": form_with("filename*=undefined''x"), "headers": FORM}, 400, "cannot be read"),
        ({"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[anchor]": "x"}}, 400, "expires_after"),
        ({"files": {"file": b"x"}, "data": {"purpose": "b" * 2000}}, 413, "1024 bytes"),
        ({"json": {"file": "x"}}, 415, "multipart/form-data"),
        (
            {"content": form_with("filename=a").replace(b"--x", b"--a,b:c"), "headers": ODD_FORM},
            400,
            "purpose is missing",
        ),
        (
            {"content": b"--x\r\n", "headers": FORM},
            400,
            "before its end",
        ),
    ],
)
def test_a_form_that_cannot_be_taken_leaves_nothing(server, form, status, words):
    with httpx.Client(base_url=server.url, timeout=HANGS_S) as http:
        key = {"authorization": "Bearer ada"}
        answer = http.post("/v1/files", **form | {"headers": form.get("headers", {}) | key})
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True)
        assert http.get("/v1/files", headers=key).json()["data"] == []
    store = server.server.app.stored
    assert store.entries("upload", None, 0.0) == []


def test_a_batchs_lines_are_answered_by_custom_id_as_the_route_answers(ada, server):
    content = b"\xef\xbb\xbf" + line("a") + b"\n" + line("wrong", temperature="hot") + line("b", max_tokens=5).rstrip()
    batch = batch_of(ada, content, metadata={"for": "test"})
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", CHAT, {"for": "test"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    done = ended(ada, batch)
    assert (done.status, done.errors) == ("completed", None)
    assert done.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    assert (done.usage.output_tokens, done.usage.total_tokens) == (19, done.usage.input_tokens + 19)
    good, bad = lines_of(ada, done.output_file_id), lines_of(ada, done.error_file_id)
    assert set(good) == {"a", "b"}
    assert good["a"]["response"]["status_code"] == 200
    assert good["a"]["response"]["request_id"] == f"{batch.id}-1"
    assert good["a"]["error"] is None
    answer = openai.types.chat.ChatCompletion.model_validate(good["b"]["response"]["body"])
    assert answer.choices[0].message.content == "Hello"
    assert bad["wrong"]["response"]["status_code"] == 400
    assert bad["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    file = ada.files.retrieve(done.output_file_id)
    assert (file.purpose, file.bytes) == ("batch_output", len(ada.files.content(file.id).read()))
    assert [spec.terms.background for spec in server.replica.submitted[-2:]] == [True, True]
    assert server.replica.submitted[-1].terms.tenant == "ada"
    assert server.replica.submitted[-1].terms.finish_by is not None


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/responses"])
def test_lines_go_to_whatever_route_the_batch_names(ada, url):
    asked = {"model": "tiny", "max_tokens": 20, "prompt": "hi"} if "completions" in url else {"input": "hi"}
    content = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": asked}).encode()
    done = ended(ada, batch_of(ada, content, endpoint=url))
    body = lines_of(ada, done.output_file_id)["a"]["response"]["body"]
    assert "Hello, world!" in json.dumps(body)
    assert done.usage.output_tokens == 14


def test_faults_of_an_input_are_told_by_line(ada):
    content = line("a") + b"{oops\n" + line("a") + line("c", url="/v1/completions") + line("d", stream=True)
    done = ended(ada, batch_of(ada, content))
    assert (done.status, done.output_file_id, done.failed_at is not None) == ("failed", None, True)
    assert [(fault.line, fault.code) for fault in done.errors.data] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_url"),
        (5, "invalid_body"),
    ]
    assert ended(ada, batch_of(ada, b"\n")).errors.data[0].code == "empty_file"


def test_what_is_no_batch_is_refused(ada):
    file = ada.files.create(file=("x", line("a")), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="purpose is 'user_data'"):
        ada.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match=f"{CHAT}, /v1/completions"):
        batch_of(ada, line("a"), endpoint="/v1/moderations")
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        batch_of(ada, line("a"), completion_window="soon")
    with pytest.raises(openai.NotFoundError, match="No such File") as missing:
        ada.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    assert missing.value.param == "input_file_id"


def test_a_batch_is_cancelled_and_keeps_the_answers_it_has(ada, server):
    server.replica.held, already = True, len(server.replica.submitted)
    batch = batch_of(ada, b"".join(line(str(number)) for number in range(40)))
    until(lambda: len(server.replica.submitted) - already == 4 + 8)  # the engine's slots, and some more
    ada.files.delete(batch.input_file_id)  # it has been read
    assert ada.batches.cancel(batch.id).status == "cancelling"
    done = ended(ada, batch)
    server.replica.held = False
    assert (done.status, done.cancelled_at is not None) == ("cancelled", True)
    assert done.request_counts.to_dict() == {"total": 40, "completed": 0, "failed": 40}
    assert {answer["error"]["code"] for answer in lines_of(ada, done.error_file_id).values()} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="the batch is cancelled"):
        ada.batches.cancel(batch.id)
    assert not server.replica.live


def test_lines_that_the_window_leaves_out_are_told(ada, server):
    server.replica.held = True
    batch = batch_of(ada, line("a") + line("b"), completion_window="1s", output_expires_after=EMPTY)
    done = ended(ada, batch)
    server.replica.held = False
    assert (done.status, done.expired_at is not None) == ("expired", True)
    left_out = lines_of(ada, done.error_file_id)
    assert {name: answer["error"]["code"] for name, answer in left_out.items()} == dict.fromkeys("ab", "batch_expired")
    file = ada.files.retrieve(done.error_file_id)
    assert file.expires_at == file.created_at + 3600


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/messages/batches"])
def test_a_limit_of_many_digits_is_refused(server, path):
    for limit in ("0000000019" + "9" * 25, "1" * 5000):
        answer = httpx.get(f"{server.url}{path}?limit={limit}", headers={"authorization": "Bearer ada"})
        assert (answer.status_code, "limit is" in answer.text) == (400, True)


def test_another_tenants_files_and_batches_are_not_there(ada, server):
    batch = ended(ada, batch_of(ada, line("a")))
    with strict_client(server.url, "bob") as bob:
        assert (bob.files.list().data, bob.batches.list().data) == ([], [])
        for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(batch.output_file_id)
        for ask in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
        with pytest.raises(openai.NotFoundError):
            bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    listed = ada.batches.list(limit=2)
    assert listed.data[0].id == batch.id
    assert listed.has_more


def test_a_spent_budget_fails_lines_with_the_tenants_own_error(server):
    with strict_client(server.url, "poor") as poor:
        done = ended(poor, batch_of(poor, b"".join(line(str(number)) for number in range(3))))
        assert done.request_counts.failed >= 2
        refused = list(lines_of(poor, done.error_file_id).values())[-1]["response"]
    assert (refused["status_code"], refused["body"]["error"]["code"]) == (429, "insufficient_quota")


def test_anthropics_batches_are_the_same_underneath(server):
    with anthropic.Anthropic(base_url=server.url, api_key="ada", max_retries=0) as client:
        params = {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
        asked = [
            {"custom_id": "a", "params": params},
            {"custom_id": "wrong", "params": params | {"temperature": "hot"}},
        ]
        batches = client.messages.batches
        batch = batches.create(requests=asked)
        assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 2)
        assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600
        until(lambda: batches.retrieve(batch.id).processing_status == "ended")
        done = batches.retrieve(batch.id)
        assert (done.request_counts.succeeded, done.request_counts.errored) == (1, 1)
        found = {line.custom_id: line.result for line in batches.results(batch.id)}
        assert found["a"].message.content[0].text == "Hello, world!"
        assert "temperature" in found["wrong"].error.error.message
        server.replica.held = True
        other = batches.create(requests=asked[:1])
        with pytest.raises(anthropic.BadRequestError, match="not ended"):
            batches.delete(other.id)
        assert [one.id for one in batches.list(limit=1)] == [other.id, batch.id]  # in two pages
        assert [one.id for one in batches.list(before_id=batch.id).data] == [other.id]
        assert batches.cancel(other.id).processing_status == "canceling"
        until(lambda: batches.retrieve(other.id).processing_status == "ended")
        server.replica.held = False
        assert batches.retrieve(other.id).request_counts.canceled == 1
        assert [line.result.type for line in batches.results(other.id)] == ["canceled"]
        assert batches.delete(batch.id).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            batches.results(batch.id)
        with pytest.raises(anthropic.BadRequestError, match="after_id is"):  # it would seem to be the last page
            batches.list(after_id=batch.id)
        with pytest.raises(anthropic.BadRequestError, match="stands twice"):
            batches.create(requests=asked[:1] * 2)
        with pytest.raises(anthropic.BadRequestError, match=r"requests\[1\].params is not a JSON object"):
            batches.create(requests=[asked[0], {"custom_id": "b", "params": []}])


async def test_a_router_runs_batches_too_and_any_replicas_answer_is_one_line():
    pretty = json.dumps(json.loads(completion()), indent=2).encode()
    limited = [whole(b"{}", "429 Too Many Requests", "retry-after: 0\r\n")]

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(limited.pop() if limited else whole(pretty))

    async with routed(script) as (running, (replica,)):

        def with_client() -> None:
            with strict_client(running.url) as client:
                done = ended(client, batch_of(client, line("a", model=MODEL) + line("b", model=MODEL)))
                assert (done.status, done.usage.output_tokens) == ("completed", 4)
                found = lines_of(client, done.output_file_id)
                assert [found[name]["response"]["body"] for name in "ab"] == [json.loads(pretty)] * 2

        await asyncio.to_thread(with_client)
    assert [seen.path for seen in replica.requests].count(CHAT) == 3  # one was asked again


@asynccontextmanager
async def kept_in(folder: Path, replica: FakeReplica) -> AsyncIterator[tuple[AsgiApp, httpx.AsyncClient]]:
    """A server of one slot that keeps its state there, and ends without a word to anybody."""
    admission = AdmissionController(AdmissionConfig(), max_num_seqs=1)
    asgi = create_app(replica, make_model(), ServerConfig(state_dir=str(folder)), admission=admission)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(asgi), base_url="http://test") as http:
        yield asgi, http
    asgi.app.close()


async def begun(http: httpx.AsyncClient, num_lines: int) -> str:
    form = {"files": {"file": b"".join(line(str(number)) for number in range(num_lines))}, "data": {"purpose": "batch"}}
    file = (await http.post("/v1/files", **form)).json()
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "1h"}
    return (await http.post("/v1/batches", json=asked)).json()["id"]


def holding_after(num_lines: int) -> FakeReplica:
    """Answers so many lines, and is held then."""
    replica = FakeReplica()

    def answer(spec: object) -> list[int]:
        replica.held = len(replica.submitted) > num_lines
        return says("hi")(spec)

    replica.answer = answer
    return replica


@pytest.mark.parametrize("is_told", [False, True])
async def test_another_process_goes_on_with_the_lines_that_have_no_answer(tmp_path, is_told):
    first, second = holding_after(12), FakeReplica(answer=says("hi"))
    async with kept_in(tmp_path / "state", first) as (asgi, http):
        batch = await begun(http, 30)
        await until_async(lambda: first.held)
        if is_told:  # to end, and what is in flight is cut off
            asgi.app.in_flight.drain(0.0)
            asgi.app.in_flight.cut_all()
            await until_async(lambda: not batches_of(asgi.app).runs)
    async with kept_in(tmp_path / "state", second) as (asgi, http):
        counts = (await http.get(f"/v1/batches/{batch}")).json()["request_counts"]
        assert counts["failed"] == 0
        assert counts["completed"] <= 12
        resume_batches(asgi.app)
        await until_async(lambda: not batches_of(asgi.app).runs)
        done = (await http.get(f"/v1/batches/{batch}")).json()
        output = (await http.get(f"/v1/files/{done['output_file_id']}/content")).text.splitlines()
    assert (done["status"], done["error_file_id"]) == ("completed", None)
    assert done["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert sorted(int(json.loads(text)["custom_id"]) for text in output) == list(range(30))
    assert len(second.submitted) == 30 - counts["completed"]


async def test_while_the_disk_is_full_a_batch_waits_and_says_so(tmp_path):
    replica = holding_after(3)
    async with kept_in(tmp_path / "state", replica) as (asgi, http):
        batch = await begun(http, 30)
        await until_async(lambda: replica.held)
        with asgi.app.stored.together() as db:
            (num_pages,) = db.execute("PRAGMA page_count").fetchone()
            db.execute(f"PRAGMA max_page_count = {num_pages}")
        replica.answer, replica.held = says("long " * 100), False
        await until_async(lambda: batches_of(asgi.app).runs[batch].trouble)
        told = (await http.get(f"/v1/batches/{batch}")).json()
        assert (told["status"], told["errors"]["data"][0]["code"]) == ("in_progress", "state_unavailable")
        assert (
            await http.post("/v1/files", files={"file": b"x" * 100_000}, data={"purpose": "batch"})
        ).status_code == 503
        assert (await http.post(CHAT, json=json.loads(line("x"))["body"])).status_code == 200
        with asgi.app.stored.together() as db:
            db.execute("PRAGMA max_page_count = 1000000")
        await until_async(lambda: not batches_of(asgi.app).runs)
        done = (await http.get(f"/v1/batches/{batch}")).json()
    assert (done["status"], done["errors"], done["request_counts"]["completed"]) == ("completed", None, 30)
