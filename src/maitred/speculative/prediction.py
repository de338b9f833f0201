"""Drafts from a predicted text: a request may bring what its output will be like, such as a file before an edit.

The text is followed as long as output is like it. Where they part, the place is looked up at which they meet again, and
no more is drafted than agreed there. Until there is one, a token is taken to stand in the place of another, once or
twice; then the request is drafted for as if it had no prediction.
"""

from __future__ import annotations

from collections.abc import Sequence

from maitred.speculative.ngram import LONGEST_MATCH, PairIndex
from maitred.speculative.proposer import DraftAsk, DraftedRequest, Proposer


class PredictionProposer:
    """Drafts for requests that follow a prediction; all others are asked of `proposer` (`proposer.Proposer`)."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._followed: dict[str, PredictedText] = {}

    @property
    def name(self) -> str:
        return self._proposer.name

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


def _output(request: DraftedRequest, first: int) -> list[int]:
    """Return its output tokens from number `first` on."""
    tokens: list[int] = request.tokens.array[request.num_prompt_tokens + first :].tolist()
    return tokens
