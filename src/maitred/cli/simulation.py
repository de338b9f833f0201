"""Simulations for `maitred simulate`, one for each policy, or each balance of a fleet, and their figures as a table."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import compress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from maitred.cli import simulate
from maitred.cli.command import Options
from maitred.cli.console import aligned, note, seconds_text
from maitred.cli.flags import UsageError
from maitred.cli.simulate_inputs import find_target, read_unpacked, read_workload
from maitred.config import AdmissionConfig, CacheConfig, SchedulerConfig
from maitred.config.bounds import Bounds
from maitred.core.errors import CheckpointError, ConfigError, did_you_mean
from maitred.core.objectives import parse_slo
from maitred.engine.installed import installed_policies
from maitred.fleet.config import BALANCES, FleetConfig
from maitred.fleet.disagg import HandoverConfig, Role, WorkerFacts
from maitred.fleet.sizing import AutoscaleConfig, Autoscaler
from maitred.fleet.swapping import FleetModel, ModelSet
from maitred.gate.admission import AdmissionController, admission_of
from maitred.policy.parameters import parameters_of
from maitred.policy.predictor import PREDICTORS
from maitred.scheduler.scheduler import Scheduler
from maitred.sim.baselines import BATCHINGS, KV_LAYOUTS, Baseline
from maitred.sim.devices import SimulatedTarget
from maitred.sim.engine import EngineSetup, Simulation
from maitred.sim.fleet import FleetSetup, FleetSimulation, ReplicaSetup, facts_of
from maitred.sim.links import SimulatedDisk, SimulatedLink, link_named
from maitred.sim.profile import Jitter
from maitred.sim.report import column
from maitred.sim.results import Objectives, SimulatedResults
from maitred.sim.synthetic import ModelSpec, SyntheticWorkload
from maitred.sim.tensor_profile import HostTimes, TensorProfile, decode_tensor_profile
from maitred.sim.tensors import ModelFigures, SimulatedEnsemble, SimulatedModel, SimulatedStep, TensorSimulation
from maitred.sim.traces import BLOCK_TOKENS, MixedTrace, TraceWorkload, parse_mixed_trace, tensor_arrivals
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


def _more_columns(figures: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, Callable[[Any], str]]]:
    """Columns of a fleet, or of baselines, where all runs have them."""
    return [column for column in MORE_COLUMNS if all(column[1] in whole for whole in figures.values())]


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """One row a policy; below it one a tenant where there are several."""
    rows = [
        [
            "policy",
            *(heading for heading, _, _ in COLUMNS),
            "good/s",
            "slo",
            "jain",
            "cached",
            "preempted",
            "busy",
            "failed",
            *(heading for heading, _, _ in _more_columns(figures)),
        ]
    ]
    for policy, whole in figures.items():
        rows.append([policy, *_cells(whole), *(show(whole[name]) for _, name, show in _more_columns(figures))])
        tenants = whole["tenants"]
        if len(tenants) > 1:
            blank = [""] * len(_more_columns(figures))
            rows += [[f"  {name}", *_cells(part), *blank] for name, part in tenants.items()]
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


MAX_WORKERS = 1000
ANY_ROLE = (Role.PREFILL, Role.DECODE, Role.MIXED)


class WorkerAsked(NamedTuple):
    """A worker as the flags ask for it."""

    role: Role
    device: str | None  # None is --device's default


@dataclass(frozen=True, slots=True)
class WorkersAsked:
    """Workers as the flags ask for them."""

    workers: list[WorkerAsked]  # role by role
    link: SimulatedLink | None
    options: simulate.SimulatedWorkerOptions

    @property
    def devices(self) -> list[str | None]:
        return [worker.device for worker in self.workers]

    def setup(self, plain: FleetSetup, targets: list[SimulatedTarget]) -> FleetSetup:
        """`plain` with a role for each of its replicas, whose targets these are."""
        asked, disk_bytes = self.options, self.options.kv_disk_bytes
        replicas = [
            replace(one, worker=facts_of(worker.role, target, one.engine, self.link))
            for one, worker, target in zip(plain.replicas, self.workers, targets, strict=True)
        ]
        return replace(
            plain,
            handover=HandoverConfig(handover=asked.handover),
            replicas=replicas,
            link=self.link,
            disk=None if disk_bytes is None else _disk(disk_bytes, replicas[0].worker),
        )


def workers_of(
    options: simulate.SimulatedWorkerOptions, fleet: simulate.SimulatedFleetOptions, device: str | None
) -> WorkersAsked | None:
    """None where no flag asks for workers. Raises UsageError, in one line with the remedy."""
    if options == type(options)():
        return None
    if fleet.fleet is not None or fleet.fleet_devices is not None:
        raise UsageError("--fleet is for replicas that hand nothing over; for workers give --mixed-workers N instead")
    counts = {role: getattr(options, f"{role.value}_workers") for role in ANY_ROLE}
    for role, count in counts.items():
        if not 0 <= count <= MAX_WORKERS:
            raise UsageError(f"--{role.value}-workers is {count}; give from 0 to {MAX_WORKERS}")
    if not any(counts.values()):
        for flag in _changed(options):
            if flag != "--kv-disk-bytes":  # which one engine may have too
                raise UsageError(
                    f"{flag} is for workers, and none were given; add --prefill-workers 1 --decode-workers 1"
                )
        counts[Role.MIXED] = 1
    if (roles := {role for role, count in counts.items() if count}) in ({Role.PREFILL}, {Role.DECODE}):
        (role,) = roles
        other = "decode" if role is Role.PREFILL else "prefill"
        raise UsageError(f"--{role.value}-workers are alone; add --{other}-workers N or --mixed-workers N")
    workers = [
        WorkerAsked(role, getattr(options, f"{role.value}_device") or device)
        for role, count in counts.items()
        for _ in range(count)
    ]
    return WorkersAsked(workers, _link(options), options)


def _link(options: simulate.SimulatedWorkerOptions) -> SimulatedLink | None:
    try:
        link = link_named(options.link)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    if link is None and options.handover == "always":
        raise UsageError("--handover always needs a link, and --link is none; give --link tcp, or --handover never")
    return link


def _disk(num_bytes: int, facts: WorkerFacts | None) -> SimulatedDisk:
    assert facts is not None
    block_bytes = facts.bytes_per_token * facts.block_size
    if num_bytes < block_bytes:
        raise UsageError(f"--kv-disk-bytes is {num_bytes:,}, a KV block has {block_bytes:,.0f}; give at least as many")
    return SimulatedDisk(int(num_bytes / block_bytes))


NO_LANGUAGE_MODEL = "none"


def tensor_profile_path(repository: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Path of this machine's profile of a repository, as `maitred profile` writes it; under XDG_CACHE_HOME."""
    cache, folder = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), Path(repository).resolve()
    return cache / "maitred" / "profiles" / f"tensor-{folder.name}-{zlib.crc32(bytes(folder)):08x}.json"


