"""Encoders of texts for tests: small graphs that a few lines of numpy say again, and their tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from onnx import TensorProto, numpy_helper, save
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.tensor.models import helper, model_of, write_model

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{at}" for at in range(60)))
WIDTH = 6
TABLE = np.random.default_rng(7).normal(size=(len(WORDS), WIDTH)).astype(np.float32)
TASK = 'parameters { key: "task" value { string_value: "embedding" } }'


def parameters(**values):
    """config.pbtxt of an encoder with these too; `__` stands for a dot."""
    more = (f'parameters {{ key: "{key.replace("__", ".")}" value {{ string_value: "{value}" }} }}'
            for key, value in values.items())  # fmt: skip
    return "\n".join([TASK, *more])


def encoder_model(*, inputs=("input_ids", "attention_mask"), kind=TensorProto.INT64, length="length", pooled=False):
    """A token's vector and half the mean of its text's, so that tokens hear of each other and of no padding."""
    given = [helper.make_tensor_value_info(name, kind, ("rows", length)) for name in inputs]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["tokens"]),
        helper.make_node("Cast", ["attention_mask"], ["seen"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["seen", "last"], ["mask"]),
        helper.make_node("Mul", ["tokens", "mask"], ["heard"]),
        helper.make_node("ReduceSum", ["heard", "second"], ["sum"], keepdims=1),
        helper.make_node("ReduceSum", ["mask", "second"], ["count"], keepdims=1),
        helper.make_node("Div", ["sum", "count"], ["mean"]),
        helper.make_node("Mul", ["mean", "half"], ["context"]),
        helper.make_node("Add", ["tokens", "context"], ["last_hidden_state"]),
    ]
    outputs = [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ("rows", length, WIDTH))]
    if pooled:
        nodes.append(helper.make_node("Squeeze", ["mean", "second"], ["sentence_embedding"]))
        outputs.append(helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ("rows", WIDTH)))
    values = {"table": TABLE, "last": np.array([2]), "second": np.array([1]), "half": np.float32([0.5])}
    weights = [numpy_helper.from_array(value, name) for name, value in values.items()]
    return model_of(helper.make_graph(nodes, "encoder", given, outputs, initializer=weights))


def ids_of(text):
    return [2, *(WORDS.index(word) if word in WORDS else 1 for word in text.split()), 3]


def alone(ids, pooling="mean", *, normalize=True, num_dimensions=WIDTH):
    """The vector by numpy alone."""
    tokens = TABLE[ids].astype(np.float64)
    hidden = tokens + 0.5 * tokens.mean(axis=0)
    vector = {"mean": hidden.mean(axis=0), "cls": hidden[0], "last": hidden[-1]}[pooling][:num_dimensions]
    return vector / np.linalg.norm(vector) if normalize else vector


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.enable_truncation(8)  # which is not heeded
    tokenizer.save(str(folder / "tokenizer.json"))


def write_encoder(repository: Path, name: str, *, config: str = TASK, model=None) -> Path:
    folder = write_model(repository, name, config=config, model=model or encoder_model())
    write_tokenizer(folder)
    return folder


def write_sentence_folder(
    repository: Path, name: str, *, pooling="pooling_mode_mean_tokens", modules=("Transformer", "Pooling", "Normalize")
) -> Path:
    """As sentence-transformers saves one, with its graph in ONNX."""
    folder = repository / name
    (folder / "onnx").mkdir(parents=True)
    save(encoder_model(inputs=("input_ids", "attention_mask", "token_type_ids")), folder / "onnx" / "model.onnx")
    write_tokenizer(folder)
    listed = []
    for at, kind in enumerate(modules):
        path = "" if kind == "Transformer" else f"{at}_{kind}"
        (folder / path).mkdir(exist_ok=True)
        listed.append({"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(listed))
    flags = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, pooling: True}
    if "Pooling" in modules:
        (folder / f"{modules.index('Pooling')}_Pooling" / "config.json").write_text(json.dumps(flags))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": false}')
    (folder / "config.json").write_text('{"max_position_embeddings": 512, "pad_token_id": 1}')
    return folder
