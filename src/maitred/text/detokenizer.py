"""Text from tokens: incremental detokenising, and stop strings across token boundaries."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from maitred.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so an unfinished one spans at most 3 tokens that are not empty.
_LONGEST_UNFINISHED = 3
# Prompt tokens looked back at, at most, for the context of the first piece; of a byte run all, see `Detokenizer`.
_PROMPT_CONTEXT = 64


class Detokenizer:
    """Pieces of text that, joined, are what `decode(prompt + output)` adds to the whole characters of the prompt.

    Without a prompt that is exactly `decode(output)`. A piece never ends inside a character. Where a tokenizer writes
    characters as runs of byte tokens (SentencePiece's fallback), a run is held until it ends, because its decoder
    makes all of the run unreadable if any of it is. Time is linear in the tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        stream = _ByteStream if tokenizer.byte_level else _WindowStream
        self._stream: _Stream = stream(tokenizer, prompt_token_ids, skip_special_tokens)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens; often empty."""
        return self._stream.push(token_ids)

    def flush(self) -> str:
        """Return the text that was held back, as decode gives it at the end: U+FFFD for an unfinished character."""
        return self._stream.flush()


class _Stream(Protocol):
    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None: ...

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    """Stream for ByteLevel decoders: their text is the UTF-8 of the tokens' bytes, so one incremental codec does it."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._codec = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._codec.decode(self._last_bytes(prompt_token_ids))  # leaves the prompt's unfinished character, if any

    def push(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        return self._codec.decode(b"", final=True)

    @property
    def unfinished(self) -> bool:
        """Return whether the bytes so far end inside a character."""
        return bool(self._codec.getstate()[0])

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Enough for an unfinished character, which has at most three and begins with a byte that nothing else has."""
        found = b""
        for token_id in reversed(token_ids[-_PROMPT_CONTEXT:]):
            found = self._bytes_of(token_id) + found
            if len(found) >= _LONGEST_UNFINISHED:
                break
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        if self._skip and token_id in self._tokenizer.special_token_ids:
            return b""
        return self._tokenizer.decoder_bytes(token_id)


class _WindowStream:
    """Stream for every other decoder: decode the new tokens behind a short context, and cut the context's text off.

    The context takes what decoders do to the first token only (Metaspace and Strip drop a leading space, WordPiece
    puts none), so it must give some text of its own.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._characters = _ByteStream(tokenizer, prompt_token_ids, skip_special_tokens)
        self._pending: list[int] = []
        self._num_certain = 0  # of pending: up to the last token after which nothing before it can change
        self._context = self._prompt_context(prompt_token_ids)
        self._context_text = self._decode(self._context)
        if self._context and tokenizer.is_byte_token(self._context[-1]):  # one replacement for each byte of the run
            self._context_text = self._context_text.rstrip(REPLACEMENT)
        elif tokenizer.splits_characters and self._characters.unfinished:  # one for the unfinished character
            self._context_text = self._context_text.removesuffix(REPLACEMENT)

    def push(self, token_ids: Sequence[int]) -> str:
        for token_id in filter(self._is_shown, token_ids):
            self._pending.append(token_id)
            self._characters.push((token_id,))
            if not self._may_change_after(token_id):
                self._num_certain = len(self._pending)
        if self._num_certain == 0:
            return ""
        window = self._context + self._pending[: self._num_certain]
        piece = self._decode(window)[len(self._context_text) :]
        self._pending = self._pending[self._num_certain :]
        self._num_certain = 0
        if piece or not self._context_text:  # tokens without text make no context
            self._context = self._shortest_context(window)
            self._context_text = self._decode(self._context)
        return piece

    def flush(self) -> str:
        text = self._decode(self._context + self._pending)
        piece = text[len(self._context_text) :]
        self._context_text, self._context, self._pending = text, self._context + self._pending, []
        self._num_certain = 0
        return piece

    def _may_change_after(self, last: int) -> bool:
        """Return whether text that ends with `last`, the last token pushed, can still change: a byte run, half a
        character.

        The second is for a ByteLevel decoder among others (alone it has its own stream).
        """
        if self._tokenizer.is_byte_token(last):
            return True
        return self._tokenizer.splits_characters and self._characters.unfinished

    def _shortest_context(self, window: list[int]) -> list[int]:
        for size in range(1, len(window)):
            if self._decode(window[-size:]):
                return window[-size:]
        return window

    def _prompt_context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's end, from a token that gives text and is not inside a byte run or a character."""
        least = _LONGEST_UNFINISHED + 1 if self._tokenizer.splits_characters else 1
        context: list[int] = []  # from its end
        in_run = False
        for looked_at, token_id in enumerate(reversed(prompt_token_ids), 1):
            if self._is_shown(token_id):
                context.append(token_id)
                in_run = self._tokenizer.is_byte_token(token_id)
                if len(context) >= least and not in_run and self._decode(context[::-1]):
                    break
            if looked_at >= _PROMPT_CONTEXT and not in_run:
                break
        return context[::-1]

    def _is_shown(self, token_id: int) -> bool:
        return self._tokenizer.is_shown(token_id, skip_special_tokens=self._skip)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class StopResult(NamedTuple):
    """Text that may be shown now, and the stop string that ended it, if any."""

    text: str
    stopped: str | None


class StopStringMatcher:
    """Holds back exactly the longest end of the text that could still become a stop string.

    The first stop string to be complete wins, and the longest of those complete at the same character, so the outcome
    does not depend on how the text was cut into pieces. Time is linear in the text for each stop string
    (Knuth, Morris, Pratt 1977), however long the strings.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = sorted({s for s in stop if s}, key=len, reverse=True)  # the longest is found first
        self._include = include
        self._fallbacks = [_fallback_table(s) for s in self._stop]
        self._matched = [0] * len(self._stop)  # characters of each stop string that end the text so far
        self._first_characters = frozenset(s[0] for s in self._stop)
        self._held = ""
        self._stopped: str | None = None

    def push(self, text: str) -> StopResult:
        """Add `text`; once `stopped` is given it stays, and there is no more text."""
        if self._stopped is not None:
            return StopResult("", self._stopped)
        if not self._held and self._first_characters.isdisjoint(text):
            return StopResult(text, None)
        known = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            found = self._advance(character)
            if found is not None:
                self._held, self._stopped = "", found
                return StopResult(known[: end if self._include else end - len(found)], found)
        shown = len(known) - max(self._matched, default=0)
        self._held = known[shown:]
        return StopResult(known[:shown], None)

    def flush(self) -> str:
        """Return the text that was held back, when the text has ended."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stop)
        return held

    def _advance(self, character: str) -> str | None:
        for index, stop in enumerate(self._stop):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = self._fallbacks[index][matched]
            if stop[matched] == character:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop):
                return stop
        return None


def _fallback_table(stop: str) -> list[int]:
    """table[m]: how much of `stop` still matches when the character after its first m does not."""
    table = [0] * (len(stop) + 1)
    matched = 0
    for end in range(1, len(stop)):
        while matched and stop[matched] != stop[end]:
            matched = table[matched]
        if stop[matched] == stop[end]:
            matched += 1
        table[end + 1] = matched
    return table
