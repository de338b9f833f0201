"""Shared by the answers of both routes: ids, usage, and chunks with an unchanging part encoded once a stream."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

import maitred
from maitred.api.dialects.openai.schemas import (
    CompletionTokensDetails,
    GenerationFields,
    PromptTokensDetails,
    TimingMs,
    Usage,
)
from maitred.api.generate.outcome import Outcome, timing_parts_ms
from maitred.api.http.exchange import REQUEST_ID
from maitred.core.errors import InvalidRequest
from maitred.core.request import FinishReason
from maitred.core.step import RequestTiming

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


def completion_id(prefix: str, body: GenerationFields, request_id: str) -> str:
    """`chatcmpl-` and the request id: the body's (vLLM's field), else the one that the request has."""
    if body.request_id is None:
        return f"{prefix}-{request_id}"
    if not REQUEST_ID.fullmatch(body.request_id.encode("utf-8", "replace")):
        raise InvalidRequest("request_id must be 1 to 128 characters of A-Z a-z 0-9 . _ -", param="request_id")
    return f"{prefix}-{body.request_id}"


def usage_of(outcome: Outcome) -> Usage:
    """The time's split is told once all samples have ended."""
    timing, used = outcome.timing(), outcome.usage()
    return Usage(
        prompt_tokens=used.num_prompt_tokens,
        completion_tokens=used.num_generated_tokens,
        total_tokens=used.num_prompt_tokens + used.num_generated_tokens,
        prompt_tokens_details=PromptTokensDetails(used.num_cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            used.num_reasoning_tokens, used.num_accepted_tokens, used.num_predicted_tokens - used.num_accepted_tokens
        ),
        handover=used.handover or UNSET,
        timing_ms=UNSET if timing is None else _timing_ms(timing),
        engine_ms=UNSET if timing is None else used.compute_us / 1000,
    )


def _timing_ms(timing: RequestTiming) -> TimingMs:
    return TimingMs(**timing_parts_ms(timing), ttft=round(timing.ttft_s * 1000, 3))


def finish_name(reason: FinishReason | None, *, calls: bool = False) -> Any:
    """The wire's `finish_reason`; never called for an outcome that failed.

    `tool_calls` for a named tool_choice too, as OpenAI's reference defines the field ("if the model called a tool").
    Its service once said `stop` there, and vLLM still does (vllm-project/vllm#25054, #32018); clients that run tools
    only at `tool_calls` would not run them. A call that max_tokens cut is `length`, and not to be run.
    """
    if reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if calls else "stop"