@dataclass(frozen=True, slots=True)
class TensorWork:
    """Tensor models, and what a trace asks of them and of a language model."""

    trace: MixedTrace
    models: tuple[SimulatedModel, ...]
    ensembles: tuple[SimulatedEnsemble, ...]
    host: HostTimes
    rate_scale: float
    seed: int | None
    block_tokens: int

    @property
    def chats(self) -> TraceWorkload:
        lines, began_ms = self.trace.chats, self.trace.began_ms
        return TraceWorkload(lines, self.rate_scale, block_tokens=self.block_tokens, began_ms=began_ms)

    def beside(self) -> Callable[[Scheduler], TensorSimulation]:
        """A simulation for one run, on its scheduler."""
        rng = None if self.seed is None else Random(self.seed)

        def begun(scheduler: Scheduler) -> TensorSimulation:
            simulation = TensorSimulation(scheduler, self.models, self.host, rng, ensembles=self.ensembles)
            simulation.begin(tensor_arrivals(self.trace, self.rate_scale))
            return simulation

        return begun


def read_tensor_work(
    options: simulate.SimulatedTensorOptions, trace: str, asked: simulate.SimulateOptions, seed: int | None
) -> TensorWork | None:
    """None without --model-repository. Raises UsageError, ConfigError."""
    if options.model_repository is None:
        if options.tensor_profile is not None:
            raise UsageError("--tensor-profile is for --model-repository, which was not given; add it")
        return None
    try:
        lines, size = read_unpacked(trace).splitlines(), asked.trace_block_size or BLOCK_TOKENS
        parsed = parse_mixed_trace(lines, trace, unit=asked.trace_unit, block_tokens=size)
    except OSError as error:
        raise ConfigError(f"--trace {trace}: {error.strerror}; give a file of JSON lines") from None
    profile = read_tensor_profile(options.tensor_profile, options.model_repository)
    named = {line.model for line in parsed.tensors}
    models, ensembles = read_models(Path(options.model_repository), profile, named)
    return TensorWork(parsed, models, ensembles, profile.host, asked.rate_scale, seed, size)


