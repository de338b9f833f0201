"""How a model answers with numbers in place of tokens: what becomes of its last states, and which texts it wants.

A folder of sentence-transformers says so in modules.json and the files that it names, a GGUF file by `pooling_type`, a
cross-encoder's config.json by its architecture. Of any other causal model it is its last token's state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from maitred.core.errors import CheckpointError
from maitred.core.request import PoolingFacts
from maitred.model.checkpoint import Checkpoint, read_json_if_there
from maitred.model.safetensors_file import SafetensorsFile
from maitred.model.spec import DecoderSpec
from maitred.model.weight_map import encoder_prefix

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
LABELS = "ForSequenceClassification"  # the end of an architecture's name
KINDS = ("mean", "cls", "last", "max", "mean_sqrt_len", "weightedmean")
OF_ONE_TOKEN = ("cls", "last")
_KIND = re.compile(r"(?:pooling_mode_)?(mean_sqrt_len|weightedmean|mean|cls|last|max)(?:_?tokens?)?")
_GGUF_TYPES = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "Sigmoid": "sigmoid"}
_MOST_LENGTH = 1 << 20  # tokenizer_config.json says 1e30 for unknown


class Module(msgspec.Struct):
    """A module of sentence-transformers, by its class and its folder."""

    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


def modules_of(folder: Path) -> list[Module]:
    """Return the modules in order; none for a folder not of sentence-transformers. Raises CheckpointError."""
    path = folder / MODULES
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[Module])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    for module in modules:
        if ".." in Path(module.path).parts or Path(module.path).is_absolute():
            raise CheckpointError(f"{path}: {module.path!r} leads out of the model's folder")
    return modules


def refuse_module(folder: Path, module: Module) -> None:
    """Raises CheckpointError."""
    raise CheckpointError(f"{folder / MODULES} has a module {module.type!r}, which is not supported")


def refuse_setting(path: Path, field: str) -> None:
    """Raise CheckpointError where the file sets a field that would change vectors, and is not built."""
    if value := read_json_if_there(path).get(field):
        raise CheckpointError(f"{path}: {field} is {value!r}, which is not supported")


def pooling_kind(path: Path) -> str:
    """One of `KINDS`, of a Pooling module's config.json. Raises CheckpointError."""
    config = read_json_if_there(path)
    flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    modes = flags or [str(config.get("pooling_mode"))]
    if len(modes) != 1 or (known := _KIND.fullmatch(modes[0])) is None:
        raise CheckpointError(
            f"{path}: pooling by {' and '.join(modes)} is not supported; {', '.join(KINDS)} alone are"
        )
    if config.get("include_prompt") is False:
        raise CheckpointError(f"{path}: include_prompt is false, which is not supported: prompts count as texts do")
    return known[1]


def pooling_of(checkpoint: Checkpoint, spec: DecoderSpec) -> PoolingFacts:
    """How the model pools. Raises CheckpointError for what would change its numbers, and is not built."""
    is_encoder = spec.encoder is not None
    plain = PoolingFacts(kind="mean" if is_encoder else "last", width=spec.hidden_size, is_encoder=is_encoder)
    if checkpoint.gguf is not None:
        found = _of_gguf(checkpoint, spec, plain)
    elif spec.architecture.endswith(LABELS):
        return _of_labels(checkpoint, plain)
    else:
        modules = modules_of(checkpoint.folder)
        found = _of_modules(checkpoint.folder, modules, plain) if modules else plain
    if found.kind == "cls" and not is_encoder:
        raise CheckpointError(f"{checkpoint.name} is a causal model, whose first token sees no other: pooling by cls")
    return found


def _of_modules(folder: Path, modules: Sequence[Module], plain: PoolingFacts) -> PoolingFacts:
    kinds = {module.kind: folder / module.path for module in modules}
    told: dict[str, Any] = {"normalize": "Normalize" in kinds, "is_declared": True}
    for module in modules:
        match module.kind:
            case "Transformer":
                settings = folder / module.path / "sentence_bert_config.json"
                refuse_setting(settings, "do_lower_case")
                told["max_tokens"] = length_in(read_json_if_there(settings), "max_seq_length")
            case "Pooling":
                told["kind"] = pooling_kind(folder / module.path / "config.json")
            case "Dense":
                told["width"] = _dense_config(folder / module.path)["out_features"]
            case "LogitScore":
                config = read_json_if_there(folder / module.path / "config.json")
                told["score_tokens"] = config.get("false_token_id"), config.get("true_token_id")
                if None in told["score_tokens"]:
                    raise CheckpointError(f"{folder / module.path}: scores need false_token_id and true_token_id")
            case "Normalize":
                pass
            case _:
                refuse_module(folder, module)
    config = read_json_if_there(folder / PROMPTS)
    prompts = {name: text for name, text in (config.get("prompts") or {}).items() if text}
    told |= {"prompts": prompts, "default_prompt": config.get("default_prompt_name") or ""}
    if told["default_prompt"] and told["default_prompt"] not in prompts:
        told["default_prompt"] = ""
    return msgspec.structs.replace(plain, **told)


