"""A shelf: versions of one model in numbered folders, and `current`, which names the one in service.

A version is whole or not there, says what every byte of it must be, and may be signed (docs/design/0032).
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from maitred.core.errors import CheckpointError, ConfigError

CURRENT, SUMS, SIGNATURE, RELEASE = "current", "SHA256SUMS", "SHA256SUMS.sig", "release.json"
SIGNATURE_BYTES = 64  # of Ed25519, RFC 8032
_SUM = re.compile(r"([0-9a-f]{64})  ([^\\/\n]+)")  # as sha256sum writes lines, but for names that it would escape


def version_of(folder: str) -> int | None:
    """The number of a version's folder; None for others, also those with a zero before, as Triton ignores them."""
    return int(folder) if re.fullmatch(r"[1-9][0-9]{0,17}", folder) else None


class GoldenTokens(msgspec.Struct, frozen=True):
    """A text, its tokens, and the greedy ones that follow."""

    text: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]


class ModelRelease(msgspec.Struct, frozen=True):
    """What a version is, and where it comes from: from `tool` on, as the tool that made it reports."""

    version: int
    name: str  # of the folder or file that was published
    published_at: int  # unix s
    made_by: str  # what made the golden tokens
    golden: tuple[GoldenTokens, ...]
    tool: str | None = None
    parent: dict[str, Any] | None = None
    flags: dict[str, Any] = {}
    data: Any = None  # hashes of documents among it
    figures: dict[str, Any] = {}


class Shelf:
    """The folder of a model's versions."""

    def __init__(self, root: Path, trust_key: Path | None = None) -> None:
        """With `trust_key`, a version is good only if its owner signed it. Raises ConfigError for no public key."""
        if trust_key is not None and not (trust_key.is_file() and b" PUBLIC KEY-" in trust_key.read_bytes()):
            make = "make it of the private one: openssl pkey -in KEY.pem -pubout -out KEY.pub.pem"
            raise ConfigError(f"trust_key is {trust_key}, which is no public key in PEM; {make}")
        self.root, self._trust_key = root, trust_key

    def folder(self, version: int) -> Path:
        return self.root / str(version)

    def versions(self) -> list[int]:
        """Versions that are there, ascending."""
        found = (version_of(each.name) for each in self.root.glob("[1-9]*") if each.is_dir())
        return sorted(version for version in found if version is not None)

    def current(self) -> tuple[int, int]:
        """The version in service, and when that was said (ns). Raises CheckpointError."""
        link = self.root / CURRENT
        try:
            target, said_at = os.readlink(link), link.lstat().st_mtime_ns
        except OSError as error:
            if not self.versions():
                make = f"make one: maitred publish MODEL {self.root}"
                raise CheckpointError(f"{self.root} is no shelf of versions; {make}") from None
            raise self._unusable(f"cannot read {link}: {error.strerror}") from None
        if (version := version_of(target)) is None:
            raise self._unusable(f"{link} leads to {target!r}, which is no version")
        return version, said_at

    def use(self, version: int) -> None:
        """Put a version into service, in one step. Raises CheckpointError for one that is damaged."""
        self.verify(version)
        new = self.root / f".{CURRENT}.{os.getpid()}"
        new.unlink(missing_ok=True)
        new.symlink_to(str(version))
        new.replace(self.root / CURRENT)

    def read(self, version: int) -> ModelRelease:
        """What a version says of itself. Raises CheckpointError."""
        path = self.folder(version) / RELEASE
        try:
            return msgspec.json.decode(path.read_bytes(), type=ModelRelease)
        except OSError as error:
            raise self._unusable(f"cannot read {path}: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._unusable(f"{path} is damaged ({error})") from None

    def verify(self, version: int) -> ModelRelease:
        """The version's release, once every byte was read. Raises CheckpointError for one that is not as published."""
        folder = self.folder(version)
        if not folder.is_dir():
            raise self._unusable(f"{folder} is not there")
        try:
            if self._trust_key is not None:
                check_signature(folder / SUMS, self._trust_key)
            wrong = _first_wrong(folder)
        except OSError as error:
            raise self._unusable(f"cannot read {error.filename}: {error.strerror}") from None
        if wrong is None and (told := self.read(version).version) != version:
            wrong = f"{RELEASE} is of version {told}"
        if wrong is not None:
            raise self._unusable(f"{folder} is not as it was published: {wrong}")
        return self.read(version)

    def _unusable(self, why: str) -> CheckpointError:
        return CheckpointError(f"{why}; publish it again, or choose another version: maitred releases {self.root}")


def _first_wrong(folder: Path) -> str | None:
    """The first thing that is not as the sums have it, in words."""
    lines = map(_SUM.fullmatch, (folder / SUMS).read_text("utf-8", "replace").splitlines())
    sums: Mapping[str, str] = {match[2]: match[1] for match in lines if match is not None}
    here = {each.name: each for each in os.scandir(folder) if each.name not in (SUMS, SIGNATURE)}
    for name in sorted({*here, *sums, RELEASE}):
        if name not in here:
            return f"{name} is missing"
        if name not in sums or not here[name].is_file(follow_symlinks=False):
            return f"{name} was no file of it"
        if sha256_of(folder / name) != sums[name]:
            return f"{name} has other bytes"
    return None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- signatures, by the program that anybody can check them with


def sign(path: Path, key: Path) -> None:
    """Write the signature of a file's bytes beside it. Raises ConfigError for what is no private Ed25519 key."""
    signature = path.with_name(SIGNATURE)
    why_not = _openssl("-sign", "-inkey", key, "-in", path, "-out", signature)
    if why_not is not None or signature.stat().st_size != SIGNATURE_BYTES:
        raise ConfigError(
            f"cannot sign with {key}: {why_not or 'it is no Ed25519 key'}; make one: "
            f"openssl genpkey -algorithm ed25519 -out NEW.pem"
        )


def check_signature(path: Path, key: Path) -> None:
    """Raises CheckpointError for a file that the owner of this public key did not sign as it is."""
    signature = path.with_name(SIGNATURE)
    if not signature.is_file():
        raise CheckpointError(f"{path.parent} is not signed; publish it with --sign KEY.pem")
    why_not = _openssl("-verify", "-pubin", "-inkey", key, "-in", path, "-sigfile", signature)
    if why_not is not None:
        raise CheckpointError(f"{path} was not signed by the owner of {key} ({why_not}); publish it with that key")


def _openssl(*words: str | Path) -> str | None:
    """Why the program did not do it; None once it did. Raises ConfigError without the program."""
    command = ["openssl", "pkeyutl", "-rawin", *map(str, words)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError("signatures need the program openssl, 3.0 or later; install it") from None
    return None if done.returncode == 0 else (done.stdout or done.stderr).partition("\n")[0]
