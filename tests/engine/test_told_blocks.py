"""An engine tells which KV blocks can be found: to who asked, all of them first, over either transport."""

from __future__ import annotations

import pytest

from maitred.core.errors import EngineDead
from maitred.engine import child_process, loop, restarts
from maitred.engine.client import EngineClient
from maitred.engine.frames import BlockChanges
from tests.engine.clients import POISON, TRANSPORTS, ask, follow, running_client
from tests.waiting import HANGS_S, until_async


class Listener:
    """Has what it was told."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.num_changes: list[int] = []
        self.num_engines_lost = 0

    def hear(self, changes: BlockChanges | None) -> None:
        if changes is None:
            self.held.clear()
            self.num_engines_lost += 1
            return
        assert self.held.isdisjoint(changes.stored)
        assert self.held.issuperset(changes.removed)
        self.held = (self.held - set(changes.removed)) | set(changes.stored)
        self.num_changes.append(len(changes.stored) + len(changes.removed))


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(child_process, "LAST_LINE_S", HANGS_S)


async def all_told(client: EngineClient, listener: Listener) -> None:
    """As many as its figures count; for an engine at rest."""
    await until_async(lambda: len(listener.held) == client.state().num_blocks_cached > 0)


async def test_what_is_cached_is_told_first_and_then_what_changes(transport: str):
    listener = Listener()
    async with running_client(transport=transport) as client:
        await follow(client, ask("before", [1] * 21))
        client.tell_router(listener.hear)
        await all_told(client, listener)
        before = set(listener.held)
        assert len(before) == (21 + 60 - 1) // 4
        await follow(client, ask("after", [2] * 21))
        await until_async(lambda: len(listener.held) > len(before))
        await all_told(client, listener)
        assert client.state().decode_tokens_per_s > 0


async def test_who_wants_no_more_hears_no_more(transport: str):
    listener = Listener()
    async with running_client(transport=transport) as client:
        client.tell_router(listener.hear)
        await follow(client, ask("heard", [1] * 21))
        await all_told(client, listener)
        client.tell_router(None)
        num_heard = len(listener.num_changes)
        await follow(client, ask("not-heard", [2] * 21))
        await client.scheduler_config()  # whatever was to be told has been
        assert len(listener.num_changes) == num_heard
        assert client.state().decode_tokens_per_s == 0


async def test_much_is_told_in_pieces(monkeypatch):
    monkeypatch.setattr(loop, "MAX_CHANGES", 7)
    listener = Listener()
    async with running_client(transport="thread") as client:
        await follow(client, ask("before", [1] * 100))
        client.tell_router(listener.hear)
        await all_told(client, listener)
        assert max(listener.num_changes) == 7 < len(listener.held)


async def test_the_next_engine_is_asked_too_and_has_nothing_of_the_last_ones(transport: str):
    listener = Listener()
    async with running_client("raise_at=3", transport=transport) as client:
        client.tell_router(listener.hear)
        await follow(client, ask("good", [1] * 21))
        await all_told(client, listener)
        lost = set(listener.held)
        with pytest.raises(EngineDead):
            await follow(client, ask("poison", POISON))
        assert listener.num_engines_lost > 0
        await until_async(lambda: client.state().alive)
        await follow(client, ask("again", [2] * 21))
        await all_told(client, listener)
        assert listener.held.isdisjoint(lost)
