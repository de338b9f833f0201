"""OpenAI's answers: an error body with its four keys, and event streams that end with [DONE]."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from maitred.api.http.errors import HttpError
from maitred.api.http.formats import StreamFormat

_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ErrorObject(msgspec.Struct, frozen=True):
    """What went wrong, as OpenAI's specification has it; all four keys are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


class OpenAIFormat:
    """The `AnswerFormat` of OpenAI's routes, and of ours beside them."""

    stream = StreamFormat(end=b"data: [DONE]\n\n")
    error_schema = ErrorBody

    def error_body(self, error: HttpError) -> bytes:
        return msgspec.json.encode(ErrorBody(ErrorObject(error.message, _type_of(error), error.param, error.code)))

    def error_event(self, error: HttpError) -> bytes:
        """An error object, which clients raise."""
        return b"data: " + self.error_body(error) + b"\n\n"


OPENAI = OpenAIFormat()


def _type_of(error: HttpError) -> str:
    if error.code == "insufficient_quota":
        return "insufficient_quota"
    return _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
