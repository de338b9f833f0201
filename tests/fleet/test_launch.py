"""Replicas as child processes: told, prefixed, started again, ended with whoever launched them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from maitred.engine import restarts
from maitred.fleet import launch
from maitred.fleet.launch import (
    MAX_LINE_BYTES,
    AnnouncementReader,
    Exited,
    IsReady,
    Listening,
    Listens,
    Loaded,
    announce,
    prefixed,
)
from tests.conftest import ROOT
from tests.fleet.launching import launching
from tests.waiting import HANGS_S, is_gone, until, until_async


def test_announcements_come_whole_out_of_any_pieces():
    reading, writing = os.pipe()
    announce(writing, Listening("http://127.0.0.1:1", 7))
    announce(writing, Loaded({"weights": 0.5}))
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        sent = stream.read()
    reader = AnnouncementReader()
    came = [news for byte in sent for news in reader.feed(bytes([byte]))]
    assert came == [Listening("http://127.0.0.1:1", 7), Loaded({"weights": 0.5})]


@pytest.mark.parametrize("wrong", [b"hello\n", b'{"type":"Listening"}\n', b"x" * (MAX_LINE_BYTES + 1)])
def test_what_is_no_announcement_is_said_to_be_none(wrong: bytes):
    with pytest.raises(ValueError, match=r"announcement|a line of more than"):
        AnnouncementReader().feed(wrong)


def test_a_launcher_that_is_gone_needs_no_news_and_a_json_line_stays_json():
    reading, writing = os.pipe()
    os.close(reading)
    announce(writing, Loaded({}))
    os.close(writing)
    assert prefixed("a", '{"level":"info"}') == '{"replica":"a","level":"info"}'
    assert prefixed("a", "ready") == "[a] ready"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(launch, "LAST_LINE_S", HANGS_S)


def faking(way: str, *words: str, **fields: Any) -> Any:
    return launching(command=(sys.executable, "-m", "tests.fleet.fake_serve", way, *words), **fields)


async def test_a_launched_server_tells_its_address_answers_and_comes_back_when_it_is_killed():
    async with launching() as (launcher, told):
        launcher.start("a")
        listens = await told.wait_for(Listens)
        ready = await told.wait_for(IsReady)
        assert listens.pid == launcher.pid("a")
        assert 0 < ready.start_s < HANGS_S
        assert "engine_process" in ready.start_phases
        async with httpx.AsyncClient(base_url=listens.url) as client:
            assert (await client.get("/ready")).status_code == 200
        children = psutil.Process(listens.pid).children(recursive=True)
        os.kill(listens.pid, signal.SIGKILL)
        ended = await told.wait_for(Exited)
        assert "SIGKILL" in ended.cause
        assert not ended.as_told
        assert ended.again_in_s == 0.0
        await until_async(lambda: all(map(is_gone, children)))
        again = await told.wait_for(Listens, count=2)
        await told.wait_for(IsReady, count=2)
        assert again.pid != listens.pid
        launcher.stop("a")
        last = await told.wait_for(Exited, count=2)
        assert last.as_told
        assert "exit code 0" in last.cause
        assert launcher.pid("a") is None
        assert not psutil.pid_exists(again.pid), "its end was waited for"
    assert told.lines
    assert all(line.startswith("[a] ") for line in told.lines)


def test_no_replica_outlives_a_router_that_is_killed():
    router = subprocess.Popen(
        [sys.executable, "-m", "tests.fleet.launching"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        cwd=ROOT,
    )  # fmt: skip
    assert router.stdout is not None
    with router.stdout:
        servers = [psutil.Process(int(router.stdout.readline())) for _ in range(2)]
        family = [process for server in servers for process in (server, *server.children(recursive=True))]
        servers[0].suspend()  # one that cannot even hear it
        router.kill()
        router.wait(HANGS_S)
        until(lambda: all(map(is_gone, family)))


async def test_one_that_dies_while_it_starts_is_started_again_and_never_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with faking("dies_once", str(tmp_path / "died")) as (launcher, told):
        launcher._any_was_ready = True
        launcher.start("a")
        await told.wait_for(IsReady)
        assert [event.again_in_s for event in told.of(Exited, "a")] == [0.0]
    monkeypatch.setattr(launch, "MAX_RESTART_DELAY_S", 0.04)
    async with faking("dies") as (launcher, told):
        launcher.start("a")
        await told.wait_for(Exited, count=8)
        assert [event.again_in_s for event in told.of(Exited, "a")][:6] == [0.0, 0.01, 0.02, 0.04, 0.04, 0.04]
    assert launch.MAX_RESTART_DELAY_S < 10


@pytest.mark.parametrize(("word", "tries"), [("--bogus", 1), ("/no/such/model", 2)])
async def test_what_cannot_start_is_not_tried_for_ever_and_its_last_line_says_why(word: str, tries: int):
    async with launching((word,)) as (launcher, told):
        launcher.start("a")
        ended = await told.wait_for(Exited, count=tries)
        assert ended.again_in_s is None
        assert not ended.as_told
        assert "error: " in ended.cause
        assert word in ended.cause


async def test_what_a_server_said_last_is_a_cause_of_death_where_it_ended_by_itself_and_was_no_news():
    async with faking("chatty", "dies") as (launcher, told):
        launcher.start("a")
        assert (await told.wait_for(Exited)).cause.endswith("ended with exit code 1: error: the disk is full")
    async with faking("chatty", "lives") as (launcher, told):
        launcher.start("a")
        os.kill((await told.wait_for(Listens)).pid, signal.SIGKILL)
        assert (await told.wait_for(Exited)).cause.endswith("was killed by SIGKILL (by hand, or for want of memory)")


@pytest.mark.parametrize("way", ["garbage", "silent"])
async def test_one_that_says_something_else_or_nothing_is_killed(way: str, monkeypatch: pytest.MonkeyPatch):
    if way == "silent":
        monkeypatch.setattr(launch, "SILENT_START_S", 0.5)
    async with faking(way) as (launcher, told):
        launcher.start("a")
        ended = await told.wait_for(Exited)
        assert ("did not say" if way == "silent" else "what it announced is no announcement") in ended.cause


async def test_one_that_does_not_hear_is_killed_in_the_end_also_without_a_loop():
    async with faking("deaf", stop_s=0.1) as (launcher, told):
        launcher.start("a")
        await told.wait_for(IsReady)
        launcher.stop("a")
        ended = await told.wait_for(Exited)
        assert ended.as_told
        assert "had not ended after 0.1 s" in ended.cause
    async with faking("deaf", stop_s=0.1) as (launcher, told):
        launcher.start("a")
        launcher.start("b")
        pids = [(await told.wait_for(Listens, name)).pid for name in "ab"]
        launcher.end()
        assert not any(map(psutil.pid_exists, pids))
        launcher.end()


async def test_one_that_stands_still_hears_that_it_is_to_end():
    async with faking("well") as (launcher, told):
        launcher.start("a")
        os.kill((await told.wait_for(Listens)).pid, signal.SIGSTOP)
        launcher.stop("a")
        assert "had not ended after" not in (await told.wait_for(Exited)).cause


async def test_one_that_hangs_is_started_anew():
    async with faking("well") as (launcher, told):
        launcher.start("a")
        first = await told.wait_for(Listens)
        os.kill(first.pid, signal.SIGSTOP)
        launcher.restart("a")
        second = await told.wait_for(Listens, count=2)
        assert first.pid != second.pid == launcher.pid("a")


async def test_replicas_get_the_token_and_no_key_of_clients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MAITRED_API_KEY", "of a client")
    async with faking("environment") as (launcher, told):
        launcher.start("a")
        await until_async(lambda: told.lines)
        assert told.lines == ["[a] {'MAITRED_FLEET_TOKEN': 'secret', 'MAITRED_API_KEY': None}"]
        with pytest.raises(ValueError, match="is there already"):
            launcher.start("a")
