"""The flags of `maitred profile`."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.flags import option
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

    model_repository: str | None = option(None, metavar="DIR")
    """Measure the batches of this repository's tensor models instead, of all or of --model's; for simulate and tune."""

    allow_repository_code: bool = False
    """Run model.py files of that repository, in processes of their own."""

    def __post_init__(self) -> None:
        if not self.seconds >= 1:
            raise ConfigError(f"seconds is {self.seconds}; it must be at least 1")
        if self.clock not in ("wall", "cpu"):
            raise ConfigError(f"clock is {self.clock!r}; choose one of wall, cpu")
