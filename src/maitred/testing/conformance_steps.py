"""Properties of a step that every policy keeps, each in words when it is broken; `conformance` watches them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from maitred.core.errors import ConfigError
from maitred.policy.queue import MIN_DEAD_ENTRIES
from maitred.testing.conformance_world import Moment, Scenario

Property = Callable[[Moment], str | None]
"""Return what is wrong at this moment, in words, or None."""


class PolicyFault(ConfigError):
    """A policy breaks a property."""

    def __init__(self, name: str, scenario: Scenario, step: int, fault: str) -> None:
        super().__init__(f"{name}: seed {scenario.seed}, step {step}: {fault}")
        self.property, self.scenario, self.step = name, scenario, step


# -- properties of a step


def conservation(moment: Moment) -> str | None:
    """Check that every request is in one place: in the queue, waiting for KV, running or ended."""
    scheduler = moment.world.scheduler
    here = [r.request_id for r in (*scheduler.waiting, *scheduler.waiting_for_kv, *scheduler.running)]
    if len(set(here)) != len(here):
        return "a request is there twice"
    if len(here) + moment.world.num_finished != len(moment.world.requests):
        return f"{len(here)} here, {moment.world.num_finished} ended, of {len(moment.world.requests)}"
    return None


def work_conservation(moment: Moment) -> str | None:
    """No slot is idle while a request waits, with budget and blocks for the first of those that wait, unless that waits
    for another sample to compute its prompt; with groups, whose order moves on with the service of the very step, for
    each of them.
    """
    world, scheduler = moment.world, moment.world.scheduler
    config, head = scheduler.config, scheduler.order.head()
    if head is None or moment.preempted or scheduler.num_running >= config.max_num_seqs:
        return None
    if moment.plan.num_tokens >= config.token_budget:
        return None
    first = (head,) if world.policy.groups is None else scheduler.waiting
    if any(scheduler.awaits_leader(request) for request in first):
        return None
    if world.kv_cache.num_blocks_for(max(r.num_tokens for r in first)) > world.kv_cache.num_free:
        return None
    return f"{head.request_id} waits beside {config.max_num_seqs - scheduler.num_running} idle slots"


def starvation_bound(moment: Moment) -> str | None:
    """Check that no request starts before one of its group whose `overtaken_until` was over when it arrived."""
    world = moment.world
    started = [(world.group_of(r), r) for r in moment.started]
    for waiting in world.scheduler.waiting:
        until = world.policy.overtaken_until(waiting)
        if not isfinite(until):
            return f"overtaken_until({waiting.request_id}) is {until}; state a finite time"
        for group, ahead in started:
            if ahead.arrived_at > until and group == world.group_of(waiting):
                return (
                    f"{ahead.request_id}, arrived at {ahead.arrived_at}, starts before {waiting.request_id}, "
                    f"which is overtaken until {until}"
                )
    return None


def no_inversion(moment: Moment) -> str | None:
    """Check that a starting request precedes the waiting ones, and that the first outranks no running one."""
    world, scheduler = moment.world, moment.world.scheduler
    places = [(world.place(r), r) for r in moment.started]
    for waiting in scheduler.waiting:
        group, key = world.place(waiting)
        for (started_group, started_key), started in places:
            if started_group == group and key < started_key:
                return f"{started.request_id} starts before {waiting.request_id}, whose key is smaller"
    head, rule = scheduler.order.head(), world.policy.outranks
    if head is None or rule is None or moment.preempted or world.policy.groups is not None:
        return None
    lacks_budget = moment.plan.num_tokens >= scheduler.config.token_budget
    if lacks_budget or world.kv_cache.num_blocks_for(head.num_tokens) > world.kv_cache.num_free:
        return None
    if scheduler.num_running < scheduler.config.max_num_seqs or scheduler.awaits_leader(head):
        return None
    held = [r for r in scheduler.running if r not in moment.started and rule(head, r)]
    return f"{head.request_id} waits while {held[0].request_id}, which it outranks, has a slot" if held else None


def keeps_place(moment: Moment) -> str | None:
    """A preempted request is where it was or further in front, in its group and among the groups; unless its quantum
    has ended.
    """
    for request in moment.preempted:
        group, key = moment.places_before[request.request_id]
        if moment.world.num_quanta(request) != moment.quanta_before[request.request_id]:
            continue
        group_now, key_now = moment.world.place(request)
        if group_now != group:
            return f"{request.request_id} was in group {group!r}, and in {group_now!r} after a preemption"
        if key < key_now:
            return f"{request.request_id} had the key {key}, and {key_now} after a preemption"
    return None


def bounded_queue(moment: Moment) -> str | None:
    """Check that nothing is kept of requests that have gone, except removed entries up to as many as the living."""
    order = moment.world.scheduler.order
    held, living = order.queue.num_entries, len(order.queue)
    if held > 2 * living + MIN_DEAD_ENTRIES + 1:
        return f"the queue holds {held} entries for {living} requests"
    try:
        scheduler = moment.world.scheduler
        order.check_invariants((*scheduler.running, *scheduler.waiting_for_kv))
    except AssertionError as fault:
        return f"the order remembers requests that have gone {fault}"
    return None


def no_block_leak(moment: Moment) -> str | None:
    """Blocks are held by running requests, reservations and leases alone, as often as they say."""
    try:
        moment.world.scheduler.check_invariants()
    except AssertionError as fault:
        return f"blocks: {fault}"
    return None


STEP_PROPERTIES: dict[str, Property] = {
    "conservation": conservation,
    "work conservation": work_conservation,
    "starvation bound": starvation_bound,
    "no inversion": no_inversion,
    "a preempted request keeps its place": keeps_place,
    "bounded queue": bounded_queue,
    "no block leak": no_block_leak,
}
