"""LoRA in the native executor: PEFT's tokens in float32, the same bits in any batch, and nobody else's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from maitred.core.errors import KernelError
from maitred.core.request import RequestState, SamplingParams
from maitred.executor.native import NativeExecutor
from maitred.executor.native_lora import PAGE, NativeAdapters, PackedAdapter
from maitred.executor.native_program import LowRankPart
from maitred.kernels import _native
from maitred.model.adapters import Adapter, read_adapter
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.spec import DecoderSpec
from tests.executor.native_worlds import load_native, make_native
from tests.executor.test_native_identity import LONGEST, Bits, a_world, check_bits
from tests.executor.torch_worlds import make_decoder, make_spec
from tests.fakes import make_request, make_scheduler
from tests.model.adapters import make_peft, random_tensors, write_adapter
from tests.model.checkpoints import VOCAB_SIZE, load_reference, make_checkpoint
from tests.model.gguf_models import write_gguf

NUM_GREEDY = 12
NEAR_TIE = 1e-4
FORMATS = [
    {"dtype": "float32", "kv_dtype": "float32"},
    {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
    {"dtype": "int8", "kv_dtype": "int8"},
    {"dtype": "int8", "kv_dtype": "bfloat16"},
    {"dtype": "int4", "kv_dtype": "bfloat16"},
]
BLOCKS = {"dtype": "auto", "kv_dtype": "bfloat16", "blocks": "blocks of 32"}


def greedy(request_id: str, prompt: list[int], adapter: str, *, length: int = NUM_GREEDY) -> RequestState:
    sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    return make_request(
        request_id, prompt=prompt, max_tokens=length, sampling=sampling, adapter=adapter, cache_salt=adapter
    )


def serve(executor: NativeExecutor, requests: list[RequestState], *, num_blocks: int = 200, **limits: int) -> None:
    """All to the end, arriving at once."""
    scheduler = make_scheduler(num_blocks=num_blocks, **limits)
    for request in requests:
        scheduler.add(request, 0.0)
    for step in range(1000):
        if not scheduler.has_work:
            return
        plan = scheduler.schedule(float(step))
        scheduler.update(plan, executor.execute(plan), float(step))
    raise AssertionError("requests that never end")


def read(folder: Path, model_folder: Path) -> Adapter:
    with open_checkpoint(str(model_folder)) as checkpoint:
        return read_adapter(folder, spec_from_config(checkpoint.config), max_rank=64)


def assert_greedy(model: Any, request: RequestState) -> None:
    """Each token is the model's likeliest, or as good as that."""
    tokens = [*request.spec.prompt_token_ids, *request.output_token_ids]
    with torch.inference_mode():
        logits_TV = model(torch.tensor([tokens])).logits[0].double()
    assert request.error is None
    for position in range(request.num_prompt_tokens - 1, len(tokens) - 1):
        best = logits_TV[position].max()
        assert logits_TV[position][tokens[position + 1]] >= best - NEAR_TIE, position


PEFT_CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16},
    "odd_rank": {"r": 5, "lora_alpha": 7},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True},
    "layer": {"r": 4, "lora_alpha": 8, "layers_to_transform": [1]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {r"layers\.[02]\..*proj": 12, "model.layers.1.self_attn.o_proj": 64},
        "alpha_pattern": {"o_proj": 32, "^model.layers.2.mlp.down_proj": 1},
    },
}


@pytest.mark.parametrize("family", ["llama_bias", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "olmo2"])
def test_greedy_tokens_are_pefts_in_float32(family: str, tmp_path: Path) -> None:
    check_family(family, PEFT_CONFIGS["all"], None, tmp_path)


@pytest.mark.parametrize("isa", _native.available_isas())
def test_every_instruction_set_gives_pefts_tokens(isa: str, tmp_path: Path) -> None:
    check_family("llama", PEFT_CONFIGS["all"], isa, tmp_path)


