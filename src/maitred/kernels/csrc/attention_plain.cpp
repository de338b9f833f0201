// Attention in plain C++: always there, and what the other instruction sets are checked against.
#include <cmath>
#include <cstring>
#include <limits>

#include "attention.h"
#include "bits.h"

namespace maitred {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// q.k of one row and one slot of a tile, as the pool's dtype has it.
float dot(const Segment& work, const uint8_t* query, const uint8_t* tile, int lane) {
  const KVLayout& layout = *work.layout;
  const uint8_t* key = tile + lane * 4;
  float sum = 0.0f;
  if (layout.dtype == DType::f32) {
    const float* q = reinterpret_cast<const float*>(query);
    for (int i = 0; i < layout.head_dim; ++i) sum += q[i] * *reinterpret_cast<const float*>(key + i * 64);
    return sum;
  }
  if (layout.dtype == DType::bf16) {
    const uint16_t* q = reinterpret_cast<const uint16_t*>(query);
    for (int i = 0; i < layout.head_dim; ++i)
      sum += bf16_to_float(q[i]) * bf16_to_float(reinterpret_cast<const uint16_t*>(key + i / 2 * 64)[i % 2]);
    return sum;
  }
  const int64_t part = int8_part(layout);
  const int8_t* high = reinterpret_cast<const int8_t*>(query);
  const int8_t* low = high + part;
  int32_t high_sum = 0, low_sum = 0;
  for (int i = 0; i < layout.head_dim; ++i) {
    const int k = static_cast<int>(key[i / 4 * 64 + i % 4]) - 128;
    high_sum += high[i] * k;
    low_sum += low[i] * k;
  }
  float q_scale, k_scale;
  std::memcpy(&q_scale, query + 2 * part, 4);
  std::memcpy(&k_scale, tile + layout.scales_offset() + lane * 4, 4);
  return (static_cast<float>(high_sum) + static_cast<float>(low_sum) * (1.0f / 254.0f)) * q_scale * k_scale;
}

float score(const Segment& work, float dot) {
  if (work.softcap == 0.0f) return dot * (work.scale * kLog2E);
  return std::tanh(dot * (work.scale / work.softcap)) * (work.softcap * kLog2E);
}

// V of one slot as floats, without its scale.
void add_value(const Segment& work, const uint8_t* values, int lane, float p, float* out) {
  const KVLayout& layout = *work.layout;
  const int per_word = layout.values_per_word;
  const uint8_t* words = values + int64_t{lane / per_word} * layout.padded_head * 4;
  if (layout.dtype == DType::f32) {
    for (int i = 0; i < layout.value_dim; ++i) out[i] += p * reinterpret_cast<const float*>(words)[i];
  } else if (layout.dtype == DType::bf16) {
    const uint16_t* pairs = reinterpret_cast<const uint16_t*>(words) + lane % 2;
    for (int i = 0; i < layout.value_dim; ++i) out[i] += p * bf16_to_float(pairs[2 * i]);
  }
}

// K, or V, of the tile with this slot, of the row's K/V head.
const uint8_t* tile_of(const Segment& work, const uint8_t* const* tiles, int row, int slot) {
  return tiles[slot / kTileSlots] + row / (work.rows / work.num_heads) * work.layout->head_stride;
}

// sum of p * scale * V: p * scale in 16 bits of the largest, then integers, exactly.
void add_int8_values(const Segment& work, int row, const float* p, float* out) {
  const int first = work.first[row], end = work.end[row];
  const KVLayout& layout = *work.layout;
  float scaled[kSegmentSlots], largest = 0.0f, poison = 0.0f;
  for (int slot = first; slot < end; ++slot) {
    float scale;
    std::memcpy(&scale, tile_of(work, work.values, row, slot) + layout.scales_offset() + slot % kTileSlots * 4, 4);
    scaled[slot] = p[slot] * scale;
    largest = scaled[slot] > largest ? scaled[slot] : largest;
    poison += scaled[slot] * 0.0f;  // NaN if one of them is
  }
  const float inverse = largest > 1e-30f ? 65535.0f / largest : 0.0f;
  int32_t weights[kSegmentSlots];
  for (int slot = first; slot < end; ++slot)
    weights[slot] = static_cast<int32_t>(std::nearbyint(scaled[slot] * inverse));
  for (int i = 0; i < layout.head_dim; ++i) {
    int32_t sum = 0;
    for (int slot = first; slot < end && poison == 0.0f; ++slot) {
      const uint8_t* words = tile_of(work, work.values, row, slot);
      const int lane = slot % kTileSlots;
      sum += weights[slot] * static_cast<int8_t>(words[(int64_t{lane / 4} * layout.padded_head + i) * 4 + lane % 4]);
    }
    out[i] = static_cast<float>(sum) * (largest * (1.0f / 65535.0f) + poison);
  }
}

void segment(const Segment& work) {
  const KVLayout& layout = *work.layout;
  for (int row = 0; row < work.rows; ++row) {
    const int first = work.first[row], end = work.end[row];
    float* p = work.scores + int64_t{row} * kSegmentSlots;
    float* out = work.out + int64_t{row} * layout.padded_head;
    float maximum = -kInfinity, sum = 0.0f;
    for (int slot = first; slot < end; ++slot) {
      const uint8_t* tile = tile_of(work, work.tiles, row, slot);
      p[slot] = score(work, dot(work, work.queries + row * work.query_stride, tile, slot % kTileSlots));
      maximum = p[slot] > maximum ? p[slot] : maximum;
    }
    for (int slot = first; slot < end; ++slot) {
      p[slot] = std::exp2(p[slot] - maximum);
      if (layout.dtype == DType::bf16) p[slot] = bf16_to_float(float_to_bf16(p[slot]));
      sum += p[slot];
    }
    work.maximum[row] = maximum;
    work.sum[row] = sum;
    if (first >= end) continue;
    std::memset(out, 0, static_cast<std::size_t>(layout.padded_head) * 4);
    if (layout.dtype == DType::int8) {
      add_int8_values(work, row, p, out);
    } else {
      for (int slot = first; slot < end; ++slot)
        add_value(work, tile_of(work, work.values, row, slot), slot % kTileSlots, p[slot], out);
    }
  }
}

void fold(int rows, int padded_head, const Partial& total, const Partial& more) {
  for (int row = 0; row < rows; ++row) {
    if (more.sum[row] == 0.0f) continue;
    float* to = total.out + int64_t{row} * padded_head;
    const float* from = more.out + int64_t{row} * padded_head;
    if (total.sum[row] == 0.0f) {
      total.maximum[row] = more.maximum[row];
      total.sum[row] = more.sum[row];
      std::memcpy(to, from, static_cast<std::size_t>(padded_head) * 4);
      continue;
    }
    const float maximum = total.maximum[row] > more.maximum[row] ? total.maximum[row] : more.maximum[row];
    const float a = std::exp2(total.maximum[row] - maximum), b = std::exp2(more.maximum[row] - maximum);
    total.maximum[row] = maximum;
    total.sum[row] = total.sum[row] * a + more.sum[row] * b;
    for (int i = 0; i < padded_head; ++i) to[i] = to[i] * a + from[i] * b;
  }
}

void finish(int value_dim, float maximum, float sum, const float* total, float sink, float* out) {
  float factor = 1.0f;
  if (sink != -kInfinity) {
    const float larger = sink > maximum ? sink : maximum;
    factor = std::exp2(maximum - larger);
    sum = sum * factor + std::exp2(sink - larger);
  }
  factor /= sum;
  for (int i = 0; i < value_dim; ++i) out[i] = total[i] * factor;
}

const AttentionKernels kKernels{{&segment, &segment, &segment}, &fold, &finish};

}  // namespace

const AttentionKernels& attention_kernels_plain() { return kKernels; }

}  // namespace maitred
