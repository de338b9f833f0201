"""Answers in OpenAI's format: errors, ids, events, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

import maitred
from maitred.api.dialects.openai import schemas
from maitred.api.generate.outcome import Outcome, timing_parts_ms
from maitred.api.http.errors import HttpError
from maitred.api.http.exchange import REQUEST_ID
from maitred.api.http.routes import DialectFormat, StreamFormat
from maitred.core.errors import InvalidRequest
from maitred.core.request import FinishReason
from maitred.core.step import RequestTiming, TokenLogprobs
from maitred.text.detokenizer import Detokenizer
from maitred.text.tokenizer import Tokenizer

_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ErrorObject(msgspec.Struct, frozen=True):
    """What went wrong, as OpenAI's specification has it; all four keys are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


def _told(error: HttpError) -> ErrorBody:
    return ErrorBody(ErrorObject(error.message, _type_of(error), error.param, error.code))


OPENAI = DialectFormat(StreamFormat(end=b"data: [DONE]\n\n"), ErrorBody, _told)
"""Format of OpenAI's routes, and of ours beside them."""


def _type_of(error: HttpError) -> str:
    if error.code == "insufficient_quota":
        return "insufficient_quota"
    return _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")


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


def chat_logprobs(positions: Iterable[TokenLogprobs], names: TokenNames, num_top: int) -> schemas.ChatLogprobs:
    """The chosen token at each position, and the `num_top` most likely."""
    content = []
    for at in positions:
        token, raw = names.chat(at.token_ids[0])
        top = [
            schemas.TopLogprob(name, finite(logprob), spelled)
            for (name, spelled), logprob in zip(
                map(names.chat, at.token_ids[1 : num_top + 1]), at.logprobs[1 : num_top + 1], strict=True
            )
        ]
        content.append(schemas.ChatTokenLogprob(token, finite(at.logprobs[0]), raw, top))
    return schemas.ChatLogprobs(content)


def packed_chat_logprobs(positions: Sequence[TokenLogprobs], names: TokenNames, num_top: int) -> schemas.ChatLogprobs:
    """Like `chat_logprobs`, encoded to JSON in pieces: collecting the garbage of a million objects at once would stall
    the whole process for a quarter of a second.
    """
    pieces = (chat_logprobs(some, names, num_top).content for some in _pieces(positions))
    return schemas.ChatLogprobs([_packed(piece) for piece in pieces])


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

    def prompt(self, first_token: int, positions: Iterable[TokenLogprobs]) -> schemas.CompletionLogprobs:
        """An echoed prompt; nothing is known before its first token, so that one has null."""
        written = schemas.CompletionLogprobs(
            [self._advance(first_token)], [None], [self._names.completion(first_token)], [None]
        )
        self._write(written, positions)
        return written

    def output(self, positions: Iterable[TokenLogprobs]) -> schemas.CompletionLogprobs:
        written = schemas.CompletionLogprobs([], [], [], [])
        self._write(written, positions)
        return written

    def packed_output(self, positions: Sequence[TokenLogprobs]) -> schemas.CompletionLogprobs:
        """Like `output`, encoded to JSON in pieces."""
        written = schemas.CompletionLogprobs([], [], [], [])
        for some in _pieces(positions):
            piece = self.output(some)
            for name in schemas.CompletionLogprobs.__struct_fields__:
                getattr(written, name).append(_packed(getattr(piece, name)))
        return written

    def _write(self, written: schemas.CompletionLogprobs, positions: Iterable[TokenLogprobs]) -> None:
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


