"""Contents of a report as plain data, column by column: the figures that --json has, and what is drawn of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from maitred.sim.results import GroupResults, Ticket

MAX_POINTS = 300  # of a curve
MEASURES = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s")


def column(
    name: str,
    figures: Mapping[str, Any],
    group: GroupResults,
    *,
    queue: Sequence[tuple[float, float]] = (),
    tickets: Sequence[Ticket] = (),
) -> dict[str, Any]:
    """One policy, balance or plan. `curves` have the share of values at most so long (s), `queue` requests by time."""
    return {
        "name": name,
        "figures": figures,
        "curves": {measure: thinned(list(getattr(group, measure).curve())) for measure in MEASURES},
        "queue": thinned(queue),
        "tickets": [asdict(ticket) for ticket in tickets],
    }


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_POINTS` of them, the last one among them, to five digits."""
    stride = -(-len(points) // MAX_POINTS) or 1
    return [(float(f"{x:.5g}"), float(f"{y:.5g}")) for x, y in [*points[:-1:stride], *points[-1:]]]
