"""What a router reads of a body: fields that decide, in one pass over the JSON, and prefix keys of the prompt. Pure.

A prefix key is a link of a salted hash chain over the bytes of a prompt as they stand in the body; no tokenizer is
needed. Equal key means, but for 64-bit collisions, equal prompt up to the end of its piece. A collision sends a request
to a replica that has less of its prefix than was thought, and never shares KV: replicas find that by hashes of tokens.
Source of the hash: XXH3, Collet, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType
from xxhash import xxh3_64_intdigest as hash_of

SMALL_BYTES = 16 * 1024  # read at once, whatever is in it


class RoutedStreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class RoutedBody(msgspec.Struct, kw_only=True):
    """Fields of chat and text completions, named as in OpenAI's and vLLM's schemas; all others are skipped.

    Nothing is checked: what is wrong with a body its replica tells the client.
    """

    model: str | None = None
    # the prompt, as its bytes stand in the body
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    instructions: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET
    system: Raw | UnsetType = UNSET  # of Anthropic's, before the messages
    # how much is asked for, and in which form
    stream: bool | None = None
    stream_options: RoutedStreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
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
    metadata: Raw | UnsetType = UNSET
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None
    service_tier: str | None = None
    ttft_slo_ms: float | None = None
    queue_timeout_ms: float | None = None
    timeout_ms: float | None = None
    keep_alive: float | str | None = None  # of Ollama's, for one of several models


_TYPES: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(RoutedBody)}
_OF_GENERATE = ("text_input", "parameters", "sampling_parameters")  # of Triton's
_OF_OLLAMA = ("options", "num_predict", "think", "raw", "context")
_UNREAD = msgspec.defstruct(
    "_Unread", [(name, Raw | UnsetType, UNSET) for name in (*_TYPES, *_OF_GENERATE, *_OF_OLLAMA)], kw_only=True
)
_decode = msgspec.json.Decoder(RoutedBody).decode
_decode_unread = msgspec.json.Decoder(_UNREAD).decode
_WHOLE = re.compile(rb"(-?\d{1,15})\.0+")
_WRONG = (msgspec.DecodeError, ValueError, RecursionError)

RESPONSES = "/v1/responses"
KSERVE_MODELS = "/v2/models/"
GENERATE, GENERATE_STREAM = "generate", "generate_stream"
GENERATE_ENDS = (f"/{GENERATE}", f"/{GENERATE_STREAM}")
GENERATE_PATH = re.compile(  # after KSERVE_MODELS
    rf"(?P<model>.+?)(?:/versions/(?P<version>[0-9]{{1,18}}))?/(?P<action>{GENERATE}|{GENERATE_STREAM})"
)


def generate_asked(path: str) -> re.Match[str] | None:
    """Match the path of a text generation request in Triton's extension."""
    return GENERATE_PATH.fullmatch(path, len(KSERVE_MODELS)) if path.startswith(KSERVE_MODELS) else None


MESSAGES = "/v1/messages"  # of Anthropic's
# What a coding agent puts into its prompts for its own books, anew each turn (anthropics/claude-code#24168, #68900,
# jundot/omlx#2881): a line with a checksum before the system prompt, and how many tokens are left.
BILLING = r"x-anthropic-billing-header:[^\n\\\"]*"
_REMAINS = r"(?:Token usage|USD budget): [^<\n\\\"]{1,80} remaining"
BUDGET = (
    r"<total_tokens>[\d,]+ tokens left</total_tokens>"
    rf"|<(?P<tag>system-reminder|system_warning)>(?:\s|\\n)*{_REMAINS}(?:\s|\\n)*</(?P=tag)>"
)
_NOT_OF_KEYS = re.compile(  # the client's marks for a cache move too
    rf'{BILLING}|(?:\\n){{0,4}}(?:{BUDGET})|,\s*"cache_control"\s*:\s*(?:\{{[^{{}}]*\}}|null)'.encode()
)


class _Metadata(msgspec.Struct):
    user_id: str | None = None


_decode_metadata = msgspec.json.Decoder(_Metadata).decode


def _read_messages(body: bytes) -> RoutedBody:
    """A body of Anthropic's: the system prompt is its first message, without what its replica leaves out too."""
    read = read_body(body)
    sent = b"" if isinstance(read.messages, UnsetType) else bytes(read.messages)
    if not isinstance(read.system, UnsetType) and (rest := sent.lstrip()[:1] and sent.strip()[1:]):
        first = b'[{"role":"system","content":%b}' % bytes(read.system)
        sent = first + (b"," if rest != b"]" else b"") + rest
    if sent:
        read.messages = Raw(_NOT_OF_KEYS.sub(b"", sent))
    with suppress(*_WRONG):
        read.user = _decode_metadata(read.metadata or b"{}").user_id
    return read


OLLAMA = "/api/"
_LATEST = ":latest"


def without_latest(name: str | None) -> str | None:
    """A model's name without the tag that Ollama's clients write behind names that have none."""
    return name.removesuffix(_LATEST) if name else None


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(rf"(\d+(?:\.\d*)?|\.\d+)({'|'.join(_UNITS_S)})", re.ASCII)


