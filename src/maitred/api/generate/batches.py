"""From an `GenerationAsk` to the samples of each prompt: rendered, tokenised, checked; in a thread."""

from __future__ import annotations

from collections.abc import Sequence

from maitred.api.generate.dialect import GenerationAsk, Prompt
from maitred.api.http.edge import Edge
from maitred.engine.intake import make_requests
from maitred.errors import InvalidRequest, RequestError
from maitred.gate.terms import TimeLimits, cap_max_tokens
from maitred.request import RequestSpec

# in one answer; all are kept until it ends, some 300 bytes each, and writing so many takes 0.2 s
MAX_PROMPT_LOGPROBS = 256 * 1024


def make_batches(edge: Edge, ask: GenerationAsk, cache_salt: str, limits: TimeLimits) -> list[list[RequestSpec]]:
    """The samples of each prompt. Ids are unique even when clients repeat theirs. Raises RequestError."""
    try:
        prompts = ask.prompts()
        batches = _batches(edge, ask, prompts, cache_salt, limits)
    except RequestError as error:
        error.param = ask.field_names.get(error.param or "", error.param)
        raise
    if not ask.keeps_text:
        prompts.clear()
    return [cap_max_tokens(batch, ask.default_max_tokens) for batch in batches]


def _batches(
    edge: Edge, ask: GenerationAsk, prompts: Sequence[Prompt], cache_salt: str, limits: TimeLimits
) -> list[list[RequestSpec]]:
    now, num_tokens = edge.clock.now(), 0
    batches: list[list[RequestSpec]] = []
    for position, prompt in enumerate(prompts):
        try:
            batch = make_requests(
                edge.model,
                prompt,
                ask.sampling,
                request_id=f"{next(edge.ids):x}.{ask.id}",
                now=now,
                cache_salt=cache_salt,
                ttft_slo_s=limits.ttft_slo_s,
                start_by=_after(now, limits.queue_timeout_s),
                finish_by=_after(now, limits.timeout_s),
                add_special_tokens=ask.add_special_tokens,
            )
        except RequestError as error:
            if error.param == "prompt" and len(prompts) > 1:
                error.param = f"prompt[{position}]"
            raise
        batches.append(batch)
        num_tokens += batch[0].num_prompt_tokens * len(batch)
        _check_prompt_logprobs(num_tokens, ask.sampling.prompt_logprobs)
    return batches


def _check_prompt_logprobs(num_tokens: int, num_top: int | None) -> None:
    """Raise InvalidRequest once `num_tokens` of prompts have more log-probabilities than one answer may hold."""
    if num_top is not None and num_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{num_tokens} tokens of prompts (for every sample anew) with {num_top + 1} log-probabilities each are "
            f"{num_tokens * (num_top + 1)}; at most {MAX_PROMPT_LOGPROBS} in one answer: ask for fewer of each token, "
            "or send fewer tokens at a time",
            param="prompt_logprobs",
        )


def _after(now: float, seconds: float | None) -> float | None:
    return now + seconds if seconds is not None else None
