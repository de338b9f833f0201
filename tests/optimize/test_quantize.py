"""From a parent to a quantised folder or GGUF file that the native executor, transformers and gguf read alike."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import maitred.optimize.quantize as tool
from maitred.config.optimize import QuantizeConfig, ToolConfig
from maitred.core.errors import CheckpointError, ConfigError
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.packed import float32_values
from maitred.model.torch_decoder import TorchDecoder, load_torch_decoder
from maitred.optimize.calibrate import LINEARS, CalibratedLayer, attend_of, rotations_of
from maitred.optimize.job import JobReport, run_tool
from maitred.optimize.rounding import Form, Rounded, round_to_nearest
from maitred.optimize.scaling import fold
from maitred.optimize.write import save_compressed, save_decoder
from maitred.text.folder import read_chat_template
from maitred.text.tokenizer import Tokenizer
from tests.executor.torch_worlds import dense_logits, make_decoder, make_spec
from tests.model.checkpoints import load_reference, make_checkpoint
from tests.model.gguf_models import TOKEN_TYPES, TOKENS, random_tensors, write_gguf
from training.world import training_chat

torch.set_num_threads(1)
SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "num_key_value_heads": 2}


def tiny(folder: Path, **overrides: Any) -> Path:
    return make_checkpoint("llama_tied", folder, **{**SIZES, **overrides})


def quantized(
    parent: Path, folder: Path, *, max_kl: float = 100.0, steps: int | None = None, **asked: Any
) -> JobReport:
    """Quantise `parent` to folder/out, on random documents, by a gate that asks this KL alone."""
    data, gate = folder / "data.jsonl", folder / "gate.yaml"
    draw = np.random.default_rng(0)
    lines = [{"token_ids": draw.integers(5, 90, 24).tolist()} for _ in range(240)]
    data.write_text("\n".join(map(json.dumps, lines)))
    gate.write_text(f"max_kl: {max_kl}\nmax_flips: 1\nmax_perplexity_ratio: 100\n")
    config = ToolConfig(model=str(parent), out=str(folder / "out"), data=str(data), gate=str(gate), steps=steps)
    own = QuantizeConfig(**{"calibration_tokens": 1024, **asked})
    return run_tool(tool.TOOL, config, own, lambda done, total, words: None)


def decoder_of(model: Path) -> TorchDecoder:
    with open_checkpoint(str(model)) as checkpoint:
        return load_torch_decoder(spec_from_config(checkpoint.config), checkpoint)


def kl(parent: torch.Tensor, child: torch.Tensor) -> float:
    p, q = parent.log_softmax(-1), child.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"scheme": "int4", "method": "awq"}, "Q4_0"),
        ({"scheme": "int8", "method": "smoothquant"}, "Q8_0"),
    ],
)
def test_a_quantised_folder_is_served_from_its_integers(asked: dict[str, Any], kind: str, tmp_path: Path):
    parent = tiny(tmp_path / "parent")
    report = quantized(parent, tmp_path, **asked)
    assert report.passed
    told = report.fields["quantize"]
    assert len(told["linears"]) == 12
    assert told["linear_bytes"] == sum(e["bytes"] for e in told["linears"].values())
    assert all(0 < each["error"] < 0.1 and each["kl_alone"] >= 0 for each in told["linears"].values())
    with open_checkpoint(str(tmp_path / "out")) as child:
        assert {child.dtype_of(name) for name in child.tensor_names() if "proj" in name} == {kind}
    tokens = [3, 7, 40, 12, 80, 33, 9]
    exact, ours = (dense_logits(decoder_of(folder), tokens) for folder in (parent, tmp_path / "out"))
    assert 0 < kl(exact, ours) < 0.5
    assert 0 < report.fields["figures"]["kl"]["value"] < 0.5  # as the native executor serves it


def test_transformers_loads_the_folder_with_the_same_values(tmp_path: Path):
    pytest.importorskip("compressed_tensors")
    parent, out, forms = tiny(tmp_path / "parent"), tmp_path / "out", (Form(4, 32, True), Form(8, None, True))
    out.mkdir()
    layers = decoder_of(parent).layers

    def layer_of(index: int) -> dict[str, Rounded | torch.Tensor]:
        form = forms[index % len(forms)]
        return {
            f"{name}.weight": round_to_nearest(form, layers[index].get_parameter(f"{name}.weight")) for name in LINEARS
        }

    with open_checkpoint(str(parent)) as checkpoint:
        save_compressed(checkpoint, out, layer_of)
    tokens = [3, 7, 40, 12, 80, 33, 9]
    theirs = load_reference(out)(torch.tensor([tokens])).logits[0].detach()
    exact, ours = (dense_logits(decoder_of(folder), tokens) for folder in (parent, out))
    assert kl(exact, ours) > 0
    assert kl(exact, theirs) == pytest.approx(kl(exact, ours), rel=0.02)


def test_mixed_promotes_linears_by_kl_for_a_byte_until_the_gate_passes(tmp_path: Path):
    parent = tiny(tmp_path / "parent")
    int4 = quantized(parent, tmp_path, scheme="int4", max_kl=0.0)
    assert not int4.passed
    limit = int4.fields["figures"]["kl"]["value"] / 2
    mixed = quantized(parent, tmp_path, scheme="mixed", max_kl=limit)
    assert mixed.passed
    assert mixed.fields["figures"]["kl"]["high"] <= limit
    linears = mixed.fields["quantize"]["linears"].values()
    assert {each["bits"] for each in linears} == {4, 8}
    best = max(linears, key=lambda each: each["kl_alone"] / each["bytes"])
    assert best["bits"] == 8 or best["kl_alone"] > 0


def test_a_job_that_ended_goes_on_with_the_layer_that_it_was_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parent, seen, whole = tiny(tmp_path / "parent"), list[int](), tool.quantize_layer

    def ends(layer: Any, *rest: Any) -> Any:
        seen.append(layer.index)
        if seen == [0, 1]:
            raise KeyboardInterrupt
        return whole(layer, *rest)

    monkeypatch.setattr(tool, "quantize_layer", ends)
    with pytest.raises(KeyboardInterrupt):
        quantized(parent, tmp_path)
    assert quantized(parent, tmp_path).passed
    assert seen == [0, 1, 1, 2]
    (tmp_path / "again").mkdir()
    quantized(parent, tmp_path / "again")
    files = [folder / "out" / "model.safetensors" for folder in (tmp_path, tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("asked", "kind"), [({"symmetric": False}, "Q4_1"), ({"method": "rtn"}, "Q4_0"), ({"scheme": "int8"}, "Q8_0")]
)
def test_a_gguf_parent_becomes_a_gguf_file_of_equal_values(asked: dict[str, Any], kind: str, tmp_path: Path):
    config = json.loads((tiny(tmp_path / "for its config") / "config.json").read_text()) | {"vocab_size": 96}
    tensors = {name: values * 0.1 if values.ndim == 2 else values for name, values in random_tensors(config).items()}
    parent = write_gguf(tmp_path / "parent.gguf", "llama", config, tensors, **{
        "tokenizer__ggml__pre": "gpt-2", "tokenizer__ggml__merges": ["a b"],
        "tokenizer__ggml__tokens": [*TOKENS, "ab"], "tokenizer__ggml__token_type": [*TOKEN_TYPES, 1],
    })  # fmt: skip
    assert quantized(parent, tmp_path, to="gguf", **asked).passed
    (tmp_path / "folder").mkdir()
    quantized(parent, tmp_path / "folder", **asked, **({"to": "gguf"} if kind == "Q4_1" else {}))
    read = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    found = {tensor.name: tensor for tensor in read.tensors}
    with (
        open_checkpoint(str(tmp_path / "out")) as child,
        open_checkpoint(str(tmp_path / "folder" / "out")) as folder,
    ):
        assert child.dtype_of("model.layers.1.self_attn.q_proj.weight") == kind
        assert child.dtype_of("model.embed_tokens.weight") == "Q8_0"
        for name in child.tensor_names():
            ours = float32_values(child.tensor(name), name)
            own = found[child.own_name(name)]
            theirs = gguf.dequantize(own.data, own.tensor_type)
            if "q_proj" not in name and "k_proj" not in name:  # whose rows lie in pairs
                np.testing.assert_array_equal(ours, theirs.reshape(ours.shape))
            if "proj" in name:
                np.testing.assert_array_equal(ours, float32_values(folder.tensor(name), name))


def with_tokenizer(folder: Path, **changes: Any) -> Path:
    """GPT-2's kind, with a pair that is merged and a chat template."""
    described = json.loads((folder / "tokenizer.json").read_text())
    described["pre_tokenizer"] |= {"use_regex": True, **changes}
    described["model"]["vocab"]["ab"], described["model"]["merges"] = 256, ["a b"]
    described["added_tokens"] = [{**token, "id": token["id"] + 1} for token in described["added_tokens"]]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize(("family", "symmetric"), [("llama_tied", False), ("qwen3", True)])
