"""The picture of a comparison: distributions, the queue over time, and each policy's slots like a kitchen's tickets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from html import escape

from maitred.sim.results import QUANTILES, SimulatedResults, Sketch, Ticket

COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#111111",
    "#66c2a5",
)
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 34  # margins of a panel

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            decades = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**decade for decade in decades]
        step = _round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def axis(values: Sequence[float], *, log: bool = False) -> Axis:
    """Wide enough for all `values`; logarithmic ones end at whole decades."""
    if log:
        positive = [value for value in values if value > 0] or [1.0]
        low = 10.0 ** math.floor(math.log10(min(positive)))
        return Axis(low, max(10.0 ** math.ceil(math.log10(max(positive))), 10 * low), log=True)
    return Axis(0.0, max([*values, 0.0]) or 1.0)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * 0.999)


@dataclass(slots=True)
class Panel:
    """One plot of `width` x `height` pixels; draws in data coordinates."""

    title: str
    x: Axis
    y: Axis
    x_label: str
    width: int = 460
    height: int = 250
    _parts: list[str] = field(default_factory=list)

    def line(self, points: Sequence[Point], colour: str, *, step: bool = False) -> None:
        """Draw a line through the points; `step` holds each value until the next point."""
        if not points:
            return
        words, last_y = [], 0.0
        for number, (x, y) in enumerate(points):
            px, py = self._px(x), self._py(y)
            if number == 0:
                words.append(f"M{px:.1f},{py:.1f}")
            else:
                words.append(f"L{px:.1f},{last_y:.1f}L{px:.1f},{py:.1f}" if step else f"L{px:.1f},{py:.1f}")
            last_y = py
        self._parts.append(f'<path d="{"".join(words)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')

    def bar(self, x0: float, x1: float, y: float, thickness: float, colour: str, hint: str = "") -> None:
        """Lying, from x0 to x1, its middle at y; `thickness` in units of y."""
        left, top = self._px(x0), self._py(y + thickness / 2)
        width, height = max(self._px(x1) - left, 0.4), max(self._py(y - thickness / 2) - top, 0.5)
        title = f"<title>{escape(hint)}</title>" if hint else ""
        place = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {place} fill="{colour}">{title}</rect>')

    def svg(self, at_x: int, at_y: int) -> str:
        return f'<g transform="translate({at_x},{at_y})">{self._frame()}{"".join(self._parts)}</g>'

    def _px(self, x: float) -> float:
        return LEFT + self.x.place(x) * (self.width - LEFT - RIGHT)

    def _py(self, y: float) -> float:
        return self.height - BOTTOM - self.y.place(y) * (self.height - TOP - BOTTOM)

    def _frame(self) -> str:
        parts = [_text(self.width / 2, 16, self.title, "middle", "title")]
        for value in self.x.ticks():
            px = self._px(value)
            parts.append(f'<line x1="{px:.1f}" x2="{px:.1f}" y1="{TOP}" y2="{self.height - BOTTOM}" class="grid"/>')
            parts.append(_text(px, self.height - BOTTOM + 14, number_text(value), "middle"))
        for value in self.y.ticks():
            py = self._py(value)
            parts.append(f'<line x1="{LEFT}" x2="{self.width - RIGHT}" y1="{py:.1f}" y2="{py:.1f}" class="grid"/>')
            parts.append(_text(LEFT - 5, py + 4, number_text(value), "end"))
        parts.append(_text(self.width / 2, self.height - 6, self.x_label, "middle"))
        return "".join(parts)


def number_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    classes = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{classes}>{escape(text)}</text>'


STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#333}.title{font-size:13px;font-weight:600}"
    ".grid{stroke:#ddd;stroke-width:.6}.heading{font-size:14px;font-weight:600}"
)


def sheet(heading: str, legend: Sequence[tuple[str, str]], panels: Sequence[Panel], *, columns: int = 2) -> str:
    """All panels on one SVG, with a legend of (name, colour)."""
    width = max(panel.width for panel in panels) * columns
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    parts, top = [], 58
    for row in rows:
        parts += [panel.svg(i * width // columns, top) for i, panel in enumerate(row)]
        top += max(panel.height for panel in row) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{_text(12, 20, heading, 'start', 'heading')}{_legend(legend)}{''.join(parts)}</svg>\n"
    )


def _legend(legend: Sequence[tuple[str, str]]) -> str:
    parts, left = [], 12.0
    for name, colour in legend:
        parts.append(f'<rect x="{left:.0f}" y="32" width="14" height="8" fill="{colour}"/>')
        parts.append(_text(left + 18, 40, name, "start"))
        left += 34 + 6.6 * len(name)
    return "".join(parts)


MAX_LANES = 64
MAX_CURVE_POINTS = 400
PREFILL, DECODE, WAITED, HANDED_OVER = "#f2b134", "#5a9bd4", "#c9c9c9", "#c2452d"
TICKET_LEGEND = (("waits", WAITED), ("prefill", PREFILL), ("hand-over", HANDED_OVER), ("decode", DECODE))
_MEASURES = (
    ("ttft_s", "TTFT"),
    ("itl_s", "inter-token latency"),
    ("e2e_s", "end to end"),
    ("queue_s", "wait in queue"),
)


def svg_report(outcomes: Mapping[str, SimulatedResults], heading: str) -> str:
    """One SVG with everything."""
    legend = [*_colours(outcomes).items(), *TICKET_LEGEND]
    return sheet(heading, legend, [*_distributions(outcomes), _queues(outcomes), *_timelines(outcomes)])


def html_report(outcomes: Mapping[str, SimulatedResults], heading: str) -> str:
    """One page without anything from elsewhere: the same pictures, and the figures as tables."""
    colours = list(_colours(outcomes).items())
    curves = sheet("Distributions and queue", colours, [*_distributions(outcomes), _queues(outcomes)])
    tickets = sheet("Slots over time, the first tickets of the run", TICKET_LEGEND, _timelines(outcomes), columns=1)
    tables = "".join(_table(policy, results) for policy, results in outcomes.items())
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(heading)}</title><style>"
        "body{font:14px system-ui,sans-serif;margin:2em;color:#222}table{border-collapse:collapse;margin:.5em 0 1.5em}"
        "td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}"
        "th:first-child,td:first-child{text-align:left}"
        f"svg{{max-width:100%;height:auto}}</style><h1>{escape(heading)}</h1>{tables}{curves}{tickets}</html>\n"
    )


def _colours(outcomes: Mapping[str, SimulatedResults]) -> dict[str, str]:
    return {policy: COLOURS[i % len(COLOURS)] for i, policy in enumerate(outcomes)}


# ---- distributions


def _distributions(outcomes: Mapping[str, SimulatedResults]) -> list[Panel]:
    return [
        _cdf(title, {p: getattr(r.total, name) for p, r in outcomes.items()}, outcomes) for name, title in _MEASURES
    ]


def _cdf(title: str, sketches: Mapping[str, Sketch], outcomes: Mapping[str, SimulatedResults]) -> Panel:
    curves = {policy: thinned([(max(x, 1e-6), y) for x, y in s.curve()]) for policy, s in sketches.items()}
    values = [x for curve in curves.values() for x, _ in curve if x > 1e-6]
    panel = Panel(f"{title}: share at most this", axis(values, log=True), Axis(0, 1), "s")
    for policy, colour in _colours(outcomes).items():
        panel.line(curves[policy], colour, step=True)
    return panel


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `MAX_CURVE_POINTS` of them, the last one among them."""
    stride = -(-len(points) // MAX_CURVE_POINTS) or 1
    return [*points[:-1:stride], *points[-1:]]


def _queues(outcomes: Mapping[str, SimulatedResults]) -> Panel:
    series = {policy: results.queue_length.points() for policy, results in outcomes.items()}
    times = [at for points in series.values() for at, _ in points]
    counts = [float(count) for points in series.values() for _, count in points]
    panel = Panel("requests waiting, at arrivals", axis(times), axis(counts), "s")
    for policy, colour in _colours(outcomes).items():
        panel.line(thinned([(at, float(count)) for at, count in series[policy]]), colour)
    return panel


# ---- tickets


def _timelines(outcomes: Mapping[str, SimulatedResults]) -> list[Panel]:
    everyone = [ticket for results in outcomes.values() for ticket in results.tickets.kept]
    span = Axis(min((t.arrived_at for t in everyone), default=0.0), max((t.finished_at for t in everyone), default=1.0))
    return [_timeline(policy, results.tickets.kept, span) for policy, results in outcomes.items()]


def _timeline(policy: str, tickets: Sequence[Ticket], span: Axis) -> Panel:
    lanes = in_lanes([slot for ticket in tickets for slot in ticket.slots])
    num_lanes = max(lanes, default=0) + 1
    height = 60 + min(num_lanes, MAX_LANES) * 7
    panel = Panel(f"{policy}: slots", span, Axis(0, min(num_lanes, MAX_LANES)), "s", width=920, height=height)
    numbered = iter(lanes)
    for ticket in tickets:
        _draw_ticket(panel, ticket, [next(numbered) for _ in ticket.slots])
    return panel


def _draw_ticket(panel: Panel, ticket: Ticket, lanes: Sequence[int]) -> None:
    waited_s, stay_s = ticket.scheduled_at - ticket.arrived_at, ticket.finished_at - ticket.arrived_at
    preempted = f", preempted {ticket.num_preemptions} times" if ticket.num_preemptions else ""
    moved = "".join(f", KV handed over in {until - began:.4f} s" for began, until in ticket.moves)
    hint = f"{ticket.request_id} {ticket.tenant}: waited {waited_s:.3f} s, {stay_s:.3f} s in all{preempted}{moved}"
    waiting_since = ticket.arrived_at
    for (began, until), lane in zip(ticket.slots, lanes, strict=True):
        if lane < MAX_LANES:
            y, first = lane + 0.5, min(max(began, ticket.first_token_at), until)
            panel.bar(waiting_since, began, y, 0.12, WAITED, hint)
            panel.bar(began, first, y, 0.8, PREFILL, hint)
            panel.bar(first, until, y, 0.8, DECODE, hint)
        waiting_since = until
    for (began, until), lane in zip(ticket.moves, lanes[1:], strict=False):
        if lane < MAX_LANES:
            panel.bar(began, until, lane + 0.5, 0.4, HANDED_OVER, hint)


def in_lanes(slots: Sequence[tuple[float, float]]) -> list[int]:
    """A lane for each (from, to), such that no two of a lane are served at once, the lowest free one first."""
    lanes = [0] * len(slots)
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    for index in sorted(range(len(slots)), key=lambda i: (slots[i], i)):
        began, until = slots[index]
        while taken and taken[0][0] <= began:
            heappush(free, heappop(taken)[1])
        lane = heappop(free) if free else len(taken)
        lanes[index] = lane
        heappush(taken, (until, lane))
    return lanes


# ---- tables


def _table(policy: str, results: SimulatedResults) -> str:
    groups = {"all": results.total, **(results.tenants if len(results.tenants) > 1 else {})}
    rows = []
    for name, group in groups.items():
        for measure, title in _MEASURES:
            figures = getattr(group, measure).to_json()
            cells = "".join(f"<td>{_cell(figures[figure])}</td>" for figure in ("mean", *QUANTILES, "max"))
            rows.append(f"<tr><td>{escape(name)}</td><td>{title}</td>{cells}</tr>")
    total = results.total
    goodput = total.num_good / results.duration_s if results.duration_s > 0 else 0.0
    return (
        f"<h2>{escape(policy)}</h2><p>{total.num_finished:,} requests finished, {_failed(total.failures)}; goodput "
        f"{goodput:.2f} per second, objectives met by {total.slo_attainment:.1%}, Jain's index {results.jain:.3f}, "
        f"{results.num_preemptions:,} preemptions, {results.num_cached_tokens:,} prompt tokens from the cache</p>"
        "<table><tr><th>tenant</th><th>seconds</th><th>mean</th><th>p50</th><th>p90</th><th>p99</th><th>max</th></tr>"
        f"{''.join(rows)}</table>"
    )


def _failed(failures: Mapping[str, int]) -> str:
    causes = ", ".join(f"{count:,} {reason}" for reason, count in sorted(failures.items()))
    return f"{sum(failures.values()):,} failed{f' ({escape(causes)})' if causes else ''}"


def _cell(value: float | None) -> str:
    return "" if value is None else number_text(value)
