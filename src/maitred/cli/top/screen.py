"""The live view as lines of text: pure, so that a test can read what a person would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from maitred.cli.console import inert
from maitred.engine.live_view import CACHED, FREE, SHARED, LiveView, QueuedRequest, RunningRequest

if TYPE_CHECKING:
    from rich.text import Text

    from maitred.api.ops.latencies import Percentiles
    from maitred.api.ops.live_feed import LiveFrame
    from maitred.scheduler.queue_view import LaneView

RATE_S = 2.0  # that a rate is taken over
MIN_WIDTH = 60
QUEUE_LINES = 8
TENANT_LINES = 6
LANE_LINES = 8
# What a column of the block map is drawn as.
SIGNS = {FREE: "·", CACHED: "░", SHARED: "▓"}
OWNED = "█"
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
    (code, _), *_ = Counter(codes).most_common(1)
    return SIGNS.get(code, OWNED)


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
