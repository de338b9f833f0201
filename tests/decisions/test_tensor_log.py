"""Runs with chats and batches, of which the log holds every decision: a fresh scheduler makes them again."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from maitred.cli.why_words import tell_tensor
from maitred.core.request import FinishReason, Terms
from maitred.core.step import RequestProgress
from maitred.core.tensor_request import (
    Batch,
    BatchOutcome,
    BatchRules,
    Instance,
    LaneKey,
    QueueRules,
    TensorRequest,
    TensorSpec,
)
from maitred.decisions.codec import Header, LogEncoder, read_log
from maitred.decisions.history import ids_like
from maitred.decisions.log import MAX_EVENTS, Completed, Dispatched, Event, Recorder, StepRecord, TensorArrived
from maitred.decisions.replay import first_difference, replay
from maitred.decisions.tensor_history import is_tensor, steps_of_one, tensor_history_of
from maitred.policy.policies import POLICIES
from maitred.scheduler.engine_core import StepTimes
from maitred.scheduler.notes import LaneWait
from maitred.scheduler.scheduler import Scheduler
from maitred.testing.conformance_world import Dice
from tests.fakes import FakeExecutor, make_request, make_scheduler

RULES = (
    BatchRules(max_batch_size=4, dynamic=True, delay_s=0.01, queue=QueueRules(timeout_s=0.2)),
    BatchRules(
        max_batch_size=8,
        dynamic=True,
        preferred_sizes=(2, 4),
        auto_delay=True,
        preserve_ordering=True,
        num_levels=2,
        default_level=2,
        queue=QueueRules(timeout_s=0.05, delays=True),
        instances=(Instance(resources=(("R", 2),)), Instance(resources=(("R", 1),), weight=2)),
    ),
    BatchRules(instances=(Instance(resources=(("R", 1),)),), machine_share=0.5),
)


class TensorRun:
    """A live loop as an engine has it: whatever it tells the scheduler it tells the recorder."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.scheduler, self.dice, self.now = scheduler, Dice(seed), 0.0
        self.records: list[StepRecord] = []
        self.recorder = Recorder(self.records.append)
        self.header = Header(scheduler.config, 24, 4, enable_prefix_caching=True)
        self.executor = FakeExecutor()
        self.num_tensors = self.num_chats = 0
        self.batches: list[Batch] = []

    def act(self) -> None:
        dice = self.dice
        self.now += dice.between(0, 20) / 1000
        acts: list[Callable[[], None]] = [self.add_tensors] * 4 + [self.complete] * 3 + [self.abort]
        if dice.chance(5):
            acts = [self.load, self.load, self.unload]
        dice.choose(acts)()
        self.dispatch()

    def load(self) -> None:
        number = self.dice.between(0, 2)
        rules = self.dice.choose(RULES)
        self.scheduler.lanes.load(f"m{number}", 1, rules)
        self.recorder.model_loaded(f"m{number}", 1, rules, self.now)

    def unload(self) -> None:
        self.scheduler.lanes.unload("m0", 1)
        self.recorder.model_unloaded("m0", 1, self.now)

    def add_tensors(self) -> None:
        loaded = [model.key.name for model in self.scheduler.lanes.models if not model.unloaded]
        for _ in range(self.dice.between(1, 4) if loaded else 0):
            model = self.dice.choose(loaded)
            spec = TensorSpec(
                request_id=f"t{self.num_tensors}",
                arrived_at=self.now,
                lane=LaneKey(model, 1, self.dice.choose(["", "x"])),
                work=float(self.dice.between(1, 30)),
                terms=Terms(
                    tenant=f"t{self.dice.between(0, 2)}",
                    priority=self.dice.between(0, 2),
                    finish_by=self.dice.choose([None, None, self.now + 0.1]),
                    key_id="secret-key-id",
                ),
                level=self.dice.between(0, 2),
            )
            self.num_tensors += 1
            self.scheduler.add_tensor(TensorRequest(spec), self.now)
            self.recorder.tensor_added(spec, self.now)

    def complete(self) -> None:
        if self.batches:
            batch = self.batches.pop(self.dice.between(0, len(self.batches) - 1))
            outcome = BatchOutcome(compute_us=self.dice.between(500, 30_000), lost=self.dice.chance(10))
            self.scheduler.completed(batch, outcome, self.now)
            self.recorder.completed(batch, outcome, self.now)

    def abort(self) -> None:
        if self.scheduler.lanes.requests:
            request_id = self.dice.choose(self.scheduler.lanes.requests).request_id
            self.scheduler.finish(request_id, FinishReason.ABORT, self.now)
            self.recorder.tensor_ended(request_id, FinishReason.ABORT, self.now)

    def dispatch(self) -> None:
        if self.scheduler.expire_tensors(self.now):
            self.recorder.tensors_expired(self.now)
        batches = self.scheduler.dispatch(self.now)
        if batches:
            self.recorder.dispatched(batches, self.now)
        self.batches += batches

    def step(self) -> list[RequestProgress]:
        """Of the chats; things happen before it and during it."""
        if self.dice.chance(40):
            number = self.num_chats
            self.num_chats += 1
            request = make_request(f"c{number}", prompt=12, max_tokens=6, arrived_at=self.now, tenant=f"t{number % 3}")
            self.scheduler.add(request, self.now)
            self.recorder.added(request, self.now)
        self.act()
        scheduled_at, plan = self.now, self.scheduler.schedule(self.now)
        self.recorder.scheduled(plan)
        self.act()
        output = self.executor.execute(plan)
        self.now += 0.004
        progress = self.scheduler.update(plan, output, self.now)
        self.recorder.stepped(plan, output, progress, StepTimes(scheduled_at, scheduled_at, self.now))
        return progress

    def frames(self) -> list[bytes]:
        self.recorder.flush(self.now)
        encoder = LogEncoder(self.header)
        return [encoder.start(), *map(encoder.encode, self.records)]


