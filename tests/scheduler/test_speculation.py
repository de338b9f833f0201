"""How many tokens are drafted: as many as the model of costs and what drafts showed make worth it."""

from __future__ import annotations

import pytest

from maitred.core.cost_model import CostModel, Knot, between
from maitred.core.request import RequestState
from maitred.core.step import SampledRow, ScheduledRow
from maitred.scheduler.speculation import TRIAL_SHARE, Speculation
from tests.fakes import make_request

MEMORY_BOUND = CostModel(weights_s=0.040, decode_token_s=0.0001)
"""400 tokens cost what one does."""
COMPUTE_BOUND = CostModel(decode_token_s=0.001)
"""Each token costs as much as the first."""


def plan(count: int, *, start: int = 50) -> tuple[list[ScheduledRow], list[RequestState]]:
    requests = [make_request(f"r{i}", prompt=start, max_tokens=100) for i in range(count)]
    return [ScheduledRow(request.request_id, start, 1, True) for request in requests], requests


def teach(speculation: Speculation, request_id: str, *, made: int, accepted: int, times: int = 30) -> None:
    row = ScheduledRow(request_id, 50, 1 + made, True, num_drafts=made)
    for _ in range(times):
        speculation.learn(row, SampledRow(request_id, (0,) * (accepted + 1), num_accepted=accepted, num_drafts=made))


def test_nothing_is_drafted_before_anything_was_measured():
    assert not any(Speculation(5).lengths(*plan(4)))


def test_all_that_may_be_is_drafted_where_memory_is_what_a_step_waits_for():
    speculation = Speculation(5, MEMORY_BOUND)
    for name in ("r0", "r1"):
        teach(speculation, name, made=5, accepted=5)
    assert list(speculation.lengths(*plan(2))) == [5, 5]


def test_nothing_is_drafted_where_each_token_costs_as_much_as_the_first():
    speculation = Speculation(5, COMPUTE_BOUND)
    teach(speculation, "r0", made=5, accepted=4)
    assert sum(speculation.lengths(*plan(8))) == 0


def test_who_is_accepted_drafts_and_who_is_not_does_not():
    speculation = Speculation(4, CostModel(weights_s=0.010, decode_token_s=0.002))
    teach(speculation, "r0", made=4, accepted=4)
    teach(speculation, "r1", made=4, accepted=0)
    lengths = list(speculation.lengths(*plan(2)))
    assert lengths[0] > 0
    assert lengths[1] == 0


def test_a_proposer_that_has_nothing_to_offer_is_not_held_against_those_for_whom_it_has():
    """Drafts that are not made cost no time, so a rare offer is taken whenever it comes."""
    speculation = Speculation(4, MEMORY_BOUND)
    teach(speculation, "r0", made=0, accepted=0, times=3)
    teach(speculation, "r0", made=4, accepted=4, times=2)
    assert list(speculation.lengths(*plan(1))) == [4]


def test_a_chain_of_drafts_is_as_long_as_its_links_pay():
    costs = CostModel(weights_s=0.010, drafts=(Knot(1, 0.004),))
    speculation = Speculation(8, costs)
    row = ScheduledRow("r0", 50, 9, True, num_drafts=8)
    for accepted in (2, 1, 3, 2, 1, 2, 3, 2) * 4:
        speculation.learn(row, SampledRow("r0", (0,) * (accepted + 1), num_accepted=accepted, num_drafts=8))
    (length,) = speculation.lengths(*plan(1))
    assert 0 < length < 8


def test_who_decodes_drafts_beside_a_prompt_and_the_prompt_does_not():
    speculation = Speculation(5, MEMORY_BOUND)
    rows, requests = plan(2)
    assert list(speculation.lengths([rows[0], rows[1]._replace(num_tokens=40)], requests)) == [5, 0]


