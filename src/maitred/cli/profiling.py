"""A server of its own under a load, whose decision log has every step: what a cost model is fitted to.

The steps are those of `maitred serve` in a process of its own, with its front end busy beside them, because the same
steps of an engine that is alone are quicker.
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
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from maitred.cli.console import note, seconds_text
from maitred.cli.endpoint import HttpEndpoint
from maitred.cli.flags import flags_of
from maitred.cli.load import WORD_VOCABULARY, LoadClient, LoadRun, PlannedRequest, Record, RequestForm
from maitred.cli.local import ENGINE_PARTS
from maitred.cli.simulate_inputs import profile_path
from maitred.config import EngineConfig
from maitred.core.errors import ConfigError, ServerError
from maitred.decisions.codec import read_log
from maitred.decisions.files import log_parts, read_frames
from maitred.decisions.log import Arrived, Step
from maitred.engine.planning import plan_engine
from maitred.model.checkpoint import open_checkpoint
from maitred.sim.fit import MIN_EDGE_SAMPLES, MeasuredStep, fit_edge, fit_steps, measured_steps, read_run
from maitred.sim.profile import EdgeSample, Profile, encode_profile
from maitred.sim.synthetic import arrival_times

WARM_UP_REQUESTS, WARM_UP_WORDS = 8, 16
MIX_ROWS = (1, 2, 4, 8, 16, 32, 48)  # requests in flight
OPEN_SHARE = 1 / 3  # of the time, for requests that come at OPEN_LOAD of what the last of these loops reached
OPEN_LOAD = 0.5
LEAST_REQUESTS, MOST_REQUESTS = 24, 300  # of that part; results keep tickets of no more than 400
MIN_STEPS = 200
STRETCH = 50  # steps; fitted and tested ones alternate in stretches, so that neighbours are not on both sides
TIMEOUT_S = 600.0  # of a request
STOP_S = 40.0  # its own time to drain, and some


def run_profile(config: EngineConfig, seconds: float, output: str | None) -> int:
    """Profile for about so many seconds; into the cache folder without `output`."""
    profile = measured_profile(config, seconds, note)
    path = Path(output) if output is not None else profile_path(profile.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_profile(profile))
    print(describe(profile))
    note(f"profile: {path}")
    return 0


def measured_profile(config: EngineConfig, seconds: float, tell: Callable[[str], None]) -> Profile:
    """Profile of a server with these flags, under requests for about so many seconds."""
    with ExitStack() as files:
        checkpoint = files.enter_context(open_checkpoint(config.model.model, config.model.revision))
        name, plan = checkpoint.name, plan_engine(config, checkpoint, tell, files)
    with served(config) as server:
        load = asyncio.run(_load(server.url, seconds, config.scheduler.max_num_seqs, tell))
    steps, samples = list(measured_steps(server.steps)), edge_samples(load, server.steps)
    if len(steps) < MIN_STEPS or len(samples) < MIN_EDGE_SAMPLES:
        raise ConfigError(
            f"{len(steps)} steps and {len(samples)} requests were measured; {MIN_STEPS} and {MIN_EDGE_SAMPLES} are "
            "needed, give more --seconds"
        )
    fit, (edge, edge_error) = fit_steps(*split(steps)), fit_edge(samples)
    executor, memory = plan.executor, plan.memory
    held = f"{executor.name} executor on {executor.device_name}, {executor.dtype_name} weights"
    return Profile(
        model=name,
        machine=f"{platform.system()} {platform.machine()}, {held}",
        executor=executor.name,
        max_model_len=memory.max_model_len,
        kv_bytes_per_token=memory.bytes_per_block // memory.block_size,
        kv_memory_bytes=memory.longest_context * memory.bytes_per_block // memory.block_size,
        state_bytes=memory.states.bytes_per_slot if memory.states is not None else 0,
        block_size=memory.block_size,
        token_budget=plan.scheduler.token_budget,
        edge=edge,
        edge_error=edge_error,
        num_edge_requests=len(samples),
        **{each.name: getattr(fit, each.name) for each in fields(fit)},
    )


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


class OpenLoad(NamedTuple):
    """Requests sent when they were due, whatever became of those before."""

    began_at: float  # from which their times count, by the machine's monotonic clock, which is the log's too
    records: list[Record]


async def _load(url: str, seconds: float, max_num_seqs: int, tell: Callable[[str], None]) -> OpenLoad:
    """Loops of ever more requests in flight, then an open one. Raises ServerError for a request that fails."""
    async with HttpEndpoint(url, timeout_s=TIMEOUT_S) as endpoint:
        model, context = await _model(endpoint)
        form = RequestForm(model=model, as_tokens=False)
        texts = (WORD_VOCABULARY.sentence(WARM_UP_WORDS, Random(number)) for number in range(WARM_UP_REQUESTS))
        run = LoadRun(LoadClient(endpoint, form), (PlannedRequest(0, 0.0, text, 4) for text in texts))
        await run.closed_loop(1)
        words_of_token = WARM_UP_WORDS / max(record.input_tokens for record in _answered(run))
        mixes = [rows for rows in MIX_ROWS if rows <= max_num_seqs]
        for rows in mixes:
            tell(f"profile {rows} requests in flight")
            client = LoadClient(endpoint, form)
            duration_s = seconds * (1 - OPEN_SHARE) / len(mixes)
            run = LoadRun(client, _requests(Random(rows), context, words_of_token), duration_s=duration_s)
            await run.closed_loop(rows)
            ended_s = [record.ended_s for record in _answered(run)]  # what is in flight at the end drains slowly
            in_time = sum(at_s <= duration_s for at_s in ended_s) / duration_s
            rate = OPEN_LOAD * max(in_time, len(ended_s) / client.now())
        tell(f"profile {rate:.3g} requests a second, half of what those were")
        client = LoadClient(endpoint, form)
        num_requests = min(MOST_REQUESTS, max(LEAST_REQUESTS, int(rate * seconds * OPEN_SHARE)))
        due = islice(arrival_times(rate, 1.0, Random(0)), num_requests)
        requests = _requests(Random(1), context, words_of_token)
        run = LoadRun(client, (replace(request, due_s=at) for at, request in zip(due, requests, strict=False)))
        await run.open_loop()
    return OpenLoad(client.began_at, sorted(_answered(run), key=lambda record: record.sent_s))


def _answered(run: LoadRun) -> list[Record]:
    for record in run.progress.records:
        if record.failure is not None:
            raise ServerError(f"maitred serve answered {record.failure.message}; ask it by hand")
    return run.progress.records


async def _model(endpoint: HttpEndpoint) -> tuple[str, int]:
    """(name, longest context in tokens)."""
    async with endpoint.get("/v1/models") as reply:
        (model,) = json.loads(await reply.read())["data"]
    return model["id"], model["max_model_len"]


def _requests(rng: Random, context: int, words_of_token: float) -> Iterator[PlannedRequest]:
    """Short and long prompts and answers without end; no prompt begins as another does."""
    for index in count():
        long = rng.random() < 0.15
        prompt = min(round(rng.lognormvariate(6.6 if long else 4.2, 0.6)) + 1, context * 2 // 3)
        output = min(round(rng.lognormvariate(3.4, 0.7)) + 1, max(1, context // 6))
        words = WORD_VOCABULARY.sentence(max(1, int(prompt * words_of_token)), rng)
        yield PlannedRequest(index, 0.0, words, output)


def edge_samples(load: OpenLoad, steps: Sequence[Step]) -> list[EdgeSample]:
    """Samples of the requests of a load, without what a simulation of it has too: the rest of the step that was under
    way when a request was sent, the engine's queue, and its steps.
    """
    steps = [step for step in steps if step.scheduled_at >= load.began_at]
    begun, ended = [step.scheduled_at for step in steps], [step.updated_at for step in steps]
    arrived = [event for step in steps for event in step.events if isinstance(event, Arrived)]
    tickets = {ticket.request_id: ticket for ticket in read_run(steps).results.tickets.kept}
    samples = []
    for record, event in zip(load.records, sorted(arrived, key=lambda event: event.spec.arrived_at), strict=False):
        ticket, sent_at = tickets[event.spec.request_id], load.began_at + record.sent_s
        if event.spec.num_prompt_tokens != record.input_tokens or record.ttft_s is None or record.e2e_s is None:
            continue  # two that came at once have changed places
        step = bisect_right(begun, sent_at) - 1
        waited_s = ticket.scheduled_at - event.now + (max(0.0, ended[step] - sent_at) if step >= 0 else 0.0)
        first_s = ticket.first_token_at - ticket.scheduled_at
        gaps_s = record.e2e_s - record.ttft_s - (ticket.finished_at - ticket.first_token_at)
        samples.append(
            EdgeSample(record.input_tokens, record.ttft_s - first_s - waited_s, record.output_tokens - 1, gaps_s)
        )
    return samples


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
