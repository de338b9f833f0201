"""Whatever happens, in whatever order: every request ends once, nobody waits beside a free slot, few are taken out."""

from __future__ import annotations

from math import ceil
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from maitred.fleet.actions import Action, Bind, Move
from maitred.fleet.balance import BALANCES
from maitred.fleet.binding import use_of
from maitred.fleet.fleet_request import AnswerUsage, Failure, FailureKind, FleetRequest
from maitred.fleet.replicas import FleetReplica, Kind, Report, State
from maitred.policy.policies import POLICIES
from tests.fleet.fleets import Driver, Recording, facts, make_core, make_request

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
MODELS = st.sampled_from(["m", "n", None])
TIERS = {"near": {"replicas": ["a", "b"], "max_prompt_tokens": 150, "spill_after_s": 3.0}, "far": {}}


class Fleet(RuleBasedStateMachine):
    """A router's view of a core, beside a slow obvious one of who may be where."""

    def __init__(self) -> None:
        super().__init__()
        self.recording: Recording | None = None
        self.num_arrivals = 0
        self.num_retries = 0
        self.retrying: set[str] = set()
        self.deaths: dict[str, int] = {}
        self.ended: set[str] = set()

    @initialize(
        balance=st.sampled_from(sorted(BALANCES)),
        policy=st.sampled_from(sorted(POLICIES)),
        tiers=st.sampled_from([{}, TIERS]),
        ratio=st.sampled_from([1.0, 1.25, 10.0]),
    )
    def begin(self, balance: str, policy: str, tiers: dict[str, Any], ratio: float) -> None:
        self.core = make_core(
            policy=policy,
            balance=balance,
            tiers=tiers,
            max_load_ratio=ratio,
            slots=3,
            reserve=0.125,
            hold_timeout_s=9.0,
        )
        self.recording = Recording(self.core)
        self.driver = Driver(self.core)
        for number, name in enumerate(["a", "b", "c"]):
            told = facts(
                name, url=name, slots=4 + 2 * number, models=("m", "n"), has_beats=name == "a", fingerprint="x"
            )
            self.do(self.core.joined(told, 0.0))

    # -- what happens

    @rule(name=NAMES, slots=st.integers(1, 4), models=st.sampled_from([("m",), ("m", "n"), None]), data=st.data())
    def join(self, name: str, slots: int, models: tuple[str, ...] | None, data: st.DataObject) -> None:
        told = facts(
            name,
            url=name,
            slots=slots,
            models=models,
            state=data.draw(st.sampled_from([State.READY, State.READY, State.STARTING])),
            kind=data.draw(st.sampled_from(list(Kind))),
            has_beats=data.draw(st.booleans()),
            fingerprint=data.draw(st.sampled_from(["x", "y"])),
            weight=data.draw(st.sampled_from([None, 2.0])),
        )
        self.do(self.core.joined(told, self.now))

    @rule(name=NAMES, what=st.sampled_from(["leaves", "dies", "drains", "drains by itself", "answers", "answers not"]))
    def befall(self, name: str, what: str) -> None:
        if what == "drains":
            self.do(self.core.drained(name, self.now))
        elif what == "drains by itself":
            self.do(self.core.leaving(name, 1.5, self.now))
        elif what in ("leaves", "dies"):
            self.do(self.core.left(name, self.now, what == "dies"))
        else:
            self.do(self.core.probed(name, what == "answers", self.now))

    @rule(name=NAMES, load=st.one_of(st.none(), st.integers(0, 9)), keys=st.lists(st.integers(0, 9)))
    def report(self, name: str, load: int | None, keys: list[int]) -> None:
        self.do(self.core.reported(name, Report(num_in_flight=load, stored=keys[:4], removed=keys[4:]), self.now))

    @rule(
        count=st.integers(1, 12),
        model=MODELS,
        num_bytes=st.integers(1, 2000),
        num_samples=st.integers(1, 3),
        num_keys=st.integers(0, 6),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("tuv"),
        slack=st.sampled_from([None, 0.0, 2.0]),
        can_resume=st.booleans(),
        is_local=st.booleans(),
        hash_key=st.sampled_from([None, 1, 2**63]),
    )
    def arrive(self, count: int, num_keys: int, slack: float | None, **fields: Any) -> None:
        by = None if slack is None else self.now + slack
        for _ in range(count):
            self.num_arrivals += 1
            name, keys = f"r{self.num_arrivals:04d}", tuple(range(num_keys))
            request = make_request(name, self.now, keys=keys, start_by=by, finish_by=by, **fields)
            self.driver.held.add(name)
            self.do(self.core.arrived(request, self.now))

    @precondition(lambda self: self.driver.bound)
    @rule(data=st.data(), num_tokens=st.integers(0, 3))
    def progress(self, data: st.DataObject, num_tokens: int) -> None:
        self.core.progressed(self.draw_bound(data), num_tokens, self.now)

    @precondition(lambda self: self.driver.bound)
    @rule(data=st.data(), usage=st.sampled_from([None, AnswerUsage(90, 8, 40), AnswerUsage(3, 1)]))
    def end(self, data: st.DataObject, usage: AnswerUsage | None) -> None:
        request_id = self.draw_bound(data)
        del self.driver.bound[request_id]
        self.ended.add(request_id)
        self.do(self.core.ended(request_id, usage, self.now))

    @precondition(lambda self: self.driver.bound)
    @rule(data=st.data(), kind=st.sampled_from(list(FailureKind)))
    def fail(self, data: st.DataObject, kind: FailureKind) -> None:
        self.fail_one(self.draw_bound(data), kind)

    @rule(name=NAMES, kind=st.sampled_from(list(FailureKind)))
    def fail_all_of(self, name: str, kind: FailureKind) -> None:
        for request_id in [request_id for request_id, at in self.driver.bound.items() if at == name]:
            if self.driver.bound.get(request_id) == name:
                self.fail_one(request_id, kind)

    def fail_one(self, request_id: str, kind: FailureKind) -> None:
        replica = self.core.fleet.by_name[self.driver.bound[request_id]]
        was_ready = replica.state is State.READY
        if kind not in (FailureKind.FULL, FailureKind.LIMITED):
            self.note_failure(self.request(request_id), Failure(kind).is_death)
        del self.driver.bound[request_id]
        self.driver.held.add(request_id)
        self.do(self.core.failed(request_id, Failure(kind, retry_after_s=2.0), self.now))
        if kind is FailureKind.ERROR and was_ready and replica.state is State.EJECTED:
            states = [r.state for r in self.core.fleet]
            assert states.count(State.READY) >= states.count(State.EJECTED)

    @precondition(lambda self: self.driver.bound or self.driver.held)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted({*self.driver.bound, *self.driver.held})))
        self.driver.bound.pop(request_id, None)
        self.driver.held.discard(request_id)
        self.ended.add(request_id)
        self.do(self.core.aborted(request_id, self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, 10.0]))
    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (at := self.core.next_tick()) is not None and at <= until:
            self.driver.now = max(self.now, at)
            self.do(self.core.tick(self.now))
        self.driver.now = until

    # -- what must hold

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        self.core.check_invariants()
        assert self.driver.held.isdisjoint(self.driver.bound)
        assert self.core.num_requests == len(self.driver.held) + len(self.driver.bound)
        assert {r.request_id for r in self.core.held()} == self.driver.held
        for request_id, name in self.driver.bound.items():
            assert request_id in self.core.fleet.by_name[name].in_flight
        assert len(self.ended) + len(self.driver.refused) + self.core.num_requests == self.num_arrivals

    @invariant()
    def nobody_is_held_while_a_replica_that_it_may_use_has_room(self) -> None:
        for request in self.core.held():
            idle = [r.name for r in self.usable(request) if not r.is_full and r.room > 0]
            assert not idle, f"{request.request_id} is held while {idle} have room"

    @invariant()
    def retries_are_few(self) -> None:
        assert self.num_retries <= 10 + 0.1 * self.num_arrivals
        living = [self.request(request_id) for request_id in (*self.driver.held, *self.driver.bound)]
        assert all(request.num_retries <= 2 for request in living)

    @invariant()
    def who_saw_two_replicas_die_is_given_to_no_third(self) -> None:
        assert all(self.deaths.get(request_id, 0) < 2 for request_id in (*self.driver.held, *self.driver.bound))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Move) and action.reason not in ("drain", "hung"):
                request = self.core.request(action.request_id)
                if request is not None:  # else it was refused for it
                    self.note_failure(request, True)
        loads = {r.name: r.load for r in self.core.fleet}
        bindings = [action for action in self.driver.do(actions) if isinstance(action, Bind)]
        for bind in reversed(bindings):  # as it was before each
            request = self.request(bind.request_id)
            if bind.request_id in self.retrying:
                self.retrying.remove(bind.request_id)
                self.num_retries += 1
            replica = self.core.fleet.by_name[bind.choice.replica]
            assert replica.state is State.READY
            loads[replica.name] -= request.num_samples
            self.check_bound(request, replica, loads)

    def check_bound(self, request: FleetRequest, chosen: FleetReplica, loads: dict[str, int]) -> None:
        """Nobody is above ceil(ratio x mean) + 1 while another, in the tier that he is in, has room below it."""
        usable = self.usable(request)
        assert chosen in usable
        share = self.core.config.max_load_ratio * sum(loads[r.name] for r in usable) / sum(r.speed for r in usable)

        def is_within(replica: FleetReplica) -> bool:
            return loads[replica.name] + request.num_samples <= ceil(share * replica.speed) + 1

        def has_room(replica: FleetReplica) -> bool:
            own = loads[replica.name] - replica.num_others
            return not replica.is_full and max(1, replica.limit - replica.num_others) > own

        if not is_within(chosen):
            others = [r for r in usable if r.tier == chosen.tier and has_room(r) and is_within(r)]
            assert not others, f"{request.request_id} went to {chosen.name}, over the bound, beside {others}"

    def usable(self, request: FleetRequest) -> list[FleetReplica]:
        """The slow obvious way."""
        use = use_of(request)
        may = [
            r
            for r in self.core.fleet
            if r.state is State.READY
            and (use.model is None or use.model in (r.facts.models or ()))
            and use.tiers >> r.tier & 1
            and use.fingerprint in (None, r.facts.fingerprint)
        ]
        return [r for r in may if not use.barred >> r.bit & 1] or may

    # -- helpers

    @property
    def now(self) -> float:
        return self.driver.now

    def request(self, request_id: str) -> FleetRequest:
        request = self.core.request(request_id)
        assert request is not None
        return request

    def draw_bound(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.driver.bound)))

    def note_failure(self, request: FleetRequest, is_death: bool) -> None:
        died = is_death or request.has_begun
        self.deaths[request.request_id] = self.deaths.get(request.request_id, 0) + died
        if not request.has_begun:
            self.retrying.add(request.request_id)

    def teardown(self) -> None:
        if self.recording is not None:
            self.recording.assert_replays()


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
