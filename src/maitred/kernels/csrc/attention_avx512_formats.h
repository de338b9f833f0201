// 2^x, and what the arithmetic of each pool format is made of. For attention_avx512.cpp and attention_amx.cpp.
#pragma once

#include "attention.h"
#include "vec_avx512.h"

namespace maitred {
namespace {

constexpr int kTiles = 4;       // of a block of scores
constexpr int kSweepTiles = 2;  // that a sweep takes at once: 8 KB of K or V in bf16 with a head of 128

inline float float_at(const uint8_t* p) {
  float x;
  __builtin_memcpy(&x, p, 4);
  return x;
}
inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// 2^t to 2e-7: exact at whole t, 0 far below and at -inf; NaN stays NaN. 2^floor(t) comes with the last instruction.
inline __m512 exp2_of(__m512 t) {
  const __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(1.86713098e-3f);  // least relative error over [0, 1) with p(0) = 1
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.01702791e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.57999164e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40164444e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93151295e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, t);
}

inline float exp2_of(float t) { return _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(t))); }

// From q.k to a power of two.
inline __m512 softcapped(__m512 score, float scale, float softcap) {
  // tanh(x) = 1 - 2 / (e^2x + 1); beyond 2^60 it is 1 in float32, below 2^-60 it is -1.
  __m512 t = _mm512_mul_ps(score, _mm512_set1_ps(scale * 2.0f * kLog2E / softcap));
  t = _mm512_min_ps(_mm512_set1_ps(60.0f), _mm512_max_ps(_mm512_set1_ps(-60.0f), t));
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 tanh = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(exp2_of(t), one)));
  return _mm512_mul_ps(tanh, _mm512_set1_ps(softcap * kLog2E));
}

// What makes powers of two of scores, which are q.k until a softcap was put on them.
inline float exponent_scale(const Segment& work) { return work.softcap == 0.0f ? work.scale * kLog2E : 1.0f; }

// A format says: the most rows of a block and sums of a row's block of V, as the registers allow; values in a word;
// bytes of a row's weights; the Factor that a word of a query or of weights is for all lanes, and the Sum of what it
// was multiplied with.
struct Floats {
  static constexpr int kRows = 6, kSums = 24;
  static constexpr bool kInteger = false;
  using Factor = __m512i;
  using Sum = __m512;
  static Factor query(const Segment&, const uint8_t* at) { return word(at); }
  static Factor weight(const uint8_t* at) { return word(at); }
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum held(Sum sum) {
    asm("" : "+v"(sum));
    return sum;
  }
  static Sum resumed(const float* out) { return load(out); }
  static void store(float* out, Sum sum) { _mm512_storeu_ps(out, sum); }
  static __m512 score(const Segment&, Sum sum, const uint8_t*, const uint8_t*) { return sum; }
};

struct F32 : Floats {
  static constexpr int kPerWord = 1, kWeightBytes = kSegmentSlots * 4;
  static Sum add_key(Sum sum, __m512i a, Factor b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
  static Sum add_value(Sum sum, __m512i a, Factor b) { return add_key(sum, a, b); }
};

struct BF16 : Floats {
  static constexpr int kPerWord = 2, kWeightBytes = kSegmentSlots * 2;
  // As assembly, because GCC 12 copies the sum before and after each of its intrinsics.
  static Sum add_key(Sum sum, __m512i a, Factor b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
  static Sum add_value(Sum sum, __m512i a, Factor b) { return add_key(sum, a, b); }
};

// Queries and weights are of two bytes each, 16 bits; the sums of both are integers and exact.
struct Int8 {
  static constexpr int kRows = 3, kSums = 12;
  static constexpr int kPerWord = 4, kWeightBytes = kSegmentSlots * 2 + 64;
  static constexpr int kLow = kSegmentSlots;         // where the low bytes of weights lie behind the high ones
  static constexpr int kFactor = 2 * kSegmentSlots;  // and what their products are multiplied with
  static constexpr bool kInteger = true;
  struct Factor {
    __m512i high, low;
  };
  struct Sum {
    __m512i high, low;
  };
  static Sum zero() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
  static Sum held(Sum sum) {
    asm("" : "+v"(sum.high), "+v"(sum.low));
    return sum;
  }
  static Factor query(const Segment& work, const uint8_t* at) { return {word(at), word(at + int8_part(*work.layout))}; }
  static Factor weight(const uint8_t* at) { return {word(at), word(at + kLow)}; }
  // sum + the four products of each word; a is unsigned, b signed.
  static __m512i multiply_add(__m512i sum, __m512i a, __m512i b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
  static Sum add_key(Sum sum, __m512i keys, Factor query) {
    return {multiply_add(sum.high, keys, query.high), multiply_add(sum.low, keys, query.low)};
  }
  static Sum add_value(Sum sum, __m512i values, Factor weight) {
    return {multiply_add(sum.high, weight.high, values), multiply_add(sum.low, weight.low, values)};
  }
  // Sums of values stay integers in `out` until finish_int8().
  static Sum resumed(const float* out) { return {_mm512_setzero_si512(), load_bits(out)}; }
  static void store(float* out, Sum sum) {
    _mm512_storeu_si512(out, _mm512_add_epi32(_mm512_slli_epi32(sum.high, 8), sum.low));
  }
  // Scale and sums stand behind the query's parts, at `tail`; keys were stored with 128 added.
  static __m512 score(Sum sum, const uint8_t* tail, __m512 key_scales) {
    const __m512 a = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum.high, _mm512_slli_epi32(word(tail + 4), 7)));
    const __m512 b = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum.low, _mm512_slli_epi32(word(tail + 8), 7)));
    const __m512 dot = _mm512_fmadd_ps(b, _mm512_set1_ps(1.0f / 254.0f), a);
    return _mm512_mul_ps(_mm512_mul_ps(dot, _mm512_set1_ps(float_at(tail))), key_scales);
  }
  static __m512 score(const Segment& work, Sum sum, const uint8_t* query, const uint8_t* tile) {
    return score(sum, query + 2 * int8_part(*work.layout), load(tile + work.layout->scales_offset()));
  }
};

// Where the tiles of a segment lie, K or V of one head, and what to fetch into the cache meanwhile.
struct Cells {
  const uint8_t* const* tiles;  // by tile of the segment
  int64_t shift;
  const uint8_t* const* ahead;  // ahead[tile + ahead_from]
  int ahead_from;
  int64_t ahead_shift;
  const uint8_t* at(int tile) const { return tiles[tile] + shift; }
  const uint8_t* next(int tile) const { return ahead[tile + ahead_from] + ahead_shift; }
};

}  // namespace
}  // namespace maitred
