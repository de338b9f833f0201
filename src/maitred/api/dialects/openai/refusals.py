"""Fields of bodies that are refused, with what to do instead, and those whose JSON is bounded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from maitred.api.dialects.openai.schemas import Prediction, SentTokenIds
from maitred.api.generate.dialect import Prompt
from maitred.api.http.app import App
from maitred.api.http.bodies import BodyDecoder, Fields, Sent, decode_json
from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange
from maitred.core.errors import InvalidRequest, UnsupportedContent, UnsupportedParameter

T = TypeVar("T")
MAX_OBJECT_BYTES = 64 * 1024
MAX_PROMPTS = 1024
MAX_LISTED = 1_000_000  # items of a prompt that is a list; so many token ids take 25 ms to decode

MAX_PREDICTION_BYTES = 2**20

_PREDICTION = msgspec.json.Decoder(Prediction)
_ANY = msgspec.json.Decoder(dict[str, Any])
_VALUE = msgspec.json.Decoder(Any)
_UNREAD = msgspec.json.Decoder(dict[str, Raw])
_STRINGS = msgspec.json.Decoder(dict[str, str])
_BIASES = msgspec.json.Decoder(dict[int, float])
_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_TOKENS = msgspec.json.Decoder(SentTokenIds)
_TOKEN_LISTS = msgspec.json.Decoder(list[SentTokenIds])
_FIRST_ITEM = re.compile(rb"\[\s*(.)")


def any_object(raw: Raw | UnsetType, name: str) -> dict[str, Any] | None:
    """An object of whatever; None when absent or null."""
    return _object(raw, name, _ANY)


def check_object(raw: Raw | UnsetType, name: str) -> None:
    """Check that the field, if present, is an object; its content is not used."""
    _object(raw, name, _UNREAD)


def string_map(raw: Raw | UnsetType, name: str) -> dict[str, str] | None:
    return _object(raw, name, _STRINGS)


def token_biases(raw: Raw | UnsetType, name: str) -> dict[int, float] | None:
    return _object(raw, name, _BIASES)


def any_value(raw: Raw | UnsetType, name: str, most: int) -> Any:
    """Whatever was sent, of at most so many bytes; None when absent or null."""
    return _object(raw, name, _VALUE, most)


def _object(
    raw: Raw | UnsetType, name: str, decoder: msgspec.json.Decoder[T], most: int = MAX_OBJECT_BYTES
) -> T | None:
    if isinstance(raw, UnsetType):
        return None
    sent = bytes(raw)
    if sent == b"null":
        return None
    if len(sent) > most:
        raise InvalidRequest(f"{name} has {len(sent)} bytes; at most {most}", param=name)
    return decode_json(sent, decoder, at=name)


def predicted_text(raw: Raw | UnsetType) -> str:
    """Text of a prediction; empty when absent or null. Raises InvalidRequest."""
    prediction = _object(raw, "prediction", _PREDICTION, MAX_PREDICTION_BYTES)
    if prediction is None:
        return ""
    parts = prediction.content if isinstance(prediction.content, list) else []
    for at, kind, known in [
        ("prediction.type", prediction.type, "content"),
        *((f"prediction.content[{i}].type", part.type, "text") for i, part in enumerate(parts)),
    ]:
        if kind != known:
            raise InvalidRequest(f"{at} is {shortened(repr(kind))}; it must be {known!r}", param=at)
    return prediction.content if isinstance(prediction.content, str) else "".join(part.text or "" for part in parts)


def prompts_of(
    raw: Raw, *, at: str = "prompt", max_listed: int = MAX_LISTED, max_prompts: int = MAX_PROMPTS
) -> list[Prompt]:
    """One text, one list of token ids, or a list of either; the first item says which. `at` is the field.

    `max_listed` bounds the tokens of all lists together; it counts commas, which texts have too.
    """
    sent = bytes(raw)
    if sent.startswith(b'"'):
        return [decode_json(sent, _TEXT, at=at)]
    found = _FIRST_ITEM.match(sent)
    if found is None:
        raise InvalidRequest(f"{at} must be a text, a list of token ids, or a list of either", param=at)
    num_listed = sent.count(b",") + 1
    if num_listed > max_listed:
        text = f"{at} has about {num_listed} items; at most {max_listed}"
        raise InvalidRequest(text, param=at, code="too_many_items")
    prompts: list[Prompt]
    if found[1] == b"[":
        _check_count(sent.count(b"[") - 1, at, max_prompts)  # all of them structure: there are only numbers inside
        prompts = [*decode_json(sent, _TOKEN_LISTS, at=at)]
    elif found[1] == b'"':
        prompts = [*decode_json(sent, _TEXTS, at=at)]
    else:
        tokens = decode_json(sent, _TOKENS, at=at)
        prompts = [tokens] if tokens else []
    _check_count(len(prompts), at, max_prompts)
    return prompts


def _check_count(num_prompts: int, at: str, most: int) -> None:
    if not 1 <= num_prompts <= most:
        raise InvalidRequest(f"{at} has {num_prompts} prompts; it must have 1 to {most}", param=at)


Refused = Mapping[str, tuple[Any, ...]]  # field -> values that change nothing

_BOTH: Refused = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
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
    "ec_transfer_params": ({},),
    "watermarking": (False,),
    "routed_experts_prompt_start": (0,),
    "return_token_offsets": (False,),
}
# llama.cpp's server, and front ends that were written for it or for text-generation-webui. Parameters of a sampler
# (mirostat_tau, dry_base, ...) are not listed: without the field that turns it on they do nothing there either.
_SAMPLERS: Refused = {
    "typical_p": (1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "top_n_sigma": (-1,),
    "adaptive_target": (-1,),
    "top_a": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "smoothing_factor": (0,),
    "no_repeat_ngram_size": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "watermark": (False,),
}
_ORDER: Refused = {"samplers": ([],), "sampler_order": ([],), "sampler_priority": ([],), "temperature_last": (False,)}
_LLAMA_CPP: Refused = {
    "grammar": ("",),
    "json_schema": (),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "repeat_last_n": (-1,),
    "min_keep": (0,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "response_fields": ([],),
    "timings_per_token": (False,),
    "return_progress": (False,),
    "t_max_predict_ms": (-1, 0),
    "n_indent": (0,),
    "lora": ([],),
    "reasoning_format": ("auto", "deepseek", "parsed"),
    "parse_tool_calls": (True,),
    "reasoning_budget": (-1,),
    "reasoning_budget_tokens": (-1,),
}
_SGLANG: Refused = {
    "regex": (),
    "ebnf": (),
    "stop_regex": ([],),
    "lora_path": (),
    "session_params": ({},),
    "custom_params": ({},),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "return_meta_info": (False,),
    "bootstrap_host": (),
    "bootstrap_room": (),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "task": (),
    "images_config": ({},),
}
# transformers and TGI, Ollama, Mistral, Alibaba, OpenRouter, Anthropic, OpenAI's Responses
_OTHERS: Refused = {
    "do_sample": (True,),
    "num_beams": (1,),
    "max_length": (),
    "truncate": (),
    "parameters": ({},),
    "adapter_id": (),
    "options": ({},),
    "format": ("",),
    "template": ("",),
    "raw": (False,),
    "num_ctx": (),
    "images": ([],),
    "think": (),
    "thinking": (),
    "enable_thinking": (),
    "reasoning": ({},),
    "enable_search": (False,),
    "safe_prompt": (False,),
    "prompt_mode": (),
    "transforms": ([],),
    "plugins": ([],),
    "system": ("",),
    "instructions": ("",),
    "previous_response_id": (),
    "conversation": (),
    "max_tool_calls": (),
    "text": ({}, {"format": {"type": "text"}}),
}
# vLLM removed these; their users should hear by which name to ask
_REMOVED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_decoding_backend": "...",
    "guided_whitespace_pattern": "whitespace_pattern",
}
# what is known here by another name -> that name
_RENAMED: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "n_cmpl": "n",
    "repeat_penalty": "repetition_penalty",
    "rep_pen": "repetition_penalty",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "banned_strings": "bad_words",
    "ban_eos_token": "ignore_eos",
    "no_stop_trim": "include_stop_str_in_output",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "rid": "request_id",
    "extra_key": "cache_salt",
    "return_tokens": "return_token_ids",
    "return_prompt_token_ids": "return_token_ids",
    "return_full_text": "echo",
    "thinking_budget": "thinking_token_budget",
}
_EVERYWHERE: Refused = {
    **_BOTH,
    **_SAMPLERS,
    **_ORDER,
    **_LLAMA_CPP,
    **_SGLANG,
    **_OTHERS,
    **dict.fromkeys(_REMOVED, ()),
    **dict.fromkeys(_RENAMED, (False, [])),
}
CHAT_REFUSED: Refused = {
    **_EVERYWHERE,
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "use_audio_in_video": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "input_ids": (),
}
COMPLETION_REFUSED: Refused = {
    **_EVERYWHERE,
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "suffix": ("",),
    "tools": ([],),
    "max_completion_tokens": (),
    "top_logprobs": (0,),
    "prediction": (),
}
TOKENIZE_REFUSED: Refused = {"tools": ([],), "chat_template": (), "mm_processor_kwargs": ({},)}
_INSTRUCTIONS = ("input_type", "task_type", "instruction")
SCORE_REFUSED: Refused = {
    "max_tokens_per_doc": (),
    "max_chunks_per_doc": (),
    "use_activation": (True,),
    "activation": (True,),
    "rank_fields": (["text"], []),
}
EMBEDDING_REFUSED: Refused = {
    **dict.fromkeys(("truncation_side", "truncate", "truncation"), (False,)),
    **dict.fromkeys(_INSTRUCTIONS, ("",)),
    **dict.fromkeys(("output_dimension", "output_dimensionality"), ()),
    "messages": ([],),
    "images": ([],),
    "normalize": (),
    "embed_dtype": ("float32",),
    "output_dtype": ("float",),
    "embedding_types": (["float"],),
    "endianness": ("native", "little"),
}

_ONE_AFTER_THE_OTHER = "their order is fixed: penalties, temperature, min_p, top_k, top_p"
_NEVER_CUT = "prompts are never cut, and texts of /v1/embeddings by truncate_prompt_tokens: -1 alone"
_ADAPTER = "name the adapter in model"
_THOUGHTS = "send reasoning_effort (none is off)"
_WHY: Mapping[str, str] = {
    **dict.fromkeys(_SAMPLERS, "there is no such sampler; shape the draw by temperature, min_p, top_k and top_p"),
    **dict.fromkeys(_ORDER, _ONE_AFTER_THE_OTHER),
    "chat_template": "a template may not come with a request; start the server with --chat-template FILE",
    "template": "a template may not come with a request; start the server with --chat-template FILE",
    **dict.fromkeys(("truncate_prompt_tokens", "truncation_side", "truncate", "transforms"), _NEVER_CUT),
    "truncation": _NEVER_CUT,
    **dict.fromkeys(_INSTRUCTIONS, "write it before the text"),
    **dict.fromkeys(("output_dimension", "output_dimensionality"), "send dimensions, which is its name here"),
    "normalize": "the model's config says whether vectors are",
    "messages": "send texts as input",
    **dict.fromkeys(("lora", "lora_path", "adapter_id"), _ADAPTER),
    "grammar": 'send structured_outputs: {"grammar": ...}',
    "ebnf": 'send structured_outputs: {"grammar": ...}',
    "regex": 'send structured_outputs: {"regex": ...}',
    "json_schema": 'send response_format: {"type": "json_schema", "json_schema": {...}}',
    "format": "send response_format",
    "text": "send response_format",
    **dict.fromkeys(("grammar_lazy", "grammar_triggers", "parse_tool_calls"), "send tools, which bring their grammar"),
    "stop_regex": "send stop, which are plain texts",
    "repeat_last_n": "repetition_penalty looks at the whole prompt and answer",
    "min_keep": "min_p and top_p keep one token at least",
    "n_probs": "send logprobs",
    "post_sampling_probs": "send logprobs, which are those of the model",
    "logprob_token_ids": "send logprobs, which name the likeliest tokens",
    "timings_per_token": 'send stream_options: {"include_usage": true}, whose timing_ms has them',
    "return_meta_info": "the fields of usage have it",
    "return_cached_tokens_details": "usage.prompt_tokens_details has cached_tokens",
    "t_max_predict_ms": "send timeout_ms, which ends the request with an error",
    **dict.fromkeys(("reasoning_budget", "reasoning_budget_tokens"), "send thinking_token_budget"),
    **dict.fromkeys(("reasoning_format", "separate_reasoning"), "send include_reasoning: false to leave thoughts out"),
    **dict.fromkeys(("think", "thinking", "reasoning"), _THOUGHTS),
    "enable_thinking": 'send chat_template_kwargs: {"enable_thinking": ...}',
    "do_sample": "send temperature: 0 for the likeliest token",
    "num_beams": "there is no beam search; send n for several answers",
    "use_beam_search": "there is no beam search; send n for several answers",
    "max_length": "send max_tokens, which counts new tokens alone",
    "num_ctx": "the server's --max-model-len sets it",
    "parameters": "send its fields beside the others",
    "options": "send its fields beside the others",
    "raw": "send the text to /v1/completions",
    "images": "only text is read",
    "use_audio_in_video": "only text is read",
    "system": "send a message with the role system",
    "instructions": "send a message with the role system",
    "safe_prompt": "send a message with the role system",
    **dict.fromkeys(("previous_response_id", "conversation"), "nothing is kept; send the whole conversation"),
    "functions": "send tools",
    "function_call": "send tool_choice",
    "best_of": "send n",
    "input_ids": "send the tokens as the prompt of /v1/completions",
    "prediction": "send it to /v1/chat/completions",
    "max_completion_tokens": "send max_tokens, which is its name here",
    "top_logprobs": "send logprobs, which is the number here",
    **{name: f'send structured_outputs: {{"{ours}": ...}}' for name, ours in _REMOVED.items()},
    "guided_decoding_backend": "there is one; leave it out",
    **{name: f"send {ours}, which is its name here" for name, ours in _RENAMED.items()},
}


def heed_others(app: App, exchange: Exchange, sent: Sent[Any], decoder: BodyDecoder[Any], refused: Refused) -> None:
    """Handle the other fields of a body: raise UnsupportedParameter for the first that would change the answer, then
    report or refuse the unknown ones.
    """
    refuse_unbuilt(sent.refused, refused)
    app.ignored_fields.heed(exchange, sent.unknown, decoder.known)


def refuse_unbuilt(sent: Fields, refused: Refused) -> None:
    for name, value in sent.items():
        if _changes_something(bytes(value), refused[name]):
            raise unsupported(name, _WHY.get(name))


def refuse_raw(sent: Raw | UnsetType, param: str) -> None:
    """Raise UnsupportedParameter when a refused field of a nested object has a value."""
    if has_value(sent):
        raise unsupported(param)


def has_value(sent: Raw | UnsetType) -> bool:
    """Whether an undecoded field was sent with a value that is not empty."""
    return sent is not UNSET and _changes_something(bytes(sent), ([],))


def unsupported(name: str, why: str | None = None) -> UnsupportedParameter:
    return UnsupportedParameter(f"{name} is not supported: {why or 'this version does not do it'}", param=name)


def unsupported_content(at: str, what: str) -> UnsupportedContent:
    """`what` stands at `at`, a path in the body."""
    return UnsupportedContent(f"{at} is not supported: it is {what}, and this model reads only text", param=at)


def _changes_something(sent: bytes, neutral: tuple[Any, ...]) -> bool:
    if sent == b"null":
        return False
    if not neutral or len(sent) > 64:  # neutral values are short
        return True
    try:
        value = msgspec.json.decode(sent)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    return not any(value == harmless and _kind(value) is _kind(harmless) for harmless in neutral)


def _kind(value: object) -> type:
    """1 is 1.0, and not True."""
    return float if type(value) is int else type(value)
