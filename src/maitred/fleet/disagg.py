"""Disaggregated prefill and decode: which worker computes a prompt, which its answer, and whose KV is fetched first.

Each way to serve a request is foretold by the workers' cost models: TTFT, time per output token, what the others lose
by it, in one sum. Only a way that has room for its KV at both ends is looked at. Terms are those of DistServe
(arXiv:2401.09670: goodput under two objectives, prefill as a queue that decoding must not be in), Splitwise
(arXiv:2311.18677: transfer hidden behind the prompt, mixed machines), Mooncake (arXiv:2407.00079: TTFT of queue,
transfer and computing; longest prefix against nearest), NVIDIA Dynamo (short or cached prompts stay where they decode).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import exp
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from maitred.core.cost_model import CostModel, StepShape
from maitred.fleet.fleet_request import FleetRequest
from maitred.kv.pages import part_of
from maitred.kv.tiers import worth_fetching
from maitred.policy.policies import remaining_outputs

if TYPE_CHECKING:
    from maitred.engine.client import EngineClient

MAX_PAIRED = 8  # of each side, the cheapest so many are looked at in pairs
MOST_SHARE = 0.95  # of a worker's time: no queue is foretold to be endless
ROLE = 0.05  # of a cost, by which its role is preferred: so workers settle into the roles that they were given
OVER = 8.0  # a second past an objective counts as so many more
EDGE = 0.8
OTHERS = 3.0  # and one that others lose of theirs, whose place between start and objective is unknown
LAX_TTFT_S, LAX_TPOT_S = 10.0, 1.0  # of the objective that is not given, where the other is


class Role(str, Enum):
    """The work a worker is sent first; none is unable to do the rest."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Facts that a worker tells of itself, besides those of every replica."""

    role: Role = Role.MIXED
    costs: CostModel
    token_budget: Annotated[int, msgspec.Meta(ge=1)]
    num_blocks: Annotated[int, msgspec.Meta(ge=1)]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    bytes_per_token: Annotated[float, msgspec.Meta(ge=0)]
    """Of KV."""
    num_layers: int = 1
    """Whose KV can leave one by one."""
    bandwidth: float = 0.0
    """Of its link (bytes/s); 0 has none."""
    latency_s: float = 0.0
    shares_link: bool = False
    """With all other workers of its host."""
    numbers: str = ""
    """What its KV depends on, as far as it minds; between unlike ones nothing is moved."""


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
        bytes_per_token=memory.bytes_per_block / memory.block_size * part_of(memory.groups, memory.block_size),
        num_layers=ready.num_kv_layers,
        bandwidth=client.counters.pull_bytes_per_s or LINK_BYTES_PER_S,
        latency_s=LINK_S,
        shares_link=is_beside,
    )


class WorkerLoad(NamedTuple):
    """A worker as one request meets it."""

    name: str
    facts: WorkerFacts
    queued_tokens: float = 0.0  # uncached, of prompts that have no token yet
    rows: int = 0  # requests that decode
    context_tokens: int = 0  # of those
    free_blocks: int = 0  # neither held nor reserved
    prefill_share: float = 0.0  # of its time lately, from 0 to 1
    bytes_in_flight: float = 0.0  # of computed prompts, to and from it; of all that share its link
    bytes_queued: float = 0.0  # KV of prompts that are to be computed here for others
    num_cached: int = 0  # tokens of the request's prompt whose KV it has
    has_slot: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverConfig:
    """Among workers that tell what they are; without such it has no effect."""

    handover: str = "auto"
    """One of HANDOVERS: as foretold, wherever it can be, or never."""
    ttft_s: float | None = None
    """Objectives (s) that choices are held against; without any they shorten the time that all spend together."""
    tpot_s: float | None = None


DEFAULT_HANDOVER = HandoverConfig()


class WorkAsked(NamedTuple):
    """A request, and what it is promised."""

    num_inputs: int
    num_outputs: float  # expected
    ttft_objective_s: float | None = None
    tpot_objective_s: float | None = None


