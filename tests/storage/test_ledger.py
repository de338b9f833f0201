"""The ledger's sums are the engine's counters, a row is written once, and a killed process leaves nothing open."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from maitred.core.clock import ManualClock
from maitred.core.errors import ConfigError, Unavailable
from maitred.core.request import NO_CHARGES, Charges, FinishReason, RequestSpec
from maitred.scheduler.engine_core import EngineCore
from maitred.storage.ledger import Ledger
from maitred.tenancy.usage import UsageKey, UsageQuery, UsageSum, fill_buckets
from tests.fakes import FakeExecutor, make_request, make_samples, make_scheduler
from tests.waiting import joined, until

T0 = 1_700_000_000.0


def rows(path: Path, sql: str = "SELECT * FROM request ORDER BY run, request_id") -> list[sqlite3.Row]:
    with sqlite3.connect(path) as db:
        db.row_factory = sqlite3.Row
        return db.execute(sql).fetchall()


def sums(path: Path) -> tuple[int, int, int]:
    sql = "SELECT SUM(prompt_tokens), SUM(cached_tokens), SUM(generated_tokens) FROM request"
    return tuple(value or 0 for value in rows(path, sql)[0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.mark.parametrize("seed", range(6))
def test_the_sums_are_the_engines_counters_at_every_moment(path, seed):
    """Few blocks, shared prompts, samples, preemptions, aborts, failures."""
    rng, clock, executor = random.Random(seed), ManualClock(), FakeExecutor()
    core = EngineCore(make_scheduler(num_blocks=24, max_num_seqs=4, policy="priority"), executor, clock)
    ledger = Ledger(path, model="m", checkpoint_s=60)
    live: list[str] = []
    for turn in range(60):
        shared = list(range(rng.choice([0, 8, 16])))
        arriving = [make_request(prompt=[*shared, turn, 7], max_tokens=rng.randint(1, 30), tenant="a",
                                 priority=rng.randint(0, 3), arrived_at=clock.now())]  # fmt: skip
        if rng.random() < 0.3:
            n = rng.randint(2, 4)
            arriving = make_samples(f"p{turn}", n, prompt=[*shared, turn], max_tokens=9, arrived_at=clock.now())
        for request in arriving:
            ledger.opened(core.add(request.spec))
            live.append(request.request_id)
        if rng.random() < 0.3:
            core.finish(rng.choice(live), rng.choice([FinishReason.ABORT, FinishReason.STOP]))
        if rng.random() < 0.1:
            executor.errors[rng.choice(live)] = "logits are NaN"
        for _ in range(rng.randint(0, 6)):
            clock.advance(0.01)
            core.step()
        if turn % 7 == 0:
            ledger.flush()
            assert sums(path) == counters(core)
    while core.has_work:
        clock.advance(0.01)
        core.step()
    ledger.close()
    assert core.stats.num_preemptions > 0
    assert sums(path) == counters(core)
    ended = {reason.value: count for reason, count in core.stats.num_finished.items() if count}
    assert {row[0]: row[1] for row in rows(path, "SELECT status, COUNT(*) FROM request GROUP BY status")} == ended
    assert not rows(path, "SELECT 1 FROM request WHERE closed_at IS NULL")


def counters(core: EngineCore) -> tuple[int, int, int]:
    stats = core.stats
    return stats.num_prompt_tokens, stats.num_prefix_hit_tokens, stats.num_generated_tokens


def test_a_row_has_everything_and_never_changes_after_it_was_closed(path):
    ledger = Ledger(path, model="m", wall_time=lambda: T0)
    request = make_request("r", tenant="acme", key_id="key_1", priority=2)
    ledger.opened(request)
    ledger.flush()
    assert rows(path)[0]["status"] == "open"
    request.num_charged_prompt_tokens, request.num_cached_tokens = 8, 4
    request.output_token_ids += [1, 2, 3]
    request.finish_reason, request.finished_at = FinishReason.LENGTH, 5.0
    ledger.flush()
    (row,) = rows(path)
    assert dict(row) == {
        "run": 1, "request_id": "r", "tenant": "acme", "key_id": "key_1", "model": "m", "tier": "flex",
        "opened_at": T0, "checkpoint_at": T0, "closed_at": T0, "status": "length", "num_requests": 1,
        "prompt_tokens": 8, "cached_tokens": 4, "generated_tokens": 3, "rows": 0, "compute_us": 0,
    }  # fmt: skip
    request.output_token_ids.append(4)
    ledger.close()
    assert dict(rows(path)[0]) == dict(row)
    with sqlite3.connect(path) as db, pytest.raises(sqlite3.IntegrityError, match="does not change"):
        db.execute("UPDATE request SET generated_tokens = 9")


def test_a_stopped_server_closes_what_it_could_not_finish_with_its_last_counts(path):
    ledger = Ledger(path, model="m")
    request = make_request("r")
    ledger.opened(request)
    ledger.flush()
    request.num_charged_prompt_tokens = 8
    request.output_token_ids.append(1)
    ledger.close()
    ledger.close()
    assert [(r["status"], r["prompt_tokens"], r["generated_tokens"]) for r in rows(path)] == [("interrupted", 8, 1)]
    assert rows(path, "SELECT closed_at FROM run")[0]["closed_at"]


def test_a_repeated_id_gets_a_row_of_its_own_and_other_runs_have_their_own_ids(path):
    for _ in range(2):
        ledger = Ledger(path, model="m")
        for _ in range(2):
            request = make_request("r")
            request.finish_reason, request.finished_at = FinishReason.STOP, 1.0
            ledger.opened(request)
        ledger.close()
    assert [(r["run"], r["request_id"]) for r in rows(path)] == [(1, "r"), (1, "r#2"), (2, "r"), (2, "r#2")]


def test_usage_adds_up_like_the_slow_obvious_way(path):
    rng = random.Random(5)
    at = [T0]
    ledger = Ledger(path, model="m", wall_time=lambda: at[0])
    slow: dict[tuple[int, UsageKey], UsageSum] = {}
    query = UsageQuery(start=int(T0) + 100, end=int(T0) + 5000, width_s=60, group_by=("tenant", "tier"))
    for number in range(300):
        at[0] += rng.random() * 40
        request = make_request(prompt=1, tenant=rng.choice("ab"), priority=rng.randint(0, 2), sample_index=number % 2)
        request.num_charged_prompt_tokens, request.num_cached_tokens = rng.randint(1, 90), rng.randint(0, 1)
        request.output_token_ids += [0] * rng.randint(0, 20)
        request.finish_reason, request.finished_at = FinishReason.STOP, 1.0
        ledger.opened(request)
        if query.start <= at[0] < query.end:
            key = (query.bucket_of(at[0]),
                   UsageKey(tenant=request.tenant, tier=("priority", "default", "flex")[request.priority]))  # fmt: skip
            one = UsageSum(
                1 - number % 2, request.num_charged_prompt_tokens, request.num_cached_tokens,
                len(request.output_token_ids),
            )  # fmt: skip
            slow[key] = slow.get(key, UsageSum()).plus(one)
    ledger.flush()
    fast = {(start, key): amount for start, key, amount in ledger.usage(query)}
    assert fast == slow
    assert len(fill_buckets(query, ledger.usage(query))) == len(list(query.buckets()))
    only_a = UsageQuery(start=0, end=2**40, width_s=86400 * 365, filters=(("tenant", ("a",)), ("model", ("m",))))
    spent = sum(amount.prompt_tokens + amount.generated_tokens for _, _, amount in ledger.usage(only_a))
    assert spent == ledger.spent_tokens()["a"]
    ledger.close()


def test_a_full_disk_delays_rows_but_loses_none(path, caplog):
    ledger = Ledger(path, model="m", checkpoint_s=60)
    with sqlite3.connect(path) as db:
        (pages,) = db.execute("PRAGMA page_count").fetchone()
    ledger._file.db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite says "database or disk is full"
    for index in range(200):
        request = make_request(f"r{index}")
        request.output_token_ids += [1] * index
        ledger.opened(request)
    ledger.flush()
    assert sums(path)[2] == 0
    assert "cannot write the ledger" in caplog.text
    ledger._file.db.execute("PRAGMA max_page_count = 100000")
    ledger.flush()
    assert sums(path)[2] == sum(range(200))
    ledger.close()
    assert caplog.text.count("cannot write the ledger") == 1


def deleted(path: Path) -> None:
    path.unlink()


def moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replaced(path: Path) -> None:
    path.with_name("draft").touch(0o600)
    path.with_name("draft").rename(path)


def overwritten(path: Path) -> None:
    path.write_bytes(b"no database" * 999)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("lose", [deleted, moved, replaced, overwritten, emptied])
def test_a_lost_file_is_told_and_begun_anew_with_all_of_what_runs(path, caplog, lose):
    ledger = Ledger(path, model="m", checkpoint_s=60)
    ended, running = make_request("ended"), make_request("running")
    for request in (ended, running):
        ledger.opened(request)
        request.output_token_ids += [1] * 3
    ended.finish_reason, ended.finished_at = FinishReason.STOP, 1.0
    ledger.flush()
    lose(path)
    running.output_token_ids += [1] * 4
    ledger.flush()
    assert [(row["request_id"], row["generated_tokens"]) for row in rows(path)] == [("running", 7)]
    assert "usage goes on in another file, without that of before" in caplog.text
    assert path.stat().st_mode & 0o777 == 0o600
    aside = list(path.parent.glob("ledger.sqlite.lost-*"))
    assert len(aside) == (lose in (overwritten, emptied))
    running.output_token_ids += [1]
    ledger.flush()
    ledger.close()
    assert (sums(path)[2], caplog.text.count("in another file")) == (8, 1)
    assert rows(path, "SELECT COUNT(*) FROM run WHERE closed_at IS NOT NULL")[0][0] == 1
    Ledger(path).close()


def test_a_file_that_is_damaged_within_is_kept_aside_and_begun_anew(path, caplog):
    ledger = Ledger(path, checkpoint_s=60)
    ledger.opened(make_request("a"))
    ledger.flush()
    ledger._file.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"x" * (path.stat().st_size - 4096))
    ledger._file.db.execute("PRAGMA shrink_memory")  # which forgets the pages as they were
    ledger.opened(make_request("b"))
    ledger.flush()
    assert "malformed" in caplog.text
    ledger.flush()
    assert [row["request_id"] for row in rows(path)] == ["a", "b"]
    assert len(list(path.parent.glob("ledger.sqlite.lost-*"))) == 1
    ledger.close()


def test_no_usage_is_read_where_there_is_no_ledger_and_none_is_made(path):
    ledger = Ledger(path, checkpoint_s=60)
    path.unlink()
    with pytest.raises(Unavailable, match="the ledger cannot be read: unable to open"):
        ledger.usage(UsageQuery(start=0, end=1))
    assert not path.exists()
    ledger.close()


def test_a_place_where_no_file_can_be_is_tried_again_and_no_descriptor_is_closed_twice(path, caplog):
    ledger = Ledger(path, checkpoint_s=60)
    request = make_request("r")
    ledger.opened(request)
    ledger.flush()
    path.unlink()
    path.mkdir()
    ledger.flush()
    with path.with_name("others").open("wb") as others:  # takes the number of the descriptor that was closed
        for _ in range(3):
            ledger.flush()
        others.write(b"whole")
    assert caplog.text.count("was replaced") == caplog.text.count("trying again") == 1
    path.rmdir()
    ledger.flush()
    assert [row["request_id"] for row in rows(path)] == ["r"]
    assert "is written again" in caplog.text
    ledger.close()


def test_a_pipe_is_refused_and_not_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is a pipe or a device"):
        Ledger(path)


@pytest.mark.parametrize("content", [b"this is no database at all, but a text that is long enough" * 20, None])
def test_a_file_that_is_no_ledger_is_refused_and_left_alone(path, content):
    if content is None:
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE request (x)")
        content = path.read_bytes()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="choose another file"):
        Ledger(path, model="m")
    with pytest.raises(ConfigError, match="cannot open the ledger"):
        Ledger(path.parent / "nowhere" / "x", model="m")


def test_a_pipe_is_refused_and_only_its_owner_may_read_a_ledger(path):
    Ledger(path, model="m").close()
    assert path.stat().st_mode & 0o777 == 0o600


VICTIM = """
import sys, time
from pathlib import Path
from maitred.storage.ledger import Ledger
from tests.fakes import make_request
ledger = Ledger(Path(sys.argv[1]), model="m")
request = make_request("r")
ledger.opened(request)
request.num_charged_prompt_tokens = 8
while True:
    request.output_token_ids.append(1)
    print(len(request.output_token_ids), flush=True)
    time.sleep(0.01)
