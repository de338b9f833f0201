"""Policy conformance: what every policy must keep, also those of other packages. Call `check_policy`. Pure and seeded.

    from maitred.testing.conformance import check_policy
    check_policy(my_policy)          # my_policy: PolicyFactory; raises PolicyFault, naming the property and the seed

`maitred policies --check NAME` does that for an installed policy. Each property (`conformance_steps`) is watched over
small random worlds (`conformance_world`): a real scheduler and KV cache, an executor that answers at once, and a load
that is a function of the seed, so a fault can be seen again by its number; also beside batches of tensor models
(`conformance_lanes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import isfinite

from msgspec import structs

from maitred.core.cost_model import CostModel, shape_of
from maitred.core.request import RequestState, Terms
from maitred.core.step import SchedulerOutput
from maitred.policy.parameters import make_policy
from maitred.policy.policy import PolicyFactory, Queued
from maitred.scheduler.notes import Lack
from maitred.testing.conformance_lanes import TensorWorld, lane_fair_share_fault, lane_starvation_fault
from maitred.testing.conformance_steps import STEP_PROPERTIES, PolicyFault, conservation
from maitred.testing.conformance_world import Bring, Execute, Moment, Scenario, ServiceMeter, World, answer, scenario_of

__all__ = ("STEP_PROPERTIES", "PolicyFault")  # those that are defined elsewhere

# -- checks of a policy: each raises PolicyFault


def check_steps(
    make: PolicyFactory,
    scenario: Scenario,
    execute: Execute = answer,
    properties: Iterable[str] = STEP_PROPERTIES,
    bring: Bring = lambda blocks, request, start: None,
) -> World:
    """Runs the scenario to its end and watches properties in every step; every request must come to its end."""
    world, names = World(make, scenario, execute, bring), list(properties)
    while world.scheduler.has_work or len(world.requests) < scenario.num_requests:
        world.arrive()
        moment = world.step()
        for name in names:
            fault = STEP_PROPERTIES[name](moment)
            if fault is not None:
                raise PolicyFault(name, scenario, moment.plan.step, fault)
        world.carry_out(moment)
        if len(world.plans) > world.max_steps:
            left = sorted(r.request_id for r in world.requests.values() if not r.finished)
            raise PolicyFault("conservation", scenario, moment.plan.step, f"no end in sight for {', '.join(left)}")
    _check_ended(world)
    return world


def _check_ended(world: World) -> None:
    step = len(world.plans)
    world.end_leases()
    if world.kv_cache.num_used:
        fault = f"{world.kv_cache.num_used} blocks are held by nobody"
        raise PolicyFault("no block leak", world.scenario, step, fault)
    for request in world.requests.values():
        short = request.max_tokens - len(request.output_token_ids)
        if short and request.finish_reason is not None and request.finish_reason.value == "length":
            raise PolicyFault("conservation", world.scenario, step, f"{request.request_id} lacks {short} tokens")


def check_determinism(make: PolicyFactory, scenario: Scenario, execute: Execute = answer) -> None:
    """Two fresh policies make the same plans of the same load."""
    first, second = (check_steps(make, scenario, execute, ()).plans for _ in range(2))
    if first != second:
        step = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
        raise PolicyFault("determinism", scenario, step, "a second run makes another plan")


def check_swap(make: PolicyFactory, scenario: Scenario, execute: Execute = answer) -> None:
    """Change to another policy and back, again and again: no request is lost, and no place or bound is worse for it."""
    world = World(make, scenario, execute)
    while world.scheduler.has_work or len(world.requests) < scenario.num_requests:
        world.arrive()
        if world.dice.chance(30):
            fault = _fault_of_swap(world)
            if fault is not None:
                raise PolicyFault("swap", scenario, len(world.plans), fault)
        moment = world.step()
        fault = conservation(moment)
        if fault is not None:
            raise PolicyFault("swap", scenario, len(world.plans), fault)
        world.carry_out(moment)
        if len(world.plans) > 4 * world.max_steps:  # each swap begins quanta anew
            raise PolicyFault("swap", scenario, len(world.plans), "no end in sight")
    _check_ended(world)


def _fault_of_swap(world: World) -> str | None:
    if world.policy.kv_needs is not None:
        world.swap()  # every score is up to date after it, as it will be after the next
    before, bounds = _orders(world), _bounds(world)
    world.swap()
    after = _orders(world)
    if before != after:
        group = next(group for group in before if before[group] != after.get(group))
        return f"those that wait were in order {before[group]}, after a swap and back {after.get(group)}"
    worse = [request_id for request_id, until in _bounds(world).items() if until > bounds[request_id]]
    return f"{worse[0]} may be overtaken longer after a swap" if worse else None


def _orders(world: World) -> dict[str, list[str]]:
    """Ids in order, by group: counters of service begin anew with a swap, so groups may change places."""
    orders: dict[str, list[str]] = {}
    for request in world.scheduler.waiting:
        orders.setdefault(world.group_of(request), []).append(request.request_id)
    return orders


def _bounds(world: World) -> dict[str, float]:
    return {r.request_id: world.policy.overtaken_until(r) for r in world.scheduler.waiting}


# -- endless load

CACHED = "with a cached prefix"
RIVALS = {
    "as urgent as can be": Terms(ttft_slo_s=0.0),
    "of the same tenant": Terms(tenant="victim", ttft_slo_s=0.0),
    "each of a new tenant": Terms(ttft_slo_s=0.0),
    CACHED: Terms(),
    "of great weight": Terms(weight=8.0, tenant="great"),
}


def check_endless_load(make: PolicyFactory, scenario: Scenario, execute: Execute = answer) -> None:
    """The least favoured request there can be finishes, whatever comes in for ever, at twice what can be served."""
    for kind in RIVALS:
        roomy = roomy_scenario(scenario)
        world = World(make, roomy, execute)
        for _ in range(2 * roomy.max_num_seqs):
            world.add(rival(world, kind))
        victim = world.make_request(prompt=8, max_tokens=3, terms=Terms(priority=2, tenant="victim"))
        world.add(victim)
        until = world.policy.overtaken_until(victim)
        if not isfinite(until):
            raise PolicyFault("starvation bound", roomy, 0, f"overtaken_until is {until}; state a finite time")
        max_steps = 300 + 8 * int(until)
        while not victim.finished:
            if len(world.plans) > max_steps:
                fault = f"after {max_steps} steps one is not done that was overtaken until {until}; rivals: {kind}"
                raise PolicyFault("starvation bound", roomy, max_steps, fault)
            for _ in range(roomy.max_num_seqs):
                world.add(rival(world, kind))
            world.carry_out(world.step())


def roomy_scenario(scenario: Scenario) -> Scenario:
    """The scenario with blocks for all, few slots and a prefix cache."""
    roomy = replace(scenario, num_blocks=200, block_size=2, max_num_seqs=1 + scenario.seed % 2)
    return replace(roomy, max_num_batched_tokens=16, enable_prefix_caching=True)


def rival(world: World, kind: str) -> RequestState:
    """The next request of a kind."""
    number = len(world.requests)
    family, prompt = (1, 5) if kind is CACHED else (None, 1 + number % 2)
    terms = RIVALS[kind]
    terms = terms if terms.tenant else structs.replace(terms, tenant=f"a{number:05d}" if "new" in kind else "rivals")
    return world.make_request(prompt=prompt, max_tokens=2, family=family, predicted_output_tokens=1.0, terms=terms)


# -- fair shares


def check_fair_share(make: PolicyFactory, scenario: Scenario, execute: Execute = answer) -> float:
    """Check that the weighted service of groups that always wait drifts apart by no more than `max_service_gap`; that
    of any two, over every stretch of time. Returns the largest drift as a share of the bound. A policy without groups
    passes.
    """
    policy = make_policy(make, scenario.config)
    gap = policy.max_service_gap
    if policy.groups is None:
        return 0.0
    if gap is None:
        raise PolicyFault("fair share", scenario, 0, "it has groups and states no max_service_gap")
    scenario = replace(scenario, num_blocks=max(scenario.num_blocks, 8 * scenario.longest_prompt))
    world = World(make, scenario, execute)
    shapes = [tenant_shape(world, number) for number in range(2 + scenario.seed % 3)]
    num_kv_tokens = scenario.num_blocks * scenario.block_size
    bound = gap(scenario.longest_prompt, scenario.longest_output, scenario.max_num_seqs, num_kv_tokens)
    bound /= min(weight for _, _, weight in shapes)
    meter = ServiceMeter(len(shapes), scenario.config.output_token_weight)
    for _ in range(max(150, int(2 * bound))):
        for request in waiting_tenants(world, shapes, world.scheduler.waiting, scenario.max_num_seqs + 1):
            world.add(request)
        moment = world.step()
        meter.read(moment.plan, world.requests)
        if meter.widest > bound:
            fault = f"the service of two tenants that always wait differs by {meter.widest:g} tokens, over {bound:g}"
            raise PolicyFault("fair share", scenario, moment.plan.step, fault)
        world.carry_out(moment)
    return meter.widest / bound


def waiting_tenants(
    world: World, shapes: Sequence[tuple[int, int, float]], waiting: Iterable[Queued], count: int
) -> Iterator[RequestState]:
    """Requests with which so many of each tenant wait."""
    held = Counter(request.tenant for request in waiting)
    for number, (prompt, output, weight) in enumerate(shapes):
        terms = Terms(tenant=f"t{number}", weight=weight, priority=number % 3)
        for _ in range(count - held[terms.tenant]):
            yield world.make_request(prompt=prompt, max_tokens=output, terms=terms)


def tenant_shape(world: World, number: int) -> tuple[int, int, float]:
    """(prompt, output, weight): tenants are as unlike as can be."""
    scenario = world.scenario
    if number == 0:
        return scenario.longest_prompt, 1, 1.0
    if number == 1:
        return 1, scenario.longest_output, 1.0
    dice = world.dice
    prompt, output = dice.between(1, scenario.longest_prompt), dice.between(1, scenario.longest_output)
    return prompt, output, float(dice.between(1, 3))


# -- beside tensor requests


def check_lanes(make: PolicyFactory, scenario: Scenario, execute: Execute = answer) -> TensorWorld:
    """Chats and batches of several lanes under one policy: each keeps what it keeps alone, also over a swap of policy
    and back, and all come to an end.
    """
    world = World(make, scenario, execute)
    tensors = TensorWorld(world)
    while world.scheduler.has_work or tensors.lanes.requests or len(world.requests) < scenario.num_requests:
        world.arrive()
        tensors.arrive(world.now)
        fault = tensors.dispatch(world.now) or (_fault_of_lane_swap(world, tensors) if world.dice.chance(15) else None)
        moment = world.step()
        faults = {name: watch(moment) for name, watch in STEP_PROPERTIES.items()}
        tensors.complete_some(world.now + 0.5)
        faults["lanes"] = fault or tensors.dispatch(world.now + 0.5)
        for name, fault in faults.items():
            if fault is not None:
                raise PolicyFault(name, scenario, moment.plan.step, fault)
        world.carry_out(moment)
        if len(world.plans) > 4 * world.max_steps + 8 * len(tensors.requests):
            raise PolicyFault("lanes", scenario, moment.plan.step, f"no end in sight for {tensors.orders()}")
    _check_ended(world)
    return tensors


def _fault_of_lane_swap(world: World, tensors: TensorWorld) -> str | None:
    before = tensors.orders()
    world.swap()
    after = tensors.orders()
    return None if before == after else f"those that wait were in order {before}, after a swap and back {after}"


# -- beside background work


def check_background(make: PolicyFactory, scenario: Scenario, execute: Execute = answer) -> None:
    """Background work beside the others: it lengthens no step of theirs by more than the slack, by the cost model; it
    starts before none that waits, and keeps no slot that one lacks; alone it is never left standing, and it ends.
    """
    world = World(make, scenario, execute)
    world.scheduler.set_step_costs(STEP_COSTS)
    while world.scheduler.has_work or len(world.requests) < scenario.num_requests:
        while len(world.requests) < scenario.num_requests and world.dice.chance(scenario.arrivals_percent):
            spec = world.draw_request().spec
            terms = structs.replace(spec.terms, background=world.dice.chance(50))
            world.add(RequestState(structs.replace(spec, terms=terms)))
        plan = world.scheduler.schedule(world.now)
        fault = _fault_beside(world, plan)
        if fault is not None:
            raise PolicyFault("background", scenario, plan.step, fault)
        world.plans.append(plan)
        world.carry_out(Moment(world, plan, {}, {}))
        if len(world.plans) > 4 * world.max_steps:
            raise PolicyFault("background", scenario, plan.step, "no end in sight")
    _check_ended(world)


STEP_COSTS = CostModel(fixed_s=0.02, prefill_token_s=0.0004, decode_token_s=0.0004)


def _fault_beside(world: World, plan: SchedulerOutput) -> str | None:
    scheduler, config = world.scheduler, world.scheduler.config
    others = [row for row in plan.rows if not world.requests[row.request_id].background]
    limit_s = (1 + config.batch_slack) * STEP_COSTS.step_s(shape_of(others))
    if others and (step_s := STEP_COSTS.step_s(shape_of(plan.rows))) > limit_s:
        return f"the step takes {step_s:.4f} s, over {limit_s:.4f} s"
    waiting = [r for r in scheduler.waiting if not r.background]
    ahead = [new.request_id for new in plan.new_requests if world.requests[new.request_id].background]
    if waiting and ahead:
        return f"{ahead[0]} starts while {waiting[0].request_id} waits"
    holders = [r for r in scheduler.running if r.background]
    if waiting and holders and scheduler.blocked is not None and scheduler.blocked.lack is Lack.SLOTS:
        return f"{holders[0].request_id} keeps its slot while {waiting[0].request_id} waits for one"
    return None if plan.rows or not scheduler.has_work else "nothing goes, and background work waits"


def check_busy_lane(make: PolicyFactory, scenario: Scenario, execute: Execute = answer) -> None:
    """Check that no request starves in a lane that is never empty, and no tenant gets more than the policy says."""
    fault = lane_starvation_fault(make, scenario, RIVALS)
    if fault is not None:
        raise PolicyFault("starvation bound", scenario, 0, fault)
    fault = lane_fair_share_fault(make, scenario, tenant_shape)
    if fault is not None:
        raise PolicyFault("fair share", scenario, 0, fault)


# -- all of it


def check_statement(make: PolicyFactory, scenario: Scenario, execute: Execute = answer) -> None:
    """Check that the policy names its source and its promises, and that its terms sum up to its key."""
    world = World(make, scenario, execute)
    policy = world.policy
    if not policy.source or not policy.bound:
        raise PolicyFault("statement", scenario, 0, "source and bound must say something")
    for _ in range(5):
        request = world.draw_request()
        world.add(request)
        terms, key = policy.terms(request), policy.order(request)
        total = sum(terms.values())
        if not terms or (policy.groups is None and abs(total - key[0]) > 1e-6 * max(1.0, abs(total))):
            raise PolicyFault("statement", scenario, 0, f"terms {dict(terms)} do not sum up to {key[0]}")


CHECKS: dict[str, Callable[..., object]] = {  # (factory, scenario), and an executor if not `answer`
    "statement": check_statement,
    "steps": check_steps,
    "determinism": check_determinism,
    "swap": check_swap,
    "endless load": check_endless_load,
    "fair share": check_fair_share,
    "lanes": check_lanes,
    "busy lane": check_busy_lane,
    "background": check_background,
}


def check_policy(make: PolicyFactory, seeds: Iterable[int] = range(20), execute: Execute = answer) -> None:
    """Run every check, in a world for each seed. Raises PolicyFault at the first that fails."""
    for seed in seeds:
        for check in CHECKS.values():
            check(make, scenario_of(seed), execute)
