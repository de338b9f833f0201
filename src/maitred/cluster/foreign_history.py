"""Prefixes of servers that tell nothing of their caches: what was sent there, the least recently used forgotten first.

`cached_tokens` of their usage, where they give it, says how long their caches really remember.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import NamedTuple

from maitred.cluster.prefix_index import PrefixIndex

MAX_KEYS = 64 * 1024  # of one server: 4 million tokens of English
MIN_KEYS = 64
# A server's blocks and templates are not known, so that a little less than what was expected proves nothing.
DOUBT_KEYS, DOUBT_SHARE = 2, 0.25


class Expected(NamedTuple):
    """What a request was thought to find, to be compared with what its usage tells."""

    num_keys: int  # that were known
    num_all: int
    sent_at: tuple[tuple[int, int], ...]  # (from which key on, number of the request that used them last)


@dataclass(slots=True)
class _Server:
    used_by: OrderedDict[int, int] = field(
        default_factory=OrderedDict
    )  # key -> request that used it last; oldest first
    max_keys: int = MAX_KEYS
    num_requests: int = 0


class ForeignHistory:
    """Keeps `index` for the servers that are told of here. A chain is forgotten from its end, as the index wants it."""

    def __init__(self, index: PrefixIndex, max_keys: int = MAX_KEYS) -> None:
        """`max_keys` is of each server."""
        self._index, self._max_keys = index, max_keys
        self._servers: dict[int, _Server] = {}

    def sent(self, bit: int, keys: Sequence[int]) -> Expected:
        """A request with these keys goes to server number `bit`."""
        server = self._servers.get(bit)
        if server is None:
            server = self._servers[bit] = _Server(max_keys=self._max_keys)
        expected = _expected(server, keys)
        server.num_requests += 1
        for key in reversed(keys):
            server.used_by[key] = server.num_requests
            server.used_by.move_to_end(key)
        self._index.stored(bit, keys)
        if len(server.used_by) > server.max_keys:
            self._forget(bit, server, list(islice(server.used_by, len(server.used_by) - server.max_keys)))
        return expected

    def told(self, bit: int, expected: Expected, *, cached_tokens: int, prompt_tokens: int) -> None:
        """Its usage came. Where much was missing, all that was used no later than that is gone too."""
        server = self._servers.get(bit)
        if server is None or not expected.num_keys or prompt_tokens <= 0:
            return
        num_cached = expected.num_all * cached_tokens // prompt_tokens + DOUBT_KEYS
        if num_cached >= expected.num_keys * (1 - DOUBT_SHARE):
            server.max_keys = min(self._max_keys, server.max_keys + expected.num_all)
            return
        missing_since = [request for first, request in expected.sent_at if first <= num_cached][-1]
        gone = takewhile(lambda item: item[1] <= missing_since, server.used_by.items())
        self._forget(bit, server, [key for key, _ in gone])
        server.max_keys = min(self._max_keys, max(MIN_KEYS, len(server.used_by)))

    def forgot(self, bit: int) -> None:
        """It was started anew, or is here no more."""
        self._servers.pop(bit, None)
        self._index.forgot(bit)

    def _forget(self, bit: int, server: _Server, keys: Sequence[int]) -> None:
        for key in keys:
            del server.used_by[key]
        self._index.removed(bit, keys)


def _expected(server: _Server, keys: Sequence[int]) -> Expected:
    num_keys, runs = 0, list[tuple[int, int]]()
    for key in keys:
        request = server.used_by.get(key)
        if request is None:
            break
        if not runs or runs[-1][1] != request:
            runs.append((num_keys, request))
        num_keys += 1
    return Expected(num_keys, len(keys), tuple(runs))
