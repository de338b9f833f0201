"""`maitred chat`: talk to a model in the terminal. The work is in `talk/`; here are its flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.cli.local import ENGINE_PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The conversation"""

    url: str | None = option(None, metavar="URL")
    """Talk to the server at this URL; None loads the model in this process."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """Key for the server at --url."""
    system: str | None = None
    """System prompt."""
    set: Mapping[str, object] = field(default_factory=dict)
    """Settings to begin with, as /set takes them: temperature, top_p, max_tokens, seed, ..."""


def _run(options: Options) -> int:
    from maitred.cli.chat.session import run_chat

    return run_chat(options, options[ChatOptions])


COMMAND = Command(
    path="chat",
    summary="Talk to a model in the terminal. Alt+Enter or a backslash at the end starts a new line; /help lists more.",
    run=_run,
    parts=(ChatOptions, *ENGINE_PARTS),
    positional="model",
    first=("url", "api_key", "system", "set", "model", "dtype", "max_model_len", "num_threads"),
    examples=(
        "maitred chat",
        "maitred chat ./Llama-3.2-1B --system 'Answer in one sentence.' --set temperature=0.2",
        "maitred chat --url http://127.0.0.1:8000",
        "echo 'What is a maitre d?' | maitred chat",
    ),
)
