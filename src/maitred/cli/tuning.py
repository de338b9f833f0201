"""Tunes a tensor model, and profiles a repository for simulations.

Tuning: many settings simulated on the scheduler's own lanes with measured batch times, the best of them live.

A setting is what a config says of batches, instances and threads. The best setting without batches runs live too where
the simulation does not find it far behind, so that batching is chosen only where it pays.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from google.protobuf import text_format

from maitred.cli.load_tensors import LiveRun, LocalLoad, served
from maitred.config import SchedulerConfig
from maitred.core.errors import CheckpointError, ConfigError
from maitred.core.objectives import percentile
from maitred.scheduler.scheduler import lone_scheduler
from maitred.sim.synthetic import arrival_times
from maitred.sim.tensor_profile import HostTimes, ModelTimes, TensorProfile
from maitred.sim.tensors import SimulatedModel, TensorArrival, TensorSimulation
from maitred.storage.files import replace_file
from maitred.tensor.batching import lengths_of, rules_of
from maitred.tensor.config import ANY_MESSAGE, SCHEMA, parameters_of
from maitred.tensor.config_checks import PYTHON, is_ensemble
from maitred.tensor.profiling import POINT_S as PROFILE_POINT_S
from maitred.tensor.profiling import lengths_to_try, measured_times, rows_to_try, set_batching
from maitred.tensor.repository_files import CONFIG, ModelFolder, read_config, read_model
from maitred.tensor.served_models import EVERY, OPENERS, ControlMode, ModelControl, Opener, ServedModels

DELAYS_US = (0, 500, 1000, 2000, 5000)
FIRST_REQUESTS, SECOND_REQUESTS, SECOND_ROUND = 400, 2500, 8
NUM_LIVE = 3
POINT_S = 0.06  # of each measured batch
WARM_S = 0.2
KEPT_UP = 0.95  # of the asked rate, where it is kept up with
_GPU, _CPU = (SCHEMA.enums["ModelInstanceGroup.Kind"][f"KIND_{kind}"] for kind in ("GPU", "CPU"))
HOST_RUNS, HOST_PAUSE_S = 40, 0.02  # each longer than a batch, or it is behind the one before
MOST_TOGETHER = 16
LONGEST_WAIT_US = 1_000_000
EPOLL_S = 1e-3  # asyncio asks the kernel's epoll to wait for whole milliseconds
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTarget:
    """Goal of a tuning: the lowest p99 at a rate, or the most requests of so many clients, within `p99_s`."""

    p99_s: float
    rate: float | None = None  # requests/s, an open loop
    concurrency: int = 0  # clients, where there is no rate
    num_rows: int = 1  # of each request
    length: int = 0  # of the open dimensions of its inputs
    seconds: float = 2.0  # of each live run


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Setting as `with_setting` writes it."""

    batch: int  # rows; 1 does not batch
    delay_us: int
    instances: int
    threads: int  # of each instance, within an operator

    @property
    def told(self) -> str:
        batches = f"batches of {self.batch}, {self.delay_us / 1000:g} ms delay" if self.batch > 1 else "no batches"
        return f"{batches}, {self.instances} instances of {self.threads} threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Outcome of a run, simulated or live."""

    p50_s: float
    p99_s: float
    throughput_rps: float
    mean_batch: float
    num_failed: int

    def meets(self, target: TuningTarget) -> bool:
        keeps_up = target.rate is None or self.throughput_rps >= KEPT_UP * target.rate
        return self.p99_s <= target.p99_s and keeps_up and not self.num_failed

    def order(self, target: TuningTarget) -> tuple[bool, float]:
        """Smaller is better."""
        meets = self.meets(target)
        return not meets, -self.throughput_rps if meets and target.rate is None else self.p99_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    setting: Setting
    simulated: RunFigures
    live: RunFigures | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Result of a tuning. `chosen` is the best of `live`; whether it meets the target is its own to say."""

    model: str
    chosen: Tried
    live: tuple[Tried, ...]  # the best first
    num_simulated: int

    def to_json(self, target: TuningTarget) -> dict[str, Any]:
        assert self.chosen.live is not None
        told = {"model": self.model, "target": asdict(target), "num_simulated": self.num_simulated}
        told |= {"chosen": asdict(self.chosen.setting), "meets_target": self.chosen.live.meets(target)}
        return told | {"live": [asdict(each) for each in self.live]}


def tune(
    folder: Path,
    target: TuningTarget,
    tell: Callable[[str], None] = lambda line: None,
    openers: Mapping[str, Opener] = OPENERS,
) -> Tuned:
    """Raises CheckpointError, ConfigError for a model that is not tuned."""
    model = read_model(folder)
    _must_be_tunable(model)
    if not target.length:
        lengths = lengths_to_try(model.config)
        target = replace(target, length=lengths[len(lengths) // 2])
    settings = settings_of(model.config, target)
    threads = sorted({setting.threads for setting in settings})
    most_at_once = max(setting.instances for setting in settings)
    tell(f"measure batches with {', '.join(map(str, threads))} threads")
    times = {each: _times(model, each, most_at_once, target.length, openers) for each in threads}
    host = measured_host(folder.parent, model.config, openers)
    tell(f"simulate {len(settings)} settings")
    tried = simulated(model.config, settings, times, host, target)
    live = []
    for each in best_to_run(tried):
        tell(f"run live: {each.setting.told}")
        live.append(replace(each, live=run_live(folder.parent, model.config, each.setting, target, openers=openers)))
    live.sort(key=lambda each: each.live.order(target) if each.live is not None else (True, 0.0))
    return Tuned(model=folder.name, chosen=live[0], live=tuple(live), num_simulated=len(settings))


def _must_be_tunable(model: ModelFolder) -> None:
    if is_ensemble(model.config):
        raise ConfigError(f"{model.name!r} is an ensemble, which has no batches of its own; tune its steps")
    if model.config.HasField("sequence_batching"):
        raise ConfigError(f"{model.name!r} batches sequences, by its own strategy; that is not tuned")


# ---- settings


def settings_of(config: ANY_MESSAGE, target: TuningTarget, num_cores: int | None = None) -> list[Setting]:
    """Return the settings worth trying: at most twice the cores in threads, no delay over half of the time there is."""
    num_cores = num_cores or len(os.sched_getaffinity(0))
    on_gpu = any(group.kind == _GPU for group in config.instance_group)
    powers = rows_to_try(num_cores)
    shapes = [(i, t) for i in powers for t in powers if i * t <= 2 * num_cores]
    if config.backend == PYTHON:
        shapes = [(instances, 1) for instances in powers]
    if on_gpu:
        kept = sum(group.count * max(1, len(group.gpus)) for group in config.instance_group)
        shapes = [(kept, int(parameters_of(config).get("intra_op_thread_count", "0")))]
    batches = [rows for rows in rows_to_try(max(1, config.max_batch_size)) if rows >= target.num_rows or rows == 1]
    delays = [delay for delay in DELAYS_US if delay <= target.p99_s * 1e6 / 2]
    return [
        Setting(batch=rows, delay_us=delay, instances=instances, threads=threads)
        for instances, threads in shapes
        for rows in batches
        for delay in (delays if rows > 1 else [0])
    ]


def with_setting(config: ANY_MESSAGE, setting: Setting) -> ANY_MESSAGE:
    """A copy; all that a setting does not name stays as it is."""
    changed = type(config)()
    changed.CopyFrom(config)
    if setting.batch > 1 or changed.max_batch_size > 1:
        set_batching(changed, setting.batch, setting.delay_us)
    if not any(group.kind == _GPU for group in changed.instance_group):
        del changed.instance_group[1:]
        group = changed.instance_group[0] if changed.instance_group else changed.instance_group.add(kind=_CPU)
        group.count = setting.instances
        changed.parameters["intra_op_thread_count"].string_value = str(setting.threads)
    return changed


def write_setting(folder: Path, setting: Setting) -> None:
    """Write a setting into the model's config.pbtxt, in one piece; comments in it go. Raises CheckpointError."""
    path = folder / CONFIG
    try:
        replace_file(path, text_format.MessageToString(with_setting(read_config(folder), setting)).encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from None


# ---- simulated


def _times(
    model: ModelFolder, num_threads: int, most_at_once: int, length: int, openers: Mapping[str, Opener]
) -> ModelTimes:
    """Return the times of the highest version."""
    setting = Setting(batch=max(1, model.config.max_batch_size), delay_us=0, instances=1, threads=num_threads)
    models = ServedModels(openers)
    if not models.take(replace(model, config=with_setting(model.config, setting))):
        raise CheckpointError("; ".join(entry.reason for entry in models.index() if entry.reason))
    with models.lease(model.name) as loaded:
        times = measured_times(loaded, POINT_S, most_at_once, (length,))
    models.drop(model.name)
    return times


def simulated(
    config: ANY_MESSAGE,
    settings: Sequence[Setting],
    times: Mapping[int, ModelTimes],
    host: HostTimes,
    target: TuningTarget,
) -> list[Tried]:
    """The best first; those that look good a second time, over more requests."""

    def tried(setting: Setting, num_requests: int) -> Tried:
        outcome = simulate(with_setting(config, setting), times[setting.threads], host, target, num_requests)
        return Tried(setting=setting, simulated=outcome)

    def order(each: Tried) -> tuple[object, ...]:
        setting = each.setting
        return (*each.simulated.order(target), setting.instances * setting.threads, setting.delay_us, -setting.batch)

    first = sorted((tried(setting, FIRST_REQUESTS) for setting in settings), key=order)
    again = {each.setting for each in [*first[:SECOND_ROUND], *_leading(first), *_alone(first)]}
    return sorted((tried(setting, SECOND_REQUESTS) for setting in again), key=order)


def best_to_run(tried: Sequence[Tried]) -> list[Tried]:
    """The best, first those of unlike instances and threads: what these do to each other is what a simulation knows
    least. None that does the very same as another; and the best that does not batch.
    """
    unlike = {each.simulated: each for each in reversed(tried)}
    best = [each for each in tried if unlike[each.simulated] is each]
    leading = _leading(best)
    best = [*leading, *(each for each in best if each not in leading)][:NUM_LIVE]
    return best + [each for each in _alone(tried) if each not in best]


def _leading(tried: Sequence[Tried]) -> list[Tried]:
    """The first of each number of instances and threads."""
    first = {(each.setting.instances, each.setting.threads): each for each in reversed(tried)}
    return [each for each in tried if first[each.setting.instances, each.setting.threads] is each]


def _alone(tried: Sequence[Tried]) -> list[Tried]:
    """The first that does not batch, if there is one."""
    return [each for each in tried if each.setting.batch == 1][:1]


def simulate(
    config: ANY_MESSAGE, times: ModelTimes, host: HostTimes, target: TuningTarget, num_requests: int, seed: int = 0
) -> RunFigures:
    """The config's model alone, on a scheduler of its own."""
    model = SimulatedModel(
        name=times.model, version=times.version, rules=rules_of(config), times=times, buckets=lengths_of(config).buckets
    )
    left = [num_requests - target.concurrency]

    def follow(before: TensorArrival, now: float) -> TensorArrival | None:
        left[0] -= 1
        is_asked = target.rate is None and left[0] >= 0
        return _arrival(times.model, target, now, left[0] + num_requests) if is_asked else None

    scheduler = lone_scheduler(SchedulerConfig())
    simulation = TensorSimulation(scheduler, [model], host, random.Random(seed), follow)
    simulation.begin(_arrivals(times.model, target, num_requests, seed))
    figures = simulation.run()[times.model].to_json()
    latency_s: Any = figures["latency_s"]
    throughput: Any = figures["throughput_rps"]
    mean_batch: Any = figures["mean_batch"]
    return RunFigures(
        p50_s=latency_s["p50"] or 0.0,
        p99_s=latency_s["p99"] or 0.0,
        throughput_rps=throughput or 0.0,
        mean_batch=mean_batch or 0.0,
        num_failed=sum(simulation.figures[times.model].failures.values()),
    )


def _arrivals(model: str, target: TuningTarget, num_requests: int, seed: int) -> Iterator[TensorArrival]:
    if target.rate is None:
        return (_arrival(model, target, 0.0, -1 - i) for i in range(target.concurrency))
    times = islice(arrival_times(target.rate, 1.0, random.Random(seed)), num_requests)
    return (_arrival(model, target, at, i) for i, at in enumerate(times))


def _arrival(model: str, target: TuningTarget, at: float, number: int) -> TensorArrival:
    return TensorArrival(at=at, request_id=f"t{number}", model=model, num_rows=target.num_rows, length=target.length)


# ---- live


def run_live(
    repository: Path,
    config: ANY_MESSAGE,
    setting: Setting,
    target: TuningTarget,
    seed: int = 0,
    openers: Mapping[str, Opener] = OPENERS,
) -> RunFigures:
    """Run live in this process, as `setting` says. Raises CheckpointError."""
    return asyncio.run(_run_live(repository, with_setting(config, setting), target, seed, openers))


async def _run_live(
    repository: Path, config: ANY_MESSAGE, target: TuningTarget, seed: int, openers: Mapping[str, Opener]
) -> RunFigures:
    async with served(repository, config, openers) as service:
        load = LocalLoad(service, config.name, num_rows=target.num_rows, length=target.length)
        await load.closed_loop(min(target.concurrency or 4, 4), WARM_S)
        if target.rate is None:
            run = await load.closed_loop(target.concurrency, target.seconds)
        else:
            due = arrival_times(target.rate, 1.0, random.Random(seed))
            run = await load.open_loop([*islice(due, max(1, round(target.rate * target.seconds)))])
    latencies_s = sorted(run.latencies_s) or [float("inf")]
    quantile = partial(percentile, latencies_s)
    return RunFigures(
        p50_s=quantile(50),
        p99_s=quantile(99),
        throughput_rps=run.throughput_rps,
        mean_batch=run.mean_batch,
        num_failed=run.num_failed,
    )


# ---- a profile, for simulations


def measured_profile(
    repository: Path,
    name: str | None,
    tell: Tell,
    point_s: float = PROFILE_POINT_S,
    openers: Mapping[str, Opener] = OPENERS,
) -> TensorProfile:
    """Measure all models, or one. Raises CheckpointError, ConfigError."""
    models = ServedModels(openers)
    ModelControl(repository, ControlMode.EXPLICIT, models).start([name or EVERY])
    for entry in models.index():
        if entry.reason:
            tell(f"{entry.name}: not measured; {entry.reason}")
    found: list[ModelTimes] = []
    configs: list[ANY_MESSAGE] = []
    for entry in models.index(ready_only=True):
        with models.lease(entry.name, entry.version) as loaded:
            if loaded.instances and name in (None, entry.name):
                tell(f"measure {loaded.name} version {loaded.number}")
                found.append(measured_times(loaded, point_s))
                configs.append(loaded.config)
    for entry in models.index(ready_only=True):
        models.drop(entry.name)
    if not found:
        raise ConfigError(f"{repository} has no model that can be measured{f' called {name!r}' if name else ''}")
    machine = f"{platform.system()} {platform.machine()}"
    return TensorProfile(
        machine=machine, host=measured_host(repository, _lightest(configs, found), openers), models=(*found,)
    )


def _lightest(configs: Sequence[ANY_MESSAGE], times: Sequence[ModelTimes]) -> ANY_MESSAGE:
    """The model with the least compute, if possible one that batches: it hides least of what a batch costs besides."""
    order = sorted(range(len(times)), key=lambda i: (configs[i].max_batch_size < 2, times[i].seconds(1)))
    return configs[order[0]]


def measured_host(repository: Path, config: ANY_MESSAGE, openers: Mapping[str, Opener] = OPENERS) -> HostTimes:
    """Times of a host, by lone requests, and by such as fill a batch together; the loop's CPU time is what each costs
    it, and what remains of a lone one's latency is spent in waking up threads.
    """
    return asyncio.run(_host_times(repository, config, openers))


async def _host_times(repository: Path, config: ANY_MESSAGE, openers: Mapping[str, Opener]) -> HostTimes:
    most = min(MOST_TOGETHER, config.max_batch_size)
    alone = await _bursts(repository, config, 1, openers)
    alone_s = request_s = alone.loop_s / HOST_RUNS
    if most > 1:
        together_s = (await _bursts(repository, config, most, openers)).loop_s / HOST_RUNS
        request_s = min(alone_s, max(0.0, together_s - alone_s) / (most - 1))
    waited_s = median(alone.latencies_s) - alone.compute_s / HOST_RUNS - alone_s
    return HostTimes(request_s=request_s, batch_s=alone_s - request_s, wake_s=max(0.0, waited_s), timer_s=EPOLL_S)


async def _bursts(repository: Path, config: ANY_MESSAGE, together: int, openers: Mapping[str, Opener]) -> LiveRun:
    """Send bursts of so many requests at once that share a batch, each when the one before is over."""
    whole = type(config)()
    whole.CopyFrom(config)
    if config.max_batch_size > 1:
        whole.ClearField("sequence_batching")
        set_batching(whole, together, delay_us=LONGEST_WAIT_US if together > 1 else 0)
    async with served(repository, whole, openers) as service:
        load = LocalLoad(service, config.name, length=lengths_to_try(config)[0])
        run = await load.open_loop([HOST_PAUSE_S * (i // together) for i in range(HOST_RUNS * together)])
    if run.num_failed:
        raise CheckpointError(f"{config.name!r} failed {run.num_failed} of {HOST_RUNS * together} requests")
    return run
