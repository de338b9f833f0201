"""`maitred simulate`: compare policies on a workload, without a model."""

from __future__ import annotations

from maitred.cli.command import Command, Options
from maitred.cli.simulate.options import (
    SimulatedFleetOptions,
    SimulatedSchedulerConfig,
    SimulatedTensorOptions,
    SimulatedWorkerOptions,
    SimulateOptions,
)
from maitred.config import AdmissionConfig, CacheConfig


def _run(options: Options) -> int:
    from maitred.cli.simulate.session import Simulated, run_simulations

    return run_simulations(
        Simulated(
            options[SimulateOptions],
            options[SimulatedSchedulerConfig],
            options[SimulatedFleetOptions],
            options[SimulatedWorkerOptions],
            options[AdmissionConfig],
            options[CacheConfig],
            options[SimulatedTensorOptions],
        )
    )


COMMAND = Command(
    path="simulate",
    summary="Compare scheduling policies on a workload, with the scheduler that serves and a model of the machine.",
    run=_run,
    parts=(
        SimulateOptions,
        SimulatedTensorOptions,
        SimulatedFleetOptions,
        SimulatedWorkerOptions,
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
        "maitred simulate --trace trace.jsonl --model-repository ./repository --model none",
    ),
)
