"""Inputs of a simulation: workload files, device profiles, models."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from maitred.cli.console import note
from maitred.cli.flags import UsageError
from maitred.cli.simulate import SimulatedTensorOptions, SimulateOptions
from maitred.config import CacheConfig
from maitred.core.errors import CheckpointError, ConfigError
from maitred.scheduler.scheduler import Scheduler
from maitred.sim import devices
from maitred.sim.devices import SimulatedTarget
from maitred.sim.profile import EdgeModel, Profile, decode_profile
from maitred.sim.synthetic import SyntheticWorkload, parse_spec
from maitred.sim.tensor_profile import HostTimes, TensorProfile, decode_tensor_profile
from maitred.sim.tensors import SimulatedEnsemble, SimulatedModel, SimulatedStep, TensorSimulation
from maitred.sim.traces import (
    BLOCK_TOKENS,
    MixedTrace,
    TraceWorkload,
    is_csv,
    parse_mixed_trace,
    parse_trace,
    tensor_arrivals,
)
from maitred.sim.workload import Workload

GZIP_MAGIC = b"\x1f\x8b"
BUILTIN_DEVICE, OTHER_DEVICE = "cpu", "h100"


# ---- workloads


def read_workload(
    path: str, rate_scale: float = 1.0, *, unit: str | None = None, block_tokens: int | None = None
) -> Workload:
    """A trace if its name or its first line says so, else a description. Raises ConfigError."""
    try:
        data = read_unpacked(path)
    except OSError as error:
        raise ConfigError(f"--workload {path}: {error.strerror}; give a trace or a workload's description") from None
    if _is_trace(path, data):
        size = block_tokens or BLOCK_TOKENS
        lines = parse_trace(data.splitlines(), path, unit=unit, block_tokens=size)
        lasts_s = (lines[-1].timestamp - lines[0].timestamp) / 1000
        note(f"{path}: {len(lines):,} requests in {lasts_s:,.6g} s; --trace-unit and --trace-block-size say if not so")
        return TraceWorkload(lines, rate_scale, block_tokens=size)
    if unit is not None or block_tokens is not None:
        raise ConfigError(f"--workload {path} is no trace; drop --trace-unit and --trace-block-size")
    return SyntheticWorkload(parse_spec(_description(data, path), path), rate_scale)


def read_unpacked(path: str) -> bytes:
    """A file, which may be gzip's. Raises OSError, and ConfigError for a damaged one."""
    data = Path(path).read_bytes()
    try:
        return gzip.decompress(data) if data.startswith(GZIP_MAGIC) else data
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: damaged gzip file ({error}); fetch it again") from None


def _is_trace(path: str, data: bytes) -> bool:
    first = data.lstrip()[:4096].split(b"\n", 1)[0]
    is_json = first.removeprefix(b"\xef\xbb\xbf").startswith(b"{") and b'"timestamp"' in first
    return path.removesuffix(".gz").endswith((".jsonl", ".csv")) or is_json or is_csv(first)


def _description(data: bytes, path: str) -> Mapping[str, Any]:
    import yaml

    try:
        described = yaml.safe_load(data)  # JSON is YAML
    except yaml.YAMLError as error:
        raise ConfigError(f"--workload {path}: {error}") from None
    except ValueError as error:  # not UTF-8
        raise ConfigError(f"--workload {path}: {error}; give a text file") from None
    if not isinstance(described, Mapping):
        raise ConfigError(f"--workload {path}: holds no mapping; see docs/simulator.md for the format")
    return described


# ---- devices and models


def find_target(device: str | None, model: str | None, environ: Mapping[str, str] = os.environ) -> SimulatedTarget:
    """Raises ConfigError."""
    if device is not None and (device.endswith(".json") or Path(device).is_file()):
        return target_of(read_profile(Path(device)), model)
    shape = model_shape(model)
    if device is not None:
        return _of_datasheet(devices.device_named(device), shape)
    own = profile_path(shape.name, environ)
    if own.is_file():
        return target_of(read_profile(own), shape.name)
    return _of_datasheet(devices.device_named(BUILTIN_DEVICE if model is None else OTHER_DEVICE), shape)


