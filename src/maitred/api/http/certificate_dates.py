"""From when to when the certificates of a file are valid."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_EXPLICIT_VERSION, _UTC_TIME = 0xA0, 0x17  # tags; the other kind of time is GeneralizedTime


class Validity(NamedTuple):
    begins: datetime
    ends: datetime

    def fault(self, now: float) -> str | None:
        """What is wrong with it at `now` (unix seconds), in words with the date."""
        if now < self.begins.timestamp():
            return f"is not valid before {self.begins:%Y-%m-%d %H:%M:%S} UTC"
        if now > self.ends.timestamp():
            return f"expired on {self.ends:%Y-%m-%d %H:%M:%S} UTC"
        return None


def validity_of_chain(certfile: str) -> Validity:
    """When all of its certificates are valid. Raises OSError, and ValueError for what is not X.509 in PEM."""
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
