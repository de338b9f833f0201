"""`maitred top`: the live view as text, on a terminal or in a pipe. `maitred ps`: the models that a server holds."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from maitred.cli.command import Command, Options
from maitred.cli.console import columns, inert
from maitred.cli.flags import UsageError, option
from maitred.core.errors import ServerError

if TYPE_CHECKING:
    from rich.text import Text

    from maitred.api.ops.live import LoadedModel, LoadedModels, TensorModelState
    from maitred.api.ops.live_feed import LiveFrame, Percentiles
    from maitred.cli.endpoint import HttpEndpoint
    from maitred.engine.live_view import LiveView, QueuedRequest, RunningRequest
    from maitred.scheduler.queue_view import LaneView, QueueView


PLAIN_WIDTH = 120
FLEET_POLL_S = 0.5  # between two views of a router's replicas
MODELS_FROM = 24  # lines of a terminal, besides those of the models, from which on they are shown too
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


class ViewEnded(ServerError):
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

    draws = (sys.stdout.encoding or "").lower().startswith("utf")
    rates, shown_at = Rates(), None
    async with HttpEndpoint(asked.url, api_key=asked.api_key) as endpoint, aclosing(frames(endpoint)) as stream:
        if await _is_router(endpoint):
            return await _plain_fleet(endpoint, asked)
        held = await _held(endpoint)
        async for frame in stream:
            rates.take(frame.engine)
            if not rates.known or (shown_at is not None and time.monotonic() - shown_at < asked.interval):
                continue  # a rate takes two frames
            if shown_at is not None:
                print()
            shown_at = time.monotonic()
            text = "\n".join([*view(frame, rates, width=PLAIN_WIDTH), "", *model_lines(held, time.time())])
            print(text if draws else in_ascii(text), flush=True)
            if asked.once:
                return 0
    raise ViewEnded("the server is going, so there is no more to see")


async def _plain_fleet(router: HttpEndpoint, asked: TopOptions) -> int:
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

    from maitred.cli.endpoint import HttpEndpoint, ServerRefused, Unreachable

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
            except (Unreachable, ViewEnded) as error:
                cause = str(error)
            except ServerRefused as error:
                if error.status != 503:
                    raise  # waiting does not help
                cause = str(error)  # an engine that died is loaded again
            pause_s = RETRY_S[min(failures, len(RETRY_S) - 1)]
            failures += 1
            live.update(as_text([f"{cause}; trying again in {pause_s:g} s. {keys}."]), refresh=True)
            await asyncio.sleep(pause_s)


async def _views(endpoint: HttpEndpoint) -> AsyncGenerator[list[str], None]:
    """The lines of one view after the other, as the terminal has room: of a router its fleet, else of the engine."""

    rates = Rates()
    if await _is_router(endpoint):
        async with aclosing(_fleet_views(endpoint)) as views:
            async for lines in views:
                yield lines
    held = await _held(endpoint)
    async with aclosing(frames(endpoint)) as stream:
        async for frame in stream:
            rates.take(frame.engine)
            size, models = shutil.get_terminal_size(), ["", *model_lines(held, time.time())]
            if size.lines - len(models) < MODELS_FROM:
                models = []
            lines = view(frame, rates, width=size.columns, height=size.lines - 2 - len(models))
            yield [*lines, *(line[: size.columns] for line in models)]


async def frames(endpoint: HttpEndpoint) -> AsyncGenerator[LiveFrame, None]:
    """Frames until the server ends them. Raises Refused, Unreachable or Ended."""
    import msgspec

    from maitred.api.ops.live_feed import LiveFrame
    from maitred.cli.endpoint import ADMIN_HINT, DONE, ServerRefused, SSEParser, error_text

    decoder, parser = msgspec.json.Decoder(LiveFrame), SSEParser()
    async with endpoint.get("/admin/live") as reply:
        if reply.status != 200:
            body = await reply.read()
            hint = ADMIN_HINT if reply.status in (401, 403) else ""
            raise ServerRefused(reply.status, error_text(reply.status, body) + hint)
        async for piece in reply.body:
            for data in parser.feed(piece):
                if data == DONE:
                    return
                if data.startswith(b'{"error"'):
                    raise ViewEnded(error_text(503, data))
                try:
                    yield decoder.decode(data)
                except msgspec.MsgspecError as error:
                    raise ServerError(
                        f"the live view has an unknown form ({error}); use maitred of its version"
                    ) from None


async def _is_router(endpoint: HttpEndpoint) -> bool:
    """Whether `maitred route` listens there; what answers in another form does not. Raises Unreachable."""
    import msgspec

    async with endpoint.get("/version") as reply:
        told = await reply.read()
    try:
        return msgspec.json.decode(told, type=dict).get("name") == "maitred-route"
    except msgspec.MsgspecError:
        return False


async def _fleet_views(endpoint: HttpEndpoint, poll_s: float = FLEET_POLL_S) -> AsyncGenerator[list[str], None]:
    """The lines of one view after the other, for ever. Raises Refused, Unreachable."""
    import asyncio

    from maitred.cli.fleet import lines, read_fleet

    while True:
        told = await endpoint.whole("/admin/fleet")
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


TENSOR_HEADINGS = ("TENSOR MODEL", "VERSION", "STATE", "REASON")
MODEL_HEADINGS = ("MODEL", "PARAMETERS", "DTYPE", "WEIGHTS", "KV CACHE", "CONTEXT", "ON", "SINCE")


@dataclass(frozen=True, slots=True, kw_only=True)
class PsOptions:
    """The server"""

    url: str = option("http://127.0.0.1:8000", metavar="URL")
    """Where it listens."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """An administrator's key, where the server has keys."""
    json: bool = False
    """Print the server's answer as it is."""


