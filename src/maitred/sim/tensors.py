"""Simulated tensor models: the scheduler's own lanes, and batches that take as long as a profile says.

The thread of the lanes does one thing after another, and each takes time; batches run beside each other, and beside a
step of the language model, each as much slower as the profile says of so many.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import ceil
from random import Random

from maitred.core.errors import MaitredError, ModelNotFound, Overloaded
from maitred.core.request import FinishReason, Terms
from maitred.core.step import RequestProgress
from maitred.core.tensor_request import Batch, BatchOutcome, BatchRules, LaneKey, TensorRequest, TensorSpec
from maitred.scheduler.scheduler import Scheduler
from maitred.sim.profile import drawn
from maitred.sim.results import Sketch
from maitred.sim.tensor_profile import HostTimes, ModelTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorArrival:
    """One request for a tensor model."""

    at: float  # s since the workload began
    request_id: str
    model: str
    version: int = 0  # 0 is the highest
    num_rows: int = 1
    length: int = 0  # of the open dimensions of its inputs
    tenant: str = ""
    priority: int = 0
    weight: float = 1.0
    deadline_s: float | None = None  # given up if it is not done by then, after arrival


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A request that an ensemble makes of a model, or of another ensemble."""

    model: str
    version: int  # 0 is the highest
    needs: tuple[int, ...] = ()  # steps that give its inputs


@dataclass(frozen=True, slots=True)
class SimulatedEnsemble:
    """An ensemble's steps, without circles."""

    name: str
    steps: tuple[SimulatedStep, ...]


@dataclass(slots=True)
class Whole:
    """A request for an ensemble, from its first step to its last."""

    arrival: TensorArrival
    ensemble: SimulatedEnsemble
    begun: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    failed: bool = False

    def ready(self) -> Iterator[TensorArrival]:
        """Steps that may go now, each once: with arrival, priority and deadline of the whole."""
        for number, step in enumerate(self.ensemble.steps):
            if number not in self.begun and self.done.issuperset(step.needs):
                self.begun.add(number)
                request_id = f"{self.arrival.request_id}/{number}"
                yield replace(self.arrival, request_id=request_id, model=step.model, version=step.version)

    def answered(self, request_id: str) -> None:
        self.done.add(int(request_id.rpartition("/")[2]))

    @property
    def running(self) -> list[str]:
        return [f"{self.arrival.request_id}/{number}" for number in sorted(self.begun - self.done)]

    @property
    def is_done(self) -> bool:
        return len(self.done) == len(self.ensemble.steps)


TOKENS_PER_S = 2000.0  # as the engine has it until it has measured prompts
_STEP = -1  # in place of a batch's number


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """A version that is served."""

    name: str
    version: int
    rules: BatchRules
    times: ModelTimes
    buckets: tuple[int, ...] = ()  # of length, ascending

    def bucket(self, length: int) -> str:
        """Return the bucket of its lane; equal exactly where the served one is."""
        size = next((size for size in self.buckets if length <= size), None)
        return str(length) if size is None else f"<={size}"


@dataclass(slots=True)
class ModelFigures:
    """Figures of a model's requests."""

    latency_s: Sketch = field(default_factory=Sketch)
    failures: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0  # of batches
    num_batches: int = 0
    began_at: float | None = None  # s, the first arrival
    ended_at: float = 0.0

    def to_json(self) -> dict[str, object]:
        span_s = self.ended_at - (self.began_at or 0.0)
        return {
            "latency_s": self.latency_s.to_json(),
            "mean_batch": self.num_rows / self.num_batches if self.num_batches else None,
            "throughput_rps": self.latency_s.count / span_s if span_s > 0 else None,
            "num_finished": self.latency_s.count,
            "failed": dict(self.failures),
        }


@dataclass(slots=True)
class _Run:
    number: int
    times: Callable[[int], float]  # with so many at once, this many times as long
    left_s: float  # of its time alone
    share: float  # of the machine


