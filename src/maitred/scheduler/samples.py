"""Samples of one prompt (n > 1): which one computes the prompt, which wait for it, and which blocks can be shared."""

from __future__ import annotations

from dataclasses import dataclass, field

from maitred.core.request import RequestState


@dataclass(slots=True, eq=False)
class _SampleGroup:
    members: dict[str, RequestState] = field(default_factory=dict)  # the living
    leader: RequestState | None = None  # computes the prompt, for the first time
    prompt_computed: bool = False
    sources: dict[str, RequestState] = field(default_factory=dict)  # running, prompt computed: may be forked


class SampleGroups:
    """The sample_groups that have a living member. Requests without `parent_id` are in none.

    All stand in the queue; the first to leave it leads. A sample that asks for prompt_logprobs computes its own prompt,
    so it is in none either.
    """

    def __init__(self) -> None:
        self.groups: dict[str, _SampleGroup] = {}  # by parent
        self._led: dict[str, _SampleGroup] = {}  # those that have a leader

    @property
    def num_awaiting(self) -> int:
        """Number of samples that wait for their leader: before its prompt is computed no other member runs. Without
        those of the class background.
        """
        led = (group for group in self._led.values() if group.leader is not None and not group.leader.background)
        return sum(len(group.members) - 1 for group in led)

    def awaits_leader(self, request: RequestState) -> bool:
        """Return whether another sample is computing the prompt of this one, which waits."""
        if request.spec.parent_id is None or not self._led or not _shares(request):
            return False
        group = self._led.get(request.spec.parent_id)
        return group is not None and group.leader is not request

    def joined(self, request: RequestState) -> None:
        if request.spec.parent_id is not None and _shares(request):
            self.groups.setdefault(request.spec.parent_id, _SampleGroup()).members[request.request_id] = request

    def started(self, request: RequestState) -> None:
        group = self._group_of(request)
        if group is not None and not group.prompt_computed:
            assert request.spec.parent_id is not None
            group.leader, self._led[request.spec.parent_id] = request, group

    def prompt_computed(self, request: RequestState) -> None:
        """The request's prompt is in the cache."""
        group = self._group_of(request)
        if group is not None:
            self._stop_leading(request, group)
            group.sources[request.request_id] = request
            group.prompt_computed = True

    def was_computed(self, request: RequestState) -> bool:
        """Return whether a sample has computed the prompt of this one, and counted it."""
        group = self._group_of(request)
        return group is not None and group.prompt_computed

    def preempted(self, request: RequestState) -> None:
        """Note that the sample's blocks are gone, so it cannot be forked."""
        group = self._group_of(request)
        if group is not None:
            self._stop_leading(request, group)
            group.sources.pop(request.request_id, None)

    def left(self, request: RequestState) -> None:
        """The request ended."""
        group = self._group_of(request)
        if group is None:
            return
        self.preempted(request)
        del group.members[request.request_id]
        if not group.members:
            assert request.spec.parent_id is not None
            del self.groups[request.spec.parent_id]

    def fellows(self, request: RequestState) -> list[RequestState]:
        """Return the other samples of its prompt before any has computed it or begun to: all of them wait."""
        group = self._group_of(request)
        if group is None or group.prompt_computed or group.leader is not None:
            return []
        return [member for member in group.members.values() if member is not request]

    def source_for(self, request: RequestState) -> RequestState | None:
        """Return a running sample of the same prompt with blocks to share, the longest-standing one."""
        group = self._group_of(request)
        if group is None:
            return None
        return next(iter(group.sources.values()), None)

    def _group_of(self, request: RequestState) -> _SampleGroup | None:
        if request.spec.parent_id is None or not _shares(request):
            return None
        return self.groups.get(request.spec.parent_id)

    def _stop_leading(self, request: RequestState, group: _SampleGroup) -> None:
        if group.leader is request:
            assert request.spec.parent_id is not None
            group.leader = None
            del self._led[request.spec.parent_id]


def _shares(request: RequestState) -> bool:
    return request.spec.sampling.prompt_logprobs is None
