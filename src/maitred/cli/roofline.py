"""`maitred roofline`: what this machine allows, a model's floors on it, and how far its engine is from them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from maitred.cli.command import Command, Options
from maitred.cli.console import note
from maitred.cli.flags import option
from maitred.cli.local import ENGINE_PARTS, engine_config
from maitred.config import CacheConfig, EngineConfig, SpeculativeConfig
from maitred.config.field_checks import require_at_least
from maitred.core.errors import ConfigError
from maitred.core.request import SamplingParams
from maitred.engine.memory import format_bytes

if TYPE_CHECKING:
    from maitred.engine.build import EngineParts
    from maitred.model.checkpoint import Checkpoint
    from maitred.model.roofline import KVFormat, MeasuredMachine, Row, WeightFormat
    from maitred.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineOptions:
    """What to measure"""

    engine: bool = True
    """Run the model's engine too, and say how far its steps are from their floors."""
    batch: tuple[str, ...] = option(("1", "8", "32"), metavar="N")
    """Requests in a decode step, one floor for each."""
    context: int = option(512, metavar="TOKENS")
    """Context of each request in a decode step."""
    prompt: int = option(512, metavar="TOKENS")
    """Prompt of the prefill."""
    json: bool = False
    """Print one JSON object in place of the tables."""

    def __post_init__(self) -> None:
        require_at_least("context", self.context, 1)
        require_at_least("prompt", self.prompt, 1)


DECODE_STEPS = 24
PREFILL_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Floor:
    """One step's least time and, where the engine ran, what it took."""

    name: str
    tokens: int
    floor_s: float
    took_s: float | None = None

    @property
    def share(self) -> float | None:
        """Share of the possible speed."""
        return self.floor_s / self.took_s if self.took_s else None


def run_roofline(options: RooflineOptions, config: EngineConfig) -> int:
    from maitred.engine.memory import usable_cores
    from maitred.model.checkpoint import open_checkpoint
    from maitred.model.families import spec_from_config
    from maitred.model.roofline import measure

    batches = [_batch(word) for word in options.batch]
    with open_checkpoint(config.model.model, config.model.revision) as checkpoint:
        spec = spec_from_config(checkpoint.config)
        held = _held(config, checkpoint, spec)
    note("measuring this machine; other load on it spoils the figures")
    measured = measure(config.model.num_threads or usable_cores(), model_bytes=held.num_bytes)
    floors = _floors(options, spec, measured, held, batches)
    if options.engine:
        floors = _with_engine(options, config, floors, batches)
    if options.json:
        print(json.dumps(_as_json(measured, spec, held, floors)))
    else:
        print("\n".join([*machine_lines(measured, held), "", *model_lines(spec, held, floors)]))
    return 0


class HeldFormats(NamedTuple):
    """Number formats in which the engine holds the model."""

    weights: WeightFormat
    lm_head: WeightFormat
    kv: KVFormat
    num_bytes: int  # of weights


def _held(config: EngineConfig, checkpoint: Checkpoint, spec: DecoderSpec) -> HeldFormats:
    """Formats as the engine would settle them; no weight is read for it."""
    from maitred.engine.executors import plan_executor
    from maitred.executor.native_plan import NativePlan
    from maitred.model.program_report import linear_bytes
    from maitred.model.roofline import KVFormat, WeightFormat

    plan = plan_executor(config, checkpoint, spec, lambda line: None)
    if not isinstance(plan, NativePlan):
        weights = head = WeightFormat(plan.dtype_name)
    else:
        formats = plan.program.formats
        weights = WeightFormat(formats.linears.dtype, linear_bytes(plan.program) if formats.stored else None)
        head = WeightFormat(formats.head.dtype)
    return HeldFormats(weights, head, KVFormat(plan.kv_dtype_name), plan.weights_bytes)


