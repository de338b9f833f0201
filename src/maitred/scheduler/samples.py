"""Samples of one prompt (n > 1): who computes the prompt, who waits for it, and whose blocks can be shared."""

from __future__ import annotations

from dataclasses import dataclass, field

from maitred.request import Request


@dataclass(slots=True, eq=False)
class _Family:
    leader: Request  # computes the prompt first
    prompt_computed: bool = False
    waiting: list[Request] = field(default_factory=list)  # for the leader, in order of arrival
    living: int = 1
    sources: dict[str, Request] = field(default_factory=dict)  # running, prompt computed: may be forked


class SampleFamilies:
    """The families that have a living member. Requests without `parent_id` are in none.

    A sample that asks for prompt_logprobs computes its own prompt, so it is in none either.
    """

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def waiting(self) -> list[Request]:
        return [request for family in self._families.values() for request in family.waiting]

    def join(self, request: Request) -> bool:
        """Takes in a new request; True if it has to wait for its leader's prompt."""
        if not _shares(request):
            return False
        family = self._families.get(_family_name(request))
        if family is None:
            self._families[_family_name(request)] = _Family(request)
            return False
        family.living += 1
        if family.prompt_computed:
            return False
        family.waiting.append(request)
        self._num_waiting += 1
        return True

    def prompt_computed(self, request: Request) -> list[Request]:
        """The request's prompt is in the cache; returns those that waited for it."""
        family = self._family_of(request)
        if family is None:
            return []
        family.sources[request.request_id] = request
        family.prompt_computed = True
        return self._release(family)

    def preempted(self, request: Request) -> None:
        """Its blocks are gone, so nobody can fork it."""
        family = self._family_of(request)
        if family is not None:
            family.sources.pop(request.request_id, None)

    def left(self, request: Request) -> Request | None:
        """The request ended. If others wait for it, returns the one that computes the prompt in its place."""
        family = self._family_of(request)
        if family is None:
            return None
        family.sources.pop(request.request_id, None)
        family.living -= 1
        if family.living == 0:
            del self._families[_family_name(request)]
        if request in family.waiting:
            family.waiting.remove(request)
            self._num_waiting -= 1
        elif request is family.leader and family.waiting:
            family.leader = family.waiting.pop(0)
            self._num_waiting -= 1
            return family.leader
        return None

    def source_for(self, request: Request) -> Request | None:
        """A running sample of the same prompt whose blocks can be shared, the longest-standing one."""
        family = self._family_of(request)
        if family is None:
            return None
        return next(iter(family.sources.values()), None)

    def _family_of(self, request: Request) -> _Family | None:
        if request.parent_id is None or not _shares(request):
            return None
        return self._families.get(_family_name(request))

    def _release(self, family: _Family) -> list[Request]:
        released, family.waiting = family.waiting, []
        self._num_waiting -= len(released)
        return released


def _shares(request: Request) -> bool:
    return request.parent_id is not None and request.sampling.prompt_logprobs is None


def _family_name(request: Request) -> str:
    assert request.parent_id is not None
    return request.parent_id
