"""The tables of `bench serve`: one that lives while the load runs, and the last one."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from maitred.cli.bench.runner import Progress
from maitred.cli.bench.stats import Spread, Summary, summarise
from maitred.cli.console import inert

REFRESH_S = 0.5
LINE_EVERY_S = 10.0  # when nobody looks at a terminal
_TIMES = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"), ("longest stall", "stall_s"))


async def watch(progress: Progress, slos: dict[str, float], console: Console | None = None) -> None:
    """Show `progress` until cancelled: a live table on a terminal, now and then a line elsewhere."""
    console = console or Console(stderr=True)
    began = time.monotonic()
    if not console.is_terminal:
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            print(f"{time.monotonic() - began:.0f} s: {_counts(progress)}", file=sys.stderr, flush=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(live_table(progress, slos, time.monotonic() - began), refresh=True)
            await asyncio.sleep(max(REFRESH_S, len(progress.records) / 20_000))  # long runs cost more to sum up


def _counts(progress: Progress) -> str:
    failed = sum(not record.ok for record in progress.records)
    return (
        f"{progress.num_sent} sent, {progress.num_in_flight} in flight, {len(progress.records)} done, {failed} failed"
    )


def live_table(progress: Progress, slos: dict[str, float], elapsed_s: float) -> Table:
    summary = summarise(progress.records, slos, peak_in_flight=progress.peak_in_flight)
    table = _table(summary, f"{elapsed_s:.0f} s: {_counts(progress)}")
    return table


def final_table(summary: Summary, workload: str, *, file: IO[str]) -> None:
    console = Console(file=file, highlight=False)
    console.print(inert(workload), markup=False, soft_wrap=True)
    console.print(_table(summary, "load test"))
    for kind, error in summary.errors.items():
        console.print(f"{error.count} x {inert(kind)}: {inert(error.example)}", markup=False, soft_wrap=True)
    lag = summary.client_lag_s
    if lag is not None and lag.p99 > 0.01:
        text = f"the load generator itself was late by {_ms(lag.p99)} (p99): its machine is too busy for this rate"
        console.print(text, markup=False, soft_wrap=True)


def _table(summary: Summary, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="right" if column else "left")
    for name, field in _TIMES:
        table.add_row(name, *_cells(getattr(summary, field)))
    table.add_section()
    table.add_row("requests", f"{summary.requests_per_s:.2f}/s", *_ratio(summary.num_completed, summary.num_requests))
    table.add_row(
        "input tokens", f"{summary.input_tokens_per_s:,.0f}/s", f"{summary.input_tokens:,}", *_cached(summary)
    )
    table.add_row("output tokens", f"{summary.output_tokens_per_s:,.0f}/s", f"{summary.output_tokens:,}")
    if summary.slos_s:
        table.add_row("goodput", f"{summary.goodput_per_s:.2f}/s", *_ratio(summary.num_good, summary.num_requests))
    table.caption = ", ".join(f"{name} <= {_ms(bound)}" for name, bound in summary.slos_s.items()) or None
    return table


def _cells(values: Spread | None) -> list[str]:
    if values is None:
        return ["-"] * 5
    return [_ms(value) for value in (values.mean, values.p50, values.p90, values.p99, values.max)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 10 else f"{seconds:,.2f} s"


def _ratio(part: int, whole: int) -> list[str]:
    return [f"{part} of {whole}"]


def _cached(summary: Summary) -> list[str]:
    return [f"{summary.cached_tokens:,} cached"] if summary.cached_tokens else []
