"""The fleet behind a router: its replicas at URLs, and its requests in flight, driven by the core."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from maitred.api.http.exchange import Exchange
from maitred.api.http.logs import log_fields
from maitred.api.route.metrics import RouteMetrics
from maitred.core.clock import Clock
from maitred.fleet.actions import Bind, Move, Refuse
from maitred.fleet.config import Origin, parse_target
from maitred.fleet.core import ClusterCore
from maitred.fleet.driver import Driver
from maitred.fleet.fleet_request import AnswerUsage, Failure, FleetRequest
from maitred.fleet.launch import Exited, IsReady, Launcher, LaunchEvent, Listens
from maitred.fleet.replicas import Kind, ReplicaFacts, State
from maitred.fleet.told import NOTHING, ToldUsage
from maitred.fleet.upstream import ConnectionCounts, Upstream, UpstreamAsk, UpstreamFailed, request_head

if TYPE_CHECKING:
    from maitred.fleet.actions import Bind

ORDER_S = 600.0  # for what a launched replica has to end before it sleeps, or a large model
MAX_ORDER_BYTES = 64 * 1024
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

    def with_untold(self, usage: AnswerUsage) -> AnswerUsage:
        """Usage with what was computed beyond what was told."""
        untold = NOTHING
        for replica, told in list(self._told.items()):  # the ledger's thread asks too
            computed = self._computed.get(replica, told)
            untold = ToldUsage(
                *(sum_ + max(0, all_ - part) for sum_, all_, part in zip(untold, computed, told, strict=True))
            )
        if not any(untold):
            return usage
        return AnswerUsage(
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
        *("began", "exchange", "is_held", "lost_by", "request"),
    )

    def __init__(self, request: FleetRequest, exchange: Exchange) -> None:
        """Called by the task that answers the request."""
        task = asyncio.current_task()
        assert task is not None, "a request has a task"
        self.request, self.exchange = request, exchange
        self.began = False  # a byte of a replica's answer came, and no other replica may begin anew
        self.is_held = True  # waits for a replica
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

    def decided(self, bind: Bind) -> None:
        self._bind, self.is_held = bind, False
        self._wake()

    def refused(self, error: Exception) -> None:
        self._error = error
        self._wake()

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


class Fleet(Driver[RoutedRequest]):
    """The replicas there are, the requests in flight, and the core between them. One event loop's."""

    def __init__(
        self,
        core: ClusterCore,
        clock: Clock,
        *,
        follow: Follow,
        probe: Probing,
        metrics: RouteMetrics,
        on_bound: Callable[[RoutedRequest, Bind], None],
        on_computed: Callable[[Mapping[str, int]], None],
        on_turn: Callable[[float], None],
    ) -> None:
        """`on_computed` is told of machine time by tenant, `on_turn` of the time that passes."""
        super().__init__(core, clock)
        self.replicas: dict[str, LiveReplica] = {}
        self.connections = ConnectionCounts()
        self.bills = Bills()
        self.launching: LaunchedReplicas | None = None  # the router's own, none over URLs
        self.on_computed = on_computed
        self.kept_bodies = KeptBodies()
        self._follow, self._ask_health, self._metrics = follow, probe, metrics
        self._on_bound, self._on_turn = on_bound, on_turn
        self._probes: set[asyncio.Future[None]] = set()
        self._numbers = itertools.count(2)
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

    def tell(self, live: LiveReplica, facts: ReplicaFacts) -> None:
        """New facts of it."""
        live.facts = facts
        self.hear(self.core.joined, facts)

    def remove(self, name: str, *, returns: bool = False) -> None:
        """Remove a replica for good, unless it `returns`: then it is being started again under its name."""
        if returns:
            self._metrics.started("cold")
        self.forget(name)
        self.hear(self.core.left, name, returns=returns)

    def forget(self, name: str) -> None:
        """End what follows a replica, and its connections; the core is to be told why."""
        live = self.replicas.pop(name, None)
        if live is not None:
            if live.follower is not None:
                live.follower.cancel()
            live.upstream.close()

    @property
    def is_ready(self) -> bool:
        """Whether requests are welcome: a replica can take them, or would be started for them."""
        return self.launching is not None or self.core.fleet.ready != 0

    # -- requests

    def free_id(self, asked: str) -> str:
        """`asked`, or with a number where a request of that id is in flight: clients may call two of them the same."""
        return asked if asked not in self.requests else f"{asked}.{next(self._numbers)}"

    def enter(self, request: FleetRequest, routed: RoutedRequest) -> None:
        """Add a request, until `leave`."""
        self._empty.clear()
        super().enter(request, routed)

    def leave(self, routed: RoutedRequest, usage: AnswerUsage | None) -> None:
        """Remove a request that has its answer (`usage`), or needs none (None)."""
        request_id = routed.request.request_id
        if self.requests.pop(request_id, None) is None:
            return
        now = self.clock.now()
        actions = self.core.ended(request_id, usage, now) if usage is not None else []
        if self.core.request(request_id) is not None:  # no answer, or one of a replica that it was just taken from
            actions += self.core.aborted(request_id, now)
        self.do(actions)
        self._note_empty()

    def handed_over(self, routed: RoutedRequest, *, is_computed: bool = False) -> None:
        """The replica that was to compute the prompt for another is done with it; `is_computed` says that it did."""
        self.hear(self.core.handed_over, routed.request.request_id, is_computed=is_computed)

    def failed(self, routed: RoutedRequest, failure: Failure, live: LiveReplica) -> None:
        """Note that the replica did not answer; `routed.bound` tells what becomes of the request."""
        routed.is_held = True
        routed.lost_by = live.facts.name if failure.is_death else None
        routed.exchange.log["failed"] = f"{live.facts.name}: {failure.message or failure.kind.value}"
        self._metrics.failed(failure.kind)
        self.hear(self.core.failed, routed.request.request_id, failure, at=live.facts.name)

    def escalated(self, routed: RoutedRequest, live: LiveReplica) -> None:
        """Note that the replica's answer is not sure enough; `routed.bound` tells which one is asked next."""
        routed.is_held = True
        routed.exchange.log["escalated"] = live.facts.name
        self._metrics.num_escalated += 1
        self.hear(self.core.escalated, routed.request.request_id)

    async def emptied(self) -> None:
        await self._empty.wait()

    def interrupt_all(self, reason: Exception) -> None:
        for routed in list(self.requests.values()):
            routed.interrupt(reason)

    def _note_empty(self) -> None:
        if not self.requests:
            self._empty.set()

    # -- time

    def close(self) -> None:
        self.end_turns()
        if self.launching is not None:
            self.launching.end()
            return
        for name in list(self.replicas):
            self.remove(name)

    def look(self, now: float) -> None:
        self._on_turn(now)
        for name, count in self._num_saved.items():
            log_fields(logger, logging.INFO, "requests go on elsewhere", {"replica": name, "requests": count})
        self._num_saved.clear()

    # -- what the core decides

    def bound(self, routed: RoutedRequest, bind: Bind) -> None:
        self._metrics.attempted(routed.request, resumes=bind.resumes)
        if routed.lost_by is not None and routed.lost_by != bind.choice.replica:
            self._num_saved[routed.lost_by] += 1
        routed.lost_by = None
        routed.decided(bind)
        self.choices.bound(bind, routed.request.held_s)
        self._on_bound(routed, bind)

    def moved(self, routed: RoutedRequest, move: Move) -> None:
        routed.is_held, routed.lost_by = True, move.replica
        routed.interrupt(Moved(move.reason))

    def refused(self, routed: RoutedRequest, refuse: Refuse) -> None:
        """The core has forgotten it."""
        del self.requests[routed.request.request_id]
        routed.refused(refuse.error)
        if not routed.is_held:  # in the middle of its answer
            routed.interrupt(refuse.error)
        self._note_empty()

    def probe(self, name: str) -> None:
        live = self.replicas.get(name)
        if live is not None:
            probe = asyncio.ensure_future(self._ask_health(self, live))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)

    def start(self, name: str, origin: str) -> None:
        if self.launching is not None and not self.launching.is_ending:
            log_fields(logger, logging.INFO, "a replica starts", {"replica": name, "from": origin})
            self._metrics.started(origin)
            self.launching.start(name, origin)

    def sleep(self, name: str) -> None:
        if self.launching is not None:
            self.launching.sleep(name)

    def stop(self, name: str) -> None:
        if self.launching is not None:
            self.launching.stop(name)


