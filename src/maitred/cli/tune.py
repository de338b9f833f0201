"""`maitred tune`: the best batching, instances and threads of a tensor model, for a bound on its latency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from maitred.cli.command import Command, Options
from maitred.cli.flags import UsageError, option
from maitred.config.field_checks import require_at_least, require_over_0
from maitred.core.errors import ConfigError
from maitred.core.objectives import parse_seconds

if TYPE_CHECKING:
    from maitred.cli.tuning import RunFigures, Tried, Tuned

HEADINGS = ("batch", "delay", "instances", "threads")
FIGURES = ("p50", "p99", "requests/s", "mean batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What is tuned, and for what"""

    model: str = option(metavar="MODEL")
    """The model's name; its folder is in the repository."""
    model_repository: str = option(metavar="DIR")
    """Where it is."""
    p99: str = option(metavar="TIME")
    """Of the latency, such as 20ms or 1s: 99 of 100 requests are to be answered by then."""
    rate: float | None = option(None, metavar="R")
    """Requests that come a second, whatever becomes of those before; the lowest p99 is best."""
    concurrency: int | None = option(None, metavar="N")
    """So many clients instead, each asking again once it was answered; the most requests/s within p99 are best."""
    rows: int = 1
    """Of each request."""
    length: int = 0
    """Of the open dimensions of its inputs; 0 is one of the length buckets, or of the warm-up."""
    allow_repository_code: bool = False
    """Run its model.py, in processes of its own, where it is Python."""
    seconds: float = option(2.0, metavar="SECONDS")
    """Of each live run; longer is surer."""
    write: bool = False
    """Put what was chosen into the model's config.pbtxt: dynamic_batching, instance_group, intra_op_thread_count. All
    else in it stays, but for its comments, which go."""
    json: bool = False
    """Print what was found as JSON."""

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise ConfigError("--rate or --concurrency is required, and only one of them")
        require_over_0(self, "rate", "concurrency", "rows", "seconds")
        require_at_least("length", self.length, 0)


def _run(options: Options) -> int:
    from pathlib import Path

    from maitred.cli.console import inert, note
    from maitred.cli.tuning import TuningTarget, tune, write_setting
    from maitred.tensor.python.instance import all_openers

    asked = options[TuneOptions]
    p99_s = parse_seconds(asked.p99)
    if not p99_s:
        raise UsageError(f"--p99 is {asked.p99!r}; write a time, such as 20ms or 1s")
    target = TuningTarget(
        p99_s=p99_s,
        rate=asked.rate,
        concurrency=asked.concurrency or 0,
        num_rows=asked.rows,
        length=asked.length,
        seconds=asked.seconds,
    )
    folder = Path(asked.model_repository, asked.model)
    if not folder.is_dir():
        raise ConfigError(f"{asked.model_repository} has no model {asked.model!r}")
    tuned = tune(folder, target, note, all_openers(allow_code=asked.allow_repository_code))
    meets = tuned.chosen.live is not None and tuned.chosen.live.meets(target)
    if asked.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(tuned.to_json(target)), indent=2).decode())
    else:
        print(inert(table(tuned)))
    if not meets:
        note(f"none of them keeps a p99 of {asked.p99}{' at this rate' if asked.rate else ''}; nothing is written")
    elif asked.write:
        write_setting(folder, tuned.chosen.setting)
        note(f"written: {folder / 'config.pbtxt'}")
    return 0 if meets else 1


def table(tuned: Tuned) -> str:
    """The settings that ran live, the best first."""
    from maitred.cli.console import aligned

    both = [f"{kind} {figure}" for kind in ("simulated", "live") for figure in FIGURES]
    rows = [["", *HEADINGS, *both], *(_row(each, chosen=each is tuned.chosen) for each in tuned.live)]
    return f"{aligned(rows)}\n{tuned.num_simulated} settings simulated, {len(tuned.live)} of them run live"


def _row(tried: Tried, *, chosen: bool) -> list[str]:
    setting = tried.setting
    named = [str(setting.batch), f"{setting.delay_us / 1000:g}ms", str(setting.instances), str(setting.threads)]
    return ["*" if chosen else "", *named, *_cells(tried.simulated), *_cells(tried.live)]


def _cells(outcome: RunFigures | None) -> list[str]:
    from maitred.cli.console import seconds_text

    if outcome is None:
        return ["-"] * len(FIGURES)
    times = [seconds_text(outcome.p50_s), seconds_text(outcome.p99_s)]
    return [*times, f"{outcome.throughput_rps:,.0f}", f"{outcome.mean_batch:.1f}"]


COMMAND = Command(
    path="tune",
    summary="Find the batching, instances and threads of a tensor model that keep a bound on its latency best.",
    run=_run,
    parts=(TuneOptions,),
    positional="model",
    first=("model", "model_repository", "p99", "rate", "concurrency", "write", "json"),
    examples=(
        "maitred tune resnet --model-repository ./repository --p99 20ms --rate 200",
        "maitred tune encoder --model-repository ./repository --p99 50ms --concurrency 32 --length 64 --write",
    ),
)