def length_in(config: Mapping[str, Any], key: str) -> int:
    """Return a length that a file tells; 0 where it says nothing, or more than any model has."""
    value = config.get(key)
    return int(value) if isinstance(value, int | float) and 0 < value < _MOST_LENGTH else 0


def _of_labels(checkpoint: Checkpoint, plain: PoolingFacts) -> PoolingFacts:
    config = checkpoint.config
    labels = config.get("num_labels") or len(config.get("id2label") or ("0", "1"))
    told = (config.get("sentence_transformers") or {}).get("activation_fn") or config.get(
        "sbert_ce_default_activation_function"
    )
    name = str(told or "Sigmoid").rpartition(".")[2]
    return msgspec.structs.replace(
        plain,
        kind="cls" if plain.is_encoder else "last",
        task="classify",
        width=int(labels),
        normalize=False,
        is_declared=True,
        activation=_activation(name, checkpoint.folder / "config.json"),
    )


def _of_gguf(checkpoint: Checkpoint, spec: DecoderSpec, plain: PoolingFacts) -> PoolingFacts:
    assert checkpoint.gguf is not None
    metadata = checkpoint.gguf.metadata
    number = metadata.get(f"{metadata['general.architecture']}.pooling_type", 0)
    kind = _GGUF_TYPES.get(number, "")
    if kind == "rank":
        kind, width = "cls" if plain.is_encoder else "last", 1
        return msgspec.structs.replace(
            plain, kind=kind, width=width, task="classify", normalize=False, is_declared=True
        )
    return msgspec.structs.replace(plain, kind=kind or plain.kind, is_declared=bool(kind) or plain.is_encoder)


# ---- layers behind pooling


class PooledLayer(NamedTuple):
    """activation(weight @ vector + bias), in float32."""

    weight: NDArray[np.float32]  # [out, in]
    bias: NDArray[np.float32] | None
    activation: str


def pooled_layers(checkpoint: Checkpoint, facts: PoolingFacts) -> list[PooledLayer]:
    """Read the layers that stand behind pooling. Raises CheckpointError for those that are missing or do not fit."""
    if facts.task == "classify":
        return _label_layers(checkpoint)
    if checkpoint.gguf is not None:
        return []
    folder, found = checkpoint.folder, []
    for module in modules_of(folder):
        if module.kind == "Dense":
            place = folder / module.path
            config, weights = _dense_config(place), place / "model.safetensors"
            if not weights.is_file():
                raise CheckpointError(f"{place} has no model.safetensors; pickled weights are never read: convert them")
            file = SafetensorsFile(weights)
            weight = _values(file.tensor("linear.weight"), "linear.weight")
            bias = _values(file.tensor("linear.bias"), "linear.bias") if config["bias"] else None
            found.append(PooledLayer(weight, bias, config["activation"]))
    return found


def _dense_config(place: Path) -> dict[str, Any]:
    config = read_json_if_there(place / "config.json")
    if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise CheckpointError(f"{place}: a Dense module with a residual or with other inputs is not supported")
    name = str(config.get("activation_function") or "Identity").rpartition(".")[2]
    return {
        "out_features": int(config["out_features"]),
        "bias": config.get("bias", True),
        "activation": _activation(name, place / "config.json"),
    }


def _label_layers(checkpoint: Checkpoint) -> list[PooledLayer]:
    """A cross-encoder's: BERT's pooler and classifier, RoBERTa's two in one, DistilBERT's, a decoder's `score`."""
    names = checkpoint.tensor_names()
    if "cls.output.weight" in names and checkpoint.gguf is not None:  # a causal reranker's rows of yes and no
        metadata = checkpoint.gguf.metadata
        labels = metadata.get(f"{metadata['general.architecture']}.classifier.output_labels") or ["yes", "no"]
        rows = _values(checkpoint.tensor("cls.output.weight"), "cls.output.weight")
        return [PooledLayer(rows[labels.index("yes")][None] - rows[labels.index("no")][None], None, "identity")]
    ways = (
        ((f"{encoder_prefix(names)}pooler.dense", "tanh"), ("classifier", "identity")),
        (("classifier.dense", "tanh"), ("classifier.out_proj", "identity")),
        (("pre_classifier", "relu"), ("classifier", "identity")),
        (("score", "identity"),),
    )
    for way in ways:
        if all(f"{name}.weight" in names for name, _ in way):
            return [PooledLayer(*_linear(checkpoint, name, names), activation) for name, activation in way]
    raise CheckpointError(f"{checkpoint.folder} has no weights for labels: pooler and classifier, or score")


def _linear(checkpoint: Checkpoint, name: str, names: Sequence[str]) -> tuple[Any, Any]:
    weight, bias = f"{name}.weight", f"{name}.bias"
    found = _values(checkpoint.tensor(weight), weight)
    return found, _values(checkpoint.tensor(bias), bias) if bias in names else None


def _values(raw: Any, name: str) -> NDArray[np.float32]:
    from maitred.model.packed import float32_values  # noqa: PLC0415  numpy

    return float32_values(raw, name).copy()


def _activation(name: str, path: Path) -> str:
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"{path}: activation {name!r} is not supported; {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]
