"""Simulations for `maitred simulate`, one for each policy, or each balance of a fleet, and their figures as a table."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import compress, product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from maitred.cli import simulate
from maitred.cli.command import Options
from maitred.cli.console import aligned, note, seconds_text
from maitred.cli.flags import UsageError, check_known, names_in
from maitred.cli.simulate_inputs import TensorWork, find_target, read_tensor_work, read_workload, seed_of
from maitred.config import AdmissionConfig, CacheConfig, SchedulerConfig
from maitred.config.bounds import Bounds
from maitred.core.errors import ConfigError
from maitred.engine.installed import installed_policies
from maitred.fleet.config import BALANCES, FleetConfig
from maitred.fleet.disagg import HandoverConfig, Role
from maitred.fleet.sizing import AutoscaleConfig, Autoscaler
from maitred.fleet.swapping import FleetModel, ModelSet
from maitred.gate.admission import admission_of
from maitred.policy.parameters import parameters_of
from maitred.policy.predictor import PREDICTORS
from maitred.sim.baselines import BATCHINGS, KV_LAYOUTS, Baseline
from maitred.sim.devices import SimulatedTarget
from maitred.sim.engine import EngineSetup, Simulation
from maitred.sim.fleet import FleetSetup, FleetSimulation, ReplicaSetup, facts_of
from maitred.sim.links import SimulatedDisk, SimulatedLink, link_named
from maitred.sim.profile import Jitter
from maitred.sim.report import column
from maitred.sim.results import Objectives, SimulatedResults
from maitred.sim.synthetic import ModelSpec, SyntheticWorkload
from maitred.sim.tensors import ModelFigures
from maitred.sim.workload import Arrival, Workload, of_known_tenants
from maitred.storage.key_files import read_tenant_file
from maitred.tenancy.tenant import Tenant

COLUMNS: tuple[tuple[str, str, str], ...] = (  # heading, part, figure
    ("ttft mean", "ttft_s", "mean"),
    ("p50", "ttft_s", "p50"),
    ("p99", "ttft_s", "p99"),
    ("max", "ttft_s", "max"),
    ("itl p50", "itl_s", "p50"),
    ("p99", "itl_s", "p99"),
    ("e2e mean", "e2e_s", "mean"),
    ("p99", "e2e_s", "p99"),
    ("queue mean", "queue_s", "mean"),
    ("p99", "queue_s", "p99"),
    ("max", "queue_s", "max"),
)


WAITING_SHARE = 0.05  # of the time from arrival to end, in the mean; below it rows differ by chance

MORE_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (  # heading, figure, how it is shown
    ("hits", "prefix_hit_ratio", lambda share: f"{share:.1%}"),
    ("max/mean", "load_max_over_mean", lambda ratio: "-" if ratio is None else f"{ratio:.2f}"),
    ("replica time", "replica_s", lambda seconds: f"{seconds:,.0f}s"),
    ("starts", "num_starts", str),
    ("rows", "mean_rows", lambda rows: f"{rows:.1f}"),
    ("kv waste", "kv_waste", lambda share: f"{share:.1%}"),
)


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """One row a policy; below it one a tenant where there are several."""
    more = [each for each in MORE_COLUMNS if all(each[1] in whole for whole in figures.values())]
    headings = [heading for heading, *_ in COLUMNS], [heading for heading, *_ in more]
    rows = [["policy", *headings[0], *["good/s", "slo", "jain", "cached", "preempted", "busy", "failed"], *headings[1]]]
    for policy, whole in figures.items():
        rows.append([policy, *_cells(whole), *(show(whole[name]) for _, name, show in more)])
        tenants = whole["tenants"] if len(whole["tenants"]) > 1 else {}
        rows += [[f"  {name}", *_cells(part), *[""] * len(more)] for name, part in tenants.items()]
    return aligned(rows)


def nothing_waited(figures: Mapping[str, Mapping[str, Any]], rate_scale: float) -> str:
    """A line to end a table with whose rows are equal because no policy had a choice to make; else empty."""
    shares = [whole["queue_s"]["mean"] / whole["e2e_s"]["mean"] for whole in figures.values() if whole["e2e_s"]["mean"]]
    if not shares or max(shares) >= WAITING_SHARE:
        return ""
    return (
        f"Almost nothing waited: {max(shares):.1%} of a request's time was in the queue, so the order of service "
        f"decided nothing. Try --rate-scale {4 * rate_scale:g}, or fewer slots by --max-num-seqs."
    )


def _cells(part: Mapping[str, Any]) -> list[str]:
    times = [seconds_text(part[name][figure]) for _, name, figure in COLUMNS]
    return [
        *times,
        f"{part['goodput_rps']:.2f}",
        f"{part['slo_attainment']:.1%}",
        f"{part['jain']:.3f}",
        f"{part['num_cached_tokens']:,}",
        f"{part['num_preemptions']:,}",
        f"{part['utilisation']:.0%}" if "utilisation" in part else "",
        _failed(part["failed"]),
    ]


def _failed(failures: Mapping[str, int]) -> str:
    """`12 (8 objective, 4 concurrency)`: how many of which cause."""
    if not failures:
        return "0"
    causes = ", ".join(f"{count} {reason}" for reason, count in failures.items())
    return f"{sum(failures.values())} ({causes})"


def tensor_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with a row for each model of each policy."""
    rows = [["policy", "model", "finished", "p50", "p90", "p99", "mean batch", "requests/s", "failed"]]
    for policy, whole in figures.items():
        for name, part in whole["tensor"].items():
            times = [seconds_text(part["latency_s"][figure]) for figure in ("p50", "p90", "p99")]
            rates = ["-" if part[key] is None else f"{part[key]:,.2f}" for key in ("mean_batch", "throughput_rps")]
            failed = ", ".join(f"{count} {reason}" for reason, count in part["failed"].items()) or "0"
            rows.append([policy, name, f"{part['num_finished']:,}", *times, *rates, failed])
    return aligned(rows)


