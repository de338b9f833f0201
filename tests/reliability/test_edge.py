"""Attacks on the HTTP edge over raw sockets, in short; `benchmarks/soak_edge.py` makes the same ones in long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from maitred.cli.local import start_engine
from maitred.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from maitred.core.clock import WallClock
from maitred.core.request import FinishReason
from maitred.engine.client import EngineClient
from maitred.engine.limits import SPARE_DESCRIPTORS
from maitred.scheduler.engine_core import EngineCore
from maitred.text.tokenizer import Tokenizer
from tests.api.test_disconnect import close, half_close, reset, send
from tests.conftest import ROOT, copied_model
from tests.engine.worlds import client_of
from tests.fakes import MODEL, GatedExecutor, make_scheduler
from tests.fakes_api import FakeReplica, RunningServer, byte_tokenizer, make_model, running_server
from tests.reliability.edge_server import Attacked, attacked
from tests.waiting import HANGS_S, joined, until

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
MIB = 1024 * 1024


def connect(server: Attacked) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=HANGS_S)


def ask(server: Attacked, prompt: str) -> socket.socket:
    """A stream begun; the answer is not read."""
    body = json.dumps({"model": "tiny", "prompt": prompt, "stream": True, "max_tokens": 50_000}).encode()
    connection = connect(server)
    connection.sendall(POST + b"content-length: %d\r\n\r\n%s" % (len(body), body))
    return connection


@contextmanager
def opened(connections: list[socket.socket]) -> Iterator[list[socket.socket]]:
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


def answer_of(connection: socket.socket) -> bytes:
    """Everything up to the end; a reset is an end too."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


# ---- many connections


def test_idle_and_streaming_connections_cost_little_memory():
    with attacked(header_timeout_s=600, sse_keep_alive_s=0.0) as server:
        assert server.is_well()
        before, num_files = server.rss_bytes(), server.num_files()
        with opened([connect(server) for _ in range(600)] + [ask(server, "hold") for _ in range(400)]):
            until(lambda: server.in_flight() == 400)
            assert server.is_well()
            each = (server.rss_bytes() - before) / 1000
            assert each < 60 * 1024, f"{each / 1024:.0f} KiB for a connection"
        until(lambda: server.in_flight() == 0)
        until(lambda: server.num_files() <= num_files + 2)


def test_connections_over_the_limit_are_told_and_the_others_live_on():
    with attacked(max_connections=20, header_timeout_s=600) as server:
        with opened([connect(server) for _ in range(20)]), connect(server) as late:
            assert answer_of(late).startswith(b"HTTP/1.1 503")
        until(lambda: _is_let_in(server))


def test_the_last_descriptors_are_no_connections_and_who_comes_then_is_told():
    with attacked(header_timeout_s=600) as server:
        limit = server.num_files() + SPARE_DESCRIPTORS + 10
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        with opened([]) as connections:
            while len(connections) < 20:
                connections.append(connect(server))
                connections[-1].sendall(GET + b"\r\n")
                if not connections[-1].recv(65536).startswith(b"HTTP/1.1 200"):
                    break
            assert 8 <= len(connections) <= 12
            assert server.num_files() <= limit - SPARE_DESCRIPTORS + 1
            with connect(server) as late:
                assert answer_of(late).startswith(b"HTTP/1.1 503")
            connections[0].sendall(GET + b"\r\n")
            assert connections[0].recv(65536).startswith(b"HTTP/1.1 200"), "the others live on"
        until(lambda: _is_let_in(server))


def _is_let_in(server: Attacked) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=HANGS_S).status_code == 200
    except httpx.HTTPError:
        return False


# ---- slow ones


def silent(server: Attacked) -> socket.socket:
    return connect(server)


def slow_head(server: Attacked) -> socket.socket:
    connection = connect(server)
    connection.sendall(GET + b"x-a: ")
    return connection


def slow_body(server: Attacked) -> socket.socket:
    connection = connect(server)
    connection.sendall(POST + b"content-length: 1000\r\n\r\n{")
    return connection


def has_begun(connection: socket.socket) -> None:
    """Return when something of the answer is there, or was; it stays unread."""
    with contextlib.suppress(OSError):
        connection.recv(1, socket.MSG_PEEK)


def slow_reader(server: Attacked) -> socket.socket:
    return unread(server, b'{"model":"tiny","prompt":"flood","stream":true,"max_tokens":50000}')


