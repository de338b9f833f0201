"""`maitred roofline`: what this machine allows, and how far an engine on it is from that."""

from __future__ import annotations

from dataclasses import dataclass, replace

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.cli.local import ENGINE_PARTS, engine_config
from maitred.config import CacheConfig
from maitred.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineOptions:
    """What to measure"""

    engine: bool = True
    """Run the model's engine too, and say how far its steps are from their floors."""
    batch: tuple[str, ...] = option(("1", "8", "32"), metavar="N")
    """Requests in a decode step, one floor for each."""
    context: int = option(512, metavar="TOKENS")
    """Context of each request in a decode step."""
    prompt: int = option(512, metavar="TOKENS")
    """Prompt of the prefill."""
    json: bool = False
    """Print one JSON object in place of the tables."""

    def __post_init__(self) -> None:
        for name, tokens in (("context", self.context), ("prompt", self.prompt)):
            if tokens < 1:
                raise ConfigError(f"{name} is {tokens}; it must be at least 1")


def _run(options: Options) -> int:
    from maitred.cli.roofline.report import run_roofline

    # hits in the prefix cache would leave nothing to measure
    config = replace(engine_config(options), cache=replace(options[CacheConfig], enable_prefix_caching=False))
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
