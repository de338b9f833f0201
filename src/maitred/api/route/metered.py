"""A routed request as the ledger follows it: one row, by what replicas tell of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.api.route.relay import Relay
from maitred.request import Charges, FinishReason


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose it is; implements `storage.ledger.Owned`."""

    request_id: str
    tenant: str
    key_id: str
    priority: int
    sample_index: int = 0


class MeteredRoute:
    """Implements `storage.ledger.Metered`: all samples of a request together. The ledger's thread reads it."""

    __slots__ = ("_relay", "finish_reason", "spec")

    def __init__(self, spec: Owner, relay: Relay) -> None:
        self.spec, self._relay = spec, relay
        self.finish_reason: FinishReason | None = None

    @property
    def charges(self) -> Charges:
        spent = self._relay.spent
        return Charges(spent.num_prompt_tokens or 0, spent.num_cached_tokens or 0)

    @property
    def num_output_tokens(self) -> int:
        return self._relay.spent.num_output_tokens or 0

    def ended(self) -> None:
        """Nothing of it comes any more. An answer that came to its end does not say here why it did."""
        reasons = {"answered": FinishReason.STOP, "cancelled": FinishReason.ABORT}
        self.finish_reason = reasons.get(self._relay.outcome, FinishReason.ERROR)
