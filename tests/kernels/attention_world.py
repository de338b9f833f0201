"""Requests whose attention is computed by the kernels in steps of any shape, and by numpy in float64 all at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from maitred.kernels import _native
from maitred.kernels.kv_pool import make_kv_pool
from tests.kernels.attention_layer import AttentionLayer, AttentionShape, HeadNorm, StepRow
from tests.kernels.rotation import rotate, rotation_block

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

ISAS: list[str] = _native.available_isas()
# Largest error allowed, for values of about 1: what the format of P (bf16: 8 bits; int8: 16 of the largest) leaves.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "int8": 2e-3, "int4": 2e-3}

# int8 and int4 besides: a value that lies between two steps of K or V may be rounded the other way in float64, and
# turned back it is a part of a step in each value of its block.
ONE_STEP, SHARE_OF_STEPS = {"int8": 0.02, "int4": 0.2}, {"int8": 1e-2, "int4": 2e-2}

# A step: how many tokens of which requests, in the order of the batch.
Step = Sequence[tuple[int, int]]


def shape_of(num_heads: int, num_kv_heads: int, head_dim: int, **changes: object) -> AttentionShape:
    """Like Qwen3: norms per head, rope over the whole head."""
    rng = np.random.default_rng(7)
    pairs = head_dim // 2
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        norm=HeadNorm.PER_HEAD,
        q_norm=tuple(rng.uniform(0.5, 2.0, head_dim)),
        k_norm=tuple(rng.uniform(0.5, 2.0, head_dim)),
        inverse_frequencies=tuple(10000.0 ** -(np.arange(pairs) / pairs)),
    )
    return dataclasses.replace(shape, **changes)  # type: ignore[arg-type]


def random_rows(shape: AttentionShape, lengths: Sequence[int], seed: int = 0) -> list[Floats]:
    """Each request's rows of the q, k, v matrix."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, shape.qkv_width)).astype(np.float32) for n in lengths]


