"""What is the native executor's own: steps larger than its buffers, host blocks, NaN, bad input, no PyTorch."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maitred.config import CacheConfig, ModelConfig, SchedulerConfig
from maitred.core.errors import ConfigError
from maitred.core.request import SamplingParams
from maitred.core.step import BlockCopy, SchedulerOutput
from maitred.executor.native import RaggedStep, cut
from maitred.executor.native_plan import plan_native_executor, resolve_formats, resolve_kv_dtype
from maitred.kernels import _native
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.program import Format
from maitred.model.spec import QKNorm, RoutedSpec
from tests.executor.native_worlds import DecoderCheckpoint, make_native, nan_embedding, native_plan
from tests.executor.torch_worlds import (
    VOCAB,
    Hand,
    Seen,
    dense_greedy,
    dense_logits,
    make_decoder,
    make_spec,
    random_prompt,
)
from tests.waiting import until

POISON = VOCAB - 1


def make_hand(decoder: Any = None, **changes: Any) -> Hand:
    return Hand(make_native(decoder or make_decoder(make_spec()), **changes))


def healthy(prompt: list[int]) -> list[int]:
    return [token % POISON for token in prompt]


# ---- buffers that never grow


def test_a_step_of_more_tokens_than_the_buffers_hold_comes_in_passes():
    decoder = make_decoder(make_spec())
    small, roomy = make_hand(decoder, max_tokens=7, max_logits=2), make_hand(decoder)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    outcomes = []
    for hand in (small, roomy):
        for n in (1, 9, 30, 5, 2):
            hand.add(f"r{n}", random_prompt(n, seed=n), sampling)
        outcomes.append((hand.step(), hand.step(), hand.outputs))
    assert outcomes[0] == outcomes[1]
    assert all(len(row.prompt_logprobs or ()) == int(r[1:]) - 1 for r, row in outcomes[0][0].items() if r != "r1")


def test_passes_cut_rows_where_the_room_ends():
    decoder = make_decoder(make_spec())
    hand = make_hand(decoder)
    for n in (3, 9):
        hand.add(f"r{n}", random_prompt(n, seed=n))
    plan = SchedulerOutput(
        step=0, rows=tuple(hand._row(r, hand.known[r]) for r in hand.tables), new_requests=tuple(hand._new)
    )
    passes = cut(hand.executor._take_plan(plan), max_tokens=5)
    assert [[(s.row, s.start, s.num_tokens, s.samples) for s in slices] for slices in passes] == [
        [(0, 0, 3, True), (1, 0, 2, False)],
        [(1, 2, 5, False)],
        [(1, 7, 2, True)],
    ]


# ---- host blocks


def test_blocks_that_went_to_the_host_come_back_the_same():
    decoder = make_decoder(make_spec())
    hand = make_hand(decoder, num_host_blocks=4)
    prompt = random_prompt(14, seed=1)
    hand.add("r", prompt)
    hand.run(3)
    table = hand.tables["r"]
    outs = tuple(BlockCopy(block, i) for i, block in enumerate(table[:3]))
    hand.executor.execute(SchedulerOutput(step=50, rows=(), swap_outs=outs))
    hand.add("intruder", random_prompt(40, seed=2))
    hand.free[:0] = table[:3]  # gets them while they are away
    hand.step({"intruder": 40})
    ins = tuple(BlockCopy(i, block) for i, block in enumerate(table[:3]))
    hand.executor.execute(SchedulerOutput(step=51, rows=(), swap_ins=ins))
    for _ in range(4):
        hand.step({"r": 1})
    assert hand.outputs["r"] == dense_greedy(decoder, prompt, 7)


def test_swapping_is_measured_only_where_there_is_a_place_for_blocks():
    assert make_hand().executor.measure_swap() is None
    bandwidth = make_hand(num_host_blocks=3).executor.measure_swap()
    assert bandwidth is not None
    assert min(bandwidth) > 0


# ---- NaN


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_row_with_nan_ends_that_request_only(dtype: str, kv_dtype: str):
    """Eight rows, one of which has NaN in its keys, values and output: the other seven stay the same, to the bit."""
    decoder = nan_embedding(make_decoder(make_spec(windows=(None, 6))), POISON)
    prompts = [healthy(random_prompt(9 + i, seed=i)) for i in range(8)]
    outcomes = []
    for prompt_of_three in (prompts[3], [*prompts[3][:-1], POISON]):
        seen = Seen()
        hand = make_hand(decoder, dtype=dtype, lm_head_dtype="float32", kv_dtype=kv_dtype, on_logits=seen)
        for i, prompt in enumerate(prompts):
            hand.add(f"r{i}", prompt_of_three if i == 3 else prompt)
        rows = hand.step()
        hand.forget("r3")
        hand.run(10)
        outcomes.append((rows, hand, seen))
    (_, well, well_seen), (rows, ill, ill_seen) = outcomes
    assert rows["r3"].error == "logits are NaN"
    assert rows["r3"].token_ids == ()
    for request_id in (f"r{i}" for i in range(8) if i != 3):
        assert rows[request_id].error is None
        assert ill.outputs[request_id] == well.outputs[request_id]
        assert torch.equal(ill_seen.of(request_id), well_seen.of(request_id))


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "int4"])
def test_nan_left_in_a_block_does_not_reach_its_next_owner(kv_dtype: str, block_size: int):
    decoder = nan_embedding(make_decoder(make_spec(attention_softcap=5.0)), POISON)
    prompts = {"next": healthy([1, 2, 3, 4, 5]), "longer": healthy(random_prompt(30, seed=1))}
    outputs = []
    for first in ([POISON] * 12, healthy(random_prompt(12, seed=9))):
        executor = make_native(decoder, kv_dtype=kv_dtype, block_size=block_size)
        hand = Hand(executor, block_size=block_size)
        hand.add("first", first)
        error = hand.step()["first"].error
        assert (error == "logits are NaN") == (POISON in first)
        blocks = hand.tables["first"]
        hand.forget("first")
        for request_id, prompt in prompts.items():
            hand.add(request_id, prompt)
        hand.run(4)
        assert set(blocks) <= {block for table in hand.tables.values() for block in table}
        outputs.append({request_id: hand.outputs[request_id] for request_id in prompts})
    assert outputs[0] == outputs[1]


def test_nan_in_prompt_logprobs_is_that_requests_error():
    hand = make_hand(nan_embedding(make_decoder(make_spec()), POISON))
    hand.add("r", [1, 2, POISON, 4, 5, 6], SamplingParams(temperature=0.0, prompt_logprobs=0))
    row = hand.step({"r": 4})["r"]
    assert (row.error, row.token_ids, row.prompt_logprobs) == ("logits are NaN", (), None)


# ---- what would read foreign memory is refused


def a_step(**changes: Any) -> RaggedStep:
    arrays: dict[str, Any] = {
        "token_ids": [1, 2, 3],
        "positions": [0, 1, 2],
        "first_tokens": [0, 3],
        "block_tables": [5],
        "first_blocks": [0, 1],
    } | changes
    return RaggedStep(**{name: np.array(values, dtype=np.int32) for name, values in arrays.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [1, VOCAB, 3]}, f"token id {VOCAB}; the program takes 0 to {VOCAB - 1}"),
        ({"token_ids": [1, -1, 3]}, "token id -1"),
        ({"positions": [0, 1, 512]}, "positions that do not follow each other"),
        ({"positions": [510, 511, 512]}, "reaches position 512 with 1 blocks of 4"),
        ({"positions": [2, 3, 4]}, "reaches position 4 with 1 blocks of 4"),
        ({"block_tables": [64]}, "block 64; the program takes 0 to 63"),
        ({"first_tokens": [0, 2]}, "do not cover its tokens"),
        ({"first_blocks": [0, 0], "block_tables": []}, "with 0 blocks of 4"),
        ({"first_blocks": [0, 2]}, "do not fit each other"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(changes: dict[str, Any], message: str):
    runner = make_hand().executor.runner
    with pytest.raises(ValueError, match=message):
        runner.run(a_step(**changes), [2])
    assert np.isfinite(runner.run(a_step(), [2])).all()


def test_logits_of_a_token_that_is_not_there_are_refused():
    runner = make_hand().executor.runner
    with pytest.raises(ValueError, match="token with logits 3; the program takes 0 to 2"):
        runner.run(a_step(), [3])


# ---- formats and sizes


@pytest.mark.parametrize(
    ("formats", "largest_error"),
    [
        ({"dtype": "bfloat16", "kv_dtype": "bfloat16"}, 0.03),
        ({"dtype": "bfloat16", "kv_dtype": "int8"}, 0.04),
        ({"dtype": "int8", "kv_dtype": "bfloat16"}, 0.06),
        ({"dtype": "int8", "kv_dtype": "int8"}, 0.06),
        ({"dtype": "bfloat16", "kv_dtype": "int4"}, 0.15),
        ({"dtype": "int4", "kv_dtype": "int8"}, 0.5),
    ],
)
@pytest.mark.parametrize("isa", _native.available_isas())
def test_shorter_numbers_give_almost_the_same_logits(isa: str, formats: dict[str, Any], largest_error: float):
    """Mean error over the logits' spread; random weights leave int4 little."""
    spec = make_spec(hidden_size=128, intermediate_size=192, head_dim=32, attention_scale=0.01)  # no attention is chaos
    decoder = make_decoder(spec)
    seen = Seen()
    hand = make_hand(decoder, isa=isa, on_logits=seen, **formats)
    prompt = random_prompt(60, seed=3)
    hand.add("r", prompt)
    hand.step()
    exact = dense_logits(decoder, prompt)
    error = (seen.of("r") - exact).abs().mean() / exact.std()
    assert 0 < error < largest_error


