"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) as PEFT 0.21 saves them: a folder -> matrices for a model's linears.

Safetensors only. Contents that would change the model's answers and are not computed here are refused by name, and so
is any key that `adapter_config.json` has and this version does not know. Files are read whole and checked whole before
anything is made of them, so a concurrent writer can harm this one load alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import CheckpointError
from maitred.model.checkpoint import PICKLE_SUFFIXES, RawTensor
from maitred.model.packed import float32_values
from maitred.model.safetensors_file import parse_safetensors
from maitred.model.spec import DecoderSpec
from maitred.model.weight_map import PREFIXES, WeightSource, linear_sources

# What says nothing about the product of a linear, or is read below. All else must be absent, null, false or empty.
_KNOWN = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules",
    "task_type", "use_rslora", "velora_config",
})  # fmt: skip
# Those that leave the model's own weights as they are; the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) do not.
_INITIAL = ("gaussian", "eva", "orthogonal", "mica")
_LONGEST_PATTERN, _MOST_PATTERNS, _MOST_REPEATS = 512, 4096, 3


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of the file that are used."""

    rank_default: int
    alpha_default: float
    use_rslora: bool
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...]
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...]
    target_modules: tuple[str, ...] | None  # None: a regular expression, which the tensors stand for
    exclude_modules: tuple[str, ...] | None
    layers: frozenset[int] | None  # None: all

    def rank(self, module: str) -> int:
        return int(_first_match(self.rank_pattern, module, self.rank_default))

    def scale(self, module: str) -> float:
        """alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)."""
        alpha, rank = _first_match(self.alpha_pattern, module, self.alpha_default), self.rank(module)
        return float(alpha / (math.sqrt(rank) if self.use_rslora else rank))

    def unknown_targets(self, modules: Sequence[str]) -> list[str]:
        """Targets that are none of the modules."""
        return [t for t in self.target_modules or () if not any(_is_named(module, (t,)) for module in modules)]

    def targets(self, module: str) -> bool | None:
        """Return whether the adapter is for the module; None when only its tensors tell."""
        if self.target_modules is None or self.exclude_modules is None:
            return None
        layer = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        in_layer = self.layers is None or (layer is not None and int(layer[1]) in self.layers)
        return in_layer and _is_named(module, self.target_modules) and not _is_named(module, self.exclude_modules)


def parse_config(path: Path, content: bytes, max_rank: int) -> AdapterConfig:
    """Parse the file. Raises CheckpointError naming a key that cannot be served, or has a value of the wrong type."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object; it holds a {type(config).__name__}")
    keys = _Keys(path, config)
    keys.refuse_strange()
    parsed = AdapterConfig(
        rank_default=keys.number("r", int),
        alpha_default=keys.number("lora_alpha", (int, float)),
        use_rslora=keys.flag("use_rslora"),
        rank_pattern=keys.pattern("rank_pattern", int),
        alpha_pattern=keys.pattern("alpha_pattern", (int, float)),
        target_modules=keys.names("target_modules"),
        exclude_modules=keys.names("exclude_modules"),
        layers=keys.layers(),
    )
    for rank in (parsed.rank_default, *(rank for _, rank in parsed.rank_pattern)):
        if not 1 <= rank <= max_rank:
            raise CheckpointError(f"{path}: rank {rank}; 1 to {max_rank} are served (--max-lora-rank)")
    return parsed


