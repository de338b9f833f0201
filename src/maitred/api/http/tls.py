"""The server's certificate: loaded once, and again when its files change, without ending a connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from maitred.core.errors import ConfigError

logger = logging.getLogger(__name__)
LOOK_S = 1.0  # between two looks at the files
_Stamp = tuple[tuple[int, int, int], ...]
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_EXPLICIT_VERSION, _UTC_TIME = 0xA0, 0x17  # tags; the other kind of time is GeneralizedTime


class Certificate:
    """One SSL context for the life of the server; new handshakes use what was loaded last. TLS 1.2 and later.

    An expired one is used, and told with its date: not every client looks, its owner may know, and the clock that is
    wrong may be ours.
    """

    def __init__(self, certfile: str, keyfile: str | None, *, today: Callable[[], float] = time.time) -> None:
        """`keyfile` None: the key stands in `certfile` too. Raises ConfigError when they cannot be used."""
        self._certfile, self._keyfile, self._today = certfile, keyfile, today
        self._stamp = self._stamp_of_files()
        self._validity: Validity | None = None  # of what is in force, where it can be read
        self._told_fault: str | None = None
        self.context = _server_context()
        self._load(self.context)
        self._read_dates()

    def look(self) -> None:
        """Take in new files. Those that cannot be used are told once and leave the old ones in force."""
        stamp = self._stamp_of_files()
        if stamp != self._stamp:
            self._stamp = stamp
            self.reload()
        self._look_at_dates()

    def reload(self) -> None:
        try:
            self._load(_server_context())  # a try: a context that failed half-way would be left without its key
            self._load(self.context)
        except ConfigError as error:
            logger.error("%s; the certificate before stays in force", error)
        else:
            logger.warning("the certificate of %s is in force", self._certfile)
            self._read_dates()

    async def keep_fresh(self) -> None:
        """Look at the files for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    @contextmanager
    def hearing_hangup(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Reload on SIGHUP, after the handler set before. Outside of the main thread no signals are heard."""
        before = signal.getsignal(signal.SIGHUP)

        def hung_up(number: int, frame: FrameType | None) -> None:
            if callable(before):
                before(number, frame)
            loop.call_soon_threadsafe(self.reload)

        try:
            signal.signal(signal.SIGHUP, hung_up)
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._certfile, self._keyfile, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"cannot use the certificate {self._certfile} with the key {self._keyfile or 'in it'}: {reason}; "
                "--ssl-certfile is a PEM file with the chain, --ssl-keyfile one with its key, without a password"
            ) from None

    def _read_dates(self) -> None:
        self._validity, self._told_fault = None, None
        with contextlib.suppress(OSError, ValueError):
            self._validity = validity_of_chain(self._certfile)
        self._look_at_dates()

    def _look_at_dates(self) -> None:
        """Tell when the certificate in force is none for clients that look at its dates; once."""
        fault = self._validity.fault(self._today()) if self._validity is not None else None
        if fault is not None and fault != self._told_fault:
            logger.warning("the certificate of %s %s: clients that verify it refuse to connect", self._certfile, fault)
        self._told_fault = fault

    def _stamp_of_files(self) -> _Stamp:
        stamps = []
        for name in (self._certfile, self._keyfile):
            if name is not None:
                with contextlib.suppress(OSError):  # between two names of a swap; the next look sees it
                    stat = Path(name).stat()
                    stamps.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(stamps)


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> str:
    """Asked when the key has one: OpenSSL would ask at the terminal, and wait."""
    raise ValueError("the key has a password")


class Validity(NamedTuple):
    begins: datetime
    ends: datetime

    def fault(self, now: float) -> str | None:
        """What is wrong with the certificate at `now` (unix seconds), in words with the date; None if nothing."""
        if now < self.begins.timestamp():
            return f"is not valid before {self.begins:%Y-%m-%d %H:%M:%S} UTC"
        if now > self.ends.timestamp():
            return f"expired on {self.ends:%Y-%m-%d %H:%M:%S} UTC"
        return None


def validity_of_chain(certfile: str) -> Validity:
    """When all certificates of the chain are valid. Raises OSError, and ValueError for what is not X.509 in PEM."""
    try:
        found = [_validity(ssl.PEM_cert_to_DER_cert(pem)) for pem in _PEM.findall(Path(certfile).read_text("latin-1"))]
        return Validity(max(each.begins for each in found), min(each.ends for each in found))
    except LookupError as error:
        raise ValueError(f"{certfile} holds something else than certificates: {error}") from None


def _validity(certificate: bytes) -> Validity:
    """RFC 5280, 4.1: Certificate { TBSCertificate { [version], serial, signature, issuer, validity ..."""
    fields = _elements(_elements(_elements(certificate)[0][1])[0][1])
    _, validity = fields[4 if fields[0][0] == _EXPLICIT_VERSION else 3]
    begins, ends = (_time(tag, content.decode("ascii")) for tag, content in _elements(validity))
    return Validity(begins, ends)


def _time(tag: int, text: str) -> datetime:
    if tag == _UTC_TIME:  # two digits of the year; 50 and later are of the last century (4.1.2.5.1)
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _elements(content: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each element of a DER sequence (X.690, 8.1). Raises ValueError for what is none."""
    elements, at = [], 0
    while at < len(content):
        tag, length, at = content[at], int.from_bytes(content[at + 1 : at + 2], "big"), at + 2
        if length & 0x80:  # so many bytes hold it
            size = length & 0x7F
            length, at = int.from_bytes(content[at : at + size], "big"), at + size
        if at + length > len(content):
            raise ValueError(f"an element of {length} bytes at {at}, of {len(content)}")
        elements.append((tag, content[at : at + length]))
        at += length
    return elements
