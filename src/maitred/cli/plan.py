"""The flags of `maitred plan`."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.command import Command, deferred
from maitred.cli.flags import UsageError, option
from maitred.cli.simulate import DEVICES, RATES, check_report, check_written
from maitred.config import POLICY_NAMES
from maitred.config.field_checks import require_at_least, require_between

MODES = ("aggregated", "disaggregated", "hybrid")
MINIMISED = ("devices", "cost", "energy")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What to plan for"""

    model: str | None = option(None, metavar="MODEL")
    """Folder with a config.json, or a known name such as llama-3.1-8b; None is the profile's, or the built-in model."""
    device: str = option("h100", metavar="NAME[,NAME...]", choices=DEVICES)
    """Devices to choose from: names, or files of `maitred profile`; h100x4 is four as one worker and nothing else."""
    input: str | None = option(None, metavar="TOKENS")
    """Prompt tokens: N, or a distribution such as lognormal:1500,0.6; docs/simulator.md has the forms."""
    output: str | None = option(None, metavar="TOKENS")
    """Tokens of an answer, in the same forms."""
    workload: str | None = option(None, metavar="FILE", short="-w")
    """Trace or description in place of --input and --output, as of `maitred simulate`; prefixes and turns count."""
    slo: tuple[str, ...] = option((), metavar="NAME:TIME")
    """Objective of each request: ttft:2s, tpot:30ms, itl:50ms (99% of its gaps), e2e:10s."""
    attainment: float = option(0.9, metavar="SHARE")
    """Share of the requests that must meet every objective."""
    rate: float | None = option(None, metavar="REQUESTS")
    """Requests a second to be met by as little as possible; None is the workload's own."""
    devices: int | None = option(None, metavar="N")
    """Find the highest rate of so many devices instead."""
    users: float | None = option(None, metavar="USERS")
    """The rate as users x --requests-per-user-day x --peak / 86,400 s."""
    requests_per_user_day: float = option(10.0, metavar="REQUESTS")
    """With --users: requests of one on a day."""
    peak: float = option(2.0, metavar="FACTOR")
    """With --users: the busiest time's rate over the day's mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What to search"""

    modes: str = option(",".join(MODES), metavar="MODE[,MODE...]", choices=MODES)
    """aggregated (alike workers), disaggregated (prefill and decode workers), hybrid (mixed workers that may hand over,
    prefill workers beside them)."""
    parallel: str = option("1,2,4,8", metavar="N[,N...]")
    """Devices of one worker that are tried: tensor parallel, and expert parallel for mixtures of experts."""
    link: str = option("infiniband", metavar="NAME|RATE")
    """Between workers that hand KV over: infiniband, nvlink, tcp, 100gbe or another of `maitred simulate --link`."""
    minimise: str = option("devices", choices=MINIMISED)
    """devices, cost (needs --price) or energy."""
    price: tuple[str, ...] = option((), metavar="DEVICE=PRICE")
    """Price of a device for an hour, in any currency: h100=2.5."""
    policy: str = option("fcfs", metavar="NAME", choices=POLICY_NAMES)
    """Scheduling policy of every worker."""
    max_num_seqs: int | None = option(None, metavar="REQUESTS")
    """Fixes the requests in one step; None searches."""
    max_num_batched_tokens: int | None = option(None, metavar="TOKENS")
    """Fixes the token budget of a step; None searches."""
    seed: int = 0
    """Of the workload and the jitter; same seed, same plan."""
    json: str | None = option(None, metavar="FILE", bare="-")
    """Write the plan as JSON, which `maitred route --plan FILE` starts; without FILE, or with -, on standard output."""

    report: str | None = option(None, metavar="FILE")
    """Write one HTML file: plans side by side with a verdict, distributions, what was tried, and how to start it."""

    def __post_init__(self) -> None:
        check_report(self.report)
        check_written("json", self.json)
        require_at_least("max_num_seqs", self.max_num_seqs, 1)
        require_at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)


def check(options: PlanOptions) -> None:
    """Raises UsageError, ConfigError."""
    require_between("attainment", options.attainment, 0.01, 1)
    for name in ("rate", "users", "requests_per_user_day", "peak"):
        require_between(name, getattr(options, name), *RATES)
    require_at_least("devices", options.devices, 1)
    if not options.slo:
        raise UsageError("a plan needs objectives; give --slo ttft:2s and --slo tpot:30ms, or others")
    if (options.workload is None) == (options.input is None or options.output is None):
        raise UsageError("give --input N and --output N, or --workload FILE, and not both")
    given = [f"--{name}" for name in ("rate", "devices", "users") if getattr(options, name) is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} say what is asked in two ways; drop one")
    if not given and options.workload is None:
        raise UsageError("how much is asked? give --rate R, --devices N or --users U")


COMMAND = Command(
    path="plan",
    summary="Find the least devices for a load, or the highest load of some devices, over simulations of what serves.",
    run=deferred("maitred.cli.planning:run_plan"),
    parts=(PlanOptions, SearchOptions),
    first=("model", "device", "input", "output", "slo", "rate", "devices", "json", "report"),
    examples=(
        "maitred plan --model llama-3.1-8b --input 1500 --output 200 --slo ttft:2s --slo tpot:30ms --rate 40",
        "maitred plan --model glm-4.5 --device h200,b200 -w trace.jsonl --slo ttft:2s --slo tpot:50ms --devices 16",
        "maitred plan --device this.json --input 200 --output 50 --slo ttft:1s --rate 2 --json best.json",
    ),
)
