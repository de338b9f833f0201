"""Replicas of the router's own: what the core asks for goes to a launcher, what becomes of it to the fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from maitred.api.http.logs import log_fields
from maitred.api.route.fleet import Fleet, LiveReplica
from maitred.fleet.launch import Ended, IsReady, Launcher, LaunchEvent, Listens
from maitred.fleet.origins import parse_target
from maitred.fleet.replicas import ReplicaFacts, State
from maitred.fleet.upstream import Ask, UpstreamFailed, request_head

logger = logging.getLogger("maitred.fleet")
ORDER_S = 600.0  # for what it has to end before it sleeps, or a large model
MAX_TOLD_BYTES = 64 * 1024

MakeLauncher = Callable[[Callable[[LaunchEvent], None]], Launcher]
"""Given who hears its events."""


class LaunchedReplicas:
    """`Launching` over a launcher. On the router's event loop."""

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
        error = await self._post(live, "/sleep")
        if error is not None:
            fields = {"replica": live.facts.name, "error": error}
            log_fields(logger, logging.WARNING, "a replica does not fall asleep", fields)

    async def _wake(self, live: LiveReplica) -> None:
        """Wake a replica; one that does not wake up is started anew."""
        error = await self._post(live, "/wake_up")
        if error is None:
            self._fleet.tell(live, replace(live.facts, state=State.READY))
            return
        fields = {"replica": live.facts.name, "error": error}
        log_fields(logger, logging.WARNING, "a replica does not wake up", fields)
        self._launcher.restart(live.facts.name)

    async def _post(self, live: LiveReplica, path: str) -> str | None:
        """Post an order; returns what went wrong, if anything."""
        try:
            async with asyncio.timeout(ORDER_S):
                answer = await live.upstream.send(Ask(request_head("POST", path, live.origin, self._headers, 0)))
                body = await answer.whole(MAX_TOLD_BYTES)
        except UpstreamFailed as error:
            return str(error)
        except TimeoutError:
            return f"it gave no answer within {ORDER_S:g} s"
        return None if answer.status == 200 else f"it answers {answer.status}: {body[:200].decode('utf-8', 'replace')}"

    # -- what becomes of them

    def _heard(self, event: LaunchEvent) -> None:
        match event:
            case Listens(name, url, pid):
                facts = ReplicaFacts(name=name, url=url, state=State.STARTING, is_launched=True, pid=pid)
                self._loading[name] = facts
                self._fleet.announce(facts)
            case IsReady(name, start_s):
                log_fields(logger, logging.INFO, "a replica is ready", {"replica": name, "start_s": round(start_s, 2)})
                facts = self._loading.pop(name)
                self._fleet.add(facts, parse_target(facts.url).origin)
            case Ended(name, cause, as_told, again_in_s):
                self._ended(name, cause, as_told=as_told, again_in_s=again_in_s)

    def _ended(self, name: str, cause: str, *, as_told: bool, again_in_s: float | None) -> None:
        self._loading.pop(name, None)
        fields = {"replica": name, "cause": cause, "again_in_s": again_in_s}
        log_fields(logger, logging.INFO if as_told else logging.WARNING, "a replica ended", fields)
        if not as_told and again_in_s is None:
            self._give_up(f"{name} cannot be started: {cause}")
            return
        self._fleet.remove(name, returns=again_in_s is not None)
