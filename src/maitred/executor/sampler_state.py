"""Sampler state of one request: its parameters made ready once, and what was generated so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.core.request import SamplingParams, ThinkingLimit

NEGATIVE_INFINITY = np.float32(-np.inf)

LogitsRow = NDArray[np.float32]  # [V], one row of logits
TokenIds = NDArray[np.int64]
TokenMask = NDArray[np.uint32]  # [at least V / 32], a bit a token, from the lowest of the first word on; 1 is allowed


class LogitChanges(NamedTuple):
    """Changes that `RequestSampler.apply` would make now, for the native sampler; fields in the order they act."""

    mask: TokenMask | None
    allowed_ids: TokenIds | None
    banned_ids: TokenIds
    bias_ids: TokenIds
    bias_values: NDArray[np.float32]
    repetition_penalty: float
    known_ids: TokenIds
    frequency_penalty: float
    presence_penalty: float
    output_ids: TokenIds
    output_counts: NDArray[np.float32]


class RequestSampler:
    """One request's sampling state: made when the executor learns the request, told of each token by `append`.

    `output_token_ids` is not empty after a preemption. `vocab_size` is the width of the logits; stop tokens and bad
    words that lie outside it can never be drawn and are left out. Costs O(tokens known) to make and O(1) per token.
    """

    __slots__ = (
        "_allowed_ids",
        "_banned_ids",
        "_banned_sequences",
        "_bias_ids",
        "_bias_values",
        "_known",
        "_min_tokens_ids",
        "_output",
        "_tail",
        "_tail_length",
        "_thoughts",
        "mask",
        "num_output_tokens",
        "num_prompt_tokens",
        "sample_index",
        "sampling",
        "seed",
        "vocab_size",
    )

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        vocab_size: int,
        seed: int,
        sample_index: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
        bad_word_token_ids: Sequence[Sequence[int]] = (),
        thinking: ThinkingLimit | None = None,
    ) -> None:
        self.sampling = sampling
        self.mask: TokenMask | None = None  # of a grammar, for the token drawn next; set by its owner
        self._thoughts = ThoughtCounter(thinking) if thinking is not None else None
        self.vocab_size = vocab_size
        self.seed = seed
        self.sample_index = sample_index
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_output_tokens = 0
        bias = sampling.logit_bias or {}
        self._bias_ids = _token_array(bias)
        self._bias_values = np.array(list(bias.values()), dtype=np.float32)
        allowed = sampling.allowed_token_ids
        self._allowed_ids = None if allowed is None else _token_array(allowed)
        self._min_tokens_ids = self._inside_vocabulary((*eos_token_ids, *sampling.stop_token_ids))
        words = [tuple(word) for word in bad_word_token_ids if word]
        self._banned_ids = self._inside_vocabulary(word[0] for word in words if len(word) == 1)
        self._banned_sequences = [w for w in words if len(w) > 1 and 0 <= w[-1] < vocab_size]
        self._tail_length = max((len(word) - 1 for word in self._banned_sequences), default=0)
        self._tail = list(prompt_token_ids[-self._tail_length :]) if self._tail_length else []
        known = _TokenCounts(prompt_token_ids if sampling.repetition_penalty != 1.0 else ())
        self._known: _TokenCounts | _CountsAhead = known
        self._output: _TokenCounts | _CountsAhead = _TokenCounts()
        for token_id in output_token_ids:
            self.append(token_id)

    @property
    def position(self) -> int:
        """Known tokens, prompt and output: the position of the token drawn next."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def changes_logits(self) -> bool:
        """Return whether `apply` would do anything now."""
        p = self.sampling
        return (
            self.mask is not None
            or self._allowed_ids is not None
            or self._banned_ids.size > 0
            or bool(self._banned_sequences)
            or self._bias_ids.size > 0
            or self.num_output_tokens < p.min_tokens
            or (self._thoughts is not None and self._thoughts.due is not None)
            or p.repetition_penalty != 1.0
            or ((p.presence_penalty != 0.0 or p.frequency_penalty != 0.0) and self.num_output_tokens > 0)
        )

    @property
    def is_alike_ahead(self) -> bool:
        """Return whether it draws alike whatever is output from here on: greedy, of logits that nothing changes."""
        p = self.sampling
        return p.greedy and not (self.changes_logits or self._thoughts or p.presence_penalty or p.frequency_penalty)

    def append(self, token_id: int) -> None:
        """Note that `token_id` is now the last output token."""
        self.num_output_tokens += 1
        p = self.sampling
        if self._thoughts is not None:
            self._thoughts.append(token_id)
        if p.repetition_penalty != 1.0:
            self._known.add(token_id)
        if p.presence_penalty != 0.0 or p.frequency_penalty != 0.0:
            self._output.add(token_id)
        if self._tail_length:
            self._tail.append(token_id)
            del self._tail[: -self._tail_length]

    def ahead(self, token_id: int) -> RequestSampler:
        """The sampler that this one is once `token_id` is output, until this one's next `append`."""
        other = object.__new__(RequestSampler)
        for name in RequestSampler.__slots__:  # a third of what copy.copy takes
            setattr(other, name, getattr(self, name))
        other.mask = None
        if self._thoughts is not None:
            other._thoughts = copy(self._thoughts)
        p = self.sampling
        if p.repetition_penalty != 1.0:
            other._known = self._known.ahead()
        if p.presence_penalty != 0.0 or p.frequency_penalty != 0.0:
            other._output = self._output.ahead()
        if self._tail_length:
            other._tail = list(self._tail)
        other.append(token_id)
        return other

    def changes(self) -> LogitChanges:
        """The same as `apply`, as data; its arrays are good until the next `append`."""
        p = self.sampling
        banned = self._banned_ids
        ends = [word[-1] for word in self._banned_sequences if tuple(self._tail[1 - len(word) :]) == word[:-1]]
        if ends:
            banned = np.concatenate([banned, _token_array(ends)])
        if self.num_output_tokens < p.min_tokens:
            banned = np.concatenate([banned, self._min_tokens_ids])
        return LogitChanges(
            self.mask,
            self._only_ids(),
            banned,
            self._bias_ids,
            self._bias_values,
            p.repetition_penalty,
            self._known.ids if p.repetition_penalty != 1.0 else _NO_IDS,
            p.frequency_penalty,
            p.presence_penalty,
            self._output.ids,
            self._output.counts,
        )

    def apply(self, logits_V: LogitsRow) -> None:
        """Masks, bias and penalties, in place: steps 3 to 6 of the order in `sampler`."""
        if self.mask is not None:
            logits_V[np.unpackbits(self.mask.view(np.uint8), count=logits_V.size, bitorder="little") == 0] = -np.inf
        allowed_ids = self._only_ids()
        if allowed_ids is not None:
            kept = logits_V[allowed_ids]
            logits_V.fill(NEGATIVE_INFINITY)
            logits_V[allowed_ids] = kept
        logits_V[self._banned_ids] = NEGATIVE_INFINITY
        for word in self._banned_sequences:
            if tuple(self._tail[1 - len(word) :]) == word[:-1]:
                logits_V[word[-1]] = NEGATIVE_INFINITY
        if self.num_output_tokens < self.sampling.min_tokens:
            logits_V[self._min_tokens_ids] = NEGATIVE_INFINITY
        logits_V[self._bias_ids] += self._bias_values
        self._apply_penalties(logits_V)

    def _only_ids(self) -> TokenIds | None:
        """The end mark of thoughts over their budget, where a grammar allows it; else `allowed_token_ids`."""
        mark = None if self._thoughts is None else self._thoughts.due
        if mark is None or (self.mask is not None and not self.mask[mark // 32] >> np.uint32(mark % 32) & 1):
            return self._allowed_ids
        return _token_array([mark])

    def _apply_penalties(self, logits_V: LogitsRow) -> None:
        """Repetition (CTRL, arXiv:1909.05858, section 4.1, with the sign rule all engines use), frequency, presence.

        Only the tokens seen are touched, so the cost is that of the text, not of the vocabulary.
        """
        p = self.sampling
        if p.repetition_penalty != 1.0:
            ids = self._known.ids
            seen = logits_V[ids]
            penalty = np.float32(p.repetition_penalty)
            logits_V[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
        if p.frequency_penalty != 0.0 or p.presence_penalty != 0.0:
            ids = self._output.ids
            logits_V[ids] -= np.float32(p.frequency_penalty) * self._output.counts
            logits_V[ids] -= np.float32(p.presence_penalty)

    def _inside_vocabulary(self, token_ids: Iterable[int]) -> TokenIds:
        return _token_array(sorted({t for t in token_ids if 0 <= t < self.vocab_size}))


def _token_array(token_ids: Iterable[int]) -> TokenIds:
    return np.array(list(token_ids), dtype=np.int64)


_NO_IDS: TokenIds = _token_array(())


class _TokenCounts:
    """Distinct token ids and how often each was added, as arrays that grow by doubling."""

    __slots__ = ("_counts", "_ids", "_slot_of")

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        ids, counts = np.unique(_token_array(token_ids), return_counts=True)
        self._slot_of = {int(token_id): slot for slot, token_id in enumerate(ids)}
        spare = max(16, len(ids))
        self._ids = np.concatenate([ids, np.zeros(spare, np.int64)])
        self._counts = np.concatenate([counts, np.zeros(spare)]).astype(np.float32)

    @property
    def ids(self) -> TokenIds:
        return self._ids[: len(self._slot_of)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._slot_of)]

    def ahead(self) -> _CountsAhead:
        """The same, to be added to apart; good until the next `add` to this one."""
        return _CountsAhead(self.ids, self.counts)

    def add(self, token_id: int) -> None:
        slot = self._slot_of.setdefault(token_id, len(self._slot_of))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1


class _CountsAhead:
    """Token counts to which a few are added: those are looked for, so that no table of the many is copied."""

    __slots__ = ("counts", "ids")

    def __init__(self, ids: TokenIds, counts: NDArray[np.float32]) -> None:
        self.ids, self.counts = ids, counts  # never written to

    def ahead(self) -> _CountsAhead:
        return _CountsAhead(self.ids, self.counts)

    def add(self, token_id: int) -> None:
        found = self.ids == token_id
        if found.any():
            self.counts = self.counts + found.astype(np.float32)
        else:
            self.ids = np.append(self.ids, token_id)
            self.counts = np.append(self.counts, np.float32(1.0))


class ThoughtCounter:
    """Thinking budget of one request: when the end mark is due.

    Told of each output token by `append`; the tokens of marks do not count as thoughts.
    """

    __slots__ = ("_inside", "_limit", "_num_tokens", "_tail")

    def __init__(self, limit: ThinkingLimit) -> None:
        self._limit = limit
        self._inside = limit.opened
        self._num_tokens = 0
        self._tail: tuple[int, ...] = ()  # what came last, as far as it may be part of a mark

    @property
    def due(self) -> int | None:
        """The token of the end mark that has to come next, if its grammar allows it; None while thoughts may go on."""
        end = self._limit.end
        if not self._inside or not end:
            return None
        num_begun = next(n for n in range(len(end) - 1, -1, -1) if self._tail[len(self._tail) - n :] == end[:n])
        return end[num_begun] if self._num_tokens - num_begun >= self._limit.num_tokens else None

    def append(self, token_id: int) -> None:
        limit = self._limit
        mark = limit.end if self._inside else limit.begin
        self._num_tokens += self._inside
        self._tail = (*self._tail, token_id)[-len(mark) :] if mark else ()
        if mark and self._tail == mark:
            self._num_tokens -= len(mark) if self._inside else 0
            self._inside, self._tail = not self._inside, ()
