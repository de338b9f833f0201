"""Unknown fields of a body: told to the client in a header, near misses to the log, or refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence

from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange
from maitred.api.http.logs import ERRORS, log_fields
from maitred.core.errors import InvalidRequest, did_you_mean

IGNORED_FIELDS = b"x-maitred-ignored-fields"
SCHEMA_IGNORED = b"x-maitred-schema-ignored"
ARGUMENTS_EMPTIED = b"x-maitred-arguments-emptied"  # of earlier calls: they were no JSON object
# headers that follow from a body: routers and caches pass them on
TOLD_OF_BODIES = frozenset((IGNORED_FIELDS, SCHEMA_IGNORED, ARGUMENTS_EMPTIED))
MAX_TOLD = 10  # names in a header
MAX_LOGGED = 256  # names in the log of one server: looking for a near miss takes 0.2 ms
NEAR = 0.75  # difflib's ratio of a slip of the pen: temprature is one, top_n none
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def names_told(names: Iterable[str]) -> bytes:
    """`a, b, +3 more`: at most MAX_TOLD names as a header may have them, the rest counted."""
    every = tuple(names)
    told = [name for name in every if _NAME.fullmatch(name)][:MAX_TOLD]
    more = [f"+{len(every) - len(told)} more"] if len(every) > len(told) else []
    return ", ".join((*told, *more)).encode()


class IgnoredFields:
    """One server's handling of unknown fields."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def heed(self, exchange: Exchange, unknown: Sequence[str], known: Iterable[str]) -> None:
        """`unknown` were sent, and `known` there are. Raises InvalidRequest where the server is strict."""
        if not unknown:
            return
        if self._strict:
            raise _refusal(unknown[0], known)
        told = names_told(unknown)
        exchange.told += ((IGNORED_FIELDS, told),)
        exchange.log["ignored_fields"] = told.decode()
        for name in unknown[:MAX_TOLD]:
            self._log(exchange, name, known)

    def _log(self, exchange: Exchange, name: str, known: Iterable[str]) -> None:
        """Log each name once, however many requests have it."""
        if name in self._logged or len(self._logged) >= MAX_LOGGED or not _NAME.fullmatch(name):
            return
        self._logged.add(name)
        hint = did_you_mean(name, known, cutoff=NEAR)
        log_fields(
            ERRORS,
            logging.WARNING if hint else logging.INFO,
            f"field {name} is unknown and was ignored{hint}",
            {"request_id": exchange.request_id, "route": exchange.route_name},
        )


def _refusal(name: str, known: Iterable[str]) -> InvalidRequest:
    is_name = _NAME.fullmatch(name)
    shown = name if is_name else shortened(repr(name), 64)
    hint = did_you_mean(name, known, cutoff=NEAR) if is_name else ""
    return InvalidRequest(
        f"{shown} is no field here{hint}; leave it out, or serve without --strict-fields",
        param=name if is_name else None,
        code="unknown_parameter",
    )
