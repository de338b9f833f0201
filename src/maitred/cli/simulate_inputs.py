"""Inputs of a simulation: workload files, device profiles, models."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maitred.cli.console import note
from maitred.config import CacheConfig
from maitred.core.errors import ConfigError
from maitred.sim import devices
from maitred.sim.devices import SimulatedTarget
from maitred.sim.profile import EdgeModel, Profile, decode_profile
from maitred.sim.synthetic import SyntheticWorkload, parse_spec
from maitred.sim.traces import BLOCK_TOKENS, TraceWorkload, is_csv, parse_trace
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
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "maitred" / "profiles" / f"{model_name.replace('/', '--')}.json"


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