MakeLauncher = Callable[[Callable[[LaunchEvent], None]], Launcher]
"""Given who hears its events."""


class LaunchedReplicas:
    """Replicas of the router's own, which the core has started and stopped. On the router's event loop."""

    def __init__(
        self,
        fleet: Fleet,
        make: MakeLauncher,
        *,
        headers: list[tuple[bytes, bytes]],  # that replicas believe
        give_up: Callable[[str], None],  # told why no replica can be started
    ) -> None:
        self._fleet, self._headers, self._give_up = fleet, headers, give_up
        self._launcher = make(self._heard)
        self._loading: dict[str, ReplicaFacts] = {}  # it will say itself when there is more to ask of it
        self._orders: dict[str, asyncio.Task[None]] = {}  # the last to each replica: to sleep, or to wake up
        self.is_ending = False  # replicas that leave now are not replaced

    def start(self, name: str, origin: str) -> None:
        if origin == "cold":
            self._launcher.start(name)
        elif origin == "asleep":
            self._order(name, self._wake)

    def sleep(self, name: str) -> None:
        self._order(name, self._put_to_sleep)

    def stop(self, name: str) -> None:
        self._launcher.stop(name)

    def end(self) -> None:
        self.is_ending = True
        for order in self._orders.values():
            order.cancel()
        self._launcher.end()

    # -- sleep

    def _order(self, name: str, order: Callable[[LiveReplica], Awaitable[None]]) -> None:
        """Carry out `order` after the replica's order before."""
        self._orders[name] = asyncio.create_task(self._carry_out(name, order, self._orders.get(name)))

    async def _carry_out(
        self, name: str, order: Callable[[LiveReplica], Awaitable[None]], before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await before
        live = self._fleet.replicas.get(name)
        if live is not None:  # else it died, and is started again
            await order(live)
        if self._orders.get(name) is asyncio.current_task():
            del self._orders[name]

    async def _put_to_sleep(self, live: LiveReplica) -> None:
        """Put a replica to sleep; one that does not fall asleep costs memory, no more."""
        error = await self.post(live, "/sleep")
        if error is not None:
            fields = {"replica": live.facts.name, "error": error}
            log_fields(logger, logging.WARNING, "a replica does not fall asleep", fields)

    async def _wake(self, live: LiveReplica) -> None:
        """Wake a replica; one that does not wake up is started anew."""
        error = await self.post(live, "/wake_up")
        if error is None:
            self._fleet.tell(live, replace(live.facts, state=State.READY))
            return
        fields = {"replica": live.facts.name, "error": error}
        log_fields(logger, logging.WARNING, "a replica does not wake up", fields)
        self._launcher.restart(live.facts.name)

    async def post(self, live: LiveReplica, path: str, body: bytes = b"") -> str | None:
        """Post an order, in JSON if it has a body; returns what went wrong, if anything."""
        headers = [*self._headers, (b"content-type", b"application/json")] if body else self._headers
        try:
            async with asyncio.timeout(ORDER_S):
                answer = await live.upstream.send(
                    UpstreamAsk(request_head("POST", path, live.origin, headers, len(body)), body)
                )
                told = await answer.whole(MAX_ORDER_BYTES)
        except UpstreamFailed as error:
            return str(error)
        except TimeoutError:
            return f"it gave no answer within {ORDER_S:g} s"
        return None if answer.status == 200 else f"it answers {answer.status}: {told[:200].decode('utf-8', 'replace')}"

    # -- what becomes of them

    def _heard(self, event: LaunchEvent) -> None:
        match event:
            case Listens(name, url, pid):
                facts = ReplicaFacts(name=name, url=url, state=State.STARTING, is_launched=True, pid=pid)
                self._loading[name] = facts
                self._fleet.hear(self._fleet.core.joined, facts)  # it is on its way, and not to be asked yet
            case IsReady(name, start_s, _, memory_bytes):
                log_fields(logger, logging.INFO, "a replica is ready", {"replica": name, "start_s": round(start_s, 2)})
                facts = replace(self._loading.pop(name), memory_bytes=memory_bytes or None)
                self._fleet.add(facts, parse_target(facts.url).origin)
            case Exited(name, cause, as_told, again_in_s):
                self._ended(name, cause, as_told=as_told, again_in_s=again_in_s)

    def _ended(self, name: str, cause: str, *, as_told: bool, again_in_s: float | None) -> None:
        self._loading.pop(name, None)
        fields = {"replica": name, "cause": cause, "again_in_s": again_in_s}
        log_fields(logger, logging.INFO if as_told else logging.WARNING, "a replica ended", fields)
        if not as_told and again_in_s is None:
            if self._fleet.core.swapping is not None:
                self._fleet.forget(name)
                self._fleet.hear(self._fleet.core.load_failed, name, cause)
                return
            self._give_up(f"{name} cannot be started: {cause}")
            return
        self._fleet.remove(name, returns=again_in_s is not None)
