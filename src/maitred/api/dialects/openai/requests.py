"""Small steps that the completion routes share."""

from __future__ import annotations

from maitred.api.dialects.openai.schemas import GenerationFields
from maitred.api.generate.generation import Generation, timing_parts_ms
from maitred.api.http.exchange import REQUEST_ID, Exchange
from maitred.errors import InvalidRequest


def completion_id(prefix: str, body: GenerationFields, exchange: Exchange) -> str:
    """`chatcmpl-` and the request id: the body's (vLLM's field), else the header's, else a new one."""
    if body.request_id is None:
        return f"{prefix}-{exchange.request_id}"
    if not REQUEST_ID.fullmatch(body.request_id.encode("utf-8", "replace")):
        raise InvalidRequest("request_id must be 1 to 128 characters of A-Z a-z 0-9 . _ -", param="request_id")
    return f"{prefix}-{body.request_id}"


def server_timing(generation: Generation) -> tuple[tuple[bytes, bytes], ...]:
    """The header `Server-Timing` (W3C), which browsers and proxies show: the same five parts as usage.timing_ms."""
    timing = generation.timing()
    if timing is None:
        return ()
    parts = ", ".join(f"{name};dur={ms:g}" for name, ms in timing_parts_ms(timing).items())
    return ((b"server-timing", parts.encode()),)


def note_usage(exchange: Exchange, generation: Generation) -> None:
    """Tell the access line how much was done."""
    usage = generation.usage()
    exchange.log |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