def read_tensor_profile(path: str | None, repository: str) -> TensorProfile:
    """The file, or this machine's own of the repository. Raises ConfigError."""
    found = Path(path) if path is not None else tensor_profile_path(repository)
    try:
        return decode_tensor_profile(found.read_bytes(), str(found))
    except OSError as error:
        raise ConfigError(
            f"--tensor-profile {found}: {error.strerror}; make one with maitred profile --model-repository DIR"
        ) from None


def read_models(
    repository: Path, profile: TensorProfile, asked: set[str]
) -> tuple[tuple[SimulatedModel, ...], tuple[SimulatedEnsemble, ...]]:
    """Models that are asked for, by the trace or by ensembles, as they would be served; none is loaded. Raises
    ConfigError.
    """
    from maitred.tensor.batching import lengths_of, rules_of
    from maitred.tensor.config_checks import is_ensemble
    from maitred.tensor.repository_files import read_model, scan

    found: list[SimulatedModel] = []
    ensembles: list[SimulatedEnsemble] = []
    present, names = scan(repository), sorted(asked)
    for name in names:
        if name not in present:
            raise ConfigError(f"the trace asks for model {name!r}, and {repository} has {', '.join(present)}")
        try:
            model = read_model(repository / name)
        except CheckpointError as error:
            raise ConfigError(f"{repository / name}: {error}") from None
        if is_ensemble(model.config):
            ensembles.append(ensemble_of(model.config))
            names += dict.fromkeys(each.model for each in ensembles[-1].steps if each.model not in names)
            continue
        rules, buckets = rules_of(model.config), lengths_of(model.config).buckets
        for version in (each.number for each in model.versions if not each.fault):
            times = profile.times_of(name, version)
            found.append(SimulatedModel(name=name, version=version, rules=rules, times=times, buckets=buckets))
    return tuple(found), tuple(ensembles)


def ensemble_of(config: Any) -> SimulatedEnsemble:
    """A simulated ensemble of a ModelConfig: steps, and which of them need whose outputs."""
    steps = config.ensemble_scheduling.step
    maker = {tensor: number for number, step in enumerate(steps) for tensor in step.output_map.values()}
    needs = [sorted({maker[tensor] for tensor in step.input_map.values() if tensor in maker}) for step in steps]
    made = (
        SimulatedStep(step.model_name, max(0, step.model_version), tuple(before))
        for step, before in zip(steps, needs, strict=True)
    )
    return SimulatedEnsemble(config.name, tuple(made))


def figures_of(models: Mapping[str, ModelFigures]) -> dict[str, Any]:
    return {name: figures.to_json() for name, figures in models.items()}


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


def note_tensor_speed(policy: str, models: Mapping[str, ModelFigures], wall_s: float) -> None:
    total = sum(each.latency_s.count for each in models.values())
    note(f"{policy}: {total:,} tensor requests in {wall_s:.1f} s")


