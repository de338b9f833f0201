"""The flags of `maitred chat`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from maitred.cli.flags import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The conversation"""

    url: str | None = option(None, metavar="URL")
    """Talk to the server at this URL; None loads the model in this process."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """Key for the server at --url."""
    system: str | None = None
    """System prompt."""
    schema: str | None = option(None, metavar="FILE")
    """File with a JSON schema that every answer follows."""
    tools: str | None = option(None, metavar="FILE")
    """File with a JSON array of tools, as the API takes them; calls are shown, and what is typed next is the result."""
    set: Mapping[str, object] = field(default_factory=dict)
    """Settings to begin with, as /set takes them: temperature, top_p, max_tokens, seed, ..."""
