"""Session of `bench serve`: check the flags, ask the server for its model, load it, report."""

from __future__ import annotations

import asyncio
import itertools
import resource
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import maitred
from maitred.cli.bench.client import LoadClient, RequestForm
from maitred.cli.bench.options import LoadOptions, PromptOptions, ReportOptions, TargetOptions
from maitred.cli.bench.prompts import WORD_VOCABULARY, PlannedRequest, Synthetic, TraceReplay, Vocabulary, read_trace
from maitred.cli.bench.report import check_plot_path, draw, final_table, watch
from maitred.cli.bench.runner import LoadRun
from maitred.cli.bench.stats import Summary, summarise
from maitred.cli.console import note
from maitred.cli.endpoint import HttpEndpoint, first_model
from maitred.cli.flags import UsageError
from maitred.cli.main import EXIT_INTERRUPTED
from maitred.core.errors import ConfigError, ServerError
from maitred.core.objectives import parse_slo
from maitred.sim.lengths import parse_length

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


def run_bench(target: TargetOptions, load: LoadOptions, prompts: PromptOptions, report: ReportOptions) -> int:
    """Exit code 0 when at least one request was answered; an interrupted run reports what it has."""
    try:
        bench = make_bench(target, load, prompts, report)
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
        target=target,
        load=load,
        prompts=prompts,
        report=report,
        workload=workload,
        warmup=warmup,
        slos=slos,
        seed=seed,
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