@pytest.mark.parametrize("config", [name for name in PEFT_CONFIGS if name != "all"])
def test_ranks_scales_and_layers_are_pefts(config: str, tmp_path: Path) -> None:
    targets = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "up_proj"]}
    check_family("llama", targets | PEFT_CONFIGS[config], None, tmp_path)


def test_queries_and_values_alone_are_pefts(tmp_path: Path) -> None:
    check_family("qwen2", {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}, None, tmp_path)


def test_matrices_of_several_formats_in_one_file_take_adapters_too(tmp_path: Path) -> None:
    """A GGUF file whose v and up are F16 beside F32: each is multiplied apart from its neighbours."""
    model = load_reference(make_checkpoint("llama", tmp_path / "model"))
    for name, parameter in model.named_parameters():
        if "v_proj" in name or "up_proj" in name:
            parameter.data = parameter.data.half().float()
    tensors = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    path = write_gguf(
        tmp_path / "model.gguf",
        "llama",
        json.loads((tmp_path / "model" / "config.json").read_text()),
        tensors,
        type_of=lambda name: Type.F16 if "v_proj" in name or "up_proj" in name else Type.F32,
    )
    adapted = make_peft(model, tmp_path / "adapter", **PEFT_CONFIGS["all"])
    check_served(adapted, load_native(path, num_blocks=200, dtype="auto"), read(tmp_path / "adapter", path), "mixed")


def check_family(family: str, config: dict[str, Any], isa: str | None, folder: Path) -> None:
    make_checkpoint(family, folder / "model")
    adapted = make_peft(load_reference(folder / "model"), folder / "adapter", **config)
    executor = load_native(folder / "model", num_blocks=200, isa=isa)
    check_served(adapted, executor, read(folder / "adapter", folder / "model"), family)


def check_served(adapted: Any, executor: NativeExecutor, adapter: Adapter, seed: str) -> None:
    executor.adapters.load("a", adapter)
    chooser = Random(seed)
    prompts = [[chooser.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 7, 23)]
    served = [greedy(f"a{i}", prompt, "a") for i, prompt in enumerate(prompts)]
    plain = [greedy(f"p{i}", prompt, "") for i, prompt in enumerate(prompts)]
    serve(executor, [*served, *plain], max_num_batched_tokens=24)
    for request in served:
        assert_greedy(adapted, request)
    assert any(a.output_token_ids != p.output_token_ids for a, p in zip(served, plain, strict=True))
    with adapted.disable_adapter():
        for request in plain:
            assert_greedy(adapted, request)
    executor.close()


# ---- the same bits in any company


def a_decoder(kind: str) -> Any:
    """One whose matrices fill whole tiles, and one where nothing is a multiple of anything."""
    if kind == "odd":
        sizes = {"hidden_size": 72, "intermediate_size": 100, "head_dim": 18, "qkv_bias": True}
        return make_decoder(make_spec(**sizes, max_position_embeddings=LONGEST))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    return make_decoder(make_spec(**sizes, max_position_embeddings=LONGEST))


def some_adapters(spec: DecoderSpec, folder: Path) -> dict[str, Adapter]:
    """Of unlike ranks; two for some linears only."""
    ranks = {"a": 4, "b": 16, "c": 5, "d": 1}
    only = {"b": ("q_proj", "v_proj"), "d": ("down_proj", "gate_proj")}
    adapters = {}
    for seed, (name, rank) in enumerate(ranks.items()):
        tensors = random_tensors(spec, rank, seed=seed)
        kept = {key: value for key, value in tensors.items() if any(t in key for t in only.get(name, ("proj",)))}
        adapters[name] = read_adapter(write_adapter(folder / name, kept, rank=rank), spec, max_rank=16)
    return adapters


def load_all(executor: NativeExecutor, adapters: dict[str, Adapter]) -> NativeExecutor:
    assert executor.adapters is not None
    for name, adapter in adapters.items():
        executor.adapters.load(name, adapter)
    return executor


