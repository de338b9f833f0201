"""Reports of a replica to a router: its identity (`GET /version`), then keys and load (`GET /fleet/events`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from maitred.fleet.disagg import WorkerFacts
from maitred.fleet.told_tokens import MAX_COUNT, Count, Micros, ToldUsage

BEAT_S = 0.25  # between two of `Load`
Phase = Literal["ready", "asleep", "loading", "draining", "dead"]
MAX_KEYS_AN_EVENT = 2048  # 40 KB
Speed = Annotated[float, msgspec.Meta(ge=0, le=MAX_COUNT)]


class Fingerprint(msgspec.Struct, frozen=True):
    """All that tokens depend on besides the request: two replicas with equal ones give equal answers."""

    revision: str
    executor: str
    dtype: str
    kv_dtype: str
    isa: str  # the instruction set; empty where the executor has none to choose

    def __str__(self) -> str:
        return " ".join(msgspec.structs.astuple(self))


class VersionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is. What only the engine knows is null while it loads."""

    version: str
    name: Literal["maitred"] = "maitred"
    models: tuple[str, ...] | None = None
    tensor_models: tuple[str, ...] = ()  # of the model repository, those that answer
    slots: Count | None = None  # requests in one step
    max_model_len: Count | None = None  # tokens
    block_size: Count | None = None  # tokens
    fingerprint: Fingerprint | None = None


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The first event; what earlier streams told is void."""

    replica: VersionResponse


class KeysChanged(msgspec.Struct, frozen=True, tag="keys"):
    """Prefix keys that are found here from now on, and that are not any more. After `Began` those there are."""

    stored: list[int]
    removed: list[int]


class KVWorker(msgspec.Struct, frozen=True):
    """A replica whose KV others may pull: where, and what foretelling its times takes."""

    facts: WorkerFacts
    addresses: tuple[str, ...]


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """A beat. The first one says that all keys there were have been told."""

    state: Phase
    error: str | None = None  # why it is not ready
    drain_s: Speed | None = None  # while it drains: so long what it has may take
    num_running: Count
    num_waiting: Count
    num_blocks: Count
    num_free_blocks: Count  # held by no request
    prefill_tokens_per_s: Speed  # as measured; 0 is not yet
    decode_tokens_per_s: Speed
    worker: KVWorker | None = None


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A router's request came to no end here (it left, or there was an error), and this is all that was computed."""

    request_id: str  # as the router named it
    usage: ToldUsage  # prompt tokens as they were counted here; of output also those that it began with


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """Sent with a beat: machine time by tenant of requests ended since the last one, whichever server admitted them."""

    us_by_tenant: dict[str, Micros]


FleetEvent = Began | KeysChanged | Load | Ended | Computed
