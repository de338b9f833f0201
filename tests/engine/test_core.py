from __future__ import annotations

import ast
from pathlib import Path

import maitred
from maitred.clock import ManualClock
from maitred.config import SchedulerConfig
from maitred.engine.core import EngineCore
from maitred.request import FinishReason, Request
from maitred.scheduler.swap import SwapCosts
from maitred.step import ModelOutput, RequestProgress, SchedulerOutput
from tests.fakes import FakeExecutor, make_request, make_samples, make_scheduler, token_at


class SlowExecutor(FakeExecutor):
    """Takes a quarter of a second a step."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self._clock.advance(0.25)
        return super().execute(plan)


class Notes:
    """A StepObserver that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def added(self, request: Request, now: float) -> None:
        self.told.append(("added", request.request_id, now))

    def ended(self, request_id: str, reason: FinishReason, now: float) -> None:
        self.told.append(("ended", request_id, reason, now))

    def configured(self, config: SchedulerConfig, now: float) -> None:
        self.told.append(("configured", config.policy, now))

    def measured(self, costs: SwapCosts, now: float) -> None:
        self.told.append(("measured", costs, now))

    def stepped(
        self, plan: SchedulerOutput, progress: list[RequestProgress], scheduled_at: float, updated_at: float
    ) -> None:
        self.told.append(("stepped", plan.step, scheduled_at, updated_at))


def make_core(observer: Notes | None = None) -> tuple[EngineCore, SlowExecutor]:
    clock = ManualClock()
    executor = SlowExecutor(clock)
    return EngineCore(make_scheduler(), executor, clock, observer), executor


def test_a_step_schedules_executes_and_updates():
    core, _ = make_core()
    core.add(make_request("a", prompt=8, max_tokens=2))
    (progress,) = core.step()
    assert progress.new_token_ids == (token_at("a", 8),)
    (progress,) = core.step()
    assert progress.finish_reason is FinishReason.LENGTH
    assert progress.timing is not None
    assert progress.timing.total_s == 0.5
    assert not core.has_work


def test_time_in_the_executor_is_told_from_time_outside():
    core, _ = make_core()
    core.add(make_request(max_tokens=4))
    while core.has_work:
        core.step()
    assert (core.execute_s, core.host_s, core.last_step_at) == (1.0, 0.0, 1.0)


def test_abort_and_finish_give_the_last_progress_and_none_for_strangers():
    core, _ = make_core()
    core.add(make_request("a"))
    core.add(make_request("b"))
    core.step()
    aborted = core.abort("a")
    finished = core.finish("b", FinishReason.STOP, stop_reason="END")
    assert aborted is not None
    assert finished is not None
    assert (aborted.finish_reason, finished.finish_reason) == (FinishReason.ABORT, FinishReason.STOP)
    assert finished.stop_reason == "END"
    assert core.abort("a") is None
    assert core.stats.num_blocks_used == 0


def test_the_observer_is_told_everything_in_order():
    notes = Notes()
    core, _ = make_core(notes)
    core.add(make_request("a"))
    core.step()
    core.configure(SchedulerConfig(policy="priority"))
    core.abort("stranger")
    core.abort("a")
    assert notes.told == [
        ("added", "a", 0.0),
        ("stepped", 0, 0.0, 0.25),
        ("configured", "priority", 0.25),
        ("ended", "a", FinishReason.ABORT, 0.25),
    ]


def test_closing_closes_the_executor():
    core, executor = make_core()
    core.close()
    assert executor.closed


def test_a_family_of_samples_goes_through():
    core, _ = make_core()
    samples = make_samples("p", 3, prompt=6, max_tokens=3)
    for sample in samples:
        core.add(sample)
    while core.has_work:
        core.step()
    assert all(len(s.output_token_ids) == 3 for s in samples)


def test_deciding_code_is_pure():
    """No clock, randomness, environment, thread, file or tensor below the engine's core."""
    root = Path(maitred.__file__).parent
    files = [*root.glob("kvcache/*.py"), *root.glob("scheduler/*.py"), root / "engine/core.py"]
    allowed = {"__future__", "collections", "dataclasses", "hashlib", "heapq", "itertools", "maitred", "msgspec"}
    allowed |= {"bisect", "enum", "math", "operator", "re", "struct", "typing", "zlib"}
    for path in files:
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
        modules = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
        modules += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
        assert {m.split(".")[0] for m in modules} <= allowed, path
