"""N-gram proposer: what followed the last tokens of a request when they were met before, in its prompt or its output.

As prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) and vLLM's `ngram` do, but the place is not searched
in each step: tokens are indexed as they come, by the hash chains with which deflate finds its matches (RFC 1951,
section 4). The longest match counts, of equals the last; and as in SuffixDecoding (arXiv:2411.04975) no more is drafted
than matched, since short matches are mostly chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from maitred.speculative.proposer import DraftAsk

LONGEST_MATCH = 16  # tokens; more is not looked at
MOST_PLACES = 16  # at which a match is tried, the last ones


class Match(NamedTuple):
    """The last tokens of a text are like `length` of an indexed one's, up to position `end`."""

    end: int
    length: int


class PairIndex:
    """Tokens that grow, and where each pair of neighbours was met before. O(1) a token."""

    __slots__ = ("_before", "_last", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._last: dict[int, int] = {}  # where a pair ends that was met last
        self._before: list[int] = []  # at each position: where the pair that ends here did before; -1 is nowhere

    def extend(self, token_ids: Iterable[int]) -> None:
        tokens, last, before = self.tokens, self._last, self._before
        previous = tokens[-1] if tokens else -1  # no token is -1, so its pair is never looked for
        for position, token in enumerate(token_ids, len(tokens)):
            pair = previous << 32 | token
            before.append(last.get(pair, -1))
            last[pair] = position
            tokens.append(token)
            previous = token

    def match(self, text: Sequence[int]) -> Match | None:
        """Return where the end of `text` was met, its last two tokens at least, with tokens after it."""
        if len(text) < 2:
            return None
        place, best = self._last.get(text[-2] << 32 | text[-1], -1), Match(-1, 0)
        if place == len(self.tokens) - 1:
            place = self._before[place]
        for _ in range(MOST_PLACES):
            if place < 0 or best.length == LONGEST_MATCH:
                break
            length = self._length(text, place)
            if length > best.length:
                best = Match(place, length)
            place = self._before[place]
        return best if best.length else None

    def _length(self, text: Sequence[int], place: int) -> int:
        """Tokens that are alike up to `place`; the last two are."""
        tokens, length, most = self.tokens, 2, min(LONGEST_MATCH, place + 1, len(text))
        while length < most and tokens[place - length] == text[-1 - length]:
            length += 1
        return length


class NGramProposer:
    """Proposes from the request's own tokens (`proposer.Proposer`)."""

    name = "ngram"

    def __init__(self) -> None:
        self._indexes: dict[str, PairIndex] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        return [self._drafts(ask) for ask in asks]

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def close(self) -> None:
        self._indexes.clear()

    def _drafts(self, ask: DraftAsk) -> Sequence[int]:
        index = self._indexes.setdefault(ask.request.request_id, PairIndex())
        tokens = index.tokens
        index.extend(ask.request.tokens.array[len(tokens) :].tolist())
        match = index.match(tokens)
        if match is None:
            return ()
        first, period = match.end + 1, len(tokens) - 1 - match.end  # a match that is not over yet repeats itself
        return [tokens[first + i % period] for i in range(min(ask.num_drafts, match.length))]
