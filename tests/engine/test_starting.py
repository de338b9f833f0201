"""An engine on its way: what waiting for it gives, and that one that nobody wants any more leaves nothing."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import psutil
import pytest

from maitred.core.errors import CheckpointError, EngineDead
from maitred.engine import engine_thread
from maitred.engine.child_process import ChildProcess
from maitred.engine.engine_thread import EngineThread
from maitred.engine.starting import StartingEngine, TextAhead
from maitred.model.checkpoint import BUILTIN_FOLDER
from tests.engine.clients import start_of
from tests.engine.fake_child import Gate
from tests.waiting import is_gone, joined, until


def test_an_engines_process_is_on_its_way_before_anybody_waits(tmp_path: Path):
    gate = Gate(tmp_path, 10)
    starting = StartingEngine(start_of(gate.habit))
    child = starting._replica.supervisor._child
    assert isinstance(child, ChildProcess)
    assert psutil.pid_exists(child.pid)
    engine = starting.wait()
    assert engine.model.tokenizer.decode(engine.model.tokenizer.encode("soup")) == "soup"
    starting.stop()
    starting.stop()
    assert not engine.replica.state().alive


def test_giving_up_ends_the_waiting_and_the_process(tmp_path: Path):
    gate = Gate(tmp_path, 10)
    gate.shut()  # it never loads
    starting = StartingEngine(start_of(gate.habit))
    child = starting._replica.supervisor._child
    assert isinstance(child, ChildProcess)
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


def test_giving_up_ends_the_waiting_for_an_engine_in_a_thread_and_it_ends_once_it_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_thread, "STOP_S", 0.1)  # it stands at its gate, and nobody can end a thread
    gate = Gate(tmp_path, 10)
    gate.shut()
    starting = StartingEngine(start_of(gate.habit, transport="thread"))
    child = starting._replica.supervisor._child
    assert isinstance(child, EngineThread)
    starting.give_up()
    with pytest.raises(EngineDead, match="given up while it loaded"):
        starting.wait()
    assert not child.ended
    gate.open()
    until(lambda: child.ended)
    starting.stop()


def test_what_keeps_an_engine_in_a_thread_from_loading_is_raised_by_waiting():
    starting = StartingEngine(start_of("refuse=1", transport="thread"))
    with pytest.raises(CheckpointError, match="no such model"):
        starting.wait()
    starting.stop()


# -- the tokenizer that is read ahead is the one that reading it later would have given


def test_the_built_in_models_tokenizer_is_read_ahead():
    ahead = TextAhead(None)
    tokenizer = ahead.tokenizer(BUILTIN_FOLDER)
    assert tokenizer.decode(tokenizer.encode("A table for two")) == "A table for two"
    assert ahead.tokenizer(BUILTIN_FOLDER) is tokenizer


@pytest.mark.parametrize("model", ["owner/name", "no/such/folder"])
def test_what_is_no_folder_is_read_when_its_folder_is_known(model: str):
    assert TextAhead(model).tokenizer(BUILTIN_FOLDER).vocab_size > 0


def test_a_broken_tokenizer_is_an_error_for_whoever_asks(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN_FOLDER, folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        TextAhead(str(folder)).tokenizer(folder)
