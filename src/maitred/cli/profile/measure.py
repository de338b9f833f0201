"""Records, fits, tests and writes one device profile.

The load is made to be measured: waves of equal requests that cover rows and contexts, and mixes as they are served.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from random import Random

import msgspec

from maitred.cli.console import note
from maitred.cli.profile.live import CLOCKS, LiveEngine, live_engine
from maitred.cli.profile.served import measure_served
from maitred.cli.simulate.sources import profile_path
from maitred.cli.simulate.table import seconds_text
from maitred.config import EngineConfig
from maitred.core.errors import ConfigError
from maitred.engine.build import EngineParts
from maitred.sim.fit import MIN_EDGE_SAMPLES, Fit, fit_edge, fit_steps
from maitred.sim.profile import Profile, encode_profile
from maitred.sim.recorded import MeasuredStep, measured_steps
from maitred.sim.workload import Arrival

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
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"{len(steps)} steps in {seconds:g} s; {MIN_STEPS} are needed, give more --seconds")
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
        cost_model=fit.cost_model,
        max_model_len=plan.max_model_len,
        kv_bytes_per_token=plan.bytes_per_block // plan.block_size,
        kv_memory_bytes=plan.longest_context * plan.bytes_per_block // plan.block_size,
        block_size=plan.block_size,
        token_budget=parts.core.scheduler.config.token_budget,
        num_steps=fit.num_steps,
        num_held_out_steps=fit.num_held_out_steps,
        mape=fit.mape,
        p90_error=fit.p90_error,
        bias=fit.bias,
        terms=fit.terms,
    )


def _held(parts: EngineParts) -> str:
    held = parts.model.footprint
    return "an unknown executor" if held is None else f"{held.executor} executor on {held.device}, {held.dtype} weights"


def profile_load(live: LiveEngine, max_num_seqs: int, seconds: float, tell: Callable[[str], None]) -> None:
    """Keeps the engine busy for about so many seconds: half of them waves, the rest mixes."""
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
