"""Known fields that this version does not do: refused when they would change the answer, never ignored.

Each is kept undecoded beside the fields that are understood. A value that changes nothing (null, or one of those
listed) passes, because clients send their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from maitred.api.dialects.openai.schemas import ChatCompletionRequest, CompletionRequest
from maitred.errors import UnsupportedParameter

R = TypeVar("R", bound=msgspec.Struct)

# field -> values that change nothing
_BOTH: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "logprob_token_ids": ([],),
    "prompt_embeds": (),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "stream_interval": (1,),
    "return_prompt_text": (False,),
}
CHAT_REFUSED: Mapping[str, tuple[Any, ...]] = {
    **_BOTH,
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
COMPLETION_REFUSED: Mapping[str, tuple[Any, ...]] = {**_BOTH, "suffix": ("",)}

# vLLM removed these; their users should hear by which name to ask
_REMOVED = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
)
# what is known here by another name -> that name: transformers, llama.cpp, Ollama, OpenAI's Responses
_RENAMED: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "repeat_penalty": "repetition_penalty",
    "stop_strings": "stop",
}
_WHY: Mapping[str, str] = {
    "chat_template": "a template may not come with a request; start the server with --chat-template FILE",
    "truncate_prompt_tokens": "prompts are never cut; shorten it yourself",
    "truncation_side": "prompts are never cut; shorten it yourself",
    **dict.fromkeys(_REMOVED, "send structured_outputs in its place; guided_* fields were removed"),
    **{name: f"send {ours}, which is its name here" for name, ours in _RENAMED.items()},
}


def with_refused(body: type[R], refused: Mapping[str, tuple[Any, ...]]) -> type[R]:
    """`body` with the refused fields beside its own, undecoded."""
    fields: list[tuple[str, Any, Any]] = [(name, Raw | UnsetType, UNSET) for name in (*refused, *_REMOVED, *_RENAMED)]
    return msgspec.defstruct(f"{body.__name__}AsSent", fields, bases=(body,), kw_only=True)  # type: ignore[return-value]


ChatAsSent = with_refused(ChatCompletionRequest, CHAT_REFUSED)
CompletionAsSent = with_refused(CompletionRequest, COMPLETION_REFUSED)


def refuse_unbuilt(body: msgspec.Struct, refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedParameter for the first refused field whose value would change the answer."""
    names = (*refused, *_REMOVED, *_RENAMED)
    for name, sent in zip(names, attrgetter(*names)(body), strict=True):
        if sent is not UNSET and _changes_something(bytes(sent), refused.get(name, ())):
            raise unsupported(name, _WHY.get(name))


def refuse_raw(sent: Raw | UnsetType, param: str) -> None:
    """Raise UnsupportedParameter when a refused field of a nested object has a value."""
    if sent is not UNSET and _changes_something(bytes(sent), ([],)):
        raise unsupported(param)


def unsupported(name: str, why: str | None = None) -> UnsupportedParameter:
    return UnsupportedParameter(f"{name} is not supported: {why or 'this version does not do it'}", param=name)


def _changes_something(sent: bytes, neutral: tuple[Any, ...]) -> bool:
    if sent == b"null":
        return False
    if not neutral or len(sent) > 64:  # neutral values are short
        return True
    try:
        value = msgspec.json.decode(sent)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    return not any(value == harmless and type(value) is type(harmless) for harmless in neutral)
