"""A replica's side of a fleet: routes that a router asks."""

from __future__ import annotations

from contextlib import aclosing, suppress

import msgspec

from maitred.api.http.app import App
from maitred.api.http.errors import ClientGone
from maitred.api.http.exchange import Exchange
from maitred.api.http.sse import EventStream
from maitred.api.ops.fleet_feed import identity
from maitred.errors import PermissionDenied

LISTENING = "listen to the fleet's events"  # what it takes an administrator or the fleet's token for


async def version(app: App, exchange: Exchange) -> None:
    """What this server is, which a router believes rather than a 200."""
    index = app.tensors.index(ready_only=True) if app.tensors is not None else ()
    names = dict.fromkeys(entry.name for entry in index)  # of several versions once
    await exchange.answer_json(msgspec.structs.replace(identity(app.loaded_model), tensor_models=tuple(names)))


async def tell_fleet(app: App, exchange: Exchange) -> None:
    """The events, until the router leaves, takes nothing for `send_timeout_s`, or the server has nothing left to do.

    What waits for a slow router is a difference, so it is bounded by the keys there are and were.
    """
    if app.fleet_token.is_set and not app.fleet_token.is_shown_by(exchange.headers):
        raise PermissionDenied("this takes the fleet's token, in the header x-maitred-fleet-token")
    stream = EventStream(exchange, silence_s=0.0)
    with suppress(ClientGone):
        async with app.in_flight.watch(exchange), aclosing(app.fleet.events()) as events:
            async for event in events:
                await stream.write(event)
        await stream.done()
