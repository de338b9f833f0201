"""Objectives of `--slo`, in `bench serve` and `simulate`."""

from __future__ import annotations

import re

from maitred.errors import ConfigError

NAMES = ("ttft", "itl", "tpot", "e2e")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_slo(text: str) -> tuple[str, float]:
    """`ttft:200ms` -> ("ttft", 0.2). Raises ConfigError."""
    match = re.fullmatch(r"([a-z0-9]+):([0-9]+(?:\.[0-9]+)?)(us|ms|s)", text.replace(" ", ""))
    if match is None or match[1] not in NAMES:
        raise ConfigError(f"--slo is {text!r}; write NAME:TIME, such as ttft:200ms, NAME one of {', '.join(NAMES)}")
    return match[1], float(match[2]) * _SECONDS[match[3]]
