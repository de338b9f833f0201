from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import maitred
from maitred.config import SchedulerConfig
from maitred.core.clock import ManualClock
from maitred.core.cost_model import SwapCosts
from maitred.core.request import FinishReason, RequestState
from maitred.core.step import ModelOutput, RequestProgress, SchedulerOutput
from maitred.decisions.codec import Header, LogEncoder
from maitred.decisions.log import Recorder
from maitred.decisions.replay import first_difference
from maitred.scheduler.engine_core import EngineCore, StepListener, StepTimes
from maitred.scheduler.reservations import GivenUp
from tests.fakes import FakeExecutor, make_samples, make_scheduler, make_spec, token_at

BOOKS = ("leases", "manager", "prefix_cache", "tiers")  # of kv/


class SlowExecutor(FakeExecutor):
    """Takes a quarter of a second a step."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self._clock.advance(0.25)
        return super().execute(plan)


class Notes(StepListener):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def added(self, request: RequestState, now: float) -> None:
        self.told.append(("added", request.request_id, now))

    def stopped(self, request_id: str, reason: FinishReason, now: float) -> None:
        self.told.append(("stopped", request_id, reason, now))

    def configured(self, config: SchedulerConfig, now: float) -> None:
        self.told.append(("configured", config.policy, now))

    def measured(self, costs: SwapCosts, now: float) -> None:
        self.told.append(("measured", costs, now))

    def reserved(self, request_id: str, num_tokens: int, now: float) -> None:
        self.told.append(("reserved", request_id, num_tokens, now))

    def kv_arrived(self, request_id: str, num_tokens: int, now: float) -> None:
        self.told.append(("kv_arrived", request_id, num_tokens, now))

    def held(self, lease: str, block_hashes: Sequence[bytes], now: float) -> None:
        self.told.append(("held", lease, len(block_hashes), now))

    def released(self, lease: str, now: float) -> None:
        self.told.append(("released", lease, now))

    def stepped(
        self, plan: SchedulerOutput, output: ModelOutput, progress: list[RequestProgress], times: StepTimes
    ) -> None:
        self.told.append(("stepped", plan.step, times.scheduled_at, times.executed_at))


class GivenUpNotes(StepListener):
    """Keeps what was given up, and how many plans the executor had been given by then."""

    def __init__(self) -> None:
        self.told: list[GivenUp] = []
        self.after_plans: list[int] = []

    def begin(self, core: EngineCore) -> None:
        self._executor = core._executor

    def given_up(self, given_up: GivenUp) -> None:
        self.told.append(given_up)
        self.after_plans.append(len(self._executor.plans))  # type: ignore[attr-defined]


def make_core(*listeners: StepListener, wake: Callable[[], None] = lambda: None) -> tuple[EngineCore, SlowExecutor]:
    clock = ManualClock()
    executor = SlowExecutor(clock)
    return EngineCore(make_scheduler(), executor, clock, *listeners, wake=wake), executor


def test_a_step_schedules_executes_and_updates():
    core, _ = make_core()
    core.add(make_spec("a", prompt=8, max_tokens=2))
    (progress,) = core.step()
    assert progress.new_token_ids == (token_at("a", 8),)
    (progress,) = core.step()
    assert progress.finish_reason is FinishReason.LENGTH
    assert progress.timing is not None
    assert progress.timing.total_s == 0.5
    assert not core.has_work


def test_time_in_the_executor_is_told_from_time_outside():
    core, _ = make_core()
    core.add(make_spec(max_tokens=4))
    while core.has_work:
        core.step()
    assert (core.execute_s, core.host_s, core.last_step_at) == (1.0, 0.0, 1.0)


def test_the_executors_time_is_split_over_the_rows_of_each_step_to_the_microsecond():
    clock = ManualClock()
    core = EngineCore(make_scheduler(), SlowExecutor(clock), clock)
    for name, num_tokens in (("long", 20), ("short", 6), ("later", 9)):
        core.add(make_spec(name, prompt=num_tokens, max_tokens=4))
    told = [progress for _ in range(3) for progress in core.step()]
    gone = core.abort("later")
    while core.has_work:
        told += core.step()
    took = {p.request_id: p.charges.compute_us for p in [*told, gone] if p.finish_reason is not None}
    assert sum(took.values()) == round(core.execute_s * 1e6) > 0
    assert took["long"] > took["short"] > 0 < took["later"]


def test_what_a_long_request_has_taken_is_told_while_it_runs():
    clock = ManualClock()
    core = EngineCore(make_scheduler(), SlowExecutor(clock), clock)
    core.add(make_spec("long", max_tokens=8))
    told = [progress for _ in range(7) for progress in core.step()]
    assert [p.charges.compute_us for p in told if p.charges is not None] == [250_000, 750_000, 1_250_000, 1_750_000]


def test_abort_and_finish_give_the_last_progress_and_none_for_strangers():
    core, _ = make_core()
    core.add(make_spec("a"))
    core.add(make_spec("b"))
    core.step()
    aborted = core.abort("a")
    finished = core.finish("b", FinishReason.STOP, stop_reason="END")
    assert aborted is not None
    assert finished is not None
    assert (aborted.finish_reason, finished.finish_reason) == (FinishReason.ABORT, FinishReason.STOP)
    assert finished.stop_reason == "END"
    assert core.abort("a") is None
    assert core.stats.num_blocks_used == 0


def test_a_listener_is_told_everything_in_order():
    notes = Notes()
    core, _ = make_core(notes)
    core.add(make_spec("a"))
    core.step()
    core.configure(SchedulerConfig(policy="priority"))
    core.abort("stranger")
    core.abort("a")
    assert notes.told == [
        ("added", "a", 0.0),
        ("stepped", 0, 0.0, 0.25),
        ("configured", "priority", 0.25),
        ("stopped", "a", FinishReason.ABORT, 0.25),
    ]


class Hearing(StepListener):
    """Writes down its name at each moment of a step, and what it finds there."""

    def __init__(self, name: str, heard: list[str]) -> None:
        self._name, self._heard = name, heard

    def scheduled(self, plan: SchedulerOutput) -> None:
        self._heard.append(f"{self._name} scheduled")

    def stepped(self, *step: object) -> None:
        self._heard.append(f"{self._name} stepped")

    def ended(self, request_id: str) -> None:
        self._heard.append(f"{self._name} ended {request_id}")

    def told(self, progress: list[RequestProgress]) -> None:
        progress[:] = [each._replace(stop_reason=f"{each.stop_reason} {self._name}") for each in progress]


def test_listeners_hear_each_moment_in_their_order_and_may_amend_what_is_told():
    heard: list[str] = []
    core, _ = make_core(Hearing("first", heard), Hearing("second", heard))
    core.add(make_spec("a", max_tokens=1))
    (last,) = core.step()
    moments = ("scheduled", "stepped", "ended a")
    assert heard == [f"{name} {moment}" for moment in moments for name in ("first", "second")]
    assert last.stop_reason == "None first second"


def test_a_listener_is_called_for_what_it_overrides_and_while_it_follows_steps():
    heard: list[str] = []
    resting, silent = Hearing("resting", heard), StepListener()
    resting.follows_steps = False
    core, _ = make_core(resting, silent)
    assert core.moments.stepped == core.moments.ended == ()  # of an engine that has nothing but its own
    core.add(make_spec("a", max_tokens=2))
    core.step()
    assert heard == []
    core.follow(resting, True)
    core.step()
    assert heard == ["resting scheduled", "resting stepped", "resting ended a"]


def test_speed_is_measured_while_a_router_wants_it():
    core, _ = make_core()
    core.tell_router(True)
    serve_prompts(core, 1, named="a")
    assert core.figures()["decode_tokens_per_s"] == 4.0
    core.tell_router(False)
    serve_prompts(core, 1, named="b")
    assert core.figures()["decode_tokens_per_s"] == 0.0


def test_closing_closes_the_executor():
    core, executor = make_core()
    core.close()
    assert executor.closed


def test_a_family_of_samples_goes_through():
    core, _ = make_core()
    samples = [core.add(sample.spec) for sample in make_samples("p", 3, prompt=6, max_tokens=3)]
    while core.has_work:
        core.step()
    assert all(len(s.output_token_ids) == 3 for s in samples)


def test_deciding_code_is_pure():
    """No clock, randomness, environment, thread, file or tensor below the engine's core."""
    root = Path(maitred.__file__).parent
    files = [*(root / f"kv/{name}.py" for name in BOOKS), *root.glob("scheduler/*.py")]
    allowed = {"__future__", "collections", "dataclasses", "hashlib", "heapq", "itertools", "maitred", "msgspec"}
    allowed |= {"bisect", "enum", "functools", "math", "operator", "re", "struct", "typing", "zlib"}
    for path in files:
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
        modules = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
        modules += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
        assert {m.split(".")[0] for m in modules} <= allowed, path


