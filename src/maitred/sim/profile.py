"""A device profile as a file: a fitted cost model, of what machine and model it is, and how well it fits."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple
from zlib import crc32

import msgspec

from maitred.config import DEFAULT_TOKEN_BUDGET
from maitred.core.cost_model import CostModel
from maitred.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeModel:
    """Seconds of HTTP, tokenising and the way between processes; all 0 is the engine alone.

    It has no queue: a front end at the limit of its own processor is slower than this says.
    """

    fixed_s: float = 0.0
    """Time of each request until its client has the first token, at no prompt."""
    prompt_token_s: float = 0.0
    output_token_s: float = 0.0
    """Time of each token after the first by which its client waits longer than the engine."""
    jitter: tuple[float, ...] = ()
    """Spread of measured over modelled times to the first token: evenly spaced quantiles; empty is none."""

    def first_token_s(self, prompt_tokens: int, request_id: str = "") -> float:
        """Return the time of a request, with the jitter that its name draws; without one, none."""
        times = drawn(self.jitter, crc32(request_id.encode()) / 2**32) if self.jitter and request_id else 1.0
        return times * (self.fixed_s + prompt_tokens * self.prompt_token_s)

    def whole_s(self, prompt_tokens: int, output_tokens: int, request_id: str = "") -> float:
        return self.first_token_s(prompt_tokens, request_id) + max(0, output_tokens - 1) * self.output_token_s


class EdgeSample(NamedTuple):
    """One request, as its client saw it beside the engine."""

    prompt_tokens: int
    first_token_s: float  # sent to first token at the client, less its waiting and its steps in the engine
    num_gaps: int  # tokens after the first
    gaps_s: float  # first token to last at the client, less the same in the engine


class Jitter:
    """Draws by which modelled times become as unsteady as measured ones; a pure function of the seed and the calls."""

    def __init__(self, model: CostModel, rng: Random) -> None:
        self._bands = [(band.below_s, band.quantiles) for band in model.jitter]
        self._gaps = model.gap_jitter
        self._random = rng.random
        self.drawn: list[float] = []  # since the last `step_s`, with it
        self.undone: deque[float] = deque()  # drawn for steps that were not done: they come again

    def _draw(self) -> float:
        self.drawn.append(self.undone.popleft() if self.undone else self._random())
        return self.drawn[-1]

    def step_s(self, modelled_s: float) -> float:
        self.drawn = []
        for below_s, quantiles in self._bands:
            if modelled_s < below_s:
                return modelled_s * drawn(quantiles, self._draw())
        return modelled_s

    def gap_s(self, modelled_s: float) -> float:
        return modelled_s * drawn(self._gaps, self._draw()) if self._gaps else modelled_s


def drawn(quantiles: Sequence[float], share: float) -> float:
    """The quantile at `share`, 0 to 1, between two of them linearly."""
    at = share * (len(quantiles) - 1)
    low = int(at)
    return quantiles[low] + (quantiles[min(low + 1, len(quantiles) - 1)] - quantiles[low]) * (at - low)


VERSION = 2
READABLE = (1, 2)  # 1 knew no edge
DOUBTFUL_ERROR = 0.10


class TermError(msgspec.Struct, frozen=True, kw_only=True):
    """Uncertainty of one coefficient."""

    seconds: float
    """The coefficient, for each unit of its term."""
    standard_error_s: float
    share: float
    """Share of the modelled time of all recorded steps."""
    held_out_error: float | None = None
    """Mean relative error of the held-out steps in which this term weighs most; None when there is none."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Profile that `maitred profile` writes and `maitred simulate --device FILE` reads."""

    model: str
    machine: str
    executor: str
    cost_model: CostModel
    edge: EdgeModel = EdgeModel()
    """Time that a client sees besides; all 0 in profiles of version 1."""
    edge_error: float = 0.0
    """Error of the edge's time to the first token on requests that it was not fitted to."""
    num_edge_requests: int = 0
    max_model_len: int
    kv_bytes_per_token: int
    kv_memory_bytes: int
    """Bytes that the engine may take for KV on this machine."""
    state_bytes: int = 0
    """Of a request's recurrent states."""
    block_size: int = 16
    token_budget: int = DEFAULT_TOKEN_BUDGET
    """Token budget of the engine that was measured."""
    num_steps: int = 0
    num_held_out_steps: int = 0
    mape: float = 0.0
    """Mean relative error of a held-out step."""
    p90_error: float = 0.0
    bias: float = 0.0
    """Modelled over measured time of all held-out steps, less 1."""
    terms: Mapping[str, TermError] = {}
    version: int = VERSION

    @property
    def doubt(self) -> str | None:
        """Why figures that come of it are to be taken with care; None when nothing speaks against them."""
        named = {"steps": self.mape, "the edge": self.edge_error}
        doubtful = [f"{error:.0%} off on {what}" for what, error in named.items() if error > DOUBTFUL_ERROR]
        if not doubtful:
            return None
        return (
            f"the profile is {' and '.join(doubtful)} that it was not fitted to, over {DOUBTFUL_ERROR:.0%}, and so may "
            "the figures be; run maitred profile again when the machine is quiet, or with more --seconds"
        )


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Profile).decode


def encode_profile(profile: Profile) -> bytes:
    return msgspec.json.format(_encode(profile), indent=2) + b"\n"


def decode_profile(data: bytes, name: str) -> Profile:
    """Raises ConfigError."""
    try:
        profile = _decode(data)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name}: {error}; is this a device profile? make one with maitred profile -o FILE") from None
    if profile.version not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise ConfigError(f"{name}: profile version {profile.version}, this maitred reads {known}; profile again")
    return profile
