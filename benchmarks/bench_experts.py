#!/usr/bin/env python3
"""Decode steps of layers of Qwen3-30B-A3B's shape with int8 weights, against the floor of the bytes that they touch;
or of Qwen3.5-0.8B's, whose recurrent states are read and written.

    benchmarks/bench_experts.py [--layers 4] [--threads 2] [--batch 1 --batch 8 --batch 32]
    benchmarks/bench_experts.py --shape qwen3.5-0.8b --layers 24 [--prompt 512]
    benchmarks/bench_experts.py --shape deepseek-v2-lite --context 1024     # latent attention

Weights are random codes, so nothing is downloaded or packed; tokens are random, and the experts that a step touched are
counted by the program. Prints, for each batch, the best and the median step, and the floor by the machine's own stream.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter

import numpy as np

from maitred.executor.native_program import NativeProgram, RaggedStep, running_sums
from maitred.kernels import _native
from maitred.kernels.kv_pool import make_kv_pool
from maitred.kernels.linear import allocate
from maitred.model.families import spec_from_config
from maitred.model.fusions import compile_program
from maitred.model.packed import PackedTensor, PackedWeights, is_matrix, packed_bytes
from maitred.model.program import Experts, Format, Formats, HeadLinear, Linear, Weight

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
RECURRENT = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
SHAPES = {"qwen3-30b-a3b": EXPERTS, "qwen3.5-0.8b": RECURRENT, "deepseek-v2-lite": LATENT}
REPEATS = 12


def random_weights(program: object) -> PackedWeights:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, 1 << 24, dtype=np.uint8)
    return PackedWeights({w.name: PackedTensor(w, _filled(w, codes, rng)) for w in program.weights})  # type: ignore[attr-defined]


def _filled(weight: Weight, codes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    buffer = allocate(packed_bytes(weight))
    if not is_matrix(weight):
        buffer[: 4 * weight.rows].view(np.float32)[:] = 0.5
    elif weight.format.dtype == "float32":
        values = buffer.view(np.float32)
        values[:] = rng.standard_normal(len(values), dtype=np.float32) * 0.05
    else:
        one = len(buffer) // (weight.experts or 1)
        channels = -(-weight.matrix_rows // 32) * 32
        for begin in range(0, len(buffer), one):
            matrix = buffer[begin : begin + one]
            for at in range(0, one - 4 * channels, len(codes)):
                part = matrix[at : min(at + len(codes), one - 4 * channels)]
                part[:] = codes[: len(part)]
            matrix[one - 4 * channels :].view(np.float32)[:] = 1e-5
    return buffer


def step_of(batch: int, context: int, rng: np.random.Generator, num_tokens: int = 1) -> RaggedStep:
    blocks = (context + num_tokens) // 16 + 1
    return RaggedStep(
        rng.integers(0, 1024, batch * num_tokens).astype(np.int32),
        np.tile(np.arange(context, context + num_tokens, dtype=np.int32), batch),
        np.arange(batch + 1, dtype=np.int32) * num_tokens,
        np.arange(batch * blocks, dtype=np.int32),
        running_sums([blocks] * batch),
        states=np.array([(slot, 0, num_tokens) for slot in range(batch)], np.int32),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of one request in a step, instead of decoding")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, default=64)
    asked = parser.parse_args()
    batches, context = asked.batch or (1, 8, 32), asked.context
    spec = spec_from_config(SHAPES[asked.shape] | {"num_hidden_layers": asked.layers})
    int8 = Format(dtype="int8")
    program = compile_program(spec, Formats(linears=int8, head=int8))
    weights = random_weights(program)
    threads = _native.ThreadPool(asked.threads)
    num_blocks = max(batches) * ((context + max(asked.prompt, 1)) // 16 + 1)
    heads = {"num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "latent_dim": spec.latent_rank}
    layers = len(spec.kv_layers)
    pool = make_kv_pool(dtype="bfloat16", num_layers=layers, num_blocks=num_blocks, block_size=16, **heads)
    runner = NativeProgram(program, weights, pool, threads, max_tokens=max(64, asked.prompt), max_logits=64,
                           max_model_len=1 << 15, num_state_slots=32)  # fmt: skip
    memory, isa, rng = allocate(1 << 28), _native.default_isa(), np.random.default_rng(1)
    memory[::2048] = 1
    dense = sum(packed_bytes(op.weight) for op in program.ops if isinstance(op, Linear | HeadLinear))
    experts = [weight for op in program.ops if isinstance(op, Experts) for weight in (op.gate_up, op.down)]
    one_expert = sum(packed_bytes(weight) / weight.experts for weight in experts) / asked.layers
    if asked.prompt:
        return tell_prompt(runner, step_of(1, context, rng, asked.prompt))
    for batch in batches:
        states = 2 * batch * spec.state_bytes_per_slot  # read and written
        states += 2 * batch * context * spec.kv_values_per_token()
        ratios, touched = [], []
        for _ in range(REPEATS):
            runner.set_profiling(asked.profile)
            step, before = step_of(batch, context, rng), [each.copy() for each in runner.tokens_of_expert]
            stream = _native.measure_stream(isa, threads, memory, 1)
            began = time.perf_counter()
            runner.run(step, list(range(batch)))
            took_s = time.perf_counter() - began
            counts = [now - was for now, was in zip(runner.tokens_of_expert, before, strict=True)]
            touched.append(sum(int((each > 0).sum()) for each in counts))
            ratios.append((dense + states + one_expert * touched[-1]) / stream / took_s)
        print(
            f"batch {batch:>2}: {statistics.median(touched) / asked.layers:5.1f} experts a layer, "
            f"{(dense + states + one_expert * statistics.median(touched)) / 1e6:,.0f} MB ({states / 1e6:,.0f} of KV "
            f"and states); of the floor median {statistics.median(ratios):.0%}, best {max(ratios):.0%}"
        )
        if asked.profile:
            tell_profile(runner)


def tell_prompt(runner: NativeProgram, step: RaggedStep) -> None:
    runner.set_profiling(True)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        runner.run(step, [])
        took.append(time.perf_counter() - began)
    print(f"a chunk of {len(step.token_ids)} tokens: {min(took) * 1e3:.0f} ms at best")
    tell_profile(runner)


def tell_profile(runner: NativeProgram) -> None:
    by_name: Counter[str] = Counter()
    for name, nanoseconds in runner.profile():
        by_name[name.rpartition(".")[2]] += nanoseconds
    print("   ", ", ".join(f"{name} {ns / 1e6:.2f} ms" for name, ns in by_name.most_common(9)))


if __name__ == "__main__":
    main()
