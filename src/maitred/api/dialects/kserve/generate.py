"""Triton's generate extension: a language model takes text_input and gives text_output.

Paths and the shape of bodies: docs/protocol/extension_generate.md of triton-inference-server/server; fields and their
defaults: triton-inference-server/vllm_backend. What is asked becomes a body of /v1/completions, so that it is checked,
counted and answered as one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from maitred.api.dialects.openai.completions import DECODER, CompletionAnswer, completion_ask
from maitred.api.dialects.openai.refusals import COMPLETION_REFUSED, refuse_unbuilt, unsupported
from maitred.api.dialects.openai.schemas import CompletionRequest
from maitred.api.generate.dialect import Dialect, GenerationAsk
from maitred.api.generate.outcome import Outcome, Sample
from maitred.api.http.app import App
from maitred.api.http.bodies import SMALL_BYTES, check_num_texts, decode_json
from maitred.api.http.errors import UnsupportedMediaType, shortened
from maitred.api.http.exchange import Exchange
from maitred.api.http.routes import TEXT_ERRORS
from maitred.core.errors import InvalidRequest, RequestTooLarge, RouteNotFound, did_you_mean
from maitred.engine.output import TextDelta
from maitred.fleet.prefix_keys import GENERATE, GENERATE_ENDS, GENERATE_PATH, GENERATE_STREAM

HEADER_LENGTH = b"inference-header-content-length"
MEDIA_TYPES = (b"application/json", b"application/octet-stream", b"application/x-www-form-urlencoded")
_WINDOWS: Mapping[bytes, int] = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
_LEVEL = 1  # of compression: on loopback and in a rack time is dearer than bytes


async def body_of(exchange: Exchange) -> bytes:
    """The body as sent. Only pages of other origins must name its type, so that browsers send a preflight first."""
    media_type = exchange.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if b"origin" in exchange.headers and media_type not in MEDIA_TYPES[:2]:
        raise UnsupportedMediaType("send the body as application/json or application/octet-stream")
    return await exchange.body()


def inflated(body: bytes, encoding: bytes, limit: int) -> bytes:
    """Raises RequestTooLarge where more than `limit` bytes come out, before they do."""
    if encoding in (b"", b"identity"):
        return body
    if encoding not in _WINDOWS:
        told = encoding[:40].decode("latin-1")
        raise UnsupportedMediaType(f"Content-Encoding {told!r} is not supported; send gzip, deflate or identity")
    stream = zlib.decompressobj(_WINDOWS[encoding])
    try:
        found = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is no {encoding.decode()}: {error}") from None
    if len(found) > limit:
        raise RequestTooLarge(f"the body is over the limit of {limit} bytes once it is decompressed")
    if not stream.eof or stream.unused_data:
        raise InvalidRequest(f"the body is not one whole {encoding.decode()} stream")
    return found


def accepted(header: bytes) -> bytes:
    """The coding that Accept-Encoding prefers, if that is gzip or deflate, else empty (RFC 9110, 12.5.3)."""
    best, weight = b"", 0.0
    for each in header.lower().split(b","):
        name, _, parameter = each.partition(b";")
        name, liked = name.strip(), _weight(parameter)
        if (name in _WINDOWS or name == b"identity") and liked > weight:
            best, weight = name, liked
    return best if best in _WINDOWS else b""


def _weight(parameter: bytes) -> float:
    name, _, value = parameter.partition(b"=")
    try:
        return float(value) if name.strip() == b"q" else 1.0
    except ValueError:
        return 0.0


def deflated(body: bytes, encoding: bytes) -> bytes:
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOWS[encoding])
    return stream.compress(body) + stream.flush()


def header_length(value: bytes | None, num_bytes: int) -> int:
    """Length of the JSON in a body of `num_bytes`: all of it without the header. Raises InvalidRequest."""
    if value is None:
        return num_bytes
    if not value.isdigit() or len(value) > 18 or int(value) > num_bytes:
        told = value[:40].decode("latin-1")
        raise InvalidRequest(f"Inference-Header-Content-Length must be a number from 0 to {num_bytes}, not {told!r}")
    return int(value)


TEXT_INPUT, STREAM, SAMPLING, EXCLUDE = "text_input", "stream", "sampling_parameters", "exclude_input_in_output"
TEXT_OUTPUT = "text_output"

_ELSEWHERE = {  # fields of a completion that are said, or would be answered, in another way here
    "model": "the path or the request names it",
    "prompt": f"it is {TEXT_INPUT}",
    "stream": f"it stands beside {SAMPLING}",
    "echo": f"it is {EXCLUDE}",
    **dict.fromkeys(
        ("stream_options", "logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
        f"the answer is {TEXT_OUTPUT} alone",
    ),
}
_SCALARS = {  # fields of a completion that are no text, which Triton's clients may send as text
    name: kind
    for name, kind in get_type_hints(CompletionRequest).items()
    if {*get_args(kind)} <= {int, float, bool, NoneType}
}
_fields = msgspec.json.Decoder(dict[str, Raw])
_text = msgspec.json.Decoder(str)


class GenerateRequest(msgspec.Struct, kw_only=True):
    """What stands beside the text may stand within `parameters` too. Other fields are sampling parameters."""

    text_input: str
    id: str = ""
    stream: bool | None = None
    exclude_input_in_output: bool | None = None
    sampling_parameters: Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["object", "string", "null"]})] = (
        UNSET
    )
    parameters: Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["object", "null"]})] = UNSET


class Generated(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An answer, or one event of a streamed one. Of several samples (`n`) there are as many texts."""

    model_name: str
    model_version: str
    text_output: str | list[str]
    id: str = ""


