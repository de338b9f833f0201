"""What a tensor request waited for, from the log alone: `maitred why` of it."""

from __future__ import annotations

import pytest

from maitred.cli.why_words import tell_tensor
from maitred.core.request import FinishReason
from maitred.core.tensor_request import BatchOutcome, BatchRules, LaneKey, TensorRequest, TensorSpec
from maitred.decisions.codec import read_log
from maitred.decisions.history import ids_like
from maitred.decisions.log import TensorArrived
from maitred.decisions.tensor_history import is_tensor, steps_of_one, tensor_history_of
from maitred.scheduler.notes import LaneWait
from tests.decisions.test_tensor_log import TensorRun, mixed_run
from tests.fakes import make_scheduler

RULES = BatchRules(max_batch_size=8, dynamic=True, delay_s=0.0019)


class Told(TensorRun):
    """A run by a script, with one model named resnet."""

    def __init__(self, rules: BatchRules = RULES) -> None:
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


def test_a_lost_batch_is_told_and_the_wait_after_it():
    run = Told(BatchRules(max_batch_size=8))
    run.add("mine", 1, 0.0)
    run.add("other", 1, 0.001)
    run.end(0.004, lost=True)
    run.end(0.006, compute_us=2000)
    run.end(0.009, compute_us=3000)
    lost = tell_tensor(tensor_history_of(run.frames(), "mine")).splitlines()
    assert [line.split()[0] for line in lost[1:]].count("waited") == 2
    assert any(line.endswith("the instance died or hung, and it ran again") for line in lost)


def test_whoever_waits_behind_many_batches_is_told_their_sum():
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
