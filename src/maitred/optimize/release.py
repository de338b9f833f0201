"""Publishing: a model becomes the next version of a shelf, with its golden tokens, its sums and its signature.

All is made in a hidden folder of the shelf and appears by one rename; `current` moves last. What a kill leaves is
removed by the next call.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec

from maitred.config import ModelConfig
from maitred.core.errors import CheckpointError, ConfigError
from maitred.engine.llm import LLM
from maitred.engine.releases import GREEDY, made_by
from maitred.model.checkpoint import IGNORE, local_path, open_checkpoint
from maitred.model.shelf import (
    CURRENT,
    RELEASE,
    SIGNATURE,
    SUMS,
    GoldenTokens,
    ModelRelease,
    Shelf,
    sha256_of,
    sign,
    version_of,
)
from maitred.optimize.job import told_if_full
from maitred.storage.files import locked

REPORT = "report.json"  # of the tool that made the model
GOLDEN_TEXTS = (
    "The capital of France is", "Once upon a time there was a", "Water boils at a temperature of",
    "def fibonacci(n):\n    ", "1, 2, 3, 5, 8,", "Dear Sir or Madam,\n", "Der braune Fuchs", "Q: What is 2 + 2?\nA:",
    '{"name": "soup", "price":', "The three laws of motion say that", "SELECT name FROM guests WHERE",
    "La réponse est", "In the beginning", "To be or not to be, that is", "<p>Hello, ", "A B C D E F G",
)  # fmt: skip


def publish(model: str, shelf: Shelf, key: Path | None = None) -> ModelRelease:
    """The next version, in service for servers that follow the shelf; signed with `key`, if there is one.

    Raises CheckpointError for what is no model, and ConfigError.
    """
    files = _files_of(model)
    report = _report(files)
    with _alone(shelf.root), told_if_full(shelf.root):
        for left in shelf.root.glob(".*.part"):
            shutil.rmtree(left)
        version = max(shelf.versions(), default=0) + 1
        part = shelf.root / f".{version}.part"
        part.mkdir()
        try:
            for file in files:
                shutil.copyfile(file, part / file.name)
            maker, golden = golden_tokens(str(part))
            release = ModelRelease(version, Path(model).resolve().name, int(time.time()), maker, golden, **report)
            (part / RELEASE).write_bytes(msgspec.json.encode(release))
            (part / SUMS).write_text("".join(f"{sha256_of(file)}  {file.name}\n" for file in sorted(part.iterdir())))
            if key is not None:
                sign(part / SUMS, key)
            os.sync()  # its bytes are on the disk before its name
            part.rename(shelf.folder(version))
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        shelf.use(version)
    return release


def golden_tokens(folder: str) -> tuple[str, tuple[GoldenTokens, ...]]:
    """Greedy tokens after GOLDEN_TEXTS, by the executor that serves, and what made them. Raises CheckpointError."""
    with LLM(folder, executor="native", speculative="off", max_num_seqs=len(GOLDEN_TEXTS)) as llm:
        outputs = llm.generate(list(GOLDEN_TEXTS), GREEDY)
        tokens = ((tuple(each.prompt_token_ids), tuple(each.outputs[0].token_ids)) for each in outputs)
        golden = (GoldenTokens(text, *both) for text, both in zip(GOLDEN_TEXTS, tokens, strict=True))
        return made_by(llm.model, ModelConfig()), tuple(golden)


def _files_of(model: str) -> list[Path]:
    """A folder's own files, without hidden ones, pickles and second copies; of a GGUF file, all parts."""
    path = local_path(model)
    if path is None:
        raise CheckpointError(f"there is no folder {model}; publish a model folder or a GGUF file")
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(f"{model} is an adapter; merge it into its model first, and publish that")
    with open_checkpoint(model) as checkpoint:  # refused here rather than once it is copied
        if checkpoint.gguf is not None:
            return [checkpoint.folder / stamp.name for stamp in checkpoint.stamps]
    dropped = (".*", SUMS, SIGNATURE, RELEASE, *IGNORE)
    return [each for each in path.iterdir() if each.is_file() and not any(fnmatch(each.name, p) for p in dropped)]


def _report(files: Sequence[Path]) -> dict[str, Any]:
    """Fields of a release that the tool's report tells. Raises ConfigError where the gate said no."""
    report = next((file for file in files if file.name == REPORT), None)
    if report is None:
        return {}
    told = json.loads(report.read_text())
    if not told.get("passed", True):
        raise ConfigError(f"{report} says that the gate refused this model; it is not published")
    return {name: told.pop(name) for name in ("tool", "parent", "flags", "data") if name in told} | {"figures": told}


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Raises ConfigError while another process publishes there, and for a folder that is something else."""
    is_new = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    others = [each.name for each in root.iterdir() if version_of(each.name) is None and not each.name.startswith(".")]
    if set(others) - {CURRENT}:
        raise ConfigError(f"{root} is no shelf: it holds {', '.join(sorted(others)[:3])}; name a folder of its own")
    with locked(root / ".lock", f"another process publishes to {root}; try again when it is done"):
        try:
            yield
        except BaseException:
            if is_new:
                shutil.rmtree(root)
            raise
