"""KV on disk under a real server: kill -9 of all its processes, a new start, and conversations go on unprefilled."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from maitred.cli.main import main
from maitred.model.checkpoint import BUILTIN_FOLDER, open_checkpoint
from maitred.model.families import spec_from_config
from tests.api.test_tenants_end_to_end import new_key
from tests.cli.running import maitred_process
from tests.conftest import ServerProcess, start_server
from tests.model.adapters import random_tensors, write_adapter
from tests.waiting import HANGS_S, is_gone, until

MODEL, ADAPTER = "maitred-mini", "sql"
PROMPT = "The maître d' decides who is seated next, keeps every table full, and knows the regulars. " * 4
NEXT = " And then, when the last table is laid,"
BLOCK, NUM_TOKENS = 16, 40
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"model": MODEL, "temperature": 0.0},
    "seeded": {"model": MODEL, "temperature": 1.0, "seed": 11, "n": 4, "prompt": "Of soups and stews: " + PROMPT},
    "adapter": {"model": ADAPTER, "temperature": 1.0, "seed": 5},
}


@dataclass
class World:
    """The files of a server, which a kill does not touch, and the server that has them now."""

    folder: Path
    keys: dict[str, str] = field(default_factory=dict)
    server: ServerProcess | None = None

    @property
    def disk(self) -> Path:
        return self.folder / "kv"

    def words(self) -> list[str]:
        return ["--tenants", str(self.folder / "tenants.yaml"), "--lora", f"{ADAPTER}={self.folder / ADAPTER}"]

    def open(self, *more: str) -> None:
        self.server = start_server(*self.words(), *more)

    def kill(self) -> None:
        """kill -9 of the server, and of all its processes."""
        assert self.server is not None
        parent = psutil.Process(self.server.process.pid)
        family = [parent, *parent.children(recursive=True)]
        for each in family:
            each.kill()
        self.server.process.wait(HANGS_S)
        until(lambda: all(map(is_gone, family)))

    def ask(self, method: str, path: str, whose: str = "boss", **fields: Any) -> httpx.Response:
        assert self.server is not None
        headers = {"authorization": f"Bearer {self.keys[whose]}"}
        answer = httpx.request(method, self.server.url + path, headers=headers, timeout=HANGS_S, **fields)
        assert answer.status_code == 200, answer.text
        return answer

    def complete(self, whose: str = "a", **fields: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
        answer: dict[str, Any] = self.ask("POST", "/v1/completions", whose, json=body).json()
        return answer

    def disk_view(self) -> dict[str, Any]:
        (tier,) = self.ask("GET", "/admin/kv").json()["tiers"]
        return dict(tier)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_checkpoint(str(BUILTIN_FOLDER)) as checkpoint:
        spec = spec_from_config(checkpoint.config)
    write_adapter(tmp_path / ADAPTER, random_tensors(spec, 4, seed=3), rank=4, lora_alpha=1)
    made = World(tmp_path)
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("tenants:\n  a: {adapters: [sql]}\n  b:\n  boss:\n")
    made.keys = {name: new_key(tenants, name) for name in "ab"}
    made.keys["boss"] = new_key(tenants, "boss", "--admin")
    yield made
    if made.server is not None and made.server.process.poll() is None:
        assert made.server.stop() == 0


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def turns(world: World) -> dict[str, dict[str, Any]]:
    """The second turn of each conversation, as it is asked, once the first ones are stored."""
    found = {}
    for kind, fields in KINDS.items():
        first = world.complete(**fields)
        found[kind] = {**fields, "prompt": fields.get("prompt", PROMPT) + texts(first)[0] + NEXT}
        found[kind] |= {"history": first["usage"]["prompt_tokens"] // BLOCK * BLOCK}
    until(lambda: world.disk_view()["waiting_blocks"] == 0)
    return found


def test_conversations_go_on_after_kill_9_as_if_nothing_had_happened(world):
    world.open("--kv-disk", str(world.disk))
    asked = turns(world)
    histories = {kind: body.pop("history") for kind, body in asked.items()}
    world.kill()

    world.open("--kv-disk", str(world.disk))
    assert any("disk holds" in line for line in world.server.lines)
    assert cached(world.complete("b", max_tokens=1)) == 0, "another tenant finds nothing"
    back = {kind: world.complete(**body) for kind, body in asked.items()}
    for kind, answer in back.items():
        assert cached(answer) >= histories[kind], kind
    view = world.disk_view()
    assert view["hit_tokens"] >= sum(histories.values())
    assert view["dropped"] == {}
    page = world.ask("GET", "/metrics").text
    assert f'maitred_kv_tier_hit_tokens_total{{tier="disk"}} {float(view["hit_tokens"])}' in page
    assert 'maitred_kv_tier_bytes{tier="disk"}' in page
    assert world.ask("DELETE", "/admin/kv").json()["num_blocks"] >= view["num_blocks"]
    assert world.disk_view()["num_blocks"] == 0
    assert world.server.stop() == 0

    world.open()  # without a tier
    assert world.ask("GET", "/admin/kv").json() == {"tiers": []}
    for kind, body in asked.items():
        alone = world.complete(**body)
        assert cached(alone) == 0, kind
        assert texts(alone) == texts(back[kind]), kind


@pytest.mark.soak
def test_workers_of_a_new_start_are_sent_the_conversations_that_lie_with_them(world):
    words = ("--mixed-workers", "2", "--kv-disk", str(world.disk))
    prompts = [f"{number}. {PROMPT}" for number in range(4)]

    def tiers() -> list[dict[str, Any]]:
        return list(world.ask("GET", "/admin/kv").json()["tiers"])

    def computes_sooner(tier: dict[str, Any], num_tokens: int) -> bool:
        return tier["hit_tokens"] > 0 and (tier["break_even_tokens"] or num_tokens) >= num_tokens

    def both_are_there() -> bool:
        return len(tiers()) == 2 and len(tiers()) == 2  # asked once more, all that lies there was told

    world.open(*words)
    until(both_are_there)
    with ThreadPoolExecutor(len(prompts)) as asking:
        first = list(asking.map(lambda prompt: world.complete(prompt=prompt, temperature=0.0), prompts))
    until(lambda: all(tier["waiting_blocks"] == 0 for tier in tiers()))
    assert all(tier["num_blocks"] for tier in tiers()), "each has conversations of its own"
    world.kill()

    world.open(*words)
    until(both_are_there)
    for prompt, answer in zip(reversed(prompts), reversed(first), strict=True):
        back = world.complete(prompt=prompt + texts(answer)[0] + NEXT, temperature=0.0)
        whole = answer["usage"]["prompt_tokens"] // BLOCK * BLOCK
        assert cached(back) >= whole or any(computes_sooner(tier, whole) for tier in tiers())
    assert all(tier["hit_tokens"] for tier in tiers()), "what a worker is not known to compute sooner it reads"


def test_a_folder_is_one_servers_and_private_and_the_next_engine_has_that_of_one_that_slept_or_was_killed(world):
    world.open("--kv-disk", str(world.disk))
    second = maitred_process("serve", "--port", "0", "--kv-disk", str(world.disk))
    assert second.code != 0
    assert "is in use by" in second.err
    said = texts(world.complete(**KINDS["greedy"]))
    until(lambda: world.disk_view()["waiting_blocks"] == 0)
    assert stat.S_IMODE(world.disk.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in world.disk.iterdir())
    assert world.server is not None
    world.ask("POST", "/sleep")
    back = world.complete(**KINDS["greedy"])
    assert cached(back) >= 128
    assert texts(back) == said
    (engine,) = psutil.Process(world.server.process.pid).children()
    engine.kill()
    until(lambda: is_gone(engine))
    back = world.complete(**KINDS["greedy"])
    assert cached(back) >= 128
    assert texts(back) == said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--kv-disk-max-bytes", "1000"), "one block takes"),
        (("--kv-staging-bytes", "1000"), "a block takes"),
        (("--kv-disk", "{folder}/tenants.yaml"), "name a folder of your own"),
        (("--no-enable-prefix-caching",), "kv_disk out"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line_with_the_remedy(tmp_path, capsys, words, told):
    (tmp_path / "tenants.yaml").write_text("tenants: {}")
    (tmp_path / "tenants.yaml").chmod(0o644)
    words = [word.format(folder=tmp_path) for word in words]
    assert main(["serve", "--port", "0", "--kv-disk", str(tmp_path / "kv"), *words]) != 0
    written = capsys.readouterr().err
    assert told in written
    assert "Traceback" not in written
