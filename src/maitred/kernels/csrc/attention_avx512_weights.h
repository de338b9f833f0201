// From scores to weights: a row's maximum, p = 2^(score - maximum) as its format rounds it, and the sum of p. For
// attention_avx512.cpp and attention_amx.cpp.
//
// Slots that a row does not see are given a score of -inf, hence a weight of 0, as far as its last vectors reach; no
// loop needs a mask then.
#pragma once

#include "attention_avx512_formats.h"

namespace maitred {
namespace {

constexpr int kPair = 2 * kTileSlots;  // slots that are weighed at once

// Makes the row's scores final and returns their maximum in powers of two; NaN leaves it alone.
inline float find_maximum(const Segment& work, int row) {
  float* scores = work.scores + row * kScoreStride;
  const int first = work.first[row], end = work.end[row];
  if (first >= end) return -__builtin_inff();
  const int from = first / kPair * kPair, to = (end + kPair - 1) / kPair * kPair;
  if (work.softcap != 0.0f)
    for (int i = from; i < to; i += 16)
      _mm512_storeu_ps(scores + i, softcapped(load(scores + i), work.scale, work.softcap));
  __m512 maximum = _mm512_set1_ps(-__builtin_inff());
  if (from < first) {
    const uint32_t hidden = (1u << (first - from)) - 1;
    _mm512_mask_storeu_ps(scores + from, static_cast<__mmask16>(hidden), maximum);
    _mm512_mask_storeu_ps(scores + from + 16, static_cast<__mmask16>(hidden >> 16), maximum);
  }
  if (end < to) {
    const uint32_t hidden = ~0u << (end - (to - kPair));
    _mm512_mask_storeu_ps(scores + to - 32, static_cast<__mmask16>(hidden), maximum);
    _mm512_mask_storeu_ps(scores + to - 16, static_cast<__mmask16>(hidden >> 16), maximum);
  }
  __m512 other = maximum;
  for (int i = from; i < to; i += kPair) {
    maximum = _mm512_max_ps(load(scores + i), maximum);
    other = _mm512_max_ps(load(scores + i + 16), other);
  }
  return _mm512_reduce_max_ps(_mm512_max_ps(maximum, other)) * exponent_scale(work);
}

// Each writes the row's weights and returns the sum of p.
inline float weights_of(F32, const Segment& work, int row, int, float maximum, int, int, uint8_t* out) {
  const float* scores = work.scores + row * kScoreStride;
  const __m512 most = _mm512_set1_ps(maximum), scale = _mm512_set1_ps(exponent_scale(work));
  __m512 sum = _mm512_setzero_ps();
  for (int i = work.first[row] / kTileSlots * kTileSlots; i < work.end[row]; i += 16) {
    const __m512 p = exp2_of(_mm512_fmsub_ps(load(scores + i), scale, most));
    sum = _mm512_add_ps(sum, p);
    _mm512_storeu_ps(out + i * 4, p);
  }
  return _mm512_reduce_add_ps(sum);
}

inline float weights_of(BF16, const Segment& work, int row, int, float maximum, int, int, uint8_t* out) {
  const float* scores = work.scores + row * kScoreStride;
  const __m512 most = _mm512_set1_ps(maximum), scale = _mm512_set1_ps(exponent_scale(work));
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  __m512 sum = _mm512_setzero_ps();
  for (int i = work.first[row] / kPair * kPair; i < work.end[row]; i += kPair) {
    const __m512 p = exp2_of(_mm512_fmsub_ps(load(scores + i), scale, most));
    const __m512 q = exp2_of(_mm512_fmsub_ps(load(scores + i + 16), scale, most));
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(q, p);
    sum = BF16::add_value(sum, rounded, ones);
    _mm512_storeu_si512(out + i * 2, rounded);
  }
  return _mm512_reduce_add_ps(sum);
}

// p * V's scale in 16 bits of the largest of them; 0 for the tiles of [first_tile, end_tile) that the row does not see.
inline float weights_of(Int8, const Segment& work, int row, int head, float maximum, int first_tile, int end_tile,
                        uint8_t* out) {
  float* scores = work.scores + row * kScoreStride;
  const int64_t scales = work.layout->v_offset + work.layout->scales_offset() + head * work.layout->head_stride;
  const int from = work.first[row] / kTileSlots;
  const int to = larger(from, (work.end[row] + kTileSlots - 1) / kTileSlots);
  const __m512 shift = _mm512_set1_ps(maximum), scale = _mm512_set1_ps(exponent_scale(work));
  const __m512 zero = _mm512_setzero_ps();
  __m512 sum = zero, most = zero, poison = zero;
  for (int tile = from; tile < to; ++tile) {
    const __m512 p = exp2_of(_mm512_fmsub_ps(load(scores + tile * kTileSlots), scale, shift));
    const __mmask16 counts = _mm512_cmp_ps_mask(p, zero, _CMP_NEQ_UQ);  // hidden slots' scales may be anything
    const __m512 scaled = _mm512_maskz_mul_ps(counts, p, load(work.tiles[tile] + scales));
    sum = _mm512_add_ps(sum, p);
    most = _mm512_max_ps(scaled, most);
    poison = _mm512_fmadd_ps(scaled, zero, poison);  // NaN if one of them is
    _mm512_storeu_ps(scores + tile * kTileSlots, scaled);
  }
  const float greatest = _mm512_reduce_max_ps(most);
  const __m512 inverse = _mm512_set1_ps(greatest > 1e-30f ? 65535.0f / greatest : 0.0f);
  for (int tile = first_tile; tile < end_tile; ++tile) {
    const __mmask16 seen = tile >= from && tile < to ? 0xffff : 0;
    const __m512 scaled = _mm512_maskz_loadu_ps(seen, scores + tile * kTileSlots);
    const __m512i weights = _mm512_cvtps_epi32(_mm512_mul_ps(scaled, inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + tile * kTileSlots),
                     _mm512_cvtepi32_epi8(_mm512_srli_epi32(weights, 8)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + Int8::kLow + tile * kTileSlots), _mm512_cvtepi32_epi8(weights));
  }
  const float factor = greatest * (1.0f / 65535.0f) + _mm512_reduce_add_ps(poison);
  __builtin_memcpy(out + Int8::kFactor, &factor, 4);
  return _mm512_reduce_add_ps(sum);
}

// From a row's scores and maximum to its weights and their sum; `head` is its K/V head.
template <class Format>
inline void weigh_row(const Segment& work, int row, int head, int first_tile, int end_tile) {
  const bool sees = work.first[row] < work.end[row];
  uint8_t* out = work.probabilities + int64_t{row} * Format::kWeightBytes;
  work.sum[row] = 0.0f;
  if (sees || Format::kInteger)
    work.sum[row] = weights_of(Format{}, work, row, head, work.maximum[row], first_tile, end_tile, out);
}

}  // namespace
}  // namespace maitred
