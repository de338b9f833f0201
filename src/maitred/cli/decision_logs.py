"""Default place of the decision log, for `replay` and `why`."""

from __future__ import annotations

from pathlib import Path

from maitred.core.errors import ConfigError
from maitred.decisions.files import SUFFIX

WHERE_LOGS_ARE = ("decisions", ".")


def nearest_log() -> str:
    for folder in WHERE_LOGS_ARE:
        if any(Path(folder).glob(f"*{SUFFIX}")):
            return folder
    raise ConfigError("no decision log here; say where it is with --log, the folder given to serve --decision-log")
