"""Which request is blamed for the death of engines: only one that an engine died of when it had nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from maitred.core.request import FinishReason
from maitred.core.tensor_request import InferRequest
from maitred.engine.live_requests import SUSPECT_AFTER, TRIAL_TOKENS, CrashIsolation, Live, LiveRequest, LiveTensor
from tests.fakes import make_spec


def live(name: str) -> Live:
    """A chat, or a request to a tensor model for a capital letter."""
    if name.isupper():
        return LiveTensor(InferRequest(request_id=name, model="m"), cast(Any, None))
    return LiveRequest(make_spec(name, prompt=[1]), cast(Any, None))


class Engines:
    """Requests, and engines that die one after the other: of `poison` once they have it, or as a test says."""

    def __init__(self, names: str, poison: str = "") -> None:
        self.sent: list[str] = []  # to the present engine
        self.trials = CrashIsolation(self._send)
        self.live = {name: live(name) for name in names}
        self.poison = set(poison)
        self.num_deaths = 0
        self.trials.enter(list(self.live.values()))

    def _send(self, living: Sequence[Live]) -> None:
        for each in living:
            each.sent = True
            self.sent.append(each.request_id)

    def enter(self, name: str, *, poison: bool = False) -> None:
        self.live[name] = live(name)
        self.poison |= {name} if poison else set()
        self.trials.enter([self.live[name]])

    def die(self, *, own_fault: bool = True) -> str | None:
        """And the next one begins. Who was the cause?"""
        self.num_deaths += 1
        cause = self.trials.died(self.live.values(), own_fault=own_fault)
        if cause is not None:
            self.end(cause.request_id)
        for each in self.live.values():
            each.left(0.0)
        self.sent.clear()
        self.trials.begin(list(self.live.values()))
        return cause.request_id if cause is not None else None

    def end(self, name: str) -> None:
        self.live.pop(name).ended(FinishReason.LENGTH, 0.0)

    def step(self) -> None:
        """One token, or the answer, for each request that is there, but those that kill."""
        names = [name for name in self.sent if name in self.live and name not in self.poison]
        for name in names:
            if isinstance(each := self.live[name], LiveRequest):
                each.output_token_ids.append(1)
            else:
                self.end(name)
        self.trials.stepped(names)

    def run(self, most_deaths: int = 50) -> list[str]:
        """Until nobody kills any more; who was blamed, in order."""
        blamed: list[str] = []
        while self.num_deaths < most_deaths:
            for _ in range(3 * TRIAL_TOKENS):
                self.step()
                if self.poison & set(self.sent) & set(self.live):
                    break
            else:
                return blamed
            blamed += [name] if (name := self.die()) is not None else []
        raise AssertionError("it found no end")


def test_who_kills_is_found_and_nobody_else_is_blamed():
    engines = Engines("abcd", poison="c")
    assert engines.run() == ["c"]
    assert engines.num_deaths == SUSPECT_AFTER + 2
    assert sorted(engines.sent) == ["a", "b", "d"]


@pytest.mark.parametrize("poison", ["b", "C"])
def test_a_chat_and_a_tensor_request_are_found_among_both_kinds(poison):
    engines = Engines("abCD", poison=poison)
    assert engines.run() == [poison]
    assert not {"C", "D"} & set(engines.live)  # answered, or blamed
    assert {"a", "b"} - {poison} == set(engines.live)


def test_several_are_found_one_after_the_other():
    engines = Engines("abcdef", poison="bce")
    assert sorted(engines.run()) == ["b", "c", "e"]
    assert sorted(engines.sent) == ["a", "d", "f"]


def test_deaths_from_outside_blame_nobody_however_many_there_are():
    engines = Engines("ab")
    for _ in range(100):
        assert engines.die(own_fault=False) is None
        assert engines.sent == ["a", "b"], "nobody waits for a trial"


def test_who_is_on_trial_takes_no_blame_for_a_death_from_outside():
    engines = Engines("ab", poison="b")
    for _ in range(SUSPECT_AFTER + 1):
        engines.die()
    assert engines.sent == ["a"], "tried alone"
    assert engines.die(own_fault=False) is None
    assert engines.sent == ["a"], "and again"
    assert engines.run() == ["b"]


def test_who_is_on_trial_takes_no_blame_for_what_a_newcomer_does():
    engines = Engines("ab")
    for _ in range(SUSPECT_AFTER):
        engines.die()
    engines.enter("new", poison=True)
    assert engines.sent == ["a", "new"], "a is on trial, and new is above suspicion"
    assert engines.run() == ["new"]
    assert sorted(engines.live) == ["a", "b"]


def test_newcomers_wait_while_one_is_tried_alone():
    engines = Engines("ab")
    for _ in range(SUSPECT_AFTER + 1):
        engines.die()
    engines.enter("new")
    assert engines.sent == ["a"]
    for _ in range(TRIAL_TOKENS):
        engines.step()
    assert sorted(engines.sent) == ["a", "b", "new"]
    assert engines.live["a"].num_deaths == 0, "cleared"


def test_one_that_ends_while_it_is_tried_alone_makes_room():
    engines = Engines("ab")
    for _ in range(SUSPECT_AFTER + 1):
        engines.die()
    engines.end("a")
    engines.trials.stepped(["a"])
    assert engines.sent == ["a", "b"]


def test_one_that_was_aborted_before_its_trial_is_not_waited_for():
    engines = Engines("ab")
    for _ in range(SUSPECT_AFTER + 1):
        engines.die()
    engines.end("a")
    engines.die(own_fault=False)
    assert engines.sent == ["b"]


@pytest.mark.parametrize("works", [True, False])
def test_an_engine_that_works_for_nobody_is_broken_whoever_was_there(works: bool):
    engines = Engines("ab", poison="b" if works else "ab")
    if works:
        engines.step()
    while engines.die() is None:
        pass
    assert engines.trials.others_live() is works
    assert not engines.trials.others_live(), "asked anew for each cause"


def test_a_suspect_from_another_engine_waits_for_its_turn():
    engines = Engines("a")
    suspects = [LiveRequest(make_spec(name, prompt=[1]), cast(Any, None), num_deaths=SUSPECT_AFTER) for name in "xy"]
    engines.live |= {live.request_id: live for live in suspects}
    engines.trials.enter(suspects)
    assert engines.sent == ["a", "x"]
    assert [engines.trials.is_suspect(live) for live in engines.live.values()] == [False, True, True]
    for _ in range(TRIAL_TOKENS):
        engines.step()
    assert engines.sent == ["a", "x", "y"]
