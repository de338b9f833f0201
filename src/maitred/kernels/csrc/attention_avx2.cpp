// Attention with AVX2: fused multiply-adds for float32 and bf16, 16-bit products for int8.
#include "attention_lanes.h"
#include "vec_avx2.h"

namespace maitred {
namespace {

struct Avx2 {
  using V = Vec8;

  // Bytes 0 and 2 of each word, and bytes 1 and 3, as 16-bit numbers: _mm256_maddubs_epi16 would saturate.
  struct Bytes {
    __m256i even, odd;
  };
  static Bytes as_unsigned(__m256i x) { return {_mm256_and_si256(x, _mm256_set1_epi16(255)), _mm256_srli_epi16(x, 8)}; }
  static Bytes as_signed(__m256i x) { return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)}; }
  static Bytes signed_word(const uint8_t* p) { return as_signed(word(p)); }
  static Bytes unsigned_word(const uint8_t* p) { return as_unsigned(word(p)); }
  static Bytes signed_words(const uint8_t* p) { return as_signed(load_bits(p)); }
  static Bytes unsigned_words(const uint8_t* p) { return as_unsigned(load_bits(p)); }

  struct Sums {
    __m256i v = _mm256_setzero_si256();
    void add(const Bytes& a, const Bytes& b) {
      v = _mm256_add_epi32(v, _mm256_add_epi32(_mm256_madd_epi16(a.even, b.even), _mm256_madd_epi16(a.odd, b.odd)));
    }
    V minus(int32_t bias) const { return {_mm256_cvtepi32_ps(_mm256_sub_epi32(v, _mm256_set1_epi32(bias)))}; }
    V joined(const Sums& low) const { return {_mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(v, 8), low.v))}; }
  };
};

}  // namespace

const AttentionKernels& attention_kernels_avx2() { return AttentionLanes<Avx2>::kKernels; }

}  // namespace maitred
