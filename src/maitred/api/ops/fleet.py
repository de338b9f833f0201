"""A replica's side of a fleet: routes that a router asks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing, suppress

import msgspec

from maitred.api.generate.complete import generate
from maitred.api.generate.dialect import Dialect
from maitred.api.generate.ways import FromRouter, Noted, Resumed, Way, fingerprint_of
from maitred.api.http.app import App
from maitred.api.http.bodies import BodyDecoder
from maitred.api.http.errors import ClientGone
from maitred.api.http.exchange import EventStream, Exchange
from maitred.api.http.routes import Route
from maitred.api.ops.fleet_feed import identity
from maitred.core.errors import CannotResume, InvalidRequest, PermissionDenied
from maitred.engine.model_facts import AdapterFacts
from maitred.fleet.told import FleetEvent, ResumeRequest, VersionResponse

LISTENING = "listen to the fleet's events"  # what it takes an administrator or the fleet's token for
MAX_TOLD_BYTES = 32 * 1024 * 1024  # of tokens, beside as much body as any request may have
_decoder = BodyDecoder(ResumeRequest)


async def version(app: App, exchange: Exchange) -> None:
    """What this server is, which a router believes rather than a 200."""
    index = app.tensors.index(ready_only=True) if app.tensors is not None else ()
    names = dict.fromkeys(entry.name for entry in index)  # of several versions once
    await exchange.answer_json(msgspec.structs.replace(identity(app.loaded_model), tensor_models=tuple(names)))


async def tell_fleet(app: App, exchange: Exchange) -> None:
    """The events, until the router leaves, takes nothing for `send_timeout_s`, or the server has nothing left to do.

    What waits for a slow router is a difference, so it is bounded by the keys there are and were.
    """
    if app.fleet_token.is_set and not exchange.from_router:
        raise PermissionDenied("this takes the fleet's token, in the header x-maitred-fleet-token")
    stream = EventStream(exchange, silence_s=0.0)
    with suppress(ClientGone):
        async with app.in_flight.watch(exchange), aclosing(app.fleet.events()) as events:
            async for event in events:
                await stream.write(event)
        await stream.done()


class Resume:
    """The route; `dialects` by the paths of theirs, or what theirs begin with, which ends in a slash."""

    def __init__(self, dialects: Mapping[str, Dialect]) -> None:
        self._dialects = dialects

    async def __call__(self, app: App, exchange: Exchange) -> None:
        if not exchange.from_router:
            raise PermissionDenied("this takes the fleet's token, in the header x-maitred-fleet-token")
        exchange.max_body_bytes += MAX_TOLD_BYTES
        asked = (await exchange.sent(_decoder)).body
        found = next((each for each in self._dialects if _is_of(each, asked.path)), None)
        if found is None:
            paths = ", ".join(self._dialects)
            raise InvalidRequest(f"{asked.path[:100]!r} is none of the paths that are resumed: {paths}", param="path")
        dialect, exchange.parameter = self._dialects[found], asked.path.removeprefix(found)
        exchange.format = dialect.format
        async with exchange.turn():
            body = bytes(asked.body)
            ask = dialect.decode(app, exchange, body)
            ways: list[Way] = [Noted(app, exchange, asked.path, body)] if app.fleet.is_on else []
        _check_numerics(app, ask.adapter, asked.head.fingerprint)
        await generate(app, exchange, ask, [*ways, Resumed(app, asked, ask), FromRouter(app, exchange, ask)])


def _is_of(known: str, path: str) -> bool:
    return path.startswith(known) if known.endswith("/") else path == known


def _check_numerics(app: App, adapter: AdapterFacts | None, fingerprint: str) -> None:
    own = fingerprint_of(app.model, adapter)
    why_not = app.replica.why_not_resumed(same_numbers=own == fingerprint)
    if why_not is not None:
        raise CannotResume(
            f"the stream cannot go on here: {why_not}; it was begun by {fingerprint[:200]!r}, and this is {own!r}"
        )


def fleet_routes(dialects: Mapping[str, Dialect], *, stream: type, errors: tuple[int, ...]) -> tuple[Route, ...]:
    """Records of the routes for routers; `dialects`, `stream` and `errors` are of answers that are resumed."""
    return (
        Route(
            path="/version",
            handler=version,
            is_for_routers=True,
            summary="What this server is: version, models, slots, and what its tokens depend on.",
            while_loading=True,
            answer=VersionResponse,
        ),
        Route(
            path="/fleet/events",
            handler=tell_fleet,
            is_for_routers=True,
            summary="For a router: which prefixes are here and how busy this server is, as both change.",
            admin=LISTENING,
            event=FleetEvent,
            errors=(401, 403, 503),
        ),
        Route(
            method="POST",
            path="/fleet/resume",
            handler=Resume(dialects),
            summary="For a router: go on with a stream that another replica began.",
            body=ResumeRequest,
            event=stream,
            errors=(*errors, 409),
        ),
    )
