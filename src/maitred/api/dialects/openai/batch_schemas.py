"""Files and batches: their objects, as OpenAI writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class FileObject(msgspec.Struct, kw_only=True):
    """A file; times are unix seconds, here and in batches."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class StoredList(msgspec.Struct, kw_only=True):
    """Files or batches."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: str
    deleted: bool = True


Seconds = Annotated[int, Meta(ge=3600, le=2_592_000)]


class ExpiresAfter(msgspec.Struct, kw_only=True):
    anchor: Literal["created_at"]
    seconds: Seconds


class FileForm(msgspec.Struct, kw_only=True):
    """POST /v1/files, as multipart/form-data."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
    anchor: Literal["created_at"] | None = msgspec.field(name="expires_after[anchor]", default=None)
    seconds: Seconds | None = msgspec.field(name="expires_after[seconds]", default=None)


class BatchCreate(msgspec.Struct, kw_only=True):
    """POST /v1/batches; `completion_window` may be any time, such as 90m, 24h or 7d."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,5}[smhd]$")]
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchFault(msgspec.Struct, kw_only=True):
    """What is wrong with a batch, or with a line (from 1) of its input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchFaults(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchFault]


class RequestCounts(msgspec.Struct, kw_only=True):
    """Lines; `failed` are those of the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(msgspec.Struct, kw_only=True):
    input_tokens: int = 0
    input_tokens_details: dict[str, int] = msgspec.field(default_factory=lambda: {"cached_tokens": 0})
    output_tokens: int = 0
    output_tokens_details: dict[str, int] = msgspec.field(default_factory=lambda: {"reasoning_tokens": 0})
    total_tokens: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ] = "validating"
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
