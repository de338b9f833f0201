"""Large bodies on the event loop: however many come at once, each turn of the loop has one piece of one of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from maitred.api.http.body_room import BodyRoom
from maitred.api.http.decoding import Pieces
from maitred.api.http.exchange import MAX_KEYS, SMALL_BYTES, UNCOUNTED_BYTES, Exchange
from maitred.api.http.turns import Turns
from maitred.errors import InvalidRequest, Overloaded

NUM_BODIES = 8


class Counted:
    """The loop's turns, by number, and in which of them something happened."""

    def __init__(self) -> None:
        self.number = 0
        self.noted: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._next)

    def _next(self) -> None:
        self.number += 1
        self._loop.call_soon(self._next)

    def note(self) -> None:
        self.noted.append(self.number)


def exchange_of(chunks: Iterator[bytes], turns: Turns, counted: Counted | None = None) -> Exchange:
    """A request whose body is there already, so that only `turns` make it wait."""
    left = list(chunks)
    num_bytes = 0

    async def receive() -> dict[str, Any]:
        nonlocal num_bytes
        if counted is not None and num_bytes > SMALL_BYTES:
            counted.note()
        chunk = left.pop(0)
        num_bytes += len(chunk)
        return {"type": "http.request", "body": chunk, "more_body": bool(left)}

    async def send(message: Any) -> None:
        raise AssertionError("nothing is answered here")

    return Exchange(
        scope={},
        receive=receive,
        raw_send=send,
        request_id="a",
        max_body_bytes=2**30,
        turns=turns,
        room=BodyRoom(),
        headers={b"content-type": b"application/json"},
    )


def in_pieces(body: bytes, size: int = SMALL_BYTES) -> Iterator[bytes]:
    return (body[start : start + size] for start in range(0, len(body), size))


def noting(counted: Counted, num_pieces: int) -> Pieces[str]:
    for _ in range(num_pieces - 1):
        counted.note()
        yield
    counted.note()
    return "made"


def test_pieces_of_large_bodies_are_read_and_decoded_in_turns_of_their_own():
    body = b'"%b"' % (b"x" * 10 * SMALL_BYTES)

    async def decode_in_turns(exchange: Exchange, counted: Counted) -> str:
        assert await exchange.body() == body
        return await exchange.in_turns(noting(counted, 3))

    async def read_all() -> Counted:
        counted, turns = Counted(), Turns()
        exchanges = [exchange_of(in_pieces(body), turns, counted) for _ in range(NUM_BODIES)]
        made = await asyncio.gather(*(decode_in_turns(exchange, counted) for exchange in exchanges))
        assert made == ["made"] * NUM_BODIES
        return counted

    counted = asyncio.run(read_all())
    assert len(counted.noted) == NUM_BODIES * (9 + 3), "pieces beyond the first two, and the decoding"
    assert len(set(counted.noted)) == len(counted.noted), "no two in one turn"


def test_a_small_body_waits_for_no_turn():
    async def read() -> None:
        turns = Turns()
        await turns.mine()  # the next one would wait
        body = exchange_of(in_pieces(b"[%b]" % (b" " * (SMALL_BYTES - 2)), 999), turns).body()
        with pytest.raises(StopIteration):
            body.send(None)  # it ended without handing control back to the loop

    asyncio.run(read())


@pytest.mark.parametrize("piece", [SMALL_BYTES + 1, SMALL_BYTES // 2])
def test_a_body_for_which_there_is_no_room_is_sent_away_even_if_it_is_all_there(piece):
    async def read() -> int:
        exchange = exchange_of(in_pieces(b" " * (SMALL_BYTES + 1), piece), Turns())
        exchange.room.max_bytes = SMALL_BYTES
        with pytest.raises(Overloaded):
            await exchange.body()
        return exchange.room.num_bytes

    assert asyncio.run(read()) == 0


def test_who_made_room_holds_nothing_any_more_before_it_hears_of_it():
    async def run() -> list[int]:
        room, seen = BodyRoom(max_bytes=100), []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as first, asyncio.timeout(None) as second:
                room.hold("first", 60, first)
                room.hold("second", 50, second)
                seen.append(room.num_bytes)
                room.hold("first", 70, first)
                seen.append(room.num_bytes)
                await asyncio.Event().wait()
        room.release("second")
        return [*seen, room.num_bytes]

    assert asyncio.run(run()) == [50, 50, 0]


def test_turns_are_had_in_order_and_those_who_left_have_none():
    async def run() -> list[tuple[int, int]]:
        counted, turns = Counted(), Turns()
        had: list[tuple[int, int]] = []

        async def take(index: int) -> None:
            await turns.mine()
            had.append((index, counted.number))

        taking = [asyncio.ensure_future(take(index)) for index in range(6)]
        await asyncio.sleep(0)
        taking[2].cancel()
        taking[3].cancel()
        for task in taking:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await take(6)  # when nobody waits any more
        return had

    had = asyncio.run(run())
    assert [index for index, _ in had] == [0, 1, 4, 5, 6]
    numbers = [number for _, number in had]
    gaps = [after - before for before, after in pairwise(numbers)]
    assert min(gaps) >= 2, "the turn between is for who came meanwhile"


def test_a_large_text_full_of_colons_has_no_keys():
    text = ": " * (MAX_KEYS + 1) + "x" * UNCOUNTED_BYTES
    body = msgspec.json.encode([text])
    decoder = msgspec.json.Decoder(list[str])

    async def read() -> list[str]:
        return await exchange_of(in_pieces(body), Turns()).json(decoder)

    assert asyncio.run(read()) == [text]


@pytest.mark.parametrize("num_too_many", [0, 1])
def test_keys_are_counted_to_the_last(num_too_many):
    body = b"{%b" % (b'"a":0,' * (MAX_KEYS - 1 + num_too_many)) + b" " * UNCOUNTED_BYTES + b'"a":0}'
    decoder = msgspec.json.Decoder(dict[str, int])

    async def read() -> dict[str, int]:
        return await exchange_of(in_pieces(body), Turns()).json(decoder, max_items=2 * MAX_KEYS)

    if num_too_many:
        with pytest.raises(InvalidRequest, match=f"over {MAX_KEYS} keys"):
            asyncio.run(read())
    else:
        assert asyncio.run(read()) == {"a": 0}


def test_a_body_with_too_many_items_is_not_read_to_its_end():
    num_read = 0

    def endless() -> Iterator[bytes]:
        nonlocal num_read
        yield b"["
        while num_read < 100:
            num_read += 1
            yield b"1," * SMALL_BYTES

    exchange = exchange_of(iter(()), Turns())
    pieces = endless()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": next(pieces), "more_body": True}

    exchange.receive = receive
    with pytest.raises(InvalidRequest, match="over 200000 items"):
        asyncio.run(exchange.json(msgspec.json.Decoder(list[int])))
    assert num_read <= 1 + UNCOUNTED_BYTES // (2 * SMALL_BYTES)
