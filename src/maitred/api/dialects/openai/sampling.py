"""Convert a body's fields to a `GenerationAsk`: the model's defaults for absent fields, bounds with numbers."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

from msgspec import UNSET

from maitred.api.dialects.openai.answers import WantedUsage
from maitred.api.dialects.openai.refusals import string_map, token_biases, unsupported
from maitred.api.dialects.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    StreamOptions,
)
from maitred.api.generate.dialect import Answer, GenerationAsk
from maitred.api.http.errors import shortened
from maitred.core.errors import InvalidRequest
from maitred.core.request import MAX_STOP_STRINGS, SamplingParams
from maitred.engine.intake import ServedModel
from maitred.policy.policies import heeding_priority
from maitred.tenancy.caller import Caller
from maitred.tenancy.tenant import TIERS

MAX_STOP_CHARS = 1024
MAX_PRIORITY = 1000
MAX_TEMPERATURE = 2.0
MAX_CACHE_SALT_CHARS = 1024
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
COMPLETION_MAX_TOKENS = 16  # OpenAI's default of the older route

# fields that are named alike in the body and in SamplingParams; None leaves the default
_SAME_NAME = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)
_DEFAULTED_BY_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def chat_sampling(body: ChatCompletionRequest, model: ServedModel, max_n: int) -> SamplingParams:
    """Raises InvalidRequest naming the field, its value and the bound."""
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest(
            f"max_tokens ({body.max_tokens}) and max_completion_tokens ({body.max_completion_tokens}) differ; "
            "send only the second",
            param="max_tokens",
        )
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, name)
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"{name} is {max_tokens}; it must be at least 1", param=name)
    return _sampling(body, model, max_n, max_tokens=max_tokens, logprobs=_chat_logprobs(body))


def completion_sampling(body: CompletionRequest, model: ServedModel, max_n: int) -> SamplingParams:
    """Raises InvalidRequest naming the field, its value and the bound.

    `max_tokens` 0 (with echo: score the prompt) samples one token, which the answer leaves out. Unset, it stays None
    here: the default is no wish of the client, so it must not make a long prompt fail.
    """
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0; without echo it must be at least 1", param="max_tokens")
    if body.max_tokens is None and (body.min_tokens or 0) > COMPLETION_MAX_TOKENS:
        raise InvalidRequest(
            f"min_tokens is {_number(body.min_tokens or 0)}, but max_tokens, unless set, is {COMPLETION_MAX_TOKENS}",
            param="min_tokens",
        )
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of < n:
        raise InvalidRequest(f"best_of ({body.best_of}) is below n ({n})", param="best_of")
    if body.best_of is not None and body.best_of > n:
        raise unsupported("best_of", f"this version returns every sample it draws, so best_of must equal n ({n})")
    prompt_logprobs = body.logprobs if body.echo else None
    asked = body.prompt_logprobs
    if asked is not None:
        prompt_logprobs = max(asked, prompt_logprobs or 0) if asked >= 0 else asked  # a wrong number is not covered up
    extra = {} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs}
    return _sampling(
        body, model, max_n, max_tokens=1 if body.max_tokens == 0 else body.max_tokens, logprobs=body.logprobs, **extra
    )


def wanted_usage(body: GenerationFields) -> WantedUsage:
    """Raises InvalidRequest for wishes that contradict each other."""
    if body.stream_options is None:
        return WantedUsage()
    options: StreamOptions = body.stream_options
    if not body.stream:
        raise InvalidRequest("stream_options is only for stream: true", param="stream_options")
    if options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")
    if options.continuous_usage_stats and not options.include_usage:
        raise InvalidRequest(
            "continuous_usage_stats needs include_usage: true", param="stream_options.continuous_usage_stats"
        )
    return WantedUsage(bool(options.include_usage), bool(options.continuous_usage_stats))


def check_common(body: GenerationFields, caller: Caller, *, policy_without_priorities: str | None) -> None:
    """Bounds of the fields that are not about sampling."""
    if body.metadata is not UNSET:
        string_map(body.metadata, "metadata")
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_CACHE_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(body.cache_salt)} characters; it must have 1 to {MAX_CACHE_SALT_CHARS}",
            param="cache_salt",
        )
    check_priority(body.priority, policy_without_priorities)
    if body.service_tier not in (None, "auto", "default") and (caller.is_anybody or body.service_tier not in TIERS):
        choices = "auto or default" if caller.is_anybody else ", ".join(("auto", *TIERS))
        raise unsupported("service_tier", f"send {choices}")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs does not come with stream: true; leave one out", param="prompt_logprobs")


def check_priority(priority: int | None, policy_without_priorities: str | None) -> None:
    if priority is not None and not 0 <= priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority is {_number(priority)}; it must be from 0 (most urgent) to {MAX_PRIORITY}", param="priority"
        )
    if priority and policy_without_priorities is not None:
        heeding = ", ".join(sorted(heeding_priority()))
        raise unsupported(
            "priority",
            f"the policy in force, {policy_without_priorities}, heeds none; leave it out, or serve with one that does: "
            f"--policy {heeding}",
        )


def make_ask(body: GenerationFields, answer: Answer, **more: Any) -> GenerationAsk:
    """The ask from fields that both routes share; `more` is what differs between them."""
    return GenerationAsk(
        answer=answer,
        stream=bool(body.stream),
        keeps_text=bool(body.echo),
        priority=body.priority,
        tier=body.service_tier,
        cache_salt=body.cache_salt or "",
        store=body.store,
        limits=None if body.ttft_slo_ms is body.queue_timeout_ms is body.timeout_ms is None else body,
        **more,
    )


def _sampling(
    body: GenerationFields, model: ServedModel, max_n: int, *, max_tokens: int | None, **extra: Any
) -> SamplingParams:
    values: dict[str, Any] = {
        name: model.generation_defaults[name] for name in _DEFAULTED_BY_MODEL if name in model.generation_defaults
    }
    for name in _SAME_NAME:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    biases = None if body.logit_bias is UNSET else token_biases(body.logit_bias, "logit_bias")
    if biases is not None:
        values["logit_bias"] = biases
    n = 1 if body.n is None else body.n
    _check_bounds(body, n, max_n)
    _check_count("logit_bias", biases, MAX_LOGIT_BIAS)
    _check_count("stop_token_ids", body.stop_token_ids, MAX_STOP_TOKEN_IDS)
    _check_count("allowed_token_ids", body.allowed_token_ids, model.vocab_size)
    _check_stop_tokens(body.stop_token_ids or (), model.vocab_size)
    values |= {name: value for name, value in extra.items() if value is not None}
    return SamplingParams(n=n, max_tokens=max_tokens, stop=_stop(body.stop), **values)


def _check_bounds(body: GenerationFields, n: int, max_n: int) -> None:
    if not 1 <= n <= max_n:
        raise InvalidRequest(f"n is {_number(n)}; it must be from 1 to {max_n}", param="n")
    if body.temperature is not None and not 0 <= body.temperature <= MAX_TEMPERATURE:
        raise InvalidRequest(
            f"temperature is {body.temperature}; it must be from 0 to {MAX_TEMPERATURE:g}", param="temperature"
        )


def _check_count(name: str, entries: Sized | None, limit: int) -> None:
    if entries is not None and len(entries) > limit:
        raise InvalidRequest(f"{name} has {len(entries)} entries; at most {limit}", param=name)


def _check_stop_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"stop_token_ids has {_number(token)}; the vocabulary has ids 0 to {vocab_size - 1}",
                param="stop_token_ids",
            )


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS}", param="stop")
    for string in strings:
        if len(string) > MAX_STOP_CHARS:
            raise InvalidRequest(f"a stop string has {len(string)} characters; at most {MAX_STOP_CHARS}", param="stop")
    return strings


def _chat_logprobs(body: ChatCompletionRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs is not None and body.top_logprobs != 0:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    top = body.top_logprobs or 0
    if not 0 <= top <= 20:
        raise InvalidRequest(f"top_logprobs is {_number(top)}; it must be from 0 to 20", param="top_logprobs")
    return top


def _number(value: int) -> str:
    """A number as a message may quote it (a client may send hundreds of digits)."""
    return shortened(str(value), 40)
