"""All that a router must know of a request's body: one pass over the JSON, texts left as the bytes they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

SMALL_BYTES = 16 * 1024  # read at once, whatever is in it


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class RoutedBody(msgspec.Struct, kw_only=True):
    """Fields of chat and text completions, named as in OpenAI's and vLLM's schemas; all others are skipped.

    Nothing is checked: what is wrong with a body its replica tells the client.
    """

    model: str | None = None
    # the prompt, as its bytes stand in the body
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET
    # how much is asked for, and in which form
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | bool | None = None
    prompt_logprobs: int | None = None
    # what an answer depends on, besides the prompt
    seed: int | None = None
    temperature: float | None = None
    # tenant and urgency
    user: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None
    service_tier: str | None = None
    ttft_slo_ms: float | None = None
    queue_timeout_ms: float | None = None
    timeout_ms: float | None = None


_TYPES: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(RoutedBody)}
_OF_GENERATE = ("text_input", "parameters", "sampling_parameters")  # of Triton's
_UNREAD = msgspec.defstruct(
    "_Unread", [(name, Raw | UnsetType, UNSET) for name in (*_TYPES, *_OF_GENERATE)], kw_only=True
)
_decode = msgspec.json.Decoder(RoutedBody).decode
_decode_unread = msgspec.json.Decoder(_UNREAD).decode
_WHOLE = re.compile(rb"(-?\d{1,15})\.0+")
_WRONG = (msgspec.DecodeError, ValueError, RecursionError)

KSERVE_MODELS = "/v2/models/"
GENERATE, GENERATE_STREAM = "generate", "generate_stream"
GENERATE_ENDS = (f"/{GENERATE}", f"/{GENERATE_STREAM}")
GENERATE_PATH = re.compile(  # after KSERVE_MODELS
    rf"(?P<model>.+?)(?:/versions/(?P<version>[0-9]{{1,18}}))?/(?P<action>{GENERATE}|{GENERATE_STREAM})"
)


def generate_asked(path: str) -> re.Match[str] | None:
    """Match the path of a text generation request in Triton's extension."""
    return GENERATE_PATH.fullmatch(path, len(KSERVE_MODELS)) if path.startswith(KSERVE_MODELS) else None


def read_asked(path: str, body: bytes) -> RoutedBody:
    """Read a body as `read_body`; Triton's generate with what the path says, its fields by the names of completions."""
    found = generate_asked(path)
    if found is None:
        return read_body(body)
    read = _read_generate(body)
    read.model, read.stream = found["model"], found["action"] == GENERATE_STREAM
    return read


def read_body(body: bytes) -> RoutedBody:
    """Takes 1 us for 1 KB. A field of the wrong type is as if it were not there, and so is all of what is no JSON.

    Of a field that is there twice the last counts; of a large body only that one is decoded, since a number such as
    1e300 takes 9 us, and there is room for 400,000.
    """
    if len(body) > SMALL_BYTES:
        return _read_by_fields(body)
    try:
        return _decode(body)
    except _WRONG:
        return _read_by_fields(body)


def _read_by_fields(body: bytes) -> RoutedBody:
    return _filled([_unread(body)])


def _read_generate(body: bytes) -> RoutedBody:
    """Fields may stand beside the text, within `parameters`, or in `sampling_parameters`, which counts before them and
    may be JSON in a text; numbers may be texts.
    """
    sent = _unread(body)
    parameters = _unread(sent.parameters)
    layers = [sent, parameters]
    sampling: Any = next((each.sampling_parameters for each in layers if each.sampling_parameters is not UNSET), UNSET)
    if bytes(sampling or b"").startswith(b'"'):
        try:
            sampling = msgspec.json.decode(sampling, type=str).encode("utf-8", "replace")
        except _WRONG:
            sampling = UNSET
    read = _filled([_unread(sampling), *layers], strict=False)
    read.prompt = next((each.text_input for each in layers if each.text_input is not UNSET), UNSET)
    return read


def _unread(body: bytes | Raw | UnsetType) -> Any:
    """Empty where it is no object."""
    try:
        return _UNREAD() if isinstance(body, UnsetType) else _decode_unread(body)
    except _WRONG:
        return _UNREAD()


def _filled(layers: Sequence[Any], *, strict: bool = True) -> RoutedBody:
    """A body with each field from the first of `layers` that has it."""
    read = RoutedBody()
    for name, kind in _TYPES.items():
        raw = next((found for each in layers if (found := getattr(each, name)) is not UNSET), UNSET)
        if raw is UNSET:
            continue
        if len(raw) < 40 and (whole := _WHOLE.fullmatch(raw)):  # 20.0, which replicas take for 20
            raw = whole[1]
        try:
            setattr(read, name, msgspec.json.decode(raw, type=kind, strict=strict))
        except _WRONG:
            continue
    return read
