"""The adapters that a server's clients may name: which bytes each name stands for, and who still uses them.

It outlives engines, and tells each new one of all that are in use. An engine forgets an adapter when its name stands
for other bytes, or for none, and the last request that was let in with it has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager

from maitred.engine.frames import Command, ForgetAdapter, KnowAdapters
from maitred.engine.model_facts import AdapterFacts
from maitred.engine.queries import AdapterFolder

Introduce = Callable[[AdapterFolder], Awaitable[AdapterFacts]]


class AdapterBook:
    """Belongs to the event loop, once there is one."""

    def __init__(self, send: Callable[[Command], bool], introduce: Introduce, folder: str | None = None) -> None:
        """`introduce` has the engine read a folder; clients may load what lies in `folder`."""
        self._send, self._introduce, self.folder = send, introduce, folder
        self.named: dict[str, AdapterFacts] = {}
        self._kept: dict[str, AdapterFacts] = {}  # by key: those named, and those still in use
        self._users: Counter[str] = Counter()
        self._unused: dict[str, asyncio.Event] = {}  # set when the last user is gone, and then dropped

    def begin(self, adapters: Iterable[AdapterFacts]) -> None:
        """Those that the first engine knows from its start."""
        for facts in adapters:
            self.named[facts.name] = self._kept[facts.key] = facts

    def tell(self) -> None:
        """A new engine, before it gets its first request."""
        if self._kept:
            self._send(KnowAdapters(tuple(self._kept.values())))

    async def load(self, folder: AdapterFolder) -> AdapterFacts:
        """From now on the name stands for what lies there. Raises CheckpointError, ConfigError or EngineDead, and then
        nothing has changed.
        """
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
        """While a request has it, its engine knows it."""
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
