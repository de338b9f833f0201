"""Plot of a load test: distributions of TTFT and ITL, requests and tokens over time. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maitred.cli.bench.record import Record
from maitred.cli.bench.stats import Summary
from maitred.errors import ConfigError

SUFFIXES = (".png", ".svg")
NUM_BINS = 120  # of the timeline


def check_plot_path(path: str) -> None:
    """Before the load, not after it: the suffix is known and matplotlib is there."""
    if Path(path).suffix not in SUFFIXES:
        raise ConfigError(f"--plot is {path!r}; its name must end in .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'maitred[plot]'")


def draw(records: Sequence[Record], summary: Summary, path: Path) -> None:
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