def _floors(
    options: RooflineOptions, spec: DecoderSpec, measured: MeasuredMachine, held: HeldFormats, batches: list[int]
) -> list[Floor]:
    from maitred.model.roofline import Row, floor_s, step_work

    def least_s(rows: list[Row]) -> float:
        return floor_s(step_work(spec, rows, held.weights, held.kv, held.lm_head), measured.machine_of_model)

    floors = []
    for batch in batches:
        name = f"decode, {batch} x context {options.context}"
        floors.append(Floor(name, batch, least_s([Row(options.context - 1, 1)] * batch)))
    return [*floors, Floor(f"prefill of {options.prompt}", options.prompt, least_s([Row(0, options.prompt)]))]


def _with_engine(
    options: RooflineOptions, config: EngineConfig, floors: list[Floor], batches: list[int]
) -> list[Floor]:
    """Each floor with the median of the engine's own steps beside it.

    Without drafts: a floor is of a step in which each row's context gains one token.
    """
    from maitred.engine.build import build_parts

    parts = build_parts(replace(config, speculative=SpeculativeConfig(speculative="off")), on_event=note)
    try:
        engine = TimedEngine(parts, parts.core.scheduler.config.token_budget)
        took = [engine.decode_s(batch, options.context, DECODE_STEPS) for batch in batches]
        took.append(engine.prefill_s(options.prompt))
    finally:
        parts.close()
    return [replace(floor, took_s=took_s) for floor, took_s in zip(floors, took, strict=True)]


def machine_lines(measured: MeasuredMachine, held: HeldFormats) -> list[str]:
    """The machine: a line for streaming, then one for each format of weights."""
    from maitred.model.roofline import ARITHMETIC, LIMIT_S, WeightFormat, critical_batch, token_budget

    machine, cache = measured.machine, measured.cache_bytes_per_s
    lines = [f"{measured.num_threads} threads, {measured.isa}: reads {machine.stream_bytes_per_s / 1e9:.1f} GB/s"]
    if cache is not None:
        lines.append(
            f"the last-level cache holds this model's {format_bytes(held.num_bytes)}, which are read at "
            f"{cache / 1e9:.1f} GB/s"
        )
    if measured.unsteady:
        lines.append(
            f"this machine is busy: repeats of {', '.join(measured.unsteady)} did not agree in {LIMIT_S:g} s; "
            "the best seen stand here, and measuring again when it is quiet may give more"
        )
    lines += [
        "",
        f"{'weights':10} {'best product':>14} {'registers alone':>16} {'critical batch':>15} {'token budget':>13}",
    ]
    for dtype, arithmetic in ARITHMETIC.items():
        weights = WeightFormat(dtype)
        lines.append(
            f"{dtype:10} {machine.peak_ops_per_s[arithmetic] / 1e12:>#10.3g} T/s "
            f"{measured.registers_ops_per_s[arithmetic] / 1e12:>#12.3g} T/s {critical_batch(weights, machine):>15.1f} "
            f"{token_budget(weights, machine):>13}"
        )
    return [
        *lines,
        "",
        "critical batch: tokens in a step from which arithmetic, not reading the weights, sets the time;",
        "token budget: tokens a step need hold at most (--max-num-batched-tokens): four times that in 64s.",
    ]


def model_lines(spec: DecoderSpec, held: HeldFormats, floors: list[Floor]) -> list[str]:
    """The model's steps: floor, tokens per second at the floor, and the engine's."""
    lines = [
        f"{spec.architecture}, weights {held.weights.dtype}, embedding and output {held.lm_head.dtype}, "
        f"KV cache {held.kv.dtype}",
        f"{'step':28} {'floor':>10} {'at most':>14} {'engine':>10} {'of the floor':>13}",
    ]
    for f in floors:
        took = f"{f.took_s * 1e3:>7.2f} ms" if f.took_s is not None else "-"
        share = f"{f.share:.0%}" if f.share is not None else "-"
        lines.append(
            f"{f.name:28} {f.floor_s * 1e3:>7.2f} ms {f.tokens / f.floor_s:>8,.0f} tok/s {took:>10} {share:>13}"
        )
    return lines


