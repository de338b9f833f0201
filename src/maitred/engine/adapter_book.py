"""The adapters that a server's clients may name: which bytes each name stands for, and which requests still use them.

The book outlives engines, and tells each new one of all adapters in use. An engine forgets an adapter when its name
stands for other bytes, or for none, and the last request that was let in with it has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from maitred.engine.frames import Command, ForgetAdapter, KnowAdapters
from maitred.engine.live_requests import LiveRequest
from maitred.engine.model_facts import AdapterFacts
from maitred.engine.queries import AdapterFolder

Introduce = Callable[[AdapterFolder], Awaitable[AdapterFacts]]


async def _is_awake() -> None:
    """Does nothing, for an engine that never sleeps."""


class AtWork(NamedTuple):
    """Names of the adapters that requests have, in order of arrival."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]  # of requests that were in no step yet


def adapters_at_work(requests: Iterable[LiveRequest]) -> AtWork:
    names: tuple[dict[str, None], dict[str, None]] = {}, {}
    for live in requests:
        if live.spec.adapter:
            names[live.charges.first_scheduled_at is None][live.spec.adapter.partition("@")[0]] = None
    return AtWork(*map(tuple, names))


class AdapterBook:
    """Belongs to the event loop, once there is one."""

    def __init__(
        self,
        send: Callable[[Command], bool],
        introduce: Introduce,
        folder: str | None = None,
        *,
        wake_up: Callable[[], Awaitable[None]] = _is_awake,
        at_work: Callable[[], AtWork] = lambda: AtWork((), ()),
    ) -> None:
        """`introduce` has the engine read a folder; `wake_up` returns when there is one again, after a sleep. Clients
        may load what lies in `folder`.
        """
        self._send, self._introduce, self._wake_up, self.folder = send, introduce, wake_up, folder
        self.at_work = at_work
        self.named: dict[str, AdapterFacts] = {}
        self._kept: dict[str, AdapterFacts] = {}  # by key: those named, and those still in use
        self._users: Counter[str] = Counter()
        self._unused: dict[str, asyncio.Event] = {}  # set when the last user is gone, and then dropped

    def begin(self, adapters: Iterable[AdapterFacts]) -> None:
        """Enter the adapters that the first engine knows from its start."""
        for facts in adapters:
            self.named[facts.name] = self._kept[facts.key] = facts

    @property
    def is_used(self) -> bool:
        """Whether there are adapters, or may be."""
        return bool(self._kept) or self.folder is not None

    def tell(self) -> None:
        """A new engine, before it gets its first request."""
        if self._kept:
            self._send(KnowAdapters(tuple(self._kept.values())))

    async def load(self, folder: AdapterFolder) -> AdapterFacts:
        """Have the name stand for this folder from now on; wakes a sleeping engine, as any request does. Raises
        CheckpointError, ConfigError or EngineDead, and then nothing has changed.
        """
        await self._wake_up()
        facts = await self._introduce(folder)
        before = self.named.get(folder.name)
        self.named[facts.name] = self._kept[facts.key] = facts
        self._send(KnowAdapters((facts,)))
        if before is not None and before.key != facts.key:
            self._forget_if_unused(before.key)
        return facts

    async def unload(self, name: str) -> None:
        """New requests do not find it; returns when those that have it are done. Raises KeyError."""
        key = self.named.pop(name).key
        unused = self._unused.setdefault(key, asyncio.Event())
        self._forget_if_unused(key)
        await unused.wait()

    @contextmanager
    def using(self, facts: AdapterFacts | None) -> Iterator[None]:
        """Keep the adapter known to the engine while a request uses it."""
        if facts is None:
            yield
            return
        self._users[facts.key] += 1
        try:
            yield
        finally:
            self._users[facts.key] -= 1
            self._forget_if_unused(facts.key)

    def _forget_if_unused(self, key: str) -> None:
        facts = self._kept.get(key)
        if facts is None or (self._users[key] and self.named.get(facts.name) != facts):
            return
        if self.named.get(facts.name) != facts:
            del self._kept[key], self._users[key]
            self._send(ForgetAdapter(key))
        unused = self._unused.pop(key, None)
        if unused is not None:  # or its name stands for it again
            unused.set()
