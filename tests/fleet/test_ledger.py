"""The router's ledger: its sums are the token counters of its replicas."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.conftest import ServerProcess, start_server
from tests.fleet.test_end_to_end import start_router
from tests.waiting import HANGS_S, until

CHAT = "/v1/chat/completions"
TRITON = (
    ("generate", {"text_input": "Hello", "parameters": {"max_tokens": "7"}, "ignore_eos": True}),
    ("generate_stream", {"text_input": "Hello", "max_tokens": 11, "n": 2, "ignore_eos": True}),
)
PRICE = 720.0
SAYS = [{"role": "user", "content": "Tell me of the sea."}]


class Tokens(NamedTuple):
    prompt: int
    generated: int

    def plus(self, other: Tokens) -> Tokens:
        return Tokens(self.prompt + other.prompt, self.generated + other.generated)


@dataclass(slots=True)
class Billed:
    replicas: dict[str, ServerProcess]
    client: httpx.Client
    path: Path

    def rows(self) -> list[tuple[str, str, Tokens]]:
        """Model, status, tokens of each request that has its row closed."""
        with closing(sqlite3.connect(self.path)) as db:
            found = db.execute(
                "SELECT model, status, prompt_tokens, generated_tokens FROM request WHERE closed_at IS NOT NULL "
                "ORDER BY opened_at"
            )
            return [(model, status, Tokens(*tokens)) for model, status, *tokens in found]

    def counted(self, without: str = "") -> Tokens:
        """By the replicas that live."""
        living = [each for name, each in self.replicas.items() if each.process.poll() is None and name != without]
        told = [_counters(running.url) for running in living]
        return Tokens(*map(sum, zip(*told, strict=True)))

    def waits_for_rows(self, number: int) -> list[tuple[str, str, Tokens]]:
        until(lambda: len(self.rows()) == number)
        return self.rows()


def _counters(url: str) -> Tokens:
    return Tokens(*(int(_value(url, f"maitred_{of}_tokens_total")) for of in ("prompt", "generation")))


def _value(url: str, name: str) -> float:
    told = httpx.get(url + "/metrics", timeout=HANGS_S).text.splitlines()
    return float(next(line for line in told if line.partition(" ")[0].partition("{")[0] == name).rpartition(" ")[2])


@pytest.fixture(scope="module")
def billed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Billed]:
    folder = tmp_path_factory.mktemp("fleet")
    token, ledger = folder / "token", folder / "ledger.sqlite"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    flags = ("--fleet-token-file", str(token))
    with ThreadPoolExecutor() as pool:
        replicas = list(pool.map(lambda _: start_server(*flags), range(3)))
    urls = [replica.url for replica in replicas]
    router = start_router(
        *(*urls, *flags, "--ledger", str(ledger), "--price-per-hour", str(PRICE)),
        *("--balance", "round_robin", "--replica-drain-s", "0.1"),
    )
    with httpx.Client(base_url=router.url, timeout=HANGS_S) as client:
        named = {url.removeprefix("http://"): replica for url, replica in zip(urls, replicas, strict=True)}
        until(lambda: client.get("/ready").status_code == 200)
        yield Billed(named, client, ledger)
    router.stop()
    for replica in replicas:
        replica.stop()


def test_its_sums_are_the_replicas_counters(billed):
    wanted: tuple[dict[str, Any], ...] = (
        {"max_tokens": 9},
        {"max_tokens": 20, "n": 3, "seed": 1},
        {"max_tokens": 1, "n": 3},  # the first sample has ended before the others begin
        {"max_tokens": 30, "stream": True},  # which says nothing of usage
        {"max_tokens": 30, "stream": True, "n": 2, "stream_options": {"include_usage": True}},
        {"max_tokens": 40, "stop": ["e"]},
        {"max_tokens": 40, "stop": ["e"], "stream": True},
    )
    for fields in wanted:
        assert billed.client.post(CHAT, json={"messages": SAYS, **fields}).status_code == 200
    for path, fields in TRITON:
        assert billed.client.post(f"/v2/models/maitred-mini/{path}", json=fields).status_code == 200
    unknown = billed.client.post(CHAT, json={"messages": SAYS, "model": "no such model"})
    assert unknown.status_code == 404, "of which there is no row"
    rows = billed.waits_for_rows(len(wanted) + len(TRITON))
    total = Tokens(0, 0)
    for _, _, tokens in rows:
        total = total.plus(tokens)
    assert total == billed.counted() != Tokens(0, 0)
    assert rows[0][2].generated == 9
    assert [status for _, status, _ in rows] == ["stop"] * len(rows)
    assert [tokens.generated for _, _, tokens in rows[-2:]] == [7, 2 * 11]


def test_its_usage_and_what_that_costs_are_read_as_a_servers(billed):
    usage = f"/v1/organization/usage/completions?start_time={int(time.time()) - 3600}"
    before = sums(billed, usage)
    assert billed.client.post(CHAT, json={"messages": SAYS, "max_tokens": 9}).status_code == 200
    until(lambda: sums(billed, usage)["output_tokens"] == before["output_tokens"] + 9)
    billed.waits_for_rows(sums(billed, usage)["num_model_requests"])
    told = sums(billed, usage)
    assert told["engine_ms"] > before["engine_ms"]
    assert told["cost"] == pytest.approx(told["engine_ms"] * PRICE / 3_600_000)
    computed = sum(_value(replica.url, "maitred_engine_execute_seconds_total") for replica in billed.replicas.values())
    assert told["engine_ms"] == pytest.approx(computed * 1000, rel=0.05)


def sums(billed: Billed, path: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for bucket in billed.client.get(path).json()["data"]:
        for result in bucket["results"]:
            total.update({name: value for name, value in result.items() if isinstance(value, int | float)})
    return total


def test_a_stream_that_is_moved_costs_what_both_replicas_computed(billed):
    num_before, before = len(billed.rows()), billed.counted()
    asked = {"messages": SAYS, "max_tokens": 480, "n": 8, "ignore_eos": True, "stream": True}
    with billed.client.stream("POST", CHAT, json=asked) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if "content" in line)
        billed.client.post("/admin/fleet/drain", json={"name": answer.headers["x-maitred-replica"]})
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    [(_, status, tokens)] = billed.waits_for_rows(num_before + 1)[num_before:]
    assert (status, tokens.generated) > ("stop", 8 * 480), "tokens were made there that were not told any more"
    assert before.plus(tokens) == billed.counted()


def test_a_stream_that_a_killed_replica_began_is_one_row_of_all_that_its_client_has(billed):
    num_before, before = len(billed.rows()), billed.counted()
    asked = {"messages": SAYS, "max_tokens": 480, "n": 8, "ignore_eos": True, "stream": True}
    with billed.client.stream("POST", CHAT, json=asked) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if "content" in line)
        name = answer.headers["x-maitred-replica"]
        counted = billed.counted(without=name)
        os.kill(billed.replicas[name].process.pid, signal.SIGKILL)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    [(_, status, tokens)] = billed.waits_for_rows(num_before + 1)[num_before:]
    assert (status, tokens.generated) == ("stop", 8 * 480)
    assert tokens.prompt == billed.rows()[0][2].prompt
    billed.replicas[name].process.wait(HANGS_S)
    rest = billed.counted().generated - counted.generated
    assert 0 < rest < 8 * 480
    assert before.generated >= counted.generated


def test_who_goes_away_before_or_after_the_first_token_pays_for_what_was_computed(billed):
    asked = {"messages": SAYS, "max_tokens": 490, "n": 8, "ignore_eos": True}
    for is_streamed in (True, False):
        num_before, before = len(billed.rows()), billed.counted()
        if is_streamed:
            with billed.client.stream("POST", CHAT, json=asked | {"stream": True}) as answer:
                assert [line for _, line in zip(range(40), answer.iter_lines(), strict=False)]
        else:
            with pytest.raises(httpx.ReadTimeout):
                billed.client.post(CHAT, json=asked, timeout=0.3)
        [(_, status, tokens)] = billed.waits_for_rows(num_before + 1)[num_before:]
        assert status == "abort"
        if is_streamed:
            assert tokens.prompt == billed.rows()[0][2].prompt
            assert 8 <= tokens.generated == billed.counted().generated - before.generated
        else:
            assert before.plus(tokens) == billed.counted() != before
