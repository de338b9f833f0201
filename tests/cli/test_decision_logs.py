"""`maitred replay` and `maitred why` on logs written by an engine."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import msgspec
import pytest

from maitred.cli.main import main
from maitred.cli.why import choice_lines
from maitred.core.clock import ManualClock
from maitred.core.step import ModelOutput, SchedulerOutput
from maitred.decisions.codec import Header
from maitred.decisions.files import DecisionLogFile, log_parts, read_frames
from maitred.decisions.log import Recorder
from maitred.fleet.actions import Bind, Choices
from maitred.fleet.balance import Choice
from maitred.fleet.disagg import WorkAsked, options
from maitred.scheduler.engine_core import EngineCore
from tests.cli.running import maitred_process
from tests.fakes import FakeExecutor, make_scheduler, make_spec
from tests.fleet.fleets import worker


class SecondsExecutor(FakeExecutor):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self._clock.advance(1.0)
        return super().execute(plan)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The log of a run in which `urgent` puts out `slow`, and `late` waits for both."""
    clock = ManualClock()
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    header = Header(scheduler.config, num_blocks=64, block_size=4, enable_prefix_caching=True)
    log = DecisionLogFile(tmp_path / "logs", header)
    core = EngineCore(scheduler, SecondsExecutor(clock), clock, Recorder(log.write))
    core.add(make_spec("1.chatcmpl-slow", priority=2, max_tokens=6, tenant="acme"))
    core.step()
    core.step()
    core.add(make_spec("2.chatcmpl-urgent", arrived_at=2.0, max_tokens=2))
    core.add(make_spec("3.chatcmpl-late", arrived_at=2.0, priority=3, max_tokens=1))
    while core.has_work:
        core.step()
    log.close()
    return tmp_path / "logs"


