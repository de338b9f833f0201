"""The flags of `maitred run`."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.flags import option
from maitred.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The batch"""

    input: str = option(metavar="FILE", short="-i")
    """JSON lines {custom_id, method: POST, url, body}, as for OpenAI's batch API; url is /v1/chat/completions or
    /v1/completions."""
    output: str = option(metavar="FILE", short="-o")
    """JSON lines {id, custom_id, response, error}, appended as answers come; custom_ids already there are not asked
    again."""
    url: str | None = option(None, metavar="URL")
    """Send the lines to the server at this URL; None loads the model in this process."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """Key for the server at --url."""
    concurrency: int = option(64, metavar="REQUESTS")
    """Lines in flight at once."""
    timeout_s: float | None = option(None, metavar="SECONDS", name="--timeout")
    """Longest wait for one answer of the server at --url in seconds; None waits for ever."""
    served_model_names: tuple[str, ...] = option((), metavar="NAME")
    """Names that lines may give as their model, without --url; None uses the model's own name."""

    allow_failures: bool = False
    """Exit with 0 though lines have no good answer, in this run or an earlier one; else it is 1."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}; it must be at least 1")
