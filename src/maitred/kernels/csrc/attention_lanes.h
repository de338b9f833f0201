// Attention for instruction sets without bf16 dot products and 16 lanes.
//
// K is an anonymous struct of an attention_<isa>.cpp file, with a vector type K::V (vector_math.h) that also loads the
// even and the odd values of pairs of bf16, and
//   Bytes                                              what bytes of words are multiplied as
//   signed_word, unsigned_word, signed_words, unsigned_words  a word in all lanes, or a vector of them, as Bytes
//   Sums                                               sums of four products of bytes a word, exact, in int32
// Instantiated with such a type, everything here is local to that file.
//
// Rows are taken in blocks, so that what was loaded of K or V meets every row of its block. Weights are kept as floats,
// or bytes for int8, in Segment::probabilities: kSegmentSlots * 4 bytes a row.
#pragma once

#include <stdint.h>

#include "attention.h"
#include "bits.h"

namespace maitred {
template <class K>
struct AttentionLanes {
  using V = typename K::V;
  using Bytes = typename K::Bytes;
  using Sums = typename K::Sums;

  static constexpr int kVectors = kTileSlots / V::width;  // of a tile's slots
  static constexpr int kRowsAtOnce = 4;

  static float infinity() { return __builtin_inff(); }
  static const float* floats(const uint8_t* p) { return reinterpret_cast<const float*>(p); }

  // 2^t for t <= 60; about 0 below -126; NaN stays NaN.
  static V exp2_of(V t) {
    t = V::max(V::set1(-126.0f), t);
    const V n = V::round_even(t);
    const V f = t - n;
    V p = V::set1(1.54035304e-4f);  // ln(2)^k / k!
    p = V::fma(p, f, V::set1(1.33335581e-3f));
    p = V::fma(p, f, V::set1(9.61812911e-3f));
    p = V::fma(p, f, V::set1(5.55041087e-2f));
    p = V::fma(p, f, V::set1(2.40226507e-1f));
    p = V::fma(p, f, V::set1(6.93147181e-1f));
    p = V::fma(p, f, V::set1(1.0f));
    return p * V::pow2(n);
  }

  static float exp2_of(float t) {
    float lanes[V::width];
    V::store(lanes, exp2_of(V::set1(t)));
    return t < -126.0f ? 0.0f : lanes[0];
  }

  static V softcapped(V score, float softcap) {  // tanh(x) = 1 - 2 / (e^2x + 1)
    const V t = V::min(V::set1(60.0f), V::max(V::set1(-60.0f), score * V::set1(2.0f * kLog2E / softcap)));
    const V one = V::set1(1.0f);
    return (one - V::set1(2.0f) / (exp2_of(t) + one)) * V::set1(softcap * kLog2E);
  }

  static float stored_scale(const Segment& work) { return work.softcap == 0.0f ? work.scale * kLog2E : work.scale; }

