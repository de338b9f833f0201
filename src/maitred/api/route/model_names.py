"""Names that the replicas answer to: which a caller may use, and a new look where a request brings another one.

Models come and go with replicas, which are followed. Adapters are loaded while a replica runs, and it tells of them
only when it is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from maitred.api.http.errors import shortened, told_names
from maitred.api.route.fleet import Fleet, LiveReplica
from maitred.api.route.follow import union_of_cards
from maitred.errors import ModelNotFound
from maitred.tenancy.caller import Caller

PAUSE_S = 1.0  # between two looks
LOOK_S = 1.0  # that a request waits for one
BEFORE_NAMES = ("/v1/models/", "/v2/models/")  # of paths
AFTER_NAMES = ("/", ":")
OF_ALL = "/v2/models/stats"

Learn = Callable[[Fleet, LiveReplica], Awaitable[None]]
"""Asks a replica for its models, and tells the fleet."""


class ModelNames:
    """Of one router; on its event loop."""

    def __init__(self, fleet: Fleet, learn: Learn) -> None:
        self._fleet, self._learn = fleet, learn
        self._looked_at = -PAUSE_S
        self._next: asyncio.Task[None] | None = None  # a look that has not begun

    def cards(self, caller: Caller) -> list[dict[str, Any]]:
        """What any replica serves, but for adapters that are not the caller's."""
        cards = union_of_cards(list(self._fleet.replicas.values()))
        return [card for card in cards if not card.get("parent") or caller.tenant.may_use(card["id"])]

    async def check(self, name: str | None, caller: Caller) -> None:
        """Raises ModelNotFound, for others' adapters as for what is not there. Before any replica has told its models,
        all names pass.
        """
        core = self._fleet.core
        if name is None or not core.models:
            return
        if name not in core.models:
            await self._look()
        if name not in core.models or not (caller.tenant.may_use(name) or not self._is_adapter(name)):
            raise self.not_found(name, caller)

    async def named_in(self, path: str) -> str | None:
        """The model that a path asks for, if a replica serves it: /v2/models/NAME/infer, /v1/models/NAME:predict."""
        if not path.startswith(BEFORE_NAMES) or path == OF_ALL:
            return None
        if not any(name in self._fleet.core.models for name in _names_in(path)):
            await self._look()
        return next((name for name in _names_in(path) if name in self._fleet.core.models), None)

    def not_found(self, name: str, caller: Caller) -> ModelNotFound:
        there = told_names([str(card["id"]) for card in self.cards(caller)]) or "none yet"
        return ModelNotFound(f"no replica serves the model {shortened(repr(name))}; there are: {there}", param="model")

    def _is_adapter(self, name: str) -> bool:
        return any(name in live.adapters for live in self._fleet.replicas.values())

    async def _look(self) -> None:
        """Returns when all replicas were asked after this call, or when that takes too long."""
        if self._next is None:
            self._next = asyncio.create_task(self._look_in_turn(), name="look for models")
        await asyncio.wait({self._next}, timeout=PAUSE_S + LOOK_S)

    async def _look_in_turn(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._looked_at + PAUSE_S - loop.time())
        self._next, self._looked_at = None, loop.time()  # who comes from now on needs another look
        await asyncio.gather(*(self._learn(self._fleet, live) for live in self._fleet.replicas.values()))


def _names_in(path: str) -> Iterator[str]:
    """The longest first: names of language models may have slashes."""
    _, _, name = path.partition("/models/")
    while name:
        yield name
        name = name[: max(map(name.rfind, AFTER_NAMES))] if any(mark in name for mark in AFTER_NAMES) else ""
