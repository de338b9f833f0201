"""What answers that came to no end cost: routers bill by it, and only the engine knows, a step after it let go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import add

from maitred.cluster.replica_events import Ended
from maitred.cluster.told_tokens import NOTHING, ToldUsage
from maitred.request import NO_CHARGES, Charges, RequestSpec
from maitred.step import RequestProgress

FORGOTTEN_S = 10.0  # after an answer broke off the engine has told of its samples, or never will


@dataclass(slots=True, eq=False)
class _Answer:
    request_id: str  # the router's
    running: set[str]  # ids of its samples that the engine has
    usage: ToldUsage = NOTHING
    broke_off: bool = False

    def add(self, charges: Charges) -> None:
        prompt, _, output = charges[:3]
        more = ToldUsage(prompt, charges.num_cached_tokens if prompt else 0, output, charges.compute_us)
        self.usage = ToldUsage(*map(add, self.usage, more))


class Unfinished:
    """Follows the answers for routers to the engine's last word on them. Belongs to the event loop."""

    def __init__(self, tell: Callable[[Ended], None]) -> None:
        self._tell = tell
        self._of: dict[str, _Answer] = {}  # by id of each sample that the engine has
        self._num_broken = 0

    @property
    def is_awaited(self) -> bool:
        """Whether somebody is still to be told of."""
        return self._num_broken > 0

    @contextmanager
    def following(self, request_id: str, specs: Iterable[RequestSpec], ended: frozenset[str]) -> Iterator[None]:
        """While the samples are answered; leaving it by an exception says that they came to no end. Those `ended` had
        done so elsewhere.
        """
        answer = _Answer(request_id, set())
        for spec in specs:
            if spec.request_id in ended and spec.resumed is not None:
                answer.add(spec.resumed.charges)
            else:
                answer.running.add(spec.request_id)
                self._of[spec.request_id] = answer
        try:
            yield
        except BaseException:
            self._broke_off(answer)
            raise
        finally:
            if not answer.broke_off:
                self._forget(answer)

    def progressed(self, progress: Sequence[RequestProgress]) -> None:
        """What the engine told of all requests at once."""
        if not self._of:
            return
        for item in progress:
            if item.finish_reason is not None and (answer := self._of.pop(item.request_id, None)) is not None:
                answer.running.discard(item.request_id)
                answer.add(item.charges or NO_CHARGES)
                self._tell_if_over(answer)

    def _broke_off(self, answer: _Answer) -> None:
        answer.broke_off = True
        self._num_broken += 1
        self._tell_if_over(answer)
        if answer.running:
            asyncio.get_running_loop().call_later(FORGOTTEN_S, self._give_up, answer)

    def _tell_if_over(self, answer: _Answer) -> None:
        if answer.broke_off and not answer.running:
            self._num_broken -= 1
            self._tell(Ended(answer.request_id, answer.usage))

    def _give_up(self, answer: _Answer) -> None:
        if answer.running:
            self._num_broken -= 1
            self._forget(answer)

    def _forget(self, answer: _Answer) -> None:
        for name in answer.running:
            self._of.pop(name, None)
        answer.running.clear()
