"""A worker as `workers` knows it, and a prompt of its own: one request of the cluster core."""

from __future__ import annotations

from dataclasses import dataclass, field

from maitred.core.cost_model import CostModel
from maitred.core.replica import WorkerView
from maitred.core.request import RequestSpec
from maitred.engine.client import EngineClient
from maitred.engine.live_requests import LiveRequest
from maitred.fleet.disagg import Role, WorkerFacts
from maitred.fleet.fleet_request import FleetRequest, request_of
from maitred.fleet.replicas import ReplicaFacts, State

KEY_BYTES = 8  # of a block's hash
LINK_BYTES_PER_S, LINK_S = 1e9, 0.01  # between workers of a machine, until it was measured
READ_BYTES_PER_S, TOKENS_PER_READ = 10e9, 8  # a processor's guess: weights are read once for up to so many tokens


def guessed_costs(weights_bytes: int) -> CostModel:
    """A cost model until a worker has measured its own."""
    weights_s = weights_bytes / READ_BYTES_PER_S
    token_s = weights_s / TOKENS_PER_READ
    return CostModel(fixed_s=2e-4, weights_s=weights_s, prefill_token_s=token_s, decode_token_s=token_s)


def facts_of(client: EngineClient, role: str, *, is_beside: bool) -> WorkerFacts | None:
    """Facts that foretelling its times takes; None where its KV cannot be pulled, or there is no engine now.

    `is_beside` others of its server: they share the memory's bandwidth.
    """
    ready = client.loaded
    if ready is None or not ready.kv_addresses:
        return None
    memory = ready.memory_plan
    return WorkerFacts(
        role=Role(role),
        costs=client.counters.step_costs or ready.step_costs or guessed_costs(memory.weights_bytes),
        token_budget=ready.token_budget,
        num_blocks=memory.num_blocks,
        block_size=memory.block_size,
        bytes_per_token=memory.bytes_per_block / memory.block_size,
        num_layers=ready.num_kv_layers,
        bandwidth=client.counters.pull_bytes_per_s or LINK_BYTES_PER_S,
        latency_s=LINK_S,
        shares_link=is_beside,
    )


@dataclass(slots=True, eq=False)
class Worker:
    """One engine of several."""

    number: int
    client: EngineClient
    role: str = "mixed"  # what it is sent: prompts, answers, or both
    told: WorkerFacts | None = None  # to the core
    is_up: bool = False  # as the core knows it
    num_queued: int = 0  # requests that have no place in its engine

    @property
    def name(self) -> str:
        """The core's."""
        return str(self.number)

    @property
    def is_there(self) -> bool:
        """Whether the worker has an engine, silent or not."""
        return self.client.supervisor.ready

    @property
    def seems_up(self) -> bool:
        """Whether the worker has an engine that is heard of."""
        return self.is_there and self.client.supervisor.why_not_alive is None

    @property
    def view(self) -> WorkerView:
        """The worker's view for people."""
        return WorkerView.of(self.number, self.client.supervisor.pid, self.client.state(), self.role)

    @property
    def is_over(self) -> bool:
        """Whether the worker was given up."""
        return self.client.supervisor.over

    @property
    def facts(self) -> ReplicaFacts:
        """Facts as the core is told of them next."""
        self.told = self.own
        state = State.READY if self.is_up else State.STARTING
        is_silent = self.is_there and not self.is_up
        return ReplicaFacts(name=self.name, state=state, worker=self.told, is_silent=is_silent)

    @property
    def own(self) -> WorkerFacts | None:
        """Facts that foretelling its times takes; None where workers hand nothing over."""
        return facts_of(self.client, self.role, is_beside=True) or self.told


@dataclass(slots=True, eq=False)
class Prompt:
    """The samples of one prompt, which go to one worker, where they share its blocks."""

    request: FleetRequest
    spec: RequestSpec  # its first sample's
    samples: dict[str, LiveRequest] = field(default_factory=dict)  # that have not ended, in order
    worker: Worker | None = None  # None while it is held
    held_s: float = 0.0  # in all
    goes_to: Worker | None = None  # once its first tokens are there, which `worker` computes

    @property
    def has_begun(self) -> bool:
        """Whether each sample has a token."""
        return all(live.output_token_ids for live in self.samples.values())


def prompt_of(prompt_id: str, live: LiveRequest) -> Prompt:
    """A prompt with its first sample."""
    return Prompt(_request_of(prompt_id, live.spec), live.spec, {live.request_id: live})


def key_of(block: bytes) -> int:
    """Prefix key of a KV block, by its hash, which all blocks before it are part of."""
    return int.from_bytes(block[:KEY_BYTES], "little")


def _request_of(prompt_id: str, spec: RequestSpec) -> FleetRequest:
    request = request_of(spec, tuple(map(key_of, spec.block_hashes)))
    request.request_id, request.num_samples = prompt_id, spec.sampling.n if spec.parent_id is not None else 1
    request.features = spec.features
    return request
