"""The decision log of a real run on the built-in model, written to disk and replayed; and what a crash leaves."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest

from maitred import LLM, SamplingParams
from maitred.config import SchedulerConfig
from maitred.core.clock import ManualClock
from maitred.core.errors import ConfigError
from maitred.decisions.codec import Header
from maitred.decisions.files import DecisionLogFile, log_parts, read_frames
from maitred.decisions.log import Recorder
from maitred.decisions.replay import first_difference, replay
from maitred.scheduler.engine_core import EngineCore
from tests.fakes import FakeExecutor, make_scheduler, make_spec
from tests.waiting import until

HEADER = Header(SchedulerConfig(), num_blocks=8, block_size=4, enable_prefix_caching=True)


def run_with_log(folder: Path, num_requests: int, **limits: int) -> DecisionLogFile:
    """Requests one after another through an engine that logs; the log is closed."""
    scheduler = make_scheduler()
    header = Header(scheduler.config, num_blocks=64, block_size=4, enable_prefix_caching=True)
    log = DecisionLogFile(folder, header, **limits)
    core = EngineCore(scheduler, FakeExecutor(), ManualClock(), Recorder(log.write))
    for number in range(num_requests):
        core.add(make_spec(f"r{number}", prompt=30, max_tokens=3))
        while core.has_work:
            core.step()
    log.close()
    return log


def test_a_real_run_replays_decision_by_decision(tmp_path: Path):
    chats = [[{"role": "user", "content": f"I would like {i % 4 + 1} soups, please."}] for i in range(12)]
    sampling = [SamplingParams(temperature=0.8, seed=i, max_tokens=30, n=1 + i % 3, stop=["tea"]) for i in range(12)]
    with LLM(
        max_num_seqs=4, max_num_batched_tokens=24, max_model_len=256, policy="priority", decision_log=str(tmp_path)
    ) as llm:
        llm.chat(chats, sampling)
        llm.generate([[7] * 100], SamplingParams(max_tokens=5), priority=3)
    frames = list(read_frames(log_parts(tmp_path)))
    assert len(frames) > 25  # drafts make them fewer than tokens
    assert first_difference(frames) is None


def test_the_log_holds_no_text_and_no_tokens(tmp_path: Path):
    with LLM(decision_log=str(tmp_path)) as llm:
        llm.generate("xylophone quarrel", SamplingParams(max_tokens=3))
    frames = list(read_frames(log_parts(tmp_path)))
    assert not any(b"xylophone" in frame for frame in frames)
    (arrived,) = next(part for part in msgspec.msgpack.decode(frames[1])[2:] if part and isinstance(part[0], dict))
    assert arrived["type"] == "arrived"
    assert not {"prompt", "prompt_token_ids", "tokens", "features"} & set(arrived)


@pytest.fixture
def flushed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part's size is looked at after each record, and so is no matter of time."""
    monkeypatch.setattr("maitred.decisions.files.FLUSH_S", 0.0)


@pytest.mark.usefixtures("flushed_at_once")
def test_parts_follow_each_other_and_replay_as_one(tmp_path: Path):
    log = run_with_log(tmp_path, 100, max_bytes=2000)
    parts = log_parts(tmp_path)
    assert len(parts) > 2
    assert parts[-1] == log.path
    steps = list(replay(read_frames(parts)))
    assert len(steps) == 300
    assert all(step.equal for step in steps)


@pytest.mark.usefixtures("flushed_at_once")
def test_old_parts_go_and_what_is_left_says_that_it_needs_them(tmp_path: Path):
    run_with_log(tmp_path, 100, max_bytes=2000, max_files=2)
    parts = log_parts(tmp_path)
    assert len(parts) == 2
    with pytest.raises(ConfigError, match=r"part \d+ of its run, and a replay needs what was before it"):
        first_difference(read_frames(parts))


def test_a_part_is_an_ordinary_gzip_file_and_runs_of_one_second_do_not_meet(tmp_path: Path):
    log = run_with_log(tmp_path / "one", 3)
    assert b"r2" in gzip.decompress(log.path.read_bytes())

    folder = tmp_path / "three"
    logs = [DecisionLogFile(folder, HEADER) for _ in range(3)]
    for log in logs:
        log.close()
    assert len({log.run for log in logs}) == len(list(folder.iterdir())) == 3
    assert log_parts(folder) == [logs[-1].path]  # the newest run


def test_folders_and_files_that_are_none_are_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the decision log in .*file"):
        DecisionLogFile(tmp_path / "file", HEADER)

    with pytest.raises(ConfigError, match="holds no decision log"):
        log_parts(tmp_path)
    with pytest.raises(ConfigError, match="there is no decision log"):
        log_parts(tmp_path / "nothing")
    (tmp_path / "a.decisions").write_text("once upon a time")
    with pytest.raises(ConfigError, match="is this a decision log"):
        list(read_frames(log_parts(tmp_path / "a.decisions")))


def test_what_a_crash_left_is_read_up_to_the_last_whole_record(tmp_path: Path):
    log = run_with_log(tmp_path, 10)
    whole, data = list(read_frames([log.path])), log.path.read_bytes()
    for cut in range(len(data) - 1, 20, -7):
        log.path.write_bytes(data[:cut])
        frames = list(read_frames([log.path]))
        assert frames == whole[: len(frames)]
        if frames:
            assert first_difference(frames) is None


def test_a_flipped_bit_is_found(tmp_path: Path):
    log = run_with_log(tmp_path, 10)
    inner = zlib.decompress(log.path.read_bytes(), 31)
    for position in range(200, len(inner), 97):
        broken = bytearray(inner)
        broken[position] ^= 4
        log.path.write_bytes(gzip.compress(bytes(broken)))
        with pytest.raises(ConfigError, match="what is before it is good"):
            list(read_frames([log.path]))


WRITE_PAST_A_LIMIT = """
import logging, pathlib, resource, sys, time
from tests.decisions.test_files import run_with_log
logging.basicConfig(level="ERROR")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
run_with_log(pathlib.Path(sys.argv[1]), 400)
print("still here")
"""


def test_a_disk_without_room_ends_the_log_with_a_whole_record_and_nothing_else(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", WRITE_PAST_A_LIMIT, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "still here\n"
    assert done.stderr.count("ends here") == 1
    (log,) = tmp_path.iterdir()
    assert log.stat().st_size <= 1000


RUN_FOR_EVER = """
import pathlib, sys, time
from tests.decisions.test_files import *
scheduler = make_scheduler()
header = Header(scheduler.config, num_blocks=64, block_size=4, enable_prefix_caching=True)
log = DecisionLogFile(pathlib.Path(sys.argv[1]), header)
core = EngineCore(scheduler, FakeExecutor(), ManualClock(), Recorder(log.write))
print("begun", flush=True)
for number in range(10**9):
    core.add(make_spec(f"r{number}", prompt=30, max_tokens=9))
    while core.has_work:
        core.step()
        time.sleep(0.001)
"""


def test_a_killed_process_leaves_a_log_that_replays(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", RUN_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    until(lambda: sum(part.stat().st_size for part in log_parts(tmp_path)) > 20_000)  # well over a hundred steps
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    steps = list(replay(read_frames(log_parts(tmp_path))))
    assert len(steps) > 50
    assert all(step.equal for step in steps)
