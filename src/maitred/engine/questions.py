"""Questions to an engine that wait for their answers; which there are stands in `queries`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from maitred.engine.frames import Ask, encode
from maitred.engine.queries import Query
from maitred.errors import EngineDead, MaitredError

A = TypeVar("A")
R = TypeVar("R")


class Questions:
    """Those under way. On one event loop."""

    def __init__(self, send: Callable[[Ask], bool], death: Callable[[], EngineDead]) -> None:
        """`send` gives False when there is no engine, `death` why there is none."""
        self._send, self._death = send, death
        self._open: dict[int, tuple[Query[Any, Any], asyncio.Future[Any]]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    async def ask(self, query: Query[A, R], argument: A) -> R:
        """Raises EngineDead, and what the engine answers with."""
        number = next(self._numbers)
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if not self._send(Ask(number, query.name, msgspec.Raw(encode(argument)))):
            raise self._death()
        self._open[number] = (query, answer)
        try:
            return await answer
        finally:
            self._open.pop(number, None)

    def tell(self, query: Query[A, R], argument: A) -> None:
        """Nobody waits for the answer; without an engine nothing happens."""
        self._send(Ask(next(self._numbers), query.name, msgspec.Raw(encode(argument))))

    def answered(self, number: int, result: msgspec.Raw) -> None:
        if number not in self._open:
            return  # nobody waits for it any more
        query, _ = self._open[number]
        try:
            self.settle(number, msgspec.msgpack.decode(result, type=query.result))
        except (msgspec.DecodeError, MaitredError) as error:
            self.settle(number, EngineDead(f"the engine's answer to {query.name} cannot be read: {error}"))

    def settle(self, number: int, outcome: object) -> None:
        """An error is raised where the answer is waited for."""
        _, answer = self._open.get(number, (None, None))
        if answer is None or answer.done():
            return
        if isinstance(outcome, MaitredError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    def end_all(self) -> None:
        """There is no engine any more that could answer."""
        for number in list(self._open):
            self.settle(number, self._death())
