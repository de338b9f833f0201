"""Session of `simulate`: one simulation for each policy, or for each balance of a fleet, then the report."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from maitred.cli.console import note
from maitred.cli.flags import UsageError
from maitred.cli.simulate.sources import Target, find_target, read_workload
from maitred.cli.simulate.table import nothing_waited, table
from maitred.cli.simulate.tensors import (
    NO_LANGUAGE_MODEL,
    TensorWork,
    figures_of,
    note_tensor_speed,
    read_tensor_work,
    tensor_table,
)
from maitred.cli.simulate.workers import WorkersAsked, workers_of
from maitred.config import AdmissionConfig, CacheConfig, SchedulerConfig
from maitred.config.bounds import Bounds
from maitred.core.errors import ConfigError, did_you_mean
from maitred.core.objectives import parse_slo
from maitred.engine.installed import installed_policies
from maitred.fleet.autoscale import AutoscaleConfig, Autoscaler
from maitred.fleet.config import BALANCES, FleetConfig
from maitred.gate.admission import AdmissionController, admission_of
from maitred.policy.parameters import parameters_of
from maitred.policy.predictor import PREDICTORS
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet import FleetSimulation
from maitred.sim.fleet_setup import FleetSetup, ReplicaSetup
from maitred.sim.jitter import Jitter
from maitred.sim.report import html_report, svg_report
from maitred.sim.results import Objectives, Results
from maitred.sim.simulator import Simulation
from maitred.sim.workload import Arrival, Workload, of_known_tenants
from maitred.storage.key_files import read_tenant_file
from maitred.tenancy.tenant import Tenant

if TYPE_CHECKING:
    from maitred.cli.simulate.options import (
        SimulatedFleetOptions,
        SimulatedSchedulerConfig,
        SimulatedTensorOptions,
        SimulatedWorkerOptions,
        SimulateOptions,
    )

SetupOf = Callable[[Target], EngineSetup]
MAX_REPLICAS = 10_000


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulation as its flags ask for it."""

    options: SimulateOptions
    scheduler: SimulatedSchedulerConfig
    fleet: SimulatedFleetOptions
    workers: SimulatedWorkerOptions
    admission: AdmissionConfig
    cache: CacheConfig
    tensors: SimulatedTensorOptions

    @property
    def source(self) -> str:
        return self.options.workload or self.options.trace

    @property
    def seed(self) -> int | None:
        """None has no jitter."""
        return self.options.seed if self.options.jitter else None


class Inputs(NamedTuple):
    """Inputs that all compared runs have in common."""

    workload: Workload
    objectives: Objectives
    seed: int | None  # of the jitter; None has none
    tenants: Mapping[str, Tenant] | None = None  # in place of the workload's own
    admission: AdmissionConfig | None = None  # None admits all that no limit keeps out
    tensors: TensorWork | None = None

    def arrivals(self) -> Iterator[Arrival]:
        """Raises ConfigError for a request of none of the tenants given."""
        arrivals = self.workload.arrivals()
        return arrivals if self.tenants is None else of_known_tenants(arrivals, self.tenants)

    @property
    def terms(self) -> Mapping[str, Tenant]:
        return self.workload.tenants if self.tenants is None else self.tenants

    def controller(self, scheduler: SchedulerConfig) -> AdmissionController | None:
        return None if self.admission is None else admission_of(self.admission, scheduler)


