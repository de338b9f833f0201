"""A stream between replicas of ours, byte for byte: what breaks off is asked of another, and nobody sees the seam."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from maitred.api.http.fleet_headers import FleetToken
from maitred.fleet.told import SEED, TELL, StreamHead, ToldSample, frame, head_line
from tests.fleet.fake_upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    FakeUpstream,
    Script,
    Seen,
    chunk,
    fake_upstream,
    says,
    whole,
)
from tests.fleet.routers import DONE, MODEL, RunningRouter, chat, client_of, event, running_router
from tests.waiting import until_async

TOKEN = FleetToken(b"0123456789abcdef")
CHAT, RESUME = "/v1/chat/completions", "/fleet/resume"
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
        told = await client.post(CHAT, json=chat(stream=True))
        assert told.content == event("one") + event("two") + event("three") + DONE
        first, second = seen
        assert first.headers[TELL.decode()]
        assert int(first.headers[SEED.decode()]) >= 0
        assert second.path == RESUME
        asked = json.loads(second.body)
        assert asked["path"] == CHAT
        assert json.dumps(asked["body"], separators=(",", ":")).encode() == first.body
        assert asked["samples"] == [{"index": 0, "token_ids": [11]}]
        assert asked["head"]["seeds"] == [5]
        assert 0 <= asked["ttft_s"] <= asked["age_s"]


async def test_one_of_which_the_client_has_nothing_begins_anew():
    async with (
        two_of_ours(breaks_off_after(HEAD[:-4]), says(whole(b"", "500 No"))) as (running, seen),
        client_of(running) as client,
    ):
        told = await client.post(CHAT, json=chat(stream=True))
        assert b"error" in told.content  # both break off
        assert [asked.path for asked in seen] == [CHAT] * len(seen)
        assert len(seen) >= 2


async def test_where_no_other_can_go_on_it_ends_with_an_error():
    refusal = b'{"error":{"message":"another revision"}}'
    async with (
        two_of_ours(breaks_off_after(HEAD + ONE), says(whole(refusal, "409 Conflict"))) as (running, _),
        client_of(running) as client,
    ):
        told = await client.post(CHAT, json=chat(stream=True))
        first, error, done = told.content.split(b"\n\n", 2)
        assert first + b"\n\n" == event("one")
        assert "another revision" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
        assert done == DONE


async def test_a_rule_forbids_to_go_on():
    async with (
        two_of_ours(breaks_off_after(HEAD + ONE), goes_on_with(TWO, THREE), resume="never") as (running, seen),
        client_of(running) as client,
    ):
        told = await client.post(CHAT, json=chat(stream=True))
        assert told.content.startswith(event("one") + b'data: {"error"')
        assert len(seen) == 1


async def test_nonsense_of_tokens_is_a_replica_that_failed():
    nonsense = breaks_off_after(HEAD + ONE, b": tokens nonsense\n")
    async with two_of_ours(nonsense, goes_on_with(TWO, THREE)) as (running, _), client_of(running) as client:
        told = await client.post(CHAT, json=chat(stream=True))
        assert told.content == event("one") + event("two") + event("three") + DONE


async def test_who_asks_for_no_stream_gets_a_seed_and_no_frames():
    answer = says(whole(b'{"choices":[]}'))
    async with two_of_ours(answer, answer) as (running, seen), client_of(running) as client:
        told = await client.post(CHAT, json=chat(), headers={TELL.decode(): "1", SEED.decode(): "3"})
        assert told.status_code == 200
        assert TELL.decode() not in seen[0].headers
        assert int(seen[0].headers[SEED.decode()]) != 3


async def test_one_that_sleeps_by_itself_gets_requests_which_wake_it():
    async with fake_upstream(ours(says(whole(b"{}")), says(), "asleep")) as fake:
        with running_router(fake.url, token=TOKEN) as running:
            await running.wait_for("ready")
            await until_async(lambda: _has_beats(running))
            async with client_of(running) as client:
                assert (await client.post(CHAT, json=chat())).status_code == 200


def _has_beats(running: RunningRouter) -> bool:
    return all(live.facts.has_beats for live in running.router.fleet.replicas.values())
