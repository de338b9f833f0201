"""Fleets and requests for tests, in a line each."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.fleet.actions import Action, Bind, Move, Refuse
from maitred.fleet.config import FleetConfig
from maitred.fleet.core import ClusterCore
from maitred.fleet.disagg import Role, WorkerFacts, WorkerLoad
from maitred.fleet.fleet_request import AnswerUsage, FleetRequest
from maitred.fleet.replicas import ReplicaFacts
from tests.fakes import with_terms


def make_request(request_id: str, arrived_at: float = 0.0, **fields: Any) -> FleetRequest:
    return FleetRequest(
        **{"request_id": request_id, "arrived_at": arrived_at, "num_bytes": 400, "max_tokens": 8} | with_terms(fields)
    )


def make_core(*replicas: str | ReplicaFacts, policy: str = "fcfs", **settings: Any) -> ClusterCore:
    """Replicas by name are ready, serve `m` and have the slots of the settings, 2 unless given."""
    config = FleetConfig(**{"slots": 2, "reserve": 0.0} | settings)
    core = ClusterCore(config, SchedulerConfig(policy=policy, predictor="max_tokens"))
    for replica in replicas:
        facts = ReplicaFacts(name=replica, models=("m",)) if isinstance(replica, str) else replica
        core.joined(facts, 0.0)
    return core


INPUTS = (
    *("arrived", "progressed", "handed_over", "ended", "aborted", "failed", "bound_elsewhere", "joined", "left"),
    *("drained", "leaving", "reported", "probed", "scaled", "restarted", "configured", "tick"),
    *("load_asked", "unload_asked", "load_failed"),
)


class Recording:
    """All that goes into a core from now on: the method, arguments as they were, and what came out."""

    def __init__(self, core: ClusterCore) -> None:
        self._again = ClusterCore(core.config, core.scheduler, handover=core.handover, several=core.several)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = []
        for name in INPUTS:
            setattr(core, name, partial(self._called, name, getattr(core, name)))

    def _called(self, name: str, method: Any, *args: Any, **named: Any) -> Any:
        given = deepcopy((args, named))
        actions = method(*args, **named)
        self.calls.append((name, *given, repr(actions)))
        return actions

    def assert_replays(self) -> None:
        """The same calls give the same actions."""
        for name, args, named, actions in self.calls:
            assert repr(getattr(self._again, name)(*args, **named)) == actions, name


class Driver:
    """Drives a core as a router would, and knows by its actions alone where each request is."""

    def __init__(self, core: ClusterCore) -> None:
        self.core, self.now = core, 0.0
        self.bound: dict[str, str] = {}  # request -> replica
        self.held: set[str] = set()
        self.refused: dict[str, Refuse] = {}
        self.log: list[Action] = []

    def do(self, actions: list[Action]) -> list[Action]:
        self.log += actions
        for action in actions:
            if isinstance(action, Bind):
                self.held.remove(action.request_id)
                assert action.request_id not in self.bound
                self.bound[action.request_id] = action.choice.replica
            elif isinstance(action, Move):
                assert self.bound.pop(action.request_id) == action.replica
                self.held.add(action.request_id)
            elif isinstance(action, Refuse):
                assert action.request_id not in self.refused
                self.refused[action.request_id] = action
                self.bound.pop(action.request_id, None)
                self.held.discard(action.request_id)
        return actions

    def arrive(self, request_id: str, **fields: Any) -> str | None:
        """Where it was bound, None while it is held."""
        request = make_request(request_id, self.now, **fields)
        self.held.add(request_id)
        self.do(self.core.arrived(request, self.now))
        return self.bound.get(request_id)

    def end(self, request_id: str, usage: AnswerUsage | None = None) -> None:
        del self.bound[request_id]
        self.do(self.core.ended(request_id, usage, self.now))

    def fail(self, request_id: str, failure: Any) -> None:
        """The attempt is over; what the core makes of it follows."""
        del self.bound[request_id]
        self.held.add(request_id)
        self.do(self.core.failed(request_id, failure, self.now))

    def wait(self, seconds: float) -> None:
        """Ticks whenever something falls due."""
        until = self.now + seconds
        while (at := self.core.next_tick()) is not None and at <= until:
            self.now = max(self.now, at)
            self.do(self.core.tick(self.now))
        self.now = until


def facts(name: str, **fields: Any) -> ReplicaFacts:
    return replace(ReplicaFacts(name=name, models=("m",)), **fields)


COSTS = CostModel(fixed_s=2e-3, weights_s=6e-3, prefill_token_s=3e-5, decode_token_s=3e-5, context_token_s=5e-8)


def worker_facts(role: str = "mixed", **fields: Any) -> WorkerFacts:
    given = {"costs": COSTS, "token_budget": 2048, "num_blocks": 4096, "block_size": 16, "bytes_per_token": 1e5}
    return WorkerFacts(role=Role(role), **given | {"num_layers": 32, "bandwidth": 10e9, "latency_s": 1e-4} | fields)


def worker(name: str, role: str = "mixed", **load: Any) -> WorkerLoad:
    """Idle and empty but for what is said; a field of WorkerFacts may be given too."""
    told = {key: load.pop(key) for key in list(load) if key not in WorkerLoad._fields}
    of = worker_facts(role, **told)
    return WorkerLoad(name, of, **{"free_blocks": of.num_blocks} | load)
