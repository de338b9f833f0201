"""A replica dies, or hangs, in the middle of its streams: nobody who reads them notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import ollama
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.api.http.fleet_headers import FleetToken
from maitred.fleet.told import (
    MAX_LINE_BYTES,
    SEED,
    TELL,
    USAGE,
    BrokenFrame,
    ResumeRequest,
    StreamHead,
    ToldFrame,
    ToldSample,
    ToldTokens,
    ToldUsage,
    frame,
    head_line,
    usage_header,
    usage_in,
)
from tests.api.test_resume import client_has
from tests.conftest import ROOT, ServerProcess
from tests.fleet.routers import (
    DONE,
    LAST_CHUNK,
    MODEL,
    STREAM_HEAD,
    FakeUpstream,
    RunningRouter,
    Script,
    Seen,
    chat,
    chunk,
    client_of,
    event,
    fake_upstream,
    running_router,
    says,
    whole,
)
from tests.fleet.test_end_to_end import RealFleet, real_fleet
from tests.waiting import HANGS_S, until, until_async

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAYS = [{"role": "user", "content": "Tell me of the sea."}]
LONG = {"max_tokens": 400, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
WORDS = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 300}
PARAMETERS = {"type": "object", "properties": {"words": WORDS}, "required": ["words"]}
TOOL = {"type": "function", "function": {"name": "say", "parameters": PARAMETERS}}
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": SAYS, "temperature": 0}),
    (CHAT, {"messages": SAYS, "seed": 2, "n": 2, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": SAYS, "seed": 3, "stop": ["never to be found in this text"], **PENALTIES}),
    (
        CHAT,
        {
            "messages": SAYS,
            "seed": 5,
            "n": 2,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    (TEXT, {"prompt": "The old man", "seed": 6, "echo": True, "logprobs": 1, "return_token_ids": True}),
    (TEXT, {"prompt": ["One", "Two little"], "seed": 7, "n": 2}),
    (CHAT, {"messages": SAYS, "seed": 8, "n": 2, "structured_outputs": {"regex": "([a-z]{2,9}, ){400}"}}),
    (CHAT, {"messages": SAYS, "seed": 9, "tools": [TOOL], "tool_choice": "required"}),
)
OLLAMA_ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chat", {"messages": SAYS, "format": PARAMETERS, "options": {"temperature": 0}}),
    ("chat", {"messages": SAYS, "format": PARAMETERS, "think": True, "options": {"seed": 4}}),
    ("generate", {"prompt": "The old man", "raw": True, "format": PARAMETERS, "options": {"seed": 6}}),
    ("generate", {"prompt": "The sea?", "format": PARAMETERS, "logprobs": True, "options": {"seed": 7}}),
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    flags = ("--drain-timeout", "1")
    with real_fleet(tmp_path_factory.mktemp("fleet"), [flags] * 5, "--balance", "round_robin") as running:
        yield running


def without_what_differs(had: dict[str, Any]) -> dict[str, Any]:
    """Ids, what was cached by then, and how far usage was at each event."""
    assert len(had["ids"]) == 1
    assert had["generated"] == sorted(had["generated"])
    for choice in had["choices"].values():
        choice["calls"] = [call[1:] for call in choice["calls"]]
    return {"choices": had["choices"], "usage": had["usage"]["completion_tokens"]}


def streams_while(fleet: RealFleet, happens: Callable[[], object]) -> list[dict[str, Any]]:
    """All of ASKED and OLLAMA_ASKED at once; once each has something of its answer, it `happens`."""
    num_streams = len(ASKED) + len(OLLAMA_ASKED)
    have_begun = threading.Barrier(num_streams + 1)

    def stream_of_ollama(name: str, fields: dict[str, Any]) -> dict[str, Any]:
        client, options = ollama.Client(fleet.router.url, timeout=HANGS_S), {"num_predict": 400, **fields["options"]}
        parts = getattr(client, name)("maitred-mini:latest", stream=True, **fields | {"options": options})
        had = [next(parts)]
        have_begun.wait(HANGS_S)
        had += parts
        message = [part.message if name == "chat" else part for part in had]
        assert [part.done for part in had] == [False] * (len(had) - 1) + [True]
        assert had[-1].total_duration >= had[-1].prompt_eval_duration + had[-1].eval_duration > 0
        return {
            "text": "".join(part.content if name == "chat" else part.response for part in message),
            "thinking": "".join(part.thinking or "" for part in message),
            "logprobs": [each.token for part in had for each in part.logprobs or ()],
            "created": {part.created_at for part in had} - {had[0].created_at},
            "end": (
                had[-1].done_reason,
                had[-1].eval_count,
                had[-1].prompt_eval_count,
                getattr(had[-1], "context", None),
            ),
        }

    def stream(number: int) -> dict[str, Any]:
        if number >= len(ASKED):
            return stream_of_ollama(*OLLAMA_ASKED[number - len(ASKED)])
        path, fields = ASKED[number]
        with fleet.client.stream("POST", path, json=LONG | fields) as answer:
            assert answer.status_code == 200
            pieces = answer.iter_bytes()
            first = next(pieces)
            have_begun.wait(HANGS_S)
            return without_what_differs(client_has(first + b"".join(pieces)))

    with ThreadPoolExecutor(num_streams) as pool:
        told = [pool.submit(stream, number) for number in range(num_streams)]
        have_begun.wait(HANGS_S)
        happens()
        return [answer.result() for answer in told]


def busiest(fleet: RealFleet) -> ServerProcess:
    told = max(fleet.view()["replicas"], key=lambda replica: replica["in_flight"])
    assert told["in_flight"]
    return next(replica for replica in fleet.replicas if replica.url == told["url"])


def num_resumed(fleet: RealFleet) -> float:
    lines = fleet.client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("maitred_fleet_resumes_total"))


def test_a_router_tells_ollamas_client_of_models_and_has_vectors_for_it(fleet):
    client = ollama.Client(fleet.router.url, timeout=HANGS_S)
    (listed,), (running,) = client.list().models, client.ps().models
    assert (listed.model, listed.details.family, running.context_length) == ("maitred-mini", "llama", 2048)
    assert running.size > listed.size > 1_000_000
    assert "tools" in client.show("maitred-mini:latest").capabilities
    assert [part.status for part in client.pull("maitred-mini", stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError, match="there is no model 'llama3'"):
        client.pull("llama3")
    vectors = client.embed("maitred-mini:latest", ["soup", "bread"]).embeddings
    assert len(vectors) == 2
    assert len(vectors[0]) == len(vectors[1]) > 0
    assert client.chat("maitred-mini:latest", SAYS, format=PARAMETERS, options={"num_predict": 9}).eval_count == 9
    assert client.generate("maitred-mini").done_reason == "load"


def test_streams_of_a_replica_that_hangs_or_dies_go_on_as_undisturbed(fleet):
    expected = streams_while(fleet, lambda: None)
    for sent in (signal.SIGSTOP, signal.SIGKILL):
        before, hit = num_resumed(fleet), list[int]()

        def strike(sent=sent, hit=hit) -> None:
            hit.append(busiest(fleet).process.pid)
            os.kill(hit[0], sent)

        had = streams_while(fleet, strike)
        for number, (told, wanted) in enumerate(zip(had, expected, strict=True)):
            assert told == wanted, (*ASKED, *OLLAMA_ASKED)[number]
        assert num_resumed(fleet) > before
        if sent is signal.SIGSTOP:
            os.kill(hit[0], signal.SIGCONT)
            until(lambda: fleet.states == ["ready"] * 5)


def test_responses_of_a_replica_that_dies_go_on_are_counted_and_stored(fleet):
    asked = {"input": "Tell me of the sea.", "seed": 4, "max_output_tokens": 300, "ignore_eos": True}
    shaped = {
        **asked,
        "tools": [{"type": "function", "name": "say", "parameters": PARAMETERS}],
        "tool_choice": "required",
    }

    def told(response: Any) -> list[dict[str, Any]]:
        items = [item.model_dump() for item in response.output]
        return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]

    with openai.OpenAI(base_url=f"{fleet.router.url}/v1", api_key="none", max_retries=0) as client:
        create = partial(client.responses.create, model="maitred-mini")
        wanted = [told(create(extra_body=body)) for body in (asked, shaped, asked)]
        alone = create(input="", background=True, extra_body=asked)
        streams = [create(input="", stream=True, extra_body=body) for body in (asked, shaped)]
        begun = [[next(stream) for _ in range(8)] for stream in streams]
        before = num_resumed(fleet)
        os.kill(busiest(fleet).process.pid, signal.SIGKILL)
        had = [first + list(stream) for first, stream in zip(begun, streams, strict=True)]
        for events in had:
            assert [event.sequence_number for event in events] == list(range(len(events)))
            deltas = [event for event in events if event.type.endswith(".delta")]
            assert len({event.item_id for event in deltas}) == 1
        had.append(list(client.responses.retrieve(alone.id, stream=True)))
        assert [told(events[-1].response) for events in had] == wanted
        assert num_resumed(fleet) > before
        for events in had:
            assert client.responses.retrieve(events[-1].response.id) == events[-1].response
        following = create(input="Go on.", previous_response_id=alone.id, max_output_tokens=4)
        assert following.usage.input_tokens > 200
        assert len(client.responses.input_items.list(following.id).data) == 3


Begun = Callable[[], object]  # to be called once, when there is something of an answer


def told_to_anthropic(url: str, begun: Begun, **fields: Any) -> Any:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {
        "model": "maitred-mini",
        "max_tokens": 300,
        "messages": SAYS,
        "extra_body": {"temperature": 0},
    }
    with client.messages.stream(**asked, **fields) as stream:
        kinds = []
        for event in stream:
            kinds.append(event.type)
            if event.type == "content_block_delta" and kinds.count(event.type) == 1:
                begun()
        message = stream.get_final_message()
    assert (kinds.count("message_start"), kinds[-1]) == (1, "message_stop")
    content = [block.to_dict() | {"id": None, "signature": None} for block in message.content]
    return content, message.stop_reason, message.usage.output_tokens


OTHERS: tuple[Callable[[str, Begun], Any], ...] = (
    partial(told_to_anthropic, output_config={"format": {"type": "json_schema", "schema": PARAMETERS}}),
    partial(told_to_anthropic, tools=[{"name": "say", "input_schema": PARAMETERS}], tool_choice={"type": "any"}),
)


def test_clients_of_other_dialects_notice_as_little(fleet):
    def had_by_all(happens: Callable[[], object]) -> list[Any]:
        have_begun = threading.Barrier(len(OTHERS) + 1)
        with ThreadPoolExecutor(len(OTHERS)) as pool:
            told = [pool.submit(ask, fleet.router.url, partial(have_begun.wait, HANGS_S)) for ask in OTHERS]
            have_begun.wait(HANGS_S)
            happens()
            return [answer.result() for answer in told]

    expected, before = had_by_all(lambda: None), num_resumed(fleet)
    assert all(stop_reason == "max_tokens" and num == 300 for _, stop_reason, num in expected)
    assert had_by_all(lambda: os.kill(busiest(fleet).process.pid, signal.SIGKILL)) == expected
    assert num_resumed(fleet) > before


PYTHON = os.environ.get("MAITRED_OTHER_CLIENTS", "")
SCRIPT = ROOT / "tests/api/other_clients.py"


@pytest.mark.soak
@pytest.mark.skipif(not PYTHON, reason="MAITRED_OTHER_CLIENTS names no interpreter: make soak installs the clients")
def test_streams_of_every_client_go_on_when_the_one_replica_that_has_them_all_is_killed(tmp_path: Path):
    """Texts and counters are those of the undisturbed streams."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def streams(happens: Callable[[], object]) -> dict[str, Any]:
        command = [PYTHON, str(SCRIPT), "streams", f"{fleet.router.url}/v1", "smollm2"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            assert running.stdout.readline() == "begun\n"
            happens()
            told: dict[str, Any] = json.loads(running.stdout.read())
        return told

    with real_fleet(tmp_path, [("smollm2",)] * 2) as fleet:
        first, second = (replica.process.pid for replica in fleet.replicas)
        expected = streams(lambda: None)
        os.kill(second, signal.SIGSTOP)
        until(lambda: fleet.states == ["ejected", "ready"])

        def strike() -> None:
            os.kill(second, signal.SIGCONT)
            until(lambda: fleet.states == ["ready"] * 2)
            os.kill(first, signal.SIGKILL)

        assert streams(strike) == expected
        assert num_resumed(fleet) == len(expected) > 10


TOKEN = FleetToken(b"0123456789abcdef")
CHAT_GOING_ON, RESUME = "/v1/chat/completions", "/fleet/resume"
NUMERICS = {"revision": "r", "executor": "native", "dtype": "f32", "kv_dtype": "f32", "isa": "avx2"}
HEAD = head_line(StreamHead("chatcmpl-1", 1, "r native f32 f32 avx2", (5,), (16,)))
ONE = frame([ToldSample(0, [11])], event("one"))
TWO = frame([ToldSample(0, [12, 13])], event("two"))
THREE = frame([ToldSample(0, [14], ended=True)], event("three"), len(DONE)) + DONE
LOAD = {
    "type": "load", "state": "ready", "num_running": 0, "num_waiting": 0, "num_blocks": 9, "num_free_blocks": 9,
    "prefill_tokens_per_s": 0, "decode_tokens_per_s": 0,
}  # fmt: skip


def ours(answer: Script, rest: Script, state: str = "ready") -> Script:
    """A replica of ours that tells that it is in this state."""
    version = {"version": "1", "name": "maitred", "models": [MODEL], "slots": 4, "fingerprint": NUMERICS}
    cards = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.path == "/version":
            writer.write(whole(json.dumps(version).encode()))
        elif seen.path == "/v1/models":
            writer.write(whole(json.dumps(cards).encode()))
        elif seen.path == "/ready":
            writer.write(whole(b""))
        elif seen.path == "/fleet/events":
            writer.write(STREAM_HEAD)
            while not writer.is_closing():
                writer.write(chunk(b"data: " + json.dumps(LOAD | {"state": state}).encode() + b"\n\n"))
                await asyncio.sleep(0.2)
        else:
            await (rest if seen.path == RESUME else answer)(seen, writer)

    return script


@asynccontextmanager
async def two_of_ours(answer: Script, rest: Script, **config: Any) -> AsyncIterator[tuple[RunningRouter, list[Seen]]]:
    """Whichever is asked first breaks off, and the other is asked for the rest; what both were asked comes out."""
    seen: list[Seen] = []

    def noting(script: Script) -> Script:
        async def noted(asked: Seen, writer: asyncio.StreamWriter) -> None:
            seen.append(asked)
            await script(asked, writer)

        return noted

    fakes: list[FakeUpstream] = []
    async with (
        fake_upstream(ours(noting(answer), noting(rest))) as one,
        fake_upstream(ours(noting(answer), noting(rest))) as other,
    ):
        fakes += [one, other]
        with running_router(*(fake.url for fake in fakes), token=TOKEN, **config) as running:
            await running.wait_for("ready", "ready")
            yield running, seen


def breaks_off_after(*pieces: bytes) -> Script:
    return says(STREAM_HEAD, *(chunk(piece) for piece in pieces), then="reset")


def goes_on_with(*pieces: bytes) -> Script:
    return says(STREAM_HEAD, *(chunk(piece) for piece in pieces), LAST_CHUNK)


async def test_a_stream_goes_on_where_the_client_has_it():
    cut = breaks_off_after(HEAD + ONE, TWO[:-3])
    async with two_of_ours(cut, goes_on_with(HEAD + TWO, THREE)) as (running, seen), client_of(running) as client:
        told = await client.post(CHAT_GOING_ON, json=chat(stream=True))
        assert told.content == event("one") + event("two") + event("three") + DONE
        first, second = seen
        assert first.headers[TELL.decode()]
        assert int(first.headers[SEED.decode()]) >= 0
        assert second.path == RESUME
        asked = json.loads(second.body)
        assert asked["path"] == CHAT_GOING_ON
        assert json.dumps(asked["body"], separators=(",", ":")).encode() == first.body
        assert (asked["samples"], asked["head"]["seeds"]) == ([{"index": 0, "token_ids": [11]}], [5])
        assert 0 <= asked["ttft_s"] <= asked["age_s"]


async def test_one_without_a_byte_begins_anew_and_nonsense_of_tokens_is_a_failure():
    async with (
        two_of_ours(breaks_off_after(HEAD[:-4]), says(whole(b"", "500 No"))) as (running, seen),
        client_of(running) as client,
    ):
        told = await client.post(CHAT_GOING_ON, json=chat(stream=True))
        assert b"error" in told.content  # both break off
        assert [asked.path for asked in seen] == [CHAT_GOING_ON] * len(seen)
        assert len(seen) >= 2
    nonsense = breaks_off_after(HEAD + ONE, b": tokens nonsense\n")
    async with two_of_ours(nonsense, goes_on_with(TWO, THREE)) as (running, _), client_of(running) as client:
        told = await client.post(CHAT_GOING_ON, json=chat(stream=True))
        assert told.content == event("one") + event("two") + event("three") + DONE


async def test_where_no_other_can_or_may_go_on_a_stream_ends_with_an_error():
    refusal = b'{"error":{"message":"another revision"}}'
    async with (
        two_of_ours(breaks_off_after(HEAD + ONE), says(whole(refusal, "409 Conflict"))) as (running, _),
        client_of(running) as client,
    ):
        told = await client.post(CHAT_GOING_ON, json=chat(stream=True))
        first, error, done = told.content.split(b"\n\n", 2)
        assert first + b"\n\n" == event("one")
        assert "another revision" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
        assert done == DONE
    async with (
        two_of_ours(breaks_off_after(HEAD + ONE), goes_on_with(TWO, THREE), resume="never") as (running, seen),
        client_of(running) as client,
    ):
        told = await client.post(CHAT_GOING_ON, json=chat(stream=True))
        assert told.content.startswith(event("one") + b'data: {"error"')
        assert len(seen) == 1


async def test_who_asks_for_no_stream_gets_a_seed_and_no_frames():
    answer = says(whole(b'{"choices":[]}'))
    async with two_of_ours(answer, answer) as (running, seen), client_of(running) as client:
        told = await client.post(CHAT_GOING_ON, json=chat(), headers={TELL.decode(): "1", SEED.decode(): "3"})
        assert told.status_code == 200
        assert TELL.decode() not in seen[0].headers
        assert int(seen[0].headers[SEED.decode()]) != 3


async def test_one_that_sleeps_by_itself_gets_requests_which_wake_it():
    async with fake_upstream(ours(says(whole(b"{}")), says(), "asleep")) as fake:
        with running_router(fake.url, token=TOKEN) as running:
            await running.wait_for("ready")
            await until_async(lambda: _has_beats(running))
            async with client_of(running) as client:
                assert (await client.post(CHAT_GOING_ON, json=chat())).status_code == 200


def _has_beats(running: RunningRouter) -> bool:
    return all(live.facts.has_beats for live in running.router.fleet.replicas.values())


LONG_LEAVING = {
    "prompt": "Once upon", "max_tokens": 1500, "n": 2, "seed": 7, "ignore_eos": True, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip


def go_on_elsewhere(fleet: RealFleet, *, is_told_twice: bool) -> None:
    """The streams of a replica that is told to end, at its deadline or when it is told again."""
    undisturbed = client_has(fleet.client.post("/v1/completions", json=LONG_LEAVING).content)
    before = num_resumed(fleet)
    with fleet.client.stream("POST", "/v1/completions", json=LONG_LEAVING) as answer:
        name, pieces = answer.headers["x-maitred-replica"], answer.iter_bytes()
        leaving = next(replica for replica in fleet.replicas if name in replica.url)
        first = next(pieces)
        leaving.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in fleet.states)
        for _ in fleet.replicas:  # in turn
            fresh = fleet.client.post("/v1/completions", json={"prompt": "One", "max_tokens": 1})
            assert fresh.headers["x-maitred-replica"] != name
        if is_told_twice:
            leaving.process.send_signal(signal.SIGTERM)
        had = first + b"".join(pieces)
    assert without_what_differs(client_has(had)) == without_what_differs(undisturbed)
    assert (num_resumed(fleet), leaving.process.wait(HANGS_S)) == (before + 1, 0)


def test_its_streams_go_on_elsewhere_when_its_time_is_over(fleet: RealFleet):
    go_on_elsewhere(fleet, is_told_twice=False)


@pytest.mark.soak
def test_its_streams_go_on_elsewhere_at_a_second_signal(tmp_path: Path):
    with real_fleet(tmp_path, [("--drain-timeout", "600"), ("--drain-timeout", "600")]) as fleet:
        go_on_elsewhere(fleet, is_told_twice=True)


TOLD_HEAD = StreamHead("chatcmpl-1", 1700000000, "rev native", (11, 12), (16, 16))
KEEP_ALIVE = b": keep-alive\n\n"


def text_of(index: int, tokens: list[int]) -> bytes:
    """What the client gets for tokens; nothing for odd ones, as if they were half a character."""
    shown = [token for token in tokens if token % 2 == 0]
    return b"".join(b'data: {"index":%d,"text":"\\n\\n%d"}\n\n' % (index, token) for token in shown)


Write = tuple[int, list[int]]
WRITES = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 99), max_size=3)), min_size=1, max_size=12)


