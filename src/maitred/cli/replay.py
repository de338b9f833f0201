"""`maitred replay`: make the decisions of a log again and compare."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.core.errors import ConfigError
from maitred.decisions.files import SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The logs"""

    log: tuple[str, ...] = option((), metavar="LOG", env="MAITRED_DECISION_LOG")
    """Folders or files of decision logs; of a folder the newest run, and the others are named. None looks in
    ./decisions and here."""


def _run(options: Options) -> int:
    return replay_logs(options[ReplayOptions].log)


def replay_logs(logs: Sequence[str]) -> int:
    """Replays each log; 1 when any decision differs."""
    from maitred.cli.main import EXIT_FAILURE

    found = [_replay_newest(Path(log)) for log in logs or [nearest_log()]]
    return 0 if all(found) else EXIT_FAILURE


def _replay_newest(log: Path) -> bool:
    """A file's run, or a folder's newest; tells of the others."""
    from maitred.decisions.files import log_parts, log_runs
    from maitred.decisions.history import MAX_LISTED

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
    from maitred.decisions.files import read_frames
    from maitred.decisions.log import Arrived
    from maitred.decisions.replay import replay
    from maitred.engine.installed import installed_policies

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


COMMAND = Command(
    path="replay",
    summary="Make every decision of a log again with this version's scheduler, compare them bit for bit, and name the "
    "first that differs (exit code 1).",
    run=_run,
    parts=(ReplayOptions,),
    positional="log",
    examples=(
        "maitred serve --decision-log decisions",
        "maitred replay decisions",
        "maitred replay decisions/20260101T120000-000.00000.decisions",
    ),
)


WHERE_LOGS_ARE = ("decisions", ".")


def nearest_log() -> str:
    for folder in WHERE_LOGS_ARE:
        if any(Path(folder).glob(f"*{SUFFIX}")):
            return folder
    raise ConfigError("no decision log here; say where it is with --log, the folder given to serve --decision-log")
