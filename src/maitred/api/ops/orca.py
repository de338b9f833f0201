"""Load reports on answers, for balancers that ask for them: Open Request Cost Aggregation (ORCA), as Envoy reads it.

A request with the header `endpoint-load-metrics-format: TEXT` or `JSON` is answered with `endpoint-load-metrics`. The
names inside are those that gateways for language models look for.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from maitred.replica import ReplicaState

ASKED_BY, TOLD_BY = b"endpoint-load-metrics-format", b"endpoint-load-metrics"


def load_report(form: bytes, state: ReplicaState) -> bytes | None:
    """The header's value; None for a form that is neither TEXT nor JSON."""
    figures = _figures(state)
    match form.strip().upper():
        case b"TEXT":
            return ("TEXT " + ", ".join(f"named_metrics.{name}={value:g}" for name, value in figures.items())).encode()
        case b"JSON":
            return b"JSON " + msgspec.json.encode({"named_metrics": figures})
    return None


def _figures(state: ReplicaState) -> Mapping[str, float]:
    return {
        "kv_cache_usage_perc": round(state.num_blocks_used / state.num_blocks, 4) if state.num_blocks else 0.0,
        "num_requests_waiting": float(state.num_waiting),
        "num_requests_running": float(state.num_running),
    }
