from __future__ import annotations

from maitred.cli.why import choice_lines
from maitred.fleet.actions import Bind, Choices
from maitred.fleet.balance import Choice
from maitred.fleet.disagg import WorkAsked, options
from tests.fleet.workers import worker


def test_why_tells_each_way_that_was_foretold_and_its_terms():
    there = [worker("p", "prefill", prefill_share=0.7), worker("d", "decode", rows=40, context_tokens=40_000)]
    ways = options(WorkAsked(num_inputs=4000, num_outputs=200.0), there)
    choices = Choices()
    choices.bound(Bind("r", Choice("d", "p", foretold=tuple(ways)), 1), 0.25)
    made = choices.of("r")
    assert made is not None
    told = choice_lines(made)
    assert told[0] == "attempt 1: sent to d, after 0.250 s of waiting in all"
    assert told[1].split() == ["WAY", "COST", "TTFT", "TPOT", "FETCH", "TRANSFER", "HARM"]
    assert told[2].split()[:4] == ["->", "p", ">", "d"]
    assert len(told) == 2 + len(ways)