def run_simulations(asked: Simulated) -> int:
    options, scheduler = asked.options, asked.scheduler
    applied = _admission(options, asked.admission)
    workers = workers_of(asked.workers, asked.fleet, options.device)
    bounds = bounds_of(asked.fleet, workers is not None)
    if workers is not None:
        bounds = Bounds(len(workers.workers), len(workers.workers))
    policies, balances = _policies(scheduler), _balances(asked.fleet)
    tensors = read_tensor_work(asked.tensors, asked.source, options, asked.seed)
    if tensors is not None and bounds is not None:
        raise UsageError("--model-repository is of one engine; drop --fleet and the workers")
    if tensors is not None and (options.model == NO_LANGUAGE_MODEL or not tensors.trace.chats):
        return _run_tensors_alone(asked, policies, tensors)
    if len(policies) > 1 and len(balances) > 1:
        raise UsageError("--policy and --balance both name several; compare one of them at a time")
    targets = _targets(asked, bounds, workers)
    inputs = Inputs(
        workload=read_workload(
            asked.source, options.rate_scale, unit=options.trace_unit, block_tokens=options.trace_block_size
        )
        if tensors is None
        else tensors.chats,
        objectives=Objectives(**{f"{name}_s": bound for name, bound in map(parse_slo, options.slo)}),
        seed=asked.seed,
        tenants=None if options.tenants is None else read_tenant_file(Path(options.tenants)).tenants,
        admission=applied,
        tensors=tensors,
    )
    label = _label(targets, bounds, workers)
    note(f"{label}; {asked.source}, policies {', '.join(policies)}")
    for doubt in dict.fromkeys(target.doubt for target in targets if target.doubt is not None):
        note(f"warning: {doubt}")
    figures: dict[str, dict[str, Any]] = {}
    outcomes: dict[str, Results] = {}
    for policy in policies:
        for balance in balances if bounds is not None else [""]:
            name = policy if bounds is None or len(policies) > 1 else balance
            if workers is not None and len(policies) == len(balances) == 1:
                name = workers.options.handover
            began = time.perf_counter()
            if bounds is None:
                results, figures[name] = _simulate_engine(engine_setup(asked, targets[0], policy), targets[0], inputs)
            else:
                results, figures[name] = _simulate_fleet(asked, bounds, workers, targets, inputs, policy, balance)
            outcomes[name] = results
            _note_speed(name, results, time.perf_counter() - began)
    _tell(asked, outcomes, figures, label)
    return 0


def _run_tensors_alone(asked: Simulated, policies: list[str], tensors: TensorWork) -> int:
    """Simulate tensor models without a language model."""
    from maitred.tensor.lone import lone_scheduler

    if tensors.trace.chats:
        raise UsageError(f"{asked.source} has requests for a language model too, and --model is none; give one")
    figures: dict[str, dict[str, Any]] = {}
    for policy in policies:
        began = time.perf_counter()
        models = tensors.beside()(lone_scheduler(_scheduler_config(asked, policy))).run()
        note_tensor_speed(policy, models, time.perf_counter() - began)
        figures[policy] = {"tensor": figures_of(models)}
    _tell(asked, {}, figures, "tensor models alone")
    return 0


def _targets(asked: Simulated, bounds: Bounds | None, workers: WorkersAsked | None) -> list[Target]:
    """A target for each replica; one without a fleet."""
    device = asked.options.device
    if workers is not None:
        devices = workers.devices
    else:
        devices = [device] if bounds is None else devices_of(asked.fleet, bounds, device)
    found = {name: find_target(name, asked.options.model) for name in dict.fromkeys(devices)}
    return [found[name] for name in devices]


def _label(targets: list[Target], bounds: Bounds | None, workers: WorkersAsked | None) -> str:
    if bounds is None:
        return targets[0].label
    roles = [""] * len(targets) if workers is None else [f"{worker.role.value} " for worker in workers.workers]
    counts = Counter(f"{role}{target.label}" for role, target in zip(roles, targets, strict=True))
    at_most = "up to " if bounds.low < bounds.high else ""
    return ", ".join(f"{at_most}{count} x {label}" for label, count in counts.items())


def _simulate_fleet(
    asked: Simulated,
    bounds: Bounds,
    workers: WorkersAsked | None,
    targets: list[Target],
    inputs: Inputs,
    policy: str,
    balance: str,
) -> tuple[Results, dict[str, Any]]:
    def setup_of(target: Target) -> EngineSetup:
        return engine_setup(asked, target, policy)

    queue = setup_of(targets[0]).scheduler
    setup = fleet_setup(
        asked.fleet,
        bounds,
        targets,
        balance=balance,
        scheduler=queue,
        setup_of=setup_of,
        ttft_objective_s=inputs.objectives.ttft_s,
    )
    simulation = FleetSimulation(
        setup if workers is None else workers.setup(setup, targets),
        Results(inputs.objectives, targets[0].edge),
        seed=inputs.seed,
        tenants=inputs.terms,
        admission=inputs.controller(queue),
    )
    results = simulation.run(inputs.arrivals())
    return results, simulation.to_json()


