"""What answers teach: bytes for a token, lengths of outputs, what foreign servers still have of what was sent there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from maitred.cluster.fleet_request import FleetRequest, TokenRatio, Usage
from maitred.cluster.foreign_history import Expected, ForeignHistory
from maitred.cluster.prefix_index import PrefixIndex
from maitred.cluster.replicas import Kind, Replica
from maitred.policy.predictor import Predictor, bounded_prediction

MAX_RATIOS = 256  # models whose bytes for a token are known; those used least recently are forgotten


class Lessons:
    """Of the fleet as a whole."""

    def __init__(self, predictor: Predictor | None, index: PrefixIndex) -> None:
        """`predictor` is None where the policy reads no predictions."""
        self.predictor = predictor
        self._history = ForeignHistory(index)
        self._ratios: OrderedDict[str | None, TokenRatio] = OrderedDict()
        self._expected: dict[str, Expected] = {}  # of requests in flight to foreign servers

    def estimate(self, request: FleetRequest) -> None:
        """Of a new request: what it will cost."""
        request.num_inputs = request.num_counted or self._ratio_of(request.model).tokens(request.num_bytes)
        if self.predictor is not None:
            request.expected_outputs = bounded_prediction(self.predictor, request)

    def sent(self, request: FleetRequest, replica: Replica) -> None:
        if replica.facts.kind is Kind.FOREIGN and request.keys:
            self._expected[request.request_id] = self._history.sent(replica.bit, request.keys)

    def sent_elsewhere(self, keys: Sequence[int], replica: Replica) -> None:
        """Another router sent a prompt with these keys there."""
        if replica.facts.kind is Kind.FOREIGN and keys:
            self._history.sent(replica.bit, keys)

    def told(self, request: FleetRequest, replica: Replica, usage: Usage) -> None:
        """The usage of its whole answer."""
        if usage.num_prompt_tokens:
            self._ratio_of(request.model).told(request.num_bytes, usage.num_prompt_tokens)
        expected = self._expected.get(request.request_id)
        if expected is not None and usage.num_cached_tokens is not None and usage.num_prompt_tokens:
            self._history.told(
                replica.bit,
                expected,
                cached_tokens=usage.num_cached_tokens,
                prompt_tokens=usage.num_prompt_tokens,
            )
        if self.predictor is not None and usage.complete and request.num_outputs:
            self.predictor.observe(request)

    def left_replica(self, request: FleetRequest) -> None:
        """It is in flight no more."""
        self._expected.pop(request.request_id, None)

    def forgot(self, replica: Replica) -> None:
        """Its cache is gone."""
        self._history.forgot(replica.bit)

    def _ratio_of(self, model: str | None) -> TokenRatio:
        ratio = self._ratios.get(model)
        if ratio is None:
            ratio = self._ratios[model] = TokenRatio()
            if len(self._ratios) > MAX_RATIOS:
                self._ratios.popitem(last=False)
        elif len(self._ratios) > 1:
            self._ratios.move_to_end(model)
        return ratio
