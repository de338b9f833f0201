"""Session of `why`: finds the request and prints its history."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from maitred.cli.decision_logs import nearest_log
from maitred.cli.why import tensor_words
from maitred.cli.why.words import tell
from maitred.decisions.history import history_of, ids_like, the_one
from maitred.decisions.tensor_history import is_tensor, steps_of_one, tensor_history_of
from maitred.engine.installed import installed_policies
from maitred.errors import ConfigError
from maitred.storage.decision_files import log_parts, log_runs, read_frames


def explain(words: str, log: str | None) -> int:
    path = Path(log or nearest_log())
    runs = log_runs(path) if path.is_dir() else [log_parts(path)]
    parts, request_ids = _find(runs, words)
    if len(runs) > 1:
        print(f"in {parts[0].name}, run {runs.index(parts) + 1} of {len(runs)} from the newest")
    for request_id in request_ids:
        print(_told(parts, request_id))
    return 0


def _told(parts: list[Path], request_id: str) -> str:
    policies = installed_policies()
    if is_tensor(read_frames(parts), request_id):
        return tensor_words.tell(tensor_history_of(read_frames(parts), request_id, policies))
    return tell(history_of(read_frames(parts), request_id, policies))


def _find(runs: Sequence[list[Path]], words: str) -> tuple[list[Path], Sequence[str]]:
    """The newest run with such a request, and its id, or of an ensemble those of its steps. A run that cannot be read
    does not hide those before it.
    """
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
            return parts, steps_of_one(ids) or (the_one(ids, words),)
    if not unread:
        the_one([], words)
    raise ConfigError(
        f"no request {words!r} in {len(runs) - len(unread)} runs, and {len(unread)} could not be read: {unread[0]}"
    )
