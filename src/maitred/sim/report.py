"""The picture of a comparison: distributions, the queue over time, and each policy's slots like a kitchen's tickets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from html import escape

from maitred.sim.results import QUANTILES, Results, Sketch, Ticket
from maitred.sim.svg import COLOURS, Axis, Panel, axis, number_text, sheet

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


def svg_report(outcomes: Mapping[str, Results], heading: str) -> str:
    """One SVG with everything."""
    legend = [*_colours(outcomes).items(), *TICKET_LEGEND]
    return sheet(heading, legend, [*_distributions(outcomes), _queues(outcomes), *_timelines(outcomes)])


def html_report(outcomes: Mapping[str, Results], heading: str) -> str:
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


def _colours(outcomes: Mapping[str, Results]) -> dict[str, str]:
    return {policy: COLOURS[i % len(COLOURS)] for i, policy in enumerate(outcomes)}


# ---- distributions


def _distributions(outcomes: Mapping[str, Results]) -> list[Panel]:
    return [
        _cdf(title, {p: getattr(r.total, name) for p, r in outcomes.items()}, outcomes) for name, title in _MEASURES
    ]


def _cdf(title: str, sketches: Mapping[str, Sketch], outcomes: Mapping[str, Results]) -> Panel:
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


def _queues(outcomes: Mapping[str, Results]) -> Panel:
    series = {policy: results.queue_length.points() for policy, results in outcomes.items()}
    times = [at for points in series.values() for at, _ in points]
    counts = [float(count) for points in series.values() for _, count in points]
    panel = Panel("requests waiting, at arrivals", axis(times), axis(counts), "s")
    for policy, colour in _colours(outcomes).items():
        panel.line(thinned([(at, float(count)) for at, count in series[policy]]), colour)
    return panel


# ---- tickets


def _timelines(outcomes: Mapping[str, Results]) -> list[Panel]:
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


def _table(policy: str, results: Results) -> str:
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
