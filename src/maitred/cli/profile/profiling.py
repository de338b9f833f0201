"""A load made to be measured: waves of equal requests that cover rows and contexts, and mixes as they are served."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from random import Random

from maitred.cli.profile.live import LiveEngine
from maitred.sim.recorded import MeasuredStep
from maitred.sim.workload import Arrival

WAVE_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
WAVE_CONTEXTS = (32, 128, 512, 1024)
WAVE_STEPS = 10
MAX_WAVE_TOKENS = 8192
MIX_ROWS = (2, 6, 12, 24, 48)
STRETCH = 50  # steps; fitted and tested ones alternate in stretches, so that neighbours are not on both sides


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
