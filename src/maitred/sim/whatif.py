"""What if: requests that an engine served, replayed as it is and under other terms, on a cost model of its own steps.

`python -m maitred.sim.whatif` reads a `ReplayAsked` from standard input and writes the comparison, or why there is
none, as JSON; the server starts it as a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace as changed
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace

from maitred.core.cost_model import CostModel
from maitred.core.errors import ConfigError, MaitredError
from maitred.core.request import RequestState, ResumePoint
from maitred.engine.installed import installed_policies
from maitred.engine.traffic import ReplayAsked, ServedRequest, Traffic, WhatIf
from maitred.fleet.config import FleetConfig
from maitred.fleet.disagg import HandoverConfig, Role
from maitred.policy.policies import policy_for
from maitred.sim.devices import SimulatedTarget
from maitred.sim.engine import EngineSetup, Simulation
from maitred.sim.fit import MeasuredStep, fit_steps
from maitred.sim.fleet import FleetSetup, FleetSimulation, ReplicaSetup, facts_of
from maitred.sim.links import LINKS
from maitred.sim.profile import Jitter
from maitred.sim.report import column
from maitred.sim.results import Objectives, SimulatedResults
from maitred.sim.workload import Arrival, TokenSpan

MIN_STEPS = 100
DEFAULT_DRAFTS = 5  # where other rules than a number say how many
Replayed = tuple[SimulatedResults, dict[str, Any]]  # and its figures
LINK = LINKS["shm"]  # all engines of one server are on one host


def what_if(asked: ReplayAsked) -> dict[str, Any]:
    """Columns for what was measured, the replay as it is, and the replay under the change. Raises ConfigError."""
    change, engines = asked.change, asked.recordings
    served = sorted((each for one in engines for each in one.requests), key=lambda each: each.spec.arrived_at)
    if not served:
        raise ConfigError("no traffic yet: no request has ended since the engine started; send some, then ask again")
    began_at = max(served[0].spec.arrived_at, served[-1].spec.arrived_at - 60 * change.minutes)
    served = [each for each in served if each.spec.arrived_at >= began_at]
    steps = [MeasuredStep(*each) for one in engines for each in map(msgspec.structs.astuple, one.steps)]
    if len(steps) < MIN_STEPS:
        raise ConfigError(
            f"not enough to fit a cost model to: {len(steps)} steps of {MIN_STEPS} were seen; send more requests"
        )
    fit = fit_steps([step for number, step in enumerate(steps) if number % 4 != 3], steps[3::4])
    objectives = Objectives.parse(change.slo)
    size = engines[0].header.block_size
    arrivals = [_arrival(number, each, size, began_at) for number, each in enumerate(served)]
    setups = [_setup(engines[0], each, _acceptance(served)) for each in (WhatIf(), change)]
    runs = {
        "measured": _measured(served, objectives),
        "as it is": _replayed(engines, WhatIf(), setups[0], arrivals, fit.cost_model, objectives),
        "what if": _replayed(engines, change, setups[1], arrivals, fit.cost_model, objectives),
    }
    return {
        "columns": [column(name, figures, run.total) for name, (run, figures) in runs.items()],
        "baseline": 1,
        "num_requests": len(served),
        "seconds": arrivals[-1].at,
        "num_steps": len(steps),
        "step_error": fit.mape,
    }


def _arrival(number: int, served: ServedRequest, block_size: int, began_at: float) -> Arrival:
    spec, num_output_tokens = served.spec, max(1, served.charges.num_generated_tokens)
    return Arrival(
        at=spec.arrived_at - began_at,
        request_id=f"no. {number + 1}",
        prompt_tokens=spec.num_prompt_tokens,
        output_tokens=num_output_tokens,
        max_tokens=max(spec.max_tokens, num_output_tokens),
        tenant=spec.terms.tenant,
        priority=spec.terms.priority,
        weight=spec.terms.weight,
        ttft_slo_s=spec.terms.ttft_slo_s,
        background=spec.terms.background,
        spans=tuple(TokenSpan(name, (at + 1) * block_size) for at, name in enumerate(spec.block_hashes)),
        own=b"own %d " % number,
    )


def _acceptance(served: Sequence[ServedRequest]) -> float | None:
    """Chance of a draft after accepted ones, by which as many were accepted; None where none were made.

    Of k drafts each kept with chance a after those before it, a + a^2 + ... + a^k are kept.
    """
    drafted = sum(each.charges.num_draft_tokens for each in served)
    accepted = sum(each.charges.num_accepted_tokens for each in served)
    rows = sum(each.charges.num_generated_tokens for each in served) - accepted
    if not drafted or rows <= 0:
        return None
    low, high, k = 0.0, 1.0, drafted / rows
    for _ in range(30):
        a = (low + high) / 2
        low, high = (a, high) if a * (1 - a**k) / (1 - a) < accepted / rows else (low, a)
    return low


def _measured(served: Sequence[ServedRequest], objectives: Objectives) -> Replayed:
    """Figures that the engines noted, but for each gap between tokens and the time in steps."""
    results = SimulatedResults(objectives)
    moments = [(each.spec.arrived_at, 0, number) for number, each in enumerate(served)]
    for at, is_end, number in sorted([*moments, *((each.ended_at, 1, number) for number, each in enumerate(served))]):
        one = served[number]
        terms = one.spec.terms
        group = results.tenant(terms.tenant, terms.weight, background=terms.background)
        if not is_end:
            results.arrived(group, at)
            continue
        request = RequestState(
            replace(
                one.spec,
                resumed=ResumePoint(output_token_ids=[0] * one.charges.num_generated_tokens, charges=one.charges),
            )
        )
        request.finished_at = at
        results.finished(group, request)
    return results, results.to_json() | {"utilisation": None}


def _replayed(
    engines: Sequence[Traffic],
    change: WhatIf,
    setup: EngineSetup,
    arrivals: Sequence[Arrival],
    costs: CostModel,
    objectives: Objectives,
) -> Replayed:
    results = SimulatedResults(objectives)
    num_replicas = change.replicas or len(engines)
    if num_replicas == 1 and not change.prefill_workers:
        Simulation(setup, costs, results, jitter=Jitter(costs, Random(0))).run(iter(arrivals))
        return results, results.to_json()
    plain = ReplicaSetup(engine=setup, cost_model=costs)
    fleet = FleetSetup(config=FleetConfig(), scheduler=setup.scheduler, replicas=[plain] * num_replicas)
    if change.prefill_workers:
        target = SimulatedTarget(
            label=setup.scheduler.policy,
            cost_model=costs,
            num_blocks=lambda cache, max_num_seqs: setup.num_blocks,
            token_budget=setup.scheduler.token_budget,
            kv_bytes_per_token=engines[0].kv_bytes_per_token,
            num_layers=engines[0].num_layers,
        )
        roles = [Role.PREFILL] * change.prefill_workers + [Role.DECODE] * num_replicas
        workers = [changed(plain, worker=facts_of(role, target, setup, LINK)) for role in roles]
        fleet = changed(fleet, replicas=workers, handover=HandoverConfig(handover="always"), link=LINK)
    simulation = FleetSimulation(fleet, results, seed=0)
    simulation.run(iter(arrivals))
    return results, simulation.to_json()


def _setup(engine: Traffic, change: WhatIf, acceptance: float | None) -> EngineSetup:
    header, scheduler = engine.header, engine.header.config
    if change.policy is not None and change.policy != scheduler.policy:
        scheduler = changed(scheduler, policy=change.policy, policy_args={})
    if change.max_num_seqs is not None:
        tokens = max(scheduler.token_budget, change.max_num_seqs)
        scheduler = changed(scheduler, max_num_seqs=change.max_num_seqs, max_num_batched_tokens=tokens)
    policies = installed_policies()
    policy_for(scheduler, policies)
    whole = bool(change.prefill_workers)  # workers exchange whole blocks
    return EngineSetup(
        scheduler=scheduler,
        num_blocks=header.num_blocks,
        block_size=header.block_size,
        enable_prefix_caching=header.enable_prefix_caching,
        predictor=scheduler.predictor,
        policies=policies,
        acceptance=acceptance,
        num_speculative_tokens=header.num_speculative_tokens or DEFAULT_DRAFTS,
        num_state_slots=max(header.num_state_slots, scheduler.max_num_seqs) if header.num_state_slots else 0,
        groups=None if whole else header.groups,
        num_pages=0 if whole else header.num_pages,
    )


def main() -> int:
    try:
        told = what_if(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ReplayAsked))
    except MaitredError as error:
        told = {"error": str(error)}
    sys.stdout.buffer.write(msgspec.json.encode(told))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
