"""Contract between scheduler and executor: the plan of one step, its outcome, and the executor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from maitred.core.request import Charges, FinishReason, RequestSpec

DEFAULT_TOKEN_BUDGET = 512  # tokens, where nothing else is said


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request the executor does not know yet (or was told to forget when it was preempted).

    `output_token_ids` is not empty after a preemption. Plans are equal that name the same requests with as many tokens,
    so that a replay from hashes gives equal plans.
    """

    request_id: str
    num_output_tokens: int = 0
    output_token_ids: tuple[int, ...] = field(compare=False, repr=False, default=())
    spec: RequestSpec = field(compare=False, repr=False)
    state_slot: int | None = field(compare=False, default=None)  # of recurrent layers, until it is forgotten


class ScheduledRow(NamedTuple):
    """One request's share of a step: compute positions [start, start + num_tokens).

    The tokens are named by position: the executor has the prompt and every token it sampled, so a plan may be made
    before the last token is known. `new_block_ids` is appended to the request's block table, after entries from
    `replaced_blocks` (index in table, new block id) are put in place of shared ones.

    The tokens of the last `num_drafts` positions are not known: the executor's proposer makes them up, and what the
    model would have said decides how many of them stand (speculative decoding, Leviathan et al. 2023,
    arXiv:2211.17192). Only rows that sample have drafts.
    """

    request_id: str
    start: int  # first position to compute = tokens already in the KV cache
    num_tokens: int  # >= 1
    samples: bool  # True when the last position (before drafts) is the last known token: sample its successor
    new_block_ids: tuple[int, ...] = ()
    replaced_blocks: tuple[tuple[int, int], ...] = ()
    num_drafts: int = 0  # of num_tokens

    @property
    def num_known(self) -> int:
        """Tokens that are no drafts."""
        return self.num_tokens - self.num_drafts


class BlockCopy(NamedTuple):
    """Copy a whole KV block, in every layer, before the step's first write."""

    source: int
    target: int


class PageChange(NamedTuple):
    """The block's pages of groups `first_group` .. are these from now on."""

    block: int
    first_group: int
    pages: tuple[int, ...]


class StateSave(NamedTuple):
    """Write the state of the request, once its row has consumed the tokens before `position`, to a slot too."""

    request_id: str
    position: int  # from the row's start on, and neither behind a draft nor behind the known token it samples after
    slot: int


class PoolChanges(NamedTuple):
    """What a plan tells beside its rows of what lies in the KV cache; it follows from them."""

    page_changes: tuple[PageChange, ...] = ()
    state_copies: tuple[BlockCopy, ...] = ()
    state_saves: tuple[StateSave, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The plan of one step; plain, immutable, comparable. An empty plan has no rows.

    Order for the executor: forget `forgotten_request_ids`, learn `new_requests`, do `swap_outs`, then `block_copies`,
    then `swap_ins`, compute `rows`. Where blocks consist of pages, what is copied from is found by the pages of before
    `page_changes`, all else by those after. Slots of recurrent layers' states are copied one after another, in order,
    before the rows; a row from position 0 begins without a state (design note 0034). All these follow from the rest, so
    they take no part in whether plans are equal.
    """

    step: int  # 0, 1, 2 ...
    rows: tuple[ScheduledRow, ...]
    new_requests: tuple[NewRequest, ...] = ()
    forgotten_request_ids: tuple[str, ...] = ()  # finished, aborted or preempted since the last plan
    block_copies: tuple[BlockCopy, ...] = ()  # copy on write
    swap_outs: tuple[BlockCopy, ...] = ()  # from a block to one of the host's
    swap_ins: tuple[BlockCopy, ...] = ()  # from one of the host's blocks
    page_changes: tuple[PageChange, ...] = field(compare=False, default=())
    state_copies: tuple[BlockCopy, ...] = field(compare=False, default=())  # from slot to slot
    state_saves: tuple[StateSave, ...] = field(compare=False, default=())  # while rows are computed

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the chosen (or prompt) token first, then the most likely ones, best first.

    `ranks` start at 1. Values are natural logs after temperature-free, unpenalised softmax, as vLLM's `raw_logprobs`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


class SampledRow(NamedTuple):
    """Outcome of one row of the plan; only rows that sample, failed, or carry prompt logprobs are reported.

    Drafts that were not accepted leave no trace: their positions are computed again, and blocks of the request's table
    past its known end and the accepted ones are the request's no more.

    Forced tokens are those after the sampled one that a grammar left no choice for. Nothing of them is computed yet:
    they are known tokens, as a prompt's are, and the next row of the request computes them.
    """

    request_id: str
    token_ids: tuple[int, ...]  # accepted drafts, one more, and forced ones; empty when there is none
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token of token_ids
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # for positions start+1 .. of this chunk
    error: str | None = None  # e.g. "logits are NaN"; ends this request only
    num_accepted: int = 0  # of the row's drafts, the first so many
    num_forced: int = 0  # of token_ids, the last so many
    complete: bool = False  # a grammar lets nothing follow: the request has ended, with `stop`
    postponed: bool = False  # no token yet, for want of a mask: the last position is computed again, in the next step
    num_drafts: int = 0  # tokens that were made up for the row: at most as many as were planned
    vector: bytes = b""  # of a row that pools, float32; it is `complete`


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The outcome of one plan, rows in the plan's order."""

    rows: tuple[SampledRow, ...]
    draft_s: float = 0.0  # of the step's time, what making up drafts took


class Executor(Protocol):
    """Carries out plans. Holds per-request state (tokens, block table, seed) between steps."""

    def execute(self, plan: SchedulerOutput) -> ModelOutput: ...

    def close(self) -> None:
        """Give back memory and threads; the executor is not used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """Timing of a request, in seconds; its five parts add up to the whole time in the engine."""

    queue_s: float  # arrival to first step
    prefill_s: float  # first step to first token
    decode_s: float  # first token to last
    stall_s: float = 0.0  # preempted, after the first step
    schedule_s: float = 0.0  # steps it was in or waited for, outside the executor
    ttft_s: float = 0.0  # arrival to first token, whatever it was spent on
    num_preemptions: int = 0

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s + self.decode_s + self.stall_s + self.schedule_s

    def with_schedule(self, prefill_s: float, decode_s: float) -> RequestTiming:
        """Return the timing with so much of prefill and decode told as the host's work; a part never falls below 0."""
        prefill_s, decode_s = min(prefill_s, self.prefill_s), min(decode_s, self.decode_s)
        return replace(
            self,
            prefill_s=self.prefill_s - prefill_s,
            decode_s=self.decode_s - decode_s,
            schedule_s=self.schedule_s + prefill_s + decode_s,
        )


class RequestProgress(NamedTuple):
    """Progress of a request, told to its owner after a step that touched it.

    The first and the last one have `charges`, and some between, as its computing grows; the last one has finish_reason
    and timing too. The sums of `charges.num_prompt_tokens` of the last ones and of all new tokens are the engine's own
    counters.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per new token
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # chunk by chunk, for prompt positions 1..
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    charges: Charges | None = None
    timing: RequestTiming | None = None
    num_forced: int = 0  # of new_token_ids, the last so many: a grammar left no choice for them
    is_requests_fault: bool = False  # the error is what was asked for, and not what became of it
    vector: bytes = b""  # float32 in the machine's order: the answer of a request that pools, with its finish_reason
