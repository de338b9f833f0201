// Attention with AVX2: fused multiply-adds for float32 and bf16, 16-bit products for int8.
#include <immintrin.h>
#include <stdint.h>

#include "attention.h"
#include "bits.h"

namespace maitred {
namespace {

struct V {
  static constexpr int width = 8;
  __m256 v;
  static __m256i bits(const uint8_t* words) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)); }
  static V load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static void store(float* to, V a) { _mm256_storeu_ps(to, a.v); }
  static V set1(float x) { return {_mm256_set1_ps(x)}; }
  static V low(const uint8_t* words) { return {_mm256_castsi256_ps(_mm256_slli_epi32(bits(words), 16))}; }
  static V high(const uint8_t* words) {
    return {_mm256_castsi256_ps(_mm256_and_si256(bits(words), _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static V min(V a, V b) { return {_mm256_min_ps(a.v, b.v)}; }
  static V max(V a, V b) { return {_mm256_max_ps(a.v, b.v)}; }
  static V round_even(V a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static V pow2(V n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
  }
  friend V operator+(V a, V b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend V operator-(V a, V b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend V operator*(V a, V b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend V operator/(V a, V b) { return {_mm256_div_ps(a.v, b.v)}; }
};

// Bytes 0 and 2 of each word, and bytes 1 and 3, as 16-bit numbers: _mm256_maddubs_epi16 would saturate.
struct Bytes {
  __m256i even, odd;
};
inline __m256i word(const uint8_t* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, 4);
  return _mm256_set1_epi32(bits);
}
inline Bytes as_unsigned(__m256i x) { return {_mm256_and_si256(x, _mm256_set1_epi16(255)), _mm256_srli_epi16(x, 8)}; }
inline Bytes as_signed(__m256i x) { return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)}; }
inline Bytes signed_word(const uint8_t* p) { return as_signed(word(p)); }
inline Bytes unsigned_word(const uint8_t* p) { return as_unsigned(word(p)); }
inline Bytes signed_words(const uint8_t* p) { return as_signed(V::bits(p)); }
inline Bytes unsigned_words(const uint8_t* p) { return as_unsigned(V::bits(p)); }

struct Sums {
  __m256i v = _mm256_setzero_si256();
  void add(const Bytes& a, const Bytes& b) {
    v = _mm256_add_epi32(v, _mm256_add_epi32(_mm256_madd_epi16(a.even, b.even), _mm256_madd_epi16(a.odd, b.odd)));
  }
  V minus(int32_t bias) const { return {_mm256_cvtepi32_ps(_mm256_sub_epi32(v, _mm256_set1_epi32(bias)))}; }
  V joined(const Sums& low) const { return {_mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(v, 8), low.v))}; }
};

#include "attention_lanes.inc"

}  // namespace

const AttentionKernels& attention_kernels_avx2() { return kKernels; }

}  // namespace maitred
