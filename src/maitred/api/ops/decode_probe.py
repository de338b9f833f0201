"""One token through the whole engine, to see whether it still can: shared by everybody who asks at the same time."""

from __future__ import annotations

import asyncio
import itertools

from maitred.clock import Clock
from maitred.engine.intake import ServedModel, make_requests
from maitred.errors import EngineDead, GenerationFailed, Unavailable
from maitred.gate.gate import Ask, Gate
from maitred.replica import Replica
from maitred.request import FinishReason, SamplingParams
from maitred.tenancy.caller import anybody
from maitred.tenancy.tenant import LEAST_URGENT


class DecodeProbe:
    """Touched by the event loop alone. A flood of questions costs the engine one token at a time."""

    def __init__(self, replica: Replica, model: ServedModel, clock: Clock, gate: Gate, *, timeout_s: float) -> None:
        self._replica, self._model, self._clock, self._gate = replica, model, clock, gate
        self._timeout_s = timeout_s
        self._under_way: asyncio.Task[float] | None = None
        self._numbers = itertools.count()

    async def seconds(self) -> float:
        """What one token of the least urgent request took, queue included.

        Raises EngineDead, Overloaded when the gate lets nobody of that class in, Unavailable when it took too long, and
        GenerationFailed.
        """
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.create_task(self._decode())
        return await asyncio.shield(self._under_way)

    async def _decode(self) -> float:
        began_at = self._clock.now()
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        (request,) = make_requests(
            self._model,
            [0],
            sampling,
            request_id=f"health-decode-{next(self._numbers)}",
            now=began_at,
            priority=LEAST_URGENT,
        )
        lease = self._gate.enter(anybody(), Ask(num_samples=0, priority=LEAST_URGENT), began_at)
        self._gate.admit(lease, [request], began_at)  # whose terms it is not under: it has a limit of its own
        try:
            async with asyncio.timeout(self._timeout_s):
                async for progress in self._replica.submit(request):
                    if progress.finish_reason is FinishReason.LENGTH:
                        return self._clock.now() - began_at
                    if progress.finish_reason is not None:
                        raise GenerationFailed(progress.error or f"it ended with {progress.finish_reason.value}")
        except TimeoutError:
            raise Unavailable(f"no token in {self._timeout_s:g} s") from None
        finally:
            self._replica.abort(request.request_id)  # ignored when it has ended
            lease.end(1)
        raise EngineDead("the engine gave no token and no reason")
