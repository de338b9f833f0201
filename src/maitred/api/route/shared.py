"""What a router shares with others through Redis: quotas as leases, the result cache, and where requests went."""

from __future__ import annotations

from collections.abc import Callable

from maitred.clock import Clock
from maitred.cluster.fleet_request import FleetRequest
from maitred.cluster.replicas import Kind, ReplicaFacts
from maitred.storage.redis import RedisStore
from maitred.storage.redis_notices import Bound, Notices
from maitred.storage.redis_quota import QuotaExchange
from maitred.tenancy.quota import QuotaBook
from maitred.tenancy.shared import SharedQuotas


class Shared:
    """One router's side of it."""

    def __init__(self, url: str, quotas: QuotaBook, clock: Clock, on_bound: Callable[[Bound], None]) -> None:
        """`on_bound` is told where other routers sent requests.

        Raises ConfigError for a wrong URL, or where redis-py is not installed.
        """
        self.store = RedisStore(url)
        quotas.shared = SharedQuotas()
        self._exchange = QuotaExchange(self.store, quotas.shared, clock)
        self._notices = Notices(self.store, on_bound)

    def start(self) -> None:
        """In the event loop."""
        self.store.start()
        self._exchange.start()
        self._notices.start()

    def bound(self, request: FleetRequest, replica: ReplicaFacts) -> None:
        """It goes there: told where others would send its session elsewhere, or not know what the replica has."""
        keys = request.keys if replica.kind is Kind.FOREIGN else ()
        if keys or request.hash_key is not None:
            self._notices.tell(Bound(replica.url, request.hash_key, keys))

    def stop(self) -> None:
        """What is not written yet is lost; what is leased comes back by itself."""
        self._notices.stop()
        self._exchange.stop()
        self.store.stop()
