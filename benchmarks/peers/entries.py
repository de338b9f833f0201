"""The contenders of `cpu_peers.py`: in which environment each lives, its models, how it is served, what it is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.http_load import LLAMA_SERVER, USAGE, Dialect
from peers.setup import why_not
from peers.shapes import GGUF_SHAPES, SHAPES

MAX_CONTEXT, MAX_SEQUENCES = 4096, 32


@dataclass(frozen=True)
class Server:
    """A server's command but for its port (appended) and for what depends on the load (`slots`)."""

    command: tuple[str, ...]
    dialect: Dialect = USAGE
    ready: str = "/health"  # answers 200 once the model is loaded
    slots: Callable[[int, int], tuple[str, ...]] = lambda clients, context: ()  # flags for so many and so long requests


@dataclass(frozen=True)
class Entry:
    """A contender: which module of `peers`, in which environment, with what."""

    name: str
    module: str | None  # None: it is a server alone, and every cell is asked over HTTP
    python: Path
    options: dict[str, Any]
    weights: str  # bf16, int8 or int4: what kind it competes in where kinds are compared
    peer: str | None = None  # as `setup.py` calls it; None is maitred
    server: Server | None = None  # without one its closed loop runs in process
    sizes: tuple[str, ...] = ()  # what it is told of a cell when it is loaded: sequences, context, chunk
    floor: tuple[str, str] | None = None  # maitred's weights and KV, as its roofline calls them
    cache: Path | None = None  # of packed weights, emptied before the first of two starts

    @property
    def ours(self) -> bool:
        return self.peer is None


def entries(work: Path, model: str) -> list[Entry]:
    """All, whether set up or not."""
    ours = _maitred(work, model) if model in SHAPES else []
    return [*ours, *_openvino(work, model)] if ours else _served_gguf(work, model)


def gguf_file(work: Path, model: str) -> Path:
    """The file that is meant where `model` is not a shape: one of random weights, or a path."""
    return work / f"{model}.gguf" if model in GGUF_SHAPES else Path(model).resolve()


def missing(entry: Entry, work: Path) -> str | None:
    """Why the contender cannot take part; None if it can."""
    for needed in (entry.python, Path(entry.options["model"])):
        if not needed.exists():
            reason = why_not(work, entry.peer or "maitred")
            return reason.read_text().strip() if reason.exists() else f"{needed} is missing: --setup makes it"
    return None


def _maitred(work: Path, model: str) -> list[Entry]:
    kinds = (
        ("maitred-bf16", "bfloat16", "bfloat16"),
        ("maitred-int8", "int8", "bfloat16"),
        ("maitred-int8-kv8", "int8", "int8"),
        ("maitred-int4", "int4", "bfloat16"),
        ("maitred-int4-kv8", "int4", "int8"),
    )
    return [_our_entry(name, str(work / model), dtype, kv) for name, dtype, kv in kinds]


def _our_entry(name: str, model: str, dtype: str, kv: str) -> Entry:
    serve = (sys.executable, "-m", "maitred.cli.main", "serve", model, "--dtype", dtype, "--kv-dtype", kv)
    limits = ("--max-model-len", str(MAX_CONTEXT), "--max-num-seqs", str(MAX_SEQUENCES))
    command = (*serve, *limits, "--no-enable-prefix-caching", "--served-model-name", "bench")
    options = {"model": model, "dtype": dtype, "kv_dtype": kv}
    weights = "bf16" if dtype == "bfloat16" else dtype
    return Entry(
        name,
        "maitred_engine",
        Path(sys.executable),
        options,
        weights,
        server=Server(command, ready="/ready"),
        sizes=("chunk",),
        floor=(dtype, kv),
    )


def _openvino(work: Path, model: str) -> list[Entry]:
    """Its KV cache is u8 unless told otherwise, as its property KV_CACHE_PRECISION says."""
    python = work / "venv-openvino/bin/python"
    return [
        Entry(
            f"openvino-{weights}",
            "openvino_pipeline",
            python,
            {"model": str(work / f"openvino-{model}-{folder}"), "precision": precision},
            weights,
            "openvino",
        )
        for weights, folder, precision in (("bf16", "fp16", "bf16"), ("int8", "int8", None), ("int4", "int4", None))
    ]


def _llama_slots(clients: int, context: int) -> tuple[str, ...]:
    return "--parallel", str(clients), "--ctx-size", str(clients * context)


def _served_gguf(work: Path, model: str) -> list[Entry]:
    """One GGUF file, maitred's server and llama.cpp's, without drafts."""
    file, cache = gguf_file(work, model), work / "weight-cache"
    serve = (sys.executable, "-m", "maitred.cli.main", "serve", str(file), "--served-model-name", "bench")
    flags = ("--speculative", "off", "--no-enable-prefix-caching", "--weight-cache", str(cache))
    ours = Server(
        (*serve, *flags),
        ready="/ready",
        slots=lambda clients, context: ("--max-num-seqs", str(clients), "--max-model-len", str(context)),
    )
    python = work / "venv-xllamacpp/bin/python"
    command = (str(python), "-m", "peers.xllamacpp_server", "--model", str(file))
    theirs = Server(command, LLAMA_SERVER, slots=_llama_slots)
    options = {"model": str(file)}
    return [
        Entry(
            "maitred", None, Path(sys.executable), options, "gguf", None, ours, floor=("gguf", "bfloat16"), cache=cache
        ),
        Entry("xllamacpp", None, python, options, "gguf", "xllamacpp", theirs),
    ]