def stream(writes: list[Write], silences: set[int]) -> bytes:
    """Of a replica, comments of silence between."""
    written = [frame([ToldSample(index, tokens)], text_of(index, tokens)) for index, tokens in writes]
    return head_line(TOLD_HEAD) + b"".join(
        (KEEP_ALIVE if at in silences else b"") + write for at, write in enumerate(written)
    )


@given(WRITES, st.sets(st.integers(0, 11)), st.data())
def test_wherever_a_stream_is_cut_the_client_has_the_text_of_the_tokens_that_were_told(writes, silences, draw):
    sent = stream(writes, silences)
    cut = draw.draw(st.integers(0, len(sent)))
    ends = sorted(draw.draw(st.lists(st.integers(0, cut), max_size=6)))
    told, relayed = ToldTokens(), b""
    for begin, end in zip([0, *ends], [*ends, cut], strict=True):
        relayed += told.feed(sent[begin:end])
    told.broke_off()
    kept: dict[int, list[int]] = {}
    if told.head is not None:
        asked = msgspec.json.decode(told.resume_body("/v1/completions", b'{"prompt":"a"}'), type=ResumeRequest)
        assert asked.head == TOLD_HEAD
        kept = {sample.index: sample.token_ids for sample in asked.samples}
    relayed = relayed.replace(KEEP_ALIVE, b"")
    for index in range(3):
        mine = b"".join(line + b"\n\n" for line in relayed.split(b"\n\n") if b'"index":%d,' % index in line)
        assert mine == text_of(index, kept.get(index, []))
    assert told.num_tokens == sum(map(len, kept.values()))
    if cut == len(sent):
        assert told.num_tokens == sum(len(tokens) for _, tokens in writes)


