"""Head: one layer beside a served model, which drafts tokens from what that model computed (EAGLE-3).

It reads the residual stream of the served model at some layers (taps) and the token that came after: what it says is
the token after that one. Then it reads its own state in place of the taps, and goes on.
Source: Li et al., EAGLE-3: Scaling up Inference Acceleration via Training-Time Test, 2025, arXiv:2503.01840.
"""

from __future__ import annotations

from dataclasses import dataclass

from maitred.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Spec of a head that computes hidden = fc(taps), then a layer that reads token and hidden side by side.

    Parameters beside those of `decoder` (`spec.parameter_shapes`, whose `layers.0.qkv.weight` is twice as wide):
    `fc.weight` [hidden, taps * hidden], `layers.0.hidden_norm.weight` [hidden]; `taps_norm.weight` [taps * hidden]
    where `norms_taps`; `tap_norms.{i}.weight` [hidden] where `norms_each_tap`.
    """

    decoder: DecoderSpec
    """The head's one layer, its norm and its output; `vocab_size` counts the tokens that it can draft.
    `embedding.weight` has a row for each token of the served model.
    """
    taps: tuple[int, ...]
    """Number of layers of the served model after which each tap is taken; 0 is the embedding."""
    num_embeddings: int
    """Tokens of the served model."""
    norms_taps: bool = False
    """Norm over all taps of a token as one vector, before fc (`norm_before_fc`)."""
    norms_each_tap: bool = False
    """Norm over each tap alone (`fc_norm`)."""
    norms_residual: bool = False
    """The layer adds to the normed hidden (`norm_before_residual`)."""
    norms_state: bool = False
    """The state that it reads next is normed as for the output (`norm_output`)."""

    @property
    def tap_width(self) -> int:
        """Values of all taps of a token."""
        return len(self.taps) * self.decoder.hidden_size
