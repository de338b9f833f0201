"""A live --kv-disk folder is damaged, full, read-only: answers are a lone engine's, and what lacks is counted."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.conftest import SERVE, ServerProcess, start_server
from tests.kv.test_disk import flip
from tests.reliability.test_surroundings import READ_ONLY
from tests.waiting import HANGS_S, until

STORY = "The maître d' decides who is seated next, keeps every table full, and knows the regulars. " * 4
KINDS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "n": 4})
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class World:
    """A server with a folder, and one without."""

    def __init__(self, folder: Path, server: ServerProcess, alone: ServerProcess) -> None:
        self.folder, self.server, self.alone = folder, server, alone

    def check(self, title: str) -> list[int]:
        """How many tokens were cached of each answer, which are those of the engine that is alone."""
        cached = []
        for kind in KINDS:
            body = {"prompt": f"{title}. {STORY}", "max_tokens": 24, "ignore_eos": True, **kind}
            told, expected = (complete(each, body) for each in (self.server, self.alone))
            assert told["choices"] == expected["choices"]
            cached.append(told["usage"]["prompt_tokens_details"]["cached_tokens"])
        until(lambda: self.view["waiting_blocks"] == 0)
        return cached

    @property
    def view(self) -> dict[str, Any]:
        (tier,) = httpx.get(f"{self.server.url}/admin/kv").json()["tiers"]
        return dict(tier)

    def forget(self) -> None:
        """What is in the engine's memory."""
        assert httpx.post(f"{self.server.url}/sleep", timeout=HANGS_S).status_code == 200

    def limit_files(self, limits: tuple[int, int]) -> None:
        (engine,) = psutil.Process(self.server.process.pid).children()
        resource.prlimit(engine.pid, resource.RLIMIT_FSIZE, limits)


def complete(server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@contextmanager
def serving(folder: Path, alone: ServerProcess, command: Sequence[str] = SERVE) -> Iterator[World]:
    made = World(folder, start_server("--kv-disk", str(folder), command=command), alone)
    yield made
    assert made.server.stop() == 0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, server: ServerProcess) -> Iterator[World]:
    """It has stored something."""
    with serving(tmp_path_factory.mktemp("kv") / "disk", server) as made:
        made.check("Whole")
        yield made


def test_what_is_damaged_or_does_not_fit_is_computed(world: World):
    for file in world.folder.glob("*.kv"):
        flip(file, 8 * (file.stat().st_size // 2))
    world.forget()
    world.check("Whole")
    assert world.view["dropped"].get("damaged", 0) >= 1
    world.limit_files((16, UNLIMITED[1]))
    world.check("The disk is full")
    assert world.view["dropped"].get("no_space", 0) >= 1
    assert world.check("Whole")[0] > 0


def test_a_read_only_folder_is_read_and_no_answer_lacks(world: World, tmp_path: Path):
    folder = Path(shutil.copytree(world.folder, tmp_path / "disk"))
    in_namespace = ("unshare", "-rm", "sh", "-c", READ_ONLY, "sh", str(folder), "--")
    if shutil.which("unshare") is None or subprocess.run([*in_namespace, "true"], check=False).returncode != 0:
        pytest.skip("this user may not mount anything in a namespace of its own")
    with serving(folder, world.alone, (*in_namespace, *SERVE)) as reader:
        assert reader.check("Whole")[0] > 0
        reader.check("Nothing of this is stored")
        assert reader.view["dropped"].get("read_only", 0) >= 1
