"""Encoder of texts: what a ModelConfig says of one (`parameters` `task` = "embedding"), checked against its tensors.

The parameters that a config leaves out are filled from the files beside it (`maitred.tensor.encoder_files`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from maitred.core.errors import CheckpointError
from maitred.tensor.config import ANY_MESSAGE, WILDCARD, TensorSpec, inputs_of, outputs_of, parameters_of

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

    inputs: tuple[TensorSpec, ...]
    output: str
    width: int | None  # of its vectors, where the graph tells
    pooling: str  # mean, cls, last; empty where the graph pools itself
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


def _length(config: ANY_MESSAGE, inputs: tuple[TensorSpec, ...]) -> int:
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


def _rank(config: ANY_MESSAGE, spec: TensorSpec) -> int:
    return len(spec.dims) + int(config.max_batch_size > 0)


def _output(config: ANY_MESSAGE, pooling: str) -> tuple[TensorSpec, str]:
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