def test_a_folder_becomes_a_gguf_file_with_its_tokenizer(family: str, symmetric: bool, tmp_path: Path):
    parent = with_tokenizer(make_checkpoint(family, tmp_path / "parent", **SIZES))
    assert quantized(parent, tmp_path, to="gguf", symmetric=symmetric).passed
    tokens = [3, 7, 40, 12, 80, 33, 9]
    exact, ours = (dense_logits(decoder_of(folder), tokens) for folder in (parent, tmp_path / "out"))
    assert 0 < kl(exact, ours) < 0.5
    with open_checkpoint(str(tmp_path / "out")) as child:
        assert child.dtype_of("model.layers.1.self_attn.q_proj.weight") == ("Q4_0" if symmetric else "Q4_1")
    text = "About 12,345 for 'all' of it:\n\n  Ünïcode, 中文字符 and    spaces.<|eos|>"
    theirs, own = (Tokenizer.from_folder(path) for path in (parent, tmp_path / "out" / "model.gguf"))
    assert own.encode(text) == theirs.encode(text)
    assert (own.eos_token_id, own.encode("ab")) == (theirs.eos_token_id, [256])
    assert read_chat_template(tmp_path / "out" / "model.gguf") == read_chat_template(parent)


def test_a_tokenizer_that_no_gguf_file_describes_is_refused_before_rounding(tmp_path: Path):
    parent = with_tokenizer(tiny(tmp_path / "parent"), add_prefix_space=True)
    with pytest.raises(CheckpointError, match="no GGUF file describes its tokenizer"):
        quantized(parent, tmp_path, to="gguf")
    assert not (tmp_path / "out").exists()


