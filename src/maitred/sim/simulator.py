"""One simulated engine and its clients.

`execute` is an event at now + step_time(plan); nothing else differs from the live engine. Requests that come while a
step runs are taken in when it has ended, as the engine's thread does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from maitred.core.cost_model import CostModel
from maitred.core.errors import MaitredError
from maitred.core.step import RequestProgress
from maitred.gate.admission import AdmissionController
from maitred.scheduler.engine_core import StepObserver
from maitred.scheduler.scheduler import Scheduler
from maitred.sim.clients import Clients, SimulatedRequest
from maitred.sim.engine import EngineSetup, SimulatedEngine, SlownessAt
from maitred.sim.jitter import Jitter
from maitred.sim.results import Results
from maitred.sim.tensors import TensorSimulation
from maitred.sim.workload import Arrival
from maitred.tenancy.tenant import Tenant


class Simulation:
    """One engine and one workload; see `SimulatedEngine` and `Clients` for what may be given.

    A request's time outside the engine is that of `results.edge`; the engine's decisions do not depend on it.
    """

    def __init__(
        self,
        setup: EngineSetup,
        cost_model: CostModel,
        results: Results,
        *,
        jitter: Jitter | None = None,
        slowness: SlownessAt | None = None,
        tenants: Mapping[str, Tenant] | None = None,
        admission: AdmissionController | None = None,
        observer: StepObserver | None = None,
        tensors: Callable[[Scheduler], TensorSimulation] | None = None,
    ) -> None:
        """Simulate one engine; `tensors` puts tensor models, and their requests, beside the language model."""
        self.results = results
        self._engine = SimulatedEngine(setup, cost_model, results, jitter=jitter, slowness=slowness, observer=observer)
        self.scheduler, self._core, self._clock = self._engine.scheduler, self._engine.core, self._engine.clock
        self._clients = Clients(results, setup.block_size, tenants, admission)
        self.tensors = None if tensors is None else tensors(self.scheduler)
        if self.tensors is not None:
            self._engine.run_beside(self.tensors)
        self._shed: list[RequestProgress] = []  # since the last step; told along with the next one's progress

    def run(self, arrivals: Iterator[Arrival]) -> Results:
        """Run until the last request has ended; `arrivals` is read as time goes on, one ahead."""
        clients, core, engine, clock = self._clients, self._core, self._engine, self._clock
        clients.begin(arrivals)
        while core.has_work or self._next_at is not None:
            if not core.has_work and (next_at := self._next_at) is not None:
                engine.wait_until(next_at)
            now = clock.now()
            if self.tensors is not None:
                self.tensors.run_until(now)
            while (next_at := clients.next_at) is not None and next_at <= now:
                self._take_in(clients.take())
            if core.has_work:
                progress, self._shed = self._shed, []
                self._settle(progress + core.step())
                engine.rest()
        self._settle(self._shed)
        return self.results

    @property
    def _next_at(self) -> float | None:
        """Return when the next request comes, or a batch ends."""
        if self.tensors is None:
            return self._clients.next_at
        return min((at for at in (self._clients.next_at, self.tensors.next_at) if at is not None), default=None)

    def _take_in(self, live: SimulatedRequest) -> None:
        try:
            for request_id in self._clients.pass_gate(live):
                shed = self._core.shed(request_id)
                self._shed += [shed] if shed is not None else []
            self._engine.add(live)
        except MaitredError as error:
            self._clients.refused(live, error, self._clock.now())
        self.results.queue_length.add(live.arrival.at, len(self._engine.live) - self.scheduler.num_running)

    def _settle(self, progress: list[RequestProgress]) -> None:
        if progress:
            self._clients.progressed(progress, self._core.num_queued, self._clock.now())
        for told in progress:
            if told.finish_reason is not None:
                self._clients.ended(self._engine.live.pop(told.request_id), told.finish_reason, self._clock.now())