def test_replay_says_that_every_decision_is_the_same(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["replay", str(folder), str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.count("every decision is the same (9 steps, 3 requests, ") == 2


def test_replay_names_the_first_difference_and_exits_with_1(folder: Path, capsys: pytest.CaptureFixture[str]):
    (part,) = log_parts(folder)
    frames = list(read_frames([part]))
    header = msgspec.msgpack.decode(frames[0])
    header["config"]["max_num_seqs"] = 2
    frames[0] = msgspec.msgpack.encode(header)
    packed = (len(f).to_bytes(4, "little") + zlib.crc32(f).to_bytes(4, "little") + f for f in frames)
    part.write_bytes(gzip.compress(b"".join(packed)))
    assert main(["replay", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "differs after 3 steps" in out
    assert "first difference: step 2: plan.rows" in out


def test_why_tells_the_whole_story(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["why", "slow", "--log", str(folder)]) == 0
    told = capsys.readouterr().out
    for words in (
        "request 1.chatcmpl-slow",
        "8 prompt tokens, at most 6 output tokens",
        "priority 2 of acme; policy priority",
        "waited     0.000 s behind nobody and 0 requests running",
        "started    +0.000 s, by policy priority: no KV was there to reuse",
        "score      arrived_at_s 0 + priority_s 60",
        "preempted  +2.000 s, because a request that outranks it took its place: 2.chatcmpl-urgent (priority 0)",
        "2.000 s because all 1 slots were taken",
        "KV of 8 tokens was there already",
        "1st token  +1.000 s",
        "finished   +8.000 s, 6 tokens: length, it reached max_tokens",
    ):
        assert words in told


def test_why_says_behind_whom(folder: Path, capsys: pytest.CaptureFixture[str]):
    main(["why", "3.chatcmpl-late", "--log", str(folder)])
    told = capsys.readouterr().out
    assert "behind 2 waiting requests (1 of priority 0, 1 of priority 2 of acme)" in told
    assert "6.000 s because all 1 slots were taken" in told


def begin_a_run(folder: Path, request_id: str) -> Path:
    """A later one, in the same folder; its first part."""
    scheduler = make_scheduler()
    header = Header(scheduler.config, num_blocks=64, block_size=4, enable_prefix_caching=True)
    log = DecisionLogFile(folder, header)
    core = EngineCore(scheduler, FakeExecutor(), ManualClock(), Recorder(log.write))
    core.add(make_spec(request_id, max_tokens=1))
    core.step()
    log.close()
    return log.path


def test_replay_of_a_folder_names_the_runs_that_it_did_not_replay(folder: Path, capsys: pytest.CaptureFixture[str]):
    (first,) = log_parts(folder)
    second = begin_a_run(folder, "1.chatcmpl-again")
    assert main(["replay", str(folder)]) == 0
    equal, others = capsys.readouterr().out.splitlines()
    assert equal.startswith(f"{second.name}: every decision is the same (1 steps, 1 requests")
    assert others == f"not replayed: 1 older run in {folder}, give the file: {first.name}"
    assert main(["replay", str(first)]) == 0
    assert "not replayed" not in capsys.readouterr().out


def test_why_looks_into_older_runs_too_and_says_into_which(folder: Path, capsys: pytest.CaptureFixture[str]):
    (first,) = log_parts(folder)
    second = begin_a_run(folder, "1.chatcmpl-again")
    assert main(["why", "again", "--log", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"in {second.name}, run 1 of 2 from the newest\nrequest 1.chatcmpl-again")
    assert main(["why", "slow", "--log", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"in {first.name}, run 2 of 2 from the newest\nrequest 1.chatcmpl-slow")


def test_a_run_that_cannot_be_read_hides_none_before_it(folder: Path, capsys: pytest.CaptureFixture[str]):
    second = begin_a_run(folder, "1.chatcmpl-again")
    second.write_bytes(b"nothing of the kind")
    assert main(["why", "slow", "--log", str(folder)]) == 0
    assert "request 1.chatcmpl-slow" in capsys.readouterr().out
    assert main(["why", "nobody", "--log", str(folder)]) == 1
    told = capsys.readouterr().err
    assert "no request 'nobody' in 1 runs, and 1 could not be read" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["why", "nobody"], "no request 'nobody' arrived in this log"),
        (["why", "chatcmpl"], "3 requests have 'chatcmpl' in their id"),
        (["why"], "REQUEST_ID is required"),
    ],
)
def test_what_is_not_there_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str):
    assert main([*words, "--log", str(folder)]) != 0
    assert said in capsys.readouterr().err


def test_a_folder_without_a_log_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["replay", str(tmp_path)]) == 1
    assert "holds no decision log" in capsys.readouterr().err


def test_the_log_is_found_where_the_server_was_told_to_keep_it(folder: Path):
    told = maitred_process("why", "urgent", MAITRED_DECISION_LOG=str(folder))
    assert (told.code, told.err) == (0, "")
    assert "put out    +0.000 s: 1.chatcmpl-slow (priority 2 of acme)" in told.out
    assert maitred_process("replay", MAITRED_DECISION_LOG=str(folder)).code == 0


def test_why_tells_each_way_that_was_foretold_and_its_terms():
    there = [worker("p", "prefill", prefill_share=0.7), worker("d", "decode", rows=40, context_tokens=40_000)]
    ways = options(WorkAsked(num_inputs=4000, num_outputs=200.0), there)
    choices = Choices()
    choices.bound(Bind("r", Choice("d", "p", foretold=tuple(ways)), 1), 0.25)
    made = choices.of("r")
    assert made is not None
    told = choice_lines(made)
    assert told[0] == "attempt 1: sent to d, after 0.250 s of waiting in all"
    assert told[1].split() == ["WAY", "COST", "TTFT", "TPOT", "FETCH", "TRANSFER", "HARM"]
    assert told[2].split()[:4] == ["->", "p", ">", "d"]
    assert len(told) == 2 + len(ways)
