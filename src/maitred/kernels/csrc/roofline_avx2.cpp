// Peaks of AVX2: 12 independent chains in registers, and 32-byte loads. bf16 is carried out as float32.
#include "roofline.h"
#include "vec_avx2.h"

namespace maitred {
namespace {

constexpr int kChains = 12;

inline uint64_t folded(__m256i x) {
  const __m128i two = _mm_xor_si128(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(two) ^ _mm_extract_epi64(two, 1));
}

uint64_t read(const uint8_t* from, int64_t bytes) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (int64_t at = 0; at < bytes; at += 128) {
    a = _mm256_xor_si256(a, load_bits(from + at));
    b = _mm256_xor_si256(b, load_bits(from + at + 32));
    c = _mm256_xor_si256(c, load_bits(from + at + 64));
    d = _mm256_xor_si256(d, load_bits(from + at + 96));
  }
  return folded(_mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)));
}

int64_t work_f32(int64_t rounds, uint64_t* sink) {
  __m256 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm256_setzero_ps();
  const __m256 a = _mm256_set1_ps(0.5f);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) acc[i] = _mm256_fmadd_ps(acc[i], a, a);
  }
  for (int i = 0; i < kChains; ++i) *sink += folded(_mm256_castps_si256(acc[i]));
  return rounds * kChains * 8 * 2;
}

int64_t work_int8(int64_t rounds, uint64_t* sink) {
  __m256i acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm256_set1_epi32(i);
  const __m256i a = _mm256_set1_epi8(1), one = _mm256_set1_epi16(1);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i)
      acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(_mm256_maddubs_epi16(a, _mm256_sign_epi8(a, acc[i])), one));
  }
  for (int i = 0; i < kChains; ++i) *sink += folded(acc[i]);
  return rounds * kChains * 32 * 2;
}

int64_t work(DType dtype, int64_t rounds, uint64_t* sink) {
  return dtype == DType::f32 || dtype == DType::bf16 ? work_f32(rounds, sink) : work_int8(rounds, sink);
}

}  // namespace

const RooflineKernels kRooflineAvx2{&read, &work};

}  // namespace maitred