_own = msgspec.json.Decoder(GenerateRequest)
_OWN = GenerateRequest.__struct_fields__


def is_generate(parameter: str) -> bool:
    """Whether a path after `/v2/models/` asks for text."""
    return parameter.endswith(GENERATE_ENDS)


def decode_generate(app: App, exchange: Exchange, sent: bytes) -> GenerationAsk:
    """POST /v2/models/NAME[/versions/V]/generate and /generate_stream. Raises RequestError."""
    found = GENERATE_PATH.fullmatch(exchange.parameter)
    if found is None:
        raise RouteNotFound("post to /v2/models/NAME[/versions/V]/generate or /generate_stream")
    if app.tensors is not None and app.tensors.versions(found["model"]):
        raise InvalidRequest(f"{found['model']!r} is no language model; post to /v2/models/{found['model']}/infer")
    name = app.check_model(found["model"], exchange.caller)
    own, others = _split(sent)
    streams = found["action"] == GENERATE_STREAM
    if own.stream and not streams:
        raise InvalidRequest(f"{GENERATE} answers once; ask {GENERATE_STREAM} for a stream", param=STREAM)
    app.model.check_version(int(found["version"] or 0))
    in_pieces = streams if own.stream is None else own.stream
    completion = DECODER.decode(_completion(name, own, others, in_pieces=in_pieces))
    refuse_unbuilt(completion.refused, COMPLETION_REFUSED)
    if completion.unknown:
        field = completion.unknown[0]
        hint = did_you_mean(field, DECODER.known)
        raise InvalidRequest(f"{shortened(repr(field), 80)} is no sampling parameter{hint}", param=field)
    ask = completion_ask(app, exchange.caller, completion.body, name, exchange.request_id)
    assert isinstance(ask.answer, CompletionAnswer)
    ask.answer = TextAnswer(ask.answer, name, app.model.version, own.id, in_pieces=in_pieces)
    exchange.field_names = lambda: {"prompt": TEXT_INPUT}
    ask.stream = streams  # if of one event
    exchange.log |= {"model": name, "stream": ask.stream, "n": ask.sampling.n}
    return ask


GENERATION = Dialect(TEXT_ERRORS, decode_generate, body_of)
SPOKEN: dict[str, Any] = {"span": "text_completion", "span_ends": GENERATE_ENDS}  # of a Route