@pytest.mark.parametrize(
    ("formats", "kind"),
    [*product(FORMATS, ["odd", "even"]), (BLOCKS, "even")],
    ids=lambda value: value if isinstance(value, str) else f"{value['dtype']}-{value['kv_dtype']}",
)
def test_logits_are_the_same_bits_beside_any_adapters(kind: str, formats: dict[str, Any], tmp_path: Path):
    """Chunked, preempted, from the prefix cache; of each instruction set, `test_low_rank.py` says it of one linear."""
    chooser, decoder = Random(f"{kind} {formats}"), a_decoder(kind)
    world = a_world(chooser, adapters=("a", "b", "", "a", "c", "d"))
    check_bits(decoder, world, chooser, some_adapters(decoder.spec, tmp_path), **formats)


# ---- over quantised weights


@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f"{f['dtype']}-{f['kv_dtype']}")
def test_over_rounded_weights_an_adapter_is_as_if_added_to_what_they_stand_for(formats: dict[str, Any], tmp_path: Path):
    """What an adapter changes in the logits is what it changes in float32, within what rounding changes itself."""
    decoder = a_decoder("even")
    spec = decoder.spec
    adapter = read_adapter(write_adapter(tmp_path, random_tensors(spec, 8), rank=8), spec, max_rank=16)
    prompt = list(range(20, 50))

    def logits(name: str, **formats: Any) -> Any:
        seen = Bits()
        executor = make_native(decoder, num_blocks=50, on_logits=seen, **formats)
        serve(load_all(executor, {"a": adapter}), [greedy("r", prompt, name, length=1)])
        return np.stack([np.frombuffer(seen.seen["r"][p][0], dtype=np.float32) for p in range(len(prompt))])

    exact, exact_adapted = logits("", **FORMATS[0]), logits("a", **FORMATS[0])
    got, got_adapted = logits("", **formats), logits("a", **formats)
    rounding, change = np.abs(got - exact).mean(), np.abs(exact_adapted - exact).mean()
    assert np.abs(got_adapted - exact_adapted).mean() < max(1e-5, 1.5 * rounding) < change


# ---- residents


def test_a_request_whose_adapter_is_not_there_ends_alone(tmp_path: Path):
    decoder = a_decoder("odd")
    adapters = some_adapters(decoder.spec, tmp_path)
    executor = load_all(make_native(decoder, num_blocks=100), {"a": adapters["a"]})
    lost, other, plain = greedy("l", [1, 2, 3], "z"), greedy("o", [1, 2, 3], "a"), greedy("p", [1, 2, 3], "")
    serve(executor, [lost, other, plain])
    assert lost.error == "adapter z is not loaded"
    assert lost.output_token_ids == []
    assert [len(r.output_token_ids) for r in (other, plain)] == [NUM_GREEDY, NUM_GREEDY]
    alone = greedy("l2", [1, 2, 3], "z")
    serve(executor, [alone])  # a step of nobody else
    assert alone.error == "adapter z is not loaded"


def test_an_adapter_that_is_unloaded_makes_room_for_another(tmp_path: Path):
    decoder = a_decoder("even")
    adapters = some_adapters(decoder.spec, tmp_path)
    executor = load_all(make_native(decoder, num_blocks=100), {"a": adapters["a"], "b": adapters["b"]})
    first = greedy("f", [1, 2, 3], "b")
    serve(executor, [first])
    executor.adapters.unload("a")
    executor.adapters.load("c", adapters["c"])  # in the place of a
    again, other, lost = greedy("g", [1, 2, 3], "b"), greedy("c", [1, 2, 3], "c"), greedy("l", [1, 2, 3], "a")
    serve(executor, [again, other, lost])
    assert again.output_token_ids == first.output_token_ids
    assert lost.error is not None
    only_c = load_all(make_native(decoder, num_blocks=100), {"c": adapters["c"]})
    alone = greedy("c", [1, 2, 3], "c")
    serve(only_c, [alone])
    assert alone.output_token_ids == other.output_token_ids
    assert executor.adapters.names() == {"b", "c"}


