"""`maitred top` at a router: its replicas and who is held, asked for again and again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import msgspec

from maitred.cli.console import inert
from maitred.cli.endpoint import Refused, error_text
from maitred.cli.fleet.status import lines, read_fleet

if TYPE_CHECKING:
    from maitred.cli.endpoint import Endpoint

POLL_S = 0.5


class _Version(msgspec.Struct):
    name: str = ""


async def is_router(endpoint: Endpoint) -> bool:
    """Whether `maitred route` listens there; what answers in another form does not. Raises Unreachable."""
    async with endpoint.get("/version") as reply:
        told = await reply.read()
    try:
        return msgspec.json.decode(told, type=_Version).name == "maitred-route"
    except msgspec.MsgspecError:
        return False


async def fleet_views(endpoint: Endpoint, poll_s: float = POLL_S) -> AsyncGenerator[list[str], None]:
    """The lines of one view after the other, for ever. Raises Refused, Unreachable."""
    while True:
        async with endpoint.get("/admin/fleet") as reply:
            told = await reply.read()
        if reply.status != 200:
            hint = "; give an administrator's --api-key" if reply.status in (401, 403) else ""
            raise Refused(reply.status, error_text(reply.status, told) + hint)
        yield ["maitred routes", *map(inert, lines(read_fleet(told)))]
        await asyncio.sleep(poll_s)
