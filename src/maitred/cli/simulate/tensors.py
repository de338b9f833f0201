"""`maitred simulate --model-repository`: tensor models on the simulated scheduler, alone or beside a language model."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from maitred.cli.console import inert, note
from maitred.cli.flags import UsageError
from maitred.cli.simulate.options import SimulatedTensorOptions, SimulateOptions
from maitred.cli.simulate.sources import read_unpacked
from maitred.cli.simulate.table import aligned, seconds_text
from maitred.core.errors import CheckpointError, ConfigError
from maitred.scheduler.scheduler import Scheduler
from maitred.sim.ensembles import SimulatedEnsemble, SimulatedStep
from maitred.sim.tensor_profile import HostTimes, TensorProfile, decode_tensor_profile
from maitred.sim.tensor_traces import MixedTrace, parse_mixed_trace, tensor_arrivals
from maitred.sim.tensors import ModelFigures, SimulatedModel, TensorSimulation
from maitred.sim.traces import BLOCK_TOKENS, TraceWorkload

NO_LANGUAGE_MODEL = "none"


def tensor_profile_path(repository: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Path of this machine's profile of a repository, as `maitred profile` writes it; under XDG_CACHE_HOME."""
    cache, folder = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), Path(repository).resolve()
    return cache / "maitred" / "profiles" / f"tensor-{folder.name}-{zlib.crc32(bytes(folder)):08x}.json"


@dataclass(frozen=True, slots=True)
class TensorWork:
    """Tensor models, and what a trace asks of them and of a language model."""

    trace: MixedTrace
    models: tuple[SimulatedModel, ...]
    ensembles: tuple[SimulatedEnsemble, ...]
    host: HostTimes
    rate_scale: float
    seed: int | None
    block_tokens: int

    @property
    def chats(self) -> TraceWorkload:
        lines, began_ms = self.trace.chats, self.trace.began_ms
        return TraceWorkload(lines, self.rate_scale, block_tokens=self.block_tokens, began_ms=began_ms)

    def beside(self) -> Callable[[Scheduler], TensorSimulation]:
        """A simulation for one run, on its scheduler."""
        rng = None if self.seed is None else Random(self.seed)

        def begun(scheduler: Scheduler) -> TensorSimulation:
            simulation = TensorSimulation(scheduler, self.models, self.host, rng, ensembles=self.ensembles)
            simulation.begin(tensor_arrivals(self.trace, self.rate_scale))
            return simulation

        return begun


def read_tensor_work(
    options: SimulatedTensorOptions, trace: str, asked: SimulateOptions, seed: int | None
) -> TensorWork | None:
    """None without --model-repository. Raises UsageError, ConfigError."""
    if options.model_repository is None:
        if options.tensor_profile is not None:
            raise UsageError("--tensor-profile is for --model-repository, which was not given; add it")
        return None
    try:
        lines, size = read_unpacked(trace).splitlines(), asked.trace_block_size or BLOCK_TOKENS
        parsed = parse_mixed_trace(lines, trace, unit=asked.trace_unit, block_tokens=size)
    except OSError as error:
        raise ConfigError(f"--trace {trace}: {error.strerror}; give a file of JSON lines") from None
    profile = read_tensor_profile(options.tensor_profile, options.model_repository)
    named = {line.model for line in parsed.tensors}
    models, ensembles = read_models(Path(options.model_repository), profile, named)
    return TensorWork(parsed, models, ensembles, profile.host, asked.rate_scale, seed, size)


def read_tensor_profile(path: str | None, repository: str) -> TensorProfile:
    """The file, or this machine's own of the repository. Raises ConfigError."""
    found = Path(path) if path is not None else tensor_profile_path(repository)
    try:
        return decode_tensor_profile(found.read_bytes(), str(found))
    except OSError as error:
        raise ConfigError(
            f"--tensor-profile {found}: {error.strerror}; make one with maitred profile --model-repository DIR"
        ) from None


def read_models(
    repository: Path, profile: TensorProfile, asked: set[str]
) -> tuple[tuple[SimulatedModel, ...], tuple[SimulatedEnsemble, ...]]:
    """Models that are asked for, by the trace or by ensembles, as they would be served; none is loaded. Raises
    ConfigError.
    """
    from maitred.tensor.batching import lengths_of, rules_of
    from maitred.tensor.config_checks import is_ensemble
    from maitred.tensor.repository_files import read_model, scan

    found: list[SimulatedModel] = []
    ensembles: list[SimulatedEnsemble] = []
    present, names = scan(repository), sorted(asked)
    for name in names:
        if name not in present:
            raise ConfigError(f"the trace asks for model {name!r}, and {repository} has {', '.join(present)}")
        try:
            model = read_model(repository / name)
        except CheckpointError as error:
            raise ConfigError(f"{repository / name}: {error}") from None
        if is_ensemble(model.config):
            ensembles.append(ensemble_of(model.config))
            names += dict.fromkeys(each.model for each in ensembles[-1].steps if each.model not in names)
            continue
        rules, buckets = rules_of(model.config), lengths_of(model.config).buckets
        for version in (each.number for each in model.versions if not each.fault):
            times = profile.times_of(name, version)
            found.append(SimulatedModel(name=name, version=version, rules=rules, times=times, buckets=buckets))
    return tuple(found), tuple(ensembles)


def ensemble_of(config: Any) -> SimulatedEnsemble:
    """A simulated ensemble of a ModelConfig: steps, and which of them need whose outputs."""
    steps = config.ensemble_scheduling.step
    maker = {tensor: number for number, step in enumerate(steps) for tensor in step.output_map.values()}
    needs = [sorted({maker[tensor] for tensor in step.input_map.values() if tensor in maker}) for step in steps]
    made = (
        SimulatedStep(step.model_name, max(0, step.model_version), tuple(before))
        for step, before in zip(steps, needs, strict=True)
    )
    return SimulatedEnsemble(config.name, tuple(made))


def figures_of(models: Mapping[str, ModelFigures]) -> dict[str, Any]:
    return {name: figures.to_json() for name, figures in models.items()}


def tensor_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with a row for each model of each policy."""
    rows = [["policy", "model", "finished", "p50", "p90", "p99", "mean batch", "requests/s", "failed"]]
    for policy, whole in figures.items():
        for name, part in whole["tensor"].items():
            times = [seconds_text(part["latency_s"][figure]) for figure in ("p50", "p90", "p99")]
            rates = ["-" if part[key] is None else f"{part[key]:,.2f}" for key in ("mean_batch", "throughput_rps")]
            failed = ", ".join(f"{count} {reason}" for reason, count in part["failed"].items()) or "0"
            rows.append([policy, name, f"{part['num_finished']:,}", *times, *rates, failed])
    return inert(aligned(rows))


def note_tensor_speed(policy: str, models: Mapping[str, ModelFigures], wall_s: float) -> None:
    total = sum(each.latency_s.count for each in models.values())
    note(f"{policy}: {total:,} tensor requests in {wall_s:.1f} s")
