"""Versions come and go under load: no request fails, none changes its version, and a kill in between costs nothing."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import psutil

from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.model.shelf import Shelf
from maitred.optimize.release import publish
from tests.conftest import ServerProcess, start_server
from tests.shelves import other_model
from tests.waiting import HANGS_S, is_gone, joined, until

BODY = {"prompt": "one soup", "max_tokens": 60, "ignore_eos": True, "seed": 5, "temperature": 1.0, "n": 2}


class Guest(threading.Thread):
    """Asks the same thing for as long as it may, streamed and whole in turn."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self.may_go = f"{url}/v1/completions", threading.Event()
        self.answers: list[tuple[str, tuple[str, ...]]] = []  # its version, and its text by sample
        self.start()

    def run(self) -> None:
        with httpx.Client(timeout=HANGS_S) as client:
            while not self.may_go.is_set():
                self.answers.append(self._streamed(client) if len(self.answers) % 2 else self._whole(client))

    def _whole(self, client: httpx.Client) -> tuple[str, tuple[str, ...]]:
        answer = client.post(self._url, json=BODY).raise_for_status()
        return answer.headers["x-maitred-version"], tuple(each["text"] for each in answer.json()["choices"])

    def _streamed(self, client: httpx.Client) -> tuple[str, tuple[str, ...]]:
        texts = ["", ""]
        with client.stream("POST", self._url, json={**BODY, "stream": True}) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        for line in lines:
            for choice in json.loads(line)["choices"]:
                texts[choice["index"]] += choice["text"]
        return answer.headers["x-maitred-version"], tuple(texts)


def told(server: ServerProcess) -> dict[str, Any]:
    return httpx.get(f"{server.url}/admin/releases", timeout=HANGS_S).json()


def test_two_changes_and_a_roll_back_under_four_streams_fail_none_and_a_kill_in_the_next_one_starts_with_current(
    tmp_path: Path,
):
    shelf = Shelf(tmp_path / "waiter")
    publish(str(BUILTIN_FOLDER), shelf)
    server = start_server(str(shelf.root), "--kv-cache-memory-bytes", "64MiB")
    guests = [Guest(server.url) for _ in range(4)]

    def turned_to(version: int) -> bool:
        state = told(server)
        num_before = {guest: len(guest.answers) for guest in guests}
        assert state["refused"] is None
        if state["serving"] != version or len(state["num_requests"]) > 1:
            return False
        until(lambda: all(len(guest.answers) > num_before[guest] for guest in guests))
        return True

    try:
        for version in (2, 3):
            publish(str(other_model(tmp_path / f"model-{version}", version)), shelf)
            until(lambda version=version: turned_to(version))
        shelf.use(2)
        until(lambda: turned_to(2))
    finally:
        for guest in guests:
            guest.may_go.set()
        joined(*guests)
    answers = defaultdict(set)
    for guest in guests:
        assert [version for version, _ in guest.answers[-1:]] == ["2"]
        for version, texts in guest.answers:
            answers[version].add(texts)
    assert sorted(answers) == ["1", "2", "3"]
    assert [len(texts) for texts in answers.values()] == [1] * 3  # one answer of each, whichever way it came
    assert len(set.union(*answers.values())) == 3

    shelf.use(3)
    until(lambda: told(server)["starting"] == 3)
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.kill()
    until(lambda: all(map(is_gone, children)))
    server = start_server(str(shelf.root))
    card, version = httpx.get(f"{server.url}/v1/models", timeout=HANGS_S), told(server)["serving"]
    assert (card.json()["data"][0]["id"], card.headers["x-maitred-version"], version) == ("waiter", "3", 3)
    assert server.stop() == 0
