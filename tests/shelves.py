"""Versions for tests: the built-in model, and others of the same shape that write other tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from maitred.model.checkpoint import BUILTIN_FOLDER

EMBEDDING = "model.embed_tokens.weight"


def other_model(folder: Path, shift: int) -> Path:
    """The built-in model whose rows of the embedding stand `shift` places further on."""
    shutil.copytree(BUILTIN_FOLDER, folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    first = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:first])[EMBEDDING]
    begin, end = (first + offset for offset in header["data_offsets"])
    row = (end - begin) // header["shape"][0] * shift
    content[begin:end] = content[end - row : end] + content[begin : end - row]
    weights.write_bytes(content)
    return folder
