"""`maitred ps`: which models a server holds, how, how large, and since when; tensor models, and their lanes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.core.errors import ServerError

if TYPE_CHECKING:
    from maitred.api.ops.live import LoadedModel, TensorModelState
    from maitred.cli.endpoint import Endpoint
    from maitred.scheduler.queue_view import QueueView

TENSOR_HEADINGS = ("TENSOR MODEL", "VERSION", "STATE", "REASON")
HEADINGS = ("MODEL", "PARAMETERS", "DTYPE", "WEIGHTS", "KV CACHE", "CONTEXT", "ON", "SINCE")


@dataclass(frozen=True, slots=True, kw_only=True)
class PsOptions:
    """The server"""

    url: str = option("http://127.0.0.1:8000", metavar="URL")
    """Where it listens."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """An administrator's key, where the server has keys."""
    json: bool = False
    """Print the server's answer as it is."""


def _run(options: Options) -> int:
    import asyncio

    return asyncio.run(_ps(options[PsOptions]))


async def _ps(asked: PsOptions) -> int:
    from maitred.cli.endpoint import HttpEndpoint

    async with HttpEndpoint(asked.url, api_key=asked.api_key, timeout_s=30.0) as endpoint:
        body = await _answer(endpoint)
        queue = None if asked.json else await _queue(endpoint)
    if asked.json:
        print(body.decode())
        return 0
    import msgspec

    from maitred.api.ops.live import LoadedModels
    from maitred.cli.top.screen import lane_lines

    try:
        told = msgspec.json.decode(body, type=LoadedModels)
    except msgspec.MsgspecError as error:
        raise ServerError(f"{asked.url} answers /admin/models in a form unknown here: {error}") from None
    if told.models or not told.tensor_models:
        for line in table([HEADINGS, *(row(model, time.time()) for model in told.models)]):
            print(line)
    if told.tensor_models:
        for line in table([TENSOR_HEADINGS, *map(tensor_row, told.tensor_models)]):
            print(line)
    for line in lane_lines(queue.lanes, len(queue.lanes)) if queue is not None else ():
        print(line)
    return 0


async def _queue(endpoint: Endpoint) -> QueueView | None:
    """The queue, for its lanes of tensor models; None from a server without a queue, or with another form of it."""
    import msgspec

    from maitred.scheduler.queue_view import QueueView

    async with endpoint.get("/admin/queue?limit=0") as reply:
        body = await reply.read()
    try:
        return msgspec.json.decode(body, type=QueueView) if reply.status == 200 else None
    except msgspec.MsgspecError:
        return None


async def _answer(endpoint: Endpoint) -> bytes:
    from maitred.cli.endpoint import Refused, error_text

    async with endpoint.get("/admin/models") as reply:
        body = await reply.read()
    if reply.status != 200:
        hint = "; give an administrator's --api-key" if reply.status in (401, 403) else "; is it maitred, and this new?"
        raise Refused(reply.status, error_text(reply.status, body) + hint)
    return body


def row(model: LoadedModel, now: float) -> tuple[str, ...]:
    """One line of the table; `now` in unix seconds."""
    from maitred.cli.console import inert
    from maitred.engine.memory import format_bytes

    def known(value: object) -> str:
        return "-" if value is None else inert(str(value))

    dtype = known(model.dtype) + (f", KV {model.kv_dtype}" if model.kv_dtype not in (None, model.dtype) else "")
    name = ", ".join((model.id, *model.aliases))
    return (
        inert(name),
        "-" if model.num_parameters is None else f"{model.num_parameters / 1e6:,.1f} M",
        inert(dtype),
        "-" if model.weights_bytes is None else format_bytes(model.weights_bytes),
        "-" if model.kv_bytes is None else format_bytes(model.kv_bytes),
        f"{model.max_model_len:,}",
        " ".join(known(part) for part in (model.executor, model.device) if part is not None) or "-",
        ago(now - model.since),
    )


def tensor_row(model: TensorModelState) -> tuple[str, ...]:
    from maitred.cli.console import inert

    reason = " ".join(inert(model.reason).split())
    return (inert(model.name), str(model.version or "-"), model.state or "NOT LOADED", reason)


def ago(seconds: float) -> str:
    """`3 h 12 min ago`: the two largest units."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for name, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (name == "s" and not parts):
            parts.append(f"{count} {name}")
    return " ".join(parts[:2]) + " ago"


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


COMMAND = Command(
    path="ps",
    summary="List the models that a server holds: dtype, memory, context, since when; tensor models, and their lanes.",
    run=_run,
    parts=(PsOptions,),
    positional="url",
    examples=("maitred ps", "maitred ps http://10.0.0.5:8000 --api-key KEY", "maitred ps --json"),
)
