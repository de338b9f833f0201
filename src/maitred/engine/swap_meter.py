"""What computing a token of a prompt takes, learned from the steps of a running engine; for the swap decision."""

from __future__ import annotations

from maitred.scheduler.swap import SwapCosts
from maitred.step import SchedulerOutput

MIN_PREFILL_TOKENS = 32  # fewer say little beside what every step costs
SMOOTHING = 0.2
NEWS = 1.25  # told again when it is this many times more or less than what was told


class SwapMeter:
    """Bandwidths were measured when the engine was built; the time of a prompt's token is what steps show.

    A step's time beyond that of a step without prompts is shared by its prompt tokens, smoothed over steps.
    """

    def __init__(self, *, bytes_per_block: int, out_bytes_per_s: float, in_bytes_per_s: float) -> None:
        self._bytes_per_block = bytes_per_block
        self._out_bytes_per_s, self._in_bytes_per_s = out_bytes_per_s, in_bytes_per_s
        self._decode_s: float | None = None  # of a step without prompts
        self._prefill_s: float | None = None  # of one token of a prompt
        self._told_s: float | None = None

    def observe(self, plan: SchedulerOutput, execute_s: float) -> SwapCosts | None:
        """Takes in a step; the costs, when they are news."""
        if not plan.rows or plan.swap_outs or plan.swap_ins:
            return None
        num_prefill = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        if num_prefill == 0:
            self._decode_s = _smoothed(self._decode_s, execute_s)
            return None
        if num_prefill < MIN_PREFILL_TOKENS:
            return None
        alone_s = execute_s - (self._decode_s or 0.0) * (len(plan.rows) > 1)
        self._prefill_s = _smoothed(self._prefill_s, max(alone_s, 0.1 * execute_s) / num_prefill)
        return self._news(self._prefill_s)

    def _news(self, prefill_s: float) -> SwapCosts | None:
        told = self._told_s
        if told is not None and told / NEWS < prefill_s < told * NEWS:
            return None
        self._told_s = prefill_s
        return SwapCosts(self._bytes_per_block, self._out_bytes_per_s, self._in_bytes_per_s, prefill_s)


def _smoothed(before: float | None, new: float) -> float:
    return new if before is None else before + SMOOTHING * (new - before)