def test_names_are_loaded_once_and_unloaded_once(tmp_path: Path):
    decoder = a_decoder("even")
    adapters = some_adapters(decoder.spec, tmp_path)
    executor = load_all(make_native(decoder), {"a": adapters["a"]})
    with pytest.raises(KernelError, match="adapter a is loaded already"):
        executor.adapters.load("a", adapters["b"])
    executor.adapters.unload("a")
    with pytest.raises(KernelError, match="adapter a is not loaded"):
        executor.adapters.unload("a")


def test_bytes_are_known_before_an_adapter_is_packed(tmp_path: Path):
    decoder = a_decoder("even")
    adapter = some_adapters(decoder.spec, tmp_path)["b"]
    executor = make_native(decoder, dtype="int8")
    packed = executor.adapters.pack(adapter)
    assert executor.adapters.num_bytes(adapter) == packed.num_bytes
    assert packed.num_bytes < 0.7 * adapter.num_bytes  # bfloat16, and what fills A's stacked ranks


class SharingRunner:
    """So much memory for adapters as ranks share it, zero where it was given back; programs read nothing here."""

    adapted = ()

    def __init__(self, num_pages: int) -> None:
        self.adapter_memory = np.zeros(num_pages * PAGE, dtype=np.uint8)
        self.parts: dict[int, LowRankPart] = {}

    def load_adapter(self, slot: int, parts: Sequence[LowRankPart | None]) -> None:
        (self.parts[slot],) = parts

    def unload_adapter(self, slot: int) -> None:
        del self.parts[slot]

    def release_adapter_memory(self, offset: int, num_bytes: int) -> None:
        assert offset % PAGE == 0 < num_bytes
        self.adapter_memory[offset : offset + PAGE * -(-num_bytes // PAGE)] = 0


def packed_of(bits: np.ndarray) -> PackedAdapter:
    half = len(bits) // 2
    part = LowRankPart("float32", 4, bits[:half], bits[half:], np.zeros((0, 3), dtype=np.int32))
    return PackedAdapter("", len(bits), (part,), bits)


@pytest.mark.parametrize("seed", range(4))
def test_in_memory_that_ranks_share_adapters_find_room_as_long_as_bytes_are_free(seed: int):
    chooser, num_pages = Random(seed), 40
    runner = SharingRunner(num_pages)
    adapters, resident, slots = NativeAdapters(runner), {}, {}
    for step in range(400):
        num_bytes = chooser.randrange(2, 9 * PAGE)
        free = num_pages - sum(-(-len(bits) // PAGE) for bits in resident.values())
        if -(-num_bytes // PAGE) <= free:
            name = str(step)
            resident[name] = np.frombuffer(chooser.randbytes(num_bytes), dtype=np.uint8)
            adapters.load(name, packed_of(resident[name]))
            slots[name] = int(adapters.slots([name])[0])
        else:
            gone = chooser.choice([*resident])
            adapters.unload(gone)
            del resident[gone]
        for name, bits in resident.items():
            part = runner.parts[slots[name]]
            assert np.concatenate([part.a, part.b]).tobytes() == bits.tobytes()
    for name in resident:
        adapters.unload(name)
    assert not runner.adapter_memory.any(), "given back to the system"


def test_more_bytes_than_ranks_share_are_refused_and_nothing_is_loaded():
    adapters = NativeAdapters(SharingRunner(2))
    adapters.load("a", packed_of(np.ones(PAGE, dtype=np.uint8)))
    with pytest.raises(KernelError, match="takes 4097 bytes, and of 8192 that ranks share for adapters 4096"):
        adapters.load("b", packed_of(np.ones(PAGE + 1, dtype=np.uint8)))
    assert adapters.names() == {"a"}
