"""The live engine on a load whose every step is recorded: what a cost model is fitted to, and held against.

Model, sampler, scheduler and decision log are the served ones; text and HTTP are not there. Time is the machine's, or,
where other processes take the cores away, the engine thread's CPU time: then waiting for a request costs none.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import count, islice, repeat
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

import msgspec

from maitred.cli.console import note, seconds_text
from maitred.cli.endpoint import HttpEndpoint
from maitred.cli.flags import flags_of
from maitred.cli.load import WORD_VOCABULARY, LoadClient, LoadRun, PlannedRequest, Record, RequestForm
from maitred.cli.local import ENGINE_PARTS
from maitred.cli.simulate_inputs import profile_path
from maitred.config import EngineConfig
from maitred.core.clock import Clock
from maitred.core.errors import ConfigError, ServerError
from maitred.core.request import RequestSpec, SamplingParams
from maitred.decisions.codec import read_log
from maitred.decisions.files import log_parts, read_frames
from maitred.decisions.log import Step
from maitred.engine.build import EngineParts, build_parts
from maitred.kv.prefix_cache import TokenHasher
from maitred.sim.fit import MIN_EDGE_SAMPLES, Fit, MeasuredStep, fit_edge, fit_steps, measured_steps, read_run
from maitred.sim.profile import EdgeSample, Profile, encode_profile
from maitred.sim.workload import Arrival

WARM_UP = "warm-up"
Aside = Callable[[float], bool]
"""Told the clock's time between two steps; True if it took time for itself."""


class LiveClock(Clock, Protocol):
    def wait_until(self, at: float) -> None: ...

    def take_back(self, seconds: float) -> None:
        """Stop counting this time: it went into something that is not the engine's."""


class SleepingClock:
    """The machine's monotonic time."""

    def __init__(self) -> None:
        self._not_counted_s = 0.0

    def now(self) -> float:
        return time.monotonic() - self._not_counted_s

    def wait_until(self, at: float) -> None:
        time.sleep(max(0.0, at - self.now()))

    def take_back(self, seconds: float) -> None:
        self._not_counted_s += seconds


class CpuClock:
    """CPU time of the calling thread, and leaps where it would have waited. For an executor on that thread alone."""

    def __init__(self) -> None:
        self._leapt_s = 0.0

    def now(self) -> float:
        return time.thread_time() + self._leapt_s

    def wait_until(self, at: float) -> None:
        self._leapt_s += max(0.0, at - self.now())

    def take_back(self, seconds: float) -> None:
        self._leapt_s -= seconds


CLOCKS: dict[str, Callable[[], LiveClock]] = {"wall": SleepingClock, "cpu": CpuClock}


