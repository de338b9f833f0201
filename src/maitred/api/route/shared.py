"""What a router shares with others through Redis: quotas as leases, and the store of the result cache."""

from __future__ import annotations

from maitred.clock import Clock
from maitred.storage.redis import RedisStore
from maitred.storage.redis_quota import QuotaExchange
from maitred.tenancy.quota import QuotaBook
from maitred.tenancy.shared import SharedQuotas


class Shared:
    """One router's side of it."""

    def __init__(self, url: str, quotas: QuotaBook, clock: Clock) -> None:
        """Raises ConfigError for a wrong URL, or where redis-py is not installed."""
        self.store = RedisStore(url)
        quotas.shared = SharedQuotas()
        self._exchange = QuotaExchange(self.store, quotas.shared, clock)

    def start(self) -> None:
        """In the event loop."""
        self.store.start()
        self._exchange.start()

    def stop(self) -> None:
        """What is not written yet is lost; what is leased comes back by itself."""
        self._exchange.stop()
        self.store.stop()
