"""`maitred demo`: a fleet on this machine under the load of three tenants, and a page whose buttons strike it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

import maitred
from maitred.cli import route
from maitred.cli.command import Options
from maitred.cli.console import note
from maitred.cli.endpoint import HttpEndpoint
from maitred.cli.load import LoadClient, PlannedRequest, RequestForm
from maitred.core.errors import InvalidRequest, Unavailable, did_you_mean
from maitred.policy.policies import POLICIES

if TYPE_CHECKING:
    from maitred.api.http.exchange import Exchange
    from maitred.api.http.routes import Route
    from maitred.api.route.router import Router

ROLES = ("prefill", "decode", "decode")
MOST_TIMES = 8  # of its own rate that a tenant may send
MOST_IN_FLIGHT = 24  # requests of one tenant, so that a fleet that was killed whole is not buried
ADMINISTRATOR = "house"
MODEL = "demo"  # the name that workers serve theirs under


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """Requests of one tenant: Poisson arrivals at `rate` (1/s), with prompts and answers of so many tokens."""

    name: str
    tier: str
    rate: float
    num_inputs: int
    num_outputs: int


TENANTS = (
    TenantLoad("chats", "priority", 2.0, 60, 60),
    TenantLoad("documents", "default", 0.5, 700, 40),
    TenantLoad("batch", "flex", 1.0, 120, 200),
)


@dataclass(slots=True, eq=False)
class SentLoad:
    """The load of one tenant, as long as `run` is not cancelled."""

    tenant: TenantLoad
    key: str
    is_paused: Callable[[], bool]
    times: int = 1  # its rate
    num_done: int = 0
    num_failed: int = 0
    num_in_flight: int = 0
    error: str | None = None  # the last failure
    ttfts_s: deque[float] = field(default_factory=lambda: deque(maxlen=50))

    async def run(self, url: str) -> None:
        """Send requests; the first are held until a worker is ready."""
        rng, tenant = random.Random(self.tenant.name), self.tenant
        form = RequestForm(model=MODEL, as_tokens=False)
        async with HttpEndpoint(url, api_key=self.key) as endpoint, asyncio.TaskGroup() as tasks:
            client, number = LoadClient(endpoint, form), 0
            while True:
                await asyncio.sleep(rng.expovariate(tenant.rate * max(self.times, 1)))
                if self.times and not self.is_paused() and self.num_in_flight < MOST_IN_FLIGHT:
                    words = [rng.randrange(1000) for _ in range(tenant.num_inputs)]
                    request = PlannedRequest(number, client.now(), words, tenant.num_outputs)
                    tasks.create_task(self._send(client, request))
                    number += 1

    async def _send(self, client: LoadClient, request: PlannedRequest) -> None:
        self.num_in_flight += 1
        record = await client.prepared(request)(request.due_s)
        self.num_in_flight -= 1
        self.num_done += record.ok
        self.num_failed += not record.ok
        if record.failure is not None:
            self.error = record.failure.message
        elif record.ttft_s is not None:
            self.ttfts_s.append(record.ttft_s)


class LoadView(msgspec.Struct, frozen=True):
    """A tenant's load as the page shows it."""

    tenant: str
    times: int
    rate: float  # requests a second
    num_in_flight: int
    num_done: int
    num_failed: int
    ttft_s: float | None  # median of the last
    error: str | None


class DemoView(msgspec.Struct, frozen=True):
    """State of the demonstration, and what the page's buttons may do."""

    policy: str
    policies: tuple[str, ...]
    frozen: tuple[str, ...]  # names of replicas
    roles: dict[str, str]  # replica -> role
    is_asleep: bool
    loads: tuple[LoadView, ...]


class Act(msgspec.Struct, forbid_unknown_fields=True):
    """One press of a button."""

    act: str
    name: str | None = None
    """The replica, tenant or policy."""


_decode_act = msgspec.json.Decoder(Act)