class LiveEngine:
    """An engine that is asked for tokens without text, and writes its decision log into a folder of its own."""

    def __init__(self, parts: EngineParts, clock: LiveClock, log: Path) -> None:
        self.parts, self.clock, self._log = parts, clock, log
        self._hasher = TokenHasher(parts.model.block_size, parts.model.revision)
        self._num_requests = self.num_steps = 0

    def request(self, arrival: Arrival) -> RequestSpec:
        """A request as the arrival says, of random tokens that no other prompt begins with.

        It asks for just the tokens it is to get, so that a prediction from max_tokens is the oracle's.
        """
        self._num_requests += 1
        rng, vocabulary = Random(self._num_requests), self.parts.model.vocab_size
        tokens = rng.choices(range(vocabulary // 4, vocabulary), k=arrival.prompt_tokens)
        return RequestSpec(
            request_id=f"{arrival.request_id}/{self._num_requests}",
            prompt_token_ids=tokens,
            sampling=SamplingParams(temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True),
            arrived_at=arrival.at,
            num_prompt_tokens=arrival.prompt_tokens,
            max_tokens=arrival.output_tokens,
            terms=arrival.terms,
            block_hashes=self._hasher.hash_prompt(tokens),
        )

    def serve(self, arrivals: Iterable[Arrival], aside: Aside | None = None) -> None:
        """An open loop: each request comes when it is due, whatever the engine does. Returns when all have ended.

        `aside` is called before each step; its time is taken back from the clock.
        """
        core, clock, source = self.parts.core, self.clock, iter(arrivals)
        began = clock.now()
        due = next(source, None)
        while due is not None or core.has_work:
            if due is not None and not core.has_work:
                clock.wait_until(began + due.at)
            while due is not None and began + due.at <= clock.now():
                core.add(self.request(replace(due, at=began + due.at)))
                due = next(source, None)
            if aside is not None:
                _step_aside(aside, clock)
            if core.has_work:
                core.step()
                self.num_steps += 1

    def serve_closed(
        self, arrivals: Iterator[Arrival], in_flight: int, until: float, aside: Aside | None = None
    ) -> None:
        """Keep `in_flight` requests running until the clock says `until`; those begun are finished."""
        core, clock, num_here = self.parts.core, self.clock, 0
        while core.has_work or clock.now() < until:
            while num_here < in_flight and clock.now() < until:
                core.add(self.request(replace(next(arrivals), at=clock.now())))
                num_here += 1
            if aside is not None:
                _step_aside(aside, clock)
            num_here -= sum(progress.finish_reason is not None for progress in core.step())
            self.num_steps += 1

    def close(self) -> list[Step]:
        """Everything that was recorded."""
        self.parts.close()
        _, steps = read_log(read_frames(log_parts(self._log)))
        return list(steps)


def _step_aside(aside: Aside, clock: LiveClock) -> None:
    began = clock.now()
    if aside(began):
        clock.take_back(clock.now() - began)


@contextmanager
def live_engine(config: EngineConfig, clock: LiveClock, on_event: Callable[[str], None]) -> Iterator[LiveEngine]:
    """Call `close` inside for its record; the folder goes with the context."""
    with tempfile.TemporaryDirectory(prefix="maitred-live-") as folder:
        parts = build_parts(replace(config, decision_log=folder), clock=clock, on_event=on_event)
        yield LiveEngine(parts, clock, Path(folder))


def record(
    config: EngineConfig, clock: LiveClock, arrivals: Iterable[Arrival], aside: Aside | None = None
) -> list[Step]:
    """One open-loop run on an engine of its own; `aside` as in `LiveEngine.serve`."""
    with live_engine(config, clock, lambda line: None) as live:
        live.serve([Arrival(at=0.0, request_id=WARM_UP, prompt_tokens=64, output_tokens=8, max_tokens=8)])
        live.serve(arrivals, aside)
        steps = live.close()
    return [step for step in steps if not any(row.request_id.startswith(WARM_UP) for row in step.plan.rows)]


WARM_UP_REQUESTS = 8
LEAST_REQUESTS, MOST_REQUESTS = 24, 300  # that are alone; results keep tickets of no more than 400
LONE_SHARE = 0.7  # of the time
PROMPT_WORDS = (4, 32, 128, 400)
TOKENS_OF_WORD = 4  # at most, whatever the tokenizer
TOKENS_ALONE, TOKENS_TOGETHER = (1, 9), (64,)
IN_FLIGHT = 8  # where the time between steps is measured
TIMEOUT_S = 600.0  # of a request
STOP_S = 40.0  # its own time to drain, and some


@dataclass(slots=True)
class Served:
    """A running server; `steps` is there when it has ended."""

    url: str
    steps: list[Step] = field(default_factory=list)


@contextmanager
def served(config: EngineConfig) -> Iterator[Served]:
    """`maitred serve` in a process of its own, on a port that the system chose. Raises ServerError."""
    with tempfile.TemporaryDirectory(prefix="maitred-served-") as folder:
        path, log = Path(folder, "serve.yaml"), Path(folder, "log")
        path.write_text(json.dumps(_flags(replace(config, decision_log=str(log)))), encoding="utf-8")
        environ = {name: value for name, value in os.environ.items() if name != "MAITRED_API_KEY"}
        words = ("serve", "--config", str(path), "--host", "127.0.0.1", "--port", "0", "--log-level", "info")
        command = [sys.executable, "-P", "-m", "maitred", *words]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
            try:
                server = Served(_url(process))
                yield server
            finally:
                _stop(process)
        server.steps += read_log(read_frames(log_parts(log)))[1]


def _flags(config: EngineConfig) -> dict[str, object]:
    """The keys of a config file for all that is not as it would be without."""
    parts = zip(
        ENGINE_PARTS,
        (config.model, config.cache, config.scheduler, config.speculative, config.lora, config.tiers, config),
        strict=True,
    )
    return {
        flag.key: dict(value) if isinstance(value, Mapping) else value
        for kind, part in parts
        for flag in flags_of(kind)
        if (value := getattr(part, flag.field)) != flag.default
    }


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said: deque[str] = deque(maxlen=3)
    for line in process.stderr:
        if found := re.search(r"maitred serves .* on (http://[\d.]+:\d+)", line):
            threading.Thread(target=process.stderr.read, name="maitred-served-stderr", daemon=True).start()
            return found[1]
        said.append(line.strip())
    raise ServerError(f"maitred serve did not start: {' '.join(said) or 'it said nothing'}; start it by hand")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


class ServedLoad(NamedTuple):
    """Measurements of a served model."""

    edge: list[EdgeSample]
    steps: list[Step]  # those of several requests at once among them


def measure_served(config: EngineConfig, seconds: float) -> ServedLoad:
    """Most of the time one request after another, of several lengths; then several at once."""
    with served(config) as server:
        lone = asyncio.run(_load(server.url, seconds))
    return ServedLoad(edge_samples(lone, server.steps), server.steps)


async def _load(url: str, seconds: float) -> list[Record]:
    """Gives those that were alone, which come first of all."""
    async with HttpEndpoint(url, timeout_s=TIMEOUT_S) as endpoint:
        model, context = await _model(endpoint)
        form = RequestForm(model=model, as_tokens=False)
        requests = _requests(context, TOKENS_ALONE)
        lone: list[Record] = []
        client = LoadClient(endpoint, form)
        while len(lone) < MOST_REQUESTS and (client.now() < seconds * LONE_SHARE or len(lone) < LEAST_REQUESTS):
            request = next(requests)
            record = await client.send(request, form.encode(request))
            if record.failure is not None:
                raise ServerError(f"maitred serve answered {record.failure.message}; ask it by hand")
            lone.append(record)
        client, requests = LoadClient(endpoint, form), _requests(context, TOKENS_TOGETHER)
        await LoadRun(client, requests, duration_s=seconds * (1 - LONE_SHARE)).closed_loop(IN_FLIGHT)
    return lone


async def _model(endpoint: HttpEndpoint) -> tuple[str, int]:
    """(name, longest context in tokens)."""
    async with endpoint.get("/v1/models") as reply:
        (model,) = json.loads(await reply.read())["data"]
    return model["id"], model["max_model_len"]


def _requests(context: int, asked: Sequence[int]) -> Iterator[PlannedRequest]:
    """Prompts not asked before, of every length that certainly fits."""
    lengths = [words for words in PROMPT_WORDS if words * TOKENS_OF_WORD + max(asked) <= context]
    each = [(words, tokens) for words in lengths or [1] for tokens in asked]
    rng = Random(max(asked))
    for index in count():
        words, tokens = rng.choice(each)
        yield PlannedRequest(index, 0.0, WORD_VOCABULARY.sentence(words, rng), min(tokens, context // 2))


def edge_samples(lone: list[Record], steps: list[Step]) -> list[EdgeSample]:
    """Samples of requests sent one after another, and of a log that begins with them; without the first few.

    In an idle engine no request waits, so what passes before the first step is the way to it.
    """
    run = read_run(steps)
    assert all(a.prompt_tokens == record.input_tokens for a, record in zip(run.arrivals, lone, strict=False))
    pairs = islice(zip(lone, run.results.tickets.kept, strict=False), WARM_UP_REQUESTS, None)
    return [
        EdgeSample(
            prompt_tokens=record.input_tokens,
            first_token_s=record.ttft_s - (ticket.first_token_at - ticket.scheduled_at),
            num_gaps=record.output_tokens - 1,
            gaps_s=record.e2e_s - record.ttft_s - (ticket.finished_at - ticket.first_token_at),
        )
        for record, ticket in pairs
        if record.ttft_s is not None and record.e2e_s is not None
    ]


MIN_STEPS = 200
SERVED_SHARE = 0.25  # of the time
WAVE_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
WAVE_CONTEXTS = (32, 128, 512, 1024)
WAVE_STEPS = 10
MAX_WAVE_TOKENS = 8192
MIX_ROWS = (2, 6, 12, 24, 48)
STRETCH = 50  # steps; fitted and tested ones alternate in stretches, so that neighbours are not on both sides


def run_profile(config: EngineConfig, seconds: float, clock: str, output: str | None) -> int:
    """Profile for so many seconds by the clock of that name; into the cache folder without `output`."""
    profile = measured_profile(config, seconds, clock, note)
    path = Path(output) if output is not None else profile_path(profile.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_profile(profile))
    print(describe(profile))
    note(f"profile: {path}")
    return 0


def measured_profile(config: EngineConfig, seconds: float, clock: str, tell: Callable[[str], None]) -> Profile:
    """A quarter of the time behind a server, first, because afterwards its memory is free; the rest without one."""
    tell("profile requests over HTTP, the engine in a process of its own")
    load = measure_served(config, seconds * SERVED_SHARE)
    if len(load.edge) < MIN_EDGE_SAMPLES:
        raise ConfigError(f"{len(load.edge)} requests over HTTP; {MIN_EDGE_SAMPLES} are needed, give more --seconds")
    with live_engine(config, CLOCKS[clock](), tell) as live:
        profile_load(live, config.scheduler.max_num_seqs, seconds * (1 - SERVED_SHARE), tell)
        steps = list(measured_steps(live.close()))
    fitted, held_out = split(steps)
    served_gaps = list(measured_steps(load.steps)) if clock == "wall" else None
    profile = _profile(fit_steps(fitted, held_out, served_gaps), live.parts, config, clock)
    edge, edge_error = fit_edge(load.edge)
    return msgspec.structs.replace(profile, edge=edge, edge_error=edge_error, num_edge_requests=len(load.edge))


def _profile(fit: Fit, parts: EngineParts, config: EngineConfig, clock: str) -> Profile:
    plan = parts.memory_plan
    return Profile(
        model=parts.model.names[0],
        machine=f"{platform.system()} {platform.machine()}, {_held(parts)}, {clock} time",
        executor=parts.model.footprint.executor if parts.model.footprint is not None else config.model.executor,
        max_model_len=plan.max_model_len,
        kv_bytes_per_token=plan.bytes_per_block // plan.block_size,
        kv_memory_bytes=plan.longest_context * plan.bytes_per_block // plan.block_size,
        state_bytes=plan.states.bytes_per_slot if plan.states is not None else 0,
        block_size=plan.block_size,
        token_budget=parts.core.scheduler.config.token_budget,
        **{each.name: getattr(fit, each.name) for each in fields(fit)},
    )


def _held(parts: EngineParts) -> str:
    held = parts.model.footprint
    return "an unknown executor" if held is None else f"{held.executor} executor on {held.device}, {held.dtype} weights"


def profile_load(live: LiveEngine, max_num_seqs: int, seconds: float, tell: Callable[[str], None]) -> None:
    """Keeps the engine busy for about so many seconds and MIN_STEPS: half of them waves, the rest mixes."""
    clock, context = live.clock, live.parts.model.max_model_len
    for _ in range(4):  # warm up
        live.serve([_arrival(16, 8)])
    began = clock.now()
    tell("profile waves of equal requests")
    for rows, prompt in _waves(max_num_seqs, context):
        if clock.now() - began > seconds / 2:
            break
        live.serve(repeat(_arrival(prompt, WAVE_STEPS), rows))
    mixes = [rows for rows in MIX_ROWS if rows <= max_num_seqs] or [max_num_seqs]
    for number, rows in enumerate(mixes):
        tell(f"profile mixed prompts and answers, {rows} at a time")
        now = clock.now()
        live.serve_closed(_mixed(Random(rows), context), rows, now + (began + seconds - now) / (len(mixes) - number))
    while live.num_steps < MIN_STEPS:
        live.serve_closed(_mixed(Random(live.num_steps), context), mixes[-1], clock.now() + seconds / 10)


def _arrival(prompt: int, output: int) -> Arrival:
    return Arrival(at=0.0, request_id="profile", prompt_tokens=prompt, output_tokens=output, max_tokens=output)


def _waves(max_num_seqs: int, context: int) -> list[tuple[int, int]]:
    """(rows, prompt tokens), in an order in which any beginning covers both."""
    waves = [
        (rows, prompt)
        for rows in WAVE_ROWS
        for prompt in WAVE_CONTEXTS
        if rows <= max_num_seqs and prompt + WAVE_STEPS <= context and rows * prompt <= MAX_WAVE_TOKENS
    ]
    Random(1).shuffle(waves)
    return waves


def _mixed(rng: Random, context: int) -> Iterator[Arrival]:
    """Short and long prompts and answers."""
    while True:
        long = rng.random() < 0.15
        prompt = min(round(rng.lognormvariate(6.6 if long else 4.2, 0.6)) + 1, context * 3 // 4)
        yield _arrival(prompt, min(round(rng.lognormvariate(3.4, 0.7)) + 1, context - prompt))


def split(steps: Sequence[MeasuredStep]) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    """(to fit, to test): every fourth stretch of the recording is held out."""
    fitted: list[MeasuredStep] = []
    held_out: list[MeasuredStep] = []
    for i, step in enumerate(steps):
        (held_out if i // STRETCH % 4 == 3 else fitted).append(step)
    return fitted, held_out


def describe(profile: Profile) -> str:
    """A line for each term, then the whole."""
    lines = [f"{'term':20} {'each':>9} {'std error':>10} {'of the time':>12} {'error where largest':>20}"]
    for name, term in profile.terms.items():
        error = "-" if term.held_out_error is None else f"{term.held_out_error:.1%}"
        lines.append(
            f"{name.removesuffix('_s'):20} {_each(term.seconds):>9} {_each(term.standard_error_s):>10} "
            f"{term.share:>12.1%} {error:>20}"
        )
    edge = profile.edge
    lines.append(
        f"over HTTP a first token takes {_each(edge.fixed_s)} more, and {_each(edge.prompt_token_s)} for each token of "
        f"the prompt; each further one {_each(edge.output_token_s)} (fitted on half of {profile.num_edge_requests} "
        f"requests, {profile.edge_error:.1%} off on the others)"
    )
    lines.append(
        f"fitted on {profile.num_steps} steps; on {profile.num_held_out_steps} others the error of a step is "
        f"{profile.mape:.1%} on average, {profile.p90_error:.1%} at p90, of their sum {profile.bias:+.1%}"
    )
    return "\n".join(lines)


def _each(seconds: float) -> str:
    if 0 < seconds < 1e-6:
        return f"{seconds * 1e9:.1f}ns"
    return f"{seconds * 1e6:.2f}us" if seconds < 1e-3 else seconds_text(seconds)
