"""The native sampler: rows of logits in, a token or a fault for each out; checks shapes before C++ sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.kernels import _native

FAULTS: tuple[str | None, ...] = (
    None,
    "logits are NaN",
    "logits hold +inf",
    "every logit is -inf",
    "no token can be sampled: the parameters leave none that the model allows",
)
NO_LOGPROBS = -1


class Sampled(NamedTuple):
    """Outcome of R rows. Logprobs are natural and of the untouched logits; their columns past a row's `num_top`,
    and all of a row that asked for none or has a fault, mean nothing.
    """

    tokens: NDArray[np.int32]  # [R], 0 where there is a fault
    faults: NDArray[np.int32]  # [R], index into FAULTS
    top_ids: NDArray[np.int32]  # [R, most num_top], likeliest first
    logprobs: NDArray[np.float64]  # [R, 1 + most num_top], the token's own, then those of top_ids
    ranks: NDArray[np.int64]  # [R], the token's, from 1


class Sampler:
    """Memory for rows on the threads of `pool` (a _native.ThreadPool); one call at a time."""

    def __init__(self, pool: Any, *, isa: str = "auto") -> None:
        try:
            self.native = _native.Sampler(pool, isa)
        except ValueError as error:
            raise KernelError(str(error)) from None

    def sample(
        self,
        logits_RV: NDArray[np.float32],
        settings_R5: NDArray[np.float64],
        changes: Sequence[tuple[Any, ...] | None],
        num_top_R: NDArray[np.int32],
    ) -> Sampled:
        """Draw one token a row; rows with changes are overwritten.

        Settings: temperature (0 is greedy), top_k (0 is no limit), top_p, min_p, the draw's random number in [0, 1).
        Changes: what `sampler_state.LogitChanges` holds, or None. `num_top`: likeliest tokens to list, or NO_LOGPROBS.
        Raises KernelError for arrays that do not belong together or ids outside the vocabulary.
        """
        num_rows = len(logits_RV)
        width = max(int(num_top_R.max(initial=0)), 0)
        sampled = Sampled(
            np.empty(num_rows, np.int32),
            np.empty(num_rows, np.int32),
            np.zeros((num_rows, width), np.int32),
            np.zeros((num_rows, width + 1), np.float64),
            np.zeros(num_rows, np.int64),
        )
        if num_rows == 0:
            return sampled
        try:
            self.native.sample(logits_RV, settings_R5, list(changes), num_top_R, *sampled)
        except (ValueError, TypeError) as error:
            raise KernelError(f"rows cannot be sampled: {error}") from None
        return sampled
