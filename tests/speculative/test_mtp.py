"""A head is given each position's taps with the token after it, whatever was rejected, dropped or begun anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maitred.core.request import SamplingParams
from maitred.executor import drafter
from maitred.executor.drafter import ChainEnd, Drafter, DraftPiece, DraftTokens, WaitingTaps
from maitred.executor.state import ComputedRows, DraftAsk, HeldRequest
from tests.fakes import make_new

WIDTH = 2
VOCAB = 1000


class Slots:
    """A runner that notes what it was given for each request's positions; it drafts the token after the last, and on.

    The first value of a tap is its position, the second tells which of the computations at that position it is of.
    """

    def __init__(self, max_tokens: int = 64, max_rows: int = 8, fault: str | None = None) -> None:
        self.max_tokens, self.max_rows, self.max_positions = max_tokens, max_rows, 10_000
        self.made: dict[
            tuple[int, int], tuple[int, float]
        ] = {}  # (block, position) -> token after it, turn of its taps
        self.passes: list[int] = []
        self._fault = fault

    def compute(self, pieces: Sequence[DraftPiece]) -> None:
        self.passes.append(sum(len(piece.token_ids) for piece in pieces))
        for piece in pieces:
            rows = piece.taps
            assert rows is not None
            assert rows[:, 0].tolist() == list(range(piece.start, piece.start + len(piece.token_ids)))
            for position, token, row in zip(rows[:, 0].tolist(), piece.token_ids.tolist(), rows, strict=True):
                self.made[int(piece.block_ids[0]), int(position)] = token, float(row[1])

    def chain(self, pieces: Sequence[DraftPiece], ends: Sequence[ChainEnd]) -> list[DraftTokens]:
        self.compute(pieces)
        if self._fault is not None:
            return [DraftTokens([], self._fault) for _ in pieces]
        lasts = [int(piece.token_ids[-1]) for piece in pieces]
        return [
            DraftTokens([last + 1 + i for i in range(end.num_tokens)], None)
            for last, end in zip(lasts, ends, strict=True)
        ]

    def close(self) -> None: ...


class World:
    """Requests whose tokens count up, and a head that is told of their steps."""

    def __init__(self, **runner: object) -> None:
        self.slots = Slots(**runner)  # type: ignore[arg-type]
        self.taps = WaitingTaps(tap_width=WIDTH, max_tokens=self.slots.max_tokens)
        self.head = Drafter(self.slots, self.taps)
        self._num_requests = 0
        self._turn = 0.0

    def request(self, name: str, num_tokens: int) -> HeldRequest:
        prompt = list(range(100, 100 + num_tokens))
        request = HeldRequest(make_new(name, prompt, sampling=SamplingParams(temperature=0.0)), VOCAB)
        request.blocks.append(self._num_requests)  # one block tells whose slots they are
        self._num_requests += 1
        return request

    def step(self, *rows: tuple[HeldRequest, int, int]) -> float:
        """Positions [start, start + count) of requests are computed; their turn."""
        self._turn += 1
        taps = np.array([(at, self._turn) for _, start, n in rows for at in range(start, start + n)], np.float32)
        requests, starts, counts = zip(*rows, strict=True)
        self.taps.computed(ComputedRows(requests, starts, counts, taps))
        return self._turn

    def ask(self, *asks: tuple[HeldRequest, int]) -> list[list[int]]:
        return [list(tokens) for tokens in self.head.propose([DraftAsk(*ask) for ask in asks])]

    def slot(self, request: HeldRequest, position: int) -> tuple[int, float] | None:
        """Token after the position and turn of its taps."""
        return self.slots.made.get((int(request.blocks.array[0]), position))


def test_a_prompt_in_chunks_is_taken_in_when_drafts_are_asked_for():
    world = World()
    r = world.request("r", 10)
    first, second = world.step((r, 0, 6)), world.step((r, 6, 4))
    assert world.slots.made == {}, "nothing is computed for who does not ask"
    r.tokens.append(110)
    assert world.ask((r, 3)) == [[111, 112, 113]]
    assert [world.slot(r, at) for at in (0, 5, 6, 9)] == [(101, first), (106, first), (107, second), (110, second)]
    assert world.slot(r, 10) is None, "its taps are not known, before the step"


def test_rejected_drafts_leave_no_taps():
    world = World()
    r = world.request("r", 4)
    world.step((r, 0, 4))
    r.tokens.append(104)
    world.ask((r, 3))
    checked = world.step((r, 4, 4))  # the last known token and three drafts, of which the first stands
    r.tokens.extend([105, 106])
    assert world.ask((r, 2)) == [[107, 108]]
    assert world.slot(r, 5) == (106, checked)
    assert world.slot(r, 6) is None
    again = world.step((r, 6, 3))
    r.tokens.append(107)
    world.ask((r, 1))
    assert world.slot(r, 6) == (107, again)


def test_steps_without_drafts_are_caught_up_with():
    world = World()
    r, s = world.request("r", 3), world.request("s", 2)
    world.step((r, 0, 3), (s, 0, 2))
    for i in range(drafter.KEPT):
        r.tokens.append(103 + i)
        s.tokens.append(102 + i)
        turn = world.step((r, 3 + i, 1), (s, 2 + i, 1))
    last = 2 + drafter.KEPT
    r.tokens.append(101 + last)
    assert world.ask((r, 1)) == [[102 + last]]
    assert world.slot(r, last) == (101 + last, turn)
    assert all(world.slot(r, at) == (101 + at, at - 1.0) for at in range(3, last + 1))
    assert world.slot(s, 5) is None


def test_who_was_not_asked_for_long_has_the_last_positions():
    world = World()
    r = world.request("r", 3)
    world.step((r, 0, 3))
    for i in range(10 * drafter.KEPT):
        r.tokens.append(103 + i)
        world.step((r, 3 + i, 1))
    r.tokens.append(103 + 10 * drafter.KEPT)
    assert world.ask((r, 1)) == [[104 + 10 * drafter.KEPT]]
    made = [position for _, position in world.slots.made]
    assert max(made) == 2 + 10 * drafter.KEPT
    assert drafter.KEPT <= len(made) <= 2 * drafter.KEPT + drafter._LOGGED
    assert sorted(made) == list(range(min(made), max(made) + 1))


def test_whose_last_taps_are_missing_drafts_nothing():
    world = World()
    r, s = world.request("r", 5), world.request("s", 5)
    world.step((r, 0, 5))
    r.tokens.append(105)
    s.tokens.append(105)
    assert world.ask((s, 4), (r, 2)) == [[], [106, 107]]


def test_a_request_that_comes_back_begins_where_its_steps_do():
    world = World()
    r = world.request("r", 5)
    world.step((r, 0, 5))
    world.head.forget("r")
    back = world.request("r", 8)
    world.step((back, 6, 2))  # six positions were found in the cache
    back.tokens.append(108)
    assert world.ask((back, 1)) == [[109]]
    assert world.slot(back, 5) is None
    assert world.slot(back, 7) is not None
    assert world.slot(r, 3) is None, "what waited is forgotten with it"


def test_what_does_not_fit_into_a_pass_goes_before():
    world = World(max_tokens=8, max_rows=2)
    requests = [world.request(name, 6) for name in "abc"]
    world.step(*((request, 0, 6) for request in requests))
    for request in requests:
        request.tokens.append(106)
    assert world.ask(*((request, 2) for request in requests)) == [[107, 108]] * 3
    assert max(world.slots.passes) <= 8
    assert all(world.slot(request, at) == (101 + at, 1.0) for request in requests for at in range(6))


def test_where_too_much_waits_long_prompts_keep_their_last_positions():
    world = World(max_tokens=64)
    world.taps._most_waiting = 200
    long, short = world.request("long", 300), world.request("short", 20)
    world.step((long, 0, 300), (short, 0, 20))
    long.tokens.append(400)
    short.tokens.append(120)
    assert world.ask((long, 1), (short, 1)) == [[401], [121]]
    assert sum(world.slot(long, at) is not None for at in range(300)) == drafter.KEPT
    assert all(world.slot(short, at) is not None for at in range(20))


def test_a_head_that_says_nothing_is_asked_no_more():
    world = World(fault="logits are NaN")
    r = world.request("r", 4)
    world.step((r, 0, 4))
    r.tokens.append(104)
    assert world.ask((r, 2)) == [[]]
    num_passes = len(world.slots.passes)
    world.step((r, 4, 1))
    r.tokens.append(105)
    assert world.ask((r, 2)) == [[]]
    assert len(world.slots.passes) == num_passes