class PromptsTakeTime(FakeExecutor):
    """A hundredth of a second, and a millisecond a token of a prompt (`s_per_token`)."""

    def __init__(self, clock: ManualClock, s_per_token: float = 0.001) -> None:
        super().__init__()
        self._clock, self.s_per_token = clock, s_per_token

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        prompts = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        self._clock.advance(0.01 + self.s_per_token * prompts)
        return super().execute(plan)


def serve_prompts(core: EngineCore, count: int, *, named: str) -> None:
    for number in range(count):
        core.add(make_spec(f"{named}{number}", prompt=64, max_tokens=2))
        while core.has_work:
            core.step()


def test_ageing_follows_the_rate_of_the_device_and_the_log_replays_it():
    clock = ManualClock()
    scheduler = make_scheduler(policy="sjf")
    header = Header(scheduler.config, num_blocks=64, block_size=4, enable_prefix_caching=True)
    encoder = LogEncoder(header)
    frames = [encoder.start()]
    executor = PromptsTakeTime(clock)
    core = EngineCore(scheduler, executor, clock, Recorder(lambda record: frames.append(encoder.encode(record))))
    assert scheduler.config.ageing_rate == 200.0  # a guess
    serve_prompts(core, 2, named="a")
    assert scheduler.config.ageing_tokens_per_s is None
    serve_prompts(core, 3, named="b")
    assert scheduler.config.ageing_rate == pytest.approx(1000 / 128, rel=0.2)
    executor.s_per_token = 0.1
    serve_prompts(core, 30, named="c")
    assert scheduler.config.ageing_rate == pytest.approx(10 / 128, rel=0.5)
    assert first_difference(frames) is None


