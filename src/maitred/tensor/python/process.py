"""The process of one instance of a Python model; arguments are numbers of files: socket, inputs, outputs, engine."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from maitred.core.errors import InvalidRequest
from maitred.executor.parent import end_with
from maitred.tensor.python import frames, triton


def main(arguments: list[str]) -> int:
    """Loads, then runs batches until the engine is gone or wants no more; then the model is finalized."""
    number, inputs, outputs, engine = map(int, arguments)
    end_with(engine, grace_s=frames.FINALIZE_S)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=number) as connection:
        model = _told(connection, _load)
        if model is None:
            return 1
        with suppress(EOFError, OSError):
            _run(connection, model.predict, frames.SharedArrays(inputs), frames.SharedArrays(outputs))
    model.finalize()
    return 0


def _told(connection: socket.socket, load: Callable[[frames.LoadInstance], frames.Model]) -> frames.Model | None:
    asked = frames.decode_command(frames.receive(connection))
    assert isinstance(asked, frames.LoadInstance)
    try:
        model = load(asked)
    except Exception as error:
        frames.send(connection, frames.InstanceFailed(_reason(error)))
        return None
    frames.send(connection, frames.InstanceReady(model.config))
    return model


def _run(
    connection: socket.socket, predict: frames.Predict, inputs: frames.SharedArrays, outputs: frames.SharedArrays
) -> None:
    while True:
        asked = frames.decode_command(frames.receive(connection))
        assert isinstance(asked, frames.Run)
        try:
            given = predict(inputs.get(asked.inputs, asked.num_bytes), asked.outputs)
            placed, num_bytes = outputs.put({name: _array(name, value) for name, value in given.items()})
        except Exception as error:
            traceback.print_exc()
            frames.send(connection, frames.InstanceFailed(_reason(error), isinstance(error, InvalidRequest)))
        else:
            frames.send(connection, frames.InstanceRan(placed, num_bytes))


def _array(name: str, value: Any) -> np.ndarray:
    """Texts, of whatever kind, as objects of bytes."""
    array = np.asarray(value)
    if array.dtype.kind not in "OSU":
        return array
    texts = np.empty(array.shape, object)
    texts.reshape(-1)[:] = [_text(name, each) for each in array.reshape(-1).tolist()]
    return texts


def _text(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes):
        raise TypeError(f"output {name!r} has an element of {type(value).__name__}; texts are bytes or str")
    return value


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]


def _load(asked: frames.LoadInstance) -> frames.Model:
    if asked.file:
        return triton.load(asked, _module(asked))
    found = frames.installed(asked.entry_point)
    if found is None:
        raise LookupError(frames.not_installed(asked.entry_point))
    model = found.load()()
    model.load(asked.folder, asked.parameters)
    return frames.Model(lambda inputs, wanted: model.predict(inputs))


def _module(asked: frames.LoadInstance) -> Any:
    """Import the module; its own folder can be imported from, as Triton has it."""
    sys.path.insert(0, os.path.dirname(asked.file))
    spec = importlib.util.spec_from_file_location("model", asked.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["model"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