def profile_path(model_name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Path of this machine's profile of a model, as `maitred profile` writes it; under XDG_CACHE_HOME."""
    return _profiles(environ) / f"{model_name.replace('/', '--')}.json"


def _profiles(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maitred" / "profiles"


def read_profile(path: Path) -> Profile:
    try:
        return decode_profile(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"--device {path}: {error.strerror}; make one with maitred profile -o FILE") from None


def target_of(profile: Profile, model: str | None = None) -> SimulatedTarget:
    """Raises ConfigError for a profile of another model."""
    if model is not None and model != profile.model:
        raise ConfigError(
            f"--model is {model!r}, the profile is of {profile.model}; drop --model, or run maitred profile {model}"
        )

    def num_blocks(cache: CacheConfig, max_num_seqs: int) -> int:
        return _enough_blocks(cache, max_num_seqs, profile.max_model_len, profile.kv_bytes_per_token, profile_bytes)

    profile_bytes = float(profile.kv_memory_bytes)
    measured = "measured" if profile.edge == EdgeModel() else "measured over HTTP"
    return SimulatedTarget(
        f"{profile.model} on {profile.machine} ({measured})",
        profile.cost_model,
        num_blocks,
        profile.token_budget,
        profile.kv_bytes_per_token,
        _num_layers(profile.model),
        profile.edge,
        doubt=profile.doubt,
        state_bytes=profile.state_bytes,
    )


def _of_datasheet(device: devices.Device, shape: devices.ModelShape) -> SimulatedTarget:
    devices.num_kv_blocks(device, shape, 1)  # refuses what does not fit

    def num_blocks(cache: CacheConfig, max_num_seqs: int) -> int:
        slots = devices.num_state_slots(cache, max_num_seqs, shape.state_bytes)
        blocks = devices.num_kv_blocks(device, shape, cache.block_size, max_num_seqs, slots)
        free = blocks * cache.block_size * shape.kv_bytes_per_token
        return _enough_blocks(cache, max_num_seqs, shape.context, shape.kv_bytes_per_token, free)

    groups = shape.groups

    def num_pages(cache: CacheConfig, max_num_seqs: int, ahead: int) -> int:
        assert groups is not None
        per_block = shape.kv_bytes_per_token * cache.block_size
        slots = devices.num_state_slots(cache, max_num_seqs, shape.state_bytes)
        fit = devices.num_kv_blocks(device, shape, cache.block_size, 0, slots) * per_block
        most = max_num_seqs * groups.pages_for(shape.context, cache.block_size, ahead)
        pages = int((cache.kv_cache_memory_bytes or fit) / (per_block / shape.num_layers * groups.size))
        return max(1, pages if cache.kv_cache_memory_bytes is not None else min(pages, most))

    return SimulatedTarget(
        f"{shape.name} on {device.name} (datasheet)",
        devices.roofline(device, shape),
        num_blocks,
        device.token_budget,
        shape.kv_bytes_per_token,
        shape.num_layers,
        num_devices=device.count,
        idle_w=device.count * device.idle_w,
        power_w=device.count * device.power_w,
        state_bytes=shape.state_bytes,
        groups=groups,
        num_pages=num_pages,
        context=shape.context,
    )


def _num_layers(model: str) -> int:
    """Layers of a profile's model; 1 for one unknown here, so that no part of a chunk's KV leaves before all of it."""
    from maitred.model.checkpoint import BUILTIN_NAME

    return model_shape(model).num_layers if model in devices.MODELS or model == BUILTIN_NAME else 1


def _enough_blocks(
    cache: CacheConfig, max_num_seqs: int, context: int, kv_bytes_per_token: float, free_bytes: float
) -> int:
    """Blocks as the engine's memory plan has them: what max_num_seqs full contexts need, bounded by what is free."""
    per_block = kv_bytes_per_token * cache.block_size
    if cache.kv_cache_memory_bytes is not None:
        return max(1, int(cache.kv_cache_memory_bytes / per_block))
    return max(1, min(int(free_bytes / per_block), max_num_seqs * -(-context // cache.block_size)))


def model_shape(model: str | None) -> devices.ModelShape:
    """Shape of a known name's model, a folder's, a GGUF file's, or without any the built-in one. Raises ConfigError."""
    if model in devices.MODELS:
        return devices.MODELS[model]
    from maitred.model.checkpoint import BUILTIN_FOLDER, BUILTIN_NAME, open_checkpoint
    from maitred.model.families import spec_from_config
    from maitred.model.gguf_file import is_gguf

    if model is None or model == BUILTIN_NAME:
        return _shape_in(BUILTIN_FOLDER, BUILTIN_NAME)
    folder = Path(model).expanduser()
    if is_gguf(folder):
        with open_checkpoint(model) as checkpoint:
            spec = spec_from_config(checkpoint.config)
            return devices.shape_of_decoder(
                checkpoint.name, spec, bytes_per_value=checkpoint.weight_bytes / spec.num_parameters()
            )
    return _shape_in(folder, folder.resolve().name) if folder.is_dir() else devices.model_named(model)


def _shape_in(folder: Path, name: str) -> devices.ModelShape:
    from maitred.model.families import spec_from_config

    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {folder}: no readable config.json ({error}); give a model folder") from None
    return devices.shape_of_decoder(name, spec_from_config(config), bytes_per_value=4.0)


def seed_of(options: SimulateOptions) -> int | None:
    """Seed of the jitter; None has none."""
    return options.seed if options.jitter else None


# ---- tensor models


def tensor_profile_path(repository: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Path of this machine's profile of a repository, as `maitred profile` writes it; under XDG_CACHE_HOME."""
    folder = Path(repository).resolve()
    return _profiles(environ) / f"tensor-{folder.name}-{zlib.crc32(bytes(folder)):08x}.json"


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


def read_tensor_work(options: SimulatedTensorOptions, trace: str, asked: SimulateOptions) -> TensorWork | None:
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
    return TensorWork(parsed, models, ensembles, profile.host, asked.rate_scale, seed_of(asked), size)


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
