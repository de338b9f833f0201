"""Batches of tensor requests: Triton's rules, one story each; `test_lanes_properties` has all of them at once."""

from __future__ import annotations

import pytest

from maitred.core.errors import InvalidRequest, ModelNotFound, Overloaded
from maitred.core.request import FinishReason
from maitred.core.tensor_request import Batch, BatchOutcome, BatchRules, Instance, QueueRules
from maitred.scheduler.lane import LanePace
from maitred.scheduler.lanes import Lanes
from maitred.scheduler.scheduler import Scheduler
from maitred.scheduler.timing import split_us
from tests.fakes import make_request, make_scheduler
from tests.scheduler.lane_worlds import make_tensor


def scheduler_with(policy: str = "fcfs", /, model: str = "m", **rules: object) -> Scheduler:
    scheduler = make_scheduler(policy=policy)
    load(scheduler, model, **rules)
    return scheduler


def load(scheduler: Scheduler, model: str = "m", **rules: object) -> None:
    fields = {"max_batch_size": 8, "dynamic": True, **rules}
    scheduler.lanes.load(model, 1, BatchRules(**fields))  # type: ignore[arg-type]


def add(scheduler: Scheduler, *names: str, now: float = 0.0, model: str = "m", **fields: object) -> None:
    for name in names:
        scheduler.add_tensor(make_tensor(name, model, **{"arrived_at": now, **fields}), now)


def done(scheduler: Scheduler, batch: Batch, now: float = 1.0, **outcome: object) -> list[str]:
    fields = {"compute_us": 100, **outcome}
    return [told.request_id for told in scheduler.completed(batch, BatchOutcome(**fields), now)]  # type: ignore[arg-type]


def ids(batches: tuple[Batch, ...]) -> list[tuple[str, ...]]:
    return [batch.request_ids for batch in batches]


def waiting(lanes: Lanes) -> int:
    return sum(model.num_waiting for model in lanes.models)


def test_all_that_fits_goes_at_once_without_a_delay():
    scheduler = scheduler_with()
    add(scheduler, "a", "b", "c")
    assert ids(scheduler.dispatch(0.0)) == [("a", "b", "c")]
    assert scheduler.next_wake(0.0) is None


def test_without_dynamic_batching_each_goes_alone_to_a_free_instance():
    scheduler = scheduler_with(dynamic=False, instances=(Instance(), Instance()))
    add(scheduler, "a", "b", "c")
    batches = scheduler.dispatch(0.0)
    assert [(batch.request_ids, batch.instance) for batch in batches] == [(("a",), 0), (("b",), 1)]
    done(scheduler, batches[1])
    assert [(batch.request_ids, batch.instance) for batch in scheduler.dispatch(1.0)] == [(("c",), 1)]


def test_a_batch_waits_for_others_until_its_oldest_has_waited_enough():
    scheduler = scheduler_with(delay_s=0.5)
    add(scheduler, "a")
    add(scheduler, "b", now=0.2)
    assert scheduler.dispatch(0.2) == ()
    assert scheduler.next_wake(0.2) == 0.5
    assert ids(scheduler.dispatch(0.5)) == [("a", "b")]


def test_a_full_batch_does_not_wait():
    scheduler = scheduler_with(delay_s=0.5, max_batch_size=2)
    add(scheduler, "a", "b", "c")
    assert ids(scheduler.dispatch(0.0)) == [("a", "b")]


def test_the_largest_preferred_size_goes_and_after_the_delay_whatever_there_is():
    scheduler = scheduler_with(delay_s=0.5, preferred_sizes=(2, 4), instances=(Instance(),) * 3)
    add(scheduler, "a", "b", "c", "d", "e")
    assert ids(scheduler.dispatch(0.0)) == [("a", "b", "c", "d")]
    add(scheduler, "f", "g", now=0.1)
    assert ids(scheduler.dispatch(0.1)) == [("e", "f")]
    assert scheduler.dispatch(0.4) == ()
    assert ids(scheduler.dispatch(0.6)) == [("g",)]


def test_rows_of_a_request_stay_together_and_the_order_is_kept():
    scheduler = scheduler_with(max_batch_size=4)
    for name, num_rows in (("a", 3), ("b", 2), ("c", 1)):
        add(scheduler, name, num_rows=num_rows)
    [batch] = scheduler.dispatch(0.0)
    assert (batch.request_ids, batch.num_rows) == (("a",), 3)  # c would fit, and b is before it


