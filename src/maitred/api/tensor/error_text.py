"""Errors as KServe v2 and TF Serving tell them: one text."""

from __future__ import annotations

import msgspec

from maitred.api.http.errors import HttpError
from maitred.api.http.routes import StreamFormat


class ErrorText(msgspec.Struct, frozen=True):
    error: str


class TextErrors:
    """The `AnswerFormat` of tensor protocols."""

    stream = StreamFormat()
    error_schema = ErrorText

    def error_body(self, error: HttpError) -> bytes:
        return msgspec.json.encode(ErrorText(error.message))

    def error_event(self, error: HttpError) -> bytes:
        return b"data: " + self.error_body(error) + b"\n\n"


TEXT_ERRORS = TextErrors()
