from __future__ import annotations

import asyncio
import sys

import httpx
import pytest

from maitred.api.ops import admin
from maitred.api.serving import create_app
from maitred.config import ServerConfig
from maitred.core.replica import WorkerView
from tests.fakes_api import FakeReplica, make_model


class Recorded(FakeReplica):
    role = "mixed"

    async def recordings(self) -> list[bytes]:
        return []

    def workers(self) -> tuple[WorkerView, ...]:
        return (WorkerView.of(0, 1, self.state(), self.role),)


def replaying(monkeypatch: pytest.MonkeyPatch, code: str, **limits: float) -> httpx.AsyncClient:
    """A server whose replay is this Python."""
    monkeypatch.setattr(admin, "REPLAY", (sys.executable, "-c", code))
    for name, value in limits.items():
        monkeypatch.setattr(admin, name, value)
    return client_of(Recorded())


def client_of(replica: FakeReplica) -> httpx.AsyncClient:
    asgi = create_app(replica, make_model(), ServerConfig())
    return httpx.AsyncClient(transport=httpx.ASGITransport(asgi), base_url="http://test")


async def asked(client: httpx.AsyncClient, **change: object) -> tuple[int, str]:
    answer = await client.post("/admin/whatif", json=change)
    return answer.status_code, answer.json()["error"]["message"]


async def test_a_replay_that_takes_too_long_is_ended_and_says_so(monkeypatch):
    client = replaying(monkeypatch, "import time; time.sleep(100)", REPLAY_S=0.2)
    status, told = await asked(client, minutes=7)
    assert status == 504
    assert "ask for fewer minutes than 7" in told


async def test_there_is_one_replay_at_a_time(monkeypatch):
    client = replaying(monkeypatch, "import time; time.sleep(100)", REPLAY_S=0.5)
    both = await asyncio.gather(asked(client), asked(client))
    assert sorted(status for status, _ in both) == [429, 504]
    assert "a replay is running" in str(both)


async def test_what_the_replay_cannot_do_is_the_clients_to_hear(monkeypatch):
    client = replaying(monkeypatch, """print('{"error":"no traffic yet"}', end="")""")
    assert await asked(client) == (400, "no traffic yet")
    broken = replaying(monkeypatch, "raise SystemExit(3)")
    assert await asked(broken) == (500, "the replay ended with exit code 3; the server's log has the cause")


async def test_the_replay_imports_nothing_from_the_folder_the_server_was_started_in(monkeypatch, tmp_path):
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported from here')")
    monkeypatch.chdir(tmp_path)
    status, told = await asked(client_of(Recorded()))
    assert (status, told.partition(":")[0]) == (400, "no traffic yet")


async def test_a_wrong_change_is_refused_by_name():
    client = client_of(Recorded())
    for change in ({"replicas": 0}, {"minutes": "long"}, {"polcy": "srpt"}):
        status, told = await asked(client, **change)
        assert status == 400
        assert next(iter(change)) in told


async def test_engines_with_roles_are_not_replayed():
    replica = Recorded()
    replica.role = "prefill"
    status, told = await asked(client_of(replica))
    assert status == 400
    assert "engines have roles" in told