def _as_json(measured: MeasuredMachine, spec: DecoderSpec, held: HeldFormats, floors: list[Floor]) -> dict[str, Any]:
    from maitred.model.roofline import ARITHMETIC, WeightFormat, critical_batch, token_budget

    weights = [WeightFormat(dtype) for dtype in ARITHMETIC]
    return {
        "machine": asdict(measured),
        "critical_batch": {w.dtype: critical_batch(w, measured.machine) for w in weights},
        "token_budget": {w.dtype: token_budget(w, measured.machine) for w in weights},
        "model": spec.architecture,
        "dtype": held.weights.dtype,
        "lm_head_dtype": str(held.lm_head),
        "kv_dtype": held.kv.dtype,
        "steps": [asdict(floor) | {"share": floor.share} for floor in floors],
    }


def _batch(word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise ConfigError(f"batch is {word!r}; it must be a number of requests, at least 1")
    return int(word)


class TimedEngine:
    """Steps an engine of its own, timed: rows that decode together, one prompt's prefill. Prompts are random tokens."""

    def __init__(self, parts: EngineParts, max_num_batched_tokens: int) -> None:
        self._parts, self._token_budget = parts, max_num_batched_tokens
        self._rng, self._num_requests = Random(0), 0

    def decode_s(self, batch: int, context: int, num_steps: int) -> float:
        """Median time (s) of a step in which `batch` requests decode, around `context` tokens each.

        Raises ConfigError when the engine has not the slots or the memory for them.
        """
        # Those whose prompts come first decode while the others are prefilled: they end later and are ahead meanwhile.
        staggered = 2 + 2 * batch * context // self._token_budget
        prompt = max(1, context - (num_steps + staggered) // 2)
        requests = [self._add(prompt, num_steps + staggered) for _ in range(batch)]
        counts = dict.fromkeys(requests, 0)
        took: list[float] = []
        while self._parts.core.has_work and len(took) < num_steps:
            before = dict(counts)
            began = time.perf_counter()
            progress = self._parts.core.step()
            ended = time.perf_counter()
            for p in progress:
                counts[p.request_id] += len(p.new_token_ids)
            if all(before.values()) and all(counts[r] == before[r] + 1 for r in requests):
                took.append(ended - began)
        for request_id in requests:
            self._parts.core.abort(request_id)
        if not took:
            raise ConfigError(
                f"no step had all of {batch} requests of {context} tokens; raise --max-num-seqs or "
                f"--kv-cache-memory-bytes, or ask for a smaller --batch"
            )
        return statistics.median(took)

    def prefill_s(self, num_tokens: int) -> float:
        """Median time (s) from adding a prompt to its first token, over as many steps as it takes."""
        return statistics.median(self._one_prefill(num_tokens) for _ in range(PREFILL_REPEATS))

    def _one_prefill(self, num_tokens: int) -> float:
        self._add(num_tokens, 1)
        began = time.perf_counter()
        while self._parts.core.has_work:
            self._parts.core.step()
        return time.perf_counter() - began

    def _add(self, prompt_tokens: int, output_tokens: int) -> str:
        from maitred.engine.intake import make_requests

        model = self._parts.model
        self._num_requests += 1
        tokens: Sequence[int] = self._rng.choices(range(model.vocab_size), k=prompt_tokens)
        (request,) = make_requests(
            model,
            tokens,
            SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True),
            request_id=f"roofline-{self._num_requests}",
            now=time.monotonic(),
            add_special_tokens=False,
        )
        self._parts.core.add(request)
        return request.request_id


def _run(options: Options) -> int:
    # hits in the prefix cache would leave nothing to measure
    config = replace(engine_config(options), cache=replace(options[CacheConfig], enable_prefix_caching=False))

    return run_roofline(options[RooflineOptions], config)


COMMAND = Command(
    path="roofline",
    summary="Measure this machine's bandwidth and arithmetic, and how far the engine is from what they allow.",
    run=_run,
    parts=(RooflineOptions, *ENGINE_PARTS),
    positional="model",
    first=("model", "engine", "batch", "context", "prompt", "json", "dtype", "kv_dtype", "num_threads"),
    examples=(
        "maitred roofline",
        "maitred roofline ./Qwen3-0.6B --dtype int8 --batch 1 --batch 16 --context 2048",
        "maitred roofline ./Qwen3-0.6B --no-engine --json",
    ),
)
