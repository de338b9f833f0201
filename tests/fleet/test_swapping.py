"""Several models in less memory than all of them need: who is loaded, who is put out, and when. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from maitred.config import SchedulerConfig
from maitred.core.errors import ConfigError, InvalidRequest
from maitred.fleet.actions import Action, Bind, Start, Stop
from maitred.fleet.config import FleetConfig
from maitred.fleet.core import ClusterCore
from maitred.fleet.replicas import ReplicaFacts, State
from maitred.fleet.swapping import FleetModel, ModelSet
from tests.fleet.fleets import Driver, Recording

LOAD_S = 2.0


def facts_of(name: str, state: State = State.READY, fingerprint: str | None = "f") -> ReplicaFacts:
    return ReplicaFacts(name=name, state=state, is_launched=True, fingerprint=fingerprint)


class Machine(Driver):
    """Models of the sizes given in a memory of so many bytes; a load takes LOAD_S, a model that is put out is gone at
    once.
    """

    def __init__(self, memory: int = 1, policy: str = "fcfs", sizes: dict[str, int] | None = None, **fields) -> None:
        more = fields.pop("models", {})
        models = [
            FleetModel(name=name, memory_bytes=size, **more.get(name, {}))
            for name, size in (sizes or dict.fromkeys("ABC", 1)).items()
        ]
        config = FleetConfig(**{"slots": 2, "reserve": 0.0, "swap_wait_s": 10.0} | fields)
        scheduler = SchedulerConfig(policy=policy, predictor="max_tokens")
        super().__init__(ClusterCore(config, scheduler, several=ModelSet(tuple(models), memory)))
        self.served: list[str] = []  # ids, in the order in which they were bound
        self.loads: list[str] = []
        self.loading: dict[str, float] = {}  # until when

    def do(self, actions: list[Action]) -> list[Action]:
        super().do(actions)
        for action in actions:
            if isinstance(action, Bind):
                self.served.append(action.request_id)
            elif isinstance(action, Start):
                self.loads.append(action.name)
                self.loading[action.name] = self.now + LOAD_S
            elif isinstance(action, Stop):
                self.do(self.core.left(action.name, self.now))
        return actions

    def ask(self, request_id: str, **fields) -> str | None:
        """A request for the model that its id begins with."""
        return self.arrive(request_id, model=request_id[0], **fields)

    def finish(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.end(request_id)

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.loading and (at := min(self.loading.values())) <= until:
            super().wait(at - self.now)
            for name in [name for name, ready_at in self.loading.items() if ready_at <= self.now]:
                del self.loading[name]
                self.do(self.core.joined(facts_of(name), self.now))
        super().wait(until - self.now)

    def state(self, name: str) -> str:
        return next(view.state for view in self.core.view(self.now).models if view.name == name)


def loaded(*names: str, **fields) -> Machine:
    """A machine with these models in memory, each used after the one before."""
    machine = Machine(**fields)
    for name in names:
        machine.do(machine.core.load_asked(name, None, machine.now))
        machine.wait(LOAD_S)
        assert machine.state(name) == "ready"
    machine.loads.clear()
    return machine


def test_a_a_b_a_c_is_served_as_a_a_a_b_c():
    machine = Machine()
    assert machine.ask("A1") is None  # it waits for its load
    machine.wait(LOAD_S)
    assert machine.bound == {"A1": "A"}
    machine.wait(3.0)
    machine.ask("A2")
    assert machine.ask("B1") is None
    machine.finish("A1")
    machine.wait(3.0)
    assert machine.ask("A3") == "A"  # past B1, for A is there
    assert machine.ask("C1") is None
    machine.finish("A2", "A3")
    assert machine.state("A") == "unloaded"
    machine.wait(LOAD_S)
    machine.finish("B1")
    machine.wait(LOAD_S)
    assert machine.served == ["A1", "A2", "A3", "B1", "C1"]
    assert machine.loads == ["A", "B", "C"]


def test_one_load_serves_all_that_wait_for_it():
    machine = Machine()
    for number in range(5):
        machine.ask(f"A{number}")
    machine.wait(LOAD_S)
    assert machine.loads == ["A"]
    assert machine.served == ["A0", "A1"]  # as many as it has slots, and the others as those end
    machine.finish("A0", "A1")
    assert machine.served == ["A0", "A1", "A2", "A3"]


def test_requests_of_a_loaded_model_pass_one_that_waits_for_no_longer_than_the_bound():
    machine = loaded("A", swap_wait_s=10.0)
    machine.ask("A1")
    machine.ask("B1")
    machine.wait(9.9)
    assert machine.ask("A2") == "A"
    machine.finish("A1")
    machine.wait(0.2)
    assert machine.ask("A3") is None  # its turn is over: B1 is first
    machine.finish("A2")
    machine.wait(LOAD_S)
    assert machine.bound == {"B1": "B"}
    machine.finish("B1")
    machine.wait(LOAD_S)
    assert machine.served == ["A1", "A2", "B1", "A3"]


def test_an_idle_model_is_kept_for_requests_that_come_sooner_than_it_could_be_loaded_again_as_long_as_a_load_takes():
    machine = loaded("A", swap_wait_s=10.0)
    for number in range(4):  # one client after another, each as soon as it has its answer
        assert machine.ask(f"A{number}") == "A"
        if number == 2:
            machine.ask("B0")
        machine.wait(1.0)
        machine.finish(f"A{number}")
        if number < 3:
            assert machine.state("A") == "ready"
            machine.wait(0.5)
    assert machine.loads == ["B"]  # which has waited for 2.5 s
    machine.wait(LOAD_S)
    assert machine.bound == {"B0": "B"}


def test_what_is_before_a_waiting_request_in_the_policys_order_is_served_before_it_after_the_bound_too():
    machine = loaded("A", policy="priority", swap_wait_s=0.0)
    machine.ask("A1", priority=1)
    machine.ask("B1", priority=1)
    machine.wait(1.0)
    assert machine.ask("A2", priority=2) is None
    assert machine.ask("A3", priority=0) == "A"


def test_each_load_has_a_turn_so_that_no_load_serves_a_single_request_under_pressure():
    machine = loaded("A", swap_wait_s=10.0)
    machine.ask("A0")
    for number in range(4):
        machine.ask(f"B{number}")
        machine.ask(f"C{number}")
    machine.wait(30.0)  # all have waited for longer than the bound
    machine.finish("A0")
    machine.wait(LOAD_S)
    machine.finish("B0", "B1")
    machine.finish("B2", "B3")
    machine.wait(LOAD_S)  # more may come, as those did
    machine.wait(LOAD_S)
    assert machine.served == ["A0", "B0", "B1", "B2", "B3", "C0", "C1"]


def test_the_least_recently_used_idle_model_makes_room_and_a_busy_one_never_does():
    machine = loaded("A", "B", memory=2)
    machine.wait(1.0)
    machine.ask("A1")
    machine.finish("A1")  # B is the one that was not used for longer
    machine.ask("C1")
    assert (machine.state("A"), machine.state("B")) == ("ready", "unloaded")
    machine.wait(LOAD_S)
    machine.ask("A2")
    assert machine.ask("B1") is None
    machine.wait(100.0)
    assert {machine.state("A"), machine.state("C")} == {"ready"}  # both are busy
    machine.finish("A2")
    assert (machine.state("A"), machine.state("C")) == ("unloaded", "ready")


def test_models_that_fit_together_are_loaded_together_and_a_small_one_takes_no_memory_of_one_before_it():
    machine = Machine(memory=10, sizes={"A": 6, "B": 4, "C": 8, "D": 2})
    machine.ask("A1")
    machine.ask("B1")
    assert machine.loads == ["A", "B"]
    machine.wait(LOAD_S)
    machine.ask("C1")  # needs what both have
    machine.finish("B1")
    assert machine.ask("D1") is None
    assert machine.state("B") == "ready"  # alone it makes no room for C
    machine.finish("A1")
    machine.wait(LOAD_S)
    assert sorted(machine.loads[2:]) == ["C", "D"]
    assert machine.bound == {"C1": "C", "D1": "D"}  # D took what C leaves


def test_a_pinned_model_is_loaded_at_the_start_and_stays():
    machine = Machine(memory=2, models={"A": {"pinned": True}})
    machine.do(machine.core.tick(0.0))
    machine.wait(LOAD_S)
    assert machine.loads == ["A"]
    for request_id in ("B1", "C1", "B2"):
        machine.ask(request_id)
        machine.wait(LOAD_S)
        machine.finish(request_id)
    assert machine.state("A") == "ready"
    with pytest.raises(InvalidRequest, match="'A' is pinned"):
        machine.core.unload_asked("A", machine.now)


def test_an_idle_model_is_put_out_after_its_keep_alive():
    machine = Machine(models={"A": {"keep_alive_s": 5.0}})
    machine.ask("A1")
    machine.wait(LOAD_S + 20.0)
    machine.finish("A1")
    (view, *_) = machine.core.view(machine.now).models
    assert (view.state, view.expires_in_s) == ("ready", 5.0)
    machine.wait(4.9)
    assert machine.state("A") == "ready"
    machine.wait(0.2)
    assert machine.state("A") == "unloaded"


def test_a_request_says_how_long_its_model_is_kept_until_it_is_put_out():
    machine = Machine(models={"A": {"keep_alive_s": 5.0}})
    machine.ask("A1", keep_alive_s=0.0)
    machine.wait(LOAD_S)
    machine.ask("A2", keep_alive_s=-1.0)
    machine.finish("A1", "A2")
    machine.wait(1000.0)
    assert machine.state("A") == "ready"
    machine.ask("A3", keep_alive_s=0.0)
    machine.finish("A3")
    assert machine.state("A") == "unloaded"
    machine.ask("A4")  # its own again
    machine.wait(LOAD_S)
    machine.finish("A4")
    machine.wait(4.9)
    assert machine.state("A") == "ready"


def test_an_administrator_loads_and_unloads():
    machine = Machine(memory=2)
    machine.do(machine.core.load_asked("A", 3.0, 0.0))
    machine.wait(LOAD_S + 2.9)
    assert machine.state("A") == "ready"
    machine.ask("A1")
    machine.do(machine.core.unload_asked("A", machine.now))
    assert machine.state("A") == "ready"  # until it has answered
    machine.finish("A1")
    assert machine.state("A") == "unloaded"
    with pytest.raises(InvalidRequest, match="there is no model 'X'; there are: A, B, C"):
        machine.core.load_asked("X", None, machine.now)


def test_a_model_that_cannot_load_fails_those_that_wait_for_it_and_is_tried_again_later():
    machine = Machine(memory=2)
    machine.ask("A1")
    machine.ask("B1")
    machine.loading.pop("A")
    machine.do(machine.core.load_failed("A", "exit code 1: no such file", 1.0))
    assert "cannot be loaded: exit code 1: no such file" in str(machine.refused["A1"].error)
    machine.ask("A2")  # at once: it would fail alike
    assert "no such file" in str(machine.refused["A2"].error)
    machine.wait(LOAD_S)
    assert machine.bound == {"B1": "B"}
    machine.ask("A3")
    machine.wait(LOAD_S)
    assert machine.bound == {"B1": "B", "A3": "A"}
    assert machine.loads == ["A", "B", "A"]


def test_a_model_that_dies_while_it_serves_is_started_again_and_goes_on():
    machine = Machine()
    machine.ask("A1", can_resume=True)
    machine.wait(LOAD_S)
    machine.core.progressed("A1", 3, machine.now)
    machine.do(machine.core.left("A", machine.now, returns=True))
    assert machine.state("A") == "loading"
    machine.do(machine.core.joined(facts_of("A", State.STARTING, fingerprint=None), machine.now))
    machine.do(machine.core.joined(facts_of("A"), machine.now + 1.0))
    assert machine.bound == {"A1": "A"}
    assert machine.loads == ["A"]


def test_a_model_that_tells_other_names_than_its_own_is_asked_by_both():
    machine = Machine(models={"A": {"names": ("double",)}})
    machine.ask("A1")
    machine.do(machine.core.joined(replace(facts_of("A"), models=("double",)), machine.now))
    machine.arrive("other", model="double")
    assert machine.bound == {"A1": "A", "other": "A"}


def test_models_that_memory_can_never_hold_are_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"model B needs 8 B .* may take 5 B: raise --models-memory-bytes"):
        Machine(memory=5, sizes={"A": 1, "B": 8})
    with pytest.raises(ConfigError, match=r"model B needs 3 B .*, and pinned models 3 B beside it"):
        Machine(memory=5, sizes={"A": 3, "B": 3}, models={"A": {"pinned": True}})
    with pytest.raises(ConfigError, match="both answer to 'B'"):
        Machine(memory=5, models={"A": {"names": ("B",)}})


def test_a_recorded_core_of_several_models_decides_the_same_again():
    machine = Machine(memory=2)
    recording = Recording(machine.core)
    for request_id in ("A1", "B1", "C1", "A2"):
        machine.ask(request_id)
        machine.wait(3.0)
    machine.finish("B1")
    machine.wait(30.0)
    machine.finish("A1", "A2")
    machine.wait(3.0)
    assert machine.loads == ["A", "B", "C"]
    recording.assert_replays()