def _run_ps(options: Options) -> int:
    import asyncio

    return asyncio.run(_ps(options[PsOptions]))


async def _ps(asked: PsOptions) -> int:
    from maitred.cli.endpoint import HttpEndpoint

    async with HttpEndpoint(asked.url, api_key=asked.api_key, timeout_s=30.0) as endpoint:
        if asked.json:
            print((await _answer(endpoint)).decode())
            return 0
        held, queue = await _held(endpoint), await _lanes(endpoint)
    lanes = lane_lines(queue.lanes, len(queue.lanes)) if queue is not None else []
    for line in (*model_lines(held, time.time()), *lanes):
        print(line)
    return 0


async def _held(endpoint: HttpEndpoint) -> LoadedModels:
    """The models that the server holds. Raises ServerRefused, Unreachable, ServerError."""
    import msgspec

    from maitred.api.ops.live import LoadedModels

    try:
        return msgspec.json.decode(await _answer(endpoint), type=LoadedModels)
    except msgspec.MsgspecError as error:
        raise ServerError(f"{endpoint.url} answers /admin/models in a form unknown here: {error}") from None


def model_lines(held: LoadedModels, now: float) -> list[str]:
    """A table of models, and of tensor models; `now` in unix seconds."""
    found: list[str] = []
    if held.models or not held.tensor_models:
        found += columns([MODEL_HEADINGS, *(model_row(model, now) for model in held.models)])
    if held.tensor_models:
        found += columns([TENSOR_HEADINGS, *map(tensor_row, held.tensor_models)])
    return found


async def _lanes(endpoint: HttpEndpoint) -> QueueView | None:
    """The queue, for its lanes of tensor models; None from a server without a queue, or with another form of it."""
    import msgspec

    from maitred.scheduler.queue_view import QueueView

    async with endpoint.get("/admin/queue?limit=0") as reply:
        body = await reply.read()
    try:
        return msgspec.json.decode(body, type=QueueView) if reply.status == 200 else None
    except msgspec.MsgspecError:
        return None


