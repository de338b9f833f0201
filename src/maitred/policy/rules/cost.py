"""What a request is predicted to cost, in input tokens. A prediction can be wrong; what it leads to is bounded."""

from __future__ import annotations

from maitred.request import RequestState


def predicted_output(request: RequestState) -> float:
    """Output tokens, from 1 to max_tokens whatever the predictor said; max_tokens without one."""
    predicted = request.predicted_output_tokens
    if predicted is None or not predicted <= request.max_tokens:  # a NaN goes here too
        return request.max_tokens
    return predicted if predicted > 1.0 else 1.0


def predicted_cost(request: RequestState, output_weight: float) -> float:
    """Of all of it."""
    return request.num_prompt_tokens + output_weight * predicted_output(request)


def remaining_cost(request: RequestState, output_weight: float) -> float:
    """Of what is to come, its prompt again included; never more than `predicted_cost`."""
    return request.num_prompt_tokens + output_weight * remaining_output(request)


def remaining_output(request: RequestState) -> float:
    """Output tokens; at least 1 is still to come, however wrong the prediction was."""
    left = predicted_output(request) - len(request.output_token_ids)
    return left if left > 1.0 else 1.0


def largest_cost(request: RequestState, output_weight: float) -> float:
    """The most that any prediction can make of it."""
    return request.num_prompt_tokens + output_weight * request.max_tokens
