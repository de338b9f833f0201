"""`maitred simulate --prefill-workers P --decode-workers D --mixed-workers M`: flags to workers that hand KV over."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

from maitred.cli.flags import UsageError
from maitred.cli.simulate.sources import Target
from maitred.core.errors import ConfigError
from maitred.fleet.disagg import HandoverConfig, Role, WorkerFacts
from maitred.sim.disk import SimulatedDisk
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet_setup import FleetSetup
from maitred.sim.links import SimulatedLink, link_named

if TYPE_CHECKING:
    from maitred.cli.simulate.options import SimulatedFleetOptions, SimulatedWorkerOptions

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
    options: SimulatedWorkerOptions

    @property
    def devices(self) -> list[str | None]:
        return [worker.device for worker in self.workers]

    def setup(self, plain: FleetSetup, targets: list[Target]) -> FleetSetup:
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
    options: SimulatedWorkerOptions, fleet: SimulatedFleetOptions, device: str | None
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
        _refuse_without_workers(options)
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


def _refuse_without_workers(options: SimulatedWorkerOptions) -> None:
    """Refuse flags of workers, all but the disk, which one engine may have too."""
    defaults = type(options)()
    for field in fields(options):
        if field.name != "kv_disk_bytes" and getattr(options, field.name) != getattr(defaults, field.name):
            flag = field.name.replace("_", "-")
            raise UsageError(
                f"--{flag} is for workers, and none were given; add --prefill-workers 1 --decode-workers 1"
            )


def _link(options: SimulatedWorkerOptions) -> SimulatedLink | None:
    try:
        link = link_named(options.link)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    if link is None and options.handover == "always":
        raise UsageError("--handover always needs a link, and --link is none; give --link tcp, or --handover never")
    return link


def facts_of(role: Role, target: Target, engine: EngineSetup, link: SimulatedLink | None) -> WorkerFacts:
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
