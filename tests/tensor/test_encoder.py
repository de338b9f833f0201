"""Encoders of texts: what a config and the files beside it say of one, and its output as vectors."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the extra tensor brings it")

from onnx import TensorProto

from maitred.core.errors import CheckpointError, InvalidRequest, KernelError
from maitred.tensor.arrays import array_of, tensor_of
from maitred.tensor.check import check
from maitred.tensor.config import parameters_of
from maitred.tensor.encoder import inputs_for, vector_of
from maitred.tensor.encoder_config import encoder_of
from maitred.tensor.repository_files import read_model
from tests.tensor.encoders import (
    WIDTH,
    encoder_model,
    parameters,
    write_encoder,
    write_sentence_folder,
)
from tests.tensor.models import add_model


def encoder_in(folder):
    return encoder_of(read_model(folder).config)


def test_gaps_of_an_encoder_are_filled(tmp_path):
    folder = write_encoder(tmp_path, "texts")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 100}')
    (folder / "config.json").write_text('{"max_position_embeddings": 102, "pad_token_id": 1}')
    config = read_model(folder).config
    told = parameters_of(config)
    assert (told["max_length"], told["pad.input_ids"]) == ("100", "1")
    assert told["length_buckets"] == "8,12,16,24,32,48,64,96,100"
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (32, True)
    encoder = encoder_of(config)
    assert (encoder.output, encoder.width, encoder.pooling, encoder.normalize) == (
        "last_hidden_state", WIDTH, "mean", True
    )  # fmt: skip
    assert encoder.tokenizer == folder


def test_what_a_config_says_stands(tmp_path):
    written = parameters(length_buckets="16,32", pooling="cls", normalize="false", max_length="64")
    folder = write_encoder(tmp_path, "texts", config=f"{written} max_batch_size: 2")
    encoder, config = encoder_in(folder), read_model(folder).config
    assert (encoder.pooling, encoder.normalize, encoder.max_length) == ("cls", False, 64)
    assert (parameters_of(config)["length_buckets"], config.max_batch_size) == ("16,32", 2)


def test_files_of_a_version_go_before_those_beside_the_config(tmp_path):
    folder = write_encoder(tmp_path, "texts")
    (folder / "tokenizer.json").rename(folder / "1" / "tokenizer.json")
    (folder / "1" / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert (encoder_in(folder).tokenizer, encoder_in(folder).max_length) == (folder / "1", 512)


def test_a_graph_that_pools_is_taken_at_its_word_unless_pooling_is_asked(tmp_path):
    pools = encoder_of(read_model(write_encoder(tmp_path, "pools", model=encoder_model(pooled=True))).config)
    assert (pools.output, pools.pooling) == ("sentence_embedding", "")
    asked = write_encoder(tmp_path, "asked", config=parameters(pooling="last"), model=encoder_model(pooled=True))
    assert (encoder_in(asked).output, encoder_in(asked).pooling) == ("last_hidden_state", "last")


def test_what_sentence_transformers_saved_is_a_model(tmp_path):
    folder = write_sentence_folder(tmp_path, "mini")
    model = read_model(folder)
    assert [(each.number, each.path) for each in model.versions] == [(1, folder / "onnx" / "model.onnx")]
    encoder = encoder_of(model.config)
    assert (encoder.pooling, encoder.normalize, encoder.max_length) == ("mean", True, 20)
    assert parameters_of(model.config)["length_buckets"] == "8,12,16,20"
    (told,) = check(folder)
    assert (told.served, told.reason) == (True, "")
    assert [each.path for each in check(tmp_path)] == [str(folder)]


def test_what_has_no_graph_is_told_how_to_get_one(tmp_path):
    folder = write_sentence_folder(tmp_path, "mini")
    (folder / "onnx" / "model.onnx").unlink()
    (told,) = check(tmp_path)
    assert not told.served
    assert "no onnx/model.onnx: save it with" in told.reason


def test_modules_say_pooling_and_whether_vectors_are_normalised(tmp_path):
    cls = write_sentence_folder(tmp_path, "cls", pooling="pooling_mode_cls_token", modules=("Transformer", "Pooling"))
    assert (encoder_in(cls).pooling, encoder_in(cls).normalize) == ("cls", False)
    (cls / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken", "include_prompt": true}')
    assert encoder_in(cls).pooling == "last"
    (cls / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    values = tensor_of("last_hidden_state", np.float32([[[1, -2], [0, -1], [9, 9]]]), "TYPE_FP32")
    assert vector_of(encoder_in(cls), values, 2).tolist() == [1, -1], "the third is padding"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"modules": ("Transformer", "Pooling", "Dense")}, "models.Dense', which is not supported"),
        ({"pooling": "pooling_mode_first"}, "pooling by pooling_mode_first is not supported"),
    ],
)
def test_modules_that_are_not_built_are_refused_by_name(tmp_path, made, reason):
    with pytest.raises(CheckpointError, match=reason):
        read_model(write_sentence_folder(tmp_path, "mini", **made))


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is True"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name is 'query'"),
        ("modules.json", [{"type": "a.Transformer", "path": "../other"}], "leads out of the model's folder"),
        ("modules.json", {"type": "a.Transformer"}, "modules.json cannot be read"),
    ],
)
def test_settings_that_would_change_vectors_are_refused(tmp_path, file, content, reason):
    folder = write_sentence_folder(tmp_path, "mini")
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=reason):
        read_model(folder)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"model": add_model()}, "has no input 'input_ids'"),
        ({"model": encoder_model(inputs=("input_ids", "attention_mask", "task_id"))}, "input 'task_id' is none of"),
        ({"model": encoder_model(), "config": parameters(pooling="least")}, "'pooling' is 'least'"),
        ({"model": encoder_model(), "config": parameters(max_length="0")}, "'max_length' is '0'"),
    ],
)
def test_a_model_that_is_no_encoder_is_refused(tmp_path, made, reason):
    with pytest.raises(CheckpointError, match=reason):
        read_model(write_encoder(tmp_path, "texts", **made))


def test_an_encoder_without_a_tokenizer_is_refused(tmp_path):
    folder = write_encoder(tmp_path, "texts")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        read_model(folder)


def test_a_graph_of_one_length_gets_all_texts_at_it(tmp_path):
    model = encoder_model(kind=TensorProto.INT32, length=16, inputs=("input_ids", "attention_mask", "position_ids"))
    config = read_model(write_encoder(tmp_path, "fixed", model=model)).config
    assert "length_buckets" not in parameters_of(config)
    encoder = encoder_of(config)
    assert encoder.max_length == 16
    ids, mask, positions = (array_of(tensor) for tensor in inputs_for(encoder, [5, 6, 7]))
    assert (ids.dtype, ids.shape) == (np.int32, (1, 16))
    assert ids[0, :4].tolist() == [5, 6, 7, 0]
    assert mask.sum() == 3
    assert positions[0, :4].tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(("pooling", "expected"), [("mean", [2.0, 1.0]), ("cls", [1.0, 0.0]), ("last", [3.0, 2.0])])
def test_pooling_is_of_the_texts_own_tokens(tmp_path, pooling, expected):
    written = parameters(pooling=pooling, normalize="false")
    encoder = encoder_in(write_encoder(tmp_path, "texts", config=written))
    rows = np.float32([[[1, 0], [3, 2], [9, 9]]])
    output = tensor_of("last_hidden_state", rows, "TYPE_FP32")
    assert vector_of(encoder, output, 2).tolist() == expected


def test_fewer_dimensions_have_length_one_again(tmp_path):
    encoder = encoder_in(write_encoder(tmp_path, "texts"))
    output = tensor_of("last_hidden_state", np.float16([[[3, 4, 12]]]), "TYPE_FP16")
    np.testing.assert_allclose(vector_of(encoder, output, 1, 2), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(vector_of(encoder, output, 1), np.float32([3, 4, 12]) / 13, rtol=1e-6)
    with pytest.raises(InvalidRequest, match="dimensions is 4; it must be at least 1, and at most 3"):
        vector_of(encoder, output, 1, 4)
    nothing = tensor_of("last_hidden_state", np.zeros((1, 1, 3), np.float32), "TYPE_FP32")
    assert vector_of(encoder, nothing, 1).tolist() == [0, 0, 0]
    with pytest.raises(KernelError, match="has shape"):
        vector_of(encoder, tensor_of("last_hidden_state", np.zeros((1, 3), np.float32), "TYPE_FP32"), 1)
