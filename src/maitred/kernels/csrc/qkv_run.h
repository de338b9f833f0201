// The q, k and v of some tokens of one tile, in plain C++ that compilers vectorise for each qkv_<isa>.cpp, which has
// its own copy. Sums run in 16 lanes whatever the instruction set, so that all give the same bits.
//
// Formats: PlainFormats, or an instruction set's own conversions.
// kHead: the head's size where it is one of the usual ones and rotated whole or not at all, so that loops have a known
// length; else 0.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "bits.h"
#include "qkv.h"
#include "rotate.h"

namespace maitred {
namespace {

struct PlainFormats {
  static void store_bf16(const float* __restrict x, int n, uint16_t* __restrict out) {
    for (int i = 0; i < n; ++i) out[i] = float_to_bf16(x[i]);
  }

  // Words of two rows' values, one vector at a time.
  static void store_bf16_pairs(const float* __restrict even, const float* __restrict odd, int n,
                               uint32_t* __restrict words) {
    for (int i = 0; i < n; ++i)
      words[i] = static_cast<uint32_t>(float_to_bf16(even[i])) | static_cast<uint32_t>(float_to_bf16(odd[i])) << 16;
  }

  // 16 rows of 16 words, `stride` apart, into 16 lines of their columns, `line_stride` apart.
  static void transpose(const uint32_t* __restrict words, int stride, uint32_t* __restrict lines,
                        int line_stride = kTileSlots) {
    for (int i = 0; i < kTileSlots; ++i)
      for (int t = 0; t < kTileSlots; ++t) lines[i * line_stride + t] = words[t * stride + i];
  }

