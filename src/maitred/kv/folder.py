"""The folder of a KV disk tier: private, of one server at a time, with the secret that salts its prefix hashes."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from maitred.core.errors import ConfigError

logger = logging.getLogger(__name__)

SALT_BYTES = 32
_LOCK, _SALT = "lock", "salt"


class OwnedFolder(NamedTuple):
    """A folder that no other server uses while `fd` is open."""

    fd: int
    why_not: OSError | None
    """Why nothing can be written in it."""


def private_folder(path: str | Path) -> Path:
    """Made where it is not there (0700). Raises ConfigError for one that others may enter, and that is not empty."""
    folder = Path(path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_mode & 0o077 and not os.listdir(folder):
            folder.chmod(0o700)
            status = folder.stat()
    except OSError as error:
        raise ConfigError(f"--kv-disk {folder} cannot be used: {error.strerror}; name a folder of your own") from None
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
        raise ConfigError(
            f"--kv-disk {folder} is open to others (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}); "
            f"name a new folder in it, as {folder / 'kv'}, or run: chmod 700 {folder}"
        )
    return folder


def own_folder(folder: Path) -> OwnedFolder:
    """Lock the folder; raises ConfigError naming the server that holds it. The lock dies with the process."""
    fd, why_not = _open_lock(folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        who = _content(folder / _LOCK).decode(errors="replace").strip() or "another server"
        os.close(fd)
        raise ConfigError(f"--kv-disk {folder} is in use by {who}; give each server a folder of its own") from None
    if why_not is None:
        with suppress(OSError):  # full: the holder stays unnamed, and the folder is owned still
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    return OwnedFolder(fd, why_not)


def _open_lock(folder: Path) -> tuple[int, OSError | None]:
    """Something to lock: the file, or the folder itself where the file cannot be made."""
    try:
        return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), None
    except OSError as error:
        why_not = error
    for path in (folder / _LOCK, folder):
        with suppress(OSError):
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW), why_not
    raise ConfigError(f"--kv-disk {folder} cannot be used: {why_not.strerror}; name a folder of your own")


def salt_secret(path: str | Path) -> bytes:
    """The 32 bytes that salt the hashes of what lies in the folder, drawn once. Raises ConfigError as `private_folder`.

    Where they cannot be kept they are drawn for this start alone, and nothing of earlier starts is found.
    """
    file = private_folder(path) / _SALT
    if len(kept := _content(file)) == SALT_BYTES:
        return kept
    secret = secrets.token_bytes(SALT_BYTES)
    draft = file.with_name(f"{_SALT}.{secrets.token_hex(8)}")
    try:
        if kept:
            logger.warning(
                "%s holds %d bytes and not %d; it is drawn anew, as for an empty folder", file, len(kept), 32
            )
            file.unlink()
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, secret)
            os.fsync(fd)
        finally:
            os.close(fd)
        with suppress(FileExistsError):  # of two that start at once, the first one's stays
            os.link(draft, file)
        return _content(file)
    except OSError as error:
        logger.warning("%s cannot be kept (%s); what is in the folder will not be found", file, error.strerror)
        return secret
    finally:
        draft.unlink(missing_ok=True)


def _content(file: Path) -> bytes:
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(fd, 256)
    except OSError:
        return b""
    finally:
        os.close(fd)
