"""Output length prediction: asked once for each request, before the queue, and told the true length at its end.

A prediction orders a queue; it never decides whether or how long a request is served, so a wrong one costs mean latency
and breaks no bound. Whatever a predictor says is brought into [1, max_outputs]. All state is bounded.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from math import expm1, isfinite, log1p, sqrt
from operator import mul
from typing import Protocol
from zlib import crc32

from maitred.core.errors import ConfigError
from maitred.policy.policy import Queued

TAIL_CHARS = 120  # of the text, template included: what is before the last turn tells little, and hides the rest
TAIL_TOKENS = 32  # of a prompt that came as tokens
NUM_BUCKETS = 64  # of hashed words

_WORD = re.compile(r"[a-z]+|[0-9]+")
# Words of one meaning share a slot, so that a few examples teach it.
_MEANINGS: tuple[frozenset[str], ...] = (
    frozenset({"write", "compose", "draft", "create", "generate"}),
    frozenset({"story", "essay", "article", "poem", "blog", "report", "letter", "tale", "song"}),
    frozenset({"explain", "describe", "discuss", "compare", "analyse", "analyze", "elaborate"}),
    frozenset({"list", "enumerate", "name", "give", "examples", "ideas", "ways", "steps"}),
    frozenset({"code", "function", "implement", "program", "script", "class", "debug"}),
    frozenset({"summarise", "summarize", "summary", "shorten", "tldr"}),
    frozenset({"translate", "rewrite", "paraphrase", "correct", "fix"}),
    frozenset({"classify", "label", "choose", "true", "false", "yes", "no", "which"}),
    frozenset({"short", "brief", "briefly", "concise", "concisely", "one", "single", "only", "just"}),
    frozenset({"long", "detailed", "detail", "details", "thorough", "comprehensive", "full", "every", "all"}),
    frozenset({"what", "who", "when", "where", "whose"}),
    frozenset({"why", "how"}),
    frozenset({"hello", "hi", "hey", "thanks", "thank", "bye", "goodbye", "ok", "okay"}),
    frozenset({"continue", "more", "another", "next", "further", "again"}),
)
_SLOT_OF = {word: slot for slot, words in enumerate(_MEANINGS) for word in words}
_UNITS = frozenset({"word", "words", "sentence", "sentences", "line", "lines", "items", "paragraph", "paragraphs"})
NUM_PLAIN = 3  # question mark, number asked for, length of the last part
NUM_FEATURES = NUM_PLAIN + len(_MEANINGS) + NUM_BUCKETS


def prompt_features(prompt: str | Sequence[int]) -> tuple[float, ...]:
    """NUM_FEATURES numbers, each from 0 to about 1. Never raises."""
    return _of_text(prompt[-TAIL_CHARS:]) if isinstance(prompt, str) else _of_tokens(prompt[-TAIL_TOKENS:])


def _of_text(tail: str) -> tuple[float, ...]:
    words = _WORD.findall(tail.lower())
    features = [0.0] * NUM_FEATURES
    features[0] = float("?" in tail)
    features[1] = _number_asked_for(words)
    features[2] = log1p(len(words)) / 5.0
    for word in words:
        slot = _SLOT_OF.get(word)
        if slot is not None:
            features[NUM_PLAIN + slot] = 1.0
        features[-1 - crc32(word.encode()) % NUM_BUCKETS] = 1.0
    return tuple(features)


def _of_tokens(tail: Sequence[int]) -> tuple[float, ...]:
    """Return the features of tokens: without text, each token is a word of which only the hash is known."""
    features = [0.0] * NUM_FEATURES
    features[2] = log1p(len(tail)) / 5.0
    for token in tail:
        features[-1 - (token * 2654435761 >> 8) % NUM_BUCKETS] = 1.0
    return tuple(features)


def _number_asked_for(words: Sequence[str]) -> float:
    """`in 50 words`: the logarithm of the last number that stands before a unit of text, 0 if there is none."""
    for number, unit in zip(reversed(words[:-1]), reversed(words[1:]), strict=True):
        if unit in _UNITS and number.isdecimal():
            return log1p(min(int(number[:6]), 100_000)) / 10.0
    return 0.0


class Foretold(Queued, Protocol):
    """A request as a predictor sees it; `num_outputs` is the truth once it has ended."""

    @property
    def features(self) -> Sequence[float]:
        """Features of the prompt's text, see `features.prompt_features`; empty where they were not made."""


