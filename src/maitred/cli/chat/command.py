"""`maitred chat`: talk to a model in the terminal."""

from __future__ import annotations

from maitred.cli.chat.options import ChatOptions
from maitred.cli.command import Command, Options
from maitred.cli.local import ENGINE_PARTS


def _run(options: Options) -> int:
    from maitred.cli.chat.session import run_chat

    return run_chat(options, options[ChatOptions])


COMMAND = Command(
    path="chat",
    summary="Talk to a model in the terminal. Alt+Enter or a backslash at the end starts a new line; /help lists more.",
    run=_run,
    parts=(ChatOptions, *ENGINE_PARTS),
    positional="model",
    first=("url", "api_key", "system", "schema", "tools", "set", "model", "dtype", "max_model_len", "num_threads"),
    examples=(
        "maitred chat",
        "maitred chat ./Llama-3.2-1B --system 'Answer in one sentence.' --set temperature=0.2",
        "maitred chat --url http://127.0.0.1:8000",
        "maitred chat --schema order.json",
        "echo 'What is a maitre d?' | maitred chat",
    ),
)
