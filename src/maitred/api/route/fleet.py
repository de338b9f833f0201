"""Drives the cluster core live: what happens goes in with the time, and what it decides is done."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from maitred.api.http.exchange import Exchange
from maitred.api.http.logs import log_fields
from maitred.api.route.metrics import RouteMetrics
from maitred.core.clock import Clock
from maitred.fleet.actions import Action, Bind, Choices, Move, Probe, Refuse, Sleep, Start, Stop
from maitred.fleet.config import Origin
from maitred.fleet.core import ClusterCore
from maitred.fleet.disagg import WorkerFacts
from maitred.fleet.fleet_request import Failure, FleetRequest, Usage
from maitred.fleet.replicas import Kind, ReplicaFacts, Report
from maitred.fleet.told import NOTHING, KVWorker, ToldUsage
from maitred.fleet.upstream import ConnectionCounts, Upstream
from maitred.storage.redis_notices import Bound

if TYPE_CHECKING:
    from maitred.fleet.actions import Bind

WAIT_S = 2.0  # for a report that comes a step after the request was let go; a dead replica sends none


class Bill:
    """One request's late usage: what each replica that did not finish it had told, and what it says it computed."""

    __slots__ = ("_computed", "_on_settled", "_told")

    def __init__(self) -> None:
        self._told: dict[str, ToldUsage] = {}
        self._computed: dict[str, ToldUsage] = {}
        self._on_settled: Callable[[], None] | None = None

    def left(self, replica: str, told: ToldUsage) -> None:
        """The request leaves `replica`; `told` is all that any replica told of it so far."""
        self._told[replica] = told

    def computed(self, replica: str, usage: ToldUsage) -> None:
        self._computed[replica] = usage
        if self._on_settled is not None and self.is_settled:
            settled, self._on_settled = self._on_settled, None
            settled()

    @property
    def is_settled(self) -> bool:
        return self._told.keys() <= self._computed.keys()

    def when_settled(self, call: Callable[[], None]) -> None:
        self._on_settled = call

    def with_untold(self, usage: Usage) -> Usage:
        """Usage with what was computed beyond what was told."""
        untold = NOTHING
        for replica, told in list(self._told.items()):  # the ledger's thread asks too
            computed = self._computed.get(replica, told)
            untold = ToldUsage(
                *(sum_ + max(0, all_ - part) for sum_, all_, part in zip(untold, computed, told, strict=True))
            )
        if not any(untold):
            return usage
        return Usage(
            (usage.num_prompt_tokens or 0) + untold.num_prompt_tokens,
            (usage.num_output_tokens or 0) + untold.num_output_tokens,
            (usage.num_cached_tokens or 0) + untold.num_cached_tokens,
            usage.complete,
            usage.compute_us + untold.compute_us,
        )


class Bills:
    """Open bills, by the id under which replicas know the request. Belongs to the event loop."""

    def __init__(self) -> None:
        self._open: dict[str, Bill] = {}

    def computed(self, replica: str, request_id: str, usage: ToldUsage) -> None:
        """Usage reported by a replica; ignored for closed requests and for other routers'."""
        bill = self._open.get(request_id)
        if bill is not None:
            bill.computed(replica, usage)

    def opened(self, request_id: str) -> Bill:
        """Open a bill until `closed`; of two in flight with the same id, only the first hears of usage."""
        bill = Bill()
        self._open.setdefault(request_id, bill)
        return bill

    def close(self, request_id: str, bill: Bill, then: Callable[[], None]) -> None:
        """Close a bill and call `then`, once it is settled or no more is to come."""
        if bill.is_settled:
            self._closed(request_id, bill, then)
            return
        giving_up = asyncio.get_running_loop().call_later(WAIT_S, self._closed, request_id, bill, then)

        def settled() -> None:
            giving_up.cancel()
            self._closed(request_id, bill, then)

        bill.when_settled(settled)

    def _closed(self, request_id: str, bill: Bill, then: Callable[[], None]) -> None:
        if self._open.get(request_id) is bill:
            del self._open[request_id]
        then()


class Moved(Exception):
    """The request is taken from its replica; it will be bound again, or refused."""