# ---- scales


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "mlp_bias": True}, {"norm_offset": 1.0}])
def test_folded_scales_leave_the_models_function(changes: dict[str, Any]):
    decoder = make_decoder(make_spec(**changes))
    prompt = [3, 7, 40, 12, 80, 33, 9]
    before = dense_logits(decoder, prompt)
    for layer in decoder.layers:
        for name in ("qkv", "attention_output", "gate_up", "down"):
            width = layer.get_submodule(name).in_features
            scale = torch.logspace(-1, 1, width)
            if name == "attention_output":  # two query heads share each head of values
                scale = scale[:16].view(2, 1, 8).expand(2, 2, 8).flatten()
            with torch.no_grad():
                kept = fold(layer, decoder.spec, name, scale, torch.bfloat16)
            torch.testing.assert_close(kept, scale, rtol=0.02, atol=0)
    torch.testing.assert_close(dense_logits(decoder, prompt), before, rtol=1e-3, atol=1e-3)


def planted(decoder: TorchDecoder) -> TorchDecoder:
    """The same function: four channels of each norm are huge, and the columns that read them small."""
    with torch.no_grad():
        for layer in decoder.layers:
            for norm, reader in (("attention_norm", "qkv"), ("mlp_norm", "gate_up")):
                layer.get_parameter(f"{norm}.weight")[[3, 17, 40, 61]] *= 32
                layer.get_parameter(f"{reader}.weight")[:, [3, 17, 40, 61]] /= 32
    return decoder