def attend_in_steps(
    shape: AttentionShape,
    rows: Sequence[Floats],
    steps: Sequence[Step],
    *,
    dtype: str,
    isa: str,
    num_threads: int = 1,
    block_size: int = 16,
    seed: int = 0,
) -> list[Floats]:
    """Each request's outputs, computed in these steps over blocks that lie anywhere and held NaN before."""
    threads = _native.ThreadPool(num_threads)
    counts = [-(-len(r) // block_size) for r in rows]
    num_blocks = sum(counts) + 3
    pool = make_kv_pool(
        dtype=dtype,
        num_layers=2,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        latent_dim=shape.latent_dim,
    )
    fill_with_nan(pool)
    ids = np.random.default_rng(seed).permutation(num_blocks).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    most = max(sum(n for _, n in step) for step in steps)
    layer = AttentionLayer(shape, pool, threads, max_tokens=most, isa=isa, layer=1)
    done = [0] * len(rows)
    outputs: list[list[Floats]] = [[] for _ in rows]
    for step in steps:
        parts = [StepRow(done[r], n, tables[r][: -(-(done[r] + n) // block_size)]) for r, n in step]
        out = layer.run(parts, np.concatenate([rows[r][done[r] : done[r] + n] for r, n in step]))
        for r, n in step:
            outputs[r].append(out[:n])
            out = out[n:]
            done[r] += n
    return [np.concatenate(parts) for parts in outputs]


def fill_with_nan(pool: _native.KVPool) -> None:
    """All bytes 0xff: NaN in float32 and bf16, and a NaN scale in int8 and int4."""
    for layer in range(pool.num_layers):
        for block in range(pool.num_blocks):
            pool.block_view(layer, block)[:] = 0xFF


def whole(rows: Sequence[Floats]) -> list[Step]:
    """Each request by itself, all tokens in one step."""
    return [[(r, len(request))] for r, request in enumerate(rows)]


def random_steps(rng: np.random.Generator, lengths: Sequence[int]) -> list[Step]:
    """Batches of chunks and single tokens until all requests are through."""
    left = list(lengths)
    steps: list[Step] = []
    while any(left):
        alive = [r for r, n in enumerate(left) if n]
        rng.shuffle(alive)
        step = []
        for r in alive[: rng.integers(1, len(alive) + 1)]:
            n = 1 if rng.random() < 0.5 else int(rng.integers(1, 200))
            step.append((r, min(n, left[r])))
            left[r] -= step[-1][1]
        steps.append(step)
    return steps


def oracle(shape: AttentionShape, rows: Floats, dtype: str) -> Doubles:
    """[T, N * H]: q, k and v rounded as the pool's dtype has them, everything else in float64."""
    q_TNH, k_TKH, v_TKH = _split(shape, rows.astype(np.float64))
    if shape.latent_dim:
        v_TKH = k_TKH[..., -shape.latent_dim :]
    if dtype == "bfloat16":
        q_TNH, k_TKH, v_TKH = to_bf16(q_TNH), to_bf16(k_TKH), to_bf16(v_TKH)
    elif dtype == "int8":
        k_TKH, v_TKH = (rotate(to_int8(rotate(x))) / rotation_block(shape.head_dim) for x in (k_TKH, v_TKH))
    elif dtype == "int4":  # expanded to int8
        read = keys_in_int4(rotate(k_TKH)), to_int4(rotate(v_TKH))
        k_TKH, v_TKH = (rotate(to_int8(x)) / rotation_block(shape.head_dim) for x in read)
    behind = np.arange(len(rows))[:, None] - np.arange(len(rows))[None, :]
    hidden = (behind < 0) if shape.window is None else (behind < 0) | (behind >= shape.window)
    out_TNH = np.empty((*q_TNH.shape[:2], v_TKH.shape[2]))
    for head in range(shape.num_heads):  # one by one: what they need lies in the processor's cache
        kv_head = head // (shape.num_heads // shape.num_kv_heads)
        scores = q_TNH[:, head] @ k_TKH[:, kv_head].T * shape.scale
        if shape.softcap is not None:
            scores = np.tanh(scores / shape.softcap) * shape.softcap
        scores = np.where(hidden, -np.inf, scores)
        sink = shape.sinks[head] if shape.sinks else -np.inf
        largest = np.maximum(scores.max(-1, keepdims=True), sink)
        p = np.exp(scores - largest)
        p /= p.sum(-1, keepdims=True) + np.exp(sink - largest)
        out_TNH[:, head] = p @ v_TKH[:, kv_head]
    return out_TNH.reshape(len(rows), -1)


def _split(shape: AttentionShape, rows: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    q_end = shape.num_heads * shape.head_dim
    k_end = q_end + shape.num_kv_heads * shape.head_dim
    q, k, v = rows[:, :q_end], rows[:, q_end:k_end], rows[:, k_end:]
    if shape.norm is HeadNorm.FULL_WIDTH:
        q, k = _normed(q, shape.q_norm, shape.norm_eps), _normed(k, shape.k_norm, shape.norm_eps)
    q, k, v = (x.reshape(len(rows), x.shape[1] // shape.head_dim, shape.head_dim) for x in (q, k, v))
    if shape.norm is HeadNorm.PER_HEAD:
        q, k = _normed(q, shape.q_norm, shape.norm_eps), _normed(k, shape.k_norm, shape.norm_eps)
    return _rotated(shape, q), _rotated(shape, k), v


def _normed(x: Doubles, weights: Sequence[float], eps: float) -> Doubles:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.array(weights)


def _rotated(shape: AttentionShape, x: Doubles) -> Doubles:
    pairs = len(shape.inverse_frequencies)
    frequencies = np.array(shape.inverse_frequencies, dtype=np.float32)
    angles = (np.arange(len(x), dtype=np.float32)[:, None] * frequencies).astype(np.float64)[:, None]
    cos, sin = np.cos(angles) * shape.attention_factor, np.sin(angles) * shape.attention_factor
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin, x[..., 2 * pairs :]), axis=-1)


def to_bf16(x: Doubles) -> Doubles:
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


def to_int8(x: Doubles) -> Doubles:
    """One scale for each token and head; in float32, for what int4 has read may lie between two steps."""
    single = x.astype(np.float32)
    scale = np.abs(single).max(-1, keepdims=True) / np.float32(127)
    return np.rint(single * (1 / np.where(scale == 0, np.float32(1), scale))) * scale.astype(np.float64)


def to_int4(x: Doubles) -> Doubles:
    """A scale and a minimum in bf16 for each 32 values of a head."""
    parts = []
    for part in np.split(x, range(32, x.shape[-1], 32), axis=-1):
        least = to_bf16(part.min(-1, keepdims=True))
        scale = to_bf16((part.max(-1, keepdims=True) - least) / 15)
        parts.append(least + scale * np.clip(np.rint((part - least) / np.where(scale == 0, 1, scale)), 0, 15))
    return np.concatenate(parts, axis=-1)


def keys_in_int4(k_TKH: Doubles) -> Doubles:
    """Each as its difference from the mean of those before it in its 16 positions, as they are read back."""
    read = np.zeros((-(-len(k_TKH) // 16), 16, *k_TKH.shape[1:]))
    read.reshape(-1, *k_TKH.shape[1:])[: len(k_TKH)] = k_TKH
    for lane in range(16):
        mean = read[:, :lane].mean(1) if lane else 0.0
        read[:, lane] = mean + to_int4(read[:, lane] - mean)
    return read.reshape(-1, *k_TKH.shape[1:])[: len(k_TKH)]


def assert_close(got: Floats, exact: Doubles, dtype: str, name: str) -> None:
    error = np.abs(got - exact)
    if dtype in ONE_STEP:
        assert error.max() < ONE_STEP[dtype], name
        assert (error > TOLERANCE[dtype]).mean() < SHARE_OF_STEPS[dtype], name
    else:
        assert error.max() < TOLERANCE[dtype], name


def cases() -> Iterator[tuple[str, str]]:
    """(dtype, instruction set) of everything that this machine can run."""
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        for isa in ISAS:
            yield dtype, isa