"""


def test_rows_of_a_killed_process_are_closed_from_its_last_checkpoint(path):
    with subprocess.Popen([sys.executable, "-c", VICTIM, str(path)], stdout=subprocess.PIPE, text=True) as victim:
        seen: list[tuple[float, int]] = []

        def read() -> None:
            for line in victim.stdout:
                seen.append((time.time(), int(line)))

        reader = threading.Thread(target=read)
        reader.start()
        until(lambda: seen and rows(path) and rows(path)[0]["checkpoint_at"] > seen[0][0])  # not only its first one
        other = Ledger(path, model="m")  # a second living server leaves the first one's row alone
        other.close()
        assert rows(path)[0]["status"] == "open"
        os.kill(victim.pid, signal.SIGKILL)
        joined(reader)
    Ledger(path, model="m").close()
    (row,) = rows(path)
    assert (row["status"], row["prompt_tokens"], row["closed_at"]) == ("interrupted", 8, row["checkpoint_at"])
    at_least = max((count for at, count in seen if at < row["checkpoint_at"]), default=0)
    assert at_least > 0
    assert at_least <= row["generated_tokens"] <= seen[-1][1] + 1
    again = dict(row)
    Ledger(path, model="m").close()
    assert [dict(r) for r in rows(path)] == [again]


@pytest.mark.parametrize(("model", "tenant", "generated", "why"), [
    ("m\udcff", "a", 1, "surrogates not allowed"),
    ("m", "a\udcff", 1, "surrogates not allowed"),
    ("m", "a", 2**63, "too large"),
])  # fmt: skip
def test_a_row_that_cannot_be_written_is_named_and_left_out_and_the_others_are_written(
    path, caplog, model, tenant, generated, why
):
    @dataclass
    class Foreign:  # as a router has it
        spec: RequestSpec
        num_output_tokens: int
        charges: Charges = NO_CHARGES
        finish_reason: FinishReason = FinishReason.STOP

    ledger = Ledger(path, checkpoint_s=60)
    ledger.opened(Foreign(make_request("bad", tenant=tenant).spec, generated), model)
    ledger.opened(Foreign(make_request("good").spec, 3), "m")
    ledger.flush()
    assert [(row["request_id"], row["generated_tokens"]) for row in rows(path)] == [("good", 3)]
    [named] = [record.getMessage() for record in caplog.records]
    assert "'bad'" in named
    assert why in named
    assert str(generated) in named
    ledger.flush()
    ledger.close()
    assert len(caplog.records) == 1


def test_a_file_of_before_tensor_requests_gets_their_columns_and_keeps_its_rows(path):
    columns = ", ".join(f"{name} DEFAULT 0" for name in rows_of_version_1())
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE run (run INTEGER PRIMARY KEY, boot, pid, pid_started, opened_at, closed_at)")
        db.execute(f"CREATE TABLE request ({columns}, PRIMARY KEY (run, request_id)) WITHOUT ROWID")
        db.execute("INSERT INTO request (run, request_id, generated_tokens) VALUES (1, 'old', 7)")
        db.execute("PRAGMA user_version = 1")
    for _ in range(2):  # a file that has them is left as it is
        Ledger(path).close()
    (row,) = rows(path)
    assert (row["request_id"], row["generated_tokens"], row["rows"], row["compute_us"]) == ("old", 7, 0, 0)


def rows_of_version_1():
    whose = (
        "run", "request_id", "tenant", "key_id", "model", "tier", "opened_at", "checkpoint_at", "closed_at", "status",
    )  # fmt: skip
    return (*whose, "num_requests", "prompt_tokens", "cached_tokens", "generated_tokens")