def unread(server: Attacked | RunningServer, body: bytes, headers: bytes = b"") -> socket.socket:
    """A request whose answer nobody reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(POST + headers + b"content-length: %d\r\n\r\n%s" % (len(body), body))
    return connection


def test_slow_clients_are_all_hung_up_on_while_good_ones_are_served():
    with (
        attacked(header_timeout_s=3.0, body_timeout_s=3.0) as server,
        opened([kind(server) for kind in (silent, slow_head, slow_body) for _ in range(100)]) as bad,
    ):
        hung_up_on(server, bad)
        page = httpx.get(f"{server.url}/metrics", timeout=HANGS_S).text
    counted = re.findall(r'maitred_http_requests_total{route="(.*)",status="408"} (.*)', page)
    assert sorted(counted) == [("/v1/completions", "100.0"), ("other", "100.0")]


def hung_up_on(server: Attacked, bad: list[socket.socket]) -> None:
    """Return when all of them were, and good requests were served meanwhile."""
    waiting = set(bad)
    while waiting:
        assert server.is_well()
        readable, _, _ = select.select(list(waiting), [], [], 0.05)  # they are answered and closed, or only closed
        waiting -= {connection for connection in readable if _is_over(connection)}
    until(lambda: server.in_flight() == 0)


def _is_over(connection: socket.socket) -> bool:
    received = answer_of(connection)
    assert received == b"" or received.startswith(b"HTTP/1.1 408"), received
    return True


def test_those_who_trickle_are_hung_up_on_too():
    """A byte now and then keeps no connection open."""
    with attacked(header_timeout_s=3.0, body_timeout_s=3.0) as server:
        with opened([slow_head(server), slow_body(server)]) as bad:
            trickling = set(bad)

            def trickle() -> bool:
                for connection in list(trickling):
                    try:
                        connection.sendall(b"a")
                    except OSError:
                        trickling.discard(connection)
                return not trickling

            until(trickle)
        assert server.is_well()


def test_slow_readers_are_dropped_and_what_is_kept_for_them_is_bounded():
    with attacked(send_timeout_s=2.0, sse_keep_alive_s=0.0) as server:
        assert server.is_well()
        before = server.rss_bytes()
        with opened([slow_reader(server) for _ in range(20)]) as readers:
            most = 0
            for connection in readers:
                has_begun(connection)
            while server.in_flight() > 0:
                most = max(most, server.rss_bytes())
                assert server.is_well()
                time.sleep(0.02)
            # half a MiB each is usual; whole answers would be four
            assert most - before < 20 * MIB, f"{(most - before) / 20 / 1024:.0f} KiB for each reader"


def test_no_answer_is_kept_for_ever_for_who_does_not_read_its_end():
    """Of some of these, all but the last few KiB are in the kernel: too little to pause for, and they do not leave."""
    with attacked(send_timeout_s=1.0) as server:
        assert server.is_well()
        num_files = server.num_files()
        body = {"model": "tiny", "prompt": "flood", "logprobs": 20}  # a token is a third of a KiB
        bodies = [json.dumps({**body, "max_tokens": count}).encode() for count in range(1000, 1600, 50)]
        with opened([unread(server, body, b"connection: close\r\n") for body in bodies]) as readers:
            for connection in readers:
                has_begun(connection)
            until(lambda: server.num_files() <= num_files + 2)
        assert server.is_well()


# ---- who goes away


@pytest.fixture
def gated() -> Iterator[tuple[RunningServer, EngineClient, GatedExecutor]]:
    executor = GatedExecutor(lambda request_id, position: ord("a"))
    scheduler = make_scheduler(max_num_seqs=4, num_blocks=4096, max_num_batched_tokens=64)
    executor.num_blocks_used = lambda: scheduler.stats.num_blocks_used  # now, where the client knows of the last step
    engine = client_of(EngineCore(scheduler, executor, WallClock()))
    try:
        with running_server(engine, make_model(revision=MODEL, block_size=4, max_model_len=16_000)) as server:
            yield server, engine, executor
    finally:
        executor.open()
        engine.stop()


@pytest.mark.parametrize("leave", [close, reset, half_close])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_blocks_are_free_one_step_after_the_client_left(gated, leave, stream, n, phase):
    server, engine, steps = gated
    body = {"prompt": "x" * (200 if phase == "prefill" else 8), "max_tokens": 10_000, "n": n, "stream": stream}
    connection = send(server, "/v1/completions", body)
    steps.let(2 if phase == "prefill" else 12)
    num_steps = 3 if phase == "prefill" else 13
    until(lambda: steps.num_begun == num_steps)  # in the middle of a step, which does not end
    assert steps.num_blocks_used() > 0
    leave(connection)
    until(lambda: server.server.app.observer.metrics.num_cancelled == 1)  # the server knows, and told the engine
    steps.let(1)
    until(lambda: engine.state().num_finished[FinishReason.ABORT] == n)
    until(lambda: engine.state().num_blocks_used == 0)
    assert steps.num_begun == num_steps, "no step more was made for who left"
    connection.close()


def test_those_who_leave_the_queue_are_gone_one_step_later(gated):
    server, engine, steps = gated
    body = {"prompt": "x" * 8, "max_tokens": 10_000}
    running = [send(server, "/v1/completions", body) for _ in range(4)]
    until(lambda: server.server.app.in_flight.num_watched == 4 and steps.num_begun == 1)
    queued = [send(server, "/v1/completions", body) for _ in range(10)]
    until(lambda: server.server.app.in_flight.num_watched == 14)
    for connection in queued:
        connection.close()
    until(lambda: server.server.app.observer.metrics.num_cancelled == 10)
    steps.let(1)
    until(lambda: steps.num_begun == 2)
    until(lambda: engine.state().num_waiting == 0)
    for connection in running:
        connection.close()
    until(lambda: server.server.app.observer.metrics.num_cancelled == 14)
    steps.open()
    until(lambda: engine.state().num_blocks_used == 0)


@pytest.fixture
def long_context(tmp_path: Path) -> Iterator[RunningServer]:
    """The built-in model with room for answers of 10,000 tokens, and blocks for two of them."""
    config = EngineConfig(
        model=ModelConfig(model=str(copied_model(tmp_path, max_position_embeddings=16_384)), num_threads=1),
        cache=CacheConfig(kv_cache_memory_bytes=128 * MIB),
        scheduler=SchedulerConfig(max_num_seqs=64),
    )
    engine = start_engine(config, served_model_names=("tiny",))
    try:
        with running_server(engine.replica, engine.model) as server:
            yield server
    finally:
        engine.replica.stop()


PATIENCE_S = 0.5


async def give_up(web: httpx.AsyncClient, *, stream: bool) -> bool:
    """Ask for an answer that takes far longer than this client waits; whether it left without."""
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 10_000, "ignore_eos": True, "stream": stream}
    try:
        async with web.stream("POST", "/v1/completions", json=body) as answer, asyncio.timeout(PATIENCE_S):
            assert answer.status_code == 200, await answer.aread()
            await answer.aread()
    except (httpx.ReadTimeout, TimeoutError):
        return True
    return False


async def impatient_clients(url: str, count: int) -> list[bool]:
    timeout = httpx.Timeout(HANGS_S, read=PATIENCE_S)  # each has been sent when its patience begins
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=httpx.Limits()) as web:
        return await asyncio.gather(*(give_up(web, stream=index % 2 == 0) for index in range(count)))


def test_two_hundred_impatient_clients_leave_nothing_behind(long_context: RunningServer):
    """R2, with a real engine."""
    loop, app = long_context.server.servers[0].get_loop(), long_context.server.app
    num_tasks = len(asyncio.all_tasks(loop))
    assert all(asyncio.run(impatient_clients(long_context.url, 200)))
    began_at = time.monotonic()
    body = {"model": "tiny", "prompt": "a", "max_tokens": 5, "ignore_eos": True}
    answer = httpx.post(f"{long_context.url}/v1/completions", json=body, timeout=HANGS_S)
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert time.monotonic() - began_at < 30, "nobody's place is still taken"
    until(lambda: app.observer.metrics.num_cancelled == 200)
    state = long_context.replica.state
    until(lambda: state().num_running + state().num_waiting + state().num_blocks_used == 0)
    until(lambda: not long_context.server.server_state.tasks)
    assert (app.gate.num_in_flight, app.in_flight.num_watched) == (0, 0)
    until(lambda: len(asyncio.all_tasks(loop)) <= num_tasks)


# ---- who does not read, and an engine


LONG = {
    "model": "tiny",
    "prompt": "x" * 8,
    "max_tokens": 4000,  # a MiB of events
    "stream": True,
    "stream_options": {"include_usage": True},
}


def read_after_all(connection: socket.socket, until_it_says: bytes) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)  # quickly, too
    received = b""
    while until_it_says not in received:
        piece = connection.recv(65536)
        assert piece, received[-1000:]
        received = received[-1000:] + piece


def test_readers_that_read_nothing_hold_no_slot_for_longer_than_others_do(gated):
    server, engine, steps = gated
    with opened([unread(server, json.dumps(LONG).encode()) for _ in range(8)]) as readers:
        until(lambda: server.server.app.in_flight.num_watched == 8)
        steps.open()
        until(lambda: engine.state().num_finished[FinishReason.LENGTH] == 8)
        assert server.server.app.in_flight.num_watched == 8, "four slots served them all, and none has been answered"
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 5}, timeout=HANGS_S
        )
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert engine.state().num_blocks_used == 0
        read_after_all(readers[0], b'"completion_tokens":4000')


def read_all(connection: socket.socket) -> threading.Thread:
    reading = threading.Thread(target=read_after_all, args=(connection, b'"completion_tokens":4000'))
    reading.start()
    return reading


@pytest.mark.parametrize("reads", [False, True])
def test_a_newcomer_waits_behind_readers_who_read_nothing_for_as_long_as_behind_any_others(gated, reads):
    """Four have the slots; fcfs gives the newcomer the first that is free, and reading or not frees none sooner."""
    server, engine, steps = gated
    with contextlib.ExitStack() as leaving:
        readers = []
        for num_asked in range(1, 6):
            body = LONG if num_asked < 5 else {**LONG, "max_tokens": 5}
            readers.append(leaving.enter_context(unread(server, json.dumps(body).encode())))
            until(lambda count=num_asked: server.server.app.in_flight.num_watched == count)
            until(lambda: steps.num_begun == 1)  # which has the first of them, and does not end
        reading = [read_all(connection) for connection in readers[:4]] if reads else []
        steps.open()
        until(lambda: engine.state().num_finished[FinishReason.LENGTH] == 5)
        first_steps = first_steps_of(steps)
        joined(*reading)
        assert reads or server.server.app.in_flight.num_watched >= 4, "they are done, and have not been answered"
    assert max(first_steps[:4]) < 4000
    assert first_steps[4] == 4001, "the step after the first reader's last one"


def first_steps_of(executor: GatedExecutor) -> list[int]:
    """Of each request, in the order of their first steps."""
    first: dict[str, int] = {}
    for number, plan in enumerate((plan for plan in executor.plans if plan.rows), 1):
        for row in plan.rows:
            first.setdefault(row.request_id, number)
    return [*first.values()]


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["a", "b"]}, {"prompt": ["a", "b"], "n": 2}])
def test_what_is_kept_for_who_reads_nothing_is_bounded_whatever_was_asked(gated, monkeypatch, fields):
    monkeypatch.setattr("maitred.engine.live_requests.MAX_UNREAD_BYTES", 200 * 1024)
    server, engine, steps = gated
    with unread(server, json.dumps({**LONG, **fields}).encode()) as reader:
        until(lambda: server.server.app.in_flight.num_watched == 1)
        steps.open()
        until(lambda: steps.num_begun > 0 and not engine._live)  # the last progress was put
        read_after_all(reader, b"read_too_slowly")


# ---- bytes


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised():
    class Unused(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
            raise AssertionError("it was tokenised")

    tokenizer = byte_tokenizer()
    tokenizer.__class__ = Unused
    with running_server(FakeReplica(), make_model(tokenizer=tokenizer)) as server:
        for path, fields in (
            ("/v1/completions", {"prompt": "x" * 100_000}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
        ):
            answer = httpx.post(server.url + path, json={"model": "tiny", **fields}, timeout=HANGS_S)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert "512" in answer.text


HOSTILE = ["a\r\nset-cookie: x", "\x1b[2J", "${jndi:ldap://x/y}", "x" * 5000, "\u202e", "\x00"]


def refused_hostile(url: str) -> list[int]:
    """The status of each; no header has anything of what was sent."""
    found = []
    for text in HOSTILE:
        body = {"model": text, "prompt": "hi", "user": text, "request_id": text, "session_id": text}
        refused = httpx.post(f"{url}/v1/completions", json=body, timeout=HANGS_S)
        found.append(refused.status_code)
        assert len(refused.content) < 2000
        assert not any(text in value or "set-cookie" in name for name, value in refused.headers.items())
    return found


@pytest.mark.parametrize("log_format", [pytest.param("text", marks=pytest.mark.soak), "json"])
def test_what_a_client_names_reaches_no_header_and_forges_no_line(tmp_path: Path, log_format: str):
    log = tmp_path / "log"
    with log.open("wb") as stderr, attacked(stderr.fileno(), log_level="info", log_format=log_format) as server:
        assert {400 <= status < 500 for status in refused_hostile(server.url)} == {True}
    lines = log.read_text().splitlines()
    assert len([line for line in lines if "/v1/completions" in line]) == len(HOSTILE)
    assert "\x1b" not in log.read_text()
    assert log_format == "text" or all(json.loads(line) for line in lines)


# ---- files and clocks


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="it is Linux that has it")
def test_a_log_that_cannot_be_written_stops_nothing():
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with attacked(full, log_level="info") as server:
            assert all(server.is_well() for _ in range(5))
    finally:
        os.close(full)


def test_a_log_that_nobody_reads_stops_nothing():
    """Its pipe is full, and what is kept for it too; `attacked` sees that SIGTERM still ends the server."""
    with attacked(subprocess.PIPE, log_level="info") as server, httpx.Client(base_url=server.url) as client:
        path = "/" + "x" * 16_000  # as long as its line
        num_dropped = 0.0
        while not num_dropped:
            assert client.get(path, timeout=HANGS_S).status_code == 404
            page = client.get("/metrics", timeout=HANGS_S).text
            num_dropped = float(page.split("\nmaitred_log_lines_dropped_total ")[1].split("\n")[0])
        assert client.get("/health", timeout=HANGS_S).status_code == 200
        assert server.is_well()


def small_files_only() -> None:
    """A write beyond is an error, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