def with_huge_channels(decoder: Any) -> Any:
    """The same function: four channels of each norm and a rotary pair of the keys are huge, and their readers small."""
    parameters = dict(decoder.named_parameters())
    readers = {"attention_norm": "qkv", "mlp_norm": "gate_up", "norm": "output"}
    channels, pair = [3, 70, 131, 250], [5, 5 + decoder.spec.head_dim // 2]
    with torch.no_grad():
        for name, parameter in parameters.items():
            layer, _, kind = name.removesuffix(".weight").rpartition(".")
            if kind in readers:
                parameter[channels] *= 32
                parameters[f"{layer}.{readers[kind]}.weight".lstrip(".")][:, channels] /= 32
            if kind == "k_norm":
                parameter[pair] *= 16
                parameters[f"{layer}.q_norm.weight"][pair] /= 16
    return decoder


@pytest.mark.parametrize(
    ("formats", "largest_error"),
    [
        ({"dtype": "float32", "kv_dtype": "int8"}, 0.016),
        ({"dtype": "float32", "kv_dtype": "int4"}, 0.2),
        ({"dtype": "int8", "kv_dtype": "int8"}, 0.13),
        ({"dtype": "int4", "kv_dtype": "int8"}, 0.65),  # a block with a minimum has no exact 0 for small weights
    ],
)
@pytest.mark.parametrize("isa", _native.available_isas())
def test_a_few_huge_channels_cost_little(isa: str, formats: dict[str, Any], largest_error: float):
    """Trained models have them (LLM.int8(), arXiv:2208.07339); what shares a scale with them must not be lost."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "attention_scale": 0.05}
    decoder = with_huge_channels(make_decoder(make_spec(qk_norm=QKNorm.PER_HEAD, **sizes)))
    seen, prompt = Seen(), random_prompt(60, seed=3)
    hand = make_hand(decoder, isa=isa, on_logits=seen, **formats)
    hand.add("r", prompt)
    hand.step()
    exact = dense_logits(decoder, prompt)
    error = (seen.of("r") - exact).abs().mean() / exact.std()
    assert 0 < error < largest_error


@pytest.mark.parametrize(
    ("asked", "checkpoint_dtype", "isa", "linears", "head"),
    [
        ({}, "bfloat16", "avx512", "bfloat16", "bfloat16"),
        ({}, "bfloat16", "amx", "bfloat16", "bfloat16"),
        ({}, "bfloat16", "avx2", "float32", "float32"),
        ({}, "float32", "avx512", "float32", "float32"),
        ({"dtype": "bf16"}, "float32", "plain", "bfloat16", "bfloat16"),
        ({"dtype": "int8"}, "float32", "avx512", "int8", "int8"),
        ({"dtype": "int4"}, "float32", "avx512", "q4_1", "int8"),
        ({"dtype": "int4", "lm_head_dtype": "bfloat16"}, "float32", "avx512", "q4_1", "bfloat16"),
    ],
)
def test_formats(asked: dict[str, Any], checkpoint_dtype: str, isa: str, linears: str, head: str):
    formats = resolve_formats(ModelConfig(**asked), checkpoint_dtype, isa)
    assert (formats.linears.dtype, formats.head.dtype) == (linears, head)


def test_the_kv_cache_is_float32_beside_float32_weights_only():
    assert [resolve_kv_dtype("auto", dtype) for dtype in ("float32", "bfloat16", "int8")] == [
        "float32",
        "bfloat16",
        "bfloat16",
    ]
    assert [resolve_kv_dtype(name, "float32") for name in ("int8", "int4")] == ["int8", "int4"]


def test_an_instruction_set_that_is_not_here_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MAITRED_ISA", "mmx")
    with pytest.raises(ConfigError, match="MAITRED_ISA: instruction set 'mmx' is not available here; choose one of"):
        plan_of_the_builtin_model()


def plan_of_the_builtin_model(**model: Any) -> Any:
    checkpoint = open_checkpoint(None)
    return plan_native_executor(
        ModelConfig(**model),
        checkpoint,
        spec_from_config(checkpoint.config),
        cache=CacheConfig(),
        scheduler=SchedulerConfig(),
        num_threads=2,
    )


def test_a_plan_says_what_will_be_taken():
    plan = plan_of_the_builtin_model(dtype="int4")
    assert plan.program.formats.linears == Format(dtype="q4_1")
    assert plan.describe().startswith(
        f"native  {_native.default_isa()}, up to 2 threads, weights q4_1, embedding and out"
    )
    assert plan.weights_bytes < plan_of_the_builtin_model(dtype="int8").weights_bytes
    assert plan.available_bytes(2**40) == 2**40 - plan.buffer_bytes
    assert plan.available_bytes(1) == 0


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize(("num_threads", "budget", "with_tiles"), [(1, 128, 256), (4, 256, 512), (64, 512, 512)])
def test_steps_have_more_tokens_for_more_threads_and_for_tiles(
    isa: str, num_threads: int, budget: int, with_tiles: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MAITRED_ISA", isa)
    plan = plan_of_the_builtin_model(num_threads=num_threads)
    assert plan.token_budget == (with_tiles if isa == "amx" else budget)


# ---- the process


def test_other_threads_run_while_a_step_does():
    """The interpreter takes nothing from a thread by itself here: another one runs only where a call lets go of it."""
    hand, step, wanted = make_hand(), a_step(), np.array([2], dtype=np.int32)
    native = hand.executor.runner._native
    go, ran, interval = threading.Lock(), threading.Event(), sys.getswitchinterval()

    def other() -> None:
        with go:
            ran.set()

    thread = threading.Thread(target=other)
    sys.setswitchinterval(1000)
    try:
        with go:
            thread.start()
        for _ in range(10_000):
            native.run(step.token_ids, step.positions, step.first_tokens, step.block_tables, step.first_blocks, wanted)
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


class Proven:
    """A choice of threads that has proven itself after the first step."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads, self.told = num_threads, list[tuple[int, int]]()

    def took(self, num_tokens: int, num_rows: int, began_at: float, ended_at: float) -> int | None:
        assert began_at <= ended_at
        self.told.append((num_tokens, num_rows))
        return self.num_threads if len(self.told) == 1 else None


def test_threads_that_steps_choose_are_used_and_told_once(caplog: pytest.LogCaptureFixture):
    hand = make_hand(num_threads=3)
    hand.add("r", [1, 2, 3])
    told = ["2 of 3 threads are used: steps are faster so", "all 3 threads are used again: steps are faster so"]
    for number, line in zip((2, 3), told, strict=True):
        caplog.clear()
        hand.executor.choice = choice = Proven(number)
        hand.step()
        hand.step()
        assert hand.executor.threads.num_used == number
        assert [record.message[: len(line)] for record in caplog.records] == [line]
        assert choice.told[-1] == (1, 1)


def threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_closing_ends_the_threads_and_frees_the_weights():
    before = threads()
    hand = make_hand(num_threads=3)
    hand.add("r", [1, 2, 3])
    hand.step()
    assert len(threads() - before) == 2
    hand.executor.close()
    assert not hasattr(hand.executor, "pool")
    until(lambda: threads() <= before)  # one that was joined is listed for a moment still


def test_a_request_is_served_without_pytorch():
    served = (
        "import sys; from maitred import LLM, SamplingParams; llm = LLM(executor='native');"
        "llm.chat([{'role': 'user', 'content': 'What is maitred?'}], SamplingParams(max_tokens=4));"
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)), 'served')"
    )
    done = subprocess.run([sys.executable, "-c", served], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["served"]


# ---- experts


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_experts_in_a_files_own_blocks_compute_what_those_hold(kind: str):
    """As the same values in float32 do, but for rounded activations, which turn few tokens to other experts."""
    spec = make_spec(hidden_size=256, intermediate_size=256, head_dim=64)
    routed = RoutedSpec(num_experts=5, num_active=2, width=256, normalized=True)
    decoder = make_decoder(replace(spec, layers=tuple(replace(layer, mlp=routed) for layer in spec.layers)))
    checkpoint: Any = DecoderCheckpoint(decoder, (kind,))
    prompt, found = random_prompt(40, seed=1), []
    for dtype in ("float32", "auto"):
        executor = native_plan(checkpoint, checkpoint.spec, dtype=dtype).build(num_blocks=32, max_model_len=128)
        executor.on_logits = seen = Seen()
        hand = Hand(executor)
        hand.add("r", prompt)
        hand.step()
        found.append(seen.of("r").numpy())
        tokens = [each.tolist() for each in executor.runner.tokens_of_expert]
        assert sum(tokens[0]) == 2 * len(prompt)
        assert executor.runner.expert_load_ratio == pytest.approx(max(5 * max(each) / sum(each) for each in tokens))
    errors = np.abs(found[1] - found[0]).mean(axis=1) / np.abs(found[0]).mean(axis=1)
    assert 0 < np.median(errors) < 0.1
