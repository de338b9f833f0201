"""Output of `bench serve`: a table that lives while the load runs, the last one, and a plot (needs matplotlib)."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from maitred.cli.bench.record import Record
from maitred.cli.bench.runner import LoadProgress
from maitred.cli.bench.stats import Spread, Summary, summarise
from maitred.cli.console import inert
from maitred.core.errors import ConfigError

REFRESH_S = 0.5
LINE_EVERY_S = 10.0  # when there is no terminal
_TIMES = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"), ("longest stall", "stall_s"))
SUFFIXES = (".png", ".svg")
NUM_BINS = 120  # of the timeline


async def watch(progress: LoadProgress, slos: dict[str, float], console: Console | None = None) -> None:
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


def _counts(progress: LoadProgress) -> str:
    failed = sum(not record.ok for record in progress.records)
    return (
        f"{progress.num_sent} sent, {progress.num_in_flight} in flight, {len(progress.records)} done, {failed} failed"
    )


def live_table(progress: LoadProgress, slos: dict[str, float], elapsed_s: float) -> Table:
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


def check_plot_path(path: str) -> None:
    """Check before the load, not after it, that the suffix is known and matplotlib is there. Raises ConfigError."""
    if Path(path).suffix not in SUFFIXES:
        raise ConfigError(f"--plot is {path!r}; its name must end in .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'maitred[plot]'")


def draw(records: Sequence[Record], summary: Summary, path: Path) -> None:
    """Plot distributions of TTFT and ITL, and requests and tokens over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    (ttft_axes, itl_axes), (flight_axes, token_axes) = figure.subplots(2, 2)
    done = [record for record in records if record.ok]
    _cdf(ttft_axes, "TTFT", [r.ttft_s for r in done if r.ttft_s is not None], summary.slos_s.get("ttft"))
    _cdf(itl_axes, "inter-token latency", [gap for r in done for gap in r.itls_s()], summary.slos_s.get("itl"))
    _in_flight(flight_axes, records)
    _token_rate(token_axes, done)
    figure.suptitle(
        f"{summary.num_completed} of {summary.num_requests} requests, {summary.requests_per_s:.2f} requests/s, "
        f"{summary.output_tokens_per_s:,.0f} output tokens/s"
    )
    figure.savefig(path)


def _cdf(axes: Any, name: str, values_s: list[float], bound_s: float | None) -> None:
    values = sorted(1000 * value for value in values_s)
    shares = [(rank + 1) / len(values) for rank in range(len(values))]
    axes.step(values, shares, where="post")
    if bound_s is not None:
        axes.axvline(1000 * bound_s, linestyle="--", color="tab:red", label="objective")
        axes.legend()
    axes.set(title=name, xlabel="ms", ylabel="share at most this", ylim=(0, 1.02))
    axes.grid(alpha=0.3)


def _in_flight(axes: Any, records: Sequence[Record]) -> None:
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.ended_s, -1) for r in records])
    times, counts, current = [0.0], [0], 0
    for at_s, change in changes:
        current += change
        times.append(at_s)
        counts.append(current)
    axes.step(times, counts, where="post")
    failed = [r.ended_s for r in records if not r.ok]
    if failed:
        axes.plot(failed, [0] * len(failed), "x", color="tab:red", label="failed")
        axes.legend()
    axes.set(title="requests in flight", xlabel="s", ylabel="requests")
    axes.grid(alpha=0.3)


def _token_rate(axes: Any, done: Sequence[Record]) -> None:
    end_s = max((r.ended_s for r in done), default=0.0) or 1.0
    width_s = end_s / NUM_BINS
    rates = [0.0] * NUM_BINS
    for record in done:
        for chunk in record.chunks:
            rates[min(int(chunk.at_s / width_s), NUM_BINS - 1)] += chunk.num_tokens / width_s
    axes.step([width_s * index for index in range(NUM_BINS)], rates, where="post")
    axes.set(title="output tokens", xlabel="s", ylabel="tokens/s")
    axes.grid(alpha=0.3)
