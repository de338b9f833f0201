"""Where a router may start replicas of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maitred.api.route.launching import MakeLauncher

PLACEMENTS = ("pack", "spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What is started, and where."""

    words: tuple[str, ...]  # of `maitred serve`
    secret: str  # the fleet's
    placement: str
    num_shared: int  # replicas that are always there, placed together


def local(options: LaunchOptions) -> MakeLauncher:
    """On this machine, as processes."""
    from maitred.cluster.launch import LocalLauncher

    return lambda on_event: LocalLauncher(options.words, token=options.secret, on_event=on_event)


def ray(options: LaunchOptions) -> MakeLauncher:
    """On the nodes of a Ray cluster, as actors. Raises ConfigError without the extra `ray`."""
    from maitred.cluster.ray_backend import RayLauncher

    return lambda on_event: RayLauncher(
        options.words,
        token=options.secret,
        on_event=on_event,
        placement=options.placement,
        num_shared=options.num_shared,
    )


LAUNCHERS: dict[str, Callable[[LaunchOptions], MakeLauncher]] = {"local": local, "ray": ray}
"""Raises ConfigError where it cannot."""
