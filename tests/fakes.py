"""Fakes of the public protocols, and builders that make a test's world in a line each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from maitred.config import SchedulerConfig
from maitred.core.request import RequestSpec, RequestState, SamplingParams, Terms
from maitred.core.step import ModelOutput, NewRequest, SampledRow, ScheduledRow, SchedulerOutput, TokenLogprobs
from maitred.kv.pages import KVGroups, kv_cache_manager
from maitred.kv.prefix_cache import BlockHasher, TokenHasher
from maitred.scheduler.scheduler import Scheduler
from maitred.scheduler.speculation import NumDrafts, Speculation
from maitred.scheduler.state import StopRule, stop_at_token

MODEL = "fake-model"
_ids = count()

TokenAt = Callable[[str, int], int]
"""(request id, position) -> the token there; prompts are given, so it is asked for positions after the prompt."""


def token_at(request_id: str, position: int) -> int:
    """Any fixed function will do; 1000 ..= 50999, so below 1000 there are ids for end-of-sequence and stop tokens."""
    return 1000 + crc32(f"{request_id}:{position}".encode()) % 50_000


def make_request(
    request_id: str | None = None,
    *,
    prompt: int | Sequence[int] = 8,
    max_tokens: int = 4,
    arrived_at: float = 0.0,
    block_size: int = 4,
    sampling: SamplingParams | None = None,
    **fields: Any,
) -> RequestState:
    """A request with a prompt of given tokens, or of so many that no other request has.

    `block_size` must be the scheduler's: the block hashes are computed here, as at intake.
    """
    if request_id is None:
        request_id = f"r{next(_ids)}"
    tokens = list(prompt) if not isinstance(prompt, int) else [token_at(request_id, i) for i in range(prompt)]
    spec = RequestSpec(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling=sampling or SamplingParams(max_tokens=max_tokens, temperature=0.0),
        arrived_at=arrived_at,
        num_prompt_tokens=len(tokens),
        max_tokens=max_tokens,
        **with_terms(fields),
    )
    hashes = TokenHasher(block_size, MODEL).hash_prompt(tokens, spec.cache_salt)
    return RequestState(replace(spec, block_hashes=hashes))


def with_terms(fields: dict[str, Any]) -> dict[str, Any]:
    """A request's fields, of which those of its `Terms` are put together."""
    of_terms = {name: fields[name] for name in Terms.__struct_fields__ if name in fields}
    return {name: value for name, value in fields.items() if name not in of_terms} | {"terms": Terms(**of_terms)}


def make_spec(request_id: str | None = None, **fields: Any) -> RequestSpec:
    """What `make_request` makes, as it is submitted."""
    return make_request(request_id, **fields).spec


def make_new(request_id: str, prompt: Sequence[int], output: Sequence[int] = (), **fields: Any) -> NewRequest:
    """What a plan tells an executor of such a request."""
    spec = make_spec(request_id, prompt=prompt, **fields)
    return NewRequest(request_id=request_id, num_output_tokens=len(output), output_token_ids=tuple(output), spec=spec)


def make_samples(parent_id: str, n: int, **fields: Any) -> list[RequestState]:
    """The n requests of one prompt, in the order in which they are to be added; ids are parent_id-0, parent_id-1 ..."""
    if isinstance(fields.get("prompt", 8), int):
        fields["prompt"] = [token_at(parent_id, i) for i in range(fields.get("prompt", 8))]
    return [make_request(f"{parent_id}-{i}", sample_index=i, parent_id=parent_id, **fields) for i in range(n)]


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    policy: str = "fcfs",
    ageing_s: float = 30.0,
    enable_prefix_caching: bool = True,
    num_host_blocks: int = 0,
    hasher: BlockHasher | None = None,
    stop_rule: StopRule = stop_at_token,
    num_drafts: NumDrafts | None = None,
    speculation: Speculation | None = None,
    groups: KVGroups | None = None,
    num_state_slots: int = 0,
    **settings: Any,
) -> Scheduler:
    """`num_blocks` are pages where there are `groups`."""
    config = SchedulerConfig(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        policy=policy,
        ageing_s=ageing_s,
        **settings,
    )
    kv_cache = kv_cache_manager(
        groups,
        num_pages=num_blocks,
        num_blocks=min(400, groups.num_blocks(num_blocks, 160)) if groups is not None else num_blocks,
        block_size=block_size,
        hasher=hasher or TokenHasher(block_size, MODEL),
        enable_prefix_caching=enable_prefix_caching,
        num_host_blocks=num_host_blocks,
        num_state_slots=num_state_slots,
    )
    return Scheduler(config, kv_cache, stop_rule, num_drafts=num_drafts, speculation=speculation)


