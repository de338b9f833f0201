"""Session of `bench serve`: check the flags, ask the server for its model, load it, and report."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import math
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

import maitred
from maitred.cli.bench import LoadOptions, PromptOptions, ReportOptions, TargetOptions
from maitred.cli.command import Options
from maitred.cli.console import inert, note
from maitred.cli.endpoint import HttpEndpoint, first_model
from maitred.cli.flags import UsageError
from maitred.cli.load import (
    WORD_VOCABULARY,
    LoadClient,
    LoadProgress,
    LoadRun,
    PlannedRequest,
    Record,
    RequestForm,
    Synthetic,
    TraceReplay,
    Vocabulary,
    read_trace,
)
from maitred.cli.main import EXIT_INTERRUPTED
from maitred.core.errors import ConfigError, ServerError
from maitred.core.objectives import parse_slo, percentile
from maitred.sim.synthetic import parse_length

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in five figures, in the unit of its values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def spread(values: Iterable[float | None]) -> Spread | None:
    """None when there is no value."""
    present = sorted(value for value in values if value is not None)
    if not present:
        return None
    p50, p90, p99 = (percentile(present, percent) for percent in PERCENTILES)
    return Spread(len(present), math.fsum(present) / len(present), p50, p90, p99, present[-1])


# ---- objectives


def _itl_p99(record: Record) -> float | None:
    gaps = sorted(record.itls_s())
    return percentile(gaps, 99) if gaps else None


# What of a request an objective bounds; None (a single chunk has no ITL) meets every bound.
OBJECTIVES: dict[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft_s,
    "itl": _itl_p99,
    "tpot": lambda record: record.tpot_s,
    "e2e": lambda record: record.e2e_s,
}


def meets(record: Record, slos: dict[str, float]) -> bool:
    """A failed request meets nothing."""
    if not record.ok:
        return False
    values = ((OBJECTIVES[name](record), bound) for name, bound in slos.items())
    return all(value is None or value <= bound for value, bound in values)


# ---- the whole


@dataclass(slots=True)
class ErrorKind:
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of a run; times in seconds, rates per second of `duration_s` (first send to last token)."""

    num_requests: int
    num_completed: int
    num_failed: int
    duration_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    peak_in_flight: int
    ttft_s: Spread | None
    itl_s: Spread | None
    tpot_s: Spread | None
    e2e_s: Spread | None
    stall_s: Spread | None  # longest silence within a request
    client_lag_s: Spread | None  # how late we were ourselves
    slos_s: dict[str, float] = field(default_factory=dict)
    num_good: int = 0
    goodput_per_s: float = 0.0
    errors: dict[str, ErrorKind] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def summarise(records: Sequence[Record], slos: dict[str, float], *, peak_in_flight: int = 0) -> Summary:
    done = [record for record in records if record.ok]
    began_s = min((record.sent_s for record in records), default=0.0)
    duration_s = max((record.ended_s for record in records), default=0.0) - began_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    num_good = sum(meets(record, slos) for record in records)
    input_tokens, output_tokens = sum(r.input_tokens for r in done), sum(r.output_tokens for r in done)
    return Summary(
        num_requests=len(records),
        num_completed=len(done),
        num_failed=len(records) - len(done),
        duration_s=duration_s,
        input_tokens=input_tokens,
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=output_tokens,
        requests_per_s=len(done) * per_s,
        input_tokens_per_s=input_tokens * per_s,
        output_tokens_per_s=output_tokens * per_s,
        peak_in_flight=peak_in_flight,
        ttft_s=spread(record.ttft_s for record in done),
        itl_s=spread(gap for record in done for gap in record.itls_s()),
        tpot_s=spread(record.tpot_s for record in done),
        e2e_s=spread(record.e2e_s for record in done),
        stall_s=spread(record.stall_s for record in done),
        client_lag_s=spread(record.lag_s for record in records),
        slos_s=slos,
        num_good=num_good,
        goodput_per_s=num_good * per_s,
        errors=_errors(records),
    )


def _errors(records: Iterable[Record]) -> dict[str, ErrorKind]:
    kinds: dict[str, ErrorKind] = {}
    for record in records:
        if record.failure is not None:
            kinds.setdefault(record.failure.kind, ErrorKind(0, record.failure.message)).count += 1
    return kinds


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
    for name, figure in _TIMES:
        table.add_row(name, *_cells(getattr(summary, figure)))
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


