"""First steps of an engine, before any request: what they take is known to the first choice that rests on it."""

from __future__ import annotations

from maitred.clock import Clock
from maitred.cost_model import CostModel
from maitred.engine.core import EngineCore
from maitred.engine.step_meter import StepMeter
from maitred.request import RequestSpec, SamplingParams
from maitred.scheduler.scheduler import Scheduler
from maitred.step import Executor

MOST_S = 3.0  # of a start: a slower machine learns from its requests


def measure_first_steps(
    meter: StepMeter, scheduler: Scheduler, executor: Executor, clock: Clock, most_tokens: int
) -> CostModel | None:
    """What steps cost, after chunks of prompts and decoding of one and of four; None if they took too long to tell.

    `scheduler` is for these requests alone, each of `most_tokens` at most; what they leave in KV blocks is nobody's.
    """
    core = EngineCore(scheduler, executor, clock, measure_steps=meter.step_costs)
    budget, began = scheduler.config.token_budget, clock.now()
    for count, prompt, output in ((1, budget // 4, 3), (1, 2 * budget, 4), (4, budget // 4, 5)):
        for number in range(count):
            core.add(_request(f"first/{number}", max(1, min(prompt, most_tokens - output)), output, clock.now()))
        while core.has_work and clock.now() - began < MOST_S:
            core.step()
        for state in (*scheduler.running, *scheduler.waiting):
            core.abort(state.request_id)
        core.step()  # the executor forgets them
    return core.told_step_costs


def _request(request_id: str, num_tokens: int, num_outputs: int, now: float) -> RequestSpec:
    return RequestSpec(
        request_id=request_id,
        prompt_token_ids=[1] * num_tokens,
        sampling=SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True),
        arrived_at=now,
        num_prompt_tokens=num_tokens,
        max_tokens=num_outputs,
    )
