"""Tells whoever launched this server where it listens and when it is ready, and ends with that process."""

from __future__ import annotations

import os
from collections.abc import Mapping

from maitred.errors import ConfigError


class Announcer:
    """Without a descriptor, nobody launched us, and nobody is told."""

    def __init__(self, fd: int | None) -> None:
        """Raises ConfigError for a descriptor that this process has not."""
        self._fd = fd
        if fd is None:
            return
        from maitred.executor.parent import end_with_parent

        try:
            os.set_inheritable(fd, False)  # it is nobody's below us
        except OSError as error:
            raise ConfigError(f"announce_fd is {fd}, and this process inherited no such socket: {error}") from None
        end_with_parent(fd)

    def listening(self, url: str) -> None:
        if self._fd is not None:
            from maitred.cluster.announcement import Listening, announce

            announce(self._fd, Listening(url, os.getpid()))

    def loaded(self, start_phases: Mapping[str, float]) -> None:
        if self._fd is not None:
            from maitred.cluster.announcement import Loaded, announce

            announce(self._fd, Loaded(start_phases))