def test_unlike_shapes_and_models_share_no_batch_and_hold_up_nobody():
    scheduler = scheduler_with(delay_s=9.0, preferred_sizes=(2,))
    load(scheduler, "other")
    add(scheduler, "a", bucket="16")
    add(scheduler, "b", "c", bucket="32")
    add(scheduler, "d", model="other")
    assert ids(scheduler.dispatch(0.0)) == [("b", "c"), ("d",)]


def test_a_timeout_fires_when_it_is_due_and_not_when_the_running_batch_ends():
    scheduler = scheduler_with(dynamic=False, queue=QueueRules(timeout_s=0.3))
    add(scheduler, "a", "b")
    scheduler.dispatch(0.0)
    assert scheduler.next_wake(0.0) == 0.3
    assert [(told.request_id, told.finish_reason) for told in scheduler.expire_tensors(0.3)] == [
        ("b", FinishReason.QUEUE_TIMEOUT)
    ]


def test_a_requests_own_timeout_only_shortens_the_models_where_that_is_allowed():
    scheduler = scheduler_with(dynamic=False, queue=QueueRules(timeout_s=0.3, allow_override=True))
    add(scheduler, "running")
    scheduler.dispatch(0.0)
    for name, timeout_s in (("short", 0.1), ("long", 9.0), ("none", None)):
        add(scheduler, name, timeout_s=timeout_s)
    assert [told.request_id for told in scheduler.expire_tensors(0.1)] == ["short"]
    assert [told.request_id for told in scheduler.expire_tensors(0.3)] == ["long", "none"]


def test_after_its_timeout_a_delayed_request_waits_behind_the_others_of_its_level():
    scheduler = scheduler_with(dynamic=False, queue=QueueRules(timeout_s=0.3, delays=True))
    add(scheduler, "at once", "late")
    [batch] = scheduler.dispatch(0.0)
    add(scheduler, "fresh", now=0.2)
    done(scheduler, batch, 0.4)
    [batch] = scheduler.dispatch(0.4)
    assert batch.request_ids == ("fresh",)
    done(scheduler, batch, 0.45)
    assert ids(scheduler.dispatch(0.45)) == [("late",)]


def test_the_queue_wakes_when_a_delayed_requests_time_comes():
    """A and C are a preferred batch once B, between them, has gone behind: at B's time, not after the queue's delay."""
    queue = QueueRules(timeout_s=100.0, allow_override=True, delays=True)
    scheduler = scheduler_with(preferred_sizes=(4, 8), delay_s=10.0, queue=queue)
    add(scheduler, "a", num_rows=2)
    add(scheduler, "b", now=0.2, num_rows=1, timeout_s=1.0)
    add(scheduler, "c", now=0.4, num_rows=2)
    assert (scheduler.dispatch(0.4), scheduler.next_wake(0.4)) == ((), 1.2)
    [batch] = scheduler.dispatch(1.2)
    assert batch.request_ids == ("a", "c")
    done(scheduler, batch, 1.3)
    add(scheduler, "d", now=2.0, timeout_s=5.0)
    assert (scheduler.dispatch(2.0), scheduler.next_wake(2.0)) == ((), 7.0)
    scheduler.finish("d", FinishReason.ABORT, 3.0)
    assert (scheduler.dispatch(3.0), scheduler.next_wake(3.0)) == (
        (),
        10.2,
    )  # the time of one that is gone wakes nobody


def test_priority_levels_come_first_and_an_unknown_level_is_the_default():
    scheduler = scheduler_with(num_levels=3, default_level=2)
    for name, level in (("third", 3), ("default", 0), ("unknown", 9), ("first", 1)):
        add(scheduler, name, level=level)
    assert ids(scheduler.dispatch(0.0)) == [("first", "default", "unknown", "third")]


def test_a_level_overtakes_nobody_of_another_tenant_where_tenants_share():
    scheduler = scheduler_with("vtc", num_levels=2, default_level=2, dynamic=False)
    add(scheduler, "urgent0", "urgent1", "urgent2", level=1, tenant="a", work=10.0)
    add(scheduler, "calm", level=2, tenant="b", work=10.0)
    order = []
    for now in range(4):
        [batch] = scheduler.dispatch(float(now))
        order += batch.request_ids
        done(scheduler, batch, now + 0.5)
    assert order == ["urgent0", "calm", "urgent1", "urgent2"]


