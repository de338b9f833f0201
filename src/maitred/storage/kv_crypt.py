"""Encryption of KV blocks at rest: AES-256-GCM, its keys by HKDF-SHA256, one for each cache salt in each segment.

The key file decides; what lies on disk tells neither tokens (rows are sealed) nor prefixes (hashes are keyed).
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from maitred.errors import ConfigError

KEY_BYTES, TAG_BYTES, KEY_ID_BYTES, HASH_BYTES = 32, 16, 16, 32
_MOST_DERIVED = 512


class BlockCipher:
    """Seals rows of blocks. Raises ConfigError where the package cryptography is not installed."""

    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.ciphers.algorithms import AES
            from cryptography.hazmat.primitives.ciphers.modes import ECB
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError:
            raise ConfigError(
                "--kv-disk-key-file needs the package cryptography; install it with: pip install 'maitred[kvcrypt]'"
            ) from None

        def derive(num_bytes: int, segment_id: bytes, purpose: bytes) -> bytes:
            key: bytes = HKDF(SHA256(), num_bytes, segment_id, b"maitred kv " + purpose).derive(secret)
            return key

        def aead(segment_id: bytes, salt: str) -> Any:
            return AESGCM(derive(KEY_BYTES, segment_id, b"rows\0" + salt.encode()))

        self._aead: Callable[[bytes, str], Any] = lru_cache(_MOST_DERIVED)(aead)
        self._invalid: type[Exception] = InvalidTag
        self._names = Cipher(AES(derive(KEY_BYTES, b"", b"names")), ECB())
        self.key_id = derive(KEY_ID_BYTES, b"", b"id")  # tells which key it was, and nothing of the key

    def stored_keys(self, keys: Sequence[bytes]) -> list[bytes]:
        """What chain hashes are called on disk: no two halves of hashes are equal, so AES by blocks tells nothing."""
        return _each(self._names.encryptor().update(b"".join(keys)))

    def own_keys(self, stored: Sequence[bytes]) -> list[bytes]:
        """The chain hashes that are so called."""
        return _each(self._names.decryptor().update(b"".join(stored)))

    def seal(self, segment_id: bytes, first_row: int, salt: str, keys: Sequence[bytes], rows: memoryview) -> memoryview:
        """`rows` of len(keys) blocks, encrypted, each with its tag after it.

        A row's number is its nonce: no row of a segment is ever written twice, and no segment has another one's id.
        """
        aead, size = self._aead(segment_id, salt), len(rows) // len(keys)
        sealed = memoryview(bytearray(len(keys) * (size + TAG_BYTES)))
        for i, key in enumerate(keys):
            into = sealed[i * (size + TAG_BYTES) : (i + 1) * (size + TAG_BYTES)]
            aead.encrypt_into(_nonce(first_row + i), rows[i * size : (i + 1) * size], key, into)
        return sealed

    def unseal(
        self, segment_id: bytes, first_row: int, salt: str, keys: Sequence[bytes], sealed: memoryview, into: memoryview
    ) -> int:
        """Decrypts len(keys) rows into `into`; how many from the front were those that `seal` made."""
        aead, size = self._aead(segment_id, salt), len(into) // len(keys)
        for i, key in enumerate(keys):
            row = sealed[i * (size + TAG_BYTES) : (i + 1) * (size + TAG_BYTES)]
            try:
                aead.decrypt_into(_nonce(first_row + i), row, key, into[i * size : (i + 1) * size])
            except self._invalid:
                return i
        return len(keys)


def _each(joined: bytes) -> list[bytes]:
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


def _nonce(row: int) -> bytes:
    return row.to_bytes(12, "little")


def read_key_file(path: str) -> bytes:
    """32 bytes, raw or as hex or base64. Raises ConfigError for a file that others may read, or of another form."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(1024)
    except OSError as error:
        raise ConfigError(f"cannot read --kv-disk-key-file {path}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"{path} may be used by others (mode {stat.S_IMODE(mode):04o}); run: chmod 600 {path}")
    key = _parse(content)
    if key is None:
        raise ConfigError(
            f"{path} holds {len(content)} bytes that are no key of 32 bytes, raw or as hex or base64; "
            f"make one with: head -c 32 /dev/urandom > {Path(path).name}"
        )
    return key


def _parse(content: bytes) -> bytes | None:
    if len(content) == KEY_BYTES:
        return content
    text = content.strip()
    for decode in (bytes.fromhex, lambda line: base64.b64decode(line, validate=True)):
        try:
            key = decode(text.decode("ascii"))
        except (ValueError, binascii.Error):
            continue
        if len(key) == KEY_BYTES:
            return key
    return None
