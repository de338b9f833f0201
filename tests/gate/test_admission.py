"""Admission: caps, who is shed for whom, what a newcomer would wait, and when to come again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.config import AdmissionConfig
from maitred.core.errors import Overloaded
from maitred.core.request import FinishReason
from maitred.core.step import RequestProgress
from maitred.gate.admission import MAX_RETRY_S, AdmissionController, DrainRate, LateBy
from tests.fakes import make_samples, make_spec


def make_admission(*, max_num_seqs: int = 4, priority_first: bool = False, **config: Any) -> AdmissionController:
    return AdmissionController(AdmissionConfig(**config), max_num_seqs=max_num_seqs, priority_first=priority_first)


def admit(admission: AdmissionController, *names: str, now: float = 0.0, **fields: Any) -> list[str]:
    """Lets them in; who was shed."""
    shed: list[str] = []
    for name in names:
        shed += admission.admit(make_spec(name, arrived_at=now, **fields), now)
    return shed


def stepped(admission: AdmissionController, progress: list[RequestProgress], num_queued: int, now: float) -> None:
    """What the gate tells of the progress that came at once."""
    for item in progress:
        if item.new_token_ids:
            admission.tokens_came(item.request_id, len(item.new_token_ids), now)
        if item.finish_reason is not None:
            admission.leave(item.request_id, item.finish_reason)
    admission.look(num_queued, now)


def first_token(name: str) -> RequestProgress:
    return RequestProgress(name, (7,))


def end(name: str, reason: FinishReason = FinishReason.LENGTH) -> RequestProgress:
    return RequestProgress(name, (), finish_reason=reason)


def busy_admission(objective_s: float = 1.0, **fields: Any) -> AdmissionController:
    """Four run, the queue is never empty, and 100 tokens leave each second."""
    admission = make_admission(ttft_objective_s=objective_s, **fields)
    admit(admission, "a", "b", "c", "d", prompt=4, max_tokens=1000)
    stepped(admission, [first_token(name) for name in "abcd"], 1, 0.0)
    for step in range(1, 41):
        stepped(admission, [RequestProgress(name, (7,)) for name in "abcd"], 1, step * 0.04)
    return admission


NOW = 40 * 0.04


def test_waiting_requests_tokens_and_classes_are_capped():
    admission = make_admission(max_queued_requests=2)
    admit(admission, "a", "b")
    with pytest.raises(Overloaded, match="2 requests wait, the limit is 2"):
        admit(admission, "c")
    stepped(admission, [first_token("a")], 0, 1.0)
    admit(admission, "c")
    assert (admission.num_inside, admission.num_waiting, admission.num_refused["requests"]) == (3, 2, 1)
    admission = make_admission(max_queued_tokens=100)
    admit(admission, "long", prompt=300)
    with pytest.raises(Overloaded, match="300 tokens, the limit is 100"):
        admit(admission, "short", prompt=10)
    stepped(admission, [end("long", FinishReason.ABORT)], 0, 1.0)
    admit(admission, "short", prompt=60)
    admit(admission, "other", prompt=40)
    admission = make_admission(max_queued_requests=4, max_queued_by_priority={"1": 2})
    admit(admission, "a", "b", priority=1)
    for priority in (1, 2):
        with pytest.raises(Overloaded, match="as many as may of this priority"):
            admit(admission, "c", priority=priority)
    admit(admission, "urgent", "urgent too")
    assert admission.num_refused["class"] == 2


def test_the_least_urgent_and_latest_is_shed_for_a_more_urgent_one_and_never_in_vain():
    admission = make_admission(max_queued_requests=4)
    admit(admission, "low", "low2", priority=2)
    admit(admission, "mid", priority=1)
    admit(admission, "high")
    assert (admit(admission, "high2"), admit(admission, "mid2", priority=1)) == (["low2"], ["low"])
    assert admit(admission, "high3") == ["mid2"]
    with pytest.raises(Overloaded):
        admit(admission, "mid3", priority=1)
    assert admission.num_waiting == 4
    admission = make_admission(max_queued_tokens=100)
    admit(admission, "urgent", prompt=90)
    admit(admission, "low", prompt=10, priority=1)
    with pytest.raises(Overloaded):
        admit(admission, "large", prompt=95)
    assert admission.num_waiting == 2


def test_samples_go_in_together_or_not_at_all_and_a_knock_tells_before_any_work():
    admission = make_admission(max_queued_requests=2)
    for sample in make_samples("p", 3):
        admission.admit(sample.spec, 0.0)
    assert admission.num_waiting == 3
    with pytest.raises(Overloaded):
        admission.admit(make_samples("q", 3)[0].spec, 0.0)
    stepped(admission, [end(f"p-{i}") for i in range(3)], 0, 1.0)
    assert admission.num_inside == 0
    admission = busy_admission()
    admission.check_early(0, None, NOW)
    admit(admission, "next", prompt=4, max_tokens=90, now=NOW)
    with pytest.raises(Overloaded):
        admission.check_early(0, None, NOW)
    admission.check_early(0, 60.0, NOW)
    assert admission.num_waiting == 1


def test_who_would_wait_longer_than_its_objective_is_turned_away():
    admission = busy_admission()
    assert admission.drain_per_s == pytest.approx(100, rel=0.02)
    admit(admission, "next", prompt=4, max_tokens=10, now=NOW)  # 11 tokens: 0.11 s for those behind
    admit(admission, "after", prompt=4, max_tokens=10, now=NOW)
    with pytest.raises(Overloaded, match="too many for a first token within the objective"):
        admit(admission, "late", prompt=4, max_tokens=10, now=NOW)  # foretold 0.23 s, and 0.6 s of unknown slack
    assert admission.foretold_wait_s() == pytest.approx(0.22, rel=0.05)
    admission = busy_admission()
    admit(admission, "next", prompt=4, max_tokens=10, now=NOW)
    with pytest.raises(Overloaded):
        admit(admission, "tight", prompt=4, max_tokens=10, now=NOW, ttft_slo_s=0.2)
    admit(admission, "loose", prompt=4, max_tokens=10, now=NOW, ttft_slo_s=60.0)
    admission = busy_admission()
    stepped(admission, [end(name) for name in "abc"], 0, NOW + 0.04)
    admit(admission, "x", "y", "z", prompt=4000, now=NOW + 0.04, ttft_slo_s=0.001)
    with pytest.raises(Overloaded):
        admit(admission, "one too many", now=NOW + 0.04, ttft_slo_s=0.001)


def test_the_less_urgent_are_shed_for_an_urgent_one_unless_the_queue_heeds_priorities():
    admission = busy_admission()
    admit(admission, "low", prompt=4, max_tokens=50, priority=1, now=NOW)
    assert admit(admission, "urgent", prompt=4, max_tokens=10, now=NOW) == ["low"]
    admission = busy_admission(priority_first=True)
    admit(admission, "low", prompt=4, max_tokens=500, priority=1, now=NOW)
    assert admit(admission, "urgent", prompt=4, max_tokens=10, now=NOW) == []
    with pytest.raises(Overloaded):
        admit(admission, "low too", prompt=4, max_tokens=10, priority=1, now=NOW)


def test_retry_after_grows_with_the_number_turned_away_up_to_what_clients_obey():
    admission = busy_admission()
    admit(admission, "next", prompt=4, max_tokens=90, now=NOW)
    told = []
    for i in range(400):
        with pytest.raises(Overloaded) as refused:
            admit(admission, f"r{i}", prompt=4, max_tokens=90, now=NOW)
        told.append(refused.value.retry_after_s)
    assert told == sorted(told)
    assert told[0] == 1.0
    assert told[10] == pytest.approx(10, rel=0.2)
    assert (told[-1], admission.retry_after_s(NOW + 200)) == (MAX_RETRY_S, MAX_RETRY_S)
    assert admission.retry_after_s(NOW + 350) < 20


def test_wrong_forecasts_make_admission_careful_and_the_rate_follows_the_machine():
    late = LateBy()
    for _ in range(LateBy.MIN_SEEN):
        late.add(0.1)
    late.add(0.9)
    assert late.slack_s == 0.9
    for _ in range(LateBy.CAPACITY):
        late.add(0.1)
    assert late.slack_s == 0.1
    admission = busy_admission()
    rate = admission.drain_per_s
    stepped(admission, [RequestProgress("a", (7,))], 0, NOW + 50)
    stepped(admission, [RequestProgress("a", (7,))], 1, NOW + 100)
    assert admission.drain_per_s == rate
    rate = DrainRate()
    for _ in range(100):
        rate.served(10, 0.1)
    for _ in range(200):
        rate.served(10, 0.4)
    assert rate.per_s == pytest.approx(25, rel=0.02)


@given(st.data())
def test_what_admission_counts_is_who_is_there(data: st.DataObject):
    """Random arrivals, tokens and ends, against a plain list; caps are never exceeded."""
    admission = make_admission(max_queued_requests=5, max_queued_tokens=60, ttft_objective_s=2.0)
    waiting: dict[str, tuple[int, int]] = {}
    running: set[str] = set()
    now = 0.0
    for number in range(data.draw(st.integers(1, 40))):
        now += 0.05
        action = data.draw(st.sampled_from(["arrive", "arrive", "token", "end"]))
        if action == "arrive":
            priority, prompt = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 30))
            try:
                shed = admit(admission, f"r{number}", prompt=prompt, priority=priority, now=now)
            except Overloaded:
                continue
            for name in shed:
                assert waiting.pop(name)[0] > priority
                stepped(admission, [end(name, FinishReason.SHED)], len(waiting), now)
            waiting[f"r{number}"] = (priority, prompt)
        elif action == "token" and waiting:
            name = data.draw(st.sampled_from(sorted(waiting)))
            del waiting[name]
            running.add(name)
            stepped(admission, [first_token(name)], len(waiting), now)
        elif waiting or running:
            name = data.draw(st.sampled_from(sorted([*waiting, *running])))
            waiting.pop(name, None)
            running.discard(name)
            stepped(admission, [end(name)], len(waiting), now)
        assert (admission.num_waiting, admission.num_inside) == (len(waiting), len(waiting) + len(running))
        assert len(waiting) <= 5
        assert admission._waiting_tokens == sum(prompt for _, prompt in waiting.values())
        assert len(waiting) <= 1 or admission._waiting_tokens <= 60
        assert sum(admission._waiting_work.values()) == pytest.approx(
            sum(g.work for w in admission._waiting.values() for g in w.values())
        )


def test_where_first_tokens_are_foretold_nobody_is_let_in_to_be_late():
    admission = make_admission(ttft_objective_s=1.0)
    ahead_s = 0.0
    admission.foretell = lambda num_tokens: ahead_s + 0.001 * num_tokens
    admit(admission, "first", prompt=4000)  # nobody waits: it is tried
    ahead_s = 4.0
    with pytest.raises(Overloaded, match="within the objective"):
        admit(admission, "second", prompt=10)  # though there are slots
    admit(admission, "patient", prompt=10, ttft_slo_s=60.0)
    assert admission.foretold_wait_s() == ahead_s
    ahead_s = 0.0
    admit(admission, "third", prompt=10)
    admission = busy_admission()
    admission.foretell = lambda num_tokens: None
    admit(admission, "next", "after", prompt=4, max_tokens=10, now=NOW)
    with pytest.raises(Overloaded):
        admit(admission, "late", prompt=4, max_tokens=10, now=NOW)