async def _answer(endpoint: HttpEndpoint) -> bytes:
    return await endpoint.whole("/admin/models", hint="; is it maitred, and this new?", hint_at=range(600))


def model_row(model: LoadedModel, now: float) -> tuple[str, ...]:
    """One line of the table; `now` in unix seconds."""
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
        f"{model.max_model_len:,}" if model.max_model_len else "-",
        " ".join(known(part) for part in (model.executor, model.device) if part is not None) or "-",
        ago(now - model.since) if model.state == "ready" else model.state,
    )


def tensor_row(model: TensorModelState) -> tuple[str, ...]:

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


PS = Command(
    path="ps",
    summary="List the models that a server holds: dtype, memory, context, since when; tensor models, and their lanes.",
    run=_run_ps,
    parts=(PsOptions,),
    positional="url",
    examples=("maitred ps", "maitred ps http://10.0.0.5:8000 --api-key KEY", "maitred ps --json"),
)


RATE_S = 2.0  # that a rate is taken over
MIN_WIDTH = 60
QUEUE_LINES = 8
TENANT_LINES = 6
LANE_LINES = 8
BAR = 24
_ASCII = str.maketrans({"·": ".", "░": ":", "▓": "+", "█": "#", "…": "~"})


class Rates:
    """Counters that only grow, as rates over the last seconds."""

    def __init__(self) -> None:
        self._seen: list[LiveView] = []

    def take(self, view: LiveView) -> None:
        if self._seen and view.now < self._seen[-1].now:  # another engine, with another clock
            self._seen = []
        self._seen.append(view)
        while len(self._seen) > 2 and self._seen[1].now < view.now - RATE_S:
            self._seen.pop(0)

    @property
    def known(self) -> bool:
        return len(self._seen) > 1

    @property
    def tokens_per_s(self) -> float | None:
        if not self.known or (elapsed := self._seen[-1].now - self._seen[0].now) <= 0:
            return None
        first, last = self._seen[0].counters, self._seen[-1].counters
        return (last.num_generated_tokens - first.num_generated_tokens) / elapsed

    @property
    def step_s(self) -> float | None:
        if not self.known:
            return None
        first, last = self._seen[0], self._seen[-1]
        steps = last.counters.num_steps - first.counters.num_steps
        return (last.execute_s + last.host_s - first.execute_s - first.host_s) / steps if steps else None


def view(frame: LiveFrame, rates: Rates, *, width: int, height: int | None = None) -> list[str]:
    """All parts, no line longer than `width`; with `height`, slots and queue give up lines so that it fits."""
    width = max(width, MIN_WIDTH)
    head = [*_summary(frame, rates), _blocks(frame.engine, width), ""]
    tenants, queue = list(_tenants(frame.engine)), list(_queue(frame.engine, QUEUE_LINES))
    slots, lanes = list(_slots(frame)), lane_lines(frame.engine.lanes, LANE_LINES)
    tenants = [*lanes, *([""] if lanes and tenants else []), *tenants]
    if height is not None:
        tenants = _shortened(tenants, max(3, height - len(head) - 9))
        queue = _shortened(queue, max(3, height - len(head) - min(len(slots), 8) - len(tenants) - 3))
        slots = _shortened(slots, max(3, height - len(head) - len(queue) - len(tenants) - 3))
    lines = [*head, *slots, "", *queue, *(["", *tenants] if tenants else [])]
    return [inert(line)[:width].rstrip() for line in lines]


