"""Generation request: what was asked (`RequestSpec`), what its scheduler knows (`RequestState`), how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from maitred.core.errors import InvalidRequest, did_you_mean
from maitred.core.structured_outputs import StructuredOutputsParams

# what other libraries call a parameter, or what stands for it here
_FOREIGN = {
    **dict.fromkeys(("max_new_tokens", "max_length", "max_output_tokens", "n_predict"), "max_tokens"),
    **dict.fromkeys(("stop_sequences", "stop_strings"), "stop"),
    **dict.fromkeys(("num_return_sequences", "best_of"), "n"),
    **dict.fromkeys(("repeat_penalty", "rep_pen"), "repetition_penalty"),
    "min_new_tokens": "min_tokens",
    "do_sample": "temperature, of which 0 is greedy",
    "guided_decoding": "structured_outputs",
}
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 128
MAX_SEED = 2**63 - 1


class RequestStatus(Enum):
    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"  # out of the queue until it came from elsewhere, or did not
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(str, Enum):
    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the client went away
    ERROR = "error"  # no usable logits
    QUEUE_TIMEOUT = "queue_timeout"  # in no step by `start_by`
    TIMEOUT = "timeout"  # not done by `finish_by`
    SHED = "shed"  # made room in the queue for a more urgent one


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Names and defaults are those that users of vLLM and the OpenAI API know.

    Raises InvalidRequest, naming the field and its value, for anything out of range.
    """

    n: int = 1
    """Samples for each prompt, 1..128."""
    temperature: float = 1.0
    """0 is greedy; larger is more random."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches this, in (0, 1]."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Penalty over 1 discourages tokens of the prompt and the output (CTRL, arXiv:1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from each token already in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted for each time a token is in the output, in [-2, 2]."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> value in [-100, 100] added to its logit."""
    allowed_token_ids: Sequence[int] | None = None
    """If given, only these tokens may be sampled."""
    bad_words: Sequence[str] = ()
    """Words whose token sequences must not appear."""
    stop: Sequence[str] = ()
    """A string or strings that end the text; they are not part of it unless include_stop_str_in_output."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the text, besides the model's own end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    max_tokens: int | None = 16
    """Most tokens to generate; None fills the context."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many."""
    logprobs: int | None = None
    """Number of most likely tokens to report at each position, besides the chosen one; None for none, 0..20."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    seed: int | None = None
    """Same seed, same text, whatever shares the batch; random if None."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    structured_outputs: StructuredOutputsParams | None = None
    """The shape that the text must have."""

    def __new__(cls, **given: object) -> SamplingParams:
        for name in given.keys() - cls.__dataclass_fields__.keys():
            told = (
                f"; here it is {_FOREIGN[name]}" if name in _FOREIGN else did_you_mean(name, cls.__dataclass_fields__)
            )
            raise TypeError(f"SamplingParams has no argument {name!r}{told}; help(SamplingParams) lists them")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "bad_words", "stop_token_ids"):
            if getattr(self, name) is None:  # what users of vLLM write for none
                object.__setattr__(self, name, ())
            elif isinstance(getattr(self, name), int):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}; it must be a list", param=name)
        _check_sampling(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


# (field, lowest, highest); the interval is closed, the message gives it; bounds that are int want an int.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, MAX_N),
    ("temperature", 0.0, 100.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),  # logits are divided by it, and must stay finite
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("min_tokens", 0, 2**31 - 1),
    ("max_tokens", 1, 2**31 - 1),
    ("seed", -MAX_SEED - 1, MAX_SEED),
    ("top_k", -1, 2**31 - 1),
)


def _check_sampling(p: SamplingParams) -> None:
    for name, low, high in _RANGES:
        value = getattr(p, name)
        if value is None:
            continue
        _check_number(name, value, whole=isinstance(low, int))
        if not low <= value <= high:  # a NaN fails this too
            raise InvalidRequest(f"{name} is {value}; it must be from {low} to {high}", param=name)
    for name in ("top_p", "repetition_penalty"):
        _check_number(name, getattr(p, name), whole=False)
    if not 0.0 < p.top_p <= 1.0:
        raise InvalidRequest(f"top_p is {p.top_p}; it must be over 0 and at most 1", param="top_p")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidRequest(f"min_tokens ({p.min_tokens}) is over max_tokens ({p.max_tokens})", param="min_tokens")
    _check_lists(p)


