"""`maitred top`: the live view as text, on a terminal or in a pipe; a second reader of the page's own stream."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maitred.cli.command import Command, Options
from maitred.cli.flags import UsageError, option
from maitred.core.errors import ServerError

if TYPE_CHECKING:
    from maitred.api.ops.live_feed import LiveFrame
    from maitred.cli.endpoint import Endpoint

PLAIN_WIDTH = 120
FLEET_POLL_S = 0.5  # between two views of a router's replicas
RETRY_S = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions:
    """What to watch"""

    url: str = option("http://127.0.0.1:8000", metavar="URL")
    """Where the server listens."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """An administrator's key, where the server has keys."""
    once: bool = False
    """Print one view and leave."""
    interval: float = 1.0
    """Seconds between views where no terminal shows them; on one, every frame is shown."""

    def __post_init__(self) -> None:
        if not self.interval >= 0:
            raise UsageError(f"--interval is {self.interval}; it must be 0 or more seconds")


class Ended(ServerError):
    """The stream ended: the server is going, or its engine is dead."""


def _run(options: Options) -> int:
    import asyncio

    asked = options[TopOptions]
    if asked.once or not sys.stdout.isatty():
        return asyncio.run(_plain(asked))
    return asyncio.run(_screen(asked))


async def _plain(asked: TopOptions) -> int:
    """One view after the other, as text that a script can read."""
    from maitred.cli.endpoint import HttpEndpoint
    from maitred.cli.top.screen import Rates, in_ascii, view

    draws = (sys.stdout.encoding or "").lower().startswith("utf")
    rates, shown_at = Rates(), None
    async with HttpEndpoint(asked.url, api_key=asked.api_key) as endpoint, aclosing(frames(endpoint)) as stream:
        if await _is_router(endpoint):
            return await _plain_fleet(endpoint, asked)
        async for frame in stream:
            rates.take(frame.engine)
            if not rates.known or (shown_at is not None and time.monotonic() - shown_at < asked.interval):
                continue  # a rate takes two frames
            if shown_at is not None:
                print()
            shown_at = time.monotonic()
            text = "\n".join(view(frame, rates, width=PLAIN_WIDTH))
            print(text if draws else in_ascii(text), flush=True)
            if asked.once:
                return 0
    raise Ended("the server is going, so there is no more to see")


async def _plain_fleet(router: Endpoint, asked: TopOptions) -> int:
    async with aclosing(_fleet_views(router, asked.interval)) as views:
        async for lines in views:
            print("\n".join(lines), flush=True)
            if asked.once:
                break
            print()
    return 0


async def _screen(asked: TopOptions) -> int:
    """The whole terminal, until q or Ctrl-C."""
    import asyncio

    watching = asyncio.create_task(_watch(asked))
    with _on_key("q", watching.cancel):
        try:
            await watching
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # Ctrl-C
    return 0


@contextmanager
def _on_key(key: str, act: Callable[[], object]) -> Iterator[None]:
    """Calls `act` when `key` is pressed, without Enter; nothing where keys cannot be read."""
    import asyncio
    import os
    import termios
    import tty

    if not sys.stdin.isatty():
        yield
        return
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        pressed = os.read(descriptor, 1024)
        if not pressed:
            loop.remove_reader(descriptor)  # the terminal is gone
        elif key.encode() in pressed.lower():
            act()

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSANOW)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


