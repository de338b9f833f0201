// Peaks of AVX-512: 16 independent chains in registers, and 64-byte loads.
#include "roofline.h"
#include "vec_avx512.h"

namespace maitred {
namespace {

constexpr int kChains = 16;

uint64_t read(const uint8_t* from, int64_t bytes) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (int64_t at = 0; at < bytes; at += 256) {
    a = _mm512_xor_si512(a, load_bits(from + at));
    b = _mm512_xor_si512(b, load_bits(from + at + 64));
    c = _mm512_xor_si512(c, load_bits(from + at + 128));
    d = _mm512_xor_si512(d, load_bits(from + at + 192));
  }
  return static_cast<uint64_t>(
      _mm512_reduce_add_epi64(_mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d))));
}

template <class Op>
int64_t chains(int64_t rounds, uint64_t* sink) {
  __m512i acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm512_setzero_si512();
  const __m512i a = _mm512_set1_epi32(0x01010101), b = _mm512_set1_epi32(0x01010101);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) acc[i] = Op::multiply_add(acc[i], a, b);
  }
  for (int i = 0; i < kChains; ++i) *sink += static_cast<uint64_t>(_mm512_reduce_add_epi32(acc[i]));
  return rounds * kChains * 16 * Op::kValues * 2;
}

int64_t work(DType dtype, int64_t rounds, uint64_t* sink) {
  if (dtype == DType::f32) return chains<F32Words>(rounds, sink);
  if (dtype == DType::bf16) return chains<Bf16Words>(rounds, sink);
  return chains<Int8Words>(rounds, sink);
}

}  // namespace

const RooflineKernels kRooflineAvx512{&read, &work};

}  // namespace maitred