def engine_setup(asked: Simulated, target: Target, policy: str) -> EngineSetup:
    """The configuration a server would have."""
    scheduler, cache = asked.scheduler, asked.cache
    return EngineSetup(
        scheduler=_scheduler_config(asked, policy).settled(target.token_budget),
        num_blocks=target.num_blocks(cache, scheduler.max_num_seqs),
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        predictor=scheduler.predictor,
        policies=installed_policies(),
        acceptance=asked.options.acceptance,
        num_speculative_tokens=asked.options.num_speculative_tokens,
    )


def _scheduler_config(asked: Simulated, policy: str) -> SchedulerConfig:
    """Config with those arguments that this policy has; the predictor is the simulation's own."""
    scheduler, known = asked.scheduler, parameters_of(installed_policies()[policy])
    plain = {f.name: getattr(scheduler, f.name) for f in fields(SchedulerConfig) if f.name != "predictor"}
    plain |= {"policy": policy, "policy_args": {k: v for k, v in scheduler.policy_args.items() if k in known}}
    return SchedulerConfig(**plain)


def _simulate_engine(setup: EngineSetup, target: Target, inputs: Inputs) -> tuple[Results, dict[str, Any]]:
    simulation = _simulation(setup, target, inputs)
    results = simulation.run(inputs.arrivals())
    tensors = {} if simulation.tensors is None else {"tensor": figures_of(simulation.tensors.figures)}
    return results, results.to_json() | tensors


def _simulation(setup: EngineSetup, target: Target, inputs: Inputs) -> Simulation:
    return Simulation(
        setup,
        target.cost_model,
        Results(inputs.objectives, target.edge),
        jitter=None if inputs.seed is None else Jitter(target.cost_model, Random(inputs.seed)),
        tenants=inputs.terms,
        admission=inputs.controller(setup.scheduler),
        tensors=None if inputs.tensors is None else inputs.tensors.beside(),
    )


def _admission(options: SimulateOptions, admission: AdmissionConfig) -> AdmissionConfig | None:
    if options.admission:
        return admission
    for field in fields(admission):
        if getattr(admission, field.name) != getattr(AdmissionConfig(), field.name):
            raise UsageError(f"--{field.name.replace('_', '-')} is for --admission, which was not given; add it")
    return None


def _policies(scheduler: SimulatedSchedulerConfig) -> list[str]:
    policies = _names("--policy", scheduler.policy, list(installed_policies()))
    _known("--predictor", scheduler.predictor, list(PREDICTORS))
    choices = sorted({argument for policy in policies for argument in parameters_of(installed_policies()[policy])})
    for argument in scheduler.policy_args:
        _known("--policy-arg", argument, choices)
    return policies


def _balances(fleet: SimulatedFleetOptions) -> list[str]:
    return _names("--balance", fleet.balance, list(BALANCES))


def _names(flag: str, listed: str, known: list[str]) -> list[str]:
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for name in names:
        _known(flag, name, known)
    if not names:
        raise UsageError(f"{flag} names none; give one or more of " + ", ".join(known))
    return list(dict.fromkeys(names))


def _known(flag: str, name: str, choices: list[str]) -> None:
    if name not in choices:
        hint = did_you_mean(name, choices)
        raise UsageError(f"{flag} is {name!r}{hint}; choose from {', '.join(sorted(choices))}")


def _note_speed(name: str, results: Results, wall_s: float) -> None:
    total = results.total
    note(
        f"{name}: {total.num_finished + total.num_failed:,} requests, {results.num_row_steps:,} request-steps, "
        f"{results.duration_s:,.1f} s simulated in {wall_s:.1f} s"
    )