def as_text(lines: Sequence[str]) -> Text:
    """Text for a terminal: headings stand out; what clients wrote is text and nothing else."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop")
    for line in lines:
        style = "bold" if line.isupper() or line.startswith("maitred") else ""
        style = "red" if " preempted " in f" {line} " and not style else style
        text.append(line + "\n", style=style)
    return text


def _summary(frame: LiveFrame, rates: Rates) -> list[str]:
    engine = frame.engine
    asked = engine.counters.num_prefix_queried_tokens
    hits = f"{engine.counters.num_prefix_hit_tokens / asked:.0%}" if asked else "-"
    rate = "-" if rates.tokens_per_s is None else f"{rates.tokens_per_s:,.0f}"
    drafts = engine.counters.num_draft_tokens
    accepted = f"   drafts accepted {engine.counters.num_accepted_tokens / drafts:.0%}" if drafts else ""
    return [
        f"maitred serves {frame.model}, policy {engine.policy}",
        f"slots {engine.num_running} of {engine.max_num_seqs}   waiting {engine.num_waiting}   new tokens/s {rate}   "
        f"step {seconds(rates.step_s)}   prompt from cache {hits}   preemptions {engine.counters.num_preemptions}"
        f"{accepted}",
        f"{_times('first token', frame.first_token)}   {_times('in the queue', frame.queue)}",
        f"{_times('between tokens', frame.between_tokens)}   (50% / 90% / 99% of the last minute)",
    ]


def _times(name: str, times: Percentiles) -> str:
    if not times.count:
        return f"{name} -"
    return f"{name} {' / '.join(seconds(value) for value in (times.p50, times.p90, times.p99))}"


def _blocks(engine: LiveView, width: int) -> str:
    """Use in numbers and as a row of signs, each the most frequent state of its share of the blocks."""
    blocks = engine.blocks
    share = blocks.num_used / blocks.num_blocks if blocks.num_blocks else 0.0
    told = f"KV {share:4.0%} of {blocks.num_blocks:,} blocks  "
    codes = [code for code, count in zip(blocks.runs[::2], blocks.runs[1::2], strict=True) for _ in range(count)]
    columns = max(1, min(width - len(told), len(codes)))
    edges = [len(codes) * i // columns for i in range(columns + 1)]
    return told + "".join(_sign(codes[start:end]) for start, end in pairwise(edges) if end > start)


def _sign(codes: Sequence[int]) -> str:
    from maitred.engine.live_view import CACHED, FREE, SHARED

    (code, _), *_ = Counter(codes).most_common(1)
    return {FREE: "·", CACHED: "░", SHARED: "▓"}.get(code, "█")


def _slots(frame: LiveFrame) -> Iterator[str]:
    engine = frame.engine
    numbers = f"{'PROMPT':>7} {'NEW':>6} {'MOST':>6} {'BLOCKS':>6} {'AGE':>8}"
    yield f"{'SLOT':>4} {'REQUEST':20} {'TENANT':14} {'PHASE':8} {numbers}"
    rows = sorted(zip(frame.seats, engine.running, strict=True), key=lambda row: row[0])
    for slot, request in rows:
        yield _slot(slot, request, engine.now)
    if not rows:
        yield "     nobody is served"
    if engine.num_running > len(rows):
        yield f"     and {engine.num_running - len(rows)} more"


def _slot(slot: int, request: RunningRequest, now: float) -> str:
    phase = request.phase
    if phase == "prefill":
        known = request.num_prompt_tokens + request.num_output_tokens
        phase = f"pre {request.num_computed_tokens / max(1, known):4.0%}"
    return (
        f"{slot + 1:4} {fit(_name(request.id), 20)} {fit(request.tenant or '-', 14)} {phase:8} "
        f"{request.num_prompt_tokens:7,} {request.num_output_tokens:6,} {request.max_tokens:6,} "
        f"{request.num_blocks:6,} {seconds(now - request.arrived_at):>8}"
    )


def _name(request_id: str) -> str:
    """The id without the prefix that all ids have."""
    return request_id.replace("chatcmpl-", "", 1).replace("cmpl-", "", 1)


def _queue(engine: LiveView, most: int) -> Iterator[str]:
    yield f"{'NEXT':>4} {'REQUEST':20} {'TENANT':14} {'STATE':9} {'TOKENS':>7} {'AGE':>8}  WHY"
    for place, request in enumerate(engine.waiting[:most], 1):
        yield _waits(place, request, engine.now)
    if not engine.waiting:
        yield "     nobody waits"
    if engine.num_waiting > most:
        yield f"     and {engine.num_waiting - most} more"


def _waits(place: int, request: QueuedRequest, now: float) -> str:
    tokens = request.num_prompt_tokens + request.num_output_tokens
    return (
        f"{place:4} {fit(_name(request.id), 20)} {fit(request.tenant or '-', 14)} {request.state:9} {tokens:7,} "
        f"{seconds(now - request.arrived_at):>8}  {request.reason}"
    )


def _tenants(engine: LiveView) -> Iterator[str]:
    """Lines of tenants; none on a server that knows no tenants."""
    named = [tenant for tenant in engine.tenants if tenant.name]
    if not named:
        return
    total = sum(tenant.num_blocks for tenant in engine.tenants)
    yield f"{'TENANT':22} {'WEIGHT':>6} {'SLOTS':>6} {'BLOCKS':>7}  SHARE OF BLOCKS"
    for tenant in named[:TENANT_LINES]:
        share = tenant.num_blocks / total if total else 0.0
        bar = "█" * round(share * BAR)
        held = f"{tenant.num_running:6} {tenant.num_blocks:7,}"
        yield f"{fit(tenant.name, 22)} {tenant.weight:6g} {held}  {bar} {share:.0%}"
    if len(named) > TENANT_LINES:
        yield f"and {len(named) - TENANT_LINES} more"


def lane_lines(lanes: Sequence[LaneView], most: int) -> list[str]:
    """Lines of waiting and running work of tensor models; none where no lane is in use."""
    if not lanes:
        return []
    heading = f"{'LANE':28} {'WAITING':>7} {'ROWS':>6} {'RUNNING':>7} {'ROWS/S':>9} {'AGE':>8}  WHY"
    busiest = sorted(lanes, key=lambda lane: (-lane.num_waiting_rows - lane.num_running_rows, -lane.rows_per_s))
    more = [f"and {len(lanes) - most} more"] if len(lanes) > most else []
    return [heading, *map(_lane, busiest[:most]), *more]


def _lane(lane: LaneView) -> str:
    name = " ".join(filter(None, (lane.model, str(lane.version), lane.bucket)))
    return (
        f"{fit(name, 28)} {lane.num_waiting:7,} {lane.num_waiting_rows:6,} {lane.num_running_rows:7,} "
        f"{lane.rows_per_s:9,.1f} {seconds(lane.age_s) if lane.num_waiting else '-':>8}  {lane.reason}"
    ).rstrip()


def in_ascii(text: str) -> str:
    """Text in ASCII only: the drawing signs get others, what else is strange a question mark."""
    return text.translate(_ASCII).encode("ascii", "replace").decode()


def _shortened(lines: list[str], most: int) -> list[str]:
    """The heading and as many lines as there is room for, and how many are left out."""
    if len(lines) <= most:
        return lines
    hidden = len(lines) - most + 1
    return [*lines[: most - 1], f"     and {hidden} lines that do not fit"]


def fit(text: str, width: int) -> str:
    """Text in exactly `width` characters; what is too long loses its middle, for ends tell samples apart."""
    text = inert(text).replace("\n", " ").replace("\t", " ")
    if len(text) <= width:
        return text.ljust(width)
    tail = width // 3
    return f"{text[: width - tail - 1]}…{text[-tail:]}"


def seconds(value: float | None) -> str:
    """`-`, `12.3 ms`, `456 ms`, `7.89 s`, `2 min 5 s`."""
    if value is None:
        return "-"
    value = max(0.0, value)
    if value < 0.00995:
        return f"{value * 1e3:.1f} ms"
    if value < 0.9995:
        return f"{value * 1e3:.0f} ms"
    if value < 99.5:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    minutes, left = divmod(round(value), 60)
    return f"{minutes} min {left} s"
