"""Speed of this device, as a router compares devices: tokens of prompts, and of output, in a second."""

from __future__ import annotations

from maitred.core.step import SchedulerOutput
from maitred.engine.prefill_meter import SMOOTHING, PrefillMeter

SPEEDS = ("prefill_tokens_per_s", "decode_tokens_per_s")


class SpeedMeter:
    """Learns from steps; 0 is not measured yet. Decoding is at the batch sizes there were lately."""

    def __init__(self) -> None:
        self._prefill = PrefillMeter()
        self.decode_tokens_per_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        s_per_token = self._prefill.s_per_token
        return 1 / s_per_token if s_per_token else 0.0

    def observe(self, plan: SchedulerOutput, execute_s: float) -> None:
        """Takes in a step."""
        self._prefill.observe(plan, execute_s)
        if plan.rows and execute_s > 0 and all(row.num_known <= 1 for row in plan.rows):
            rate = sum(row.num_tokens for row in plan.rows) / execute_s
            before = self.decode_tokens_per_s or rate
            self.decode_tokens_per_s = before + SMOOTHING * (rate - before)
