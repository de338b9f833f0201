"""An encoder's files: a folder of sentence-transformers as a model, and what files beside a config say of its texts.

Source: modules.json, 1_Pooling/config.json and sentence_bert_config.json as sentence-transformers 2 to 5 saves them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from maitred.core.errors import CheckpointError
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.encoder_config import TASK, is_encoder
from maitred.text.folder import read_json

MODULES = "modules.json"
TOKENIZER = "tokenizer.json"
ONNX = "onnx"  # the folder of model.onnx
MOST_LENGTH = 1 << 20  # tokenizer_config.json says 1e30 for unknown
_POOLING_FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
_POOLING_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


class _Module(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


def is_sentence_folder(folder: Path) -> bool:
    """Whether sentence-transformers saved it."""
    return (folder / MODULES).is_file()


def onnx_folder(folder: Path) -> Path:
    """Folder of the ONNX graph that sentence-transformers saved. Raises CheckpointError."""
    if not (folder / ONNX / "model.onnx").is_file():
        told = 'save it with SentenceTransformer(..., backend="onnx"), or with `optimum-cli export onnx`'
        raise CheckpointError(f"{folder} has {MODULES}, and no {ONNX}/model.onnx: {told}")
    return folder / ONNX


def with_encoder(config: ANY_MESSAGE, folder: Path, version: Path) -> ANY_MESSAGE:
    """The config itself; of an encoder with what its files say, where it says nothing. Raises CheckpointError.

    `version` is the folder of the version that texts are answered by: its files go before those beside the config.
    """
    if not is_encoder(config) and not is_sentence_folder(folder):
        return config
    modules = _modules(folder)
    place = next((each for each in _places(folder, version, modules) if (each / TOKENIZER).is_file()), None)
    if place is None:
        raise CheckpointError(f"task is {TASK!r}, and {folder} has no {TOKENIZER}, nor has {version}")
    told = {"task": TASK, **_of_modules(folder, modules), **_of_texts(place)}
    for key, value in told.items():
        if key not in config.parameters:
            config.parameters[key].string_value = value
    config.parameters["tokenizer"].string_value = str(place.absolute())
    return config


def _places(folder: Path, version: Path, modules: Sequence[_Module]) -> Iterator[Path]:
    yield from (folder / module.path for module in modules if module.kind == "Transformer")
    yield version
    yield folder


def _modules(folder: Path) -> list[_Module]:
    """Return the modules in order; none for a folder not of sentence-transformers."""
    path = folder / MODULES
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _of_modules(folder: Path, modules: Sequence[_Module]) -> dict[str, str]:
    """Raises CheckpointError for what would change vectors, and is not built."""
    if not modules:
        return {}
    for module in modules:
        if module.kind not in ("Transformer", "Pooling", "Normalize"):
            raise CheckpointError(f"{folder / MODULES} has a module {module.type!r}, which is not supported")
        if ".." in Path(module.path).parts or Path(module.path).is_absolute():
            raise CheckpointError(f"{folder / MODULES}: {module.path!r} leads out of the model's folder")
    _refuse(folder / "config_sentence_transformers.json", "default_prompt_name")
    kinds = {module.kind: folder / module.path for module in modules}
    told = {"normalize": str("Normalize" in kinds).lower()}
    if "Transformer" in kinds:
        _refuse(kinds["Transformer"] / "sentence_bert_config.json", "do_lower_case")
    if "Pooling" in kinds:
        told["pooling"] = _pooling(kinds["Pooling"] / "config.json")
    return told


def _refuse(path: Path, field: str) -> None:
    if value := read_json(path).get(field):
        raise CheckpointError(f"{path}: {field} is {value!r}, which is not supported")


def _pooling(path: Path) -> str:
    """Raises CheckpointError."""
    config = read_json(path)
    flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    known = _POOLING_FLAGS if flags else _POOLING_NAMES
    modes = flags or [str(config.get("pooling_mode"))]
    if len(modes) != 1 or modes[0] not in known:
        raise CheckpointError(f"{path}: pooling by {' and '.join(modes)} is not supported; mean, cls and last are")
    return known[modes[0]]


def _of_texts(place: Path) -> dict[str, str]:
    """How long they may be, and what pads them."""
    model, told = read_json(place / "config.json"), {}
    own = _size(read_json(place / "sentence_bert_config.json"), "max_seq_length")
    limits = (
        _size(read_json(place / "tokenizer_config.json"), "model_max_length"),
        _size(model, "max_position_embeddings"),
    )
    known = [size for size in ((own,) if own else limits) if size]
    if known:
        told["max_length"] = str(min(known))
    for name, field in (("pad.input_ids", "pad_token_id"), ("vocab_size", "vocab_size")):
        if size := _size(model, field):
            told[name] = str(size)
    return told


def _size(config: Mapping[str, Any], key: str) -> int:
    """0 where it says nothing, or more than any model has."""
    value = config.get(key)
    return int(value) if isinstance(value, int | float) and 0 < value < MOST_LENGTH else 0