def _check_number(name: str, value: object, *, whole: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "an integer" if whole else "a number"
        raise InvalidRequest(f"{name} is {value!r}; it must be {kind}", param=name)


def _check_lists(p: SamplingParams) -> None:
    if isinstance(p.bad_words, str):
        raise InvalidRequest("bad_words must be a list of strings, not one string", param="bad_words")
    for name, what, most in (("stop", "string", MAX_STOP_STRINGS), ("bad_words", "word", MAX_BAD_WORDS)):
        texts = getattr(p, name)
        if len(texts) > most:
            raise InvalidRequest(f"{name} has {len(texts)} {what}s; at most {most}", param=name)
        if not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f"{name} is {texts!r:.80}; it must be strings", param=name)
        if not all(texts):
            raise InvalidRequest(f"{name} holds an empty {what}; leave it out", param=name)
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids is empty, so no token could be sampled", param="allowed_token_ids")
    for token, bias in (p.logit_bias or {}).items():
        if not -100.0 <= bias <= 100.0:
            fault = f"logit_bias of token {token} is {bias}; it must be from -100 to 100"
            raise InvalidRequest(fault, param="logit_bias")


DEFAULT_SAMPLING = SamplingParams()


def check_sampling_tokens(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model does not have; called before admission, when the vocabulary is known.

    Raises InvalidRequest naming the field, the id and the vocabulary.
    """
    named = (("logit_bias", sampling.logit_bias or ()), ("allowed_token_ids", sampling.allowed_token_ids or ()))
    for param, token_ids in named:
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"{param} names token {token_id}; the model's tokens are 0 to {vocab_size - 1}", param=param
                )


class ThinkingLimit(msgspec.Struct, frozen=True, array_like=True):
    """Thinking budget: after so many tokens of thoughts, all together, the end mark is what comes next."""

    num_tokens: int
    begin: tuple[int, ...]  # tokens of the mark that thoughts begin with
    end: tuple[int, ...]  # and of the one that ends them
    opened: bool = False  # the prompt ends with the first


class Terms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Terms of a request: its tenant, and by when it is to be served. Clients ask for some; the gate grants the rest,
    and every record of the request holds what it granted.
    """

    tenant: str = ""
    key_id: str = ""  # of the API key that asked; for the ledger alone
    weight: float = 1.0  # of the tenant: twice the weight, twice the fair share
    priority: int = 0  # 0 is most urgent
    ttft_slo_s: float | None = None  # objective (s) from arrival to the first output; None has none
    start_by: float | None = None  # s, Clock.now(): given up if it is in no step by then; None waits for ever
    finish_by: float | None = None  # s, Clock.now(): given up if it is not done by then; None takes its time
    background: bool = False  # served with what nobody else uses, whatever the policy


NO_TERMS = Terms()


class UnderTerms:
    """A request's terms as a policy asks for them (`policy.queued.Queued`)."""

    __slots__ = ()
    terms: Terms

    @property
    def tenant(self) -> str:
        return self.terms.tenant

    @property
    def weight(self) -> float:
        return self.terms.weight

    @property
    def priority(self) -> int:
        return self.terms.priority

    @property
    def ttft_slo_s(self) -> float | None:
        return self.terms.ttft_slo_s

    @property
    def start_by(self) -> float | None:
        return self.terms.start_by

    @property
    def finish_by(self) -> float | None:
        return self.terms.finish_by

    @property
    def background(self) -> bool:
        return self.terms.background


class Pooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of a request that generates nothing: numbers, made of its prompt's last states."""

    task: str  # "embed": a vector; "classify": a logit of each label; "logits": of the tokens `allowed_token_ids`
    all_tokens: bool = False  # each token's state counts, so none is taken from the prefix cache
    whole: bool = False  # tokens see those behind them: the prompt is computed in one step
    second_from: int = 0  # first token of the second of two texts, which an encoder tells apart; 0: there is one


class PoolingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How a model makes numbers of a prompt (`model.pooling`)."""

    kind: str  # one of `model.pooling.KINDS`: how the states of a prompt become one
    width: int  # of a vector; of a cross-encoder, its labels
    task: str = "embed"  # or "classify": logits of labels, of one for a cross-encoder
    normalize: bool = True  # a vector has length 1
    is_encoder: bool = False  # it generates nothing
    is_declared: bool = False  # the model was made for vectors, or for labels
    max_tokens: int = 0  # of a prompt, where its files say fewer than it could
    prompts: dict[str, str] = {}  # what stands before a text, by name
    default_prompt: str = ""  # a name
    activation: str = "sigmoid"  # of a label's logit: or identity
    score_tokens: tuple[int, int] | None = None  # whose logits are a causal reranker's: no, yes

    @property
    def whole(self) -> bool:
        """Whether a prompt is computed in one step."""
        return self.is_encoder

    @property
    def all_tokens(self) -> bool:
        return self.is_encoder or self.kind != "last"

    @property
    def generates(self) -> bool:
        return not self.is_encoder and self.task == "embed"

    @property
    def has_vectors(self) -> bool:
        return self.task == "embed" and self.score_tokens is None


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Specification of one sample of one prompt. It never changes; `msgspec.structs.replace` makes another.

    The spec crosses processes, is logged, simulated and resumed, encoded as it stands: a field with a default costs
    nothing on the wire, and adding one takes one line here. Samples of one prompt (n > 1) are specs of their own with
    one `parent_id`; sample 0 computes the prompt, the others share its blocks. A spec can be made from block hashes in
    place of tokens (traces, replay): then `prompt_token_ids` is empty and `num_prompt_tokens` says how many there were.
    """

    request_id: str
    arrived_at: float  # s, Clock.now() at admission
    num_prompt_tokens: int
    max_tokens: int  # most output tokens; resolved, prompt + max_tokens <= max_model_len
    prompt_token_ids: Sequence[int] = ()
    sampling: SamplingParams = DEFAULT_SAMPLING
    block_hashes: Sequence[bytes] = ()  # of full blocks of the prompt
    seed: int = 0  # resolved: always set, in [0, 2**63)
    sample_index: int = 0  # 0..n-1
    parent_id: str | None = None  # None when n == 1
    terms: Terms = NO_TERMS
    features: tuple[float, ...] = ()  # of the prompt's text, for a predictor; made at intake
    predicted_output_tokens: float | None = None  # None asks the scheduler's predictor
    cache_salt: str = ""  # requests of unlike salt never share cached blocks
    eos_token_ids: tuple[int, ...] = ()  # the model's, before ignore_eos
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()  # sampling.bad_words, tokenised
    grammar: str = ""  # what the output is bound to, as llguidance takes it: JSON or Lark; empty binds nothing
    thinking: ThinkingLimit | None = None
    prediction_token_ids: Sequence[int] = ()  # what the client expects the output to be; drafts are taken from it
    adapter: str = ""  # LoRA adapter by its name; empty is the model as it is
    kv_from: tuple[str, ...] = ()  # addresses of an engine that has its KV
    kv_only: bool = False  # computes nothing: its prompt's KV is pulled from there, as it is computed, and it ends
    resumed: ResumePoint | None = None  # where another engine left off
    pooling: Pooling | None = None  # its prompt is all that is computed, and `max_tokens` is 0

    @property
    def prompt_id(self) -> str:
        """Id that the samples of one prompt share."""
        return self.parent_id or self.request_id


def prompt_told_once(samples: Sequence[RequestSpec]) -> tuple[RequestSpec, ...]:
    """Samples of one prompt as they cross to another process: its tokens and hashes are with the first alone."""
    first, *others = samples
    return first, *(replace(each, prompt_token_ids=(), block_hashes=()) for each in others)


def prompt_of_each(samples: Sequence[RequestSpec]) -> list[RequestSpec]:
    """Samples as they were before `prompt_told_once`."""
    first, *others = samples
    tokens, hashes = first.prompt_token_ids, first.block_hashes
    return [first, *(replace(each, prompt_token_ids=tokens, block_hashes=hashes) for each in others)]


class Charges(NamedTuple):
    """Charges of a request and when it got on, as its engine noted it: for ledger, quotas, traces and a resume."""

    num_prompt_tokens: int = 0  # its part of the prompt counter: all once scheduled, 0 if a sibling's counts
    num_cached_tokens: int = 0  # of its prompt, taken from the prefix cache when first scheduled
    num_generated_tokens: int = 0  # so far
    num_preemptions: int = 0
    first_scheduled_at: float | None = None  # s
    first_token_at: float | None = None  # s
    num_draft_tokens: int = 0  # made up for it so far; not billed
    num_accepted_tokens: int = 0  # of them, those that became output
    handover: str = ""  # one of HANDOVER_OUTCOMES; empty where no other engine is beside this one
    num_rows: int = 0  # of a tensor request
    compute_us: int = 0  # its part of the time of the steps or batches it was in


HANDOVER_OUTCOMES = ("local", "moved", "recomputed")
"""Outcomes of a prompt's KV, the best first; `local` was computed by the engine that answers."""
NO_CHARGES = Charges()


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Resume point: how far a request had come with an engine that ended; the next computes prompt and output again."""

    output_token_ids: Sequence[int] = ()
    charges: Charges = NO_CHARGES
    last_token_at: float | None = None  # s
    stalled_at: float | None = None  # s, since when no engine has it; None when it was in no step
    stalled_prefill_s: float = 0.0
    stalled_decode_s: float = 0.0


@dataclass(slots=True, eq=False)
class RequestState(UnderTerms):
    """A request in its scheduler, which alone writes here; `spec` is what was asked.

    Most properties are those that a policy may ask of a queued request (`policy.queued.Queued`).
    """

    spec: RequestSpec
    request_id: str = field(init=False)
    terms: Terms = field(init=False)
    # hashes of full blocks of known tokens, prompt first; extended by KVCacheManager
    block_hashes: list[bytes] = field(init=False)
    output_token_ids: list[int] = field(default_factory=list)
    predicted_output_tokens: float | None = field(init=False)  # by the predictor, once, before the queue
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0  # tokens whose KV is in the cache, or will be after the steps already planned
    block_table: list[int] = field(default_factory=list)
    host_block_table: list[int] = field(default_factory=list)  # while preempted: where its KV was copied to
    num_swapped_tokens: int = 0  # whose KV is there
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string; None for end-of-sequence
    error: str | None = None
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache when first scheduled
    num_charged_prompt_tokens: int = 0  # its part of the prompt counter: all once scheduled, 0 if a sibling's counts
    tell_at_us: int = 0  # of compute_us, when its owner hears of its charges again
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # made up for it
    num_accepted_tokens: int = 0  # of them, those that became output
    compute_us: int = 0  # its part of the executor's time
    handover: str = ""  # as Charges has it
    first_scheduled_at: float | None = None  # s
    first_token_at: float | None = None  # s
    last_token_at: float | None = None  # s
    finished_at: float | None = None  # s
    stalled_at: float | None = None  # s, since when it is preempted
    stalled_prefill_s: float = 0.0  # preempted before its first token, in all
    stalled_decode_s: float = 0.0  # and after it

    def __post_init__(self) -> None:
        spec, point = self.spec, self.spec.resumed
        self.request_id, self.terms = spec.request_id, spec.terms
        self.block_hashes = list(spec.block_hashes)
        self.predicted_output_tokens = spec.predicted_output_tokens
        if point is None:
            return
        charges, self.output_token_ids = point.charges, list(point.output_token_ids)
        self.num_charged_prompt_tokens, self.num_cached_tokens = charges.num_prompt_tokens, charges.num_cached_tokens
        self.num_preemptions, self.handover = charges.num_preemptions, charges.handover
        self.num_draft_tokens, self.num_accepted_tokens = charges.num_draft_tokens, charges.num_accepted_tokens
        self.compute_us = charges.compute_us
        self.first_scheduled_at, self.first_token_at = charges.first_scheduled_at, charges.first_token_at
        self.last_token_at, self.stalled_at = point.last_token_at, point.stalled_at
        self.stalled_prefill_s, self.stalled_decode_s = point.stalled_prefill_s, point.stalled_decode_s

    @property
    def arrived_at(self) -> float:
        return self.spec.arrived_at

    @property
    def num_prompt_tokens(self) -> int:
        return self.spec.num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        return self.spec.max_tokens

    @property
    def features(self) -> tuple[float, ...]:
        return self.spec.features

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return self.spec.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    num_inputs = num_prompt_tokens
    num_outputs = num_output_tokens

    @property
    def max_outputs(self) -> int:
        return self.spec.max_tokens

    @property
    def expected_outputs(self) -> float | None:
        return self.predicted_output_tokens

    @property
    def num_computed(self) -> int:
        return self.num_computed_tokens

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def charges(self) -> Charges:
        return Charges(
            self.num_charged_prompt_tokens,
            self.num_cached_tokens,
            len(self.output_token_ids),
            self.num_preemptions,
            self.first_scheduled_at,
            self.first_token_at,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            self.handover,
            compute_us=self.compute_us,
        )