MAX_WORKERS, MAX_REPLICAS = 1000, 10_000
ANY_ROLE = (Role.PREFILL, Role.DECODE, Role.MIXED)
OF_MODELS = ("--models-memory-bytes", "--swap-wait-s")
NO_LANGUAGE_MODEL = "none"


class Members(NamedTuple):
    """Replicas of a fleet, or workers, as the flags ask for them."""

    bounds: Bounds  # on how many there are
    devices: Sequence[str | None]  # of each; None is --device's default
    roles: Sequence[Role] = ()  # of each worker
    link: SimulatedLink | None = None  # between workers


class Inputs(NamedTuple):
    """Inputs that all compared runs have in common."""

    given: Options
    workload: Workload
    objectives: Objectives
    targets: list[SimulatedTarget]  # of each replica; one without a fleet
    members: Members | None
    tenants: Mapping[str, Tenant] | None = None  # in place of the workload's own
    admission: AdmissionConfig | None = None  # None admits all that no limit keeps out
    tensors: TensorWork | None = None

    @property
    def seed(self) -> int | None:
        """Seed of the jitter; None has none."""
        return seed_of(self.given[simulate.SimulateOptions])

    @property
    def models(self) -> Mapping[str, ModelSpec]:
        """The workload's own; most have none."""
        return self.workload.spec.models if isinstance(self.workload, SyntheticWorkload) else {}

    def arrivals(self) -> Iterator[Arrival]:
        """Raises ConfigError for a request of none of the tenants given."""
        arrivals = self.workload.arrivals()
        return arrivals if self.tenants is None else of_known_tenants(arrivals, self.tenants)

    def of_run(self, scheduler: SchedulerConfig) -> tuple[SimulatedResults, dict[str, Any]]:
        """Empty results of one run, and whose requests come, through which gate."""
        edge = self.targets[0].edge
        results = SimulatedResults(self.objectives, edge if self.seed is not None else replace(edge, jitter=()))
        tenants = self.workload.tenants if self.tenants is None else self.tenants
        admission = None if self.admission is None else admission_of(self.admission, scheduler)
        return results, {"tenants": tenants, "admission": admission}