TrueLength = Callable[[Foretold], float]
"""The number of tokens a request is going to generate; only a simulator knows."""


class Predictor(Protocol):
    """Predictor of output length; asked once for each request, so it may draw from what was learned so far."""

    def predict(self, request: Foretold) -> float:
        """Expected output tokens; any number, the caller bounds it."""

    def observe(self, request: Foretold) -> None:
        """The request ended by itself; its output is what the prediction should have been."""


class MaxTokens:
    """Predict max_tokens, as the client allows: right where it is the wanted length, blind where it is left out."""

    def predict(self, request: Foretold) -> float:
        return float(request.max_outputs)

    def observe(self, request: Foretold) -> None:
        """Learn nothing."""


class _History:
    """The last lengths, in order of size for the quantile and in order of time for forgetting."""

    __slots__ = ("_by_size", "_by_time")

    def __init__(self) -> None:
        self._by_time: deque[int] = deque()
        self._by_size: list[int] = []

    def __len__(self) -> int:
        return len(self._by_size)

    def add(self, length: int, capacity: int) -> None:
        if len(self._by_time) == capacity:
            del self._by_size[bisect_left(self._by_size, self._by_time.popleft())]
        self._by_time.append(length)
        insort(self._by_size, length)

    def quantile(self, share: float) -> float:
        return float(self._by_size[min(int(share * len(self._by_size)), len(self._by_size) - 1)])


class Quantile:
    """A quantile of the last outputs of the same tenant at the same prompt length (a bucket for each doubling).

    With fewer than `MIN_SEEN` of those it asks the tenant's whole history, then that of all tenants, then max_tokens.
    """

    CAPACITY = 64  # lengths in one history
    MAX_HISTORIES = 4096
    MIN_SEEN = 8

    def __init__(self, share: float = 0.5) -> None:
        self._share = share
        self._histories: OrderedDict[tuple[str, ...], _History] = OrderedDict()  # the least recently told first

    def predict(self, request: Foretold) -> float:
        for key in self._keys(request):
            history = self._histories.get(key)
            if history is not None and len(history) >= self.MIN_SEEN:
                return min(history.quantile(self._share), float(request.max_outputs))
        return float(request.max_outputs)

    def observe(self, request: Foretold) -> None:
        for key in self._keys(request):
            history = self._histories.get(key)
            if history is None:
                history = self._histories[key] = _History()
                if len(self._histories) > self.MAX_HISTORIES:
                    self._histories.popitem(last=False)
            self._histories.move_to_end(key)
            history.add(request.num_outputs, self.CAPACITY)

    def _keys(self, request: Foretold) -> tuple[tuple[str, ...], ...]:
        """The most telling first."""
        bucket = str(request.num_inputs.bit_length())
        return ((request.tenant, bucket), (request.tenant,), ())


