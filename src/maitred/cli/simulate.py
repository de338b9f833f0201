"""The flags of `maitred simulate`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from maitred.cli.command import Command, deferred
from maitred.cli.flags import option
from maitred.config import (
    HANDOVERS,
    MAX_SPECULATIVE_TOKENS,
    SIMULATED_PREDICTOR_NAMES,
    AdmissionConfig,
    CacheConfig,
    SchedulerConfig,
)
from maitred.config.field_checks import require_at_least, require_between
from maitred.core.errors import ConfigError

RATES = 1e-6, 1e9  # so that times between requests are of a size that is computed with
DEVICES = ("a100", "h100", "h200", "b200", "mi300x", "tpu-v5e", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What to simulate"""

    workload: str = option("", metavar="FILE", short="-w")
    """Trace (JSON lines, or the CSV of Azure's or BurstGPT's; .gz too), or a workload described in YAML or JSON;
    docs/simulator.md has the formats."""
    trace: str = option("", metavar="FILE")
    """Trace of JSON lines, in place of --workload; with --model-repository, requests for tensor models among them."""
    device: str | None = option(None, metavar="NAME|FILE", choices=DEVICES)
    """Device: a file of `maitred profile`, or a100, h100, h200, b200, mi300x, tpu-v5e or cpu, h100x8 for
    eight (tensor parallel; h100x8ep splits experts); None is this machine's own
    profile if there is one, else cpu for the built-in model and h100 for others."""
    model: str | None = option(None, metavar="MODEL")
    """Folder with a config.json, or a known name such as llama-3.1-8b; None is the profile's, or the built-in model;
    with --model-repository none is no language model."""
    trace_unit: str | None = option(None, metavar="UNIT", choices=("ms", "s"))
    """Unit of the trace's timestamps, ms or s; None is ms for JSON lines and s for CSV, whose dates need none."""
    trace_block_size: int | None = option(None, metavar="TOKENS")
    """Tokens of the prompt that each of the trace's hash_ids stands for; None is 512."""
    rate_scale: float = option(1.0, metavar="FACTOR")
    """Let requests arrive this many times as fast."""
    slo: tuple[str, ...] = option((), metavar="NAME:TIME")
    """Objective a request must meet to count as good: ttft:200ms, itl:50ms (99% of its gaps), tpot:40ms, e2e:2s."""
    tenants: str | None = option(None, metavar="FILE")
    """tenants.yaml: weight, tier, limits and time limits of the tenants that the workload names."""
    admission: bool = False
    """Put the server's admission control before the engine, with the limits below; who is refused is in the figures."""
    acceptance: float | None = option(None, metavar="SHARE")
    """Speculate: each draft is accepted with this chance, 0 to 1, if those before it were; the scheduler decides how
    many, as it does when it serves."""
    num_speculative_tokens: int = 5
    """Most drafts of a request in a step, 1 to 16."""
    jitter: bool = True
    """Let steps vary as they did when the profile was recorded."""
    seed: int = 0
    """Of the jitter; same seed, same run."""
    json: str | None = option(None, metavar="FILE", bare="-")
    """Write the figures as JSON; without FILE, or with -, on standard output."""
    report: str | None = option(None, metavar="FILE")
    """Write one HTML file: policies side by side with a verdict, distributions, queue and the slots over time."""

    def __post_init__(self) -> None:
        if not self.workload and not self.trace:
            raise ConfigError("--workload is required, or --trace in its place; see maitred simulate --help")
        if self.workload and self.trace:
            raise ConfigError("--workload and --trace both name what comes; drop one")
        if self.trace_unit not in (None, "ms", "s"):
            raise ConfigError(f"trace_unit is {self.trace_unit!r}; choose ms or s")
        require_at_least("trace_block_size", self.trace_block_size, 1)
        require_between("rate_scale", self.rate_scale, *RATES)
        require_between("acceptance", self.acceptance, 0, 1)
        require_between("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        check_report(self.report)
        check_written("json", self.json)


def check_report(name: str | None) -> None:
    if name is not None and not name.endswith(".html"):
        raise ConfigError(f"report is {name!r}; its name must end in .html")
    check_written("report", name)


def check_written(flag: str, name: str | None) -> None:
    """Refuse before the work what could not be written after it. Raises ConfigError."""
    if name is None or name == "-":
        return
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} is {name!r}, where no file can be written; name a file in a folder that is there")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTensorOptions:
    """Tensor models"""

    model_repository: str | None = option(None, metavar="DIR")
    """Serve the trace's tensor models from this repository, in the same queue; none is loaded."""
    tensor_profile: str | None = option(None, metavar="FILE")
    """Batch times by `maitred profile --model-repository`; None is this machine's own of the repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFleetOptions:
    """Several replicas behind a router"""

    fleet: str | None = option(None, metavar="N|MIN:MAX")
    """Simulate so many replicas behind `maitred route`; with MIN:MAX its autoscaler decides how many, from MIN on."""
    balance: str = option("prefix", metavar="NAME[,NAME...]")
    """Balances to compare: round_robin, least_load, two_choices, hash, session, prefix. If there are several, there is
    one policy, and figures go by balance."""
    fleet_devices: str | None = option(None, metavar="NAME:COUNT,...")
    """Devices of the replicas, in the order in which they start: h100:4,a100:4; None is --device for all."""
    max_load_ratio: float = 1.25
    """As of `maitred route`: nobody is sent to a replica with more than this times the mean in flight, plus one."""
    idle_s: float = 300.0
    """As of `maitred route`: without a request for so long (s), the last replica stops, where MIN is 0."""
    cold_start_s: float = 30.0
    """A replica takes so long (s) to start."""
    wake_s: float = 3.0
    """A replica that is asleep takes so long (s) to wake up."""
    asleep: int = 0
    """So many of the replicas that stop sleep instead."""
    models_memory_bytes: int | None = None
    """Memory for the workload's `models`, as of `maitred route`; None holds all of them."""
    swap_wait_s: float = 10.0
    """As of `maitred route`: so long (s) a request of a loaded model may pass one that waits for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorkerOptions:
    """Workers that hand KV over"""

    prefill_workers: int = 0
    """Simulate workers behind one port: so many to which prompts are sent first."""
    decode_workers: int = 0
    """So many that go on with the answers."""
    mixed_workers: int = 0
    """So many for both."""
    prefill_device: str | None = option(None, metavar="NAME|FILE", choices=DEVICES)
    """Device of prefill workers; None is --device."""
    decode_device: str | None = option(None, metavar="NAME|FILE", choices=DEVICES)
    """Device of decode workers; None is --device."""
    mixed_device: str | None = option(None, metavar="NAME|FILE", choices=DEVICES)
    """Device of mixed workers; None is --device."""
    link: str = option("tcp", metavar="NAME|RATE|none")
    """Between workers: shm, tcp, 10gbe, 25gbe, 100gbe, 400g, infiniband, nvlink, a rate such as 100MB/s, or none."""
    handover: str = option("auto", metavar="RULE", choices=HANDOVERS)
    """Whether one worker computes a prompt and another answers: auto, always or never, as of `maitred serve`."""
    kv_disk_bytes: int | None = option(None, metavar="BYTES")
    """Disk tier of all workers: ended requests' KV is stored there, and read where that is quicker than computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBaselineOptions:
    """Baselines to compare with"""

    batching: str = option("continuous", metavar="NAME[,NAME...]")
    """Ways of batching to compare: continuous is what is served; static begins a batch of --max-num-seqs requests when
    the last one has ended, dynamic also when the first has waited long enough; both pad."""
    batch_delay_s: float = 0.1
    """A dynamic batch waits so long (s) to fill."""
    kv_layout: str = option("paged", metavar="NAME[,NAME...]")
    """Layouts of KV to compare: paged is what is served; contiguous reserves room for all that the client allows; none
    computes all tokens again for each one."""

    def __post_init__(self) -> None:
        require_at_least("batch_delay_s", self.batch_delay_s, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSchedulerConfig(SchedulerConfig):
    """The scheduler, as it would be served."""

    policy: str = option("fcfs", metavar="NAME[,NAME...]")
    """Policies to compare, each on the same workload."""
    predictor: str = option("oracle", metavar="NAME", choices=SIMULATED_PREDICTOR_NAMES)
    """Where predicted output lengths come from: oracle (the truth), max_tokens, quantile, ranker or adversarial."""


COMMAND = Command(
    path="simulate",
    summary="Compare scheduling policies on a workload, with the scheduler that serves and a model of the machine.",
    run=deferred("maitred.cli.simulation:run_simulations"),
    parts=(
        SimulateOptions,
        SimulatedTensorOptions,
        SimulatedFleetOptions,
        SimulatedWorkerOptions,
        SimulatedBaselineOptions,
        SimulatedSchedulerConfig,
        AdmissionConfig,
        CacheConfig,
    ),
    first=(
        "workload",
        "policy",
        "device",
        "model",
        "slo",
        "tenants",
        "admission",
        "fleet",
        "prefill_workers",
        "decode_workers",
        "handover",
        "json",
        "report",
    ),
    examples=(
        "maitred simulate --workload examples/workloads/bimodal.yaml --policy fcfs,priority",
        "maitred simulate --workload trace.jsonl --device h100 --model llama-3.1-8b --rate-scale 2 --json",
        "maitred simulate --workload examples/workloads/tenants.yaml --slo ttft:1s --report report.html",
        "maitred simulate --workload trace.jsonl --tenants tenants.yaml --admission --ttft-objective-s 1",
        "maitred simulate -w trace.jsonl --model llama-3.1-8b --fleet 8 --device h100 --balance hash,prefix",
        "maitred simulate -w trace.jsonl --model llama-3.1-8b --prefill-workers 1 --decode-workers 3 --link 100gbe",
        "maitred simulate -w trace.jsonl --model llama-3.1-8b --device a100 --batching static,dynamic,continuous",
        "maitred simulate --trace trace.jsonl --model-repository ./repository --model none",
    ),
)