def mixed_run(policy: str, seed: int, num_steps: int = 80) -> TensorRun:
    scheduler = make_scheduler(num_blocks=24, block_size=4, max_num_seqs=3, max_num_batched_tokens=16, policy=policy)
    run = TensorRun(scheduler, seed)
    for _ in range(4):
        run.load()
    for _ in range(num_steps):
        run.step()
        for _ in range(run.dice.choose([0, 0, 0, 5])):
            run.act()  # while no step is under way
    return run


@pytest.mark.parametrize("policy", POLICIES)
def test_batches_and_plans_are_decided_again_as_they_were(policy: str):
    before: list[Event] = []
    during: list[Event] = []
    for seed in range(2):
        frames = mixed_run(policy, seed).frames()
        assert first_difference(frames) is None
        for step in replay(frames):
            before += step.step.events
            during += step.step.during
    for events in (before, during):
        assert sum(isinstance(event, Dispatched) for event in events) > 20
        assert sum(isinstance(event, Completed) for event in events) > 20


def test_another_batch_is_a_difference_and_is_told():
    run = mixed_run("fcfs", 1)
    number, record = next((i, one) for i, one in enumerate(run.records) if any(map(is_dispatched, one.events)))
    run.records[number] = record._replace(events=tuple(map(with_another_instance, record.events)))
    told = first_difference(run.frames())
    assert told is not None
    assert re.search(r"batches\[0\].instance was 7, is \d", told)


def is_dispatched(event: object) -> bool:
    return isinstance(event, Dispatched)


def with_another_instance(event: Any) -> Any:
    if not isinstance(event, Dispatched):
        return event
    return structs.replace(event, batches=(event.batches[0]._replace(instance=7), *event.batches[1:]))


def test_without_steps_the_events_are_written_by_themselves():
    run = TensorRun(make_scheduler(num_blocks=24, block_size=4), 3)
    run.scheduler.lanes.load("m0", 1, RULES[0])
    run.recorder.model_loaded("m0", 1, RULES[0], 0.0)
    while len(run.records) < 3:
        run.add_tensors()
        run.dispatch()
        run.now += 0.02
        run.complete()
    assert all(len(record.events) >= MAX_EVENTS for record in run.records)
    frames = run.frames()
    assert first_difference(frames) is None
    assert not any(step.taken for step in read_log(frames)[1])


def test_no_key_is_in_the_log():
    frames = mixed_run("vtc", 0).frames()
    assert any(isinstance(event, TensorArrived) for step in read_log(frames)[1] for event in step.events)
    assert not any(b"secret-key-id" in frame for frame in frames)


RESNET = BatchRules(max_batch_size=8, dynamic=True, delay_s=0.0019)


class Told(TensorRun):
    """A run by a script, with one model named resnet."""

    def __init__(self, rules: BatchRules = RESNET) -> None:
        super().__init__(make_scheduler(num_blocks=24, block_size=4), 1)
        self.scheduler.lanes.load("resnet", 1, rules)
        self.recorder.model_loaded("resnet", 1, rules, 0.0)

    def add(self, name: str, num_rows: int, now: float, arrived_at: float | None = None) -> None:
        arrived_at = now if arrived_at is None else arrived_at
        spec = TensorSpec(request_id=name, arrived_at=arrived_at, lane=LaneKey("resnet", 1), num_rows=num_rows)
        self.scheduler.add_tensor(TensorRequest(spec), now)
        self.recorder.tensor_added(spec, now)
        self.go_on(now)

    def end(self, now: float, *, compute_us: int = 0, lost: bool = False) -> None:
        batch, outcome = self.batches.pop(0), BatchOutcome(compute_us=compute_us, lost=lost)
        self.scheduler.completed(batch, outcome, now)
        self.recorder.completed(batch, outcome, now)
        self.go_on(now)

    def go_on(self, now: float) -> None:
        self.now = now
        self.dispatch()


