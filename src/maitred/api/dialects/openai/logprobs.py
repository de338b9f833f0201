"""Log-probabilities as the two completion routes write them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from maitred.api.dialects.openai.schemas import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    NamedLogprob,
    TopLogprob,
)
from maitred.core.step import TokenLogprobs
from maitred.text import Detokenizer, Tokenizer

PACKED = 256  # positions
LOWEST = -9999.0  # OpenAI's "very unlikely"; JSON has no -Infinity


class TokenNames:
    """How tokens are written: as text, or as `token_id:N` when asked for (return_tokens_as_token_ids)."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def chat(self, token_id: int) -> tuple[str, list[int]]:
        """Name and bytes; part of a character is written as OpenAI's chat route does, `\\xf0\\x9f`."""
        raw = self._tokenizer.token_bytes(token_id)
        return self._name(token_id, raw, ""), list(raw)

    def completion(self, token_id: int) -> str:
        """Name; part of a character is written as OpenAI's older route does, `bytes:\\xf0\\x9f`, so names differ."""
        return self._name(token_id, self._tokenizer.token_bytes(token_id), "bytes:")

    def _name(self, token_id: int, raw: bytes, prefix: str) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LOWEST else LOWEST


def chat_logprobs(positions: Iterable[TokenLogprobs], names: TokenNames, num_top: int) -> ChatLogprobs:
    """The chosen token at each position, and the `num_top` most likely."""
    content = []
    for at in positions:
        token, raw = names.chat(at.token_ids[0])
        top = [
            TopLogprob(name, finite(logprob), spelled)
            for (name, spelled), logprob in zip(
                map(names.chat, at.token_ids[1 : num_top + 1]), at.logprobs[1 : num_top + 1], strict=True
            )
        ]
        content.append(ChatTokenLogprob(token, finite(at.logprobs[0]), raw, top))
    return ChatLogprobs(content)


def packed_chat_logprobs(positions: Sequence[TokenLogprobs], names: TokenNames, num_top: int) -> ChatLogprobs:
    """Like `chat_logprobs`, encoded to JSON in pieces: collecting the garbage of a million objects at once would stall
    the whole process for a quarter of a second.
    """
    pieces = (chat_logprobs(some, names, num_top).content for some in _pieces(positions))
    return ChatLogprobs([_packed(piece) for piece in pieces])


def _pieces(positions: Sequence[TokenLogprobs]) -> Iterator[Sequence[TokenLogprobs]]:
    return (positions[start : start + PACKED] for start in range(0, len(positions), PACKED))


def _packed(items: Sequence[Any]) -> Any:
    """The elements of a JSON list of `items`, without brackets; there is at least one."""
    return msgspec.Raw(msgspec.json.encode(items)[1:-1])


class CompletionLogprobsWriter:
    """The older route's four parallel lists for one choice, chunk by chunk; offsets count characters of its text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        names: TokenNames,
        num_top: int,
        *,
        skip_special_tokens: bool,
        context: Sequence[int],
    ) -> None:
        self._names, self._num_top = names, num_top
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids=context, skip_special_tokens=skip_special_tokens)
        self._offset = 0  # characters of the choice's text before the next token

    def prompt(self, first_token: int, positions: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        """An echoed prompt; nothing is known before its first token, so that one has null."""
        written = CompletionLogprobs(
            [self._advance(first_token)], [None], [self._names.completion(first_token)], [None]
        )
        self._write(written, positions)
        return written

    def output(self, positions: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        written = CompletionLogprobs([], [], [], [])
        self._write(written, positions)
        return written

    def packed_output(self, positions: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Like `output`, encoded to JSON in pieces."""
        written = CompletionLogprobs([], [], [], [])
        for some in _pieces(positions):
            piece = self.output(some)
            for name in CompletionLogprobs.__struct_fields__:
                getattr(written, name).append(_packed(getattr(piece, name)))
        return written

    def _write(self, written: CompletionLogprobs, positions: Iterable[TokenLogprobs]) -> None:
        for at in positions:
            names = [self._names.completion(token) for token in at.token_ids[: self._num_top + 1]]
            values = [finite(logprob) for logprob in at.logprobs[: self._num_top + 1]]
            written.text_offset.append(self._advance(at.token_ids[0]))
            written.tokens.append(names[0])
            written.token_logprobs.append(values[0])
            # the most likely first; the chosen one is there too, whether it is among them or not
            top = dict(zip(names[1:], values[1:], strict=True))
            written.top_logprobs.append({**top, names[0]: values[0]})

    def _advance(self, token_id: int) -> int:
        """Advance past the token; returns the offset where it begins."""
        offset = self._offset
        self._offset += len(self._detokenizer.push((token_id,)))
        return offset


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def named_prompt_logprobs(
    positions: Iterable[TokenLogprobs], names: TokenNames, num_top: int
) -> list[dict[str, NamedLogprob] | None]:
    """vLLM's prompt_logprobs: by token id, None for the first token."""
    written: list[dict[str, NamedLogprob] | None] = [None]
    for at in positions:
        entries = zip(at.token_ids, at.logprobs, at.ranks, strict=True)
        written.append(
            {
                str(token): NamedLogprob(finite(logprob), rank, names.completion(token))
                for token, logprob, rank in list(entries)[: num_top + 1]
            }
        )
    return written
