"""Rotary position embedding: the frequencies of every stretching rule, as numbers (no tensors).

RoFormer, Su et al. 2021, arXiv:2104.09864. A head's values i and i + dim/2 are rotated by the angle
position * inverse_frequency[i] (the "half split" layout of Hugging Face).

**One rule for every chunk and batch.** Hugging Face transformers recomputes the frequencies of `dynamic` and `longrope`
from the length of the sequence at hand, so keys already in a cache change their meaning as a text grows. Here both
depend on `max_model_len`, the served context, which is fixed when the model is loaded:

- `dynamic`: not stretched while max_model_len <= max_position_embeddings, else stretched for max_model_len;
- `longrope`: `short_factor` while max_model_len <= original_max_position_embeddings, else `long_factor`.

So the answer is the same however the text is cut into chunks and whatever shares the batch; it equals transformers'
for every text when the served context is within the original one, and for texts of max_model_len (`dynamic`) or longer
than the original context (`longrope`) when it is not. Serve with a smaller --max-model-len to have the short factors.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from maitred.model.spec import RopeSpec, RopeType

Floats = NDArray[np.float32]
_F32 = np.float32


def inverse_frequencies(rope: RopeSpec, max_model_len: int) -> tuple[float, ...]:
    """Radians per position for each rotated pair: `rope.num_frequencies` numbers, each a float32 value."""
    if rope.rope_type is RopeType.LINEAR:
        frequencies = _plain(rope.theta, rope.dim) / _F32(rope.factor)
    elif rope.rope_type is RopeType.DYNAMIC:
        frequencies = _dynamic(rope, max_model_len)
    elif rope.rope_type is RopeType.YARN:
        frequencies = _yarn(rope)
    elif rope.rope_type is RopeType.LONGROPE:
        frequencies = _longrope(rope, max_model_len)
    elif rope.rope_type is RopeType.PROPORTIONAL:
        frequencies = _plain(rope.theta, rope.dim) / _F32(rope.factor)
        frequencies[rope.num_moving :] = 0
    elif rope.rope_type is RopeType.LLAMA3:
        frequencies = _llama3(rope)
    else:
        frequencies = _plain(rope.theta, rope.dim)
    return tuple(float(f) for f in frequencies)


def depends_on_context(rope: RopeSpec) -> bool:
    """Return whether `inverse_frequencies` looks at max_model_len."""
    return rope.rope_type in (RopeType.DYNAMIC, RopeType.LONGROPE)


def _powers(theta: float, dim: int) -> Floats:
    """theta ** (2i / dim), rounded to float32 where PyTorch rounds: exponent, theta and result.

    Models are trained with these roundings, and at position 100,000 an error of one unit in the last place of a
    frequency already turns a pair by 0.01 radians.
    """
    exponents = np.arange(0, dim, 2, dtype=_F32) / _F32(dim)
    powers: Floats = np.power(np.float64(_F32(theta)), exponents.astype(np.float64)).astype(_F32)
    return powers


def _plain(theta: float, dim: int) -> Floats:
    return _F32(1) / _powers(theta, dim)


def _dynamic(rope: RopeSpec, max_model_len: int) -> Floats:
    """NTK-aware scaling of theta for a context of `max_model_len` (u/bloc97, u/emozilla; arXiv:2309.00071, 3.1)."""
    original = rope.original_max_position_embeddings
    context = max(max_model_len, original)
    stretch = rope.factor * context / original - (rope.factor - 1)
    return _plain(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim)


def _yarn(rope: RopeSpec) -> Floats:
    """YaRN, Peng et al. 2023, arXiv:2309.00071, section 3.2: slow frequencies are divided by the factor, fast ones
    kept, with a linear ramp between the dimensions that turn `beta_fast` and `beta_slow` times in the original
    context."""
    low, high = _yarn_ramp(rope)
    ramp = (np.arange(rope.dim // 2, dtype=_F32) - _F32(low)) / _F32(high - low)
    kept = _F32(1) - np.clip(ramp, _F32(0), _F32(1))
    powers = _powers(rope.theta, rope.dim)
    frequencies: Floats = _F32(1) / (_F32(rope.factor) * powers) * (_F32(1) - kept) + _F32(1) / powers * kept
    return frequencies


def _yarn_ramp(rope: RopeSpec) -> tuple[float, float]:
    def dimension(num_rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    return (low, high + 0.001) if low == high else (low, high)


def _longrope(rope: RopeSpec, max_model_len: int) -> Floats:
    """LongRoPE, Ding et al. 2024, arXiv:2402.13753: a divisor for each frequency, found by search, in two sets."""
    is_long = max_model_len > rope.original_max_position_embeddings
    factors = np.array(rope.long_factor if is_long else rope.short_factor, dtype=_F32)
    return _F32(1) / (factors * _powers(rope.theta, rope.dim))


def _llama3(rope: RopeSpec) -> Floats:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between are blended smoothly."""
    plain = _plain(rope.theta, rope.dim)
    factor, low, high = _F32(rope.factor), _F32(rope.low_freq_factor), _F32(rope.high_freq_factor)
    turns = _F32(rope.original_max_position_embeddings) / (_F32(2 * math.pi) / plain)  # in the original context
    smooth = (turns - low) / (high - low)
    blended = (_F32(1) - smooth) * plain / factor + smooth * plain
    frequencies: Floats = np.where(turns < low, plain / factor, np.where(turns > high, plain, blended))
    return frequencies