def told_of_delay_and_instance() -> Told:
    run = Told()
    run.add("first", 8, 0.0095)
    run.add("mine", 2, 0.0100, arrived_at=0.0098)
    run.end(0.0107, compute_us=1200)
    run.add("other", 1, 0.0110)
    run.go_on(0.0119)
    run.end(0.0129, compute_us=900)
    return run


def test_each_millisecond_of_a_wait_has_its_reason():
    history = tensor_history_of(told_of_delay_and_instance().frames(), "mine")
    assert tell_tensor(history).splitlines() == [
        "request mine",
        "  arrived    0.010 s on the log's clock: 2 rows for resnet version 1; priority 0; policy fcfs",
        "  waited     1.9 ms",
        "             1.2 ms for the delay of its batch",
        "             0.7 ms because instance 0 ran 8 rows of resnet",
        "             0.2 ms on its way to the engine",
        "  started    +2.1 ms: in a batch of 2 requests, 3 rows, on instance 0",
        "  computed   0.9 ms, 0.6 ms of it its own",
        "  finished   +3.1 ms: stop, it has its answer",
    ]


def test_waits_behind_lost_and_many_batches_are_told():
    run = Told(BatchRules(max_batch_size=8))
    run.add("mine", 1, 0.0)
    run.add("other", 1, 0.001)
    run.end(0.004, lost=True)
    run.end(0.006, compute_us=2000)
    run.end(0.009, compute_us=3000)
    lost = tell_tensor(tensor_history_of(run.frames(), "mine")).splitlines()
    assert [line.split()[0] for line in lost[1:]].count("waited") == 2
    assert any(line.endswith("the instance died or hung, and it ran again") for line in lost)

    run = Told(BatchRules(max_batch_size=2, dynamic=True))
    for number in range(4):
        run.add(f"r{number}", 2, 0.0)
    run.add("mine", 1, 0.0001)
    for number in range(5):
        run.end(0.002 * (number + 1), compute_us=2000)
    lines = tell_tensor(tensor_history_of(run.frames(), "mine")).splitlines()
    assert lines[2:4] == [
        "  waited     7.9 ms with 3 other requests (6 rows) in its lane when it came",
        "             7.9 ms because instance 0 ran 8 rows of resnet in 4 batches",
    ]


def test_one_that_is_given_up_says_so_and_one_that_the_log_cuts_off():
    run = Told()
    run.add("first", 8, 0.0)
    run.add("mine", 1, 0.001)
    run.add("left", 1, 0.001)
    run.scheduler.finish("mine", FinishReason.ABORT, 0.003)
    run.recorder.tensor_ended("mine", FinishReason.ABORT, 0.003)
    frames = run.frames()
    assert tell_tensor(tensor_history_of(frames, "mine")).endswith("finished   +2.0 ms: abort, the client went away")
    assert tell_tensor(tensor_history_of(frames, "left")).endswith("the log ends here")


@pytest.mark.parametrize("policy", ["fcfs", "vtc"])
def test_the_reasons_of_every_wait_add_up_to_it(policy):
    frames = mixed_run(policy, 2).frames()
    names = [
        event.spec.request_id
        for step in read_log(frames)[1]
        for event in (*step.events, *step.during)
        if isinstance(event, TensorArrived)
    ]
    seen = set()
    for name in names[:60]:
        for wait in tensor_history_of(frames, name).waits:
            assert sum(wait.for_reason.values()) == pytest.approx(wait.total_s)
            assert sum(wait.for_batches.values()) == pytest.approx(wait.for_reason.get(LaneWait.INSTANCES, 0.0))
            seen |= {why for why, seconds in wait.for_reason.items() if seconds}
    assert {LaneWait.INSTANCES, LaneWait.DELAY} <= seen


def test_a_tensor_request_is_found_by_its_id_and_an_ensembles_steps_by_that_of_the_whole():
    run = told_of_delay_and_instance()
    run.add("whole/0", 1, 0.02)
    run.add("whole/1", 1, 0.02)
    frames = run.frames()
    assert is_tensor(frames, "mine")
    assert not is_tensor(frames, "c0")
    assert ids_like(frames, "hol") == ["whole/0", "whole/1"] == steps_of_one(["whole/0", "whole/1"])
    assert not steps_of_one(["mine"])
    assert not steps_of_one(["mine/0", "other/0"])