class _Keys:
    """The file's keys, each taken with its type checked."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path, self._config = path, config

    def refuse_strange(self) -> None:
        if self._config.get("peft_type") != "LORA":
            raise self._fault("peft_type", "only LORA is served")
        if not self._config.get("target_modules"):
            raise self._fault("target_modules", "it must name modules")
        if self._config.get("bias", "none") != "none":
            raise self._fault("bias", "adapters that change biases are not served; only none is")
        initial = self._config.get("init_lora_weights")
        if not (initial is None or isinstance(initial, bool) or initial in _INITIAL):
            raise self._fault(
                "init_lora_weights",
                "it changes the model's own weights; save the adapter with path_initial_model_for_weight_conversion",
            )
        for key, value in self._config.items():
            if key not in _KNOWN and value:
                raise self._fault(key, "adapters with that are not served")

    def number(self, key: str, kind: type | tuple[type, ...]) -> Any:
        return self._checked_number(key, self._config.get(key, 8), kind)  # PEFT's default of both

    def flag(self, key: str) -> bool:
        value = self._config.get(key) or False
        if not isinstance(value, bool):
            raise self._fault(key, "it must be true or false")
        return value

    def pattern(self, key: str, kind: type | tuple[type, ...]) -> tuple[tuple[re.Pattern[str], Any], ...]:
        patterns = self._config.get(key) or {}
        if not isinstance(patterns, dict) or len(patterns) > _MOST_PATTERNS:
            raise self._fault(key, f"it must be an object of up to {_MOST_PATTERNS:,} patterns")
        return tuple(
            (self._compiled(key, name), self._checked_number(key, value, kind)) for name, value in patterns.items()
        )

    def names(self, key: str) -> tuple[str, ...] | None:
        value = self._config.get(key) or ()
        if isinstance(value, str):
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise self._fault(key, "it must be a list of names")
        return tuple(value)

    def layers(self) -> frozenset[int] | None:
        value = self._config.get("layers_to_transform")
        layers = [value] if isinstance(value, int) else value
        if layers is None or layers == []:
            return None
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise self._fault("layers_to_transform", "it must be a number or a list of numbers")
        if (self._config.get("layers_pattern") or "layers") not in ("layers", ["layers"]):
            raise self._fault("layers_pattern", "only layers is served")
        return frozenset(layers)

    def _checked_number(self, key: str, value: Any, kind: type | tuple[type, ...]) -> Any:
        if isinstance(value, bool) or not isinstance(value, kind) or not -1e30 < value < 1e30:  # type: ignore[operator]
            raise self._fault(key, "it must be a number")
        return value

    def _compiled(self, key: str, pattern: str) -> re.Pattern[str]:
        repeats = len(re.findall(r"[*+{]", pattern))
        if len(pattern) > _LONGEST_PATTERN or repeats > _MOST_REPEATS or re.search(r"\)[*+{]", pattern):
            raise self._fault(key, f"the pattern {pattern[:80]!r} could take too long to match")
        try:
            return re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, OverflowError, RecursionError):
            raise self._fault(key, f"{pattern[:80]!r} is no regular expression") from None

    def _fault(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {key} is {json.dumps(self._config.get(key))[:80]}; {why}")


def _first_match(patterns: Sequence[tuple[re.Pattern[str], Any]], module: str, default: Any) -> Any:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _is_named(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 2**20
_MOST_HEADER_BYTES = 2**22
_LARGEST = 3.38e38  # that bfloat16 holds too
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Low-rank addition to rows [row, row + N) of a parameter [.., K]: b [N, R] @ a [R, K], the scale in b."""

    row: int
    a: NDArray[np.float32]
    b: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter for one model: for each parameter (`spec.parameter_shapes`) that it changes, what is added to it."""

    rank: int
    """The largest of its matrices."""
    num_bytes: int
    """Bytes of the matrices as they are held here, in float32."""
    digest: str
    """sha256, in hex, of the bytes of both files."""
    tensors: Mapping[str, tuple[LowRank, ...]]


def read_adapter(folder: Path, spec: DecoderSpec, *, max_rank: int, inside: Path | None = None) -> Adapter:
    """Read and check an adapter of the model that `spec` describes.

    With `inside`, both files must lie in that folder, wherever links lead; None allows them anywhere. Raises
    CheckpointError, naming the tensor and both shapes where it is about one, for anything that cannot be served.
    """
    _refuse_pickle(folder)
    linears = linear_sources(spec)
    with _File(folder / CONFIG_NAME, inside) as config_file, _File(folder / WEIGHTS_NAME, inside) as weights_file:
        config_bytes = config_file.read(_MOST_CONFIG_BYTES)
        config = parse_config(config_file.path, config_bytes, max_rank)
        weights_bytes = weights_file.read(_most_bytes(linears, max_rank))
        config_file.check_unchanged()
        weights_file.check_unchanged()
    tensors = _Tensors(weights_file.path, parse_safetensors(weights_file.path, weights_bytes), linears)
    tensors.check_targets(config, spec)
    parts: dict[str, list[LowRank]] = {}
    for module in sorted(tensors.modules):
        source = linears[module]
        parts.setdefault(source.parameter, []).append(tensors.low_rank(module, source, config))
    found = [part for of_parameter in parts.values() for part in of_parameter]
    return Adapter(
        rank=max(len(part.a) for part in found),
        num_bytes=sum(part.a.nbytes + part.b.nbytes for part in found),
        digest=hashlib.sha256(hashlib.sha256(config_bytes).digest() + weights_bytes).hexdigest(),
        tensors={parameter: tuple(sorted(of, key=lambda part: part.row)) for parameter, of in parts.items()},
    )


def _refuse_pickle(folder: Path) -> None:
    try:
        is_folder = folder.is_dir()
    except OSError:  # a name that no file can have
        is_folder = False
    if not is_folder:
        raise CheckpointError(f"there is no folder {str(folder)[:200]}; an adapter is a folder with {CONFIG_NAME}")
    if (folder / WEIGHTS_NAME).exists():
        return
    pickled = [path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLE_SUFFIXES]
    if pickled:
        raise CheckpointError(
            f"{folder} has its adapter only as pickle ({pickled[0]}), which can run code when loaded and is refused; "
            f"save it with safe_serialization=True where you trust it"
        )


def _most_bytes(linears: Mapping[str, WeightSource], max_rank: int) -> int:
    """Return the bytes of an adapter of the largest rank on every linear, in float32."""
    return _MOST_HEADER_BYTES + sum(4 * max_rank * sum(source.shape) for source in linears.values())


class _File:
    """A file that is read at once; a context manager."""

    def __init__(self, path: Path, inside: Path | None) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would else wait for a writer
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}); an adapter has this file") from None
        try:
            self._check_place(inside)
        except BaseException:
            os.close(self._fd)
            raise

    def _check_place(self, inside: Path | None) -> None:
        self._before = os.fstat(self._fd)
        if not stat.S_ISREG(self._before.st_mode):
            raise CheckpointError(f"{self.path} is no regular file")
        real = Path(os.path.realpath(self.path))
        if inside is not None and not real.is_relative_to(os.path.realpath(inside)):
            raise CheckpointError(f"{self.path} is outside the folder that adapters may be loaded from")
        if inside is not None and not os.path.samestat(self._before, real.stat()):
            raise self._changed()

    def read(self, most_bytes: int) -> bytes:
        if self._before.st_size > most_bytes:
            raise CheckpointError(
                f"{self.path} has {self._before.st_size:,} bytes; of an adapter for this model, of a rank that is "
                f"allowed, it has {most_bytes:,} at most"
            )
        with os.fdopen(os.dup(self._fd), "rb") as file:
            return file.read(most_bytes + 1)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file was written to or replaced since it was opened."""
        try:
            now = [os.fstat(self._fd), self.path.stat()]
        except OSError:
            raise self._changed() from None
        if any(_stamp(each) != _stamp(self._before) for each in now):
            raise self._changed()

    def _changed(self) -> CheckpointError:
        return CheckpointError(f"{self.path} changed while it was read; load it when nobody writes to it")

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _Tensors:
    """The tensors of a file by linear and side."""

    def __init__(self, path: Path, tensors: Mapping[str, RawTensor], linears: Mapping[str, WeightSource]) -> None:
        self._path, self._linears = path, linears
        self._sides: dict[str, dict[str, tuple[str, RawTensor]]] = {}  # linear -> A, B -> (name, tensor)
        self._named: dict[str, str] = {}  # linear -> as PEFT names it
        for name, raw in tensors.items():
            linear, side = self._place(name)
            self._sides.setdefault(linear, {})[side] = (name, raw)
        if not self._sides:
            raise CheckpointError(f"{path} holds no tensors")
        for sides in self._sides.values():
            if len(sides) < 2:
                raise CheckpointError(f"{path}: tensor {next(iter(sides.values()))[0]} has no partner")

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self._sides)

    def _place(self, name: str) -> tuple[str, str]:
        match = _TENSOR.fullmatch(name)
        module = match["module"] if match is not None else ""
        for prefix in PREFIXES:
            linear = module.removeprefix(prefix)
            if match is not None and linear != module and linear in self._linears:
                if self._named.setdefault(linear, module) != module:
                    raise CheckpointError(f"{self._path}: {module} and {self._named[linear]} are the same linear")
                return linear, match["side"]
        raise CheckpointError(
            f"{self._path}: tensor {name} is no lora_A or lora_B of a dense linear of a layer; those are "
            f"{', '.join(_kinds(self._linears))} of {self._num_layers()} layers"
        )

    def _num_layers(self) -> int:
        return len({linear.split(".")[1] for linear in self._linears})

    def check_targets(self, config: AdapterConfig, spec: DecoderSpec) -> None:
        """Raise CheckpointError unless the file has just the linears that the config targets."""
        linear, module = next(iter(self._named.items()))
        prefix = module.removesuffix(linear)
        unknown = config.unknown_targets([prefix + name for name in self._linears])
        if unknown:
            raise CheckpointError(
                f"target_modules names {', '.join(unknown)}; the dense linears of {spec.architecture}'s layers are "
                f"{', '.join(_kinds(self._linears))}, and only those can be adapted"
            )
        for name in self._linears:
            targeted, there = config.targets(prefix + name), name in self._sides
            if targeted is not None and targeted is not there:
                fault = "has tensors, and is not among" if there else "has no tensors, and is among"
                raise CheckpointError(f"{self._path}: {prefix + name} {fault} what {CONFIG_NAME} targets")

    def low_rank(self, linear: str, source: WeightSource, config: AdapterConfig) -> LowRank:
        sides, module = self._sides[linear], self._named[linear]
        rank = config.rank(module)
        num_rows, width = source.shape
        a = self._values(*sides["A"], (rank, width))
        b = self._values(*sides["B"], (num_rows, rank)) * np.float32(config.scale(module))
        if not _is_finite(b):
            raise CheckpointError(f"{self._path}: tensor {sides['B'][0]} has values that its scale makes infinite")
        return LowRank(source.row, a, b)

    def _values(self, name: str, raw: RawTensor, shape: tuple[int, int]) -> NDArray[np.float32]:
        if raw.shape != shape:
            raise CheckpointError(
                f"{self._path}: tensor {name} has shape {list(raw.shape)}, {CONFIG_NAME} and the model ask for "
                f"{list(shape)}"
            )
        values = float32_values(raw, name)
        if not _is_finite(values):
            raise CheckpointError(f"{self._path}: tensor {name} has values that are not finite")
        return values


def _is_finite(values: NDArray[np.float32]) -> bool:
    return bool((np.abs(values) <= _LARGEST).all())


def _kinds(linears: Mapping[str, WeightSource]) -> list[str]:
    """Last names of the linears: q_proj, k_proj ..."""
    return list(dict.fromkeys(name.rsplit(".", 1)[1] for name in linears))
