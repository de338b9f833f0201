"""The router as the HTTP layer sees it: keys and limits of clients, the fleet, requests in flight, an orderly end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence

from maitred.api.http.auth import Authenticator
from maitred.api.http.fleet_headers import FleetToken
from maitred.api.http.service import Service
from maitred.api.ops.metrics_page import Promises
from maitred.api.ops.observer import HttpObserver
from maitred.api.route.fleet import Fleet, LaunchedReplicas, MakeLauncher, RoutedRequest
from maitred.api.route.follow import Follower, ModelNames
from maitred.api.route.metrics import RouteMetrics
from maitred.config import AdmissionConfig, SchedulerConfig, ServerConfig
from maitred.config.bounds import Bounds
from maitred.core.clock import Clock, WallClock
from maitred.core.errors import Overloaded, Unavailable
from maitred.core.replica import ReplicaState
from maitred.fleet.actions import Bind
from maitred.fleet.config import FleetConfig, Origin, RouteTarget, SharedConfig
from maitred.fleet.core import ClusterCore
from maitred.fleet.disagg import DEFAULT_HANDOVER, HandoverConfig
from maitred.fleet.fleet_request import FleetRequest
from maitred.fleet.replicas import Kind, ReplicaFacts, State
from maitred.fleet.sizing import Autoscale, as_asked
from maitred.fleet.swapping import ModelSet
from maitred.gate.admission import UNKNOWN_SHARE, admission_of
from maitred.gate.gate import Gate
from maitred.storage.ledger import Ledger
from maitred.storage.redis import RedisStore
from maitred.storage.redis_routers import Bound, Notices, QuotaExchange
from maitred.tenancy.caller import Caller
from maitred.tenancy.quota import QuotaBook
from maitred.tenancy.shared import SharedQuotas

RESOLVE_S = 3.0  # between two looks at what a name stands for


class Router(Service):
    """Many replicas behind one address."""

    observer: HttpObserver[RouteMetrics]

    def __init__(
        self,
        config: ServerConfig,
        fleet_config: FleetConfig,
        scheduler: SchedulerConfig,
        targets: tuple[RouteTarget, ...] = (),
        *,
        admission: AdmissionConfig | None = None,
        token: FleetToken | None = None,
        authenticator: Authenticator | None = None,
        ledger: Ledger | None = None,
        clock: Clock | None = None,
        shared: SharedConfig | None = None,
        autoscale: Autoscale = as_asked,
        launch: MakeLauncher | None = None,  # replicas of its own, as many as `bounds` says
        bounds: Bounds | None = None,
        handover: HandoverConfig = DEFAULT_HANDOVER,
        several: ModelSet | None = None,  # models, each launched when a request needs it
    ) -> None:
        """Raises ConfigError for a Redis that cannot be one, and for models that memory cannot hold."""
        clock, authenticator = clock or WallClock(), authenticator or Authenticator(config.api_keys)
        self.admission = admission_of(admission or AdmissionConfig(), scheduler)
        redis = shared.redis if shared is not None else None
        self.shared = Shared(redis, authenticator.quotas, clock, self._bound_elsewhere) if redis is not None else None
        store = self.shared.store if self.shared is not None else None
        self.metrics = RouteMetrics(
            promises=Promises(config.slo), num_tenants_file_failures=authenticator.num_file_failures
        )
        super().__init__(
            config,
            clock=clock,
            authenticator=authenticator,
            observer=HttpObserver(config, clock, self.metrics),
            gate=Gate(self.admission, max_concurrent_requests=config.max_concurrent_requests),
            fleet_token=token or FleetToken(None),
            ledger=ledger,
            store=store,
        )
        if config.result_cache_semantic is not None:
            from maitred.api.http.similar import SimilarPrompts  # noqa: PLC0415  numpy

            SimilarPrompts(self)
        self.replica = self.in_flight = self
        self.draining = False
        follower = Follower(self.fleet_token)
        core = ClusterCore(fleet_config, scheduler, autoscale=autoscale, handover=handover, several=several)
        self.fleet = Fleet(
            core,
            clock,
            follow=follower.start,
            probe=follower.probe,
            metrics=self.metrics,
            on_bound=self._bound,
            on_computed=self._computed,
            on_turn=self._look,
        )
        self.admission.foretell = lambda num_tokens: core.foretold_ttft_s(num_tokens, clock.now())
        self.models = ModelNames(self.fleet, follower.learn_models)
        self.metrics.looks_at(core, clock, self.fleet.connections)
        self.metrics.store = store
        self._targets, self._launch, self._bounds = targets, launch, bounds
        self.give_up: Callable[[str], None] = lambda cause: None
        """Told why no replica can be started; the server's to set."""
        self._salts: dict[tuple[str, str | None], str] = {}  # of each tenant and group
        self._resolving: list[asyncio.Task[None]] = []

    def _bound_elsewhere(self, bound: Bound) -> None:
        """Another router sent a request to a replica of this fleet."""
        self.fleet.core.bound_elsewhere(bound.url, bound.hash_key, bound.keys, self.clock.now())

    def _computed(self, us_by_tenant: Mapping[str, int]) -> None:
        """Count compute, which every router hears of every replica: the limit holds for all of them together."""
        for tenant, compute_us in us_by_tenant.items():
            self.authenticator.quotas.computed(tenant, compute_us, self.clock.now())

    def salt_of(self, caller: Caller) -> str:
        """Salt of a tenant's prefix keys: only tenants of one cache group share any, and no client can make it."""
        if caller.is_anybody:
            return ""
        whose = caller.tenant.name, caller.tenant.shared_cache_group
        salt = self._salts.get(whose)
        if salt is None:
            salt = self._salts[whose] = caller.tenant.cache_salt(self.salt_secret)
        return salt

    def fingerprints(self, model: str | None) -> str:
        """Fingerprints of all replicas of a model: where these change, an answer may too. Foreign servers tell none."""
        facts = [live.facts for live in self.fleet.replicas.values()]
        told = {each.fingerprint for each in facts if model is None or each.models is None or model in each.models}
        return " ".join(sorted(filter(None, told)))

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Replicas are watched since the start."""

    def state(self) -> ReplicaState:
        """State of all replicas together, as far as the router knows."""
        core = self.fleet.core
        num_held = core.num_held
        return ReplicaState(alive=True, num_running=core.num_requests - num_held, num_waiting=num_held)

    def shed(self, request_ids: Sequence[str]) -> None:
        """Take requests from the queue for one that is more urgent."""
        for request_id in request_ids:
            now = self.clock.now()
            routed = self.fleet.requests[request_id]
            waited_s = now - routed.request.arrived_at
            text = f"after {waited_s:.3g} s in the queue the request made room for a more urgent one"
            routed.interrupt(Overloaded(text, retry_after_s=self.gate.retry_after_s(now)))

    def _look(self, now: float) -> None:
        """Admission goes by all slots there are; while there are none, all are held up to the queue's own limit."""
        core = self.fleet.core
        self.admission.resize(core.num_slots or UNKNOWN_SHARE * self.admission.config.max_queued_requests)
        self.admission.look(core.num_queued, now)

    def _bound(self, routed: RoutedRequest, bind: Bind) -> None:
        """A request goes to a replica, for the first time or again."""
        request, exchange = routed.request, routed.exchange
        if self.shared is not None and not request.is_local:
            self.shared.bound(request, self.fleet.replicas[bind.choice.replica].facts)
        exchange.log["model"] = request.model
        if exchange.span is not None:
            told = {"maitred.replica": bind.choice.replica, "maitred.held_s": request.held_s}
            told |= {"maitred.attempt": bind.attempt, "maitred.resumes": bind.resumes}
            exchange.span.add_event("attempt", told)

    # -- its life

    def start(self) -> None:
        """Look for the replicas, in the event loop. Requests may come before any is found."""
        self.fleet.start_turns()
        if self.shared is not None:
            self.shared.start()
        if self._launch is not None:
            self.fleet.launching = LaunchedReplicas(
                self.fleet, self._launch, headers=self.fleet_token.shown(), give_up=self.give_up
            )
            if self._bounds is not None:
                self.fleet.hear(self.fleet.core.scaled, *self._bounds)
            self.fleet.hear(self.fleet.core.tick)  # pinned models
        for target in self._targets:
            if target.follows_name:
                self._resolving.append(asyncio.create_task(self._follow_name(target)))
            else:
                self._add(target.origin, target)

    def close(self) -> None:
        for task in self._resolving:
            task.cancel()
        if self.shared is not None:
            self.shared.stop()
        self.fleet.close()
        super().close()

    def drain(self, within_s: float) -> None:
        self.draining = True

    async def emptied(self) -> None:
        await self.fleet.emptied()

    def cut_all(self) -> None:
        error = Unavailable("the router is shutting down; send the request again", retry_after_s=1.0)
        self.fleet.interrupt_all(error)

    # -- replicas

    def _add(self, origin: Origin, target: RouteTarget) -> None:
        name = origin.authority + origin.prefix
        weight = target.weight if target.weight != 1.0 else None
        facts = ReplicaFacts(name=name, url=origin.url, kind=Kind.FOREIGN, state=State.STARTING, weight=weight)
        self.fleet.add(facts, origin)

    async def _follow_name(self, target: RouteTarget) -> None:
        """Add and drop replicas as the addresses behind a name change; while it does not resolve, they stay."""
        present: set[Origin] = set()
        while True:
            try:
                found = set(await resolve(target.origin))
            except OSError:
                found = present
            for origin in found - present:
                self._add(origin, target)
            for origin in present - found:
                self.fleet.remove(origin.authority)
            present = found
            await asyncio.sleep(RESOLVE_S)


