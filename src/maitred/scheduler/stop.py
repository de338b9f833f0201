"""Stop rule: whether a token ends its request. Stop strings are found outside, where there is text."""

from __future__ import annotations

from collections.abc import Callable

from maitred.core.request import FinishReason, RequestState

StopRule = Callable[[RequestState], FinishReason | None]
"""Asked after each new output token; may set `stop_reason`. Replay has its own, that answers from the log."""


def stop_at_token(request: RequestState) -> FinishReason | None:
    """End-of-sequence, then stop tokens, then length. The first two count only from `min_tokens` tokens on."""
    sampling, num_output = request.spec.sampling, len(request.output_token_ids)
    if num_output >= sampling.min_tokens:
        token = request.output_token_ids[-1]
        if token in request.spec.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if token in sampling.stop_token_ids:
            request.stop_reason = token
            return FinishReason.STOP
    return FinishReason.LENGTH if num_output >= request.max_tokens else None
