"""Proposer: makes up tokens that may follow a request's, for the model to check (speculative decoding).

Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023, arXiv:2211.17192.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from maitred.core.request import SamplingParams

Ints = NDArray[np.int64]


class IntArray(Protocol):
    """Integers that grow; `executor.state.GrowingInts` is one."""

    @property
    def array(self) -> Ints:
        """A view of what is held now."""


class SamplerSettings(Protocol):
    """Settings that decide a draw besides the logits; `executor.sampler_state.RequestSampler` has them."""

    sampling: SamplingParams
    seed: int
    sample_index: int


class DraftedRequest(Protocol):
    """Request as a proposer sees it; `executor.state.HeldRequest` is one."""

    request_id: str
    num_prompt_tokens: int
    prediction: Sequence[int]  # what its client expects to come, as tokens

    @property
    def tokens(self) -> IntArray:
        """Known tokens, prompt and output."""

    @property
    def blocks(self) -> IntArray:
        """The block table, with what the plan gave for the drafts."""

    @property
    def sampler(self) -> SamplerSettings: ...


class DraftAsk(NamedTuple):
    """Drafts are asked for: at most so many tokens after the last known one of a request."""

    request: DraftedRequest
    num_drafts: int  # >= 1


class Proposer(Protocol):
    """Proposes drafts for requests of one executor; called by its thread alone."""

    @property
    def name(self) -> str:
        """Name as `--speculative` has it."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        """Propose at most `num_drafts` tokens for each, in order; empty where there are none. A fault of its own (a
        NaN) costs the drafts and nothing else.
        """

    def forget(self, request_id: str) -> None:
        """The executor holds this request no more, or holds it anew; also of ids it never heard of."""

    def close(self) -> None:
        """Give back memory; the proposer is not used again."""
