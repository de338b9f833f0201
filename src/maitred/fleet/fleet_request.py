"""A request as the router knows it: what a policy may ask of it, where it may go, and how far it has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from maitred.core.request import NO_TERMS, RequestSpec, Terms, UnderTerms

BYTES_PER_TOKEN = 4  # of a prompt that has no text; as a core takes it until usage tells


class Place(Enum):
    HELD = "held"
    BOUND = "bound"
    GONE = "gone"


@dataclass(slots=True, eq=False, kw_only=True)
class FleetRequest(UnderTerms):
    """Implements `policy.queued.Queued`, `policy.predictor.Foretold` and `storage.ledger.Owned`. Read from the body
    once; no token is in it.
    """

    request_id: str
    arrived_at: float  # s, as all times
    num_bytes: int  # of the prompt; tokens are estimated from them
    max_tokens: int  # most output tokens, of one sample
    model: str | None = None  # None takes any
    terms: Terms = NO_TERMS
    num_samples: int = 1  # n: as many slots are taken
    keys: tuple[int, ...] = ()  # of its prefixes, see prefix_keys
    hash_key: int | None = None  # of its session, cache key or user
    is_local: bool = False  # never leaves the first tier
    num_counted: int = 0  # prompt tokens as a replica counted them; 0 is an estimate
    keep_alive_s: float | None = None  # of its model, one of several, from now on; None changes nothing
    can_resume: bool = False  # its tokens are told beside its text
    features: Sequence[float] = ()
    # written by ClusterCore
    num_inputs: int = 1  # estimated prompt tokens
    expected_outputs: float | None = None
    place: Place = Place.HELD
    replica: int = -1  # bit number of the one that it is bound to, or was last
    num_computed: int = 0
    num_outputs: int = 0
    num_cached: int = 0  # prompt tokens that its replica was thought to have
    first_scheduled_at: float | None = None  # when it was bound first
    bound_at: float | None = None  # when it was bound last
    held_at: float = 0.0  # when it was held last
    held_s: float = 0.0  # in all, until it was bound last
    has_begun: bool = False  # a byte of its answer came, of any attempt
    num_attempts: int = 0
    num_retries: int = 0
    num_deaths: int = 0  # replicas that died with it
    has_fled: bool = False  # from a replica whose engine hung
    num_spills: int = 0  # tiers that it waited past
    first_tier: int = 0  # answers of those before it were not sure enough
    fell_back: bool = False  # to their answer: no later tier gave one
    tiers: int = 0  # bits of those that it may use
    num_passed: int = 0  # others that were bound before it, out of order
    barred: int = 0  # bits of replicas where it failed
    silent_at: int | None = None  # bit of the first replica that fell silent with it; -1 once heard of again
    fingerprint: str | None = None  # of the replica that made its tokens; None goes on anywhere

    @property
    def adapter(self) -> str:
        """None of its own: `model` names it."""
        return ""

    @property
    def max_outputs(self) -> int:
        return self.max_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, as far as known before usage tells."""
        return self.num_inputs

    @property
    def sample_index(self) -> int:
        """All samples are one request here."""
        return 0

    @property
    def block_hashes(self) -> Sequence[int]:
        """A prefix key stands for the blocks that it covers."""
        return self.keys


def request_of(spec: RequestSpec, keys: tuple[int, ...], hash_key: int | None = None) -> FleetRequest:
    """A request without a text: a simulated one, or of a test."""
    return FleetRequest(
        request_id=spec.request_id,
        arrived_at=spec.arrived_at,
        num_bytes=BYTES_PER_TOKEN * spec.num_prompt_tokens,
        num_counted=spec.num_prompt_tokens,
        max_tokens=spec.max_tokens,
        terms=spec.terms,
        keys=keys,
        hash_key=hash_key,
    )


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Usage that an answer reports, and whether the answer came to its own end."""

    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    complete: bool = True  # it ended by itself, not cut by client or error
    compute_us: int = 0  # of engines; foreign servers tell none


class FailureKind(str, Enum):
    RESET = "reset"  # no server listens, or the connection ended before the answer did: the replica is gone
    SILENT = "silent"  # it has not been heard of
    FULL = "full"  # 503 with Retry-After: it works, and has no room
    LIMITED = "limited"  # 429 or 404 of a foreign server, any error of a later tier: it works, and refuses this request
    ERROR = "error"  # 5xx, or what is no answer


@dataclass(frozen=True, slots=True)
class Failure:
    kind: FailureKind
    retry_after_s: float = 1.0  # of FULL
    message: str = ""

    @property
    def is_death(self) -> bool:
        return self.kind in (FailureKind.RESET, FailureKind.SILENT)


@dataclass(slots=True)
class TokenRatio:
    """Bytes of a prompt for each of its tokens, as usage has told lately; of one model."""

    num_bytes: float = field(default=4.0 * 64)
    num_tokens: float = field(default=64.0)

    MEMORY = 0.99

    def told(self, num_bytes: int, num_tokens: int) -> None:
        if num_bytes > 0 and num_tokens > 0:
            self.num_bytes = self.MEMORY * self.num_bytes + num_bytes
            self.num_tokens = self.MEMORY * self.num_tokens + num_tokens

    def tokens(self, num_bytes: int) -> int:
        return max(1, round(num_bytes * self.num_tokens / self.num_bytes))
