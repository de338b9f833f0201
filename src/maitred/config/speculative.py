"""Settings of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.config.field_checks import one_of, require_between, require_choices
from maitred.core.errors import ConfigError

SPECULATIVE = ("auto", "off", "ngram", "draft", "mtp")
MAX_SPECULATIVE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: tokens are made up and checked several at a time; the output stays the same to the bit."""

    speculative: str = one_of(SPECULATIVE, "auto")
    """Source of drafts: a draft model, mtp (a head that reads the model's own states, as EAGLE-3 or the MTP layer of
    the model's checkpoint), ngram (what followed the last tokens when they were there before), off, or auto, which is a
    head where there is one, else a draft model, else ngram. Measured times decide how many, down to none.
    """
    speculative_model: str | None = None
    """Folder or hub id of a draft model with the same vocabulary, or of a head for this model; None is what lies beside
    the served model under its name and -mtp or -draft, as with the built-in one, or the MTP layer in its checkpoint."""
    num_speculative_tokens: int = 5
    """Most tokens that are made up for a request in one step, 1 to 16."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_between("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        if self.speculative_model is not None and self.speculative not in ("auto", "draft", "mtp"):
            raise ConfigError(
                f"speculative_model is {self.speculative_model!r}, and speculative is {self.speculative!r}; a draft "
                "model is for speculative=draft, or auto, and a head for speculative=mtp, or auto"
            )

    @property
    def num_drafts(self) -> int:
        """Most drafts of a request in a step, where there is a proposer."""
        return 0 if self.speculative == "off" else self.num_speculative_tokens
