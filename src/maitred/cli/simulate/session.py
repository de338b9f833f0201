"""Session of `simulate`: one simulation for each policy, then the report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from maitred.cli.console import note
from maitred.cli.flags import UsageError
from maitred.cli.objectives import parse_slo
from maitred.cli.simulate.sources import Target, find_target, read_workload
from maitred.cli.simulate.table import table
from maitred.config import AdmissionConfig, CacheConfig, SchedulerConfig
from maitred.engine.installed import installed_policies
from maitred.errors import did_you_mean
from maitred.gate.admission import admission_of
from maitred.policy.parameters import parameters_of
from maitred.policy.predictor import PREDICTORS
from maitred.sim.engine import EngineSetup
from maitred.sim.jitter import Jitter
from maitred.sim.report import html_report, svg_report
from maitred.sim.results import Objectives, Results
from maitred.sim.simulator import Simulation
from maitred.sim.workload import Workload, of_known_tenants
from maitred.storage.key_files import read_tenant_file
from maitred.tenancy.tenant import Tenant

if TYPE_CHECKING:
    from maitred.cli.simulate.options import SimulatedSchedulerConfig, SimulateOptions


def run_simulations(
    options: SimulateOptions, scheduler: SimulatedSchedulerConfig, admission: AdmissionConfig, cache: CacheConfig
) -> int:
    applied = _admission(options, admission)
    policies = _policies(scheduler.policy, list(installed_policies()))
    _known("--predictor", scheduler.predictor, list(PREDICTORS))
    choices = sorted({argument for policy in policies for argument in parameters_of(installed_policies()[policy])})
    for argument in scheduler.policy_args:
        _known("--policy-arg", argument, choices)
    objectives = Objectives(**{f"{name}_s": bound for name, bound in map(parse_slo, options.slo)})
    target = find_target(options.device, options.model)
    workload = read_workload(options.workload, options.rate_scale)
    tenants = None if options.tenants is None else read_tenant_file(Path(options.tenants)).tenants
    note(f"{target.label}; {options.workload}, policies {', '.join(policies)}")
    if target.doubt is not None:
        note(f"warning: {target.doubt}")
    outcomes: dict[str, Results] = {}
    for policy in policies:
        began = time.perf_counter()
        setup = engine_setup(scheduler, cache, target, policy)
        seed = options.seed if options.jitter else None
        outcomes[policy] = simulate(setup, target, workload, objectives, seed=seed, tenants=tenants, admission=applied)
        _note_speed(policy, outcomes[policy], time.perf_counter() - began)
    _tell(options, outcomes, target)
    return 0


def engine_setup(scheduler: SimulatedSchedulerConfig, cache: CacheConfig, target: Target, policy: str) -> EngineSetup:
    """The configuration a server would have, with those arguments that this policy has; the predictor is the
    simulation's own.
    """
    policies = installed_policies()
    plain = {f.name: getattr(scheduler, f.name) for f in fields(SchedulerConfig) if f.name != "predictor"}
    known = parameters_of(policies[policy])
    plain |= {"policy": policy, "policy_args": {k: v for k, v in scheduler.policy_args.items() if k in known}}
    return EngineSetup(
        scheduler=SchedulerConfig(**plain).settled(target.token_budget),
        num_blocks=target.num_blocks(cache, scheduler.max_num_seqs),
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        predictor=scheduler.predictor,
        policies=policies,
    )


def simulate(
    setup: EngineSetup,
    target: Target,
    workload: Workload,
    objectives: Objectives,
    *,
    seed: int | None,
    tenants: Mapping[str, Tenant] | None = None,
    admission: AdmissionConfig | None = None,
) -> Results:
    """`seed` of the jitter; None has none. `tenants` in place of the workload's own. Without `admission` everybody gets
    in whom no limit keeps out. Raises ConfigError for a request of none of the tenants given.
    """
    arrivals = workload.arrivals() if tenants is None else of_known_tenants(workload.arrivals(), tenants)
    simulation = Simulation(
        setup,
        target.cost_model,
        Results(objectives, target.edge),
        jitter=None if seed is None else Jitter(target.cost_model, Random(seed)),
        tenants=workload.tenants if tenants is None else tenants,
        admission=None if admission is None else admission_of(admission, setup.scheduler),
    )
    return simulation.run(arrivals)


def _admission(options: SimulateOptions, admission: AdmissionConfig) -> AdmissionConfig | None:
    if options.admission:
        return admission
    for field in fields(admission):
        if getattr(admission, field.name) != getattr(AdmissionConfig(), field.name):
            raise UsageError(f"--{field.name.replace('_', '-')} is for --admission, which was not given; add it")
    return None


def _policies(names: str, known: list[str]) -> list[str]:
    policies = [name.strip() for name in names.split(",") if name.strip()]
    for name in policies:
        _known("--policy", name, known)
    if not policies:
        raise UsageError("--policy names none; give one or more of " + ", ".join(known))
    return list(dict.fromkeys(policies))


def _known(flag: str, name: str, choices: list[str]) -> None:
    if name not in choices:
        hint = did_you_mean(name, choices)
        raise UsageError(f"{flag} is {name!r}{hint}; choose from {', '.join(sorted(choices))}")


def _note_speed(policy: str, results: Results, wall_s: float) -> None:
    total = results.total
    note(
        f"{policy}: {total.num_finished + total.num_failed:,} requests, {results.num_row_steps:,} request-steps, "
        f"{results.duration_s:,.1f} s simulated in {wall_s:.1f} s"
    )


def _tell(options: SimulateOptions, outcomes: dict[str, Results], target: Target) -> None:
    if options.report is not None:
        draw = html_report if options.report.endswith(".html") else svg_report
        Path(options.report).write_text(draw(outcomes, f"{options.workload}, {target.label}"), encoding="utf-8")
        note(f"report: {options.report}")
    figures = {policy: results.to_json() for policy, results in outcomes.items()}
    if options.json == "-":
        print(json.dumps(figures, indent=1))
        return
    if options.json is not None:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(table(figures))
