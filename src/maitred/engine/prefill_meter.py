"""Time to compute a token of a prompt, learned from the steps of a running engine."""

from __future__ import annotations

from maitred.core.step import SchedulerOutput

MIN_PREFILL_TOKENS = 32  # fewer say little beside what every step costs
SMOOTHING = 0.2


class PrefillMeter:
    """A step's time beyond that of a step without prompts is shared by its prompt tokens, smoothed over steps."""

    def __init__(self) -> None:
        self._decode_s: float | None = None  # of a step without prompts
        self.s_per_token: float | None = None  # of a prompt
        self.num_steps = 0  # that it was learned from

    def observe(self, plan: SchedulerOutput, execute_s: float) -> bool:
        """Takes in a step; whether it said something of prompts."""
        if not plan.rows or plan.swap_outs or plan.swap_ins or execute_s <= 0:
            return False
        num_prefill = sum(row.num_known for row in plan.rows if row.num_tokens > 1 and row.num_known > 1)
        if num_prefill == 0:
            self._decode_s = _smoothed(self._decode_s, execute_s)
        if num_prefill < MIN_PREFILL_TOKENS:
            return False
        alone_s = execute_s - (self._decode_s or 0.0) * (len(plan.rows) > 1)
        self.s_per_token = _smoothed(self.s_per_token, max(alone_s, 0.1 * execute_s) / num_prefill)
        self.num_steps += 1
        return True


def _smoothed(before: float | None, new: float) -> float:
    return new if before is None else before + SMOOTHING * (new - before)
