"""`replay` and `why` at work: find the log, run it again, say what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from maitred.cli.main import EXIT_FAILURE
from maitred.cli.why.words import tell
from maitred.decisions.history import MAX_LISTED, history_of, ids_like, the_one
from maitred.decisions.log import Arrived
from maitred.decisions.replay import replay
from maitred.engine.installed import installed_policies
from maitred.errors import ConfigError
from maitred.storage.decision_files import SUFFIX, log_parts, log_runs, read_frames

WHERE_LOGS_ARE = ("decisions", ".")


def replay_logs(logs: Sequence[str]) -> int:
    """Replays each log; 1 when any decision differs."""
    found = [_replay_newest(Path(log)) for log in logs or [_nearest_log()]]
    return 0 if all(found) else EXIT_FAILURE


def explain(words: str, log: str | None) -> int:
    path = Path(log or _nearest_log())
    runs = log_runs(path) if path.is_dir() else [log_parts(path)]
    parts, request_id = _find(runs, words)
    if len(runs) > 1:
        print(f"in {parts[0].name}, run {runs.index(parts) + 1} of {len(runs)} from the newest")
    print(tell(history_of(read_frames(parts), request_id, installed_policies())))
    return 0


def _find(runs: Sequence[list[Path]], words: str) -> tuple[list[Path], str]:
    """The newest run with such a request, and its id. A run that cannot be read does not hide those before it."""
    unread: list[str] = []
    for parts in runs:
        try:
            ids = ids_like(read_frames(parts), words)
        except ConfigError as error:
            if len(runs) == 1:
                raise
            unread.append(f"{parts[0].name}: {error}")
            continue
        if ids:
            return parts, the_one(ids, words)
    if not unread:
        the_one([], words)
    raise ConfigError(
        f"no request {words!r} in {len(runs) - len(unread)} runs, and {len(unread)} could not be read: {unread[0]}"
    )


def _nearest_log() -> str:
    for folder in WHERE_LOGS_ARE:
        if any(Path(folder).glob(f"*{SUFFIX}")):
            return folder
    raise ConfigError("no decision log here; say where it is with --log, the folder given to serve --decision-log")


def _replay_newest(log: Path) -> bool:
    """A file's run, or a folder's newest; tells of the others."""
    if not log.is_dir():
        return _replay_run(log_parts(log))
    newest, *older = log_runs(log)
    equal = _replay_run(newest)
    if older:
        names = ", ".join(parts[0].name for parts in older[:MAX_LISTED]) + (", ..." if len(older) > MAX_LISTED else "")
        print(
            f"not replayed: {len(older)} older {'run' if len(older) == 1 else 'runs'} in {log}, give the file: {names}"
        )
    return equal


def _replay_run(parts: Sequence[Path]) -> bool:
    num_steps, num_requests, started = 0, 0, time.monotonic()
    difference = None
    with _progress(parts) as on_read:
        for step in replay(read_frames(parts, on_read), installed_policies()):
            num_steps += 1
            num_requests += sum(isinstance(event, Arrived) for event in step.step.events)
            if not step.equal:
                difference = step.difference
    seconds = max(time.monotonic() - started, 1e-9)
    name = parts[0].name if len(parts) == 1 else f"{parts[0].name} and {len(parts) - 1} more"
    counts = f"{num_steps:,} steps, {num_requests:,} requests, {num_steps / seconds:,.0f} steps/s"
    if difference is None:
        print(f"{name}: every decision is the same ({counts})")
    else:
        print(f"{name}: differs after {counts}\n  first difference: {difference}")
    return difference is None


@contextmanager
def _progress(parts: Sequence[Path]) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield int
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replay", total=sum(part.stat().st_size for part in parts))
        yield lambda count: progress.advance(task, count)