class Demo:
    """A router's three loads, and what befalls its workers. On the router's event loop."""

    def __init__(self, keys: dict[str, str]) -> None:
        """`keys` open the router, by tenant."""
        self.loads = [SentLoad(tenant, keys[tenant.name], lambda: self._is_asleep) for tenant in TENANTS]
        self._frozen_pids: set[int] = set()
        self._is_asleep = False
        self._tasks: list[asyncio.Task[None]] = []
        self._acts = {
            "kill": self._kill,
            "freeze": self._freeze,
            "thaw": self._thaw,
            "policy": self._policy,
            "more": self._more,
            "less": self._less,
            "sleep": self._sleep,
            "wake": self._wake,
        }

    @property
    def routes(self) -> tuple[Route, ...]:
        from maitred.api.http.routes import Route

        version = Route(path="/version", handler=self.version, summary="The router's, and that it is a demonstration.")
        about = partial(Route, path="/admin/demo", admin="see the demonstration", errors=(400, 401, 403, 503))
        return (
            version,
            about(handler=self.show, summary="The demonstration's loads.", answer=DemoView),
            about(method="POST", handler=self.act, summary="Strike a worker, or change a load.", body=Act),
        )

    def begin(self, url: str) -> None:
        """Begin the loads, which are held until a worker is ready."""
        self._tasks = [asyncio.create_task(load.run(url)) for load in self.loads]

    # -- routes

    async def version(self, router: Router, exchange: Exchange) -> None:
        await exchange.answer_json({"version": maitred.__version__, "name": "maitred-route", "demo": True})

    async def show(self, router: Router, exchange: Exchange) -> None:
        await exchange.answer_json(self._view(router))

    async def act(self, router: Router, exchange: Exchange) -> None:
        asked = await exchange.json(_decode_act)
        if asked.act not in self._acts:
            acts = ", ".join(self._acts)
            raise InvalidRequest(f"act is {asked.act!r}{did_you_mean(asked.act, self._acts)}; choose {acts}")
        await self._acts[asked.act](router, asked.name or "")
        await exchange.answer_json(self._view(router))

    def _view(self, router: Router) -> DemoView:
        fleet = router.fleet.core.fleet
        workers = [replica.facts for replica in fleet if replica.facts.worker is not None]
        return DemoView(
            policy=router.fleet.core.scheduler.policy,
            policies=tuple(POLICIES),
            frozen=self._frozen_at(router),
            roles={facts.name: facts.worker.role.value for facts in workers if facts.worker is not None},
            is_asleep=self._is_asleep,
            loads=tuple(map(_view_of, self.loads)),
        )

    # -- what befalls workers

    async def _kill(self, router: Router, name: str) -> None:
        self._signal(router, name, signal.SIGKILL)

    async def _freeze(self, router: Router, name: str) -> None:
        self._frozen_pids.add(self._signal(router, name, signal.SIGSTOP))

    async def _thaw(self, router: Router, name: str) -> None:
        self._frozen_pids.discard(self._signal(router, name, signal.SIGCONT))

    def _frozen_at(self, router: Router) -> tuple[str, ...]:
        """Names of frozen workers; one that was killed since is another process."""
        return tuple(one.facts.name for one in router.fleet.core.fleet if one.facts.pid in self._frozen_pids)

    def _signal(self, router: Router, name: str, number: signal.Signals) -> int:
        """Signal a worker; its pid. Raises InvalidRequest."""
        replica = router.fleet.core.fleet.by_name.get(name)
        if replica is None or replica.facts.pid is None:
            there = ", ".join(sorted(router.fleet.core.fleet.by_name)) or "none yet"
            raise InvalidRequest(f"there is no worker {name!r}; there are: {there}")
        try:
            os.kill(replica.facts.pid, number)
        except ProcessLookupError:
            raise InvalidRequest(f"worker {name!r} has died, and another takes its place; try again soon") from None
        return replica.facts.pid

    # -- the whole fleet

    async def _policy(self, router: Router, name: str) -> None:
        """Change the policy of the router's queue and of the workers' queues."""
        if name not in POLICIES:
            raise InvalidRequest(f"no policy {name!r}{did_you_mean(name, POLICIES)}; choose {', '.join(POLICIES)}")
        core = router.fleet.core
        router.fleet.hear(core.configured, replace(core.scheduler, policy=name))
        await self._order(router, "/admin/policy", msgspec.json.encode({"policy": name}))

    async def _sleep(self, router: Router, name: str) -> None:
        """Stop the loads, and the engines' processes once what is in flight has ended."""
        self._is_asleep = True
        await router.fleet.emptied()
        if self._is_asleep:
            await self._order(router, "/sleep")

    async def _wake(self, router: Router, name: str) -> None:
        self._is_asleep = False
        await self._order(router, "/wake_up")

    async def _order(self, router: Router, path: str, body: bytes = b"") -> None:
        """Tell every worker that can be told; one that is frozen or gone cannot. Raises Unavailable if none could."""
        launching, frozen = router.fleet.launching, self._frozen_at(router)
        assert launching is not None
        there = [live for name, live in router.fleet.replicas.items() if name not in frozen]
        faults = await asyncio.gather(*(launching.post(live, path, body) for live in there))
        if faults and all(faults):
            raise Unavailable(f"no worker could be told: {faults[0]}")

    # -- loads

    async def _more(self, router: Router, name: str) -> None:
        load = self._load_of(name)
        load.times = min(MOST_TIMES, load.times * 2) if load.times else 1

    async def _less(self, router: Router, name: str) -> None:
        load = self._load_of(name)
        load.times = load.times // 2

    def _load_of(self, name: str) -> SentLoad:
        found = next((load for load in self.loads if load.tenant.name == name), None)
        if found is None:
            raise InvalidRequest(f"there is no load of {name!r}; there are: {', '.join(each.name for each in TENANTS)}")
        return found


