"""Workers for tests, in a line each."""

from __future__ import annotations

from typing import Any

from maitred.core.cost_model import CostModel
from maitred.fleet.disagg import Role, WorkerFacts, WorkerLoad

COSTS = CostModel(fixed_s=2e-3, weights_s=6e-3, prefill_token_s=3e-5, decode_token_s=3e-5, context_token_s=5e-8)


def facts(role: str = "mixed", **fields: Any) -> WorkerFacts:
    given = {"costs": COSTS, "token_budget": 2048, "num_blocks": 4096, "block_size": 16, "bytes_per_token": 1e5}
    return WorkerFacts(role=Role(role), **given | {"num_layers": 32, "bandwidth": 10e9, "latency_s": 1e-4} | fields)


def worker(name: str, role: str = "mixed", **load: Any) -> WorkerLoad:
    """Idle and empty but for what is said; a field of WorkerFacts may be given too."""
    told = {key: load.pop(key) for key in list(load) if key not in WorkerLoad._fields}
    of = facts(role, **told)
    return WorkerLoad(name, of, **{"free_blocks": of.num_blocks} | load)