def _split(sent: bytes) -> tuple[GenerateRequest, dict[str, Raw]]:
    """The fields of the extension, and all others. Raises InvalidRequest."""
    if len(sent) > SMALL_BYTES:
        check_num_texts(sent)
    fields = decode_json(sent, _fields)
    fields = {**_object(fields.pop("parameters", UNSET), "parameters"), **fields}
    own = {name: fields.pop(name) for name in _OWN if name in fields}
    return decode_json(msgspec.json.encode(own), _own), fields


def _sampling(sent: Raw | UnsetType) -> dict[str, Raw]:
    """An object, or its JSON as text. Raises InvalidRequest."""
    if sent is not UNSET and bytes(sent).startswith(b'"'):
        sent = Raw(decode_json(sent, _text, at=SAMPLING).encode("utf-8", "replace"))
    return _object(sent, SAMPLING)


def _object(sent: Raw | UnsetType, name: str) -> dict[str, Raw]:
    if sent is UNSET or bytes(sent) == b"null":
        return {}
    try:
        return decode_json(sent, _fields, at=name)
    except InvalidRequest as error:  # a text within the body may be no JSON
        raise InvalidRequest(f"{name} is no object in JSON: {error}", param=name) from None


def _completion(model: str, own: GenerateRequest, others: Mapping[str, Raw], *, in_pieces: bool) -> bytes:
    """The request as a body of /v1/completions. Raises InvalidRequest for a stream that should include the prompt."""
    if in_pieces and own.exclude_input_in_output is False:
        raise InvalidRequest(f"{EXCLUDE} must not be false with {STREAM}: true", param=EXCLUDE)
    sampling = {**others, **_sampling(own.sampling_parameters)}
    for name, value in sampling.items():
        if name in _ELSEWHERE and bytes(value) != b"null":
            raise unsupported(f"{SAMPLING}.{name}", _ELSEWHERE[name])
    echoes = not (in_pieces if own.exclude_input_in_output is None else own.exclude_input_in_output)
    fields = {name: _typed(name, value) for name, value in sampling.items()}
    return msgspec.json.encode(
        {**fields, "model": model, "prompt": own.text_input, "stream": in_pieces, "echo": echoes}
    )


def _typed(name: str, value: Raw) -> Any:
    """A number or truth that was sent as text. Raises InvalidRequest."""
    if name not in _SCALARS or not bytes(value).startswith(b'"'):
        return value
    text = decode_json(value, _text, at=name)
    try:
        return msgspec.convert(text, _SCALARS[name], strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name} is {shortened(repr(text), 80)}: {error}", param=name) from None


class TextAnswer:
    """Writes one answer, whole or in pieces: one text of each sample."""

    def __init__(self, of: CompletionAnswer, model: str, version: int, client_id: str, *, in_pieces: bool) -> None:
        self._of, self._model, self._version, self._client_id = of, model, version, client_id
        self.id, self.created, self.in_pieces = of.id, of.created, in_pieces

    def whole(self, outcome: Outcome) -> bytes:
        return self.told([self._of.echoed(outcome, sample) + sample.text for sample in outcome.samples])

    def stream(self, outcome: Outcome) -> TextStream:
        return TextStream(self, outcome)

    def told(self, texts: list[str]) -> bytes:
        return msgspec.json.encode(
            Generated(
                model_name=self._model,
                model_version=str(self._version),
                text_output=texts[0] if len(texts) == 1 else texts,
                id=self._client_id,
            )
        )


class TextStream:
    """Writes the pieces of one, which may be one piece."""

    def __init__(self, answer: TextAnswer, outcome: Outcome) -> None:
        self._answer, self._outcome = answer, outcome
        self._num_left = len(outcome.samples)  # samples that go on

    def delta(self, sample: Sample, delta: TextDelta) -> bytes:
        """The event of `delta`; empty when there is nothing to send. The end always sends one."""
        self._num_left -= delta.finish_reason is not None
        if not self._answer.in_pieces:
            sample.texts.append(delta.text)
            return b"" if self._num_left else _event(self._answer.whole(self._outcome))
        if not delta.text and self._num_left:
            return b""
        return _event(self._answer.told([delta.text if each is sample else "" for each in self._outcome.samples]))

    def last(self) -> bytes:
        return b""


def _event(told: bytes) -> bytes:
    return b"data: " + told + b"\n\n"
