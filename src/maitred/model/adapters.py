"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) as PEFT 0.21 saves them: a folder -> matrices for a model's linears.

Safetensors only. Contents that would change the model's answers and are not computed here are refused by name, and so
is any key that `adapter_config.json` has and this version does not know. Files are read whole and checked whole before
anything is made of them, so a concurrent writer can harm this one load alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import CheckpointError
from maitred.model.adapter_config import AdapterConfig, parse_config
from maitred.model.checkpoint import PICKLE_SUFFIXES, RawTensor
from maitred.model.packed import float32_values
from maitred.model.safetensors_file import parse_safetensors
from maitred.model.spec import DecoderSpec
from maitred.model.weight_map import PREFIXES, WeightSource, linear_sources

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
