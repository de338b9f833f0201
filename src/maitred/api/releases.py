"""A server that follows a shelf: each version has a view of the server, and `current` says which gets newcomers.

A request keeps the version that it came to, to its last byte; the engine of one that is no longer current ends after
its last request (docs/design/0032).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace

import msgspec
from starlette.types import Receive, Scope, Send

from maitred.api.http.app import App
from maitred.api.http.asgi import AsgiApp
from maitred.api.http.exchange import VERSION, Exchange
from maitred.api.http.routes import Route, RouteTable
from maitred.api.routes import make_routes
from maitred.core import metrics as m
from maitred.core.errors import CheckpointError, EngineDead, OutOfMemory
from maitred.core.replica import ReplicaState, state_of_all
from maitred.engine.queries import AdapterFolder
from maitred.engine.releases import StartingRelease
from maitred.engine.replica import Replica
from maitred.engine.starting import Engine
from maitred.model.shelf import Shelf

logger = logging.getLogger("maitred.releases")
LOOK_S = 0.5  # between two looks at `current`


class ReleasesView(msgspec.Struct, frozen=True):
    """The version that newcomers get, the one that starts beside it, and why the last one was refused."""

    serving: int
    starting: int | None
    num_requests: list[tuple[int, int]]  # version and its requests in flight; the last is in service, others drain
    refused: str | None


class VersionInService(AsgiApp):
    """A version's view of the server, and the requests that it answers; called, each gives them to the newest one."""

    def __init__(
        self, versions: list[VersionInService], app: App, routes: RouteTable, number: int, half: int | None
    ) -> None:
        super().__init__(app, routes, told=((VERSION, b"%d" % number),))
        self._versions, self.view, self.number, self.num_requests = versions, app, number, 0
        self.half = half  # of KV tiers, which is its own until it has closed
        versions.append(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._versions[-1]._answer_here(scope, receive, send)

    async def _answer_here(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = scope["method"] != "GET"  # which generates nothing, and may last as long as the server
        self.num_requests += counts
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.num_requests -= counts


class Releases:
    """The versions of one server. On the event loop, but for `stop`."""

    def __init__(self, shelf: Shelf, seen: tuple[int, int], begin: Callable[..., StartingRelease]) -> None:
        """`seen` is the shelf's `current` that the server starts with; `begin` starts a version's engine."""
        self._shelf, self._seen, self._begin = shelf, seen, begin
        self.versions: list[VersionInService] = []  # the last is in service, the others drain
        self._past = ReplicaState(alive=False)  # counters of versions that are gone
        self._free_halves = {1}
        self._starting: int | None = None
        self.why_refused: str | None = None
        self._num_changes = {"served": 0, "refused": 0}
        self._tasks: set[asyncio.Task[None]] = set()
        route = Route(
            path="/admin/releases",
            handler=self._show,
            summary="The version in service, those that start or drain, and why the last one was refused.",
            admin="see releases",
            answer=ReleasesView,
            errors=(401, 403),
        )
        self.routes = (route,)

    def front(self, app: App, routes: RouteTable) -> AsgiApp:
        """The application in front of all versions; `app` is the first one's view."""
        first = VersionInService(self.versions, app, routes, self._seen[0], 0)
        app.observer.metrics.state_of = self._with_counters_of_others
        self._count("served", 0)
        return first

    def follow(self) -> None:
        """Look at `current` from now on, as long as the loop runs."""
        self._keep(self._follow())

    def stop(self) -> None:
        """End all engines, once the loop has ended."""
        for version in self.versions:
            version.view.replica.stop()

    async def _follow(self) -> None:
        while not self.versions[-1].view.in_flight.draining:
            await asyncio.sleep(LOOK_S)
            try:
                asked = await asyncio.to_thread(self._shelf.current)
                if asked != self._seen:
                    self._seen, self.why_refused = asked, None
                    await self._turn_to(asked[0])
            except Exception as error:  # a fault of ours costs one change, not the server
                self._refused(error)

    async def _turn_to(self, number: int) -> None:
        """Serve a version from now on. Raises what keeps it from service."""
        old = self.versions[-1]
        if number == old.number:
            return
        self._starting = number
        half = min(self._free_halves, default=None)
        try:
            engine = await self._started(number, half)
        finally:
            self._starting = None
        self._free_halves -= {half}
        view = old.view.beside(engine.replica, engine.model)
        VersionInService(self.versions, view, make_routes(self.routes), number, half)
        self._count("served")
        logger.warning("version %d is in service; %d requests stay with the one before", number, old.num_requests)
        self._keep(self._drain(old))

    async def _started(self, number: int, half: int | None) -> Engine:
        """A version's engine, fit for requests. Raises what is wrong, and then there is none."""
        release = await asyncio.to_thread(self._shelf.verify, number)
        starting = self._begin(release, beside=[version.view.model for version in self.versions], half=half)
        try:
            engine = await asyncio.to_thread(starting.wait)
        except BaseException:
            starting.give_up()
            raise
        try:
            await starting.checked(engine)
            await self._make_alike(engine)
            if (await asyncio.to_thread(self._shelf.current))[0] != number:
                raise CheckpointError(f"version {number} was loaded, and is no longer current")
        except BaseException:
            await engine.replica.close()
            raise
        return engine

    async def _make_alike(self, engine: Engine) -> None:
        """Wait for all of its engines, and give it what was changed while the server ran. Raises OutOfMemory for a
        context that had to shrink.
        """
        plan, served, new = engine.memory_plan, self.versions[-1].view, engine.replica
        if plan.max_model_len < min(plan.model_context, served.model.max_model_len):
            raise OutOfMemory(
                f"beside the version in service memory holds {plan.max_model_len:,} tokens of context, and that "
                f"version has {served.model.max_model_len:,}; serve with a smaller --max-model-len or KV cache"
            )
        while lacking := [worker for worker in new.workers() if not worker.alive]:  # the first loads alone
            if lacking[0].num_restarts:
                raise EngineDead(f"of several engines one does not start: {lacking[0].error}")
            await asyncio.sleep(LOOK_S)
        with suppress(EngineDead):  # asleep: the new one keeps to the flags
            await new.configure(await served.replica.scheduler_config())
        for facts in tuple(served.adapters.named.values()) if served.adapters is not None else ():
            if new.adapters is not None and facts.name not in new.adapters.named:
                await new.adapters.load(AdapterFolder(facts.name, facts.path, facts.inside))

    async def _drain(self, old: VersionInService) -> None:
        while old.num_requests:  # noqa: ASYNC110  no newcomer is among them
            await asyncio.sleep(LOOK_S)
        replica = old.view.replica
        with suppress(EngineDead):
            await replica.sleep()
        self.versions.remove(old)
        self._past = state_of_all((self._past, replace(replica.state(), num_blocks=0)), 0, {})
        await replica.close()
        if old.half is not None:
            self._free_halves.add(old.half)
        logger.info("version %d has answered its last request", old.number)

    def _refused(self, error: Exception) -> None:
        if str(error) != self.why_refused:  # else `current` cannot be read, as a second ago
            self.why_refused = str(error)
            self._count("refused")
            logger.error("%s; version %d stays in service", error, self.versions[-1].number)

    def _count(self, outcome: str, by: int = 1) -> None:
        self._num_changes[outcome] += by
        told = self.versions[-1].view.observer.metrics.releases
        told[m.RELEASE_VERSION] = {(): float(self.versions[-1].number)}
        told[m.RELEASE_CHANGES] = {(name,): float(count) for name, count in self._num_changes.items()}

    def _with_counters_of_others(self, serving: Replica) -> ReplicaState:
        """The state of the version in service, with counters of all that there ever were."""
        now, others = serving.state(), [version.view.replica.state() for version in self.versions[:-1]]
        total = state_of_all((now, *others, self._past), 0, {})
        return replace(total, alive=now.alive, error=now.error, loading=now.loading, asleep=now.asleep)

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _show(self, app: App, exchange: Exchange) -> None:
        in_flight = [(version.number, version.num_requests) for version in self.versions]
        told = ReleasesView(self.versions[-1].number, self._starting, in_flight, self.why_refused)
        await exchange.answer_json(told)
