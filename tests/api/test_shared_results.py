"""Result caches of several routers over one Redis: one's answer is the other's hit, and what is damaged is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maitred.api.dialects.openai.answers import OPENAI
from maitred.api.http.bodies import LargeBodies
from maitred.api.http.exchange import Exchange
from maitred.api.http.results import Results
from maitred.core.clock import ManualClock
from maitred.storage.redis import PREFIX, RedisStore
from maitred.tenancy.caller import anybody
from tests.storage.redis_server import needs_redis, running_redis
from tests.storage.test_redis import store_at, written

pytestmark = needs_redis
MARKER = b"marker"
BODY = b'{"prompt":"x","temperature":0}'


async def asked(results: Results, answer: bytes = b"{}") -> tuple[str, bytes]:
    """What the cache told, and the body that left, after one request."""
    left: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        left.append(message)

    exchange = Exchange(
        scope={"path": "/v1/completions"},
        receive=None,  # type: ignore[arg-type]  # the body is read already
        raw_send=send,
        request_id="r",
        max_body_bytes=1000,
        large_bodies=LargeBodies(1000),
        headers={},
        format=OPENAI,
    )
    exchange.caller = anybody()
    wanted = results.wanted(exchange, BODY, revision="r", temperature=0, seed=None)
    if not await results.replay(exchange, wanted):
        await exchange.answer(answer, 200, ((b"content-type", b"application/json"),))
        results.keep(exchange, wanted)
    return dict(left[0]["headers"])[b"x-maitred-cache"].decode(), left[1]["body"]


def router(store: RedisStore) -> Results:
    return Results(100_000, 60.0, ManualClock(5.0), shared=store)


async def key_of(store: RedisStore) -> bytes:
    (keys,) = await store.ask([("KEYS", PREFIX + b"*")]) or [[]]
    (key,) = (key for key in keys if not key.endswith((b"probe", MARKER)))
    return bytes(key)


async def test_one_routers_answer_is_anothers_hit_and_a_damaged_one_is_dropped(tmp_path: Path):
    with running_redis(tmp_path) as server:
        async with store_at(server.url) as store:
            assert await asked(router(store), b"first") == ("miss", b"first")
            await written(store, MARKER)  # in order
            assert await asked(router(store)) == ("hit", b"first")

            key = await key_of(store)
            await store.ask([("SETRANGE", key, 60, b"#")])
            third = router(store)
            assert await asked(third, b"again") == ("miss", b"again")
            assert third.num_corrupt == 1
            await written(store, MARKER, b"2")
            assert await asked(router(store)) == ("hit", b"again")

            server.kill()
            while store.is_up:
                assert await asked(router(store), b"alone") == ("miss", b"alone")
            assert await asked(third) == ("hit", b"again"), "of its own memory"