def test_a_prompt_makes_drafts_no_cheaper_than_a_step_without_it_does():
    """A step that is long already for a prompt's sake would hide any number of drafts in its own time."""
    speculation = Speculation(5, COMPUTE_BOUND)
    teach(speculation, "r0", made=5, accepted=4)
    rows, requests = plan(2)
    assert not any(speculation.lengths([rows[0], rows[1]._replace(num_tokens=4000)], requests))


def test_who_has_few_tokens_left_is_not_caught_up_for_them():
    costs = CostModel(weights_s=0.010, catch_up_token_s=0.0001)
    behind, about_to_end = make_request("r0", prompt=500, max_tokens=400), make_request("r1", prompt=500, max_tokens=4)
    rows = [ScheduledRow(request.request_id, 499, 1, True) for request in (behind, about_to_end)]
    assert list(Speculation(5, costs).lengths(rows, [behind, about_to_end])) == [5, 0]


def test_who_was_forgotten_is_behind_with_all_its_tokens():
    speculation, request = Speculation(5, MEMORY_BOUND), make_request("r0", prompt=51, max_tokens=100)
    teach(speculation, "r0", made=5, accepted=0, times=1)
    assert speculation.num_behind(request) == 0
    speculation.forgotten(["r0"])
    assert speculation.num_behind(request) == 50


def test_trials_take_a_hundredth_of_the_time_at_most():
    speculation = Speculation(5, COMPUTE_BOUND)
    rows, requests = plan(16)
    teach(speculation, "r0", made=5, accepted=0)
    drafted = 0
    for _ in range(2000):
        lengths = speculation.lengths(rows, requests)
        drafted += sum(lengths)
        for row, length in zip(rows, lengths, strict=False):
            if length:
                teach(speculation, row.request_id, made=length, accepted=0, times=1)
    assert 0 < drafted * 0.001 <= TRIAL_SHARE * 2000 * 16 * 0.001
    assert speculation.num_trials > 16, "everybody is tried in turn"


def test_while_all_draft_a_step_in_a_hundred_goes_without_to_tell_what_it_takes():
    speculation = Speculation(5, MEMORY_BOUND)
    rows, requests = plan(4)
    for row in rows:
        teach(speculation, row.request_id, made=5, accepted=5)
    without = sum(not any(speculation.lengths(rows, requests)) for _ in range(1000))
    assert 8 <= without <= 20


def test_a_machine_on_which_drafts_begin_to_pay_is_noticed_by_trials():
    speculation = Speculation(5, COMPUTE_BOUND)
    rows, requests = plan(1)
    teach(speculation, "r0", made=5, accepted=0)
    while sum(speculation.lengths(rows, requests)) == 0:
        pass
    speculation.costs = MEMORY_BOUND
    for _ in range(40):
        teach(speculation, "r0", made=5, accepted=5, times=1)
    assert list(speculation.lengths(rows, requests)) == [5]


def test_equal_histories_give_equal_lengths():
    def run() -> list[list[int]]:
        speculation, found = Speculation(4, CostModel(weights_s=0.01, decode_token_s=0.0008)), []
        rows, requests = plan(6)
        for step in range(60):
            lengths = list(speculation.lengths(rows, requests))
            found.append(lengths)
            for row, length in zip(rows, lengths, strict=False):
                if length:
                    teach(speculation, row.request_id, made=length, accepted=step % (length + 1), times=1)
        return found

    assert run() == run()


def test_what_an_ended_request_showed_is_its_own():
    speculation = Speculation(4, MEMORY_BOUND)
    teach(speculation, "r0", made=4, accepted=0)
    before = speculation.chances("r0")
    speculation.ended("r0")
    assert speculation.chances("r0") != before


@pytest.mark.parametrize(("size", "seconds"), [(0.5, 1.0), (1, 1.0), (3, 2.0), (5, 3.0), (9, 3.5), (17, 4.5)])
def test_a_curve_is_linear_between_what_was_measured(size: float, seconds: float):
    assert between((Knot(1, 1.0), Knot(5, 3.0), Knot(9, 3.5)), size) == pytest.approx(seconds)
