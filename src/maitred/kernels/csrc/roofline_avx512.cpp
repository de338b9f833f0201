// Peaks of AVX-512: 16 independent chains in registers, and 64-byte loads.
#include <immintrin.h>

#include "roofline.h"

namespace maitred {
namespace {

constexpr int kChains = 16;

uint64_t read(const uint8_t* from, int64_t bytes) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (int64_t at = 0; at < bytes; at += 256) {
    a = _mm512_xor_si512(a, _mm512_loadu_si512(from + at));
    b = _mm512_xor_si512(b, _mm512_loadu_si512(from + at + 64));
    c = _mm512_xor_si512(c, _mm512_loadu_si512(from + at + 128));
    d = _mm512_xor_si512(d, _mm512_loadu_si512(from + at + 192));
  }
  return static_cast<uint64_t>(
      _mm512_reduce_add_epi64(_mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d))));
}

struct F32 {
  static constexpr int kOps = 16 * 2;
  static __m512i step(__m512i acc, __m512i a, __m512i b) {
    return _mm512_castps_si512(
        _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), _mm512_castsi512_ps(acc)));
  }
};

struct Bf16 {
  static constexpr int kOps = 32 * 2;
  static __m512i step(__m512i acc, __m512i a, __m512i b) {
    return _mm512_castps_si512(
        _mm512_dpbf16_ps(_mm512_castsi512_ps(acc), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
  }
};

struct Int8 {
  static constexpr int kOps = 64 * 2;
  static __m512i step(__m512i acc, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(acc, a, b); }
};

template <class Op>
int64_t chains(int64_t rounds, uint64_t* sink) {
  __m512i acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm512_setzero_si512();
  const __m512i a = _mm512_set1_epi32(0x01010101), b = _mm512_set1_epi32(0x01010101);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) acc[i] = Op::step(acc[i], a, b);
  }
  for (int i = 0; i < kChains; ++i) *sink += static_cast<uint64_t>(_mm512_reduce_add_epi32(acc[i]));
  return rounds * kChains * Op::kOps;
}

int64_t work(DType dtype, int64_t rounds, uint64_t* sink) {
  if (dtype == DType::f32) return chains<F32>(rounds, sink);
  if (dtype == DType::bf16) return chains<Bf16>(rounds, sink);
  return chains<Int8>(rounds, sink);
}

}  // namespace

const RooflineKernels kRooflineAvx512{&read, &work};

}  // namespace maitred
