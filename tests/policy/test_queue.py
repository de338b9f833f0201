from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.request import RequestState
from maitred.policy.policy import by_arrival
from maitred.policy.queue import MIN_DEAD_ENTRIES, RequestQueue
from tests.fakes import make_request


class Served:
    """A group for each tenant; the least served is next."""

    def __init__(self) -> None:
        self.service: dict[str, float] = {}

    def group_of(self, request: RequestState) -> str:
        return request.tenant

    def rank(self, group: str) -> tuple[float, ...]:
        return (self.service.get(group, 0.0),)

    def on_queued(self, request: RequestState) -> None: ...

    def on_started(self, request: RequestState) -> None: ...

    def on_scheduled(self, request: RequestState, num_tokens: int) -> None: ...

    def on_finished(self, request: RequestState) -> None: ...


def push(queue: RequestQueue, **fields: object) -> RequestState:
    request = make_request(**fields)
    queue.push(request, by_arrival(request))
    return request


def test_an_empty_queue_has_no_next():
    queue = RequestQueue()
    assert (queue.peek(), len(queue)) == (None, 0)
    with pytest.raises(IndexError):
        queue.pop()


def test_the_smallest_key_is_next_whatever_the_order_of_arrival():
    queue = RequestQueue()
    late, early = push(queue, arrived_at=2.0), push(queue, arrived_at=1.0)
    assert queue.peek() is early
    assert [queue.pop(), queue.pop()] == [early, late]


def test_a_removed_request_is_passed_over_and_its_id_may_come_again():
    queue = RequestQueue()
    push(queue, request_id="a", arrived_at=1.0)
    queue.remove("a")
    again = push(queue, request_id="a", arrived_at=1.0)
    assert queue.pop() is again
    assert queue.peek() is None


def test_removed_entries_do_not_pile_up():
    queue = RequestQueue()
    push(queue, arrived_at=0.0)
    for i in range(10 * MIN_DEAD_ENTRIES):
        queue.remove(push(queue, arrived_at=1.0 + i).request_id)
    assert queue._num_entries <= 2 * MIN_DEAD_ENTRIES


def test_a_group_that_was_served_steps_back_and_one_whose_rank_fell_steps_forward():
    rule = Served()
    queue = RequestQueue(rule)
    a, b = push(queue, tenant="a"), push(queue, tenant="b")
    rule.service["a"] = 5.0
    queue.note_rank("a")
    assert queue.peek() is b
    rule.service["b"] = 9.0
    assert queue.peek() is a
    rule.service["b"] = 1.0
    queue.note_rank("b")
    assert queue.peek() is b


@settings(deadline=None)
@given(chooser=st.randoms(use_true_random=False), num_acts=st.integers(1, 150))
def test_the_queue_agrees_with_sorting_all_of_it_each_time(chooser: Random, num_acts: int):
    rule = Served()
    queue, waiting = RequestQueue(rule), list[RequestState]()

    def place(request: RequestState) -> tuple[object, ...]:
        return (rule.rank(request.tenant), request.tenant, by_arrival(request))

    for _ in range(num_acts):
        act = chooser.choice(["push", "push", "pop", "remove", "serve"])
        if act == "push":
            waiting.append(push(queue, arrived_at=chooser.randint(0, 5), tenant=chooser.choice("abc")))
        elif act == "pop" and waiting:
            first = min(waiting, key=place)
            assert queue.pop() is first
            waiting.remove(first)
        elif act == "remove" and waiting:
            queue.remove(waiting.pop(chooser.randrange(len(waiting))).request_id)
        elif act == "serve":
            tenant = chooser.choice("abc")
            rule.service[tenant] = rule.service.get(tenant, 0.0) + chooser.randint(-2, 3)
            queue.note_rank(tenant)
        waiting.sort(key=place)
        assert queue.in_order() == waiting
        assert queue.peek() is (waiting[0] if waiting else None)
        assert len(queue) == len(waiting)
        assert sorted(r.request_id for r in queue) == sorted(r.request_id for r in waiting)