class SimulatedMachine:
    """Batches under way. Each goes on at the speed of so many at once; nothing is decided here."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._at = 0.0
        self.ended: deque[tuple[float, int]] = deque()  # batches: when, and which; until taken in
        self.step_ended_at: float | None = None

    def begin(self, number: int, times: Callable[[int], float], seconds: float, share: float, now: float) -> None:
        self.advance(now)
        self._runs.append(_Run(number, times, seconds, share))

    def begin_step(self, seconds: float, now: float) -> None:
        """Begin a step of the language model, which shares the cores evenly with batches beside it."""
        self.step_ended_at = None
        self.begin(_STEP, lambda _: sum(run.share for run in self._runs), seconds, 1.0, now)

    @property
    def next_end(self) -> float | None:
        if self.ended:
            return self.ended[0][0]
        return self._at + min(self._remaining()) if self._runs else None

    def advance(self, now: float) -> None:
        """End everything that ends until then."""
        while self._runs:
            remaining = self._remaining()
            soonest = min(remaining)
            if self._at + soonest > now:
                break
            first = remaining.index(soonest)
            self._pass(soonest)
            self._at += soonest
            number = self._runs.pop(first).number
            if number == _STEP:
                self.step_ended_at = self._at
            else:
                self.ended.append((self._at, number))
        if now > self._at:
            self._pass(now - self._at)
            self._at = now

    def _remaining(self) -> list[float]:
        """Seconds, if nothing else begins or ends."""
        at_once = len(self._runs)
        return [run.left_s * max(1.0, run.times(at_once)) for run in self._runs]

    def _pass(self, seconds: float) -> None:
        at_once = len(self._runs)
        for run in self._runs:
            run.left_s = max(0.0, run.left_s - seconds / max(1.0, run.times(at_once)))


@dataclass(slots=True)
class _Running:
    batch: Batch
    begun_at: float


Follow = Callable[[TensorArrival, float], TensorArrival | None]
"""Next request of a client, given when its answer came."""


class TensorSimulation:
    """`models` on the lanes of `scheduler`, from the first arrival to the last answer; without `rng` each batch takes
    the median. Times are seconds since the workload began.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        models: Sequence[SimulatedModel],
        host: HostTimes,
        rng: Random | None = None,
        follow: Follow = lambda arrival, now: None,
        ensembles: Sequence[SimulatedEnsemble] = (),
    ) -> None:
        self._scheduler, self._host, self._follow = scheduler, host, follow
        self._draw = None if rng is None else rng.random
        self._models = {(model.name, model.version): model for model in models}
        self._highest: Mapping[str, int] = {model.name: model.version for model in sorted(models, key=_by_version)}
        for model in models:
            scheduler.lanes.load(model.name, model.version, model.rules)
        self._ensembles = {each.name: each for each in ensembles}
        self._whole_of: dict[str, Whole] = {}  # by request id of a step
        self.figures = {name: ModelFigures() for name in sorted({*self._highest, *self._ensembles})}
        self._machine = SimulatedMachine()
        self._arrivals: list[tuple[float, int, TensorArrival]] = []
        self._num_arrivals = 0
        self._source: Iterator[TensorArrival] = iter(())
        self._live: dict[str, TensorArrival] = {}
        self._running: dict[int, _Running] = {}
        self._free_at = 0.0  # when the thread of the lanes has done all so far
        self._wake_at: float | None = None

    def begin(self, source: Iterator[TensorArrival]) -> None:
        """`source` is in order of `at`, and read as time goes on."""
        self._source = source
        self._expect_next()

    def run(self) -> dict[str, ModelFigures]:
        """Run until the last answer, where there is no language model."""
        while (next_at := self.next_at) is not None:
            self.run_until(next_at)
        return self.figures

    @property
    def next_at(self) -> float | None:
        """Return when something happens next (s)."""
        arrives_at = self._arrivals[0][0] if self._arrivals else None
        found = [at for at in (arrives_at, self._machine.next_end, self._wake_at) if at is not None]
        return min(found) if found else None

    def run_until(self, now: float) -> None:
        """Takes in everything that happens until then, in its order."""
        while (at := self.next_at) is not None and at <= now:
            self._machine.advance(at)
            if self._machine.ended and self._machine.ended[0][0] <= at:
                self._take_in(*self._machine.ended.popleft())
            elif self._arrivals and self._arrivals[0][0] <= at:
                self._add(heappop(self._arrivals)[2])
            else:
                self._turn(max(at, self._free_at))

    def step(self, now: float, seconds: float) -> float:
        """A step of the language model of so many seconds alone: how many it takes beside what runs meanwhile."""
        self.run_until(now)
        self._machine.begin_step(seconds, now)
        while self._machine.step_ended_at is None:
            at = self.next_at
            assert at is not None, "a step ends"
            self.run_until(at)
        return self._machine.step_ended_at - now

    # -- what happens

    def _expect_next(self) -> None:
        arrival = next(self._source, None)
        if arrival is not None:
            self._expect(arrival)

    def _expect(self, arrival: TensorArrival) -> None:
        self._num_arrivals += 1
        heappush(self._arrivals, (arrival.at, self._num_arrivals, arrival))

    def _add(self, arrival: TensorArrival) -> None:
        now = max(arrival.at, self._free_at) + self._host.request_s / 2
        self._expect_next()
        figures = self.figures.get(arrival.model)
        if figures is None:
            raise ModelNotFound(f"a request is for model {arrival.model!r}; served are {', '.join(self.figures)}")
        if figures.began_at is None:
            figures.began_at = arrival.at
        self._stand(arrival, now)
        self._turn(now)

    def _stand(self, arrival: TensorArrival, now: float) -> None:
        """Put the request into its lane, or into those of an ensemble's first steps."""
        ensemble = self._ensembles.get(arrival.model)
        if ensemble is not None:
            self._go_on(Whole(arrival, ensemble), now)
            return
        spec = self._spec(arrival)
        try:
            self._scheduler.add_tensor(TensorRequest(spec), now)
            self._live[arrival.request_id] = arrival
        except MaitredError as error:
            failure = error.reason if isinstance(error, Overloaded) else type(error).__name__
            if arrival.request_id in self._whole_of:
                self._end(arrival, failure, now)
            else:  # its client does not ask again, since nothing would be over meanwhile
                self.figures[arrival.model].failures[failure] += 1

    def _go_on(self, whole: Whole, now: float) -> None:
        for step in whole.ready():
            self._whole_of[step.request_id] = whole
            self._stand(step, now)
            if whole.failed:
                return

    def _end(self, arrival: TensorArrival, failure: str, now: float) -> None:
        """A request was answered, or failed, which ends the ensemble that it is a step of."""
        whole = self._whole_of.pop(arrival.request_id, None)
        if whole is None:
            self._count(arrival, failure, now)
        elif not whole.failed:
            whole.answered(arrival.request_id)
            if failure:
                whole.failed = True
                self._give_up(whole, now)
            if failure or whole.is_done:
                self._end(whole.arrival, failure, now)
            else:
                self._go_on(whole, now)

    def _give_up(self, whole: Whole, now: float) -> None:
        """Give up waiting steps; one with a running batch ends with it."""
        for request_id in whole.running:
            if self._scheduler.finish(request_id, FinishReason.ABORT, now) is not None:
                del self._live[request_id], self._whole_of[request_id]

    def _count(self, arrival: TensorArrival, failure: str, now: float) -> None:
        figures = self.figures[arrival.model]
        if failure:
            figures.failures[failure] += 1
        else:
            figures.latency_s.add(now - arrival.at)
        figures.ended_at = now
        if (follower := self._follow(arrival, now)) is not None:
            self._expect(follower)

    def _spec(self, arrival: TensorArrival) -> TensorSpec:
        version = arrival.version or self._highest[arrival.model]
        model = self._models.get((arrival.model, version))
        if model is None:
            raise ModelNotFound(f"a request is for version {version} of {arrival.model!r}, which is not served")
        seconds = model.times.seconds(arrival.num_rows, arrival.length)
        return TensorSpec(
            request_id=arrival.request_id,
            arrived_at=arrival.at,
            lane=LaneKey(arrival.model, version, model.bucket(arrival.length)),
            num_rows=arrival.num_rows,
            work=seconds * TOKENS_PER_S,
            terms=Terms(
                tenant=arrival.tenant,
                weight=arrival.weight,
                priority=arrival.priority,
                finish_by=None if arrival.deadline_s is None else arrival.at + arrival.deadline_s,
            ),
        )

    def _take_in(self, at: float, number: int) -> None:
        running = self._running.pop(number)
        now = max(at, self._free_at) + self._host.batch_s / 2
        outcome = BatchOutcome(compute_us=round((at - running.begun_at) * 1e6))
        self._free_at = self._tell(self._scheduler.completed(running.batch, outcome, now), now)
        self._turn(self._free_at)

    def _turn(self, now: float) -> None:
        """End requests out of time, begin batches that may go, and note when to look again."""
        now = self._tell(self._scheduler.expire_tensors(now), now)
        for batch in self._scheduler.dispatch(now):
            now += self._host.batch_s / 2
            self._start(batch, now)
        self._free_at = now
        wake_at, tick = self._scheduler.next_wake(now), self._host.timer_s
        rounds = wake_at is not None and tick > 0.0
        self._wake_at = now + ceil((wake_at - now) / tick) * tick if rounds and wake_at is not None else wake_at

    def _start(self, batch: Batch, now: float) -> None:
        model, figures = self._models[batch.lane.model, batch.lane.version], self.figures[batch.lane.model]
        longest = max(self._live[request_id].length for request_id in batch.request_ids)
        seconds = model.times.seconds(batch.num_rows, longest)
        if self._draw is not None:
            seconds *= drawn(model.times.spread, self._draw())
        seconds += self._host.wake_s
        self._machine.begin(batch.number, model.times.times_as_long, seconds, model.rules.machine_share, now)
        self._running[batch.number] = _Running(batch, now)
        figures.num_rows += batch.num_rows
        figures.num_batches += 1

    def _tell(self, progress: Sequence[RequestProgress], now: float) -> float:
        """Tell one answer after another; return when the last has been told."""
        for told in progress:
            now += self._host.request_s / 2
            assert told.finish_reason is not None
            failure = "" if told.finish_reason is FinishReason.STOP else told.finish_reason.value
            self._end(self._live.pop(told.request_id), failure, now)
        return now


def _by_version(model: SimulatedModel) -> int:
    return model.version