SetupOf = Callable[[SimulatedTarget], EngineSetup]
MAX_REPLICAS = 10_000
OF_MODELS = ("--models-memory-bytes", "--swap-wait-s")


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulation as its flags ask for it."""

    options: simulate.SimulateOptions
    scheduler: simulate.SimulatedSchedulerConfig
    fleet: simulate.SimulatedFleetOptions
    workers: simulate.SimulatedWorkerOptions
    admission: AdmissionConfig
    cache: CacheConfig
    tensors: simulate.SimulatedTensorOptions
    baselines: simulate.SimulatedBaselineOptions

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

    def results(self, target: SimulatedTarget) -> SimulatedResults:
        edge = target.edge if self.seed is not None else replace(target.edge, jitter=())
        return SimulatedResults(self.objectives, edge)

    def controller(self, scheduler: SchedulerConfig) -> AdmissionController | None:
        return None if self.admission is None else admission_of(self.admission, scheduler)


def run_simulations(given: Options) -> int:
    asked = Simulated(
        given[simulate.SimulateOptions],
        given[simulate.SimulatedSchedulerConfig],
        given[simulate.SimulatedFleetOptions],
        given[simulate.SimulatedWorkerOptions],
        given[AdmissionConfig],
        given[CacheConfig],
        given[simulate.SimulatedTensorOptions],
        given[simulate.SimulatedBaselineOptions],
    )
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
    baselines = _baselines(asked, one_engine=bounds is None and tensors is None)
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
    if (bounds_of_models := _bounds_of_models(inputs, bounds)) is not None:
        bounds, targets = bounds_of_models, targets * bounds_of_models.high
    label = _label(targets, bounds, workers)
    note(f"{label}; {asked.source}, policies {', '.join(policies)}")
    for doubt in dict.fromkeys(target.doubt for target in targets if target.doubt is not None):
        note(f"warning: {doubt}")
    figures: dict[str, dict[str, Any]] = {}
    outcomes: dict[str, SimulatedResults] = {}
    for policy in policies:
        for balance in balances if bounds is not None else [""]:
            name = policy if bounds is None or len(policies) > 1 else balance
            if workers is not None and len(policies) == len(balances) == 1:
                name = workers.options.handover
            for words, baseline in baselines.items():
                run = " ".join([name] * (len(policies) > 1 or not words) + [words] * bool(words))
                began = time.perf_counter()
                if bounds is None:
                    setup = engine_setup(asked, targets[0], policy, whole=baseline is not None)
                    setup = replace(setup, baseline=baseline)
                    results, figures[run] = _simulate_engine(setup, targets[0], inputs)
                else:
                    results, figures[run] = _simulate_fleet(asked, bounds, workers, targets, inputs, policy, balance)
                outcomes[run] = results
                _note_speed(run, results, time.perf_counter() - began)
    _tell(asked, outcomes, figures, label)
    return 0


def _run_tensors_alone(asked: Simulated, policies: list[str], tensors: TensorWork) -> int:
    """Simulate tensor models without a language model."""
    from maitred.scheduler.scheduler import lone_scheduler

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


def _targets(asked: Simulated, bounds: Bounds | None, workers: WorkersAsked | None) -> list[SimulatedTarget]:
    """A target for each replica; one without a fleet."""
    device = asked.options.device
    if workers is not None:
        devices = workers.devices
    else:
        devices = [device] if bounds is None else devices_of(asked.fleet, bounds, device)
    found = {name: find_target(name, asked.options.model) for name in dict.fromkeys(devices)}
    return [found[name] for name in devices]


def _label(targets: list[SimulatedTarget], bounds: Bounds | None, workers: WorkersAsked | None) -> str:
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
    targets: list[SimulatedTarget],
    inputs: Inputs,
    policy: str,
    balance: str,
) -> tuple[SimulatedResults, dict[str, Any]]:
    def setup_of(target: SimulatedTarget) -> EngineSetup:
        return engine_setup(asked, target, policy, whole=workers is not None)

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
    if models := _models(inputs.workload):
        setup = _with_models(setup, asked.fleet, models)
    simulation = FleetSimulation(
        setup if workers is None else workers.setup(setup, targets),
        inputs.results(targets[0]),
        seed=inputs.seed,
        tenants=inputs.terms,
        admission=inputs.controller(queue),
    )
    results = simulation.run(inputs.arrivals())
    return results, simulation.to_json()


def _models(workload: Workload) -> Mapping[str, ModelSpec]:
    return workload.spec.models if isinstance(workload, SyntheticWorkload) else {}


def _bounds_of_models(inputs: Inputs, bounds: Bounds | None) -> Bounds | None:
    """Replicas of a workload with several models, None of another one. Raises UsageError."""
    num_models = len(_models(inputs.workload))
    if num_models and (bounds is not None or inputs.tensors is not None):
        raise UsageError("the workload has several models, each a replica of its own; drop --fleet and the like")
    return Bounds(num_models, num_models) if num_models else None


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


def engine_setup(asked: Simulated, target: SimulatedTarget, policy: str, *, whole: bool = False) -> EngineSetup:
    """The configuration a server would have; blocks are `whole` between workers, which exchange them, and in
    comparisons with baselines.
    """
    scheduler, cache, groups = asked.scheduler, asked.cache, None if whole else target.groups
    settled = _scheduler_config(asked, policy).settled(target.token_budget)
    num_blocks, num_pages = target.num_blocks(cache, scheduler.max_num_seqs), 0
    if groups is not None:
        num_pages = target.num_pages(cache, scheduler.max_num_seqs, settled.token_budget)
        num_blocks = groups.num_blocks(num_pages, target.context)
    return EngineSetup(
        scheduler=settled,
        groups=groups,
        num_pages=num_pages,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        predictor=scheduler.predictor,
        policies=installed_policies(),
        acceptance=asked.options.acceptance,
        num_speculative_tokens=asked.options.num_speculative_tokens,
        num_state_slots=target.num_state_slots(cache, scheduler.max_num_seqs),
    )


def _scheduler_config(asked: Simulated, policy: str) -> SchedulerConfig:
    """Config with those arguments that this policy has; the predictor is the simulation's own."""
    scheduler, known = asked.scheduler, parameters_of(installed_policies()[policy])
    plain = {f.name: getattr(scheduler, f.name) for f in fields(SchedulerConfig) if f.name != "predictor"}
    plain |= {"policy": policy, "policy_args": {k: v for k, v in scheduler.policy_args.items() if k in known}}
    return SchedulerConfig(**plain)


