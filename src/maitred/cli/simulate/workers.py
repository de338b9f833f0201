"""`maitred simulate --prefill-workers P --decode-workers D --mixed-workers M`: flags to workers that hand KV over."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

from maitred.bounds import Bounds
from maitred.cli.flags import UsageError
from maitred.cli.simulate.sources import Target
from maitred.cluster.autoscale import AutoscaleConfig, Autoscaler
from maitred.cluster.disagg import HandoverConfig, Role, WorkerFacts
from maitred.cluster.roles import RoleScaling
from maitred.errors import ConfigError
from maitred.sim.disk import SimulatedDisk
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet_setup import FleetSetup
from maitred.sim.links import Link, link_named

if TYPE_CHECKING:
    from maitred.cli.simulate.options import SimulatedFleetOptions, SimulatedWorkerOptions

MAX_WORKERS = 1000
ANY_ROLE = (Role.PREFILL, Role.DECODE, Role.MIXED)


class Worker(NamedTuple):
    """One that there may be."""

    role: Role
    device: str | None  # None is --device's default


@dataclass(frozen=True, slots=True)
class WorkersAsked:
    """What the flags ask for."""

    bounds: dict[Role, Bounds]
    workers: list[Worker]  # as many as there may be, role by role
    link: Link | None
    options: SimulatedWorkerOptions

    @property
    def devices(self) -> list[str | None]:
        return [worker.device for worker in self.workers]

    @property
    def scaling(self) -> dict[Role, Bounds]:
        """Of the roles whose number follows the load; all but mixed workers where one of them does."""
        follows = any(bounds.low < bounds.high for bounds in self.bounds.values())
        return {role: bounds for role, bounds in self.bounds.items() if follows and role is not Role.MIXED}

    def setup(self, plain: FleetSetup, targets: list[Target], ttft_objective_s: float | None) -> FleetSetup:
        """`plain` with a role for each of its replicas, whose targets these are."""
        asked, disk_bytes = self.options, self.options.kv_disk_bytes
        replicas = [
            replace(one, worker=facts_of(worker.role, target, one.engine, self.link))
            for one, worker, target in zip(plain.replicas, self.workers, targets, strict=True)
        ]
        return replace(
            plain,
            handover=HandoverConfig(handover=asked.handover, role_switching=asked.role_switching == "on"),
            replicas=replicas,
            link=self.link,
            disk=None if disk_bytes is None else _disk(disk_bytes, replicas[0].worker),
            role_scaling={
                role: RoleScaling(bounds, Autoscaler(AutoscaleConfig(ttft_objective_s=ttft_objective_s)))
                for role, bounds in self.scaling.items()
            },
        )


def workers_of(
    options: SimulatedWorkerOptions, fleet: SimulatedFleetOptions, device: str | None
) -> WorkersAsked | None:
    """None where no flag asks for workers. Raises UsageError, in one line with the remedy."""
    if options == type(options)():
        return None
    if options.handover == "never" and any(
        ":" in str(word) for word in (options.prefill_workers, options.decode_workers)
    ):
        raise UsageError("--handover never has no roles to scale; give --fleet MIN:MAX, or leave --handover out")
    if fleet.fleet is not None or fleet.fleet_devices is not None:
        raise UsageError("--fleet is for replicas that hand nothing over; for workers give --mixed-workers N instead")
    counts = {role: getattr(options, f"{role.value}_workers") for role in ANY_ROLE}
    bounds = {role: _bounds(role, str(word)) for role, word in counts.items() if word}
    if not bounds:
        _refuse_without_workers(options)
        bounds = {Role.MIXED: Bounds(1, 1)}
    if set(bounds) in ({Role.PREFILL}, {Role.DECODE}):
        (role,) = bounds
        other = "decode" if role is Role.PREFILL else "prefill"
        raise UsageError(f"--{role.value}-workers are alone; add --{other}-workers N or --mixed-workers N")
    workers = [
        Worker(role, getattr(options, f"{role.value}_device") or device)
        for role, bound in bounds.items()
        for _ in range(bound.high)
    ]
    return WorkersAsked(bounds, workers, _link(options), options)


def _bounds(role: Role, word: str) -> Bounds:
    try:
        bounds = Bounds.parse(word)
    except ConfigError as error:
        raise UsageError(f"--{role.value}-workers {error}") from None
    if not 1 <= bounds.low <= bounds.high <= MAX_WORKERS:
        raise UsageError(f"--{role.value}-workers is {word!r}; give from 1 to {MAX_WORKERS}, the last of a role stays")
    return bounds


def _refuse_without_workers(options: SimulatedWorkerOptions) -> None:
    """All but the disk, which one engine may have too."""
    defaults = type(options)()
    for field in fields(options):
        if field.name != "kv_disk_bytes" and getattr(options, field.name) != getattr(defaults, field.name):
            flag = field.name.replace("_", "-")
            raise UsageError(
                f"--{flag} is for workers, and none were given; add --prefill-workers 1 --decode-workers 1"
            )


def _link(options: SimulatedWorkerOptions) -> Link | None:
    try:
        link = link_named(options.link)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    if link is None and options.handover == "always":
        raise UsageError("--handover always needs a link, and --link is none; give --link tcp, or --handover never")
    return link


def facts_of(role: Role, target: Target, engine: EngineSetup, link: Link | None) -> WorkerFacts:
    return WorkerFacts(
        role=role,
        costs=target.cost_model,
        token_budget=engine.scheduler.token_budget,
        num_blocks=engine.num_blocks,
        block_size=engine.block_size,
        bytes_per_token=target.kv_bytes_per_token,
        num_layers=target.num_layers,
        bandwidth=0.0 if link is None else link.bandwidth,
        latency_s=0.0 if link is None else link.latency_s,
        shares_link=link is not None and link.is_shared,
    )


def _disk(num_bytes: int, facts: WorkerFacts | None) -> SimulatedDisk:
    assert facts is not None
    block_bytes = facts.bytes_per_token * facts.block_size
    if num_bytes < block_bytes:
        raise UsageError(f"--kv-disk-bytes is {num_bytes:,}, a KV block has {block_bytes:,.0f}; give at least as many")
    return SimulatedDisk(int(num_bytes / block_bytes))