def run_simulations(given: Options) -> int:
    options, baselines = given[simulate.SimulateOptions], given[simulate.SimulatedBaselineOptions]
    source = options.workload or options.trace
    if not options.admission:
        _refuse(given[AdmissionConfig], "is for --admission, which was not given; add it")
    members, policies = _members(given), _policies(given[simulate.SimulatedSchedulerConfig])
    balances = names_in("--balance", given[simulate.SimulatedFleetOptions].balance, BALANCES)
    tensors = read_tensor_work(given[simulate.SimulatedTensorOptions], source, options)
    if tensors is not None and members is not None:
        raise UsageError("--model-repository is of one engine; drop --fleet and the workers")
    if tensors is not None and (options.model == NO_LANGUAGE_MODEL or not tensors.trace.chats):
        return _run_tensors_alone(given, source, policies, tensors)
    if members is not None or tensors is not None or options.admission or options.acceptance is not None:
        flags = "--fleet, workers, --model-repository, --admission and --acceptance"
        _refuse(baselines, f"is of one engine; drop {flags}")
    if len(policies) > 1 and len(balances) > 1:
        raise UsageError("--policy and --balance both name several; compare one of them at a time")
    inputs = _inputs(given, source, members, tensors)
    label = _label(inputs)
    note(f"{label}; {source}, policies {', '.join(policies)}")
    for doubt in dict.fromkeys(target.doubt for target in inputs.targets if target.doubt is not None):
        note(f"warning: {doubt}")
    figures: dict[str, dict[str, Any]] = {}
    outcomes: dict[str, SimulatedResults] = {}
    for policy, balance in product(policies, balances if inputs.members is not None else [""]):
        name = policy if inputs.members is None or len(policies) > 1 else balance
        if inputs.members is not None and inputs.members.roles and len(policies) == len(balances) == 1:
            name = given[simulate.SimulatedWorkerOptions].handover
        for words, baseline in _baselines(baselines).items():
            run = " ".join([name] * (len(policies) > 1 or not words) + [words] * bool(words))
            began = time.perf_counter()
            if inputs.members is None:
                outcomes[run], figures[run] = _simulate_engine(inputs, policy, baseline)
            else:
                outcomes[run], figures[run] = _simulate_fleet(inputs, inputs.members, policy, balance)
            _note_speed(run, outcomes[run], time.perf_counter() - began)
    _tell(options, source, outcomes, figures, label)
    return 0


def _run_tensors_alone(given: Options, source: str, policies: Sequence[str], tensors: TensorWork) -> int:
    """Simulate tensor models without a language model."""
    from maitred.scheduler.scheduler import lone_scheduler

    if tensors.trace.chats:
        raise UsageError(f"{source} has requests for a language model too, and --model is none; give one")
    figures: dict[str, dict[str, Any]] = {}
    for policy in policies:
        began = time.perf_counter()
        models = tensors.beside()(lone_scheduler(_scheduler_config(given, policy))).run()
        total = sum(each.latency_s.count for each in models.values())
        note(f"{policy}: {total:,} tensor requests in {time.perf_counter() - began:.1f} s")
        figures[policy] = {"tensor": _figures_of(models)}
    _tell(given[simulate.SimulateOptions], source, {}, figures, "tensor models alone")
    return 0


# ---- what the flags ask for


def _inputs(given: Options, source: str, members: Members | None, tensors: TensorWork | None) -> Inputs:
    options = given[simulate.SimulateOptions]
    devices = members.devices if members is not None else [options.device]
    found = {name: find_target(name, options.model) for name in dict.fromkeys(devices)}
    unit, size = options.trace_unit, options.trace_block_size
    inputs = Inputs(
        given=given,
        workload=read_workload(source, options.rate_scale, unit=unit, block_tokens=size)
        if tensors is None
        else tensors.chats,
        objectives=Objectives.parse(options.slo),
        targets=[found[name] for name in devices],
        members=members,
        tenants=None if options.tenants is None else read_tenant_file(Path(options.tenants)).tenants,
        admission=given[AdmissionConfig] if options.admission else None,
        tensors=tensors,
    )
    if not (num_models := len(inputs.models)):
        return inputs
    if members is not None or tensors is not None:
        raise UsageError("the workload has several models, each a replica of its own; drop --fleet and the like")
    each = Members(Bounds(num_models, num_models), [options.device] * num_models)
    return inputs._replace(members=each, targets=inputs.targets * num_models)