async def resolve(name: Origin) -> list[Origin]:
    """The addresses behind a name, sorted. Raises OSError when it does not resolve."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    return [Origin(host, name.port) for host in sorted({str(address[0]) for *_, address in found})]


class Shared:
    """A router's side of what routers share through Redis: quotas as leases, the result cache, where requests went."""

    def __init__(self, url: str, quotas: QuotaBook, clock: Clock, on_bound: Callable[[Bound], None]) -> None:
        """`on_bound` is told where other routers sent requests.

        Raises ConfigError for a wrong URL, or where redis-py is not installed.
        """
        self.store = RedisStore(url)
        quotas.shared = SharedQuotas()
        self._exchange = QuotaExchange(self.store, quotas.shared, clock)
        self._notices = Notices(self.store, on_bound)

    def start(self) -> None:
        """Start in the event loop."""
        self.store.start()
        self._exchange.start()
        self._notices.start()

    def bound(self, request: FleetRequest, replica: ReplicaFacts) -> None:
        """Tell other routers where they would send the session elsewhere, or not know what the replica has."""
        keys = request.keys if replica.kind is Kind.FOREIGN else ()
        if keys or request.hash_key is not None:
            self._notices.tell(Bound(replica.url, request.hash_key, keys))

    def stop(self) -> None:
        """Stop; what is not written yet is lost, and what is leased comes back by itself."""
        self._notices.stop()
        self._exchange.stop()
        self.store.stop()
