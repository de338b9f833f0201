"""Prefix watch: which waiting requests gain when a block enters the prefix cache; scored again a few at a time."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice

from maitred.policy.queued import Queued


class PrefixWatch:
    """Each waiting request watches the first block of its prompt that is not cached; losses are found at the head."""

    def __init__(self) -> None:
        self._watchers: dict[Hashable, dict[str, None]] = {}  # block hash -> ids; dicts, because sets have no order
        self._watched: dict[str, Hashable] = {}
        self._gaining: dict[str, None] = {}  # ids whose score is too low, first come first served

    def watch(self, request: Queued, num_cached_blocks: int) -> None:
        self.forget(request.request_id)
        if num_cached_blocks < len(request.block_hashes):
            digest = request.block_hashes[num_cached_blocks]
            self._watched[request.request_id] = digest
            self._watchers.setdefault(digest, {})[request.request_id] = None

    def forget(self, request_id: str) -> None:
        """Forget a request that waits no more, or is scored anew."""
        self._gaining.pop(request_id, None)
        digest = self._watched.pop(request_id, None)
        if digest is not None:
            watchers = self._watchers[digest]
            del watchers[request_id]
            if not watchers:
                del self._watchers[digest]

    def cached(self, digest: Hashable) -> None:
        """A block can be found from now on."""
        watchers = self._watchers.pop(digest, None)
        if watchers is not None:
            for request_id in watchers:
                del self._watched[request_id]
            self._gaining |= watchers

    def score_again(self, request_id: str) -> None:
        """Score a request that is not watched."""
        self._gaining[request_id] = None

    def gaining(self, limit: int) -> list[str]:
        """The next ids to be scored again; `watch` or `forget` each of them."""
        return list(islice(self._gaining, limit))

    def __len__(self) -> int:
        """Ids it knows of."""
        return len(self._watched) + len(self._gaining)
