"""Drafts from text: an n-gram of the request's own tokens, or the prediction that came with the request.

N-grams: what followed the last tokens of a request when they were met before, in its prompt or its output. As prompt
lookup (github.com/apoorvumang/prompt-lookup-decoding) and vLLM's `ngram` do, but the place is not searched in each
step: tokens are indexed as they come, by the hash chains with which deflate finds its matches (RFC 1951, section 4).
The longest match counts, of equals the last; and as in SuffixDecoding (arXiv:2411.04975) no more is drafted than
matched, since short matches are mostly chance.

Predictions: a request may bring what its output will be like, such as a file before an edit. The text is followed as
long as output is like it. Where they part, the place is looked up at which they meet again, and no more is drafted than
agreed there. Until there is one, a token is taken to stand in the place of another, once or twice; then the request is
drafted for as if it had no prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from maitred.executor.state import DraftAsk, HeldRequest, Proposer

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


class NGramProposer(Proposer):
    """Proposes from the request's own tokens."""

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


class PredictionProposer(Proposer):
    """Drafts for requests that follow a prediction; all others are asked of `proposer`."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.name = proposer.name
        self._followed: dict[str, PredictedText] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        predicted = [self._drafts(ask) if ask.request.prediction else () for ask in asks]
        others = [ask for ask, drafts in zip(asks, predicted, strict=True) if not drafts]
        proposed = iter(self._proposer.propose(others) if others else ())
        return [drafts or next(proposed) for drafts in predicted]

    def forget(self, request_id: str) -> None:
        self._followed.pop(request_id, None)
        self._proposer.forget(request_id)

    def close(self) -> None:
        self._followed.clear()
        self._proposer.close()

    def _drafts(self, ask: DraftAsk) -> Sequence[int]:
        request = ask.request
        followed = self._followed.get(request.request_id)
        if followed is None:
            followed = self._followed[request.request_id] = PredictedText(request.prediction)
        return followed.drafts(_output(request, followed.num_seen), ask.num_drafts)


class PredictedText:
    """Progress of one request's output in its prediction."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._index = PairIndex()
        self._index.extend(token_ids)
        self._next = 0  # position in the prediction that output is expected to go on with
        self._num_agreed = LONGEST_MATCH  # tokens before it that are like the output's, or less after one that is not
        self._tail: list[int] = []  # of the output
        self.num_seen = 0

    def drafts(self, new_tokens: Sequence[int], num_drafts: int) -> Sequence[int]:
        """Return drafts after these tokens, which are output since the last call."""
        text = self._index.tokens
        self.num_seen += len(new_tokens)
        self._tail = [*self._tail, *new_tokens][-LONGEST_MATCH:]
        is_followed = text[self._next : self._next + len(new_tokens)] == list(new_tokens)
        self._next += len(new_tokens)
        if is_followed:
            self._num_agreed = min(self._num_agreed + len(new_tokens), LONGEST_MATCH)
        elif (match := self._index.match(self._tail)) is not None:
            self._next, self._num_agreed = match.end + 1, match.length
        else:
            self._num_agreed //= 4
        return text[self._next : self._next + min(num_drafts, self._num_agreed)]


def _output(request: HeldRequest, first: int) -> list[int]:
    """Return its output tokens from number `first` on."""
    tokens: list[int] = request.tokens.array[request.num_prompt_tokens + first :].tolist()
    return tokens
