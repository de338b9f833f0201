"""Figures of several policies as a table for the terminal; times in milliseconds or seconds, whichever reads better."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

COLUMNS: tuple[tuple[str, str, str], ...] = (  # heading, part, figure
    ("ttft mean", "ttft_s", "mean"),
    ("p50", "ttft_s", "p50"),
    ("p99", "ttft_s", "p99"),
    ("max", "ttft_s", "max"),
    ("itl p50", "itl_s", "p50"),
    ("p99", "itl_s", "p99"),
    ("e2e mean", "e2e_s", "mean"),
    ("p99", "e2e_s", "p99"),
    ("queue mean", "queue_s", "mean"),
    ("p99", "queue_s", "p99"),
    ("max", "queue_s", "max"),
)


WAITING_SHARE = 0.05  # of the time from arrival to end, in the mean; below it rows differ by chance

FLEET_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (  # heading, figure, how it is shown
    ("hits", "prefix_hit_ratio", lambda share: f"{share:.1%}"),
    ("max/mean", "load_max_over_mean", lambda ratio: "-" if ratio is None else f"{ratio:.2f}"),
    ("replica time", "replica_s", lambda seconds: f"{seconds:,.0f}s"),
    ("starts", "num_starts", str),
)


def _fleet_columns(
    figures: Mapping[str, Mapping[str, Any]],
) -> tuple[tuple[str, str, Callable[[Any], str]], ...]:
    return FLEET_COLUMNS if all("replica_s" in whole for whole in figures.values()) else ()


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """One row a policy; below it one a tenant where there are several."""
    rows = [
        [
            "policy",
            *(heading for heading, _, _ in COLUMNS),
            "good/s",
            "slo",
            "jain",
            "cached",
            "preempted",
            "busy",
            "failed",
            *(heading for heading, _, _ in _fleet_columns(figures)),
        ]
    ]
    for policy, whole in figures.items():
        rows.append([policy, *_cells(whole), *(show(whole[name]) for _, name, show in _fleet_columns(figures))])
        tenants = whole["tenants"]
        if len(tenants) > 1:
            blank = [""] * len(_fleet_columns(figures))
            rows += [[f"  {name}", *_cells(part), *blank] for name, part in tenants.items()]
    return aligned(rows)


def nothing_waited(figures: Mapping[str, Mapping[str, Any]], rate_scale: float) -> str:
    """A line to end a table with whose rows are equal because no policy had a choice to make; else empty."""
    shares = [whole["queue_s"]["mean"] / whole["e2e_s"]["mean"] for whole in figures.values() if whole["e2e_s"]["mean"]]
    if not shares or max(shares) >= WAITING_SHARE:
        return ""
    return (
        f"Almost nothing waited: {max(shares):.1%} of a request's time was in the queue, so the order of service "
        f"decided nothing. Try --rate-scale {4 * rate_scale:g}, or fewer slots by --max-num-seqs."
    )


def _cells(part: Mapping[str, Any]) -> list[str]:
    times = [seconds_text(part[name][figure]) for _, name, figure in COLUMNS]
    return [
        *times,
        f"{part['goodput_rps']:.2f}",
        f"{part['slo_attainment']:.1%}",
        f"{part['jain']:.3f}",
        f"{part['num_cached_tokens']:,}",
        f"{part['num_preemptions']:,}",
        f"{part['utilisation']:.0%}" if "utilisation" in part else "",
        _failed(part["failed"]),
    ]


def _failed(failures: Mapping[str, int]) -> str:
    """`12 (8 objective, 4 concurrency)`: how many of which cause."""
    if not failures:
        return "0"
    causes = ", ".join(f"{count} {reason}" for reason, count in failures.items())
    return f"{sum(failures.values())} ({causes})"


def seconds_text(seconds: float | None) -> str:
    """0.0123 -> `12.3ms`."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1e3:.3g}ms" if seconds < 0.1 else f"{seconds * 1e3:.0f}ms"
    return f"{seconds:.2f}s" if seconds < 100 else f"{seconds:.0f}s"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(lines)
