// AVX2's vectors: 8 floats as vector_math.h has them, and what kernels that spell out instructions share. For
// *_avx2.cpp alone, each of which has its own copy.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "bits.h"

namespace maitred {
namespace {

inline __m256i load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// The same 4 bytes in every lane.
inline __m256i word(const void* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, 4);
  return _mm256_set1_epi32(bits);
}

// bf16: the even and the odd values of pairs, and 8 that lie side by side.
inline __m256 even_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odd_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline __m256 load_bf16(const void* p) {
  return even_of(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
// f32 whose upper halves lie apart from the lower ones.
inline __m256 load_halves(const void* upper, const void* lower) {
  const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(lower)));
  return _mm256_or_ps(load_bf16(upper), _mm256_castsi256_ps(low));
}

inline __m256 load_f16(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline __m256 widen_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline __m256 widen_s8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

struct Vec8 {
  static constexpr int width = 8;
  __m256 v;
  static __m256i mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m256i bits(Vec8 a) { return _mm256_castps_si256(a.v); }
  static Vec8 load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static Vec8 from_bf16(const uint16_t* from) { return {load_bf16(from)}; }
  static Vec8 load_part(const float* from, int n) { return {_mm256_maskload_ps(from, mask(n))}; }
  static Vec8 load_even(const uint8_t* pairs) { return {even_of(load_bits(pairs))}; }
  static Vec8 load_odd(const uint8_t* pairs) { return {odd_of(load_bits(pairs))}; }
  static void store(float* to, Vec8 a) { _mm256_storeu_ps(to, a.v); }
  static void store_part(float* to, Vec8 a, int n) { _mm256_maskstore_ps(to, mask(n), a.v); }
  static Vec8 set1(float x) { return {_mm256_set1_ps(x)}; }
  static Vec8 fma(Vec8 a, Vec8 b, Vec8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static Vec8 min(Vec8 a, Vec8 b) { return {_mm256_min_ps(a.v, b.v)}; }
  static Vec8 max(Vec8 a, Vec8 b) { return {_mm256_max_ps(a.v, b.v)}; }
  static Vec8 abs(Vec8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
  static Vec8 round_even(Vec8 a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static Vec8 select_less(Vec8 a, Vec8 b, Vec8 x, Vec8 y) {
    return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
  }
  static Vec8 copysign(Vec8 a, Vec8 sign) {
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(_mm256_and_ps(bit, sign.v), _mm256_andnot_ps(bit, a.v))};
  }
  static Vec8 pow2(Vec8 n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
  }
  static Vec8 max_bits(Vec8 a, Vec8 b) { return {_mm256_castsi256_ps(_mm256_max_epi32(bits(a), bits(b)))}; }
  static float largest_bits(Vec8 a) {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(bits(a)), _mm256_extracti128_si256(bits(a), 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1));
    return float_of(static_cast<uint32_t>(_mm_cvtsi128_si32(x)));
  }
  static float sum(Vec8 a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  static float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }
  friend Vec8 operator+(Vec8 a, Vec8 b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Vec8 operator-(Vec8 a, Vec8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend Vec8 operator*(Vec8 a, Vec8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend Vec8 operator/(Vec8 a, Vec8 b) { return {_mm256_div_ps(a.v, b.v)}; }

  static Vec8 from_int32(const int32_t* from) { return {_mm256_cvtepi32_ps(load_bits(from))}; }
  static void widen_f8(const uint8_t* from, int n, uint16_t* to) {
    for (int i = 0; i < n; ++i) to[i] = f8_to_bf16(from[i]);
  }
  static void store_bf16(uint16_t* to, Vec8 a) {
    float values[8];
    store(values, a);
    for (int i = 0; i < 8; ++i) to[i] = float_to_bf16(values[i]);
  }
  static void store_int8(int8_t* to, Vec8 a) {
    const __m256i q = _mm256_cvtps_epi32(a.v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
  }
  static int32_t sum_int8(const int8_t* from, int n) {
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
    __m256i sums = _mm256_setzero_si256();
    for (int i = 0; i < n; i += 32) {
      const __m256i q = _mm256_xor_si256(load_bits(from + i), flip);
      sums = _mm256_add_epi64(sums, _mm256_sad_epu8(q, _mm256_setzero_si256()));
    }
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return static_cast<int32_t>(_mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1)) - 128 * n;
  }
  static void prefetch_to_write(const float* line) { __builtin_prefetch(line, 1); }
};

}  // namespace
}  // namespace maitred
