"""Expected cost of a request, in inputs to compute. A prediction can be wrong; what it leads to is bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from maitred.policy.queued import NO_KV_NEED, KVNeed, Queued


def expected_outputs(request: Queued) -> float:
    """Return the expected outputs, from 1 to max_outputs whatever the predictor said; max_outputs without one."""
    expected = request.expected_outputs
    if expected is None or not expected <= request.max_outputs:  # a NaN goes here too
        return request.max_outputs
    return expected if expected > 1.0 else 1.0


def remaining_outputs(request: Queued) -> float:
    """Return the outputs to come, at least 1 however wrong the prediction was."""
    left = expected_outputs(request) - request.num_outputs
    return left if left > 1.0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Inputs that are not cached, `output_weight` for an output, `block_weight` for a KV block held at the end."""

    output_weight: float
    block_weight: float
    needs: Mapping[str, KVNeed]  # by request id, as `Policy.kv_needs`

    def uncached(self, request: Queued) -> int:
        """Inputs to compute."""
        left = request.num_inputs - self.needs.get(request.request_id, NO_KV_NEED).num_cached
        return left if left > 0 else 0

    def computing(self, request: Queued) -> float:
        """Return the cost of computing, without blocks and past outputs: uncached inputs count again."""
        return self.uncached(request) + self.output_weight * remaining_outputs(request)

    def blocks(self, request: Queued) -> float:
        return self.block_weight * self.needs.get(request.request_id, NO_KV_NEED).num_blocks

    def expected(self, request: Queued) -> float:
        """Return the expected cost of the whole request."""
        return self.uncached(request) + self.output_weight * expected_outputs(request) + self.blocks(request)

    def remaining(self, request: Queued) -> float:
        """Return the cost of what is to come, its prompt again included; with as much cached at most `expected`."""
        return self.computing(request) + self.blocks(request)

    def largest(self, request: Queued) -> float:
        """The most that any prediction, and an empty cache, can make of it."""
        most_blocks = self.needs.get(request.request_id, NO_KV_NEED).max_blocks
        return request.num_inputs + self.output_weight * request.max_outputs + self.block_weight * most_blocks