def test_ageing_given_as_an_argument_stays_where_it_was_given():
    clock = ManualClock()
    scheduler = make_scheduler(policy="sjf", policy_args={"ageing_tokens_per_s": 50.0})
    serve_prompts(EngineCore(scheduler, PromptsTakeTime(clock), clock), 5, named="a")
    assert scheduler.order.policy.arguments["ageing_tokens_per_s"] == 50.0


@pytest.mark.parametrize(("policy", "ageing"), [("sjf", 50.0), ("fcfs", None), ("vtc", None)])
def test_ageing_stays_where_it_was_given_or_is_of_no_use(policy: str, ageing: float | None):
    clock = ManualClock()
    scheduler = make_scheduler(policy=policy, ageing_tokens_per_s=ageing)
    serve_prompts(EngineCore(scheduler, PromptsTakeTime(clock), clock), 5, named="a")
    assert scheduler.config.ageing_tokens_per_s == ageing


def test_ageing_that_is_given_while_requests_run_is_not_measured_over():
    clock = ManualClock()
    core = EngineCore(make_scheduler(policy="srpt"), PromptsTakeTime(clock), clock)
    serve_prompts(core, 5, named="a")
    measured = core.scheduler.config
    core.configure(replace(measured, policy="sjf"))  # its own rate comes along
    core.configure(replace(measured, ageing_tokens_per_s=3.0))
    serve_prompts(core, 5, named="b")
    assert core.scheduler.config.ageing_tokens_per_s == 3.0


def test_kv_from_elsewhere_is_noted_where_it_has_an_effect():
    notes = Notes()
    core, _ = make_core(notes)
    core.add(make_spec("a", prompt=12, max_tokens=1))
    assert core.reserve("a", 4) is not None
    assert core.reserve("a", 4) is None
    assert (core.has_work, core.can_step) == (True, False)
    assert core.kv_arrived("a", 4)
    assert not core.kv_arrived("a", 4)
    held = core.scheduler.request("a").block_hashes  # type: ignore[union-attr]
    assert len(core.hold("lease", held)) == 1
    assert core.release("lease")
    assert not core.release("lease")
    assert [told[0] for told in notes.told] == ["added", "reserved", "kv_arrived", "held", "released"]


def test_whoever_copies_is_told_before_anything_is_written_to_blocks_that_were_given_up():
    core, executor = make_core(notes := GivenUpNotes())
    core.add(make_spec("a", prompt=100, max_tokens=150))
    core.step()
    core.add(make_spec("b", prompt=60))
    core.add(make_spec("c", prompt=60))
    assert core.reserve("b", 60) is not None
    assert core.reserve("c", 60) is not None
    core.abort("c")
    assert (notes.told, notes.after_plans) == ([GivenUp(("c",), ())], [1])
    while len(notes.told) == 1:
        core.step()
    assert (notes.told[1], notes.after_plans[1]) == (GivenUp(("b",), ()), len(executor.plans) - 1)


def test_a_deadline_ends_a_request_that_waits_for_kv():
    core, executor = make_core(notes := GivenUpNotes())
    core.add(make_spec("a", prompt=12, finish_by=2.0))
    assert core.reserve("a", 12) is not None
    assert core.next_deadline == 2.0
    executor._clock.advance(2.0)
    (progress,) = core.step()
    assert (progress.finish_reason, notes.told) == (FinishReason.TIMEOUT, [GivenUp(("a",), ())])
    assert core.stats.num_blocks_used == 0


def test_what_another_thread_has_to_say_is_heard_between_two_steps():
    woken = threading.Event()
    core, _ = make_core(wake=woken.set)
    core.add(make_spec("a", prompt=12))
    reserved = core.reserve("a", 12)
    assert reserved is not None
    thread = threading.Thread(target=core.call_soon, args=(partial(core.kv_arrived, "a", reserved.end),))
    thread.start()
    woken.wait()
    thread.join()
    assert not core.can_step
    core.run_called()
    assert core.can_step
