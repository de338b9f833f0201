"""Service level objectives, live: of each request that generates, which it met, counted by tenant."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from maitred.api.http.errors import CLIENT_GONE_STATUS
from maitred.api.http.exchange import Exchange
from maitred.core.objectives import broken_by, met, parse_slo

ALL = "all"  # the label of all objectives together: the goodput
ROLES = {"ttft": "prefill", "itl": "decode", "tpot": "decode"}  # that did the work, where two workers shared it
CLIENTS_FAULT = range(400, 499)  # refused for what it asked, or past its own limits: no promise was made


class Promises:
    """The objectives of `--slo`, and how they were kept. Belongs to the event loop."""

    def __init__(self, slos: Sequence[str]) -> None:
        """`slos` are as `--slo` is written. Raises ConfigError."""
        self._bounds_s = dict(map(parse_slo, slos))
        self.keeps_gaps = "itl" in self._bounds_s
        self._counts: Counter[tuple[str, str, str, str]] = Counter()

    @property
    def is_empty(self) -> bool:
        return not self._bounds_s

    def ended(self, exchange: Exchange, began_at: float) -> None:
        """Judge a request that began then (s, monotonic) and is over now: answered, failed or left by its client."""
        if not self._bounds_s:
            return
        if exchange.status == CLIENT_GONE_STATUS or exchange.status is None:
            self._client_gone(exchange, began_at)
        elif exchange.status not in CLIENTS_FAULT:
            has_failed = "error" in exchange.log or exchange.status >= 500
            kept = met(self._bounds_s, exchange.paces, began_at)
            self._count(exchange, dict.fromkeys(kept, False) if has_failed else kept)

    def _client_gone(self, exchange: Exchange, began_at: float) -> None:
        """A client that left counts only where a promise was broken by then; what would have come is unknown."""
        broken = broken_by(self._bounds_s, exchange.paces, began_at, time.monotonic())
        if any(broken.values()):
            self._count(exchange, {name: not is_broken for name, is_broken in broken.items()})

    def _count(self, exchange: Exchange, kept: Mapping[str, bool]) -> None:
        tenant = exchange.caller.tenant.name if hasattr(exchange, "caller") else ""
        roles = ROLES if exchange.is_handed_over else {}
        for objective, was_met in {**kept, ALL: all(kept.values())}.items():
            role = roles.get(objective, "mixed")
            self._counts[objective, "true" if was_met else "false", tenant, role] += 1
            self._counts[objective, "false" if was_met else "true", tenant, role] += 0  # there from the first one on

    def samples(self) -> dict[tuple[str, ...], float]:
        """Samples of the metric, by its labels."""
        return {labels: float(count) for labels, count in self._counts.items()}
