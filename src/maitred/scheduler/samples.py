"""Samples of one prompt (n > 1): who computes the prompt, who waits for it, and whose blocks can be shared."""

from __future__ import annotations

from dataclasses import dataclass, field

from maitred.request import Request


@dataclass(slots=True, eq=False)
class _Family:
    living: int = 0
    leader: Request | None = None  # computes the prompt, for the first time
    prompt_computed: bool = False
    sources: dict[str, Request] = field(default_factory=dict)  # running, prompt computed: may be forked


class SampleFamilies:
    """The families that have a living member. Requests without `parent_id` are in none.

    All stand in the queue; the first to leave it leads. A sample that asks for prompt_logprobs computes its own prompt,
    so it is in none either.
    """

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._led: dict[str, _Family] = {}  # those that have a leader

    @property
    def num_awaiting(self) -> int:
        """Those that wait for their leader: before its prompt is computed no other member runs."""
        return sum(family.living - 1 for family in self._led.values())

    def awaits_leader(self, request: Request) -> bool:
        """Whether another sample is computing the prompt of this one, which waits."""
        if request.parent_id is None or not self._led or not _shares(request):
            return False
        family = self._led.get(request.parent_id)
        return family is not None and family.leader is not request

    def joined(self, request: Request) -> None:
        if request.parent_id is not None and _shares(request):
            self._families.setdefault(request.parent_id, _Family()).living += 1

    def started(self, request: Request) -> None:
        family = self._family_of(request)
        if family is not None and not family.prompt_computed:
            assert request.parent_id is not None
            family.leader, self._led[request.parent_id] = request, family

    def prompt_computed(self, request: Request) -> None:
        """The request's prompt is in the cache."""
        family = self._family_of(request)
        if family is not None:
            self._stop_leading(request, family)
            family.sources[request.request_id] = request
            family.prompt_computed = True

    def preempted(self, request: Request) -> None:
        """Its blocks are gone, so nobody can fork it."""
        family = self._family_of(request)
        if family is not None:
            self._stop_leading(request, family)
            family.sources.pop(request.request_id, None)

    def left(self, request: Request) -> None:
        """The request ended."""
        family = self._family_of(request)
        if family is None:
            return
        self.preempted(request)
        family.living -= 1
        if family.living == 0:
            assert request.parent_id is not None
            del self._families[request.parent_id]

    def source_for(self, request: Request) -> Request | None:
        """A running sample of the same prompt whose blocks can be shared, the longest-standing one."""
        family = self._family_of(request)
        if family is None:
            return None
        return next(iter(family.sources.values()), None)

    def _family_of(self, request: Request) -> _Family | None:
        if request.parent_id is None or not _shares(request):
            return None
        return self._families.get(request.parent_id)

    def _stop_leading(self, request: Request, family: _Family) -> None:
        if family.leader is request:
            assert request.parent_id is not None
            family.leader = None
            del self._led[request.parent_id]


def _shares(request: Request) -> bool:
    return request.sampling.prompt_logprobs is None
