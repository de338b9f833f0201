"""LoRA adapters over HTTP: who may load them, who sees them, and what is refused."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from maitred.core.errors import CheckpointError
from maitred.engine.adapter_book import AdapterBook, AtWork
from maitred.engine.live_requests import LiveRequest
from maitred.engine.model_facts import AdapterFacts
from maitred.engine.queries import AdapterFolder
from maitred.storage.ledger import Ledger
from tests.api.test_pages import page_at
from tests.api.test_tenants import table_of
from tests.fakes_api import FakeReplica, FakeTenants, RunningServer, make_model, running_server

MESSAGES = [{"role": "user", "content": "hi"}]


class AdapterReplica(FakeReplica):
    """Believes every folder that has a file `adapter`."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.adapters = AdapterBook(lambda command: True, introduce, str(folder) if folder else None)
        self.adapters.begin([AdapterFacts("sql", "/adapters/sql", "5" * 64, 8, 100)])


async def introduce(folder: AdapterFolder) -> AdapterFacts:
    file = Path(folder.path) / "adapter"
    if not file.is_file():
        raise CheckpointError("layers.0.q_proj.lora_A has shape [8, 4], not [8, 64]")
    return AdapterFacts(folder.name, folder.path, file.read_text() * 64, 8, 100, folder.inside)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "adapters"
    (root / "chat").mkdir(parents=True)
    (root / "chat" / "adapter").write_text("1")
    (root / "bad").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "adapter").write_text("2")
    (root / "link").symlink_to(tmp_path / "outside")
    return root


@pytest.fixture
def house(folder: Path) -> Iterator[RunningServer]:
    fields: dict[str, dict[str, Any]] = {"boss": {}, "sql": {"adapters": ["sql"]}, "all": {"adapters": ["*"]}, "no": {}}
    with running_server(AdapterReplica(folder), tenants=FakeTenants(table_of(fields))) as server:
        yield server


def ask(server: RunningServer, path: str, key: str = "", body: Any = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    method = "GET" if body is None else "POST"
    return httpx.request(method, f"{server.url}{path}", headers=headers, json=body)


def names(server: RunningServer, key: str = "") -> list[str]:
    return [card["id"] for card in ask(server, "/v1/models", key).json()["data"] if card["parent"]]


def test_a_key_sees_and_uses_its_own_adapters_and_others_are_not_there(house: RunningServer):
    assert (names(house, "sql"), names(house, "all"), names(house, "no")) == (["sql"], ["sql"], [])
    [model, *_, card] = ask(house, "/v1/models", "sql").json()["data"]
    assert (card["parent"], card["root"]) == (model["id"], "/adapters/sql")
    assert model["parent"] is None
    assert ask(house, "/v1/models/sql", "sql").json() == card
    for path, rest in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "hi"})):
        answer = ask(house, path, "sql", {"model": "sql", **rest})
        assert (answer.status_code, answer.json()["model"]) == (200, "sql")
        refused = ask(house, path, "no", {"model": "sql", **rest})
        missing = ask(house, path, "no", {"model": "sqm", **rest})
        assert refused.status_code == missing.status_code == 404
        assert refused.text.replace("sql", "sqm") == missing.text
    assert ask(house, "/v1/models/sql", "no").status_code == 404
    assert {spec.adapter for spec in house.replica.submitted} == {"sql@5555555555555555"}


def test_an_administrator_loads_and_unloads_as_with_vllm_and_an_unknown_name_is_told_the_choices(house: RunningServer):
    for key, choices in (
        ("sql", "tiny, tiny-alias, sql"),
        ("all", "tiny, tiny-alias, sql"),
        ("no", "tiny, tiny-alias"),
    ):
        answer = ask(house, "/v1/completions", key, {"model": "gpt-4", "prompt": "hi"})
        assert answer.json()["error"]["message"] == f"the model 'gpt-4' is not served here; choose one of {choices}"
    load = {"lora_name": "chat", "lora_path": "chat"}
    assert ask(house, "/v1/load_lora_adapter", "all", load).status_code == 403
    assert ask(house, "/v1/load_lora_adapter", "boss", load).text == "Success: LoRA adapter 'chat' added successfully."
    assert names(house, "all") == ["sql", "chat"]
    assert ask(house, "/v1/unload_lora_adapter", "all", {"lora_name": "chat"}).status_code == 403
    done = ask(house, "/v1/unload_lora_adapter", "boss", {"lora_name": "chat"})
    assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'chat' removed successfully.")
    assert ask(house, "/v1/unload_lora_adapter", "boss", {"lora_name": "chat"}).status_code == 404
    assert names(house, "all") == ["sql"]


@pytest.mark.parametrize("path", ["../outside", "link", "/etc", "", ".", "chat/../..", "a\0b", "bad", "nothing"])
def test_a_folder_that_is_outside_or_bad_is_refused_and_nothing_is_loaded(house: RunningServer, path: str):
    answer = ask(house, "/v1/load_lora_adapter", "boss", {"lora_name": "new", "lora_path": path})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
    assert names(house, "all") == ["sql"]


@pytest.mark.parametrize("name", ["", "a@b", " a", "a\n", "x" * 129, "tiny"])
def test_a_name_that_no_adapter_may_have_is_refused(house: RunningServer, name: str):
    answer = ask(house, "/v1/load_lora_adapter", "boss", {"lora_name": name, "lora_path": "chat"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name")


def test_without_a_folder_nothing_is_loaded_while_the_server_runs():
    with running_server(AdapterReplica(None)) as server:
        answer = ask(server, "/v1/load_lora_adapter", body={"lora_name": "a", "lora_path": "a"})
        assert answer.status_code == 400
        assert "--lora-dir" in answer.json()["error"]["message"]
        assert names(server) == ["sql"]  # a server without keys shows all


def test_metrics_name_the_adapter_and_a_gateway_that_knows_vllm_finds_it(house: RunningServer):
    body = {"model": "sql", "prompt": "hi", "max_tokens": 3}
    assert ask(house, "/v1/completions", "sql", body).status_code == 200
    page = ask(house, "/metrics", "boss").text
    assert 'maitred_lora_requests_total{adapter="sql"} 1.0' in page
    assert 'maitred_lora_tokens_total{adapter="sql",kind="generated"} 3.0' in page
    replica = AdapterReplica(None)
    replica.adapters.at_work = lambda: AtWork(("sql", "chat"), ("sql",))
    with running_server(replica, make_model(max_num_seqs=8), metrics_compat="vllm") as server:
        before, [(labels, at)] = time.time(), page_at(server.url)["vllm:lora_requests_info"]
    expected = {"max_lora": "8", "running_lora_adapters": "sql,chat", "waiting_lora_adapters": "sql"}
    assert labels == expected
    assert before <= at <= time.time()


def test_the_ledger_names_the_adapter(tmp_path: Path):
    house = AdapterReplica(None)
    ledger = Ledger(tmp_path / "ledger.sqlite", model="tiny")
    with running_server(house) as server:
        for name in ("sql", None):
            assert ask(server, "/v1/completions", body={"model": name, "prompt": "hi"}).status_code == 200
    for spec in house.submitted:
        ledger.opened(LiveRequest(spec, None))  # type: ignore[arg-type]
    ledger.close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        assert {row[0] for row in db.execute("SELECT model FROM request")} == {"sql", "tiny"}
