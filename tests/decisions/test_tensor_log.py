"""Runs with chats and batches, of which the log holds every decision: a fresh scheduler makes them again."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

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
from maitred.decisions.log import MAX_EVENTS, Completed, Dispatched, Event, Recorder, StepRecord, TensorArrived
from maitred.decisions.replay import first_difference, replay
from maitred.policy.policies import POLICIES
from maitred.scheduler.engine_core import StepTimes
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
