"""`maitred profile`: measure this machine for `maitred simulate`. The work is in `simulation/`; here are its flags."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.cli.local import ENGINE_PARTS, engine_config
from maitred.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What to record"""

    output: str | None = option(None, metavar="FILE", short="-o")
    """Where the profile goes; None is where simulate looks for this model's ($XDG_CACHE_HOME/maitred/profiles)."""
    seconds: float = option(30.0, metavar="SECONDS")
    """How long to keep the engine busy; longer is surer."""
    clock: str = option("wall", choices=("wall", "cpu"))
    """wall time, or cpu: the engine thread's CPU time, for a machine that others use too (needs --num-threads 1)."""

    def __post_init__(self) -> None:
        if not self.seconds >= 1:
            raise ConfigError(f"seconds is {self.seconds}; it must be at least 1")
        if self.clock not in ("wall", "cpu"):
            raise ConfigError(f"clock is {self.clock!r}; choose one of wall, cpu")


def _run(options: Options) -> int:
    from maitred.cli.profile.measure import run_profile

    return run_profile(options[ProfileOptions], engine_config(options))


COMMAND = Command(
    path="profile",
    summary="Measure a model on this machine, its steps and the way to them over HTTP, for simulate.",
    run=_run,
    parts=(ProfileOptions, *ENGINE_PARTS),
    positional="model",
    examples=("maitred profile", "maitred profile ./Llama-3.2-1B -o llama.json", "maitred profile --seconds 120"),
)
