"""Numbers of a server's workers that follow the load: which engines of a role run, and which give their memory back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from maitred.bounds import Bounds
from maitred.cluster.autoscale import AutoscaleConfig, Autoscaler
from maitred.cluster.disagg import Role
from maitred.cluster.roles import RoleScaling
from maitred.cluster.worker import Worker
from maitred.errors import EngineDead

logger = logging.getLogger(__name__)


def scaling_of(bounds: dict[str, Bounds], ttft_s: float | None) -> dict[Role, RoleScaling]:
    """Of prefill and decode workers, where the number of either follows the load; `ttft_s` is what is promised."""
    if not any(each.low < each.high for each in bounds.values()):
        return {}
    config = AutoscaleConfig(ttft_objective_s=ttft_s)
    return {Role(role): RoleScaling(each, Autoscaler(config)) for role, each in bounds.items()}


class WorkerNumbers:
    """Starts and stops workers as the core says. On the event loop.

    Without scaling all of them run. A stopped worker is parked: asleep or not begun, unknown to the core and asked for
    nothing; each start gives it the name that the core has for it.
    """

    def __init__(self, workers: Sequence[Worker], bounds: dict[str, Bounds], begin: Callable[[Worker], None]) -> None:
        """`begin` starts an engine that never was."""
        self._workers, self._begin = workers, begin
        self._tasks: set[asyncio.Task[None]] = set()
        for role, each in bounds.items():
            here = [worker for worker in workers if worker.role == role]
            for number, worker in enumerate(here, start=1):
                worker.name, worker.is_scaled = f"{role}-{number}", True
                worker.is_parked = number > each.low

    def started(self, name: str) -> Worker | None:
        """One is to run under this name; None where there is no other."""
        role = name.rpartition("-")[0]
        worker = next((each for each in self._workers if each.is_parked and each.role == role), None)
        if worker is None:
            return None
        logger.info("worker %d, %s, begins", worker.number, role)
        worker.name, worker.is_parked = name, False
        if worker.is_begun:
            worker.client.supervisor.sleep.wake()
        else:
            self._begin(worker)
        return worker

    def stopped(self, name: str) -> Worker | None:
        """One that has nothing any more gives its memory back."""
        worker = next((each for each in self._workers if each.name == name and not each.is_parked), None)
        if worker is None:
            return None
        logger.info("worker %d, %s, is not needed, and sleeps", worker.number, worker.role)
        worker.is_parked, worker.is_up, worker.told = True, False, None
        task = asyncio.get_running_loop().create_task(self._sleep(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return worker

    async def _sleep(self, worker: Worker) -> None:
        try:
            await worker.client.sleep()
        except EngineDead:
            logger.debug("worker %d was gone before it slept", worker.number)