DEFAULT_NUM_REQUESTS = 100
DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Everything checked, nothing sent yet."""

    target: TargetOptions
    load: LoadOptions
    prompts: PromptOptions
    report: ReportOptions
    workload: Synthetic | TraceReplay
    warmup: Synthetic
    slos: dict[str, float]
    seed: int

    @property
    def concurrency(self) -> int | None:
        """None is an open loop."""
        if self.load.rate is None and self.prompts.trace is None:
            return self.load.concurrency or DEFAULT_CONCURRENCY
        return self.load.concurrency

    @property
    def num_requests(self) -> int | None:
        """None is all that come within the duration, or the whole trace."""
        if self.load.num_requests is None and self.load.duration_s is None and self.prompts.trace is None:
            return DEFAULT_NUM_REQUESTS
        return self.load.num_requests

    def plan(self) -> Iterator[PlannedRequest]:
        return itertools.islice(self.workload.requests(), self.num_requests)

    def describe(self) -> str:
        """The workload in one line, and what repeats it."""
        load, prompts = self.load, self.prompts
        parts = [f"{self.num_requests or 'all'} requests"]
        if load.duration_s is not None:
            parts[0] += f" of {load.duration_s:g} s"
        if self.concurrency is not None:
            parts.append(f"{self.concurrency} in flight")
        elif load.rate is not None:
            parts.append(f"{load.rate:g} per second (burstiness {load.burstiness:g})")
        if prompts.trace is not None:
            parts.append(
                f"{prompts.trace}, {prompts.rate_scale:g} times as fast, lengths times {prompts.length_scale:g}"
            )
        else:
            shared = f" after {prompts.num_prefixes} x {prompts.shared_prefix_len}" if prompts.shared_prefix_len else ""
            parts.append(f"{prompts.input_len} tokens in{shared}, {prompts.output_len} out")
        return f"{self.target.endpoint}: {', '.join(parts)}; --seed {self.seed} sends the same again"


def run_bench(options: Options) -> int:
    """Exit code 0 when at least one request was answered; an interrupted run reports what it has."""
    try:
        bench = make_bench(options[TargetOptions], options[LoadOptions], options[PromptOptions], options[ReportOptions])
    except ConfigError as error:
        raise UsageError(str(error)) from None
    _allow_many_connections()
    with _runner() as runner:
        run, summary, form = runner.run(_measure(bench))
    _write_report(bench, run, summary, form)
    if run.stopped:
        note("interrupted: the figures cover what was answered until then")
        return EXIT_INTERRUPTED
    if summary.num_completed == 0 and summary.errors:
        raise ServerError(_nothing_answered(summary))
    return 0


def _nothing_answered(summary: Summary) -> str:
    kind, example = next(iter(summary.errors.items()))
    hint = "; servers other than vLLM may want --no-ignore-eos --no-continuous-usage" if "400" in kind else ""
    return f"no request was answered: {example.count} times {kind}: {example.example}{hint}"


def _runner() -> asyncio.Runner:
    """uvloop where it is installed: a load generator must not be the slow part."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _allow_many_connections() -> None:
    """Each request in flight is an open file; systems allow 1024 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard > soft or hard == resource.RLIM_INFINITY:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def make_bench(target: TargetOptions, load: LoadOptions, prompts: PromptOptions, report: ReportOptions) -> Bench:
    """Raises ConfigError for anything that would otherwise fail after minutes of load."""
    seed = load.seed if load.seed is not None else secrets.randbelow(2**31)
    vocabulary = _vocabulary(prompts) if _as_tokens(target, prompts) else WORD_VOCABULARY
    if report.plot is not None:
        check_plot_path(report.plot)
    for path in (report.json, report.records, report.plot):
        if path not in (None, "-") and not Path(str(path)).absolute().parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist; make it first")
    synthetic = Synthetic(
        seed=seed,
        vocabulary=vocabulary,
        input_len=parse_length(prompts.input_len, "--input-len"),
        output_len=parse_length(prompts.output_len, "--output-len"),
        rate=load.rate,
        burstiness=load.burstiness,
        shared_prefix_len=prompts.shared_prefix_len,
        num_prefixes=prompts.num_prefixes,
    )
    workload = synthetic if prompts.trace is None else _replay(load, prompts, vocabulary, seed)
    warmup = Synthetic(
        seed=f"{seed}/warmup", vocabulary=vocabulary, input_len=synthetic.input_len, output_len=synthetic.output_len
    )
    slos = dict(parse_slo(text) for text in report.slo)
    return Bench(
        target=target, load=load, prompts=prompts, report=report, workload=workload, warmup=warmup, slos=slos, seed=seed
    )


def _replay(load: LoadOptions, prompts: PromptOptions, vocabulary: Vocabulary, seed: int) -> TraceReplay:
    if load.rate is not None:
        raise ConfigError("--trace has its own times; scale them with --rate-scale in place of --rate")
    return TraceReplay(
        lines=read_trace(str(prompts.trace)),
        vocabulary=vocabulary,
        seed=seed,
        rate_scale=prompts.rate_scale,
        length_scale=prompts.length_scale,
        paced=load.concurrency is None,
    )


def _as_tokens(target: TargetOptions, prompts: PromptOptions) -> bool:
    if target.endpoint == "chat" and prompts.prompt_form == "tokens":
        raise ConfigError("the chat endpoint takes no token ids; use --prompt-form text or --endpoint completions")
    return target.endpoint == "completions" and prompts.prompt_form != "text"


def _vocabulary(prompts: PromptOptions) -> Vocabulary:
    low, _, high = prompts.token_ids.partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise ConfigError(f"token_ids is {prompts.token_ids!r}; write LOW:HIGH, such as 100:1000")
    return Vocabulary(low=int(low), high=int(high))


async def _measure(bench: Bench) -> tuple[LoadRun, Summary, RequestForm]:
    target, prompts = bench.target, bench.prompts
    async with HttpEndpoint(target.url, api_key=target.api_key, timeout_s=target.timeout_s) as endpoint:
        form = RequestForm(
            model=target.model or await first_model(endpoint),
            endpoint=target.endpoint,
            as_tokens=_as_tokens(target, prompts),
            ignore_eos=prompts.ignore_eos,
            continuous_usage=prompts.continuous_usage,
            temperature=prompts.temperature,
            extra=prompts.extra_body,
        )
        await _warm_up(LoadClient(endpoint, form), bench)
        run = LoadRun(LoadClient(endpoint, form), bench.plan(), duration_s=bench.load.duration_s)
        await _drive(run, bench)
    summary = summarise(run.progress.records, bench.slos, peak_in_flight=run.progress.peak_in_flight)
    return run, summary, form


async def _warm_up(client: LoadClient, bench: Bench) -> None:
    for request in itertools.islice(bench.warmup.requests(), bench.load.warmup):
        record = await client.send(request, client.form.encode(request))
        if record.failure is not None:
            raise ServerError(f"the warm-up failed: {record.failure.message}")


async def _drive(run: LoadRun, bench: Bench) -> None:
    """Run to the end or to Ctrl-C, with the live table beside it."""
    loop = asyncio.get_running_loop()
    with suppress(NotImplementedError, ValueError):  # Windows, or not the main thread
        loop.add_signal_handler(signal.SIGINT, run.stop)
    watcher = asyncio.create_task(watch(run.progress, bench.slos))
    try:
        if bench.concurrency is None:
            await run.open_loop()
        else:
            await run.closed_loop(bench.concurrency)
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
        with suppress(NotImplementedError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)


def _write_report(bench: Bench, run: LoadRun, summary: Summary, form: RequestForm) -> None:
    report = bench.report
    result = {"run": _described(bench, form), "result": summary.to_json()}
    text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode()
    final_table(summary, bench.describe(), file=sys.stderr if report.json == "-" else sys.stdout)
    if report.json == "-":
        print(text)
    elif report.json is not None:
        Path(report.json).write_text(text + "\n", encoding="utf-8")
    if report.records is not None:
        lines = b"".join(msgspec.json.encode(record.to_json()) + b"\n" for record in run.progress.records)
        Path(report.records).write_bytes(lines)
    if report.plot is not None:
        draw(run.progress.records, summary, Path(report.plot))
        note(f"plot in {report.plot}")


def _described(bench: Bench, form: RequestForm) -> dict[str, object]:
    """All that is needed to repeat the run; never the API key."""
    target = {key: value for key, value in asdict(bench.target).items() if key != "api_key"}
    return {
        "maitred_version": maitred.__version__,
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **target,
        "model": form.model,
        **asdict(bench.load),
        "concurrency": bench.concurrency,
        "seed": bench.seed,
        **asdict(bench.prompts),
    }