  // Scores of R rows over one tile.
  template <int R>
  static void score_f32(const Segment& work, const uint8_t* tile, const uint8_t* q, float* scores) {
    V sums[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kVectors; ++i) sums[r][i] = V::set1(0.0f);
    for (int w = 0; w < work.layout->k_words; ++w) {
      for (int i = 0; i < kVectors; ++i) {
        const V k = V::load(floats(tile + w * 64) + i * V::width);
        for (int r = 0; r < R; ++r) sums[r][i] = V::fma(k, V::set1(floats(q + r * work.query_stride)[w]), sums[r][i]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kVectors; ++i)
        V::store(scores + r * kSegmentSlots + i * V::width, sums[r][i] * V::set1(stored_scale(work)));
  }

  template <int R>
  static void score_bf16(const Segment& work, const uint8_t* tile, const uint8_t* q, float* scores) {
    V sums[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kVectors; ++i) sums[r][i] = V::set1(0.0f);
    for (int w = 0; w < work.layout->k_words; ++w) {
      V first[R], second[R];
      for (int r = 0; r < R; ++r) {
        const uint16_t* query = reinterpret_cast<const uint16_t*>(q + r * work.query_stride) + 2 * w;
        first[r] = V::set1(bf16_to_float(query[0]));
        second[r] = V::set1(bf16_to_float(query[1]));
      }
      for (int i = 0; i < kVectors; ++i) {
        const uint8_t* words = tile + w * 64 + i * V::width * 4;
        const V low = V::load_even(words), high = V::load_odd(words);
        for (int r = 0; r < R; ++r) sums[r][i] = V::fma(high, second[r], V::fma(low, first[r], sums[r][i]));
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kVectors; ++i)
        V::store(scores + r * kSegmentSlots + i * V::width, sums[r][i] * V::set1(stored_scale(work)));
  }

  // Keys were stored with 128 added; behind the query's parts stand scale and sums.
  static void score_int8(const Segment& work, const uint8_t* tile, const uint8_t* q, float* scores) {
    const KVLayout& layout = *work.layout;
    const int64_t part = int8_part(layout);
    Sums high[kVectors], low[kVectors];
    for (int w = 0; w < layout.k_words; ++w) {
      const Bytes query_high = K::signed_word(q + w * 4), query_low = K::signed_word(q + part + w * 4);
      for (int i = 0; i < kVectors; ++i) {
        const Bytes keys = K::unsigned_words(tile + w * 64 + i * V::width * 4);
        high[i].add(keys, query_high);
        low[i].add(keys, query_low);
      }
    }
    float scale;
    int32_t high_sum, low_sum;
    __builtin_memcpy(&scale, q + 2 * part, 4);
    __builtin_memcpy(&high_sum, q + 2 * part + 4, 4);
    __builtin_memcpy(&low_sum, q + 2 * part + 8, 4);
    const float* k_scales = floats(tile + layout.scales_offset());
    for (int i = 0; i < kVectors; ++i) {
      const V dot = V::fma(low[i].minus(128 * low_sum), V::set1(1.0f / 254.0f), high[i].minus(128 * high_sum));
      V::store(scores + i * V::width, dot * V::set1(scale * stored_scale(work)) * V::load(k_scales + i * V::width));
    }
  }

  // From a row's scores to its weights, their maximum and sum; scores become the weights, 0 beside what the row sees.
  static void weigh_row(const Segment& work, const uint8_t* const* values, int row) {
    float* scores = work.scores + int64_t{row} * kSegmentSlots;
    const int first = work.first[row], end = work.end[row];
    const int from = first / kTileSlots * kTileSlots, to = (end + kTileSlots - 1) / kTileSlots * kTileSlots;
    if (work.softcap != 0.0f)
      for (int i = from; i < to; i += V::width) V::store(scores + i, softcapped(V::load(scores + i), work.softcap));
    for (int i = from; i < first; ++i) scores[i] = -infinity();
    for (int i = end; i < to; ++i) scores[i] = -infinity();
    float lanes[kTileSlots];
    V most = V::set1(-infinity());
    for (int i = from; i < to; i += V::width) most = V::max(V::load(scores + i), most);
    V::store(lanes, most);
    float maximum = lanes[0];
    for (int i = 1; i < V::width; ++i) maximum = lanes[i] > maximum ? lanes[i] : maximum;
    for (int i = from; i < to; i += V::width) V::store(scores + i, exp2_of(V::load(scores + i) - V::set1(maximum)));
    for (int i = from; i < first; ++i) scores[i] = 0.0f;
    for (int i = end; i < to; ++i) scores[i] = 0.0f;
    if (work.layout->dtype == DType::bf16)
      for (int i = from; i < to; ++i) scores[i] = bf16_to_float(float_to_bf16(scores[i]));
    for (int lane = 0; lane < kTileSlots; ++lane) lanes[lane] = 0.0f;
    for (int i = from; i < to; i += kTileSlots)
      for (int lane = 0; lane < kTileSlots; ++lane) lanes[lane] += scores[i + lane];
    for (int half = kTileSlots / 2; half > 0; half /= 2)
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    work.maximum[row] = maximum;
    work.sum[row] = lanes[0];
    if (work.layout->dtype != DType::int8) return;
    // p * V's scale in 16 bits of the largest: high bytes, then low ones, then what their products are multiplied with.
    float largest = 0.0f, poison = 0.0f;
    for (int i = first; i < end; ++i) {
      scores[i] *= floats(values[i / kTileSlots] + work.layout->scales_offset())[i % kTileSlots];
      largest = scores[i] > largest ? scores[i] : largest;
      poison += scores[i] * 0.0f;  // NaN if one of them is
    }
    const float inverse = largest > 1e-30f && poison == 0.0f ? 65535.0f / largest : 0.0f;
    uint8_t* bytes = work.probabilities + int64_t{row} * kSegmentSlots * 4;
    for (int i = 0; i < kSegmentSlots; ++i) {
      const bool seen = i >= first && i < end;
      const int weight = seen && poison == 0.0f ? static_cast<int>(scores[i] * inverse + 0.5f) : 0;
      bytes[i] = static_cast<uint8_t>(weight >> 8);
      bytes[kSegmentSlots + i] = static_cast<uint8_t>(weight & 255);
    }
    const float factor = largest * (1.0f / 65535.0f) + poison;
    __builtin_memcpy(bytes + 2 * kSegmentSlots, &factor, 4);
  }

  // Slots [from, to) of R rows into 16 columns of `out`: V as floats.
  template <int R, bool kIsBf16>
  static void add_values(const Segment& work, const uint8_t* const* values, int row, int from, int to, int column) {
    const int64_t width = work.layout->padded_head;
    const float* weights = work.scores + int64_t{row} * kSegmentSlots;
    float* out = work.out + row * width + column;
    V sums[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kVectors; ++i) sums[r][i] = V::load(out + r * width + i * V::width);
    for (int slot = from; slot < to; ++slot) {
      const int lane = slot % kTileSlots;
      const uint8_t* words = values[slot / kTileSlots] + (lane / (kIsBf16 ? 2 : 1) * width + column) * 4;
      for (int i = 0; i < kVectors; ++i, words += V::width * 4) {
        V v = V::set1(0.0f);
        if constexpr (kIsBf16)
          v = lane % 2 == 0 ? V::load_even(words) : V::load_odd(words);
        else
          v = V::load(floats(words));
        for (int r = 0; r < R; ++r) sums[r][i] = V::fma(v, V::set1(weights[r * kSegmentSlots + slot]), sums[r][i]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kVectors; ++i) V::store(out + r * width + i * V::width, sums[r][i]);
  }

  // All that a row sees, 16 columns, in integers; weights beside that are 0.
  static void add_int8_values(const Segment& work, const uint8_t* const* values, int row, int column) {
    const int64_t width = work.layout->padded_head;
    const uint8_t* weights = work.probabilities + int64_t{row} * kSegmentSlots * 4;
    float* out = work.out + row * width + column;
    Sums high[kVectors], low[kVectors];
    for (int word = work.first[row] / 4; word * 4 < work.end[row]; ++word) {
      const Bytes p_high = K::unsigned_word(weights + word * 4),
                  p_low = K::unsigned_word(weights + kSegmentSlots + word * 4);
      const uint8_t* words = values[word / 4] + (word % 4 * width + column) * 4;
      for (int i = 0; i < kVectors; ++i) {
        const Bytes v = K::signed_words(words + i * V::width * 4);
        high[i].add(v, p_high);
        low[i].add(v, p_low);
      }
    }
    float factor;
    __builtin_memcpy(&factor, weights + 2 * kSegmentSlots, 4);
    for (int i = 0; i < kVectors; ++i) V::store(out + i * V::width, high[i].joined(low[i]) * V::set1(factor));
  }

  template <int R, bool kIsBf16>
  static void sum_rows(const Segment& work, const uint8_t* const* values, int row) {
    const int64_t width = work.layout->padded_head;
    int from = 0, to = kSegmentSlots;  // what all rows see
    for (int r = row; r < row + R; ++r) {
      from = larger(from, work.first[r]);
      to = smaller(to, work.end[r]);
      if (work.first[r] < work.end[r])
        for (int64_t i = r * width; i < (r + 1) * width; ++i) work.out[i] = 0.0f;
    }
    to = larger(from, to);
    for (int column = 0; column < width; column += 16) {
      for (int r = row; r < row + R; ++r)
        add_values<1, kIsBf16>(work, values, r, work.first[r], smaller(from, work.end[r]), column);
      if (from < to) add_values<R, kIsBf16>(work, values, row, from, to, column);
      for (int r = row; r < row + R; ++r)
        add_values<1, kIsBf16>(work, values, r, larger(to, work.first[r]), work.end[r], column);
    }
  }

  template <int R>
  static void attend_rows(const Segment& work, const uint8_t* const* keys, const uint8_t* const* values, int row) {
    const DType dtype = work.layout->dtype;
    int first = kSegmentSlots, end = 0;
    for (int r = row; r < row + R; ++r) {
      work.maximum[r] = -infinity();
      work.sum[r] = 0.0f;
      if (work.first[r] >= work.end[r]) continue;
      first = smaller(first, work.first[r]);
      end = larger(end, work.end[r]);
    }
    if (first >= end) return;
    const uint8_t* q = work.queries + row * work.query_stride;
    for (int tile = first / kTileSlots; tile * kTileSlots < end; ++tile) {
      float* scores = work.scores + int64_t{row} * kSegmentSlots + tile * kTileSlots;
      if (dtype == DType::f32) score_f32<R>(work, keys[tile], q, scores);
      if (dtype == DType::bf16) score_bf16<R>(work, keys[tile], q, scores);
      if (dtype == DType::int8)
        for (int r = 0; r < R; ++r) score_int8(work, keys[tile], q + r * work.query_stride, scores + r * kSegmentSlots);
    }
    for (int r = row; r < row + R; ++r)
      if (work.first[r] < work.end[r]) weigh_row(work, values, r);
    if (dtype == DType::f32) sum_rows<R, false>(work, values, row);
    if (dtype == DType::bf16) sum_rows<R, true>(work, values, row);
    if (dtype == DType::int8)
      for (int r = row; r < row + R; ++r)
        for (int column = 0; column < work.layout->padded_head && work.first[r] < work.end[r]; column += 16)
          add_int8_values(work, values, r, column);
  }

  static void segment(const Segment& work) {
    const int rows = work.rows / work.num_heads;
    for (int head = 0; head < work.num_heads; ++head) {
      const uint8_t *keys[kSegmentTiles], *values[kSegmentTiles];
      for (int tile = work.first_tile; tile < work.end_tile; ++tile) {
        keys[tile] = work.tiles[tile] + head * work.layout->head_stride;
        values[tile] = work.values[tile] + head * work.layout->head_stride;
      }
      int row = head * rows;
      for (; row + kRowsAtOnce <= (head + 1) * rows; row += kRowsAtOnce)
        attend_rows<kRowsAtOnce>(work, keys, values, row);
      if (row + 2 <= (head + 1) * rows) {
        attend_rows<2>(work, keys, values, row);
        row += 2;
      }
      if (row < (head + 1) * rows) attend_rows<1>(work, keys, values, row);
    }
  }

  static void fold(int rows, int padded_head, const Partial& total, const Partial& more) {
    for (int row = 0; row < rows; ++row) {
      if (more.sum[row] == 0.0f) continue;
      float* to = total.out + int64_t{row} * padded_head;
      const float* from = more.out + int64_t{row} * padded_head;
      if (total.sum[row] == 0.0f) {
        total.maximum[row] = more.maximum[row];
        total.sum[row] = more.sum[row];
        for (int i = 0; i < padded_head; ++i) to[i] = from[i];
        continue;
      }
      const float maximum = total.maximum[row] > more.maximum[row] ? total.maximum[row] : more.maximum[row];
      const float a = exp2_of(total.maximum[row] - maximum), b = exp2_of(more.maximum[row] - maximum);
      total.maximum[row] = maximum;
      total.sum[row] = total.sum[row] * a + more.sum[row] * b;
      for (int i = 0; i < padded_head; i += V::width)
        V::store(to + i, V::fma(V::load(from + i), V::set1(b), V::load(to + i) * V::set1(a)));
    }
  }

  static void finish(int value_dim, float maximum, float sum, const float* total, float sink, float* out) {
    float factor = 1.0f;
    if (sink != -infinity()) {
      const float most = sink > maximum ? sink : maximum;
      factor = exp2_of(maximum - most);
      sum = sum * factor + exp2_of(sink - most);
    }
    factor /= sum;
    for (int i = 0; i < value_dim; ++i) out[i] = total[i] * factor;
  }

  static constexpr AttentionKernels kKernels{{&segment, &segment, &segment}, &fold, &finish};
};

}  // namespace maitred