def test_a_full_queue_a_batch_too_large_and_an_unknown_model_are_refused():
    scheduler = scheduler_with(dynamic=False, queue=QueueRules(max_size=1))
    add(scheduler, "running")
    scheduler.dispatch(0.0)
    add(scheduler, "waiting")
    with pytest.raises(Overloaded, match="Exceeds maximum queue size of 1"):
        add(scheduler, "one too many")
    with pytest.raises(InvalidRequest, match="from 1 to 8 for m, and is 9"):
        add(scheduler, "large", num_rows=9)
    with pytest.raises(ModelNotFound, match="'n' version 1 is not loaded"):
        add(scheduler, "lost", model="n")


def test_answers_come_in_the_order_of_a_tenants_requests_where_that_is_asked_for():
    scheduler = scheduler_with(dynamic=False, preserve_ordering=True, instances=(Instance(), Instance(), Instance()))
    add(scheduler, "a0", "a1", tenant="a")
    add(scheduler, "b0", tenant="b")
    first, second, third = scheduler.dispatch(0.0)
    assert done(scheduler, second) == []
    assert done(scheduler, third) == ["b0"]
    assert done(scheduler, first) == ["a0", "a1"]


def test_an_answer_that_waited_for_one_that_was_given_up_is_told_at_once():
    scheduler = scheduler_with(dynamic=False, preserve_ordering=True, instances=(Instance(), Instance()))
    add(scheduler, "a0", "a1", "a2")
    _, second = scheduler.dispatch(0.0)
    scheduler.finish("a0", FinishReason.ABORT, 0.1)  # ends with its batch
    assert done(scheduler, second) == []
    [third] = scheduler.dispatch(0.2)
    assert done(scheduler, third) == []
    assert done(scheduler, scheduler.lanes.batches[0], 0.3) == ["a0", "a1", "a2"]


def test_what_an_instance_lost_runs_again_alone_and_who_loses_two_is_ended():
    scheduler = scheduler_with()
    add(scheduler, "a fine one", "the bad one")
    [batch] = scheduler.dispatch(0.0)
    assert done(scheduler, batch, lost=True) == []
    [batch] = scheduler.dispatch(1.0)
    assert batch.request_ids == ("a fine one",)
    assert done(scheduler, batch) == ["a fine one"]
    [batch] = scheduler.dispatch(2.0)
    [told] = scheduler.completed(batch, BatchOutcome(lost=True), 3.0)
    assert (told.request_id, told.finish_reason) == ("the bad one", FinishReason.ERROR)


def test_a_batchs_time_is_split_to_the_microsecond_by_rows():
    assert split_us(100, [1, 1, 1]) == [33, 33, 34]
    scheduler = scheduler_with()
    add(scheduler, "a", num_rows=3)
    add(scheduler, "b", num_rows=4)
    [batch] = scheduler.dispatch(0.0)
    scheduler.finish("a", FinishReason.ABORT, 0.1)  # who leaves while it runs has had its part all the same
    told = scheduler.completed(batch, BatchOutcome(compute_us=1000), 1.0)
    assert [(one.finish_reason, one.charges.num_rows, one.charges.compute_us) for one in told if one.charges] == [
        (FinishReason.ABORT, 3, 428),
        (FinishReason.STOP, 4, 572),
    ]


def test_an_instance_waits_for_its_resources_and_what_it_lacks_is_kept_for_it():
    scheduler = scheduler_with(model="large", instances=(Instance(resources=(("R", 2),)),))
    load(scheduler, "small", dynamic=False, instances=(Instance(resources=(("R", 1),)),) * 2)
    add(scheduler, "s0", model="small")
    [small] = scheduler.dispatch(0.0)
    add(scheduler, "l0", model="large")
    add(scheduler, "s1", model="small", now=0.1)
    assert scheduler.dispatch(0.1) == ()  # s1 has the room, and it is kept for l0, whose turn it is
    done(scheduler, small, 0.2)
    assert ids(scheduler.dispatch(0.2)) == [("l0",)]


def test_twice_the_weight_has_half_the_turns():
    scheduler = scheduler_with(model="once", dynamic=False, instances=(Instance(resources=(("R", 1),), weight=2),))
    load(scheduler, "twice", dynamic=False, instances=(Instance(resources=(("R", 1),), weight=1),))
    for number in range(12):
        add(scheduler, f"o{number}", model="once")
        add(scheduler, f"t{number}", model="twice")
    order = ""
    for now in range(9):
        [batch] = scheduler.dispatch(float(now))
        order += batch.request_ids[0][0]
        done(scheduler, batch, now + 0.5)
    assert order.count("t") == 6


