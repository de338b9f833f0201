"""Encoder of texts: what a ModelConfig says of one (`parameters` `task` = "embedding"), checked against its tensors.

The parameters that a config leaves out are filled from the files beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from maitred.core.errors import CheckpointError
from maitred.model.pooling import (
    MODULES,
    PROMPTS,
    Module,
    length_in,
    modules_of,
    pooling_kind,
    refuse_module,
    refuse_setting,
)
from maitred.tensor.config import ANY_MESSAGE, WILDCARD, DeclaredTensor, inputs_of, outputs_of, parameters_of
from maitred.text.folder import read_json

TASK = "embedding"
MAX_LENGTH = 512  # tokens of a text, where nothing says how many the model takes
# by a third or a half each, so that a batch that is padded to its bucket is padding to a seventh on average
BUCKETS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
IDS, MASK = "input_ids", "attention_mask"
_INPUTS = (IDS, MASK, "token_type_ids", "position_ids")
_INTEGERS = ("TYPE_INT64", "TYPE_INT32")
_FLOATS = ("TYPE_FP32", "TYPE_FP16", "TYPE_FP64")
_POOLED = "sentence_embedding"  # as sentence-transformers and Optimum call the output of a graph that pools itself


@dataclass(frozen=True, slots=True)
class Encoder:
    """How a text's tokens become a model's inputs, and its output a vector."""

    inputs: tuple[DeclaredTensor, ...]
    output: str
    width: int | None  # of its vectors, where the graph tells
    pooling: str  # one of `model.pooling.KINDS`; empty where the graph pools itself
    normalize: bool
    max_length: int  # tokens
    fixed_length: int | None  # that the graph takes, whatever the text has
    tokenizer: Path  # the folder of tokenizer.json
    vocab_size: int | None  # rows of the embedding, where files tell


def is_encoder(config: ANY_MESSAGE) -> bool:
    return "task" in config.parameters and config.parameters["task"].string_value == TASK


def encoder_of(config: ANY_MESSAGE) -> Encoder:
    """Return the encoder of a filled config. Raises CheckpointError where its tensors are not those of an encoder."""
    parameters, inputs = parameters_of(config), inputs_of(config)
    length = _length(config, inputs)
    fixed = None if length == WILDCARD else length
    written = parameters.get("max_length", "")
    max_length = int(written) if written.isdecimal() else MAX_LENGTH
    output, pooling = _output(config, parameters.get("pooling", ""))
    width = output.dims[-1]
    return Encoder(
        inputs=inputs,
        output=output.name,
        width=None if width == WILDCARD else width,
        pooling=pooling,
        normalize=parameters.get("normalize", "true") == "true",
        max_length=max_length if fixed is None else min(fixed, max_length),
        fixed_length=fixed,
        tokenizer=Path(parameters.get("tokenizer", "")),
        vocab_size=int(rows) if (rows := parameters.get("vocab_size", "")).isdecimal() else None,
    )


def _length(config: ANY_MESSAGE, inputs: tuple[DeclaredTensor, ...]) -> int:
    """The one length of all inputs. Raises CheckpointError."""
    if IDS not in (spec.name for spec in inputs):
        raise CheckpointError(f"task is {TASK!r}, and it has no input {IDS!r}")
    for spec in inputs:
        if spec.name not in _INPUTS:
            raise CheckpointError(f"task is {TASK!r}, and input {spec.name!r} is none of {', '.join(_INPUTS)}")
        if spec.data_type not in _INTEGERS or _rank(config, spec) != 2 or spec.reshape is not None:
            raise CheckpointError(f"task is {TASK!r}, and input {spec.name!r} is not of integers [rows, length]")
    lengths = {spec.dims[-1] for spec in inputs}
    if len(lengths) > 1:
        raise CheckpointError(f"task is {TASK!r}, and its inputs have unlike lengths: {sorted(lengths)}")
    return lengths.pop()


def _rank(config: ANY_MESSAGE, spec: DeclaredTensor) -> int:
    return len(spec.dims) + int(config.max_batch_size > 0)


def _output(config: ANY_MESSAGE, pooling: str) -> tuple[DeclaredTensor, str]:
    """The output and its pooling: the vectors of tokens, or those of texts where the graph pools itself."""
    floats = [spec for spec in outputs_of(config) if spec.data_type in _FLOATS and spec.dims]
    tokens = [spec for spec in floats if _rank(config, spec) == 3]
    texts = [spec for spec in floats if _rank(config, spec) == 2]
    pooled = next((spec for spec in texts if spec.name == _POOLED or not tokens), None)
    if not pooling and pooled is not None:
        return pooled, ""
    if not tokens:
        told = f"pooling is {pooling!r}, and" if pooling else f"task is {TASK!r}, and"
        raise CheckpointError(f"{told} no output has floats [rows, length, width]")
    return tokens[0], pooling or "mean"


def with_length_buckets(config: ANY_MESSAGE) -> ANY_MESSAGE:
    """Return the config: an encoder with batches that may be padded gets buckets, unless it says which or none."""
    specs = {spec.name: spec for spec in inputs_of(config)}
    padded = MASK in specs and specs[MASK].dims[-1:] == (WILDCARD,) and config.max_batch_size > 1
    if is_encoder(config) and padded and "length_buckets" not in config.parameters:
        most = encoder_of(config).max_length
        sizes = (*(size for size in BUCKETS if size < most), most)
        config.parameters["length_buckets"].string_value = ",".join(map(str, sizes))
    return config


# ---- a folder as sentence-transformers write it


TOKENIZER = "tokenizer.json"
ONNX = "onnx"  # the folder of model.onnx


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
    modules = modules_of(folder)
    place = next((each for each in _places(folder, version, modules) if (each / TOKENIZER).is_file()), None)
    if place is None:
        raise CheckpointError(f"task is {TASK!r}, and {folder} has no {TOKENIZER}, nor has {version}")
    told = {"task": TASK, **_of_modules(folder, modules), **_of_texts(place)}
    for key, value in told.items():
        if key not in config.parameters:
            config.parameters[key].string_value = value
    config.parameters["tokenizer"].string_value = str(place.absolute())
    return config


def _places(folder: Path, version: Path, modules: Sequence[Module]) -> Iterator[Path]:
    yield from (folder / module.path for module in modules if module.kind == "Transformer")
    yield version
    yield folder


def _of_modules(folder: Path, modules: Sequence[Module]) -> dict[str, str]:
    """Raises CheckpointError for what would change vectors, and is not built."""
    if not modules:
        return {}
    for module in modules:
        if module.kind not in ("Transformer", "Pooling", "Normalize"):
            refuse_module(folder, module)
    refuse_setting(folder / PROMPTS, "default_prompt_name")
    kinds = {module.kind: folder / module.path for module in modules}
    told = {"normalize": str("Normalize" in kinds).lower()}
    if "Transformer" in kinds:
        refuse_setting(kinds["Transformer"] / "sentence_bert_config.json", "do_lower_case")
    if "Pooling" in kinds:
        told["pooling"] = pooling_kind(kinds["Pooling"] / "config.json")
    return told


def _of_texts(place: Path) -> dict[str, str]:
    """How long they may be, and what pads them."""
    model, told = read_json(place / "config.json"), {}
    own = length_in(read_json(place / "sentence_bert_config.json"), "max_seq_length")
    limits = (
        length_in(read_json(place / "tokenizer_config.json"), "model_max_length"),
        length_in(model, "max_position_embeddings"),
    )
    known = [size for size in ((own,) if own else limits) if size]
    if known:
        told["max_length"] = str(min(known))
    for name, field in (("pad.input_ids", "pad_token_id"), ("vocab_size", "vocab_size")):
        if size := length_in(model, field):
            told[name] = str(size)
    return told
