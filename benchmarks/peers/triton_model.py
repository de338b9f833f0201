"""Triton's Python backend: runs the `model.onnx` beside it, a batch's requests joined, run once and split."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as triton


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = len(os.sched_getaffinity(0))  # all cores, as maitred's has
        path = Path(__file__).with_name("model.onnx")
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._inputs = [each.name for each in self._session.get_inputs()]
        self._outputs = [each.name for each in self._session.get_outputs()]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        given = [[triton.get_input_tensor_by_name(each, n).as_numpy() for n in self._inputs] for each in requests]
        joined = {
            name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            for name, arrays in zip(self._inputs, zip(*given, strict=True), strict=True)
        }
        outputs = self._session.run(self._outputs, joined)
        ends = accumulate((len(arrays[0]) for arrays in given), initial=0)
        return [
            triton.InferenceResponse(
                [triton.Tensor(n, rows[begin:end]) for n, rows in zip(self._outputs, outputs, strict=True)]
            )
            for begin, end in pairwise(ends)
        ]
