"""`maitred run`: answer a file of OpenAI batch lines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from maitred.cli.command import Command, Options
from maitred.cli.console import note
from maitred.cli.flags import option
from maitred.cli.local import ENGINE_PARTS, engine_config, local_endpoint, refuse_engine_flags, start_engine
from maitred.config.field_checks import require_at_least
from maitred.core.errors import ConfigError

if TYPE_CHECKING:
    from maitred.cli.batch import InputLine, Tally
    from maitred.cli.endpoint import Endpoint


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
        require_at_least("concurrency", self.concurrency, 1)


def _run(options: Options) -> int:
    return run_batch(options, options[RunOptions])


def run_batch(options: Options, batch: RunOptions) -> int:
    """Exit code 0 when every line has a good answer, or failures are allowed; 1 when one has not."""
    import asyncio

    from maitred.cli.batch import OutputFile, Tally, scan
    from maitred.cli.main import EXIT_FAILURE

    source, target = Path(batch.input), Path(batch.output)
    lines = scan(source)
    if target.exists() and target.samefile(source):
        raise ConfigError(f"--input and --output are both {source}; choose another output")
    with OutputFile(target) as output, source.open("rb") as file:
        left = [line for line in lines if line.key not in output.done]
        num_before = len(lines) - len(left)
        failed_before = sum(line.key in output.failed for line in lines)
        if num_before:
            note(f"{num_before} of {len(lines)} lines have their answer already")
        try:
            tally = asyncio.run(_answer(options, batch, left, file, output.append)) if left else Tally()
        except KeyboardInterrupt:
            note("interrupted; the same command goes on from here")
            raise
    note(f"{target}: {_summed_up(tally, num_before, failed_before)}")
    if not tally.num_failed + failed_before or batch.allow_failures:
        return 0
    note("lines failed, and their answers say why; without these in the output they are asked again")
    return EXIT_FAILURE


async def _answer(
    options: Options, batch: RunOptions, left: list[InputLine], source: BinaryIO, write: Callable[[bytes], None]
) -> Tally:
    from maitred.cli.batch import BatchLines

    async with _open(options, batch) as endpoint:
        with _progress_bar(len(left)) as advance:
            work = BatchLines(endpoint, source, write, advance)
            await work.answer_all(left, concurrency=min(batch.concurrency, len(left)))
    return work.tally


@asynccontextmanager
async def _open(options: Options, batch: RunOptions) -> AsyncIterator[Endpoint]:
    from maitred.cli.endpoint import HttpEndpoint, first_model

    if batch.url is not None:
        refuse_engine_flags(options)
        async with HttpEndpoint(batch.url, api_key=batch.api_key, timeout_s=batch.timeout_s) as remote:
            await first_model(remote)  # a wrong address or key fails here, not once for each line
            yield remote
        return
    engine = start_engine(engine_config(options), served_model_names=batch.served_model_names, on_event=note)
    async with local_endpoint(engine, options) as local:
        yield local


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[], None]]:
    """Gives a function to call after each line; nothing is drawn where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("lines"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("lines", total=total)
        yield lambda: progress.advance(task)


def _summed_up(tally: Tally, num_before: int, failed_before: int) -> str:
    parts = [f"{tally.num_answered} answered", f"{tally.num_output_tokens:,} output tokens"]
    if tally.num_failed:
        kinds = ", ".join(f"{count} {kind}" for kind, count in tally.failures.most_common())
        parts.insert(1, f"{tally.num_failed} failed ({kinds})")
    if num_before:
        parts.append(f"{num_before} done before" + (f" ({failed_before} failed)" if failed_before else ""))
    return ", ".join(parts)


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
