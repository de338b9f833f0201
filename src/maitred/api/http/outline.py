"""What a body of JSON has outside of its texts, counted as the body comes."""

from __future__ import annotations

from msgspec import Raw

from maitred.api.http.decoding import PIECE_BYTES, Pieces


class Outline:
    """Items are counted by their commas, keys by their colons; those within texts are none."""

    def __init__(self) -> None:
        self.num_items = 0
        self.num_keys = 0
        self._in_text = False
        self._begun = b""  # a backslash, if the last piece ended with half an escape

    def add(self, piece: bytes) -> None:
        """The next piece, cut anywhere."""
        piece = self._begun + piece
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._begun = b"\\" * (num_backslashes % 2)
        if self._in_text and b'"' not in piece:
            return
        piece = piece[: len(piece) - len(self._begun)]
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')  # of texts and of what is between, in turn
        outside = b"".join(parts[self._in_text :: 2])
        self._in_text ^= len(parts) % 2 == 0
        self.num_items += outside.count(b",")
        self.num_keys += outside.count(b":")


def outline_of(value: Raw) -> Pieces[Outline]:
    """Of a value that is there already."""
    outline, sent = Outline(), memoryview(value)
    for start in range(0, len(sent), PIECE_BYTES):
        outline.add(bytes(sent[start : start + PIECE_BYTES]))
        yield
    return outline