@pytest.mark.parametrize(
    ("form", "method", "most"), [(Form(4, 32, True), "awq", 0.6), (Form(8, None, True), "smoothquant", 0.6)]
)
def test_scales_save_what_outliers_cost(form: Form, method: str, most: float):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    errors = dict[str, float]()
    for each in ("rtn", method):
        layer: Any = planted(make_decoder(make_spec(**sizes))).layers[0]
        hidden = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))

        def run(layer: Any = layer, hidden: torch.Tensor = hidden) -> Any:
            decoder = TorchDecoder(layer.spec, hollow=True)
            yield layer(hidden, rotations_of(decoder, [200]), attend_of(layer.spec, [200]))

        with torch.no_grad():
            (exact,) = run()
            tool.quantize_layer(CalibratedLayer(0, layer, run), layer.spec, {form.bits: form}, each, torch.float32)
            (rounded,) = run()
        errors[each] = float((rounded - exact).square().mean())
    assert errors[method] < most * errors["rtn"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_scales_save_what_outliers_cost_as_the_native_executor_serves_it(tmp_path: Path):
    """KL to the parent, of the built-in model; on few documents a KL of 5e-6 is one of chance."""
    lines = [{"messages": training_chat(Random(number), 3).messages()} for number in range(900)]
    kls = dict[tuple[str, bool], float]()
    with open_checkpoint("maitred-mini") as mini:
        save_decoder(planted(decoder_of(mini.path)), mini, tmp_path / "planted")
        save_decoder(decoder_of(mini.path), mini, tmp_path / "plain")
    for name, lines_of in (("data", lines[:200]), ("held_out", lines[200:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines_of))
    for method, form, has_outliers in (
        *(("rtn", {"group_size": 128}, True), ("awq", {"group_size": 128}, True)),
        *(("smoothquant", {"scheme": "int8"}, True), ("smoothquant", {"scheme": "int8"}, False)),
    ):
        asked = ToolConfig(
            model=str(tmp_path / ("planted" if has_outliers else "plain")),
            out=str(tmp_path / f"{method} {has_outliers}"),
            data=str(tmp_path / "data.jsonl"),
            held_out=str(tmp_path / "held_out.jsonl"),
        )
        report = run_tool(
            tool.TOOL, asked, QuantizeConfig(method=method, calibration_tokens=8192, **form), lambda *_: None
        )  # type: ignore[arg-type]
        kls[method, has_outliers] = report.fields["figures"]["kl"]["value"]
    assert kls["awq", True] <= 0.6 * kls["rtn", True]
    assert kls["smoothquant", True] <= 1.5 * kls["smoothquant", False]


def test_what_qat_trained_is_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Distributions of what was learnt come nearer to the parent's than GPTQ's, in the file that is read."""
    parent = tiny(tmp_path / "parent")
    monkeypatch.setattr(tool, "QAT_LR", 1e-3)
    assert quantized(parent, tmp_path, method="qat", steps=40).passed
    (tmp_path / "gptq").mkdir()
    quantized(parent, tmp_path / "gptq", method="gptq")
    lines = [json.loads(line)["token_ids"] for line in (tmp_path / "data.jsonl").read_text().splitlines()[:40]]
    models = [decoder_of(folder) for folder in (parent, tmp_path / "out", tmp_path / "gptq" / "out")]
    exact, trained, before = ([dense_logits(model, ids) for ids in lines] for model in models)
    found, limit = (sum(map(kl, exact, logits)) for logits in (trained, before))
    assert found < 0.9 * limit


def test_qat_trains_one_form():
    with pytest.raises(ConfigError, match="choose scheme int4 or int8"):
        QuantizeConfig(method="qat", scheme="mixed")