def keep_alive_s(sent: float | str | None) -> float | None:
    """Ollama's `keep_alive` in seconds, below 0 for ever: a number of them, or a duration as Go writes it ("1h30m",
    time.ParseDuration). None is none.
    """
    if not isinstance(sent, str):
        return sent
    bare = sent[sent[:1] in ("-", "+") :]
    parts = _DURATION.findall(bare[:64])  # a longer one is none
    if bare != "0" and (not parts or "".join(map("".join, parts)) != bare):
        return None
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    return -seconds if sent[0] == "-" else seconds


def _read_ollama(path: str, body: bytes) -> RoutedBody:
    """A body of Ollama's: it streams by default, and a prompt is one message of a chat unless it is `raw`."""
    sent = _unread(body)
    options = _unread(sent.options)
    read = _filled([sent, options])
    read.stream = read.stream is not False
    with suppress(*_WRONG):
        read.max_tokens = max(0, msgspec.json.decode(options.num_predict or b"0", type=int)) or None
    if read.seed is not None and read.seed < 0:
        read.seed = None
    if path == f"{OLLAMA}generate" and sent.raw != b"true" and not isinstance(read.prompt, UnsetType):
        said = (("context", sent.context), ("system", read.system), ("user", read.prompt))
        messages = [b'{"role":"%b","content":%b}' % (role.encode(), bytes(text)) for role, text in said if text]
        read.messages, read.prompt = Raw(b"[%b]" % b",".join(messages)), UNSET
    if sent.think:
        read.chat_template_kwargs = Raw(b'{"think":%b}' % bytes(sent.think))
    return read


def read_asked(path: str, body: bytes) -> RoutedBody:
    """Read a body as `read_body`; one of Anthropic's, Ollama's, of responses, or Triton's generate by OpenAI's names of
    the fields of chats and completions.
    """
    if path == MESSAGES:
        return _read_messages(body)
    if path == RESPONSES:
        return _read_response(body)
    if path.startswith(OLLAMA):
        return _read_ollama(path, body)
    found = generate_asked(path)
    if found is None:
        return read_body(body)
    read = _read_generate(body)
    read.model, read.stream = found["model"], found["action"] == GENERATE_STREAM
    return read


def _read_response(body: bytes) -> RoutedBody:
    """A body of responses: instructions and input are its messages, a text one, and so each item."""
    read = read_body(body)
    texts = [bytes(text) for text in (read.instructions, read.input) if not isinstance(text, UnsetType)]
    inner = [text.strip()[1:-1] if text.lstrip()[:1] == b"[" else text for text in texts]
    read.messages = Raw(b"[%b]" % b",".join(text for text in inner if text.strip()))
    read.max_tokens = read.max_output_tokens
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


PIECE_BYTES = 256  # some 64 tokens of English
MAX_KEYS = 4096  # 1 MiB of one text
MAX_LISTED = 64 * 1024  # commas of messages that are still cut apart: so many items take 3 ms

_decode_list = msgspec.json.Decoder(list[Raw]).decode


class PrefixKeys(NamedTuple):
    """A key for each piece of a prompt, in order, and where each piece ends, in bytes of all messages so far."""

    keys: tuple[int, ...]
    ends: tuple[int, ...]


NO_KEYS = PrefixKeys((), ())


def prefix_keys(body: RoutedBody, salt: str = "") -> PrefixKeys:
    """Hash a body's prefixes: at most MAX_KEYS keys of 64 bits, some 3 us for 1 KB. `salt` is the tenant's cache group.

    A key covers salt, model, tools and template variables too, and each piece up to its own. Pieces have PIECE_BYTES,
    the last of a message has what is left, so that a conversation that grows keeps all keys that it had.
    """
    texts = texts_of(body)
    if not texts:
        return NO_KEYS
    key, at = _root(body, salt), 0
    keys: list[int] = []
    ends: list[int] = []
    for text in texts:
        sent = bytes(text)
        for start in range(0, len(sent), PIECE_BYTES):
            piece = sent[start : start + PIECE_BYTES]
            key = hash_of(piece, key)
            keys.append(key)
            at += len(piece)
            ends.append(at)
        if len(keys) >= MAX_KEYS:
            break
    return PrefixKeys(tuple(keys[:MAX_KEYS]), tuple(ends[:MAX_KEYS]))


def texts_of(body: RoutedBody) -> Sequence[Raw]:
    """The JSON of each message, or of the first prompt; one text where the messages are too many to be told apart."""
    if isinstance(body.messages, UnsetType):
        return () if isinstance(body.prompt, UnsetType) else _first_of(body.prompt)
    sent = body.messages
    try:
        return _decode_list(sent) if bytes(sent).count(b",") < MAX_LISTED else (sent,)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return (sent,)


def _first_of(prompt: Raw) -> Sequence[Raw]:
    """The first of prompts in a list, texts or lists of tokens; none where they are too many to be told apart."""
    sent = bytes(prompt)
    if not sent.startswith(b"[") or sent[1:].lstrip()[:1] not in (b'"', b"["):
        return (prompt,)
    try:
        return _decode_list(sent)[:1] if sent.count(b",") < MAX_LISTED else ()
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ()


def _root(body: RoutedBody, salt: str) -> int:
    key = 0
    for text in (salt, body.model, body.cache_salt):
        key = hash_of((text or "").encode(errors="surrogatepass"), key)
    for raw in (body.tools, body.chat_template_kwargs):
        key = hash_of(b"" if isinstance(raw, UnsetType) else bytes(raw), key)
    return key
