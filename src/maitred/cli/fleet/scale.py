"""`maitred fleet scale`: from how many to how many replicas a router launches."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.cli.fleet.asking import RouterOptions, order
from maitred.config.bounds import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """How many"""

    replicas: str = option(metavar="N|MIN:MAX")
    """So many replicas, or from MIN to MAX as there is need; MIN 0 lets the last one stop."""

    def __post_init__(self) -> None:
        Bounds.parse(self.replicas)


def _run(options: Options) -> int:
    low, high = Bounds.parse(options[ScaleOptions].replicas)
    done = f"{low} replicas" if low == high else f"from {low} to {high} replicas"
    return order(options[RouterOptions], "/admin/fleet/scale", {"min": low, "max": high}, done)


COMMAND = Command(
    path="fleet scale",
    summary="Set how many replicas a router launches, or between how many.",
    run=_run,
    parts=(ScaleOptions, RouterOptions),
    positional="replicas",
    examples=("maitred fleet scale 4", "maitred fleet scale 0:8"),
)