def joined(first: schemas.CompletionLogprobs, second: schemas.CompletionLogprobs) -> schemas.CompletionLogprobs:
    return schemas.CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def named_prompt_logprobs(
    positions: Iterable[TokenLogprobs], names: TokenNames, num_top: int
) -> list[dict[str, schemas.NamedLogprob] | None]:
    """vLLM's prompt_logprobs: by token id, None for the first token."""
    written: list[dict[str, schemas.NamedLogprob] | None] = [None]
    for at in positions:
        entries = zip(at.token_ids, at.logprobs, at.ranks, strict=True)
        written.append(
            {
                str(token): schemas.NamedLogprob(finite(logprob), rank, names.completion(token))
                for token, logprob, rank in list(entries)[: num_top + 1]
            }
        )
    return written


FINGERPRINT = f"maitred-{maitred.__version__}"
encode = msgspec.json.Encoder().encode
END = b"}\n\n"


class WantedUsage(NamedTuple):
    """The usage that a stream reports."""

    at_end: bool = False
    in_every_chunk: bool = False


class ChunkWriter:
    """Puts choices into the envelope of their stream: `data: {"id":...,"choices":[` choice `]...}`."""

    def __init__(self, envelope: dict[str, Any], outcome: Outcome, usage: WantedUsage) -> None:
        head = encode({**envelope, "choices": []})
        assert head.endswith(b"]}")
        self._head = b"data: " + head[:-2]
        self._outcome, self._usage = outcome, usage
        self._tail = b'],"usage":null' + END if usage.at_end else b"]" + END

    def event(self, choice: msgspec.Struct, **more: Any) -> bytes:
        """One event with one choice; `more` are further fields of the envelope."""
        tail = self._tail
        if self._usage.in_every_chunk:
            tail = b'],"usage":' + encode(usage_of(self._outcome)) + END
        if more:
            tail = tail[:1] + b"," + encode(more)[1:-1] + tail[1:]
        return self._head + encode(choice) + tail

    def last(self) -> bytes:
        """The event with the usage and no choice, if it was asked for."""
        if not self._usage.at_end:
            return b""
        return self._head + b'],"usage":' + encode(usage_of(self._outcome)) + END


def completion_id(prefix: str, body: schemas.GenerationFields, request_id: str) -> str:
    """`chatcmpl-` and the request id: the body's (vLLM's field), else the one that the request has."""
    if body.request_id is None:
        return f"{prefix}-{request_id}"
    if not REQUEST_ID.fullmatch(body.request_id.encode("utf-8", "replace")):
        raise InvalidRequest("request_id must be 1 to 128 characters of A-Z a-z 0-9 . _ -", param="request_id")
    return f"{prefix}-{body.request_id}"


def usage_of(outcome: Outcome) -> schemas.Usage:
    """The time's split is told once all samples have ended."""
    timing, used = outcome.timing(), outcome.usage()
    return schemas.Usage(
        prompt_tokens=used.num_prompt_tokens,
        completion_tokens=used.num_generated_tokens,
        total_tokens=used.num_prompt_tokens + used.num_generated_tokens,
        prompt_tokens_details=schemas.PromptTokensDetails(used.num_cached_tokens),
        completion_tokens_details=schemas.CompletionTokensDetails(
            used.num_reasoning_tokens, used.num_accepted_tokens, used.num_predicted_tokens - used.num_accepted_tokens
        ),
        handover=used.handover or UNSET,
        timing_ms=UNSET if timing is None else _timing_ms(timing),
        engine_ms=UNSET if timing is None else used.compute_us / 1000,
    )


def _timing_ms(timing: RequestTiming) -> schemas.TimingMs:
    return schemas.TimingMs(**timing_parts_ms(timing), ttft=round(timing.ttft_s * 1000, 3))


def finish_name(reason: FinishReason | None, *, calls: bool = False) -> Any:
    """The wire's `finish_reason`; never called for an outcome that failed.

    `tool_calls` for a named tool_choice too, as OpenAI's reference defines the field ("if the model called a tool").
    Its service once said `stop` there, and vLLM still does (vllm-project/vllm#25054, #32018); clients that run tools
    only at `tool_calls` would not run them. A call that max_tokens cut is `length`, and not to be run.
    """
    if reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if calls else "stop"
