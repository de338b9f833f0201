"""`maitred serve` on loopback: what its clients see, beside what its decision log says of the engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from maitred.cli.bench.client import LoadClient, RequestForm
from maitred.cli.bench.prompts import WORD_VOCABULARY, PlannedRequest
from maitred.cli.bench.record import Record
from maitred.cli.bench.runner import LoadRun
from maitred.cli.endpoint import HttpEndpoint
from maitred.cli.flags import flags_of
from maitred.cli.local import ENGINE_PARTS
from maitred.config import EngineConfig
from maitred.core.errors import ServerError
from maitred.decisions.codec import read_log
from maitred.decisions.files import log_parts, read_frames
from maitred.decisions.log import Step
from maitred.sim.edge import EdgeSample
from maitred.sim.recorded import read_run

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
