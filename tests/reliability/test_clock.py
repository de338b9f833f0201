"""R23: somebody sets the clock of a running server, or a leap second comes, while requests are in all stages.

A leap second as a process sees it on Linux (adjtimex(2), clock_gettime(2)): a count of seconds since 1970 without leap
seconds has no number for 23:59:60, so where the kernel was told to insert one (STA_INS), it sets CLOCK_REALTIME back by
a second at midnight, and 23:59:59 is there twice; CLOCK_MONOTONIC goes on. Where time servers smear it, the kernel's
clocks run slower for a day, by some 12 millionths, and nothing is there twice; CLOCK_MONOTONIC is slewed along with
CLOCK_REALTIME. Here only the wall clock is, and by half.
"""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.reliability.clock_server import COMPILER, LEDGER, PER_MINUTE, Clock, ClockServer, clock_server
from tests.reliability.streams import Stream
from tests.waiting import HANGS_S, joined, until

HOUR = 3600
GUEST, BOSS = {"authorization": "Bearer guest"}, {"authorization": "Bearer boss"}
PATIENCE = {"x-request-timeout-ms": str(HOUR * 500), "x-queue-timeout-ms": str(HOUR * 500)}  # half an hour

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="a library is preloaded"),
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler"),
]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "one soup", "max_tokens": 60, "ignore_eos": True, "seed": 5, **fields}


def ask(at: ClockServer, **fields: Any) -> httpx.Response:
    headers = {**GUEST, **PATIENCE}
    return httpx.post(f"{at.url}/v1/completions", json=body(**fields), headers=headers, timeout=HANGS_S)


def get(at: ClockServer, path: str) -> httpx.Response:
    return httpx.get(at.url + path, headers=BOSS, timeout=HANGS_S)


def wall_clock_of(at: ClockServer) -> float:
    """As the server tells it."""
    return parsedate_to_datetime(get(at, "/version").headers["date"]).timestamp()


def counted(at: ClockServer) -> dict[str, float]:
    """Everything on the metrics page that may only grow, and sums of times."""
    lines = (line.rpartition(" ") for line in get(at, "/metrics").text.splitlines() if not line.startswith("#"))
    growing = ("_total", "_sum", "_count", "_bucket")
    return {name: float(value) for name, _, value in lines if name.partition("{")[0].endswith(growing)}


def in_flight(at: ClockServer) -> int:
    """Requests, without the one that asks."""
    return int(float(get(at, "/metrics").text.split("\nmaitred_http_requests_in_flight ")[1].split("\n")[0])) - 1


Change = Callable[[Clock], None]
AN_HOUR_ON_TWO_BACK_AND_LEAP_SECONDS: list[Change] = [
    lambda clock: clock.set(HOUR),
    lambda clock: clock.set(-HOUR),
    lambda clock: clock.set(0),
    lambda clock: clock.set(-1),
    lambda clock: clock.slew(by_s=-1, over_s=2),
    lambda clock: clock.slew(by_s=1, over_s=2),  # taken out, as there was none yet
]


TELL = "import sys, time\nfor line in sys.stdin: print(repr(time.time()), flush=True)"


def test_the_preloaded_clock_has_a_second_twice_and_runs_slow(tmp_path: Path):
    """So that the other test can fail."""
    clock = Clock(tmp_path)

    def told() -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    def is_right() -> bool:
        before = time.time()
        return before + clock.offset_s <= told() <= time.time() + clock.offset_s

    with subprocess.Popen(
        [sys.executable, "-c", TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clock.environment
    ) as process:
        assert is_right()
        clock.set(-1)
        assert is_right()
        before = told()
        clock.slew(by_s=-1, over_s=2)
        while time.time() < clock.settled_at:
            now = told()
            assert before <= now, "slower, but never back"
            before = now
        assert is_right()


def test_a_clock_that_is_set_ends_nothing_and_is_in_no_duration(tmp_path: Path):
    began = time.monotonic()
    with clock_server(tmp_path) as at:
        at.gate.open()
        calm = ask(at).json()
        at.gate.open_to(10)
        asked = body(stream_options={"include_usage": True})
        stream = Stream(at.url, asked, {**GUEST, **PATIENCE})
        until(lambda: stream.num_chunks >= 5)
        waiting: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: waiting.append(ask(at)))  # there is one slot
        thread.start()
        until(lambda: in_flight(at) == 2)
        both_since, before = time.monotonic(), counted(at)
        for gate, change in zip(range(16, 52, 6), AN_HOUR_ON_TWO_BACK_AND_LEAP_SECONDS, strict=True):
            change(at.clock)
            at.gate.open_to(gate - 3)
            until(lambda: time.time() > at.clock.settled_at)
            until(lambda: abs(wall_clock_of(at) - time.time() - at.clock.offset_s) < HOUR / 2)
            at.gate.open_to(gate)
            until(lambda gate=gate: stream.num_chunks >= gate - 2)
            until(lambda: get(at, "/health").status_code == get(at, "/ready").status_code == 200)
            until(lambda: in_flight(at) == 2)  # both go on
            now = counted(at)
            assert all(now[name] >= value for name, value in before.items())
            before = now
        held_ms = (time.monotonic() - both_since) * 1000
        at.gate.open()
        joined(thread)
        stream.join()
        assert (stream.whole, stream.errors) == (True, [])
        assert stream.text == calm["choices"][0]["text"] == waiting[0].json()["choices"][0]["text"]
        took_ms = (time.monotonic() - began) * 1000
        for usage in (stream.usage, waiting[0].json()["usage"]):
            assert usage["completion_tokens"] == 60
            ttft_ms = usage["timing_ms"].pop("ttft")
            parts_ms = usage["timing_ms"].values()
            assert all(part >= 0 for part in parts_ms), usage
            assert held_ms <= sum(parts_ms) <= took_ms, "not a second more or less"
            assert 0 <= ttft_ms <= took_ms
        check_limits(waiting[0], began)
        check_sums(at, took_s=time.monotonic() - began)
    check_ledger(tmp_path / LEDGER)


def check_limits(answer: httpx.Response, began: float) -> None:
    """Three requests were sent within this minute, whatever the clock on the wall said meanwhile."""
    told = {name: value for name, value in answer.headers.items() if name.startswith("x-ratelimit-")}
    assert re.fullmatch(r"1m[01]s|\d\d?s|\d+ms", told["x-ratelimit-reset-requests"]), told
    if time.monotonic() - began < 50:  # on a machine where it took longer, the first have left the window
        assert int(told["x-ratelimit-remaining-requests"]) == PER_MINUTE - 3


def check_sums(at: ClockServer, took_s: float) -> None:
    now = counted(at)
    assert now["maitred_engine_restarts_total"] == 0
    sums = {name: value for name, value in now.items() if "_seconds_sum" in name}
    assert sums
    assert all(0 <= value <= 10 * took_s for value in sums.values()), "an hour is in none of them"
    assert now["maitred_generation_tokens_total"] == 180


def check_ledger(path: Path) -> None:
    """Dates are the wall clock's affair; durations are not, and no token is lost."""
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT status, prompt_tokens, generated_tokens FROM request").fetchall()
    assert [(status, generated) for status, _, generated in rows] == [("length", 60)] * 3
