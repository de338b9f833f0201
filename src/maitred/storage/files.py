"""Files and folders whose content must be whole, or be this process's alone."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from maitred.core.errors import ConfigError


def replace_file(path: Path, content: bytes | Callable[[Path], object], *, mode: int = 0o666) -> None:
    """Put `content`, or what it writes to the path that it is given, in the place of a file: after any end the file is
    there whole, or as it was before. `mode` is that of bytes. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        if callable(content):
            content(new)
        else:
            with open(new, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
        sync(new)
        new.replace(path)
        sync(path.parent)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Put a file's bytes, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold the lock of a file, which dies with the process. Raises ConfigError, in the words of `busy`, while another
    process holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(busy) from None
        yield


def private_folder(folder: Path, flag: str) -> Path:
    """Made where it is not there (0700). Raises ConfigError, naming the flag, for one that others may enter, and that
    is not empty."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_mode & 0o077 and not os.listdir(folder):
            folder.chmod(0o700)
            status = folder.stat()
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be used: {error.strerror}; name a folder of your own") from None
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
        raise ConfigError(
            f"{flag} {folder} is open to others (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}); "
            f"name a new folder in it, as {folder / 'own'}, or run: chmod 700 {folder}"
        )
    return folder