def _simulate_engine(
    setup: EngineSetup, target: SimulatedTarget, inputs: Inputs
) -> tuple[SimulatedResults, dict[str, Any]]:
    simulation = _simulation(setup, target, inputs)
    results = simulation.run(inputs.arrivals())
    more: dict[str, Any] = {} if simulation.tensors is None else {"tensor": figures_of(simulation.tensors.figures)}
    if simulation.kv_waste is not None:
        more |= {"mean_rows": results.num_row_steps / max(1, results.num_steps), "kv_waste": simulation.kv_waste.share}
    return results, results.to_json() | more


def _simulation(setup: EngineSetup, target: SimulatedTarget, inputs: Inputs) -> Simulation:
    return Simulation(
        setup,
        target.cost_model,
        inputs.results(target),
        jitter=None if inputs.seed is None else Jitter(target.cost_model, Random(inputs.seed)),
        tenants=inputs.terms,
        admission=inputs.controller(setup.scheduler),
        tensors=None if inputs.tensors is None else inputs.tensors.beside(),
    )


def _admission(options: simulate.SimulateOptions, admission: AdmissionConfig) -> AdmissionConfig | None:
    if options.admission:
        return admission
    for flag in _changed(admission):
        raise UsageError(f"{flag} is for --admission, which was not given; add it")
    return None


