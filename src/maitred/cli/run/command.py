"""`maitred run`: answer a file of OpenAI batch lines."""

from __future__ import annotations

from maitred.cli.command import Command, Options
from maitred.cli.local import ENGINE_PARTS
from maitred.cli.run.options import RunOptions


def _run(options: Options) -> int:
    from maitred.cli.run.session import run_batch

    return run_batch(options, options[RunOptions])


COMMAND = Command(
    path="run",
    summary="Answer a file of OpenAI batch lines; started again after a kill, it goes on where it was.",
    run=_run,
    parts=(RunOptions, *ENGINE_PARTS),
    positional="model",
    first=(
        "input",
        "output",
        "model",
        "url",
        "api_key",
        "concurrency",
        "allow_failures",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "num_threads",
    ),
    examples=(
        "maitred run -i in.jsonl -o out.jsonl",
        "maitred run ./Llama-3.2-1B -i in.jsonl -o out.jsonl --max-num-seqs 128",
        "maitred run --url http://127.0.0.1:8000 -i in.jsonl -o out.jsonl --concurrency 16",
    ),
)
