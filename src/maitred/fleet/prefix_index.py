"""Which replica has which prefix, as replicas tell; of foreign servers and of prompts, what usage teaches. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import NamedTuple

from maitred.fleet.fleet_request import AnswerUsage, FleetRequest, TokenRatio
from maitred.fleet.replicas import FleetReplica, Kind
from maitred.policy.predictor import Predictor, bounded_prediction


class Hit(NamedTuple):
    """The replicas (bits) that hold just the first `num_keys` keys of a request."""

    num_keys: int
    replicas: int


class PrefixIndex:
    """Takes some 150 B for a key that one replica holds, 330 B for one that two hold.

    A replica that holds a key holds those before it in the chain, which replicas and `ForeignHistory` see to; so a
    look-up is a binary search, not a walk: in an index of a million keys each look at one is a cache miss.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, int] = {}  # key -> bits
        self._keys: dict[int, set[int]] = {}  # bit number -> its keys

    @property
    def num_keys(self) -> int:
        """Different ones."""
        return len(self._replicas)

    def num_keys_of(self, bit: int) -> int:
        return len(self._keys.get(bit, ()))

    def holders(self, key: int) -> int:
        """Replicas that hold the key, as bits."""
        return self._replicas.get(key, 0)

    def hits(self, keys: Sequence[int], mask: int) -> list[Hit]:
        """How many of the first `keys` each replica in `mask` (bits) has: deepest first, without those that have none.

        Looks at about log2(len(keys)) keys for each hit that it finds.
        """
        found: list[Hit] = []
        ranges = [(0, len(keys), mask)]  # each of these replicas has at least so many keys, and at most so many
        holders = self._replicas.get
        while ranges:
            low, high, replicas = ranges.pop()
            while low < high:
                middle = (low + high + 1) >> 1
                deeper = holders(keys[middle - 1], 0) & replicas
                if not deeper:
                    high = middle - 1
                    continue
                if deeper != replicas:
                    ranges.append((low, middle - 1, replicas ^ deeper))
                low, replicas = middle, deeper
            if low and replicas:
                found.append(Hit(low, replicas))
        return found

    def stored(self, bit: int, keys: Iterable[int]) -> None:
        """Replica number `bit` holds these from now on, if it did not."""
        replicas, flag = self._replicas, 1 << bit
        own = self._keys.setdefault(bit, set())
        for key in keys:
            replicas[key] = replicas.get(key, 0) | flag
            own.add(key)

    def removed(self, bit: int, keys: Iterable[int]) -> None:
        """The replica holds these keys no more."""
        own = self._keys.get(bit, set())
        for key in keys:
            if key in own:
                own.discard(key)
                self._take_from(key, 1 << bit)

    def forgot(self, bit: int) -> None:
        """The replica holds nothing; takes some 0.2 us for each key that it held."""
        for key in self._keys.pop(bit, ()):
            self._take_from(key, 1 << bit)

    def _take_from(self, key: int, flag: int) -> None:
        left = self._replicas[key] & ~flag
        if left:
            self._replicas[key] = left
        else:
            del self._replicas[key]

    def check_invariants(self) -> None:
        """Asserts that both directions agree."""
        by_key: dict[int, int] = {}
        for bit, keys in self._keys.items():
            for key in keys:
                by_key[key] = by_key.get(key, 0) | 1 << bit
        assert by_key == self._replicas


MAX_KEYS = 64 * 1024  # of one server: 4 million tokens of English
MIN_KEYS = 64
# A server's blocks and templates are not known, so that a little less than what was expected proves nothing.
DOUBT_KEYS, DOUBT_SHARE = 2, 0.25

MAX_RATIOS = 256  # models whose bytes for a token are known; those used least recently are forgotten


class Lessons:
    """Lessons of the fleet as a whole."""

    def __init__(self, predictor: Predictor | None, index: PrefixIndex) -> None:
        """`predictor` is None where the policy reads no predictions."""
        self.predictor = predictor
        self._history = ForeignHistory(index)
        self._ratios: OrderedDict[str | None, TokenRatio] = OrderedDict()
        self._expected: dict[str, Expected] = {}  # of requests in flight to foreign servers

    def estimate(self, request: FleetRequest) -> None:
        """Estimate what a new request will cost."""
        request.num_inputs = request.num_counted or self._ratio_of(request.model).tokens(request.num_bytes)
        if self.predictor is not None:
            request.expected_outputs = bounded_prediction(self.predictor, request)

    def sent(self, request: FleetRequest, replica: FleetReplica) -> None:
        if replica.facts.kind is Kind.FOREIGN and request.keys:
            self._expected[request.request_id] = self._history.sent(replica.bit, request.keys)

    def sent_elsewhere(self, keys: Sequence[int], replica: FleetReplica) -> None:
        """Another router sent a prompt with these keys there."""
        if replica.facts.kind is Kind.FOREIGN and keys:
            self._history.sent(replica.bit, keys)

    def told(self, request: FleetRequest, replica: FleetReplica, usage: AnswerUsage) -> None:
        """The usage of its whole answer."""
        if usage.num_prompt_tokens:
            self._ratio_of(request.model).told(request.num_bytes, usage.num_prompt_tokens)
        expected = self._expected.get(request.request_id)
        if expected is not None and usage.num_cached_tokens is not None and usage.num_prompt_tokens:
            self._history.told(
                replica.bit, expected, cached_tokens=usage.num_cached_tokens, prompt_tokens=usage.num_prompt_tokens
            )
        if self.predictor is not None and usage.complete and request.num_outputs:
            self.predictor.observe(request)

    def left_replica(self, request: FleetRequest) -> None:
        """The request is in flight no more."""
        self._expected.pop(request.request_id, None)

    def forgot(self, replica: FleetReplica) -> None:
        """The replica's cache is gone."""
        self._history.forgot(replica.bit)

    def _ratio_of(self, model: str | None) -> TokenRatio:
        ratio = self._ratios.get(model)
        if ratio is None:
            ratio = self._ratios[model] = TokenRatio()
            if len(self._ratios) > MAX_RATIOS:
                self._ratios.popitem(last=False)
        elif len(self._ratios) > 1:
            self._ratios.move_to_end(model)
        return ratio


class Expected(NamedTuple):
    """Keys that a request was thought to find, to be compared with its usage."""

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
    """Prefixes of servers that tell nothing of their caches: what was sent there, the least recently used forgotten
    first. `cached_tokens` of their usage, where they give it, says how long their caches really remember. Keeps `index`
    for those servers; a chain is forgotten from its end, as the index wants it.
    """

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
        """Usage of a request came. Where much was missing, all that was used no later than that is gone too."""
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
        """The server was started anew, or is here no more."""
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