  // 16 words of bf16 of 16 slots into 8 rows, `row_stride` apart, of 32 words: a value of two neighbouring slots each.
  static void pair_slots(const uint32_t* __restrict words, uint32_t* __restrict rows, int row_stride) {
    for (int i = 0; i < kTileSlots; ++i)
      for (int t = 0; t < kTileSlots; t += 2) {
        const uint32_t even = words[i * kTileSlots + t], odd = words[i * kTileSlots + t + 1];
        uint32_t* row = rows + t / 2 * row_stride + 2 * i;
        row[0] = (even & 0xffffu) | odd << 16;
        row[1] = even >> 16 | (odd & 0xffff0000u);
      }
  }
};

constexpr int kLanes = 16;
constexpr int kAtOnce = 8;  // heads in flight; of as many tokens they fit the ways of a first-level cache

typedef float Four __attribute__((vector_size(16)));

inline Four four_of(const float* x) {
  Four four;
  __builtin_memcpy(&four, x, sizeof four);
  return four;
}

inline float inverse_rms(const float* x, int n, float eps) {
  float lanes[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane] * x[i + lane];
  for (int lane = 0; i + lane < n; ++lane) lanes[lane] += x[i + lane] * x[i + lane];
  const Four sums = (four_of(lanes) + four_of(lanes + 8)) + (four_of(lanes + 4) + four_of(lanes + 12));
  const float sum = (sums[0] + sums[2]) + (sums[1] + sums[3]);
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
}

// One head normalised and rotated; `inverse` is 1 / rms, `weight` null where there is no norm.
template <int kHead>
inline void ready_head(const float* __restrict x, int head_dim, float inverse, const float* __restrict weight,
                       const float* __restrict cos, const float* __restrict sin, int num_pairs, float* __restrict out) {
  if (kHead != 0) head_dim = kHead, num_pairs = num_pairs == 0 ? 0 : kHead / 2;
  if (num_pairs == 0 && weight == nullptr) {
    __builtin_memcpy(out, x, static_cast<size_t>(head_dim) * 4);
    return;
  }
  for (int i = 0; i < num_pairs; ++i) {
    float first = x[i], second = x[num_pairs + i];
    if (weight != nullptr) {
      first = first * inverse * weight[i];
      second = second * inverse * weight[num_pairs + i];
    }
    out[i] = first * cos[i] - second * sin[i];
    out[num_pairs + i] = second * cos[i] + first * sin[i];
  }
  for (int i = 2 * num_pairs; i < head_dim; ++i) out[i] = weight != nullptr ? x[i] * inverse * weight[i] : x[i];
}

template <int kHead>
inline int head_size(const KVLayout& layout) {
  return kHead != 0 ? kHead : layout.head_dim;
}

// The largest magnitude, and NaN when any value is not finite.
inline float magnitude(const float* x, int n) {
  uint32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(x[i]) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return largest >= 0x7f800000u ? __builtin_nanf("") : float_of(largest);
}

inline int32_t round_to_int(float x) {  // ties to even, |x| < 2^22
  return static_cast<int32_t>(bits_of(x + 12582912.0f)) - 0x4b400000;
}

template <class Formats, int kHead>
inline void store_query(const KVLayout& layout, const float* __restrict x, uint8_t* __restrict out) {
  const int head_dim = head_size<kHead>(layout);
  if (layout.dtype == DType::f32) {
    __builtin_memcpy(out, x, static_cast<size_t>(head_dim) * 4);
  } else if (layout.dtype == DType::bf16) {
    Formats::store_bf16(x, head_dim, reinterpret_cast<uint16_t*>(out));
  } else {
    const int64_t part = int8_part(layout);
    int8_t* __restrict high = reinterpret_cast<int8_t*>(out);
    int8_t* __restrict low = high + part;
    const float largest = magnitude(x, head_dim);
    const float scale = largest / 127.0f;
    const float inverse = scale > 1e-37f ? 1.0f / scale : 0.0f;
    uint32_t high_sum = 0, low_sum = 0;  // mean nothing, and overflow, where x is not finite
    for (int i = 0; i < head_dim; ++i) {
      const float scaled = x[i] * inverse;
      const int32_t h = round_to_int(scaled);
      const int32_t l = round_to_int((scaled - static_cast<float>(h)) * 254.0f);
      high[i] = static_cast<int8_t>(h);
      low[i] = static_cast<int8_t>(l);
      high_sum += static_cast<uint32_t>(h);
      low_sum += static_cast<uint32_t>(l);
    }
    for (int i = head_dim; i < layout.k_words * 4; ++i) high[i] = low[i] = 0;
    uint8_t* tail = out + 2 * part;
    __builtin_memcpy(tail, &scale, 4);
    __builtin_memcpy(tail + 4, &high_sum, 4);
    __builtin_memcpy(tail + 8, &low_sum, 4);
  }
}

// x ~ block * scale * q, |q| <= 127; a NaN scale where x is not finite.
inline float quantise(const float* __restrict x, int n, int8_t* __restrict q) {
  const float scale = magnitude(x, n) / 127.0f;
  const float inverse = scale > 1e-37f ? 1.0f / scale : 0.0f;
  for (int i = 0; i < n; ++i) q[i] = static_cast<int8_t>(round_to_int(x[i] * inverse));
  return scale / static_cast<float>(rotation_block(n));
}

// The cell of a slot and head in a block.
inline uint8_t* cell_of(const KVLayout& layout, uint8_t* block, int head, int slot) {
  if (!layout.tiled) return block + head * layout.head_stride + slot * layout.cell_bytes;
  return block + (int64_t{slot / kTileSlots} * layout.num_kv_heads + head) * layout.cell_bytes;
}

// What a tile's K holds of one token: words of 4 bytes. Returns its scale (int8).
template <class Formats, int kHead>
inline float key_words(const KVLayout& layout, const float* __restrict x, uint32_t* __restrict words) {
  const int head_dim = head_size<kHead>(layout);
  if (layout.dtype == DType::f32) {
    __builtin_memcpy(words, x, static_cast<size_t>(head_dim) * 4);
    return 0.0f;
  }
  if (layout.dtype == DType::bf16) {
    Formats::store_bf16(x, head_dim, reinterpret_cast<uint16_t*>(words));
    return 0.0f;
  }
  int8_t q[kLargestHead];
  const float scale = quantise(x, head_dim, q);
  for (int i = head_dim; i < layout.k_words * 4; ++i) q[i] = 0;
  __builtin_memcpy(words, q, static_cast<size_t>(layout.k_words) * 4);
  for (int i = 0; i < layout.k_words; ++i) words[i] ^= 0x80808080u;  // 128 added
  return scale;
}

// Tokens' words [count][k_words] into their lanes of a tile's lines.
template <class Formats>
inline void write_lanes(const uint32_t* __restrict words, int k_words, int count, uint32_t* __restrict lines,
                        int lane) {
  int i = 0;
  if (count == kTileSlots)
    for (; i + kTileSlots <= k_words; i += kTileSlots) Formats::transpose(words + i, k_words, lines + i * kTileSlots);
  for (; i < k_words; ++i)
    for (int t = 0; t < count; ++t) lines[i * kTileSlots + lane + t] = words[t * k_words + i];
}

// The values in a latent tile's keys, 16 words of each slot at a time; behind the last ones are words that count for
// nothing.
template <class Formats>
void turn(const KVLayout& layout, const uint8_t* keys, uint8_t* values) {
  const int per_word = layout.values_per_word, width = layout.padded_head, num_words = layout.value_dim / per_word;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(keys) + (layout.k_words - num_words) * kTileSlots;
  uint32_t* to = reinterpret_cast<uint32_t*>(values);
  uint32_t narrow[kTileSlots * kTileSlots], rest[kTileSlots * kTileSlots] = {};
  for (int word = 0; word < num_words; word += kTileSlots, from += kTileSlots * kTileSlots) {
    const int count = num_words - word < kTileSlots ? num_words - word : kTileSlots;
    if (count < kTileSlots) {
      __builtin_memcpy(rest, from, static_cast<size_t>(count) * kTileSlots * 4);
      from = rest;
    }
    if (per_word == 1) {
      Formats::transpose(from, kTileSlots, to + word, width);
      continue;
    }
    if (width - 2 * word >= 2 * kTileSlots) {
      Formats::pair_slots(from, to + 2 * word, width);
      continue;
    }
    Formats::pair_slots(from, narrow, 2 * kTileSlots);  // and half of that is padding
    for (int pair = 0; pair < kTileSlots / 2; ++pair)
      __builtin_memcpy(to + pair * width + 2 * word, narrow + pair * 2 * kTileSlots, kTileSlots * 4);
  }
}

// keys [count][head_dim] into one head's cells.
template <class Formats, int kHead>
inline void store_keys(const KVLayout& layout, const float* keys, int count, uint8_t* cell, int slot) {
  const int head_dim = head_size<kHead>(layout);
  if (layout.tiled) {
    const int lane = slot % kTileSlots;
    uint32_t words[kTileSlots * kLargestHead];
    float scales[kTileSlots];
    for (int t = 0; t < count; ++t)
      scales[t] = key_words<Formats, kHead>(layout, keys + t * head_dim, words + t * layout.k_words);
    write_lanes<Formats>(words, layout.k_words, count, reinterpret_cast<uint32_t*>(cell), lane);
    if (layout.dtype == DType::int8)
      __builtin_memcpy(cell + layout.scales_offset() + lane * 4, scales, static_cast<size_t>(count) * 4);
    return;
  }
  for (int t = 0; t < count; ++t, keys += head_dim, cell += layout.cell_bytes) {
    if (layout.dtype == DType::f32) {
      __builtin_memcpy(cell, keys, static_cast<size_t>(head_dim) * 4);
    } else if (layout.dtype == DType::bf16) {
      Formats::store_bf16(keys, head_dim, reinterpret_cast<uint16_t*>(cell));
    } else {
      int8_t q[kLargestHead];
      const float scale = quantise(keys, head_dim, q);
      for (int i = 0; i < head_dim; ++i) cell[i] = static_cast<uint8_t>(q[i] ^ 0x80);
      __builtin_memcpy(cell + layout.cell_bytes - 8, &scale, 4);
    }
  }
}

// Four slots of int8 words.
inline void write_four(const int8_t* __restrict q, int stride, int n, uint32_t* __restrict words) {
  const uint8_t* values = reinterpret_cast<const uint8_t*>(q);
  for (int i = 0; i < n; ++i)
    words[i] = static_cast<uint32_t>(values[i]) | static_cast<uint32_t>(values[stride + i]) << 8 |
               static_cast<uint32_t>(values[2 * stride + i]) << 16 |
               static_cast<uint32_t>(values[3 * stride + i]) << 24;
}

// The values of tokens x + t * stride into one head's part of a tile.
template <class Formats, int kHead>
inline void store_tiled_values(const KVLayout& layout, const float* x, int64_t stride, int count, uint8_t* tile,
                               int lane) {
  const int head_dim = head_size<kHead>(layout), per_word = layout.values_per_word;
  int8_t q[4 * kLargestHead];
  for (int t = 0, together; t < count; t += together, lane += together, x += together * stride) {
    together = lane % per_word == 0 && count - t >= per_word ? per_word : 1;
    uint8_t* words = tile + int64_t{lane / per_word} * layout.padded_head * 4;
    if (layout.dtype == DType::f32) {
      __builtin_memcpy(words, x, static_cast<size_t>(head_dim) * 4);
    } else if (layout.dtype == DType::bf16) {
      uint16_t* values = reinterpret_cast<uint16_t*>(words) + lane % 2;
      if (together == 2)
        Formats::store_bf16_pairs(x, x + stride, head_dim, reinterpret_cast<uint32_t*>(words));
      else
        for (int i = 0; i < head_dim; ++i) values[2 * i] = float_to_bf16(x[i]);
    } else {
      float scales[4];
      for (int i = 0; i < together; ++i) scales[i] = quantise(x + i * stride, head_dim, q + i * kLargestHead);
      if (together == 4)
        write_four(q, kLargestHead, head_dim, reinterpret_cast<uint32_t*>(words));
      else
        for (int i = 0; i < head_dim; ++i) words[4 * i + lane % 4] = static_cast<uint8_t>(q[i]);
      __builtin_memcpy(tile + layout.scales_offset() + lane * 4, scales, static_cast<size_t>(together) * 4);
    }
  }
}

template <class Formats, int kHead>
inline void store_values(const KVLayout& layout, const float* x, int64_t stride, int count, uint8_t* cell, int slot) {
  const int head_dim = head_size<kHead>(layout);
  if (layout.tiled)
    return store_tiled_values<Formats, kHead>(layout, x, stride, count, cell + layout.v_offset, slot % kTileSlots);
  for (int t = 0; t < count; ++t, x += stride, cell += layout.cell_bytes) {
    uint8_t* to = cell + layout.v_offset;
    if (layout.dtype == DType::f32) {
      __builtin_memcpy(to, x, static_cast<size_t>(head_dim) * 4);
    } else if (layout.dtype == DType::bf16) {
      Formats::store_bf16(x, head_dim, reinterpret_cast<uint16_t*>(to));
    } else {
      int8_t q[kLargestHead];
      const float scale = quantise(x, head_dim, q);
      for (int i = 0; i < head_dim; ++i) to[i] = static_cast<uint8_t>(q[i]);
      __builtin_memcpy(cell + layout.cell_bytes - 4, &scale, 4);
    }
  }
}

// int4: a cell has codes of K and of V, then four bytes for each 32 values of K, then of V: scale and minimum.

inline int64_t scale_bytes(int head_dim) { return (head_dim + kCodeGroup - 1) / kCodeGroup * int64_t{4}; }

// In each group x ~ minimum + code * scale; the second half's codes are the high ones. NaN where x is not finite.
inline void encode(const float* __restrict x, int n, uint8_t* __restrict codes, uint8_t* __restrict scales) {
  for (int left; n > 0; n -= left, x += left, scales += 4) {
    left = n < kCodeGroup ? n : kCodeGroup;
    float low[kCodeGroup], high[kCodeGroup];
    for (int i = 0; i < kCodeGroup; ++i) low[i] = high[i] = x[i < left ? i : 0];
    for (int half = kCodeGroup / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) {
        low[i] = low[i] < low[i + half] ? low[i] : low[i + half];
        high[i] = high[i] > high[i + half] ? high[i] : high[i + half];
      }
    const float poison = magnitude(x, left) * 0.0f;
    const uint16_t minimum = float_to_bf16(low[0] + poison);
    const float least = bf16_to_float(minimum);
    const uint16_t scale = float_to_bf16((high[0] - least) * (1.0f / 15.0f) + poison);
    const float step = bf16_to_float(scale), inverse = step > 1e-37f ? 1.0f / step : 0.0f;
    uint8_t code[kCodeGroup];
    for (int i = 0; i < left; ++i) {
      const float steps = (x[i] - least) * inverse, above = steps > 0.0f ? steps : 0.0f;
      code[i] = static_cast<uint8_t>(round_to_int(above < 15.0f ? above : 15.0f));
    }
    for (int i = 0; i < left / 2; ++i) *codes++ = static_cast<uint8_t>(code[i] | code[left / 2 + i] << 4);
    __builtin_memcpy(scales, &scale, 2);
    __builtin_memcpy(scales + 2, &minimum, 2);
  }
}

inline void decode(const uint8_t* __restrict codes, const uint8_t* __restrict scales, int n, float* __restrict x) {
  for (int half; n > 0; n -= 2 * half, x += 2 * half, codes += half, scales += 4) {
    half = (n < kCodeGroup ? n : kCodeGroup) / 2;
    uint16_t pair[2];
    __builtin_memcpy(pair, scales, 4);
    const float step = bf16_to_float(pair[0]), least = bf16_to_float(pair[1]);
    for (int i = 0; i < half; ++i) {
      x[i] = least + step * static_cast<float>(codes[i] & 15);
      x[half + i] = least + step * static_cast<float>(codes[i] >> 4);
    }
  }
}

// Keys are coded as differences from the mean of the keys before them in their 16 positions, as these will be read:
// what a head's keys have in common is most of them, and would be most of the error.
struct KeyMean {
  float mean[kLargestHead], difference[kLargestHead];
  explicit KeyMean(int head_dim) { __builtin_memset(mean, 0, static_cast<size_t>(head_dim) * 4); }

