"""An engine on its way: what waiting for it gives, and that one that nobody wants any more leaves nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest
from maitred.engine.in_process import StartingHere
from maitred.engine.local_replica import Engine
from maitred.engine.process import StartingProcess

from maitred.clock import WallClock
from maitred.errors import CheckpointError, EngineDead
from tests.engine.fake_child import Gate
from tests.engine.test_process import start_of
from tests.waiting import is_gone, joined, until


def test_an_engines_process_is_on_its_way_before_anybody_waits(tmp_path: Path):
    gate = Gate(tmp_path, 10)
    starting = StartingProcess(start_of(gate.habit), clock=WallClock())
    child = starting._replica.supervisor._child
    assert child is not None
    assert psutil.pid_exists(child.pid)
    engine = starting.wait()
    assert engine.model.tokenizer.decode(engine.model.tokenizer.encode("soup")) == "soup"
    starting.stop()
    starting.stop()
    assert not engine.replica.state().alive


def test_giving_up_ends_the_waiting_and_the_process(tmp_path: Path):
    gate = Gate(tmp_path, 10)
    gate.shut()  # it never loads
    starting = StartingProcess(start_of(gate.habit), clock=WallClock())
    child = starting._replica.supervisor._child
    assert child is not None
    process = psutil.Process(child.pid)
    raised: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(EngineDead, match="given up while it loaded") as caught:
            starting.wait()
        raised.append(caught.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    starting.give_up()
    joined(waiting)
    assert len(raised) == 1
    until(lambda: is_gone(process))
    starting.stop()


def test_what_keeps_an_engine_in_this_process_from_loading_is_raised_by_waiting():
    def build() -> Engine:
        raise CheckpointError("there is no such model; choose another")

    starting = StartingHere(build)
    with pytest.raises(CheckpointError, match="no such model"):
        starting.wait()
    starting.stop()