def test_answers_that_cannot_be_written_are_told_in_one_line(tmp_path: Path):
    source = tmp_path / "in.jsonl"
    body = {"model": "tiny", "prompt": "hi"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source.write_text("".join(json.dumps(line | {"custom_id": f"a{index}"}) + "\n" for index in range(20)))
    out = tmp_path / "out.jsonl"
    with attacked() as server:
        words = [sys.executable, "-m", "maitred", "run", "-i", str(source), "-o", str(out), "--url", server.url]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=HANGS_S, cwd=ROOT, check=False, preexec_fn=small_files_only
        )
        assert server.is_well()
        again = subprocess.run(words, capture_output=True, timeout=HANGS_S, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert again.returncode == 0, "with room it goes on from there"
    assert sorted(json.loads(line)["custom_id"] for line in out.read_text().splitlines()) == sorted(
        f"a{index}" for index in range(20)
    )


WALL_CLOCK_USERS = {
    "api/ops/metrics_page.py": "`vllm:lora_requests_info` has the date for its value",
    "api/http/results.py": "the age of an answer that another machine kept; a wrong one costs a hit",
    "storage/ledger.py": "rows tell when",
    "engine/planning.py": "when the model was made",
    "api/dialects/openai/usage.py": "asks for days",
    "api/http/server.py": "certificates expire on a date; it is told, and nothing else",
    "api/ops/tracing.py": "spans have dates",
    "api/dialects/openai/completions.py": "`created`",
    "api/dialects/openai/chat.py": "`created`",
    "text/sandbox.py": "strftime_now of templates",
    "cli/bench_session.py": "the report's date",
    "cli/top.py": "since when",
    "api/batches.py": "a batch's dates, and its window, which holds over restarts",
    "api/dialects/openai/vectors.py": "`created`",
    "api/dialects/ollama/chat.py": "`created_at`",
    "api/dialects/anthropic/schemas.py": "when a limit is whole again",
    "api/dialects/anthropic/messages.py": "an answer's date, which is told of resumed streams",
    "api/dialects/openai/batches.py": "dates of files, and when they expire",
    "api/dialects/responses/answers.py": "`completed_at`",
    "api/dialects/responses/schemas.py": "`created_at`",
    "api/dialects/responses/stored.py": "when a stored response expires",
    "api/route/follow.py": "`created` and `expires_at` of models",
    "tensor/host.py": "when an engine without a language model was made, as /v1/models tells",
    "engine/tensors.py": "when a model was last asked, as Triton's statistics tell",
    "optimize/release.py": "when a version was published",
    "storage/capture.py": "when an answer was captured, and names of files in that order",
    "cli/optimize.py": "what was captured until now is erased",
}


def test_only_those_who_tell_the_date_read_the_wall_clock():
    """Nothing times out or is late when somebody sets the clock: what decides reads the monotonic one."""
    source = ROOT / "src" / "maitred"
    users = set()
    for path in source.rglob("*.py"):
        text = path.read_text()
        if any(name in text for name in ("time.time(", "time.time,", "time.time_ns", "datetime.now(", "utcnow(")):
            users.add(str(path.relative_to(source)))
    assert users <= set(WALL_CLOCK_USERS), "read the monotonic clock, or say here what the date is for"
