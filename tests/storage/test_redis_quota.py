"""Two routers, one Redis, one tenant: together they let in what one would, and each its own limit without Redis."""

from __future__ import annotations

from pathlib import Path

from maitred.core.clock import ManualClock
from maitred.core.errors import RateLimited
from maitred.storage.redis import PREFIX
from maitred.storage.redis_quota import QuotaExchange
from maitred.tenancy.quota import QuotaBook
from maitred.tenancy.shared import SharedQuotas
from maitred.tenancy.tenant import Limits, Tenant
from tests.storage.redis_server import needs_redis, running_redis
from tests.storage.test_redis import store_at

pytestmark = needs_redis
LIMIT = 40
TENANT = Tenant(name="a", limits=Limits(requests_per_minute=LIMIT))


def let_in(book: QuotaBook, wanted: int, now: float) -> int:
    for number in range(wanted):
        try:
            book.of(TENANT).enter(1, now).end(0)
        except RateLimited:
            return number
    return wanted


async def test_two_routers_share_a_limit_and_each_has_its_own_while_redis_is_gone(tmp_path: Path):
    clock = ManualClock(1000.0)
    books = [QuotaBook({}), QuotaBook({})]
    with running_redis(tmp_path) as server:
        async with store_at(server.url) as one, store_at(server.url) as other:
            exchanges = []
            for book, store in zip(books, (one, other), strict=True):
                book.shared = SharedQuotas()
                exchanges.append(QuotaExchange(store, book.shared, clock))
            total = [0, 0]
            for _ in range(LIMIT):
                for number, (book, exchange) in enumerate(zip(books, exchanges, strict=True)):
                    total[number] += let_in(book, 2, clock.now())
                    await exchange.exchange()
            assert LIMIT <= sum(total) <= LIMIT + 2, "one exchange's worth beyond at most"
            assert min(total) >= LIMIT // 4
            for _ in range(3):
                await exchanges[0].exchange()
            key = PREFIX + b"quota:{a}:requests"
            (entries,) = await one.ask([("HVALS", key)]) or [[]]
            assert sum(map(int, entries)) == sum(total), "what was leased and not used went back"

            server.kill()
            while one.is_up:
                await exchanges[0].exchange()
            assert let_in(books[0], LIMIT, clock.now()) == LIMIT - total[0]


async def test_a_bucket_of_another_type_limits_nobody(tmp_path: Path):
    clock, book = ManualClock(1000.0), QuotaBook({})
    book.shared = SharedQuotas()
    with running_redis(tmp_path) as server:
        async with store_at(server.url) as store:
            exchange = QuotaExchange(store, book.shared, clock)
            await store.ask([("SET", PREFIX + b"quota:{a}:requests", "x")])
            assert let_in(book, 1, 1000.0) == 1
            await exchange.exchange()
            assert let_in(book, LIMIT, 1000.0) == LIMIT - 1
            assert store.is_up
