"""Triton's classification extension: the largest values of an output as texts `score:index:label`."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np

from maitred.core.errors import InvalidRequest
from maitred.core.tensor_request import Tensor, TensorService
from maitred.tensor.arrays import array_of, texts_as_bytes
from maitred.tensor.repository_files import leads_out

MOST_LABEL_BYTES = 16 << 20


class Labels:
    """Labels by the line, from the file beside a model that its config names. It is read for each answer: it is small,
    rarely asked for, and may change with its model.
    """

    def __init__(self, repository: Path | None) -> None:
        self._repository = repository

    def classify(self, tensors: TensorService, model: str, output: Tensor, count: int) -> Tensor:
        """The `count` largest of an output of `model`. Raises InvalidRequest."""
        config = tensors.config(model)
        file = next((each.label_filename for each in config.output if each.name == output.name), "")
        labels = _labels(self._repository / model, file) if file and self._repository is not None else []
        return classified(output, count, labels, batched=config.max_batch_size > 0)


def _labels(folder: Path, name: str) -> list[bytes]:
    """Labels of a file; empty if it is gone or links out of the repository by now: what is read is what was checked."""
    path = folder / name
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as lines:
            found = os.fstat(lines.fileno())
            is_ours = not leads_out(path, folder) and os.path.samestat(found, os.stat(os.path.realpath(path)))
            return lines.read(MOST_LABEL_BYTES).splitlines() if is_ours and stat.S_ISREG(found.st_mode) else []
    except OSError:
        return []


def classified(output: Tensor, count: int, labels: list[bytes], *, batched: bool) -> Tensor:
    """The `count` largest of each row, largest first; of equals the first."""
    array = array_of(output)
    if array.dtype.hasobject or output.datatype == "BF16" or count < 1:
        raise InvalidRequest(f"output {output.name!r} of {output.datatype} cannot be classified into {count} classes")
    rows = array.reshape(len(array), -1) if batched and array.ndim else array.reshape(1, -1)
    count = min(count, rows.shape[1])
    largest = np.argsort(-rows.astype(float), axis=1, kind="stable")[:, :count]
    found = [_text(row, at, labels) for row, indices in zip(rows, largest.tolist(), strict=True) for at in indices]
    shape = (len(rows), count) if batched else (count,)
    return Tensor(output.name, "BYTES", shape, texts_as_bytes(found))


def _text(row: np.ndarray, index: int, labels: list[bytes]) -> bytes:
    value = row[index].item()
    told = f"{value:f}:{index}" if isinstance(value, float) else f"{int(value)}:{index}"
    return told.encode() + (b":" + labels[index] if index < len(labels) else b"")
