"""What part of each request's time went into the host's work of steps: scheduling, sampling's bookkeeping, the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from maitred.step import NewRequest, RequestProgress


class HostShares:
    """Keeps, for each request in the engine, the host's total time at its first step and at its first token.

    A step that starts nobody, ends nobody and has nobody before its first token costs one comparison.
    """

    def __init__(self) -> None:
        self._starting: dict[str, float] = {}  # s, total when first scheduled; no token yet
        self._decoding: dict[str, tuple[float, float]] = {}  # s, of its prefill; total at its first token

    def started(self, new_requests: Iterable[NewRequest], host_s: float) -> None:
        """These are in a step, maybe again."""
        for new in new_requests:
            if new.request_id not in self._decoding:
                self._starting.setdefault(new.request_id, host_s)

    def told(self, progress: Sequence[RequestProgress], host_s: float) -> list[RequestProgress]:
        """`progress`, with the host's share in the timing of those that ended."""
        if self._starting:
            for p in progress:
                if p.new_token_ids and p.request_id in self._starting:
                    self._decoding[p.request_id] = (host_s - self._starting.pop(p.request_id), host_s)
        return [self._ended(p, host_s) if p.finish_reason is not None else p for p in progress]

    def _ended(self, progress: RequestProgress, host_s: float) -> RequestProgress:
        request_id = progress.request_id
        started = self._starting.pop(request_id, None)
        prefill_s, first_token = self._decoding.pop(request_id, (0.0, host_s))
        if started is not None:  # no token came
            prefill_s = host_s - started
        if progress.timing is None:
            return progress
        return progress._replace(timing=progress.timing.with_schedule(prefill_s, host_s - first_token))
