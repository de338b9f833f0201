"""The flags of `maitred roofline`."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.flags import option
from maitred.core.errors import ConfigError


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