def test_a_body_goes_on_as_it_came_and_one_without_tokens_begins_anew():
    body = '{"prompt": "é\\u00e9 \\n",  "seed":1}'.encode()
    told = ToldTokens()
    told.feed(head_line(TOLD_HEAD) + frame([ToldSample(0, [5], num_cached_tokens=3)], b"data: 1\n\n"))
    told.feed(frame([ToldSample(0, [6, 7], ended=True)], b"data: 2\n\n") + head_line(TOLD_HEAD))
    asked = told.resume_body("/v1/completions", body, age_s=2.0, ttft_s=1.0)
    assert body in asked
    assert json.loads(asked)["samples"] == [{"index": 0, "token_ids": [5, 6, 7], "ended": True, "num_cached_tokens": 3}]
    told = ToldTokens()
    assert not told.can_resume
    told.feed(head_line(TOLD_HEAD))
    other = msgspec.structs.replace(TOLD_HEAD, seeds=(1, 2))
    told.feed(head_line(other))
    assert told.head == other
    assert told.can_resume
    told.feed(frame([ToldSample(0, [1])], b""))
    told.feed(head_line(TOLD_HEAD))
    assert told.head == other


def test_what_is_no_frame_is_not_believed():
    frames = (
        b'{"num_bytes":-9,"samples":[]}',
        b'{"num_bytes":0,"samples":[{"index":0,"token_ids":[2147483648]}]}',
        b'{"num_bytes":0,"samples":[],"usage":[1,0,-1]}',
    )
    wrong = (b"nonsense\n", b"1" * (MAX_LINE_BYTES + 1), *(each + b"\n" for each in frames))
    for sent in (b": resume {}\n", *(b": tokens " + each for each in wrong)):
        with pytest.raises(BrokenFrame):
            ToldTokens().feed(sent)
        told, good = ToldTokens(), frame([ToldSample(0, [1])], b"data: 1\n\n")
        assert (told.feed(good + sent), told.num_tokens) == (b"data: 1\n\n", 1)
        with pytest.raises(BrokenFrame):
            told.feed(b"")


def test_usage_in_a_header_is_four_numbers_that_an_answer_can_have():
    usage = ToldUsage(5, 2, 7, 2**40)
    assert usage_in([usage_header(usage)]) == usage
    for value in (
        b"1,2",
        b"1,2,3,4,5",
        b"1,2,3,-4",
        b"-1,0,1",
        b"1,0,2147483648",
        b"1,0," + b"9" * 5000,
        b"a,b,c",
        b"\xff,1,1",
        b"",
    ):
        assert usage_in([(USAGE, value)]) is None


def test_the_end_of_a_stream_is_of_its_last_tokens():
    end = b"data: [DONE]\n\n"
    sent = frame([ToldSample(0, [9], ended=True)], b"data: last\n\n", len(end)) + end
    told = ToldTokens()
    assert (told.feed(sent[:-3]), told.num_tokens, told.feed(sent[-3:])) == (b"", 0, b"data: last\n\n" + end)
    assert msgspec.json.decode(sent[len(b": tokens ") : sent.index(b"\n")], type=ToldFrame).num_bytes == 12 + len(end)
