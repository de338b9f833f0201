"""Checks of sampling parameters before admission: no arrays, so the server's process loads no numpy for it."""

from __future__ import annotations

from maitred.core.errors import InvalidRequest
from maitred.core.request import SamplingParams


def check_sampling_tokens(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model does not have; called before admission, when the vocabulary is known.

    Raises InvalidRequest naming the field, the id and the vocabulary.
    """
    named = (("logit_bias", sampling.logit_bias or ()), ("allowed_token_ids", sampling.allowed_token_ids or ()))
    for param, token_ids in named:
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"{param} names token {token_id}; the model's tokens are 0 to {vocab_size - 1}", param=param
                )
