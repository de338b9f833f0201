"""Int8 copies of ONNX models: made at load by ONNX Runtime, kept on disk, and served only if they answer alike.

Parameters of a config: `precision` (`int8-dynamic` or `int8-static`) and `min_cosine`. The folder `calibration` beside
the versions holds .npz files, each a batch by the names of inputs; static quantisation takes its ranges from them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version as version_of_package
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from maitred.core.errors import CheckpointError
from maitred.tensor.config import ANY_MESSAGE, inputs_of, parameters_of
from maitred.tensor.instance import NUMPY_TYPES, SessionSettings, one_line, open_session
from maitred.tensor.repository_files import ModelFolder, ModelVersion

FLOAT, DYNAMIC, STATIC = "float", "int8-dynamic", "int8-static"
FOLDER = "calibration"
MIN_COSINE = 0.98  # of the outputs to those of the float model, where the config does not say
ROWS = 8  # of a batch that is made up
LENGTH = 16  # of a dimension of any length in it
# Those whose integer kernels the CPU has, and which hold nearly all weights of what gains by it.
DYNAMIC_OPERATORS = ["MatMul", "Gemm", "Attention", "LSTM"]

Batch = Mapping[str, np.ndarray]


class Measured(msgspec.Struct, frozen=True):
    """Measure of the gate: the least cosine, and of which output."""

    output: str
    cosine: float


def served_file(model: ModelFolder, version: ModelVersion) -> Path:
    """The file to be opened: the version's own, or its int8 copy. Raises CheckpointError where that misses the gate."""
    parameters = parameters_of(model.config)
    precision = parameters.get("precision", FLOAT)
    if precision == FLOAT:
        return version.path
    batches = [*_calibration(model.folder / FOLDER, precision)]
    path = _cache_folder() / f"{_key(model, version, precision)}.onnx"
    measured = measured_error(path) or _make(version.path, path, precision, batches or [made_up(model.config)])
    wanted = float(parameters.get("min_cosine", MIN_COSINE))
    if measured.cosine < wanted:
        raise CheckpointError(
            f"precision {precision}: output {measured.output!r} has cosine {measured.cosine:.4f} to that of the float "
            f"model, and min_cosine is {wanted:g}"
        )
    return path


def measured_error(path: Path) -> Measured | None:
    """Read the gate's measure of an int8 copy; None where there is none."""
    try:
        return msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Measured)
    except (OSError, msgspec.DecodeError):
        return None


def _cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "maitred" / "quantized"


def _key(model: ModelFolder, version: ModelVersion, precision: str) -> str:
    """Return the key of the copy's sources: the model's bytes, its other files, the calibration, the runtime."""
    digest = sha256(f"2 {precision} {version_of_package('onnxruntime')}".encode())
    files = [*version.path.parent.rglob("*"), *(model.folder / FOLDER).glob("*.npz")]
    for path in sorted(path for path in files if path.is_file()):
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _calibration(folder: Path, precision: str) -> Iterator[Batch]:
    paths = sorted(folder.glob("*.npz"))
    if not paths and precision == STATIC:
        raise CheckpointError(f"precision {STATIC} needs batches to measure with: {folder}/*.npz, by names of inputs")
    for path in paths:
        try:
            with np.load(path) as arrays:
                yield dict(arrays)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from None


def made_up(config: ANY_MESSAGE) -> Batch:
    """The same at every start: normal numbers, and small whole ones, which may be places in a table."""
    numbers, rows = np.random.default_rng(0), (ROWS,) if config.max_batch_size > 0 else ()
    batch = {}
    for spec in inputs_of(config):
        kind, shape = NUMPY_TYPES[spec.data_type], (*rows, *(LENGTH if dim < 0 else dim for dim in spec.model_dims))
        if kind.hasobject:
            raise CheckpointError(f"input {spec.name!r} is of texts: give batches to compare with, {FOLDER}/*.npz")
        batch[spec.name] = (numbers.normal(size=shape) if kind.kind == "f" else numbers.integers(0, 2, shape)).astype(
            kind
        )
    return batch


def _make(source: Path, path: Path, precision: str, batches: Sequence[Batch]) -> Measured:
    """Quantise and measure. Both files are written beside their places and moved there, the figure last."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            copy = Path(folder, "model.onnx")
            _quantise(source, copy, precision, batches)
            measured = _measure(source, copy, batches)
            figure = Path(folder, "figure.json")
            figure.write_bytes(msgspec.json.encode(measured))
            copy.replace(path)
            figure.replace(path.with_suffix(".json"))
    except OSError as error:
        raise CheckpointError(f"precision {precision}: cannot write {path}: {error.strerror}") from None
    return measured


def _quantise(source: Path, copy: Path, precision: str, batches: Sequence[Batch]) -> None:
    try:
        from onnxruntime.quantization import quantize_dynamic, quantize_static  # noqa: PLC0415  it needs onnx
    except ImportError:
        raise CheckpointError(f"precision {precision} needs the package onnx: pip install onnx") from None
    try:
        if precision == DYNAMIC:
            quantize_dynamic(source, copy, op_types_to_quantize=DYNAMIC_OPERATORS, per_channel=True)
        else:
            quantize_static(source, copy, _Batches(batches), per_channel=True)
    except OSError:
        raise
    except Exception as error:  # the runtime's own have no root but this
        raise CheckpointError(f"precision {precision}: {source} cannot be quantised: {one_line(error)}") from None


class _Batches:
    """A CalibrationDataReader."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._left = iter(batches)

    def get_next(self) -> Batch | None:
        return next(self._left, None)

    def __iter__(self) -> Iterator[Batch]:
        return self._left


def _measure(source: Path, copy: Path, batches: Sequence[Batch]) -> Measured:
    """The least cosine of an output of floats, over all batches."""
    exact, rounded = (open_session(path, SessionSettings()) for path in (source, copy))
    names = [each.name for each in exact.get_outputs()]
    try:
        pairs = [(exact.run(names, dict(batch)), rounded.run(names, dict(batch))) for batch in batches]
    except Exception as error:  # the runtime's own have no root but this
        raise CheckpointError(f"the batches to compare with do not run: {one_line(error)}") from None
    cosines = {
        name: _cosine([exact[at] for exact, _ in pairs], [rounded[at] for _, rounded in pairs])
        for at, name in enumerate(names)
        if np.asarray(pairs[0][0][at]).dtype.kind == "f"
    }
    if not cosines:
        return Measured("", 1.0)
    worst = min(cosines, key=lambda name: cosines[name])
    return Measured(worst, cosines[worst])


def _cosine(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Return the cosine of everything after each other; NaN on one side counts as unlike."""
    a, b = (np.concatenate([np.ravel(each).astype(np.float64) for each in side]) for side in (one, other))
    if np.array_equal(a, b):
        return 1.0
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    found = float(a @ b) / lengths if lengths > 0 else 0.0
    return found if np.isfinite(found) else -1.0
