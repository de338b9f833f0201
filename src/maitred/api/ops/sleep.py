"""Sleep by hand, as vLLM has it: POST /sleep, POST /wake_up, GET /is_sleeping."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

import msgspec

from maitred.api.http.app import App
from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange
from maitred.errors import InvalidRequest

LEVELS = ("0", "1", "2")
MODES = ("wait", "abort")
SLEEP_QUERY: dict[str, dict[str, Any]] = {
    "level": {"enum": [int(level) for level in LEVELS], "default": 1},
    "mode": {"enum": [*MODES], "default": "wait"},
}
WAKE_QUERY: dict[str, dict[str, Any]] = {"tags": {"type": "array", "items": {"type": "string"}}}


class Sleeping(msgspec.Struct, frozen=True):
    """Whether there is no engine, on purpose."""

    is_sleeping: bool


async def sleep(app: App, exchange: Exchange) -> None:
    """End the engine's process; 200 when it is gone. `mode` wait lets requests finish first, abort ends them.

    Weights and KV go at every `level`: the next start maps the weights again.
    """
    query = parse_qs(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    _one_of(query, "level", LEVELS, "1")
    mode = _one_of(query, "mode", MODES, "wait")
    async with app.in_flight.watch(exchange):
        await app.replica.sleep(abort=mode == "abort")
    await exchange.answer(b"", 200, ())


async def wake_up(app: App, exchange: Exchange) -> None:
    """Start the engine; 200 when it is ready. `tags` are accepted: weights and KV come together."""
    async with app.in_flight.watch(exchange):
        await app.replica.wake_up()
    await exchange.answer(b"", 200, ())


async def is_sleeping(app: App, exchange: Exchange) -> None:
    await exchange.answer_json(Sleeping(app.replica.state().asleep))


def _one_of(query: dict[str, list[str]], name: str, choices: tuple[str, ...], default: str) -> str:
    value = query.get(name, [default])[-1]
    if value not in choices:
        raise InvalidRequest(f"{name} is {shortened(repr(value))}; choose one of {', '.join(choices)}", param=name)
    return value
