"""The flags of `maitred simulate`."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.flags import option
from maitred.config import SIMULATED_PREDICTOR_NAMES, SchedulerConfig
from maitred.errors import ConfigError

DEVICES = ("a100", "h100", "h200", "mi300x", "tpu-v5e", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What to simulate"""

    workload: str = option(metavar="FILE", short="-w")
    """Trace of JSON lines, or a workload described in YAML or JSON; docs/simulator.md has both formats."""
    device: str | None = option(None, metavar="NAME|FILE", choices=DEVICES)
    """Device: a file of `maitred profile`, or a100, h100, h200, mi300x, tpu-v5e or cpu; None is this machine's own
    profile if there is one, else cpu for the built-in model and h100 for others."""
    model: str | None = option(None, metavar="MODEL")
    """Folder with a config.json, or a known name such as llama-3.1-8b; None is the profile's, or the built-in model."""
    rate_scale: float = option(1.0, metavar="FACTOR")
    """Let requests arrive this many times as fast."""
    slo: tuple[str, ...] = option((), metavar="NAME:TIME")
    """Objective a request must meet to count as good: ttft:200ms, itl:50ms (99% of its gaps), tpot:40ms, e2e:2s."""
    tenants: str | None = option(None, metavar="FILE")
    """tenants.yaml: weight, tier, limits and time limits of the tenants that the workload names."""
    admission: bool = False
    """Put the server's admission before the engine, with the limits below; who is turned away is in the figures."""
    jitter: bool = True
    """Let steps vary as they did when the profile was recorded."""
    seed: int = 0
    """Of the jitter; same seed, same run."""
    json: str | None = option(None, metavar="FILE", bare="-")
    """Write the figures as JSON; without FILE, or with -, on standard output."""
    report: str | None = option(None, metavar="FILE")
    """Draw distributions, the slots' timeline and the queue, as .html or .svg."""

    def __post_init__(self) -> None:
        if not self.rate_scale > 0:
            raise ConfigError(f"rate_scale is {self.rate_scale}; it must be over 0")
        if self.report is not None and not self.report.endswith((".html", ".svg")):
            raise ConfigError(f"report is {self.report!r}; its name must end in .html or .svg")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSchedulerConfig(SchedulerConfig):
    """The scheduler, as it would be served."""

    policy: str = option("fcfs", metavar="NAME[,NAME...]")
    """Policies to compare, each on the same workload."""
    predictor: str = option("oracle", metavar="NAME", choices=SIMULATED_PREDICTOR_NAMES)
    """Where predicted output lengths come from: oracle (the truth), max_tokens, quantile, ranker or adversarial."""