class Option(NamedTuple):
    """One way to serve a request, foretold; the smallest cost is chosen."""

    replica: str
    prefill: str | None
    fetch_from: str | None
    cost: float
    ttft_s: float
    tpot_s: float
    fetch_s: float  # before the prompt
    transfer_s: float  # that the prompt's computing does not hide
    harm_s: float  # seconds that others lose

    @property
    def name(self) -> str:
        """`worker`, `prefill > worker`, with `< peer` where a prefix is fetched."""
        way = self.replica if self.prefill is None else f"{self.prefill} > {self.replica}"
        return way if self.fetch_from is None else f"{way} < {self.fetch_from}"

    @property
    def terms(self) -> dict[str, float]:
        return {name: value for name, value in self._asdict().items() if isinstance(value, float)}


class _Prompt(NamedTuple):
    """The computing of a prompt at one worker."""

    worker: WorkerLoad
    fetch_from: str | None
    fetch_s: float
    queue_s: float
    ttft_s: float
    computing_s: float
    harm_s: float
    cost: float


class _Answer(NamedTuple):
    """The decoding at one worker."""

    worker: WorkerLoad
    tpot_s: float
    harm_s: float
    cost: float


def options(ask: WorkAsked, workers: Sequence[WorkerLoad], handover: str = "auto") -> list[Option]:
    """Ways to serve the request that have room, the cheapest first; none when it must wait."""
    prices = _Prices(ask)
    prompts = [_prompt(ask, worker, workers, prices) for worker in workers]
    answers = [_answer(ask, worker, prices) for worker in workers if worker.has_slot and _fits(ask, worker)]
    found = list(_pairs(ask, prompts, answers, prices)) if handover != "never" else []
    if handover != "always" or not _may_pair(ask, workers):
        by_name = {prompt.worker.name: prompt for prompt in prompts}
        both = [(by_name[answer.worker.name], answer) for answer in answers]
        found += [_local(prompt, answer) for prompt, answer in both]
    return sorted(found, key=lambda option: (option.cost, option.name))


# -- prices


class _Prices:
    """Price of a second. Without objectives a second counts the same whichever request waits; with some, each counts by
    its share of what is allowed, and more past that.
    """

    def __init__(self, ask: WorkAsked) -> None:
        self.is_promised = ask.ttft_objective_s is not None or ask.tpot_objective_s is not None
        self._ttft_s = ask.ttft_objective_s or (LAX_TTFT_S if self.is_promised else 1.0)
        self.tpot_s = ask.tpot_objective_s or LAX_TPOT_S
        self._num_outputs = max(1.0, ask.num_outputs)

    def first_token(self, ttft_s: float) -> float:
        return self._bent(ttft_s / self._ttft_s)

    def tokens(self, tpot_s: float) -> float:
        return self._bent(tpot_s / self.tpot_s) if self.is_promised else tpot_s * self._num_outputs

    def others(self, lost_s: float) -> float:
        """Decoding requests lose so much in all. As much is at stake for each of them, at the edge or not: else prompts
        would go where requests have most to spare, and no worker would be left to decode alone.
        """
        return lost_s * (OTHERS / self.tpot_s / self._num_outputs if self.is_promised else 1.0)

    def _bent(self, used: float) -> float:
        return used + OVER * max(0.0, used - EDGE) if self.is_promised else used


# -- one end