def _changed(options: Any) -> list[str]:
    """Flags that are not at their defaults."""
    plain = type(options)()
    return [
        f"--{field.name.replace('_', '-')}"
        for field in fields(options)
        if getattr(options, field.name) != getattr(plain, field.name)
    ]


def _policies(scheduler: simulate.SimulatedSchedulerConfig) -> list[str]:
    policies = _names("--policy", scheduler.policy, list(installed_policies()))
    _known("--predictor", scheduler.predictor, list(PREDICTORS))
    choices = sorted({argument for policy in policies for argument in parameters_of(installed_policies()[policy])})
    for argument in scheduler.policy_args:
        _known("--policy-arg", argument, choices)
    return policies


def _baselines(asked: Simulated, *, one_engine: bool) -> dict[str, Baseline | None]:
    """Baselines to compare, by what tells them apart; none is what is served. Raises UsageError."""
    options = asked.baselines
    if not (changed := _changed(options)):
        return {"": None}
    if not one_engine or asked.options.admission or asked.options.acceptance is not None:
        raise UsageError(
            f"{changed[0]} is of one engine; drop --fleet, workers, --model-repository, --admission and --acceptance"
        )
    batchings = _names("--batching", options.batching, list(BATCHINGS))
    layouts = _names("--kv-layout", options.kv_layout, list(KV_LAYOUTS))
    apart = len(batchings) > 1, len(layouts) > 1
    return {
        " ".join(compress((batching, layout), apart)): Baseline(
            batching=batching, batch_delay_s=options.batch_delay_s, kv_layout=layout
        )
        for batching in batchings
        for layout in layouts
    }


def _balances(fleet: simulate.SimulatedFleetOptions) -> list[str]:
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


def _note_speed(name: str, results: SimulatedResults, wall_s: float) -> None:
    total = results.total
    note(
        f"{name}: {total.num_finished + total.num_failed:,} requests, {results.num_row_steps:,} request-steps, "
        f"{results.duration_s:,.1f} s simulated in {wall_s:.1f} s"
    )


def _tell(
    asked: Simulated, outcomes: dict[str, SimulatedResults], figures: dict[str, dict[str, Any]], label: str
) -> None:
    options = asked.options
    if options.report is not None:
        if not outcomes:
            raise UsageError("--report draws requests of a language model, and there is none; drop it")
        columns = [
            column(name, figures[name], run.total, queue=run.queue_length.points(), tickets=run.tickets.kept)
            for name, run in outcomes.items()
        ]
        write_report(options.report, "simulation", f"{asked.source}, {label}", {"columns": columns, "baseline": 0})
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


def write_report(path: str, kind: str, source: str, contents: Mapping[str, Any]) -> None:
    from maitred.api.ops.page import report_page

    Path(path).write_text(report_page({"kind": kind, "source": source, **contents}), encoding="utf-8")
    note(f"report: {path}")


def bounds_of(options: simulate.SimulatedFleetOptions, has_workers: bool) -> Bounds | None:
    """None without --fleet. Raises UsageError for flags that need it, and for numbers that cannot be."""
    if options.fleet is None:
        for flag in () if has_workers else [flag for flag in _changed(options) if flag not in OF_MODELS]:
            raise UsageError(f"{flag} is for --fleet, which was not given; add --fleet N|MIN:MAX")
        return None
    try:
        bounds = Bounds.parse(options.fleet)
    except ConfigError as error:
        raise UsageError(f"--fleet {error}") from None
    if bounds.high > MAX_REPLICAS:
        raise UsageError(f"--fleet is {options.fleet!r}; at most {MAX_REPLICAS:,} replicas are simulated")
    return bounds


def devices_of(options: simulate.SimulatedFleetOptions, bounds: Bounds, device: str | None) -> list[str | None]:
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
    options: simulate.SimulatedFleetOptions,
    bounds: Bounds,
    targets: list[SimulatedTarget],
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
