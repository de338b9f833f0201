"""S4: what is no frame, or too large a one, on both sockets between two real processes; and what happens afterwards."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from maitred.core.errors import EngineDead, RequestTooLarge
from maitred.engine import child_process
from maitred.engine import restarts as supervisor
from maitred.engine.child_process import REPORTS, SocketFolder
from maitred.engine.client import EngineClient
from maitred.engine.frames import Told, decode_report, encode
from maitred.engine.starting import StartingEngine
from tests.engine.clients import POISON, PROMPT, ask, follow, running_client, start_of, tokens
from tests.engine.fake_child import Gate, expected
from tests.waiting import HANGS_S, until_async

LIMIT = 2**20
UNDER_THE_CUT, OVER_IT = LIMIT + 1, 2 * LIMIT + 1


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small limit here (the engine's process has its own); restarts come at once, and last words are waited for."""
    monkeypatch.setattr(child_process, "MAX_FRAME_BYTES", LIMIT)
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(child_process, "LAST_LINE_S", HANGS_S)


def send_raw(engine: EngineClient, data: bytes) -> None:
    child = engine.supervisor._child
    assert child is not None
    child._commands._socket.send(data)


async def test_what_is_no_frame_is_dropped_and_counted(caplog):
    garbage = (b"", pickle.dumps({"a": 1}), b"\xc1" * LIMIT, encode(["Abort", 1, "no such reason"]))
    async with running_client(f"garbage=1,max_frame_bytes={LIMIT}") as engine:
        for data in garbage:
            send_raw(engine, data)
        assert tokens(await follow(engine, ask())) == expected(PROMPT, 60)
        await until_async(lambda: engine.state().num_wrong_frames == 4 + 4 + 1)  # a stranger sent us as many
        await until_async(lambda: caplog.text.count("from the server's socket") == 4)
    assert caplog.text.count("somebody else connected to the engine's socket") == 1


async def test_frames_above_the_limit_are_dropped_and_counted_and_everybody_goes_on(caplog):
    async with running_client(f"max_frame_bytes={LIMIT}") as engine:
        send_raw(engine, bytes(UNDER_THE_CUT))
        assert tokens(await follow(engine, ask())) == expected(PROMPT, 60)
        await until_async(lambda: engine.state().num_wrong_frames == 1)
        await until_async(lambda: f"of {UNDER_THE_CUT} bytes from the server's socket: the limit is" in caplog.text)
    async with running_client(f"shout_at=3,shout_bytes={UNDER_THE_CUT}") as engine:
        assert tokens(await follow(engine, ask(prompt=POISON))) == expected(POISON, 60)
        assert engine.state().num_wrong_frames == 1
        assert engine.state().num_restarts == 0


async def test_an_engine_that_was_sent_so_much_that_it_closed_the_connection_is_replaced(tmp_path: Path, caplog):
    gate = Gate(tmp_path, 10)
    async with running_client(f"{gate.habit},max_frame_bytes={LIMIT}") as engine:

        async def cut_off() -> None:
            send_raw(engine, bytes(OVER_IT))
            await until_async(lambda: engine.state().num_restarts == 1)
            gate.open()

        assert tokens(await follow(engine, ask(), {10: cut_off})) == expected(PROMPT, 60)
        state = engine.state()
        assert (state.num_restarts, state.num_resumed, state.alive) == (1, 1, True)
    assert "it had closed its connection" in caplog.text


async def test_an_engine_that_sent_so_much_that_it_was_cut_off_ends_and_is_replaced():
    async with running_client(f"shout_at=3,shout_bytes={OVER_IT}", resume="never") as engine:
        with pytest.raises(EngineDead, match="exit code 1: the server had closed its connection"):
            await follow(engine, ask(prompt=POISON))
        assert tokens(await follow(engine, ask("next"))) == expected(PROMPT, 60)


async def test_an_engine_that_has_too_much_to_say_says_so_and_ends():
    habits = f"shout_at=3,shout_bytes={UNDER_THE_CUT},max_frame_bytes={LIMIT}"
    async with running_client(habits, resume="never") as engine:
        with pytest.raises(EngineDead, match=f"Told takes {UNDER_THE_CUT + 11} bytes .*the limit is {LIMIT}"):
            await follow(engine, ask(prompt=POISON))


async def test_a_request_that_cannot_cross_is_refused_alone(monkeypatch):
    async with running_client() as engine:
        with monkeypatch.context() as patched:
            patched.setattr(child_process, "MAX_FRAME_BYTES", 100)
            with pytest.raises(RequestTooLarge, match=r"Submit takes .* the limit is 100"):
                await follow(engine, ask("large"))
        assert tokens(await follow(engine, ask())) == expected(PROMPT, 60)
        assert engine.state().num_wrong_frames == 0


LAST_WORDS = f"""
from pathlib import Path
import sys
from maitred.engine import child
from maitred.engine.frames import Told
child.LAST_WORDS_MS = {int(HANGS_S * 1000)}
link = child.SocketLink(Path(sys.argv[1]))
link.beat()
for number in range(20):
    link.send(Told(str(number).zfill({LIMIT})))
link.close()
"""


def test_an_engine_that_ends_waits_until_all_it_said_has_left(tmp_path: Path):
    with zmq.Context() as context, context.socket(zmq.PULL) as reports:
        reports.setsockopt(zmq.RCVHWM, 1)  # the rest waits in the engine's process
        reports.bind(f"ipc://{tmp_path / REPORTS}")
        process = subprocess.Popen([sys.executable, "-c", LAST_WORDS, str(tmp_path)])
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)  # one that does not wait is gone by then, with what it said
        told = []
        while len(told) < 20 and reports.poll(HANGS_S * 1000):
            report = decode_report(reports.recv())
            if isinstance(report, Told):
                told.append(int(report.line[-2:]))
        assert told == list(range(20))
        assert process.wait(HANGS_S) == 0


MAKER = """
import os, time
from maitred.engine.child_process import SocketFolder
folder = SocketFolder()
(folder.path / "reports").touch()
os.write(1, os.fsencode(folder.path) + b"\n")
time.sleep(600)
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets have their names; a test's own folder has too long a name for that. It ends empty."""
    with tempfile.TemporaryDirectory(prefix=os.fsdecode(b"caf\xe9")) as folder:  # and is no UTF-8
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert not os.listdir(folder)


def test_what_a_killed_start_left_is_removed_by_the_next_and_nothing_of_one_that_lives(temporary: Path):
    first = SocketFolder()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, env=environment) as maker:
        assert maker.stdout is not None
        second = Path(os.fsdecode(maker.stdout.readline().strip()))
        maker.kill()
    assert second.exists()
    third = SocketFolder()
    assert sorted(temporary.iterdir()) == sorted([first.path, third.path])
    for folder in (first, third, third):
        folder.remove()


def test_a_temporary_folder_whose_name_is_no_utf_8_is_as_good(temporary: Path):
    StartingEngine(start_of()).wait().replica.stop()


def test_starts_at_the_same_time_remove_no_folder_that_another_has_just_made(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
):
    made, others_begin = tempfile.mkdtemp, [True]

    def made_while_another_begins(**named: str) -> str:
        folder = made(**named)
        if others_begin and others_begin.pop():
            SocketFolder().remove()  # which finds one that nobody has locked
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", made_while_another_begins)
    folder = SocketFolder()
    assert list(temporary.iterdir()) == [folder.path]
    folder.remove()
