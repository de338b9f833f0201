"""`maitred bench serve`: a load generator for any OpenAI server."""

from __future__ import annotations

from maitred.cli.bench.options import LoadOptions, PromptOptions, ReportOptions, TargetOptions
from maitred.cli.command import Command, Options


def _run(options: Options) -> int:
    from maitred.cli.bench.session import run_bench

    return run_bench(options[TargetOptions], options[LoadOptions], options[PromptOptions], options[ReportOptions])


COMMAND = Command(
    path="bench serve",
    summary="Load any OpenAI server and measure TTFT, ITL, TPOT, E2E, throughput and goodput.",
    run=_run,
    parts=(TargetOptions, LoadOptions, PromptOptions, ReportOptions),
    first=(
        "url",
        "model",
        "api_key",
        "endpoint",
        "num_requests",
        "duration_s",
        "rate",
        "concurrency",
        "input_len",
        "output_len",
        "trace",
        "slo",
        "json",
    ),
    examples=(
        "maitred bench serve --rate 4 --num-requests 200 --slo ttft:200ms --slo itl:50ms",
        "maitred bench serve --concurrency 32 --duration 60 --input-len lognormal:200,0.8 --plot run.svg",
        "maitred bench serve --trace trace.jsonl --rate-scale 0.5 --json result.json",
    ),
)
