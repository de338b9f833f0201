"""Measures the machine, works out a model's floors, runs its engine beside them, and prints the three."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from maitred.cli.console import note
from maitred.cli.floors.timed import TimedEngine
from maitred.config import EngineConfig
from maitred.engine.build import build_parts
from maitred.engine.memory import usable_cores
from maitred.errors import ConfigError
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.machine import Measured, measure
from maitred.model.roofline import (
    ARITHMETIC,
    KVFormat,
    Row,
    WeightFormat,
    critical_batch,
    floor_s,
    step_work,
    token_budget,
    weight_format,
)
from maitred.model.spec import DecoderSpec

if TYPE_CHECKING:
    from maitred.cli.roofline import RooflineOptions

DECODE_STEPS = 24
DEFAULT_FORMAT, DEFAULT_KV = "bfloat16", "bfloat16"


@dataclass(frozen=True, slots=True)
class Floor:
    """One step's least time and, where the engine ran, what it took."""

    name: str
    tokens: int
    floor_s: float
    took_s: float | None = None

    @property
    def share(self) -> float | None:
        """Of the possible speed."""
        return self.floor_s / self.took_s if self.took_s else None


def run_roofline(options: RooflineOptions, config: EngineConfig) -> int:
    batches = [_batch(word) for word in options.batch]
    note("measuring this machine; other load on it spoils the figures")
    measured = measure(config.model.num_threads or usable_cores())
    spec = spec_from_config(open_checkpoint(config.model.model, config.model.revision).config)
    if options.engine:
        floors, held = _with_engine(options, config, spec, measured, batches)
    else:
        held = _named_formats(config)
        floors = list(_floors(options, spec, measured, held, batches))
    if options.json:
        print(json.dumps(_as_json(measured, spec, held, floors)))
    else:
        print("\n".join([*machine_lines(measured), "", *model_lines(spec, held, floors)]))
    return 0


Formats = tuple[WeightFormat, KVFormat]


def _named_formats(config: EngineConfig) -> Formats:
    """The formats asked for; auto is taken as bfloat16, since nothing is loaded that would tell."""
    weights, kv = config.model.dtype, config.model.kv_dtype
    return (
        WeightFormat(DEFAULT_FORMAT if weights == "auto" else weights),
        KVFormat(DEFAULT_KV if kv == "auto" else kv),
    )


def _floors(
    options: RooflineOptions, spec: DecoderSpec, measured: Measured, held: Formats, batches: list[int]
) -> list[Floor]:
    weights, kv = held
    floors = []
    for batch in batches:
        rows = [Row(options.context - 1, 1)] * batch
        name = f"decode, {batch} x context {options.context}"
        floors.append(Floor(name, batch, floor_s(step_work(spec, rows, weights, kv), measured.machine)))
    prefill = step_work(spec, [Row(0, options.prompt)], weights, kv)
    floors.append(Floor(f"prefill of {options.prompt}", options.prompt, floor_s(prefill, measured.machine)))
    return floors


def _with_engine(
    options: RooflineOptions, config: EngineConfig, spec: DecoderSpec, measured: Measured, batches: list[int]
) -> tuple[list[Floor], Formats]:
    """Floors for the formats that the engine really uses, each with the median of its own steps beside."""
    parts = build_parts(config, on_event=note)
    try:
        footprint = parts.model.footprint
        if footprint is None:
            raise ConfigError("this engine does not tell how it holds the model; use --no-engine")
        held = weight_format(footprint.dtype), KVFormat(footprint.kv_dtype)
        floors = _floors(options, spec, measured, held, batches)
        engine = TimedEngine(parts, parts.core.scheduler.config.token_budget)
        took = [engine.decode_s(batch, options.context, DECODE_STEPS) for batch in batches]
        took.append(engine.prefill_s(options.prompt))
    finally:
        parts.close()
    return [Floor(f.name, f.tokens, f.floor_s, s) for f, s in zip(floors, took, strict=True)], held


def machine_lines(measured: Measured) -> list[str]:
    """The machine: a line for streaming, then one for each format of weights."""
    machine = measured.machine
    lines = [
        f"{measured.num_threads} threads, {measured.isa}: reads {machine.stream_bytes_per_s / 1e9:.1f} GB/s",
        "",
        f"{'weights':10} {'best product':>14} {'registers alone':>16} {'critical batch':>15} {'token budget':>13}",
    ]
    for dtype, arithmetic in ARITHMETIC.items():
        weights = WeightFormat(dtype)
        lines.append(
            f"{dtype:10} {machine.peak_ops_per_s[arithmetic] / 1e12:>10.2f} T/s "
            f"{measured.registers_ops_per_s[arithmetic] / 1e12:>12.2f} T/s {critical_batch(weights, machine):>15.1f} "
            f"{token_budget(weights, machine):>13}"
        )
    return [
        *lines,
        "",
        "critical batch: tokens in a step from which arithmetic, not reading the weights, sets the time;",
        "token budget: tokens a step need hold at most (--max-num-batched-tokens): four times that in 64s.",
    ]


def model_lines(spec: DecoderSpec, held: Formats, floors: list[Floor]) -> list[str]:
    """The model's steps: floor, tokens per second at the floor, and the engine's."""
    weights, kv = held
    lines = [
        f"{spec.architecture}, weights {weights.dtype}, KV cache {kv.dtype}",
        f"{'step':28} {'floor':>10} {'at most':>14} {'engine':>10} {'of the floor':>13}",
    ]
    for f in floors:
        took = f"{f.took_s * 1e3:>7.2f} ms" if f.took_s is not None else "-"
        share = f"{f.share:.0%}" if f.share is not None else "-"
        lines.append(
            f"{f.name:28} {f.floor_s * 1e3:>7.2f} ms {f.tokens / f.floor_s:>8,.0f} tok/s {took:>10} {share:>13}"
        )
    return lines


def _as_json(measured: Measured, spec: DecoderSpec, held: Formats, floors: list[Floor]) -> dict[str, Any]:
    weights = [WeightFormat(dtype) for dtype in ARITHMETIC]
    return {
        "machine": asdict(measured),
        "critical_batch": {w.dtype: critical_batch(w, measured.machine) for w in weights},
        "token_budget": {w.dtype: token_budget(w, measured.machine) for w in weights},
        "model": spec.architecture,
        "dtype": held[0].dtype,
        "kv_dtype": held[1].dtype,
        "steps": [asdict(floor) | {"share": floor.share} for floor in floors],
    }


def _batch(word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise ConfigError(f"batch is {word!r}; it must be a number of requests, at least 1")
    return int(word)