def _prompt(ask: WorkAsked, worker: WorkerLoad, workers: Sequence[WorkerLoad], prices: _Prices) -> _Prompt:
    fetch_from, num_cached, fetch_s = _best_prefix(ask, worker, workers)
    num_tokens = max(1, ask.num_inputs - num_cached)
    queue_s = chunks_s(worker, worker.queued_tokens, 0)
    computing_s = chunks_s(worker, num_tokens, num_cached)
    busy = worker.rows > 0 or worker.queued_tokens > 0
    ttft_s = busy * decode_step_s(worker) / 2 + max(queue_s, fetch_s) + computing_s
    num_steps = -(-num_tokens // chunk_of(worker))
    lost_s = max(0.0, computing_s - num_steps * decode_step_s(worker))
    share = min(worker.prefill_share, MOST_SHARE)
    behind_s = computing_s * share / (2 * (1 - share) ** 2)  # M/D/1: what requests that come meanwhile wait the longer
    cost = prices.first_token(ttft_s) + prices.others(worker.rows * lost_s)
    cost += prices.first_token(ttft_s + behind_s) - prices.first_token(ttft_s)
    return _Prompt(worker, fetch_from, fetch_s, queue_s, ttft_s, computing_s, worker.rows * lost_s + behind_s, cost)


def _best_prefix(ask: WorkAsked, worker: WorkerLoad, workers: Sequence[WorkerLoad]) -> tuple[str | None, int, float]:
    """(peer to fetch from, tokens cached then, how long it takes): the longest, if that is quicker than computing."""
    own = min(worker.num_cached, ask.num_inputs - 1)
    peer = max(workers, key=lambda w: (w.num_cached, w.name))
    num_tokens = min(peer.num_cached, ask.num_inputs - 1) - own
    bandwidth, latency_s = link_between(peer, worker)
    if num_tokens < worker.facts.block_size or not bandwidth:
        return None, own, 0.0
    num_bytes = num_tokens * worker.facts.bytes_per_token
    bandwidth *= num_bytes / (num_bytes + max(peer.bytes_in_flight, worker.bytes_in_flight))
    prefill_s = chunks_s(worker, num_tokens, own) / num_tokens
    if not worth_fetching(num_bytes, num_tokens, bandwidth, latency_s, prefill_s):
        return None, own, 0.0
    return peer.name, own + num_tokens, num_bytes / bandwidth + latency_s


def _answer(ask: WorkAsked, worker: WorkerLoad, prices: _Prices) -> _Answer:
    tpot_s, before_s = _pace_s(worker, 1, ask.num_inputs), _pace_s(worker)
    slower_s = max(0.0, tpot_s - before_s) * ask.num_outputs if worker.rows else 0.0
    harm_s = worker.rows * slower_s
    return _Answer(worker, tpot_s, harm_s, prices.tokens(tpot_s) + prices.others(harm_s))


def _fits(ask: WorkAsked, worker: WorkerLoad) -> bool:
    """Whether the prompt and a block to begin the answer fit; an empty worker is tried in any case."""
    is_empty = worker.free_blocks >= worker.facts.num_blocks
    return is_empty or worker.free_blocks >= ask.num_inputs // worker.facts.block_size + 2


# -- both ends


def _local(prompt: _Prompt, answer: _Answer) -> Option:
    out_of_role = ROLE * answer.cost if _is(answer, Role.PREFILL) else 0.0
    return _option(prompt, answer, None, 0.0, prompt.cost + answer.cost + out_of_role)


def _pairs(ask: WorkAsked, prompts: list[_Prompt], answers: list[_Answer], prices: _Prices) -> Iterator[Option]:
    senders = [p for p in prompts if p.worker.facts.role is not Role.DECODE and _fits(ask, p.worker)]
    receivers = [a for a in answers if a.worker.facts.role is not Role.PREFILL]
    senders = sorted(senders, key=lambda p: (p.cost, p.worker.name))[:MAX_PAIRED]
    receivers = sorted(receivers, key=lambda a: (a.cost, a.worker.name))[:MAX_PAIRED]
    for prompt in senders:
        for answer in receivers:
            moved = _transfer_s(ask, prompt, answer.worker)
            if moved is not None:
                num_outputs = max(1.0, ask.num_outputs)
                later_s = answer.tpot_s + moved / num_outputs
                late = prices.tokens(later_s) - prices.tokens(answer.tpot_s)
                in_role = ROLE * prompt.cost if _is(prompt, Role.PREFILL) and _is(answer, Role.DECODE) else 0.0
                yield _option(prompt, answer, prompt.worker.name, moved, prompt.cost + answer.cost + late - in_role)


def _is(end: _Prompt | _Answer, role: Role) -> bool:
    return end.worker.facts.role is role


def _may_pair(ask: WorkAsked, workers: Sequence[WorkerLoad]) -> bool:
    """Whether a hand-over could be, if there were room."""
    senders = [w for w in workers if w.facts.role is not Role.DECODE]
    receivers = [w for w in workers if w.facts.role is not Role.PREFILL]
    return any(num_moved(ask.num_inputs, r) and link_between(s, r)[0] for s in senders for r in receivers if s is not r)


def _transfer_s(ask: WorkAsked, prompt: _Prompt, receiver: WorkerLoad) -> float | None:
    """Seconds of transfer that computing the prompt does not hide; None where nothing can be moved."""
    sender = prompt.worker
    bandwidth, latency_s = link_between(sender, receiver)
    num_tokens = num_moved(ask.num_inputs, receiver)
    if sender.name == receiver.name or not bandwidth or not num_tokens:
        return None
    num_bytes = num_tokens * sender.facts.bytes_per_token
    before = max(sender.bytes_in_flight, receiver.bytes_in_flight) + sender.bytes_queued - prompt.queue_s * bandwidth
    last_layer_s = num_bytes / sender.facts.num_layers / bandwidth
    hidden_s = prompt.computing_s * (1 - 1 / sender.facts.num_layers)
    return max((num_bytes + max(0.0, before)) / bandwidth - hidden_s, last_layer_s) + latency_s


def num_moved(num_inputs: int, receiver: WorkerLoad) -> int:
    """Tokens whose KV a hand-over moves: whole blocks that the receiver lacks."""
    size = receiver.facts.block_size
    return max(0, (num_inputs // size - receiver.num_cached // size) * size)


def link_between(sender: WorkerLoad, receiver: WorkerLoad) -> tuple[float, float]:
    """(bytes/s, s): the slower of their two; no bytes between those whose KV is not each other's."""
    one, other = sender.facts, receiver.facts
    if one.numbers != other.numbers:
        return 0.0, 0.0
    return min(one.bandwidth, other.bandwidth), max(one.latency_s, other.latency_s)


def _option(prompt: _Prompt, answer: _Answer, prefill: str | None, transfer_s: float, cost: float) -> Option:
    return Option(
        answer.worker.name,
        prefill,
        prompt.fetch_from,
        cost,
        prompt.ttft_s,
        answer.tpot_s,
        prompt.fetch_s,
        transfer_s,
        prompt.harm_s + answer.harm_s,
    )


# -- time, by the cost model


def chunk_of(worker: WorkerLoad) -> int:
    """Prompt tokens of a full step."""
    return max(1, worker.facts.token_budget - worker.rows)


def chunks_s(worker: WorkerLoad, num_tokens: float, start: int) -> float:
    """Computing so many tokens of prompts from position `start` on, in steps with all that decodes there."""
    chunk = chunk_of(worker)
    num_full, rest = divmod(num_tokens, chunk)
    attention_s = worker.facts.costs.prefill_attention_s * num_tokens * (start + num_tokens / 2)
    rest_s = _step_s(worker, worker.rows, rest) if rest else 0.0
    return num_full * _step_s(worker, worker.rows, chunk) + rest_s + attention_s


def decode_step_s(worker: WorkerLoad, num_more: int = 0, context_more: int = 0) -> float:
    """Seconds of a step of all that decode there, and some more; of one if there is none."""
    return _step_s(worker, max(1, worker.rows + num_more), 0, context_more)


def _pace_s(worker: WorkerLoad, num_more: int = 0, context_more: int = 0) -> float:
    """Seconds a token, with the time that prompts take of it."""
    return decode_step_s(worker, num_more, context_more) / (1 - min(worker.prefill_share, MOST_SHARE))


def _step_s(worker: WorkerLoad, rows: int, prefill: float, context_more: int = 0) -> float:
    costs, num_rows = worker.facts.costs, rows + (prefill > 0)
    shape = StepShape(
        rows=num_rows,
        prefill_tokens=round(prefill),
        decode_tokens=rows,
        context_tokens=worker.context_tokens + context_more,
        samples=num_rows,
        groups=(prefill > 0) + (rows > 0),
    )
    return costs.expected_s(shape) + costs.gap_s(num_rows)


SHARE_S = 5.0  # time constant of the share of time that goes to prompts
NUM_REMEMBERED = 100.0  # answers over which their length is averaged


@dataclass(slots=True, eq=False)
class _Work:
    """Work of one worker."""

    queued: dict[str, float] = field(default_factory=dict)  # request -> uncached tokens, until its first token
    queued_tokens: float = 0.0
    moved_on_at: float = 0.0  # s, when the queue last lost or got a first one
    rows: int = 0
    context_tokens: int = 0  # of those
    held_tokens: int = 0  # known tokens of all that are there
    num_here: int = 0
    bytes_in_flight: float = 0.0
    bytes_queued: float = 0.0
    prompts_s: float = 0.0  # of prompts lately, the older the less; as of `prompts_at`
    prompts_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Part:
    """Work of one request."""

    replica: str
    prefill: str  # where its prompt is computed
    num_tokens: int  # known when it was bound
    kv_bytes: float  # of a hand-over, until it is done
    num_samples: int = 1
    num_new: int = 0  # tokens since
    has_begun: bool = False


class WorkBook:
    """Written by `Binder` and the core as requests come and go."""

    def __init__(self) -> None:
        self._work: dict[str, _Work] = {}
        self._parts: dict[str, _Part] = {}
        self._bytes_in_flight = 0.0  # of all
        self._num_answers, self._mean_outputs = 0.0, 0.0

    # -- to look at

    def outputs_left(self, request: FleetRequest) -> float:
        """Output tokens left: as predicted, else as answers have been lately; at least 1."""
        left = remaining_outputs(request)
        if request.expected_outputs is not None or not self._num_answers:
            return left
        return max(1.0, min(left, self._mean_outputs - request.num_outputs))

    @property
    def mean_outputs(self) -> float:
        """Mean output tokens of the last answers; at least 1."""
        return max(1.0, self._mean_outputs)

    def load(self, name: str, facts: WorkerFacts, now: float) -> WorkerLoad:
        work = self._work.get(name)
        if work is None:
            return WorkerLoad(name, facts, free_blocks=facts.num_blocks)
        held = work.held_tokens // facts.block_size + work.num_here  # half a block too much for each, at most one
        load = WorkerLoad(
            name,
            facts,
            work.queued_tokens,
            work.rows,
            work.context_tokens,
            max(0, facts.num_blocks - held),
            min(1.0, work.prompts_s * exp((work.prompts_at - now) / SHARE_S) / SHARE_S),
            self._bytes_in_flight if facts.shares_link else work.bytes_in_flight,
            work.bytes_queued,
        )
        return load._replace(queued_tokens=self._left(work, load, now))

    def prompts_at(self, name: str) -> list[str]:
        """Requests whose prompts are computed there for others."""
        return [name_of for name_of, part in self._parts.items() if part.prefill == name != part.replica]

    def num_here(self, name: str) -> int:
        """Requests that have KV there, or are to."""
        work = self._work.get(name)
        return work.num_here if work is not None else 0

    # -- what happens

    def bound(self, request: FleetRequest, option: Option, facts: WorkerFacts, now: float) -> None:
        """`facts` are those of the worker that computes the prompt."""
        name = option.prefill or option.replica
        num_tokens = request.num_inputs + request.num_outputs
        num_uncached = max(1, num_tokens - request.num_cached)
        moved = num_tokens * facts.bytes_per_token if name != option.replica else 0.0
        part = _Part(option.replica, name, num_tokens, moved, request.num_samples)
        self._parts[request.request_id] = part
        for there in {option.replica, name}:
            self._add(there, part, 1)
        work = self._work[name]
        prompt_s = chunks_s(WorkerLoad(name, facts), num_uncached, request.num_cached)
        work.prompts_s = work.prompts_s * exp((work.prompts_at - now) / SHARE_S) + prompt_s
        work.prompts_at = now
        if not work.queued:
            work.moved_on_at = now
        self._queue(part, request.request_id, num_uncached)

    def progressed(self, request_id: str, num_tokens: int, now: float) -> None:
        part = self._parts.get(request_id)
        if part is None:
            return
        work = self._work[part.replica]
        if not part.has_begun:
            part.has_begun = True
            self._unqueue(request_id, part).moved_on_at = now
            self._move(part, 1)
            work.rows += part.num_samples
            work.context_tokens += part.num_samples * part.num_tokens
        part.num_new += num_tokens
        work.context_tokens += num_tokens
        work.held_tokens += num_tokens

    def prefilled(self, request_id: str) -> str | None:
        """Return the worker that computed the prompt for another and drops it now; the other computes what is left."""
        part = self._parts.get(request_id)
        if part is None or part.prefill == part.replica:
            return None
        name, left = part.prefill, self._work[part.prefill].queued.get(request_id)
        if left is not None:
            self._unqueue(request_id, part)
        self._add(name, part, -1)
        self._move(part, -part.has_begun)
        part.kv_bytes, part.prefill = 0.0, part.replica
        if left is not None:
            self._queue(part, request_id, left)
        return name

    def released(self, request_id: str) -> None:
        """The request is on no worker any more."""
        part = self._parts.get(request_id)
        if part is None:
            return
        if not part.has_begun:
            self._unqueue(request_id, part)
        self.prefilled(request_id)
        work = self._work[part.replica]
        if part.has_begun:
            self._num_answers = min(self._num_answers + 1, NUM_REMEMBERED)
            self._mean_outputs += (part.num_new / part.num_samples - self._mean_outputs) / self._num_answers
            work.rows -= part.num_samples
            work.context_tokens -= part.num_samples * part.num_tokens + part.num_new
        work.held_tokens -= part.num_new
        self._add(part.replica, part, -1)
        del self._parts[request_id]

    def gone(self, name: str) -> None:
        """Forget the work of a worker that has no requests."""
        if not self.num_here(name):
            self._work.pop(name, None)

    def _add(self, name: str, part: _Part, times: int) -> None:
        work = self._work.setdefault(name, _Work())
        work.num_here += times
        work.held_tokens += times * part.num_tokens

    def _move(self, part: _Part, times: int) -> None:
        """Its KV is on its way once its prompt is computed: what was sent before that is about there."""
        self._bytes_in_flight += times * part.kv_bytes
        for name in (part.replica, part.prefill):
            self._work[name].bytes_in_flight += times * part.kv_bytes

    def _queue(self, part: _Part, request_id: str, num_tokens: float) -> None:
        work = self._work[part.prefill]
        work.queued[request_id] = num_tokens
        work.queued_tokens += num_tokens
        work.bytes_queued += part.kv_bytes

    def _unqueue(self, request_id: str, part: _Part) -> _Work:
        work = self._work[part.prefill]
        work.queued_tokens -= work.queued.pop(request_id)
        work.bytes_queued -= part.kv_bytes
        return work

    def _left(self, work: _Work, load: WorkerLoad, now: float) -> float:
        """Tokens left in the queue, less those computed since the last first token; the first request is not done."""
        if not work.queued:
            return 0.0
        computed = (now - work.moved_on_at) * load.facts.token_budget / chunks_s(load, load.facts.token_budget, 0)
        return work.queued_tokens - min(computed, next(iter(work.queued.values())))

    def check_invariants(self) -> None:
        """Asserts that sums are those of the requests; slow."""
        for name, work in self._work.items():
            there = [part for part in self._parts.values() if name in (part.replica, part.prefill)]
            own = [part for part in there if part.replica == name]
            assert work.num_here == len(there)
            assert work.rows == sum(part.has_begun * part.num_samples for part in own)
            assert work.held_tokens == sum(p.num_tokens for p in there) + sum(p.num_new for p in own)
            assert abs(work.queued_tokens - sum(work.queued.values())) < 1e-3
