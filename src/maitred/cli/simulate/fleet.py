"""`maitred simulate --fleet`: flags to a simulated fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from maitred.bounds import Bounds
from maitred.cli.flags import UsageError
from maitred.cli.simulate.sources import Target
from maitred.cluster.autoscale import AutoscaleConfig, Autoscaler
from maitred.cluster.config import FleetConfig
from maitred.config import SchedulerConfig
from maitred.errors import ConfigError
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet_setup import FleetSetup, ReplicaSetup

if TYPE_CHECKING:
    from maitred.cli.simulate.options import SimulatedFleetOptions

SetupOf = Callable[[Target], EngineSetup]
MAX_REPLICAS = 10_000


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
    """One for each replica; None is what --device's default is."""
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
