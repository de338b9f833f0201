"""What the swap decision must know of this machine: bandwidths, and what computing a token of a prompt takes."""

from __future__ import annotations

from maitred.engine.prefill_meter import PrefillMeter
from maitred.scheduler.swap import SwapCosts
from maitred.step import SchedulerOutput

NEWS = 1.25  # told again when it is this many times more or less than what was told


class SwapMeter:
    """Bandwidths were measured when the engine was built; the time of a prompt's token is what steps show."""

    def __init__(self, *, bytes_per_block: int, out_bytes_per_s: float, in_bytes_per_s: float) -> None:
        self._bytes_per_block = bytes_per_block
        self._out_bytes_per_s, self._in_bytes_per_s = out_bytes_per_s, in_bytes_per_s
        self._prefill = PrefillMeter()
        self._told_s: float | None = None

    def observe(self, plan: SchedulerOutput, execute_s: float) -> SwapCosts | None:
        """Takes in a step; the costs, when they are news."""
        self._prefill.observe(plan, execute_s)
        return self._news(self._prefill.s_per_token) if self._prefill.s_per_token is not None else None

    def _news(self, prefill_s: float) -> SwapCosts | None:
        told = self._told_s
        if told is not None and told / NEWS < prefill_s < told * NEWS:
            return None
        self._told_s = prefill_s
        return SwapCosts(self._bytes_per_block, self._out_bytes_per_s, self._in_bytes_per_s, prefill_s)