class Ranker:
    """Learns online to put requests in order of their length: a linear model of log length on lexical features.

    AdaGrad (Duchi et al. 2011) on errors clipped as Huber's loss does, so that no single answer throws it off. That
    order is what matters, and that a cheap one is enough, is Fu et al., "Efficient LLM Scheduling by Learning to Rank"
    (arXiv:2408.15792). Until it has seen `MIN_SEEN` ends it says what `Quantile` says.
    """

    MIN_SEEN = 32
    RATE = 0.1
    CLIP = 1.5  # largest error in one lesson, in units of log length
    NUM_TENANTS = 32  # slots of hashed tenant names

    def __init__(self) -> None:
        self._size = 3 + self.NUM_TENANTS + NUM_FEATURES
        self._weights = [0.0] * self._size
        self._squares = [1e-2] * self._size  # of all gradients so far
        self._mean = 0.0  # of log length; the model explains the rest
        self._num_seen = 0
        self._fallback = Quantile()

    def predict(self, request: Foretold) -> float:
        if self._num_seen < self.MIN_SEEN:
            return self._fallback.predict(request)
        return expm1(min(self._mean + sum(map(mul, self._weights, self._inputs(request))), 30.0))

    def observe(self, request: Foretold) -> None:
        if self._num_seen < self.MIN_SEEN:
            self._fallback.observe(request)
        inputs, target = self._inputs(request), log1p(request.num_outputs)
        error = self._mean + sum(map(mul, self._weights, inputs)) - target
        # An answer cut at max_tokens might have been as long as predicted, so that is no news.
        if self._num_seen and error > 0 and request.num_outputs >= request.max_outputs:
            return
        self._num_seen += 1
        self._mean += (target - self._mean) / min(self._num_seen, 256)
        error = max(-self.CLIP, min(self.CLIP, error))
        weights, squares, rate = self._weights, self._squares, self.RATE
        for i, x in enumerate(inputs):
            if x:
                gradient = error * x
                squares[i] += gradient * gradient
                weights[i] -= rate * gradient / sqrt(squares[i])

    def _inputs(self, request: Foretold) -> list[float]:
        tenant = [0.0] * self.NUM_TENANTS
        tenant[crc32(request.tenant.encode("utf-8", "surrogatepass")) % self.NUM_TENANTS] = 1.0
        lengths = [1.0, log1p(request.num_inputs) / 8.0, log1p(request.max_outputs) / 8.0]
        features = request.features if len(request.features) == NUM_FEATURES else (0.0,) * NUM_FEATURES
        return [*lengths, *tenant, *features]


class Oracle:
    """Knows the truth: what the best predictor would be worth."""

    def __init__(self, true_length: TrueLength) -> None:
        self._true_length = true_length

    def predict(self, request: Foretold) -> float:
        return self._true_length(request)

    def observe(self, request: Foretold) -> None:
        """Learn nothing."""


class Adversarial:
    """Predict as wrongly as can be: short is called long, and now and then the result is no length. For tests."""

    NONSENSE = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e300)

    def __init__(self, true_length: TrueLength | None = None) -> None:
        self._true_length = true_length if true_length is not None else lambda request: float(request.max_outputs)

    def predict(self, request: Foretold) -> float:
        draw = crc32(request.request_id.encode("utf-8", "surrogatepass"))
        if draw % 8 == 0:
            return self.NONSENSE[draw // 8 % len(self.NONSENSE)]
        return 1.0 + request.max_outputs / (1.0 + max(0.0, self._true_length(request)))

    def observe(self, request: Foretold) -> None:
        """Incorrigible."""


def _oracle(true_length: TrueLength | None) -> Predictor:
    if true_length is None:
        raise ConfigError("scheduler.predictor is 'oracle', which knows the future; only a simulation has it")
    return Oracle(true_length)


PREDICTORS: dict[str, Callable[[TrueLength | None], Predictor]] = {
    "max_tokens": lambda _: MaxTokens(),
    "quantile": lambda _: Quantile(),
    "ranker": lambda _: Ranker(),
    "oracle": _oracle,
    "adversarial": Adversarial,
}


def predictor_named(name: str, true_length: TrueLength | None = None) -> Predictor:
    """A predictor that has learned nothing yet. Raises ConfigError, listing the choices."""
    try:
        make = PREDICTORS[name]
    except KeyError:
        raise ConfigError(f"scheduler.predictor is {name!r}; choose one of {', '.join(sorted(PREDICTORS))}") from None
    return make(true_length)


def bounded_prediction(predictor: Predictor, request: Foretold) -> float:
    """The prediction, in [1, max_outputs] whatever the predictor says."""
    predicted = predictor.predict(request)
    if not isfinite(predicted):
        return float(request.max_outputs)
    return max(1.0, min(predicted, float(request.max_outputs)))