  // Puts the key of lane `lane` into x; one that is not finite leaves the mean alone.
  void read(const KVLayout& layout, const uint8_t* cell, int head_dim, int lane, float* __restrict x) {
    decode(cell, cell + layout.cell_bytes - 2 * scale_bytes(head_dim), head_dim, difference);
    const float largest = magnitude(difference, head_dim), share = 1.0f / static_cast<float>(lane + 1);
    for (int i = 0; i < head_dim; ++i) x[i] = mean[i] + difference[i];
    if (largest == largest)
      for (int i = 0; i < head_dim; ++i) mean[i] += difference[i] * share;
  }
};

template <int kHead>
inline void encode_keys(const QKVRun& work, int head, float* keys, uint8_t* cell) {
  const KVLayout& layout = *work.layout;
  const int head_dim = head_size<kHead>(layout);
  KeyMean before(head_dim);
  float key[kLargestHead];
  for (int i = 0; i < work.num_earlier; ++i)
    before.read(layout, work.earlier[i] + head * layout.head_stride, head_dim, i, key);
  for (int t = 0; t < work.count; ++t, keys += head_dim, cell += layout.cell_bytes) {
    for (int i = 0; i < head_dim; ++i) keys[i] -= before.mean[i];
    encode(keys, head_dim, cell, cell + layout.cell_bytes - 2 * scale_bytes(head_dim));
    before.read(layout, cell, head_dim, work.num_earlier + t, key);
  }
}

template <class Formats, int kHead>
void expand_cells(const KVLayout& layout, const uint8_t* const* cells, int count, const KVLayout& to, uint8_t* tile) {
  const int head_dim = head_size<kHead>(layout), k_words = to.k_words;
  uint32_t words[kTileSlots * kLargestHead / 4];
  int8_t values[kTileSlots * kLargestHead], *keys = reinterpret_cast<int8_t*>(words);
  float scales[2][kTileSlots] = {}, x[kLargestHead];
  KeyMean before(head_dim);
  __builtin_memset(keys, 0, static_cast<size_t>(kTileSlots) * k_words * 4);
  __builtin_memset(values, 0, static_cast<size_t>(kTileSlots) * head_dim);
  for (int lane = 0; lane < count; ++lane) {
    const uint8_t* cell = cells[lane];
    before.read(layout, cell, head_dim, lane, x);
    scales[0][lane] = quantise(x, head_dim, keys + lane * k_words * 4);
    decode(cell + layout.v_offset, cell + layout.cell_bytes - scale_bytes(head_dim), head_dim, x);
    scales[1][lane] = quantise(x, head_dim, values + lane * head_dim);
  }
  for (int i = 0; i < kTileSlots * k_words; ++i) words[i] ^= 0x80808080u;  // 128 added
  write_lanes<Formats>(words, k_words, kTileSlots, reinterpret_cast<uint32_t*>(tile), 0);
  for (int i = 0; i < kTileSlots; i += 4)
    write_four(values + i * head_dim, head_dim, head_dim,
               reinterpret_cast<uint32_t*>(tile + to.v_offset) + i / 4 * to.padded_head);
  __builtin_memcpy(tile + to.scales_offset(), scales[0], sizeof scales[0]);
  __builtin_memcpy(tile + to.v_offset + to.scales_offset(), scales[1], sizeof scales[1]);
}

// Of `count` heads or rows of n values, `stride` apart. All before any is used: each waits long for its root, but not
// for each other's.
inline void inverses_of(const float* x, int64_t stride, int count, int n, float eps, float* inverse) {
  for (int i = 0; i < count; ++i) inverse[i] = inverse_rms(x + i * stride, n, eps);
}

// The norm's weights of a head; null where there is no norm.
inline const float* weights_of(const QKVOp& op, const float* weights, int head, int head_dim) {
  if (op.norm == QKNorm::none) return nullptr;
  return op.norm == QKNorm::full_width ? weights + int64_t{head} * head_dim : weights;
}

// A head whose interleaved pairs are taken apart.
inline const float* apart_of(const float* x, int head_dim, int num_pairs, float* apart) {
  for (int i = 0; i < num_pairs; ++i) apart[i] = x[2 * i], apart[num_pairs + i] = x[2 * i + 1];
  for (int i = 2 * num_pairs; i < head_dim; ++i) apart[i] = x[i];
  return apart;
}

// One head of one token, q or k.
template <int kHead>
inline void ready(const QKVRun& work, const float* rope, int token, const float* x, const float* weights, float inverse,
                  float* out) {
  const int num_pairs = work.op->num_pairs;
  const float* cos = rope == nullptr ? nullptr : rope + int64_t{token} * 2 * num_pairs;
  const float* sin = cos == nullptr ? nullptr : cos + num_pairs;
  float apart[kLargestHead];
  if (work.op->interleaved) x = apart_of(x, work.layout->head_dim, num_pairs, apart);
  ready_head<kHead>(x, work.layout->head_dim, inverse, weights, cos, sin, num_pairs, out);
}

// Asks for the lines of a tile that some tokens go to, a few at a time: they were in memory last. To the second-level
// cache, for there may be more of them on their way than to the first.
class Ahead {
 public:
  Ahead(const KVLayout& layout, uint8_t* block, int slot, int count)
      : cell_(cell_of(layout, block, 0, slot)), head_stride_(layout.head_stride), k_lines_(layout.k_words) {
    const int lane = slot % kTileSlots, per_word = layout.values_per_word, row_lines = layout.padded_head / 16;
    v_lines_ = layout.latent ? 0 : ((lane + count - 1) / per_word - lane / per_word + 1) * row_lines;
    v_offset_ = layout.v_offset + int64_t{lane / per_word} * row_lines * 64;
    heads_left_ = layout.tiled ? layout.num_kv_heads : 0;
  }
  int num_lines() const { return (k_lines_ + v_lines_) * heads_left_; }
  void fetch(int count) {
    for (; heads_left_ > 0 && count > 0; --count) {
      __builtin_prefetch(cell_ + (line_ < k_lines_ ? line_ * 64 : v_offset_ + (line_ - k_lines_) * 64), 0, 2);
      if (++line_ < k_lines_ + v_lines_) continue;
      line_ = 0;
      --heads_left_;
      cell_ += head_stride_;
    }
  }