def test_a_batch_goes_while_a_step_is_under_way():
    scheduler = scheduler_with()
    scheduler.add(make_request("chat", prompt=8), 0.0)
    plan = scheduler.schedule(0.0)
    add(scheduler, "a", now=0.1)
    assert plan.rows
    assert ids(scheduler.dispatch(0.1)) == [("a",)]


def test_beside_the_llm_batches_take_their_share_of_the_machine_and_without_it_all():
    scheduler = scheduler_with(dynamic=False, machine_share=1.0)
    add(scheduler, *(f"t{number}" for number in range(20)))
    [batch] = scheduler.dispatch(0.0)
    done(scheduler, batch, 0.1, compute_us=100_000)  # so long each takes
    scheduler.add(make_request("chat", prompt=8), 0.1)
    [batch] = scheduler.dispatch(0.1)
    done(scheduler, batch, 0.2, compute_us=100_000)
    assert scheduler.dispatch(0.2) == ()
    assert scheduler.next_wake(0.2) == pytest.approx(0.3)  # as long again for the chat
    assert len(scheduler.dispatch(0.301)) == 1
    scheduler.abort("chat", 0.302)
    done(scheduler, scheduler.lanes.batches[0], 0.302, compute_us=1_000)
    assert len(scheduler.dispatch(0.302)) == 1


def test_a_model_keeps_its_place_by_its_next_request_while_the_share_beside_the_llm_is_used_up():
    scheduler = scheduler_with(dynamic=False, num_levels=2, default_level=2, instances=(Instance(),) * 2)
    load(scheduler, "other", dynamic=False)
    add(scheduler, "first")
    done(scheduler, *scheduler.dispatch(0.0), 0.1, compute_us=100_000)  # so long each takes
    add(scheduler, "old", arrived_at=0.1)
    add(scheduler, "urgent", level=1, arrived_at=0.3)
    scheduler.add(make_request("chat", prompt=8), 0.3)
    assert ids(scheduler.dispatch(0.3)) == [("urgent",)]  # of its model first, though it came later than "old"
    add(scheduler, "between", model="other", arrived_at=0.2)
    assert scheduler.dispatch(0.4) == ()
    assert ids(scheduler.dispatch(0.51)) == [("old",)]


def test_a_chat_and_a_batch_count_for_the_same_tenant():
    scheduler = scheduler_with("vtc", dynamic=False)
    add(scheduler, "a0", tenant="busy", work=500.0)
    add(scheduler, "b0", tenant="calm")
    assert ids(scheduler.dispatch(0.0)) == [("a0",)]
    scheduler.add(make_request("busy chat", prompt=4, tenant="busy"), 0.1)
    scheduler.add(make_request("calm chat", prompt=4, tenant="calm", arrived_at=0.2), 0.2)
    assert scheduler.schedule(0.3).rows[0].request_id == "calm chat"


def test_an_unloaded_model_takes_nobody_and_serves_those_that_are_here():
    scheduler = scheduler_with(dynamic=False)
    add(scheduler, "a", "b")
    [batch] = scheduler.dispatch(0.0)
    scheduler.lanes.unload("m", 1)
    with pytest.raises(ModelNotFound):
        add(scheduler, "c")
    done(scheduler, batch)
    [batch] = scheduler.dispatch(1.0)
    done(scheduler, batch)
    assert scheduler.lanes.models == ()


def test_the_automatic_delay_waits_where_batches_pay_and_not_at_a_calm_pace():
    pace = LanePace()
    for num_rows in (1, 2, 4, 8) * 8:
        pace.ran(num_rows, 0.010 + 0.001 * num_rows, 0.0)
    assert pace.seconds(5) == pytest.approx(0.015)
    assert pace.wait(8) == (1, 0.0)  # nothing is known of arrivals
    for number in range(200):
        pace.came(1, number * 1.0)
    assert pace.wait(8).num_rows == 1
    busy = LanePace()
    for num_rows in (1, 2, 4, 8) * 8:
        busy.ran(num_rows, 0.010 + 0.001 * num_rows, 0.0)
    for number in range(200):
        busy.came(1, number * 0.005)
    assert busy.wait(8).num_rows == 4  # 14 ms for 20 ms of arrivals; three rows would take 13 of 15
    assert busy.wait(8).at_most_s == pytest.approx(0.014)