def _members(given: Options) -> Members | None:
    """None for one engine. Raises UsageError, in one line with the remedy."""
    fleet, device = given[simulate.SimulatedFleetOptions], given[simulate.SimulateOptions].device
    workers = given[simulate.SimulatedWorkerOptions]
    if _changed(workers):
        if fleet.fleet is not None or fleet.fleet_devices is not None:
            raise UsageError(
                "--fleet is for replicas that hand nothing over; for workers give --mixed-workers N instead"
            )
        roles = _roles(workers)
        devices = [getattr(workers, f"{role.value}_device") or device for role in roles]
        return Members(Bounds(len(roles), len(roles)), devices, roles, _link(workers))
    if fleet.fleet is None:
        _refuse(fleet, "is for --fleet, which was not given; add --fleet N|MIN:MAX", but=OF_MODELS)
        return None
    try:
        bounds = Bounds.parse(fleet.fleet)
    except ConfigError as error:
        raise UsageError(f"--fleet {error}") from None
    if bounds.high > MAX_REPLICAS:
        raise UsageError(f"--fleet is {fleet.fleet!r}; at most {MAX_REPLICAS:,} replicas are simulated")
    return Members(bounds, _devices(fleet, bounds, device))


def _roles(options: simulate.SimulatedWorkerOptions) -> list[Role]:
    """The role of each worker, role by role."""
    counts = {role: getattr(options, f"{role.value}_workers") for role in ANY_ROLE}
    for role, count in counts.items():
        if not 0 <= count <= MAX_WORKERS:
            raise UsageError(f"--{role.value}-workers is {count}; give from 0 to {MAX_WORKERS}")
    if not any(counts.values()):  # one engine may have a disk, too
        words = "is for workers, and none were given; add --prefill-workers 1 --decode-workers 1"
        _refuse(options, words, but=("--kv-disk-bytes",))
        counts[Role.MIXED] = 1
    if (alone := {role for role, count in counts.items() if count}) in ({Role.PREFILL}, {Role.DECODE}):
        (role,) = alone
        other = "decode" if role is Role.PREFILL else "prefill"
        raise UsageError(f"--{role.value}-workers are alone; add --{other}-workers N or --mixed-workers N")
    return [role for role, count in counts.items() for _ in range(count)]


def _link(options: simulate.SimulatedWorkerOptions) -> SimulatedLink | None:
    try:
        link = link_named(options.link)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    if link is None and options.handover == "always":
        raise UsageError("--handover always needs a link, and --link is none; give --link tcp, or --handover never")
    return link


def _devices(options: simulate.SimulatedFleetOptions, bounds: Bounds, device: str | None) -> list[str | None]:
    """A device for each replica."""
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


def _policies(scheduler: simulate.SimulatedSchedulerConfig) -> tuple[str, ...]:
    policies = names_in("--policy", scheduler.policy, installed_policies())
    check_known("--predictor", scheduler.predictor, PREDICTORS)
    choices = sorted({argument for policy in policies for argument in parameters_of(installed_policies()[policy])})
    for argument in scheduler.policy_args:
        check_known("--policy-arg", argument, choices)
    return policies


def _baselines(options: simulate.SimulatedBaselineOptions) -> dict[str, Baseline | None]:
    """Baselines to compare, by what tells them apart; none is what is served. Raises UsageError."""
    if not _changed(options):
        return {"": None}
    batchings = names_in("--batching", options.batching, BATCHINGS)
    layouts = names_in("--kv-layout", options.kv_layout, KV_LAYOUTS)
    apart = len(batchings) > 1, len(layouts) > 1
    return {
        " ".join(compress(pair, apart)): Baseline(
            batching=pair[0], batch_delay_s=options.batch_delay_s, kv_layout=pair[1]
        )
        for pair in product(batchings, layouts)
    }


def _changed(options: Any) -> list[str]:
    """Flags that are not at their defaults."""
    plain = type(options)()
    return [
        f"--{field.name.replace('_', '-')}"
        for field in fields(options)
        if getattr(options, field.name) != getattr(plain, field.name)
    ]


def _refuse(options: Any, why: str, but: Sequence[str] = ()) -> None:
    """Raises UsageError for the first flag that was given."""
    for flag in _changed(options):
        if flag not in but:
            raise UsageError(f"{flag} {why}")