def _tell(asked: Simulated, outcomes: dict[str, Results], figures: dict[str, dict[str, Any]], label: str) -> None:
    options = asked.options
    if options.report is not None:
        if not outcomes:
            raise UsageError("--report draws requests of a language model, and there is none; drop it")
        draw = html_report if options.report.endswith(".html") else svg_report
        Path(options.report).write_text(draw(outcomes, f"{asked.source}, {label}"), encoding="utf-8")
        note(f"report: {options.report}")
    if options.json == "-":
        print(json.dumps(figures, indent=1))
        return
    if options.json is not None:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if outcomes:
        print(table(figures))
        if hint := nothing_waited(figures, options.rate_scale):
            print(hint)
    if any("tensor" in whole for whole in figures.values()):
        print(tensor_table(figures))


def bounds_of(options: SimulatedFleetOptions, has_workers: bool) -> Bounds | None:
    """None without --fleet. Raises UsageError for flags that need it, and for numbers that cannot be."""
    if options.fleet is None:
        if not has_workers:
            _refuse_without_fleet(options)
        return None
    try:
        bounds = Bounds.parse(options.fleet)
    except ConfigError as error:
        raise UsageError(f"--fleet {error}") from None
    if bounds.high > MAX_REPLICAS:
        raise UsageError(f"--fleet is {options.fleet!r}; at most {MAX_REPLICAS:,} replicas are simulated")
    return bounds


def _refuse_without_fleet(options: SimulatedFleetOptions) -> None:
    defaults = type(options)()
    for field in fields(options):
        if getattr(options, field.name) != getattr(defaults, field.name):
            raise UsageError(
                f"--{field.name.replace('_', '-')} is for --fleet, which was not given; add --fleet N|MIN:MAX"
            )


def devices_of(options: SimulatedFleetOptions, bounds: Bounds, device: str | None) -> list[str | None]:
    """A device for each replica; None is what --device's default is."""
    if options.fleet_devices is None:
        return [device] * bounds.high
    if device is not None:
        raise UsageError("--device and --fleet-devices both say what the replicas are; give one of them")
    devices: list[str | None] = []
    for word in options.fleet_devices.split(","):
        name, colon, count = word.strip().rpartition(":")
        if not name or not colon or not count.isdecimal() or int(count) < 1:
            raise UsageError(f"--fleet-devices has {word.strip()!r}; write NAME:COUNT, as in h100:4,a100:4")
        devices += [name] * min(int(count), MAX_REPLICAS)
    if len(devices) != bounds.high:
        raise UsageError(
            f"--fleet-devices names {len(devices)} devices, --fleet {options.fleet} may have {bounds.high} replicas; "
            "name one for each"
        )
    return devices


def fleet_setup(
    options: SimulatedFleetOptions,
    bounds: Bounds,
    targets: list[Target],
    *,
    balance: str,
    scheduler: SchedulerConfig,
    setup_of: SetupOf,
    ttft_objective_s: float | None,
) -> FleetSetup:
    """`targets` are the replicas', `scheduler` is the router's queue."""
    distinct = {id(target): target for target in targets}
    made = {key: ReplicaSetup(engine=setup_of(each), cost_model=each.cost_model) for key, each in distinct.items()}
    launched = bounds.low < bounds.high or not bounds.low
    plain = FleetSetup(
        config=FleetConfig(balance=balance, max_load_ratio=options.max_load_ratio),
        scheduler=scheduler,
        replicas=[made[id(target)] for target in targets],
        cold_start_s=options.cold_start_s,
        wake_s=options.wake_s,
        num_asleep=options.asleep,
    )
    return _autoscaled(plain, bounds, options.idle_s, ttft_objective_s) if launched else plain


def _autoscaled(setup: FleetSetup, bounds: Bounds, idle_s: float, ttft_objective_s: float | None) -> FleetSetup:
    config = AutoscaleConfig(idle_s=idle_s, ttft_objective_s=ttft_objective_s)
    return replace(setup, low=bounds.low, autoscale=Autoscaler(config))
