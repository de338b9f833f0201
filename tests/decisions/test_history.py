"""What a log tells about one request: its waits with their causes, who was before it, who put it out, how it ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from maitred.core.clock import ManualClock
from maitred.core.errors import ConfigError
from maitred.core.request import FinishReason
from maitred.core.step import ModelOutput, SchedulerOutput
from maitred.decisions.codec import Header, LogEncoder
from maitred.decisions.history import RequestHistory, history_of, ids_like, the_one
from maitred.decisions.log import Recorder
from maitred.scheduler.engine_core import EngineCore
from maitred.scheduler.notes import Lack, PreemptionCause
from tests.decisions.test_log import record_run
from tests.fakes import FakeExecutor, make_samples, make_scheduler, make_spec


class SecondsExecutor(FakeExecutor):
    """Every step takes a second."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self._clock.advance(1.0)
        return super().execute(plan)


class LoggedEngine:
    """An engine that logs; time stands at the number of steps."""

    def __init__(self, num_blocks: int = 64, **config: object) -> None:
        self.clock = ManualClock()
        scheduler = make_scheduler(num_blocks=num_blocks, **config)  # type: ignore[arg-type]
        encoder = LogEncoder(Header(scheduler.config, num_blocks, 4, enable_prefix_caching=True))
        self.frames = [encoder.start()]
        recorder = Recorder(lambda record: self.frames.append(encoder.encode(record)))
        self.core = EngineCore(scheduler, SecondsExecutor(self.clock), self.clock, recorder)

    def add(self, request_id: str, **fields: object) -> None:
        self.core.add(make_spec(request_id, arrived_at=self.clock.now(), **fields))  # type: ignore[arg-type]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.core.step()

    def history(self, request_id: str) -> RequestHistory:
        while self.core.has_work:
            self.core.step()
        return history_of(self.frames, request_id)


def test_waits_for_slots_blocks_and_budget_are_timed_and_told():
    engine = LoggedEngine()
    engine.add("a", max_tokens=3)
    history = engine.history("a")
    assert [wait.total_s for wait in history.waits] == [0.0]
    assert (history.first_token_at, history.ended_at, history.num_tokens) == (1.0, 3.0, 3)
    assert history.finish_reason is FinishReason.LENGTH

    engine = LoggedEngine(max_num_seqs=1)
    engine.add("a", max_tokens=4)
    engine.steps(1)
    engine.add("b", max_tokens=2)
    engine.add("c", max_tokens=1, priority=2)
    history = engine.history("c")
    assert [request.request_id for request in history.ahead] == ["b"]
    assert history.num_running_then == 1
    (wait,) = history.waits
    assert wait.total_s == 5.0
    assert wait.for_lack == {Lack.SLOTS: 5.0}
    assert wait.as_first_s == 2.0  # once b had started
    assert history.terms == history.starts[0].terms == {"arrived_at_s": 1.0}

    engine = LoggedEngine(num_blocks=4)
    engine.add("a", prompt=10, max_tokens=3)
    engine.add("b", prompt=9, max_tokens=1)
    (wait,) = engine.history("b").waits
    assert (wait.for_lack, wait.most_blocks_short, wait.as_first_s) == ({Lack.BLOCKS: 3.0}, 2, 3.0)

    engine = LoggedEngine(max_num_batched_tokens=8)
    engine.add("a", prompt=24, max_tokens=1)
    engine.steps(1)
    engine.core.add(make_spec("b", arrived_at=0.25, max_tokens=1))
    (wait,) = engine.history("b").waits
    assert (wait.until_step_s, wait.for_lack) == (0.75, {Lack.BUDGET: 2.0})

    engine = LoggedEngine(max_num_batched_tokens=8)
    for sample in make_samples("p", 2, prompt=24, max_tokens=2):
        engine.core.add(sample.spec)
    (wait,) = engine.history("p-1").waits
    assert wait.for_leader_s == 3.0


def test_background_work_waited_for_room_beside_others_and_was_put_out_for_them():
    engine = LoggedEngine(max_num_seqs=1)
    engine.add("night", max_tokens=4, background=True)
    engine.steps(1)
    engine.add("chat", max_tokens=3)
    history = engine.history("night")
    (at,) = history.preemptions
    assert at.preemption == ("night", PreemptionCause.OUTRANKED, "chat")
    assert history.waits[-1].for_lack == {Lack.SLOTS: 3.0}
    engine = LoggedEngine()
    engine.add("chat", max_tokens=4)
    engine.add("night", background=True)
    (wait,) = engine.history("night").waits
    assert wait.for_lack == {Lack.SLACK: 4.0}