 private:
  const uint8_t* cell_;  // of the head
  int64_t head_stride_, v_offset_;
  int k_lines_, v_lines_, heads_left_, line_ = 0;
};

template <class Formats, int kHead>
inline void store_queries(const QKVRun& work) {
  const QKVOp& op = *work.op;
  const KVLayout& layout = *work.layout;
  const int head_dim = head_size<kHead>(layout);
  const int64_t query_bytes = work.query_stride / op.num_heads;
  float head[kLargestHead], inverse[kAtOnce], whole = 1.0f;
  Ahead ahead(layout, work.block, work.slot, work.count);
  const int lines_a_head = ahead.num_lines() / (work.count * op.num_heads) + 1;
  for (int t = 0; t < work.count; ++t) {
    const float* row = work.rows + t * work.row_stride;
    uint8_t* to = work.queries + t * work.query_stride;
    if (op.norm == QKNorm::full_width) inverses_of(row, 0, 1, op.num_heads * head_dim, op.eps, &whole);
    for (int first = 0; first < op.num_heads; first += kAtOnce) {
      const int left = op.num_heads - first, count = left < kAtOnce ? left : kAtOnce;
      const float* x = row + int64_t{first} * head_dim;
      if (op.norm == QKNorm::per_head) inverses_of(x, head_dim, count, head_dim, op.eps, inverse);
      for (int i = 0; i < count; ++i) {
        ahead.fetch(lines_a_head);
        ready<kHead>(work, work.query_rope, t, x + i * head_dim, weights_of(op, op.q_norm, first + i, head_dim),
                     op.norm == QKNorm::per_head ? inverse[i] : whole, head);
        if (layout.is_integer()) rotate(head, head_dim);
        store_query<Formats, kHead>(layout, head, to + (first + i) * query_bytes);
      }
    }
  }
}

// Head by head over all tokens, so that a tile's lines are written while they are near.
template <class Formats, int kHead>
void run_heads(const QKVRun& work) {
  const QKVOp& op = *work.op;
  const KVLayout& layout = *work.layout;
  const int head_dim = head_size<kHead>(layout), num_kv_heads = layout.num_kv_heads;
  const int64_t stride = work.row_stride;
  const bool rotates = layout.is_integer(), coded = layout.dtype == DType::q4_1;
  store_queries<Formats, kHead>(work);
  if (op.queries_only) return;
  const float* k = work.rows + int64_t{op.num_heads} * head_dim;
  const float* v = k + int64_t{num_kv_heads} * head_dim;
  float inverse[kTileSlots];
  if (op.norm == QKNorm::full_width) inverses_of(k, stride, work.count, num_kv_heads * head_dim, op.eps, inverse);
  float heads[kTileSlots * kLargestHead];  // of the tokens
  for (int h = 0; h < num_kv_heads; ++h, k += head_dim, v += head_dim) {
    const float* weights = weights_of(op, op.k_norm, h, head_dim);
    for (int t = 0; t < work.count; ++t) {
      if (op.norm == QKNorm::per_head && t % kAtOnce == 0) {
        const int left = work.count - t;
        inverses_of(k + t * stride, stride, left < kAtOnce ? left : kAtOnce, head_dim, op.eps, inverse + t);
      }
      ready<kHead>(work, work.rope, t, k + t * stride, weights, inverse[t], heads + t * head_dim);
      if (rotates) rotate(heads + t * head_dim, head_dim);
    }
    uint8_t* cell = cell_of(layout, work.block, h, work.slot);
    if (coded)
      encode_keys<kHead>(work, h, heads, cell);
    else
      store_keys<Formats, kHead>(layout, heads, work.count, cell, work.slot);
    for (int t = 0; rotates && t < work.count; ++t) {
      __builtin_memcpy(heads + t * head_dim, v + t * stride, static_cast<size_t>(head_dim) * 4);
      rotate(heads + t * head_dim, head_dim);
    }
    for (int t = 0; coded && t < work.count; ++t, cell += layout.cell_bytes)
      encode(heads + t * head_dim, head_dim, cell + layout.v_offset, cell + layout.cell_bytes - scale_bytes(head_dim));
    if (coded || layout.latent) continue;
    store_values<Formats, kHead>(layout, rotates ? heads : v, rotates ? head_dim : stride, work.count, cell, work.slot);
  }
}

template <class Formats>
void run(const QKVRun& work) {
  const int head_dim = work.layout->head_dim, num_pairs = work.op->num_pairs;
  const bool whole = num_pairs == 0 || 2 * num_pairs == head_dim;
  if (head_dim == 128 && whole) return run_heads<Formats, 128>(work);
  if (head_dim == 64 && whole) return run_heads<Formats, 64>(work);
  if (head_dim == 32 && whole) return run_heads<Formats, 32>(work);
  run_heads<Formats, 0>(work);
}

template <class Formats>
void expand(const KVLayout& layout, const uint8_t* const* cells, int count, const KVLayout& to, uint8_t* tile) {
  if (layout.head_dim == 128) return expand_cells<Formats, 128>(layout, cells, count, to, tile);
  if (layout.head_dim == 64) return expand_cells<Formats, 64>(layout, cells, count, to, tile);
  expand_cells<Formats, 0>(layout, cells, count, to, tile);
}

template <class Formats>
const QKVKernels kKernels{&run<Formats>, &expand<Formats>, &rotate, &turn<Formats>};

}  // namespace
}  // namespace maitred