# ---- the runs


def _simulate_engine(inputs: Inputs, policy: str, baseline: Baseline | None) -> tuple[SimulatedResults, dict[str, Any]]:
    target, tensors, seed = inputs.targets[0], inputs.tensors, inputs.seed
    setup = replace(_engine_setup(inputs.given, target, policy, whole=baseline is not None), baseline=baseline)
    results, more = inputs.of_run(setup.scheduler)
    jitter = None if seed is None else Jitter(target.cost_model, Random(seed))
    beside = None if tensors is None else tensors.beside()
    simulation = Simulation(setup, target.cost_model, results, jitter=jitter, tensors=beside, **more)
    figures = simulation.run(inputs.arrivals()).to_json()
    if simulation.tensors is not None:
        figures["tensor"] = _figures_of(simulation.tensors.figures)
    if simulation.kv_waste is not None:
        figures["mean_rows"] = results.num_row_steps / max(1, results.num_steps)
        figures["kv_waste"] = simulation.kv_waste.share
    return results, figures


def _simulate_fleet(
    inputs: Inputs, members: Members, policy: str, balance: str
) -> tuple[SimulatedResults, dict[str, Any]]:
    setup = _fleet_setup(inputs, members, policy, balance)
    results, more = inputs.of_run(setup.scheduler)
    simulation = FleetSimulation(setup, results, seed=inputs.seed, **more)
    simulation.run(inputs.arrivals())
    return results, simulation.to_json()


def _fleet_setup(inputs: Inputs, members: Members, policy: str, balance: str) -> FleetSetup:
    options, targets = inputs.given[simulate.SimulatedFleetOptions], inputs.targets
    made = {
        key: ReplicaSetup(
            engine=_engine_setup(inputs.given, each, policy, whole=bool(members.roles)), cost_model=each.cost_model
        )
        for key, each in {id(target): target for target in targets}.items()
    }
    replicas = [made[id(target)] for target in targets]
    setup = FleetSetup(
        config=FleetConfig(balance=balance, max_load_ratio=options.max_load_ratio),
        scheduler=replicas[0].engine.scheduler,
        replicas=replicas,
        cold_start_s=options.cold_start_s,
        wake_s=options.wake_s,
        num_asleep=options.asleep,
    )
    if members.roles:
        return _with_workers(setup, inputs.given[simulate.SimulatedWorkerOptions], members, targets)
    if inputs.models:
        return _with_models(setup, options, inputs.models)
    low, high = members.bounds
    if low == high:
        return setup
    scaling = AutoscaleConfig(idle_s=options.idle_s, ttft_objective_s=inputs.objectives.ttft_s)
    return replace(setup, low=low, autoscale=Autoscaler(scaling))


def _with_workers(
    setup: FleetSetup,
    options: simulate.SimulatedWorkerOptions,
    members: Members,
    targets: Sequence[SimulatedTarget],
) -> FleetSetup:
    """The setup with a role for each of its replicas."""
    replicas = [
        replace(one, worker=facts_of(role, target, one.engine, members.link))
        for one, role, target in zip(setup.replicas, members.roles, targets, strict=True)
    ]
    handover, num_bytes, facts = HandoverConfig(handover=options.handover), options.kv_disk_bytes, replicas[0].worker
    disk = None
    if num_bytes is not None and facts is not None:
        block_bytes = facts.bytes_per_token * facts.block_size
        if num_bytes < block_bytes:
            few = f"--kv-disk-bytes is {num_bytes:,}, a KV block has {block_bytes:,.0f}"
            raise UsageError(f"{few}; give at least as many")
        disk = SimulatedDisk(int(num_bytes / block_bytes))
    return replace(setup, handover=handover, replicas=replicas, link=members.link, disk=disk)


def _with_models(
    setup: FleetSetup, options: simulate.SimulatedFleetOptions, models: Mapping[str, ModelSpec]
) -> FleetSetup:
    """The setup with several models in place of alike replicas."""
    found = tuple(FleetModel(name=name, memory_bytes=model.memory_bytes) for name, model in models.items())
    memory_bytes = options.models_memory_bytes
    several = ModelSet(found, sum(m.memory_bytes for m in found) if memory_bytes is None else memory_bytes)
    config = replace(setup.config, swap_wait_s=options.swap_wait_s)
    load_s = {name: model.load_s for name, model in models.items()}
    return replace(setup, config=config, several=several, load_s=load_s)


