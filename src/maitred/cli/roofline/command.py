"""`maitred roofline`: what this machine allows, and how far an engine on it is from that."""

from __future__ import annotations

from dataclasses import replace

from maitred.cli.command import Command, Options
from maitred.cli.local import ENGINE_PARTS, engine_config
from maitred.cli.roofline.options import RooflineOptions
from maitred.config import CacheConfig


def _run(options: Options) -> int:
    # hits in the prefix cache would leave nothing to measure
    config = replace(engine_config(options), cache=replace(options[CacheConfig], enable_prefix_caching=False))
    from maitred.cli.roofline.report import run_roofline  # after a look at the model's file

    return run_roofline(options[RooflineOptions], config)


COMMAND = Command(
    path="roofline",
    summary="Measure this machine's bandwidth and arithmetic, and how far the engine is from what they allow.",
    run=_run,
    parts=(RooflineOptions, *ENGINE_PARTS),
    positional="model",
    first=("model", "engine", "batch", "context", "prompt", "json", "dtype", "kv_dtype", "num_threads"),
    examples=(
        "maitred roofline",
        "maitred roofline ./Qwen3-0.6B --dtype int8 --batch 1 --batch 16 --context 2048",
        "maitred roofline ./Qwen3-0.6B --no-engine --json",
    ),
)