class FakeExecutor:
    """Answers at once: the token at a position is `token_at(request_id, position)`, whatever the batch.

    Gives logprobs (made up, of the right shape) to requests that ask for them. `errors` maps a request id to the error
    its next sampling row gets. `plans` keeps every plan it was given. `draft_at` makes up drafts: right ones, unless it
    is another function than `token_at`. `forced_after` says how many tokens are forced after the one at a position,
    `postponed` whether that one is not given yet.
    """

    def __init__(self, token_at: TokenAt = token_at, draft_at: TokenAt | None = None) -> None:
        self._token_at, self._draft_at = token_at, draft_at or token_at
        self._requests: dict[str, RequestSpec] = {}
        self.forced_after: Callable[[str, int], int] = lambda request_id, position: 0
        self.postponed: Callable[[str, int], bool] = lambda request_id, position: False
        self.plans: list[SchedulerOutput] = []
        self.errors: dict[str, str] = {}
        self.closed = False

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self.plans.append(plan)
        for request_id in plan.forgotten_request_ids:
            del self._requests[request_id]
        for new in plan.new_requests:
            assert new.request_id not in self._requests, f"{new.request_id} is new twice"
            self._requests[new.request_id] = new.spec
        answers = [self._answer(row) for row in plan.rows]
        return ModelOutput(tuple(answer for answer in answers if answer is not None))

    def close(self) -> None:
        self.closed = True

    def _answer(self, row: ScheduledRow) -> SampledRow | None:
        request = self._requests[row.request_id]
        end = row.start + row.num_known
        prompt_logprobs = None
        if request.sampling.prompt_logprobs is not None and row.start + 1 < request.num_prompt_tokens:
            positions = range(row.start + 1, min(end + 1, request.num_prompt_tokens))
            prompt_logprobs = tuple(_logprobs(request.prompt_token_ids[i]) for i in positions)
        if not row.samples:
            return SampledRow(row.request_id, (), None, prompt_logprobs) if prompt_logprobs else None
        if self.postponed(row.request_id, end):
            return SampledRow(row.request_id, (), None, prompt_logprobs, postponed=True)
        if row.request_id in self.errors:
            return SampledRow(row.request_id, (), error=self.errors.pop(row.request_id))
        tokens = [self._token_at(row.request_id, end)]
        for position in range(end, end + row.num_drafts):
            if self._draft_at(row.request_id, position) != tokens[-1]:
                break
            tokens.append(self._token_at(row.request_id, position + 1))
        num_sampled, logprobs = len(tokens), None
        if request.sampling.logprobs is not None:
            logprobs = tuple(map(_logprobs, tokens))
        else:
            last = end + num_sampled - 1
            num_forced = self.forced_after(row.request_id, last)
            tokens += [self._token_at(row.request_id, position) for position in range(last + 1, last + 1 + num_forced)]
        return SampledRow(
            row.request_id,
            tuple(tokens),
            logprobs,
            prompt_logprobs,
            num_accepted=num_sampled - 1,
            num_forced=len(tokens) - num_sampled,
            num_drafts=row.num_drafts,
        )


class GatedExecutor(FakeExecutor):
    """Makes a step for each one that the test lets pass, and every step once it is open."""

    def __init__(self, token_at: TokenAt = token_at) -> None:
        super().__init__(token_at)
        self._changed = threading.Condition()
        self._num_allowed, self._is_open = 0, False
        self.num_begun = 0  # steps, the one that waits included

    def let(self, num_steps: int) -> None:
        """So many steps more."""
        with self._changed:
            self._num_allowed += num_steps
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        if not plan.rows:  # only tells what became of requests
            return super().execute(plan)
        with self._changed:
            self.num_begun += 1
            passed = self._changed.wait_for(lambda: self._is_open or self._num_allowed > 0, 120)
            assert passed, "the test let no step pass"
            self._num_allowed -= not self._is_open
        return super().execute(plan)


def _logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs((token,), (-0.5,), (1,))