def _engine_setup(given: Options, target: SimulatedTarget, policy: str, *, whole: bool) -> EngineSetup:
    """The configuration a server would have; blocks are `whole` between workers, which exchange them, and in
    comparisons with baselines.
    """
    options, cache, groups = given[simulate.SimulateOptions], given[CacheConfig], None if whole else target.groups
    settled = _scheduler_config(given, policy).settled(target.token_budget)
    num_seqs, num_pages = settled.max_num_seqs, 0
    num_blocks = target.num_blocks(cache, num_seqs)
    if groups is not None:
        num_pages = target.num_pages(cache, num_seqs, settled.token_budget)
        num_blocks = groups.num_blocks(num_pages, target.context)
    return EngineSetup(
        scheduler=settled,
        groups=groups,
        num_pages=num_pages,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        predictor=given[simulate.SimulatedSchedulerConfig].predictor,
        policies=installed_policies(),
        acceptance=options.acceptance,
        num_speculative_tokens=options.num_speculative_tokens,
        num_state_slots=target.num_state_slots(cache, num_seqs),
    )


def _scheduler_config(given: Options, policy: str) -> SchedulerConfig:
    """Config with those arguments that this policy has; the predictor is the simulation's own."""
    scheduler, known = given[simulate.SimulatedSchedulerConfig], parameters_of(installed_policies()[policy])
    plain = {f.name: getattr(scheduler, f.name) for f in fields(SchedulerConfig) if f.name != "predictor"}
    plain |= {"policy": policy, "policy_args": {k: v for k, v in scheduler.policy_args.items() if k in known}}
    return SchedulerConfig(**plain)


def _figures_of(models: Mapping[str, ModelFigures]) -> dict[str, Any]:
    return {name: figures.to_json() for name, figures in models.items()}


# ---- what is told


def _label(inputs: Inputs) -> str:
    targets, members = inputs.targets, inputs.members
    if members is None:
        return targets[0].label
    roles = [f"{role.value} " for role in members.roles] or [""] * len(targets)
    counts = Counter(f"{role}{target.label}" for role, target in zip(roles, targets, strict=True))
    at_most = "up to " if members.bounds.low < members.bounds.high else ""
    return ", ".join(f"{at_most}{count} x {label}" for label, count in counts.items())


def _note_speed(name: str, results: SimulatedResults, wall_s: float) -> None:
    total = results.total
    note(
        f"{name}: {total.num_finished + total.num_failed:,} requests, {results.num_row_steps:,} request-steps, "
        f"{results.duration_s:,.1f} s simulated in {wall_s:.1f} s"
    )


def _tell(
    options: simulate.SimulateOptions,
    source: str,
    outcomes: dict[str, SimulatedResults],
    figures: dict[str, dict[str, Any]],
    label: str,
) -> None:
    if options.report is not None:
        if not outcomes:
            raise UsageError("--report draws requests of a language model, and there is none; drop it")
        columns = [
            column(name, figures[name], run.total, queue=run.queue_length.points(), tickets=run.tickets.kept)
            for name, run in outcomes.items()
        ]
        write_report(options.report, "simulation", f"{source}, {label}", {"columns": columns, "baseline": 0})
    if write_json(options.json, figures):
        return
    if outcomes:
        print(table(figures))
        if hint := nothing_waited(figures, options.rate_scale):
            print(hint)
    if any("tensor" in whole for whole in figures.values()):
        print(tensor_table(figures))


def write_report(path: str, kind: str, source: str, contents: Mapping[str, Any]) -> None:
    from maitred.api.ops.page import report_page

    Path(path).write_text(report_page({"kind": kind, "source": source, **contents}), encoding="utf-8")
    note(f"report: {path}")


def write_json(path: str | None, figures: Mapping[str, Any]) -> bool:
    """Write figures to a file; whether they went to standard output instead, which then has nothing else."""
    text = json.dumps(figures, indent=1)
    if path == "-":
        print(text)
    elif path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")
    return path == "-"
