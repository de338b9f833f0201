"""`maitred top`: the live view as text."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from maitred.api.ops.live_feed import LiveFrame, Percentiles
from maitred.cli.top import Rates, as_text, fit, in_ascii, seconds, view
from maitred.core.errors import EngineDead
from maitred.core.replica import ReplicaState
from maitred.core.tensor_request import BatchOutcome, BatchRules, LaneKey, TensorRequest, TensorSpec
from maitred.engine.live_view import LiveView, live_view
from maitred.scheduler.scheduler import Scheduler
from tests.cli.running import environment, maitred_process
from tests.fakes import FakeExecutor, make_request, make_scheduler
from tests.fakes_api import RunningServer
from tests.page.worlds import FOREVER, serving
from tests.waiting import HANGS_S, until

TIMES = Percentiles(7, 0.012, 0.3456, 71.0)
NONE = Percentiles(0)


def frame_of(engine: LiveView, times: Percentiles = TIMES) -> LiveFrame:
    seats = tuple(range(len(engine.running)))
    return LiveFrame(1, "tiny", seats, times, times, times, {}, engine)


def shown(scheduler: Scheduler, **size: int) -> str:
    rates, engine = Rates(), live_view(scheduler, 3.0)
    rates.take(engine)
    return "\n".join(view(frame_of(engine), rates, **{"width": 120, **size}))


def running() -> Scheduler:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8, num_blocks=40)
    executor = FakeExecutor()
    scheduler.add(make_request("0.chatcmpl-first", prompt=4, max_tokens=9, tenant="bistro", weight=4.0), 0.0)
    for i in range(4):
        scheduler.add(make_request(f"{i + 1:x}.chatcmpl-next", prompt=30, tenant="nightly", arrived_at=1.0), 1.0)
    for _ in range(2):
        plan = scheduler.schedule(1.0)
        scheduler.update(plan, executor.execute(plan), 1.0)
    return scheduler


class Absent:
    """An engine that died and is not back yet."""

    async def live_view(self) -> LiveView:
        raise EngineDead("the engine is loading")

    def state(self) -> ReplicaState:
        return ReplicaState(alive=False, error="the engine is loading", loading=True)


def test_slots_queue_blocks_times_and_tenants_are_all_there():
    text = shown(running())
    assert "maitred serves tiny, policy fcfs" in text
    assert "slots 2 of 2   waiting 3" in text
    assert "first token 12 ms / 346 ms / 71.0 s" in text
    lines = text.splitlines()
    (first,) = [line for line in lines if "0.first" in line]
    assert first.split()[:7] == ["1", "0.first", "bistro", "decode", "4", "2", "9"]
    (second,) = [line for line in lines if "1.next" in line]
    assert "pre" in second
    assert "%" in second
    assert "first in line: all 2 slots are taken" in text
    assert "behind 2 others by policy fcfs" in text
    assert "TENANT                 WEIGHT" in text
    (share,) = [line for line in lines if line.startswith("bistro")]
    assert share.split()[1:3] == ["4", "1"]


def test_an_idle_server_without_tenants_is_short():
    text = shown(make_scheduler())
    assert "nobody is served" in text
    assert "nobody waits" in text
    assert "WEIGHT" not in text
    assert "-" in text


def with_lanes(scheduler: Scheduler) -> Scheduler:
    """resnet runs two rows and has three waiting; bert was busy of late."""
    for name in ("bert", "resnet"):
        scheduler.lanes.load(name, 1, BatchRules(max_batch_size=2, dynamic=True))
    lanes = [("bert", "8"), *[("resnet", "")] * 5]
    for number, (name, bucket) in enumerate(lanes):
        spec = TensorSpec(request_id=f"t{number}", arrived_at=2.0, lane=LaneKey(name, 1, bucket))
        scheduler.add_tensor(TensorRequest(spec), 2.0)
    bert = next(batch for batch in scheduler.dispatch(2.0) if batch.lane.model == "bert")
    scheduler.completed(bert, BatchOutcome(compute_us=1000), 2.5)
    return scheduler


def test_lanes_of_tensor_models_are_told_the_busiest_first():
    lines = shown(with_lanes(make_scheduler())).splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("LANE"))
    assert [" ".join(line.split()) for line in lines[at : at + 3]] == [
        "LANE WAITING ROWS RUNNING ROWS/S AGE WHY",
        "resnet 1 3 3 2 0.0 1.00 s all instances run: 2 rows on 0",
        "bert 1 8 0 0 0 0.2 -",
    ]


@pytest.mark.parametrize("width", [10, 60, 80, 133, 300])
@pytest.mark.parametrize("height", [None, 12, 24, 60])
def test_it_fits_the_terminal(width: int, height: int | None):
    scheduler = make_scheduler(max_num_seqs=30, num_blocks=2000, max_num_batched_tokens=4000)
    for i in range(80):
        scheduler.add(make_request(f"{i:x}.chatcmpl-{'x' * 40}", tenant=f"tenant {i % 12}" * 5), 0.0)
    with_lanes(scheduler)
    scheduler.update(plan := scheduler.schedule(1.0), FakeExecutor().execute(plan), 1.0)
    rates, engine = Rates(), live_view(scheduler, 3.0)
    rates.take(engine)
    lines = view(frame_of(engine), rates, width=width, height=height)
    assert max(map(len, lines)) <= max(width, 60)
    if height is not None and height >= 24:
        assert len(lines) <= height
        assert any("do not fit" in line for line in lines) or height == 60


def test_what_clients_wrote_cannot_steer_the_terminal():
    scheduler = make_scheduler()
    scheduler.add(make_request("\x1b[2Jid\n\u202e", tenant="\x07[red]evil[/red]\r", weight=2.0), 0.0)
    scheduler.update(plan := scheduler.schedule(1.0), FakeExecutor().execute(plan), 1.0)
    text = shown(scheduler)
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)
    assert as_text(text.splitlines()).plain == text + "\n", "brackets are text, not markup"


def test_rates_come_out_of_counters_of_one_engine_and_forget_what_is_old():
    rates, one = Rates(), live_view(make_scheduler(), 10.0)
    rates.take(one)
    assert rates.tokens_per_s is None
    counters = msgspec.structs.replace(one.counters, num_generated_tokens=30, num_steps=6)
    rates.take(msgspec.structs.replace(one, now=11.5, counters=counters, execute_s=0.25, host_s=0.05))
    assert rates.tokens_per_s == pytest.approx(20.0)
    assert rates.step_s == pytest.approx(0.05)
    rates.take(msgspec.structs.replace(one, now=1.0))
    assert not rates.known

    rates, one = Rates(), live_view(make_scheduler(), 0.0)
    for second in range(20):
        tokens = 1000 * second if second < 10 else 10_000
        counters = msgspec.structs.replace(one.counters, num_generated_tokens=tokens)
        rates.take(msgspec.structs.replace(one, now=float(second), counters=counters))
    assert rates.tokens_per_s == 0.0


def test_durations_in_words():
    values = (None, -1.0, 0.0042, 0.5, 2.0, 71.0, 125.0)
    assert list(map(seconds, values)) == ["-", "0.0 ms", "4.2 ms", "500 ms", "2.00 s", "71.0 s", "2 min 5 s"]


def test_long_words_lose_their_middle_and_a_poor_terminal_gets_ascii():
    assert fit("abc", 5) == "abc  "
    assert fit("abcdefghijkl", 9) == "abcde…jkl"

    assert in_ascii("KV ·░▓█… é") == "KV .:+#~ ?"


# ---- against a server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(FOREVER, repeats=True, num_slots=2) as server:
        yield server


@contextmanager
def live_requests(server: RunningServer, count: int) -> Iterator[None]:
    payload = json.dumps({"model": "tiny", "prompt": "soup", "stream": True, "max_tokens": 150_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(count)]
    for connection in connections:
        connection.sendall(head % len(payload) + payload)
    state = server.replica.state
    until(lambda: state().num_running + state().num_waiting == count)
    try:
        yield
    finally:
        for connection in connections:
            connection.close()
        until(lambda: state().num_running + state().num_waiting == 0)


def test_once_prints_one_view_for_a_script(server: RunningServer):
    with live_requests(server, 3):
        done = maitred_process("top", server.url, "--once")
    assert done.code == 0, done.err
    assert "slots 2 of 2   waiting 1" in done.out
    assert "new tokens/s -" not in done.out
    assert "all 2 slots are taken" in done.out
    assert "MODEL " in done.out.splitlines()[-2], "as maitred ps lists them"
    assert done.out.splitlines()[-1].startswith("tiny")
    assert "\x1b" not in done.out


def test_in_a_pipe_views_follow_each_other_as_plain_text(server: RunningServer):
    words = [sys.executable, "-m", "maitred", "top", server.url, "--interval", "0"]
    with live_requests(server, 1):
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            assert "\x1b" not in line
            seen += line.startswith("maitred serves")
            if seen == 3:
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANGS_S)
        assert process.returncode == 130


class Terminal:
    """`maitred top` on a terminal of its own, and what it has shown."""

    def __init__(self, url: str) -> None:
        self._ours, theirs = pty.openpty()
        words = [sys.executable, "-m", "maitred", "top", url]
        env = environment(TERM="xterm", LINES="30")
        self.process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, close_fds=True)
        os.close(theirs)
        self.shown = b""

    def read_until(self, *words: bytes) -> None:
        """From here on, not what came before."""
        new = b""
        while not all(word in new for word in words):
            new += os.read(self._ours, 65536)
        self.shown += new

    def echoes(self) -> bool:
        """What is typed is shown, and lines are read whole: how a shell wants its terminal back."""
        flags = termios.tcgetattr(self._ours)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON)

    def leave(self, key: bytes = b"\x03") -> int:
        """Ctrl-C or another key, and the exit status."""
        if key == b"\x03":
            self.process.send_signal(signal.SIGINT)
        else:
            os.write(self._ours, key)
        try:
            while piece := os.read(self._ours, 65536):
                self.shown += piece
        except OSError:  # the other side is closed
            pass
        self.echoed = self.echoes()
        os.close(self._ours)
        return self.process.wait(HANGS_S)


def test_on_a_terminal_it_takes_the_screen_and_gives_it_back(server: RunningServer):
    with live_requests(server, 1):
        top = Terminal(server.url)
        top.read_until(b"slots", b"nobody waits")
        assert top.leave() == 130
    assert b"\x1b[?1049h" in top.shown
    assert top.shown.rindex(b"\x1b[?1049l") > top.shown.rindex(b"\x1b[?1049h")


def test_q_leaves_and_the_terminal_is_as_before(server: RunningServer):
    top = Terminal(server.url)
    top.read_until(b"slots", b"q or Ctrl-C leaves")
    assert not top.echoes()
    os.write(top._ours, b"x")
    top.read_until(b"slots")  # other keys change nothing
    assert top.leave(b"q") == 0
    assert top.echoed
    assert b"\x1b[?1049l" in top.shown


def test_it_waits_for_an_engine_that_is_not_there_and_goes_on_when_it_is(monkeypatch: pytest.MonkeyPatch):
    with serving("Hello.") as server:
        with monkeypatch.context() as without:
            without.setattr(server.replica, "live_view", Absent().live_view)
            top = Terminal(server.url)
            top.read_until(b"503: the engine is loading", b"trying again")
        top.read_until(b"slots")
        assert top.leave() == 130


def test_failures_are_one_line_with_what_to_do():
    with serving("Hello.", api_keys=("secret",)) as server:
        refused = maitred_process("top", server.url, "--once")
        assert refused.code == 1
        assert "401" in refused.err
        assert "--api-key" in refused.err
        assert maitred_process("top", server.url, "--once", "--api-key", "secret").code == 0
        url = server.url
    gone = maitred_process("top", url, "--once")
    assert gone.code == 1
    assert "cannot reach" in gone.err
    assert maitred_process("top", url, "--interval", "-1").code == 2