class RoutedRequest:
    """A request whose task waits here for the core's decisions; interruptions, a client that left say, come from
    outside.
    """

    __slots__ = (
        *("_bind", "_decision", "_error", "_reason", "_task"),
        *("began", "exchange", "held_at", "held_s", "lost_by", "request"),
    )

    def __init__(self, request: FleetRequest, exchange: Exchange) -> None:
        """Called by the task that answers the request."""
        task = asyncio.current_task()
        assert task is not None, "a request has a task"
        self.request, self.exchange = request, exchange
        self.began = False  # a byte of a replica's answer came, and no other replica may begin anew
        self.held_at: float | None = request.arrived_at  # since when it is waiting for a replica
        self.held_s = 0.0  # before that
        self.lost_by: str | None = None  # the replica that died or hung with it, until it goes on
        self._task = task
        self._bind: Bind | None = None
        self._error: Exception | None = None
        self._decision: asyncio.Future[None] | None = None  # while the task waits for one
        self._reason: Exception | None = None  # why the task was cancelled

    # the task's side

    def bound(self) -> Bind | None:
        """Where the request goes next; None while it is held. Raises why it goes nowhere."""
        if self._error is not None:
            raise self._error
        bind, self._bind = self._bind, None
        return bind

    async def decision(self) -> None:
        """Returns when `bound` may have something else to say."""
        self._decision = asyncio.get_running_loop().create_future()
        try:
            await self._decision
        finally:
            self._decision = None

    @property
    def is_decided(self) -> bool:
        return self._bind is not None or self._error is not None

    def interruption(self) -> Exception | None:
        """Why we cancelled the task; None if we did not. Ends the cancellation."""
        reason, self._reason = self._reason, None
        if reason is not None:
            self._task.uncancel()
        return reason

    # from outside

    def decided(self, bind: Bind, now: float) -> None:
        if self.held_at is not None:
            self.held_s, self.held_at = self.held_s + now - self.held_at, None
        self._bind = bind
        self._wake()

    def refused(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def held_again(self, now: float) -> None:
        if self.held_at is None:
            self.held_at = now

    def interrupt(self, reason: Exception) -> None:
        """End what the task is doing; the first reason counts."""
        if self._reason is None and not self.exchange.complete:
            self._reason = reason
            self._task.cancel()

    def _wake(self) -> None:
        if self._decision is not None and not self._decision.done():
            self._decision.set_result(None)


logger = logging.getLogger("maitred.fleet")
TICK_S = 0.05  # how late what falls due may be noticed


@dataclass(slots=True, eq=False)
class LiveReplica:
    """One replica as the router reaches it; the core knows what may be sent there."""

    facts: ReplicaFacts
    origin: Origin
    upstream: Upstream
    name: bytes  # for a header
    cards: Sequence[dict[str, Any]] = ()  # of its models, as it lists them
    adapters: frozenset[str] = frozenset()  # names of cards that have a parent
    kv_addresses: tuple[str, ...] = ()  # where others pull its KV
    follower: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_ours(self) -> bool:
        return self.facts.kind is Kind.MAITRED


class Launching(Protocol):
    """Starts and stops the replicas that the core asks for; a router over URLs has none."""

    def start(self, name: str, origin: str) -> None: ...

    def sleep(self, name: str) -> None: ...

    def stop(self, name: str) -> None: ...

    def end(self) -> None:
        """Stop all, and return when they are gone; in the end."""


Follow = Callable[["Fleet", LiveReplica], asyncio.Task[None]]
Probing = Callable[["Fleet", LiveReplica], Awaitable[None]]


class KeptBodies:
    """Bodies of streams under way, which the next replica would need. Past a bound of all, large ones are not kept."""

    MAX_BYTES = 256 * 1024 * 1024
    SMALL_BYTES = 16 * 1024  # are always

    def __init__(self) -> None:
        self._num_bytes = 0
        self._of: dict[object, int] = {}

    def keep(self, owner: object, num_bytes: int) -> bool:
        """Keep room for a body until `let_go`; returns whether there is enough."""
        if num_bytes <= self.SMALL_BYTES:
            return True
        if self._num_bytes + num_bytes > self.MAX_BYTES:
            return False
        self._of[owner] = num_bytes
        self._num_bytes += num_bytes
        return True

    def let_go(self, owner: object) -> None:
        self._num_bytes -= self._of.pop(owner, 0)


class Fleet:
    """The replicas there are, the requests in flight, and the core between them. One event loop's."""

    def __init__(
        self,
        core: ClusterCore,
        clock: Clock,
        *,
        follow: Follow,
        probe: Probing,
        metrics: RouteMetrics,
        launching: Launching | None = None,
        on_tick: Callable[[float], None] = lambda now: None,
    ) -> None:
        self.core, self.clock = core, clock
        self.replicas: dict[str, LiveReplica] = {}
        self.requests: dict[str, RoutedRequest] = {}
        self.choices = Choices()
        self.connections = ConnectionCounts()
        self.bills = Bills()
        self.launching, self._on_tick = launching, on_tick
        self.on_bound: Callable[[FleetRequest, ReplicaFacts], None] | None = None
        self.on_computed: Callable[[Mapping[str, int]], None] = lambda us_by_tenant: None
        self.kept_bodies = KeptBodies()
        self._follow, self._ask_health, self._metrics = follow, probe, metrics
        self._probes: set[asyncio.Future[None]] = set()
        self._numbers = itertools.count(2)
        self._timer: asyncio.TimerHandle | None = None
        self._num_saved: Counter[str] = Counter()  # requests moved elsewhere, by the replica that lost them; until told
        self._empty = asyncio.Event()  # set while no request is in flight
        self._empty.set()

    # -- replicas

    def add(self, facts: ReplicaFacts, origin: Origin) -> LiveReplica:
        """Add a replica of which nothing is known but its address; it is asked what it is."""
        upstream = Upstream(origin, counts=self.connections)
        live = self.replicas[facts.name] = LiveReplica(facts, origin, upstream, facts.name.encode("latin-1", "replace"))
        self.tell(live, facts)
        live.follower = self._follow(self, live)
        return live

    def announce(self, facts: ReplicaFacts) -> None:
        """Announce a replica that is on its way, and not to be asked yet."""
        self._do(self.core.joined(facts, self.clock.now()))

    def tell(self, live: LiveReplica, facts: ReplicaFacts) -> None:
        """New facts of it."""
        live.facts = facts
        self._do(self.core.joined(facts, self.clock.now()))

    def remove(self, name: str, *, returns: bool = False) -> None:
        """Remove a replica for good, unless it `returns`: then it is being started again under its name."""
        if returns:
            self._metrics.started("cold")
        live = self.replicas.pop(name, None)
        if live is not None:
            if live.follower is not None:
                live.follower.cancel()
            live.upstream.close()
        self._do(self.core.left(name, self.clock.now(), returns=returns))

    def work(self, live: LiveReplica, worker: KVWorker | None) -> WorkerFacts | None:
        """The facts that a replica tells of itself as a worker; keeps its KV addresses."""
        live.kv_addresses = worker.addresses if worker is not None else ()
        return worker.facts if worker is not None else None

    def restart(self, name: str | None) -> None:
        """Replace it, or each, by a new one that is there first."""
        names = sorted(self.core.fleet.by_name) if name is None else [name]
        self._do(self.core.restarted(names, self.clock.now()))

    @property
    def is_ready(self) -> bool:
        """Whether requests are welcome: a replica can take them, or would be started for them."""
        return self.launching is not None or self.core.fleet.ready != 0

    def scale(self, low: int, high: int) -> None:
        self._do(self.core.scaled(low, high, self.clock.now()))

    def drain(self, name: str) -> None:
        self._do(self.core.drained(name, self.clock.now()))

    def leaving(self, name: str, within_s: float) -> None:
        """Note that a replica drains of itself."""
        self._do(self.core.leaving(name, within_s, self.clock.now()))

    def bound_elsewhere(self, bound: Bound) -> None:
        self.core.bound_elsewhere(bound.url, bound.hash_key, bound.keys, self.clock.now())

    def reported(self, name: str, report: Report) -> None:
        self._do(self.core.reported(name, report, self.clock.now()))

    def probed(self, name: str, *, ok: bool) -> None:
        self._do(self.core.probed(name, ok, self.clock.now()))

    # -- requests

    def free_id(self, asked: str) -> str:
        """`asked`, or with a number where a request of that id is in flight: clients may call two of them the same."""
        return asked if asked not in self.requests else f"{asked}.{next(self._numbers)}"

    def enter(self, routed: RoutedRequest) -> None:
        """Add a request, until `leave`."""
        self.requests[routed.request.request_id] = routed
        self._empty.clear()
        self._do(self.core.arrived(routed.request, self.clock.now()))

    def leave(self, routed: RoutedRequest, usage: Usage | None) -> None:
        """Remove a request that has its answer (`usage`), or needs none (None)."""
        request_id = routed.request.request_id
        if self.requests.pop(request_id, None) is None:
            return
        now = self.clock.now()
        actions = self.core.ended(request_id, usage, now) if usage is not None else []
        if self.core.request(request_id) is not None:  # no answer, or one of a replica that it was just taken from
            actions += self.core.aborted(request_id, now)
        self._do(actions)
        if not self.requests:
            self._empty.set()

    def handed_over(self, routed: RoutedRequest, *, is_computed: bool = False) -> None:
        """The replica that was to compute the prompt for another is done with it; `is_computed` says that it did."""
        self._do(self.core.handed_over(routed.request.request_id, self.clock.now(), is_computed))

    def failed(self, routed: RoutedRequest, failure: Failure, live: LiveReplica) -> None:
        """Note that the replica did not answer; `routed.bound` tells what becomes of the request."""
        now = self.clock.now()
        routed.held_again(now)
        routed.lost_by = live.facts.name if failure.is_death else None
        routed.exchange.log["failed"] = f"{live.facts.name}: {failure.message or failure.kind.value}"
        self._metrics.failed(failure.kind)
        self._do(self.core.failed(routed.request.request_id, failure, now, live.facts.name))

    async def emptied(self) -> None:
        await self._empty.wait()

    def interrupt_all(self, reason: Exception) -> None:
        for routed in list(self.requests.values()):
            routed.interrupt(reason)

    # -- time

    def start(self) -> None:
        """Start the timer that does what falls due."""
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.launching is not None:
            self.launching.end()
            return
        for name in list(self.replicas):
            self.remove(name)

    def _tick(self) -> None:
        self.start()
        now = self.clock.now()
        self._on_tick(now)
        for name, count in self._num_saved.items():
            log_fields(logger, logging.INFO, "requests go on elsewhere", {"replica": name, "requests": count})
        self._num_saved.clear()
        due = self.core.next_tick()
        if due is not None and due <= now:
            self._do(self.core.tick(now))

    # -- what comes out

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Bind(request_id):
                    self._bind(self.requests[request_id], action)
                case Refuse(request_id):
                    self._refuse(request_id, action)
                case Move(request_id):
                    routed = self.requests[request_id]
                    routed.held_again(self.clock.now())
                    routed.lost_by = action.replica
                    routed.interrupt(Moved(action.reason))
                case Probe(name):
                    self._probe(name)
                case Start(name, origin):
                    self._launch(name, origin)
                case Sleep(name):
                    if self.launching is not None:
                        self.launching.sleep(name)
                case Stop(name):
                    if self.launching is not None:
                        self.launching.stop(name)

    def _bind(self, routed: RoutedRequest, bind: Bind) -> None:
        self._metrics.attempted(routed.request, resumes=bind.resumes)
        if self.on_bound is not None and not routed.request.is_local:
            self.on_bound(routed.request, self.replicas[bind.choice.replica].facts)
        if routed.lost_by is not None and routed.lost_by != bind.choice.replica:
            self._num_saved[routed.lost_by] += 1
        routed.lost_by = None
        routed.decided(bind, self.clock.now())
        self.choices.bound(bind, routed.held_s)

    def _refuse(self, request_id: str, action: Refuse) -> None:
        """The core has forgotten it."""
        routed = self.requests.pop(request_id)
        routed.refused(action.error)
        if routed.held_at is None:  # in the middle of its answer
            routed.interrupt(action.error)
        if not self.requests:
            self._empty.set()

    def _probe(self, name: str) -> None:
        live = self.replicas.get(name)
        if live is not None:
            probe = asyncio.ensure_future(self._ask_health(self, live))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)

    def _launch(self, name: str, origin: str) -> None:
        if self.launching is not None:
            log_fields(logger, logging.INFO, "a replica starts", {"replica": name, "from": origin})
            self._metrics.started(origin)
            self.launching.start(name, origin)
