"""Every error maitred raises: what the client did wrong, and what we did.

    MaitredError
    ├── RequestError                the client's fault; api/ answers 4xx
    │   ├── InvalidRequest          a field has a wrong type or value (400)
    │   ├── UnsupportedParameter    a known field that this version does not do (400 unsupported_parameter)
    │   ├── UnsupportedContent      a part of a message that is not text (400 unsupported_content)
    │   ├── PromptTooLong           prompt, or prompt + max_tokens, over the context (400 context_length_exceeded)
    │   ├── RequestTooLarge         the body is over the limit (413)
    │   ├── ReadTooSlowly           the client is so far behind its answer that it was ended (408)
    │   ├── InvalidApiKey           missing or wrong key (401)
    │   ├── PermissionDenied        the key is known, and may not do that (403)
    │   ├── RateLimited             the tenant is at a limit of its own (429 rate_limit_exceeded)
    │   │   └── InsufficientQuota   its token budget is used up (429 insufficient_quota)
    │   ├── ModelNotFound           no model of that name is served (404)
    │   └── RouteNotFound           no such path, or not with that method (404, 405)
    └── ServerError                 ours; api/ answers 5xx, the command line prints one line and exits 1
        ├── ConfigError             a flag, a config file or a combination that cannot work
        ├── CheckpointError         a model folder that cannot be loaded
        ├── OutOfMemory             weights or KV cache do not fit
        ├── KernelError             a shape or dtype a kernel cannot take
        ├── GenerationFailed        the model gave no usable logits for this request (NaN)
        ├── EngineDead              the engine stopped; the server must restart
        ├── RequestTimeout          not done in the time it had (504)
        └── Unavailable             not ready yet, or draining (503)
            ├── Overloaded          refused at admission, or shed for a more urgent one (503 server_overloaded)
            └── QueueTimeout        in no step in the time it had (503 queue_timeout)

Only `api/` knows HTTP; an error carries the OpenAI `code` and `param` that name the fault.
"""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str:
    """` (did you mean x?)`, or nothing when no choice is near; `cutoff` is difflib's ratio, from 0 to 1."""
    from difflib import get_close_matches  # noqa: PLC0415  only a slip of the pen pays for it

    near = get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f" (did you mean {near[0]}?)" if near else ""


class MaitredError(Exception):
    """Root of all errors raised on purpose."""


class RequestError(MaitredError):
    """The client's fault. `param` names the field, `code` is the OpenAI error code, both may be None."""

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    """A field has a wrong type or an impossible value."""


class UnsupportedParameter(RequestError):
    """A field of the public API that this version does not implement; refused, never ignored."""

    code = "unsupported_parameter"


class UnsupportedContent(RequestError):
    """An image, audio, a file, or another part of a message that is not text."""

    code = "unsupported_content"


class PromptTooLong(RequestError):
    """The prompt, or the prompt and the tokens asked for, exceed the context."""

    code = "context_length_exceeded"


class TooManyTokens(PromptTooLong):
    """A text has more tokens than its user can take."""

    def __init__(self, num_tokens: int, most: int) -> None:
        super().__init__(f"the text has {num_tokens} tokens; at most {most}", param="prompt")
        self.num_tokens = num_tokens


class RequestTooLarge(RequestError):
    """The request body exceeds the server's limit."""

    code = "request_too_large"


class ReadTooSlowly(RequestError):
    """The client does not take its answer, and keeping more of it for the client would cost the others memory."""

    code = "read_too_slowly"


class InvalidApiKey(RequestError):
    """No key was sent, or one we do not know."""

    code = "invalid_api_key"


class PermissionDenied(RequestError):
    """The key is known, but it may not do or ask for that."""

    code = "permission_denied"


class RateLimited(RequestError):
    """The tenant is at one of its own limits, `limit`; None in `retry_after_s` says that waiting does not help."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, limit: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.limit, self.retry_after_s = limit, retry_after_s


class InsufficientQuota(RateLimited):
    """The tenant's token budget does not hold what the request may need."""

    code = "insufficient_quota"

    def __init__(self, message: str) -> None:
        super().__init__(message, limit="token_budget", retry_after_s=None)


class ModelNotFound(RequestError):
    """The model named in the request is not served here."""

    code = "model_not_found"


class CannotResume(RequestError):
    """A stream that another replica began cannot go on with exactly the tokens that would have come."""

    code = "cannot_resume"


class RegionNotFound(RequestError):
    """No shared memory is registered by that name."""

    code = "region_not_found"


class RouteNotFound(RequestError):
    """No such path, or not with that method."""

    code = "not_found"


class ServerError(MaitredError):
    """Ours: the request was fine, or there was none yet."""


class ConfigError(ServerError):
    """A flag, a config file or a combination that cannot work; says which and what to choose instead."""


class CheckpointError(ServerError):
    """A model folder that cannot be loaded; says the file and the remedy."""


class OutOfMemory(ServerError):
    """Weights or KV cache do not fit; says both numbers in bytes."""


class KernelError(ServerError):
    """A shape or dtype that a kernel cannot take."""


class InstanceLost(ServerError):
    """The instance of a tensor model died or hung while it ran a batch, which runs again."""


class GenerationFailed(ServerError):
    """The model gave no usable logits for this request (NaN); other requests go on."""


class EngineDead(ServerError):
    """The engine stopped; requests in flight cannot be completed by it."""


class Unavailable(ServerError):
    """Not ready yet, or draining; try again after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    """Refused at admission, or shed from the queue for a more urgent one; nothing was computed for it.

    `reason` is the admission controller's word for why, where it was one of its own.
    """

    code = "server_overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


class QueueTimeout(Unavailable):
    """Request that was in no step in its time; nothing was computed for it."""

    code = "queue_timeout"


class RequestTimeout(ServerError):
    """Request that was not done in its time. The client or the server set that time, so trying again is no use."""

    code = "request_timeout"