def _view_of(load: SentLoad) -> LoadView:
    return LoadView(
        tenant=load.tenant.name,
        times=load.times,
        rate=load.tenant.rate * load.times,
        num_in_flight=load.num_in_flight,
        num_done=load.num_done,
        num_failed=load.num_failed,
        ttft_s=median(load.ttfts_s) if load.ttfts_s else None,
        error=load.error,
    )


def _prepare(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Keys by tenant, and the flags of `maitred route` that name what was written into `folder`."""
    from maitred.storage.key_files import add_key, make_key

    tenants, plan = folder / "tenants.yaml", folder / "plan.json"
    tiers = {load.name: load.tier for load in TENANTS} | {ADMINISTRATOR: "priority"}
    tenants.write_text("tenants:\n" + "".join(f"  {name}: {{tier: {tier}}}\n" for name, tier in tiers.items()))
    keys = {}
    for name in tiers:
        made = make_key(name, admin=name == ADMINISTRATOR)
        add_key(tenants, made.key)
        keys[name] = made.secret
    words = f"--kv-listen 127.0.0.1:0 --max-num-seqs 8 --log-level warning --served-model-name {MODEL}".split()
    workers = [["--role", role, *words] for role in ROLES]
    plan.write_bytes(msgspec.json.encode(route.PlanFile([route.PlannedLayout("always", workers)])))
    return keys, ["--plan", str(plan), "--tenants", str(tenants), "--log-level", "warning"]


def run_demo(options: Options) -> int:
    """The exit code, once a signal has come."""
    given = options[route.DemoOptions]
    with TemporaryDirectory(prefix="maitred-demo-") as folder:
        keys, words = _prepare(Path(folder))
        demo = Demo(keys)
        words += ["--host", given.host, "--port", str(given.port), "--", given.model or "maitred-mini"]

        def on_open(router: Router, url: str) -> None:
            note(f"the page, as its administrator: {url}/#key={keys[ADMINISTRATOR]}")
            demo.begin(url)

        return route.run_router(route.COMMAND.parse(words), demo.routes, on_open)