async def _watch(asked: TopOptions) -> None:
    """Show views until cancelled. A server that goes away is waited for."""
    import asyncio

    from rich.console import Console
    from rich.live import Live

    from maitred.cli.endpoint import HttpEndpoint, Refused, Unreachable
    from maitred.cli.top.screen import as_text

    keys = "q or Ctrl-C leaves" if sys.stdin.isatty() else "Ctrl-C leaves"
    console, failures = Console(), 0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                async with (
                    HttpEndpoint(asked.url, api_key=asked.api_key) as endpoint,
                    aclosing(_views(endpoint)) as views,
                ):
                    async for lines in views:
                        failures = 0
                        live.update(as_text([*lines, "", keys]), refresh=True)
                cause = "the server is going"
            except (Unreachable, Ended) as error:
                cause = str(error)
            except Refused as error:
                if error.status != 503:
                    raise  # waiting does not help
                cause = str(error)  # an engine that died is loaded again
            pause_s = RETRY_S[min(failures, len(RETRY_S) - 1)]
            failures += 1
            live.update(as_text([f"{cause}; trying again in {pause_s:g} s. {keys}."]), refresh=True)
            await asyncio.sleep(pause_s)


async def _views(endpoint: Endpoint) -> AsyncGenerator[list[str], None]:
    """The lines of one view after the other, as the terminal has room: of a router its fleet, else of the engine."""
    from maitred.cli.top.screen import Rates, view

    rates = Rates()
    if await _is_router(endpoint):
        async with aclosing(_fleet_views(endpoint)) as views:
            async for lines in views:
                yield lines
    async with aclosing(frames(endpoint)) as stream:
        async for frame in stream:
            rates.take(frame.engine)
            size = shutil.get_terminal_size()
            yield view(frame, rates, width=size.columns, height=size.lines - 2)


async def frames(endpoint: Endpoint) -> AsyncGenerator[LiveFrame, None]:
    """Frames until the server ends them. Raises Refused, Unreachable or Ended."""
    import msgspec

    from maitred.api.ops.live_feed import LiveFrame
    from maitred.cli.endpoint import Refused, error_text
    from maitred.cli.sse import DONE, SSEParser

    decoder, parser = msgspec.json.Decoder(LiveFrame), SSEParser()
    async with endpoint.get("/admin/live") as reply:
        if reply.status != 200:
            body = await reply.read()
            hint = "; give an administrator's --api-key" if reply.status in (401, 403) else ""
            raise Refused(reply.status, error_text(reply.status, body) + hint)
        async for piece in reply.body:
            for data in parser.feed(piece):
                if data == DONE:
                    return
                if data.startswith(b'{"error"'):
                    raise Ended(error_text(503, data))
                try:
                    yield decoder.decode(data)
                except msgspec.MsgspecError as error:
                    raise ServerError(
                        f"the live view has an unknown form ({error}); use maitred of its version"
                    ) from None


async def _is_router(endpoint: Endpoint) -> bool:
    """Whether `maitred route` listens there; what answers in another form does not. Raises Unreachable."""
    import msgspec

    async with endpoint.get("/version") as reply:
        told = await reply.read()
    try:
        return msgspec.json.decode(told, type=dict).get("name") == "maitred-route"
    except msgspec.MsgspecError:
        return False


async def _fleet_views(endpoint: Endpoint, poll_s: float = FLEET_POLL_S) -> AsyncGenerator[list[str], None]:
    """The lines of one view after the other, for ever. Raises Refused, Unreachable."""
    import asyncio

    from maitred.cli.console import inert
    from maitred.cli.endpoint import Refused, error_text
    from maitred.cli.fleet.status import lines, read_fleet

    while True:
        async with endpoint.get("/admin/fleet") as reply:
            told = await reply.read()
        if reply.status != 200:
            hint = "; give an administrator's --api-key" if reply.status in (401, 403) else ""
            raise Refused(reply.status, error_text(reply.status, told) + hint)
        yield ["maitred routes", *map(inert, lines(read_fleet(told)))]
        await asyncio.sleep(poll_s)


COMMAND = Command(
    path="top",
    summary="Watch a server's slots, queue, KV cache and tenants, or a router's replicas; q or Ctrl-C leaves.",
    run=_run,
    parts=(TopOptions,),
    positional="url",
    examples=("maitred top", "maitred top http://10.0.0.5:8000 --api-key KEY", "maitred top --once"),
)
