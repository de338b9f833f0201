"""A replica dies, or hangs, in the middle of its streams: nobody who reads them notices."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.api.read_stream import client_has
from tests.conftest import ServerProcess
from tests.fleet.test_end_to_end import RealFleet, real_fleet
from tests.waiting import HANGS_S, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAYS = [{"role": "user", "content": "Tell me of the sea."}]
LONG = {"max_tokens": 400, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
WORDS = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 300}
PARAMETERS = {"type": "object", "properties": {"words": WORDS}, "required": ["words"]}
TOOL = {"type": "function", "function": {"name": "say", "parameters": PARAMETERS}}
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": SAYS, "temperature": 0}),
    (CHAT, {"messages": SAYS, "seed": 1, "temperature": 1.0}),
    (CHAT, {"messages": SAYS, "seed": 2, "n": 2, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": SAYS, "seed": 3, **PENALTIES}),
    (CHAT, {"messages": SAYS, "seed": 4, "stop": ["never to be found in this text"]}),
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


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with real_fleet(tmp_path_factory.mktemp("fleet"), [()] * 3, "--balance", "round_robin") as running:
        yield running


def undisturbed(fleet: RealFleet, number: int) -> dict[str, Any]:
    path, fields = ASKED[number]
    return without_what_differs(client_has(fleet.client.post(path, json=LONG | fields).content))


def without_what_differs(had: dict[str, Any]) -> dict[str, Any]:
    """Ids, what was cached by then, and how far usage was at each event."""
    assert len(had["ids"]) == 1
    assert had["generated"] == sorted(had["generated"])
    for choice in had["choices"].values():
        choice["calls"] = [call[1:] for call in choice["calls"]]
    return {"choices": had["choices"], "usage": had["usage"]["completion_tokens"]}


def streams_while(fleet: RealFleet, happens: Callable[[], object]) -> list[dict[str, Any]]:
    """All of ASKED at once; once each has something of its answer, it `happens`."""
    have_begun = threading.Barrier(len(ASKED) + 1)

    def stream(number: int) -> dict[str, Any]:
        path, fields = ASKED[number]
        with fleet.client.stream("POST", path, json=LONG | fields) as answer:
            assert answer.status_code == 200
            pieces = answer.iter_bytes()
            first = next(pieces)
            have_begun.wait(HANGS_S)
            return without_what_differs(client_has(first + b"".join(pieces)))

    with ThreadPoolExecutor(len(ASKED)) as pool:
        told = [pool.submit(stream, number) for number in range(len(ASKED))]
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


def test_streams_of_a_replica_that_hangs_or_dies_go_on_as_undisturbed(fleet):
    expected = [undisturbed(fleet, number) for number in range(len(ASKED))]
    for sent in (signal.SIGSTOP, signal.SIGKILL):
        before, hit = num_resumed(fleet), list[int]()

        def strike(sent=sent, hit=hit) -> None:
            hit.append(busiest(fleet).process.pid)
            os.kill(hit[0], sent)

        had = streams_while(fleet, strike)
        for number, (told, wanted) in enumerate(zip(had, expected, strict=True)):
            assert told == wanted, ASKED[number]
        assert num_resumed(fleet) > before
        if sent is signal.SIGSTOP:
            os.kill(hit[0], signal.SIGCONT)
            until(lambda: fleet.states == ["ready"] * 3)
