"""Where a router may start replicas of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from maitred.errors import ConfigError

if TYPE_CHECKING:
    from maitred.api.route.launching import MakeLauncher


def local(words: tuple[str, ...], secret: str) -> MakeLauncher:
    """On this machine, as processes."""
    from maitred.cluster.launch import LocalLauncher

    return lambda on_event: LocalLauncher(words, token=secret, on_event=on_event)


def ray(words: tuple[str, ...], secret: str) -> MakeLauncher:
    raise ConfigError("launch is ray, which this version cannot do; --launch local starts replicas on this machine")


LAUNCHERS: dict[str, Callable[[tuple[str, ...], str], MakeLauncher]] = {"local": local, "ray": ray}
"""(words of `maitred serve`, the fleet's secret) -> what makes a launcher. Raises ConfigError where it cannot."""