def test_a_preemption_names_whom_it_was_for():
    engine = LoggedEngine(max_num_seqs=1, policy="priority")
    engine.add("slow", priority=2, max_tokens=6)
    engine.steps(2)
    engine.add("urgent", max_tokens=2)
    history = engine.history("slow")
    (preemption,) = history.preemptions
    assert (preemption.at, preemption.preemption.cause) == (2.0, PreemptionCause.OUTRANKED)
    assert preemption.other is not None
    assert preemption.other.request_id == "urgent"
    assert [wait.total_s for wait in history.waits] == [0.0, 2.0]
    assert [start.at for start in history.starts] == [0.0, 4.0]
    assert engine.history("urgent").preempted_others[0].preemption.request_id == "slow"


def test_overtaking_a_change_of_policy_and_an_abort_are_told():
    engine = LoggedEngine(max_num_seqs=1)
    engine.add("a", max_tokens=3)
    engine.add("b", priority=3)
    engine.steps(1)
    engine.core.configure(replace(engine.core.scheduler.config, policy="priority"))
    engine.add("c", priority=0, max_tokens=1)
    engine.steps(3)
    engine.core.abort("b")
    engine.add("d", max_tokens=1)
    history = engine.history("b")
    assert history.policy_changes == [(1.0, "priority")]
    assert (history.waits[0].overtaking, history.waits[0].total_s) == ({"c"}, 4.0)
    assert (history.finish_reason, history.starts) == (FinishReason.ABORT, [])

    engine = LoggedEngine(max_num_seqs=1, policy="priority")
    engine.add("first", max_tokens=2)
    engine.add("patient", priority=3)
    engine.steps(1)
    engine.add("later", priority=2, max_tokens=4)
    engine.steps(2)
    engine.add("urgent", max_tokens=1)
    assert engine.history("later").starts[1:]
    assert engine.history("patient").waits[0].overtaking == {"later", "urgent"}


def test_a_log_that_ends_early_says_so():
    engine = LoggedEngine(max_num_seqs=1)
    engine.add("a", max_tokens=9)
    engine.add("b", max_tokens=9)
    engine.steps(4)
    history = history_of(engine.frames, "b")
    assert (history.finish_reason, history.ended_at) == (None, None)
    assert history.waits[0].total_s == 3.0


def test_an_id_is_found_by_any_part_that_is_its_own():
    engine = LoggedEngine()
    for request_id in ("1.chatcmpl-abc", "2.chatcmpl-abd", "3.cmpl-x"):
        engine.add(request_id)
    engine.steps(1)

    def find(words: str) -> str:
        return the_one(ids_like(engine.frames, words), words)

    assert find("cmpl-x") == "3.cmpl-x"
    assert find("2.chatcmpl-abd") == "2.chatcmpl-abd"
    with pytest.raises(ConfigError, match=r"2 requests have 'chatcmpl-ab' in their id: 1\.chatcmpl-abc, 2\.chat"):
        find("chatcmpl-ab")
    with pytest.raises(ConfigError, match="no request 'zzz'"):
        find("zzz")


@pytest.mark.parametrize("seed", range(4))
def test_every_story_of_a_wild_run_adds_up(seed: int):
    frames, _ = record_run(seed)
    for number in range(0, 30, 3):
        for name in (f"r{number}", f"r{number}-0"):
            try:
                history = history_of(frames, name)
            except ConfigError:
                continue
            assert history.finish_reason is not None
            assert history.ended_at is not None
            assert len(history.starts) in (len(history.waits), len(history.waits) - 1)
            assert len(history.preemptions) == history.request.num_preemptions
            for index, wait in enumerate(history.waits):
                told = sum(wait.for_lack.values()) + wait.for_leader_s + wait.until_step_s
                assert told <= wait.total_s + 1e-9
                if index < len(history.starts):
                    assert history.starts[index].at == pytest.approx(wait.ended_at)
                    assert told == pytest.approx(wait.total_s)


def test_a_wait_for_kv_from_elsewhere_is_told_until_it_comes_or_is_given_up():
    engine = LoggedEngine(max_num_seqs=1)
    engine.add("before", max_tokens=2)
    for sample in make_samples("p", 2, prompt=13, max_tokens=1):
        engine.core.add(sample.spec)
    engine.steps(1)
    reserved = engine.core.reserve("p-0", 13)
    assert reserved is not None
    engine.steps(1)
    engine.clock.advance(4.0)
    assert engine.core.kv_arrived("p-0", reserved.end)
    (wait,) = engine.history("p-0").waits
    assert (wait.for_kv_s, wait.for_lack, wait.total_s) == (5.0, {Lack.SLOTS: 1.0}, 6.0)
    assert engine.history("p-0").starts[0].num_reused_tokens == 12
    assert engine.history("p-1").waits[0].for_kv_s == 5.0

    engine = LoggedEngine(num_blocks=8)
    engine.add("running", prompt=4, max_tokens=28)
    engine.add("waiting", prompt=21)
    assert engine.core.reserve("waiting", 21) is not None
    history = engine.history("waiting")
    assert 0.0 < history.waits[0].for_kv_s < history.waits[0].total_s
