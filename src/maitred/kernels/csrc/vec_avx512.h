// AVX-512's vectors: 16 floats as vector_math.h has them, and what kernels that spell out instructions share. For
// *_avx512.cpp and *_amx.cpp alone, each of which has its own copy.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "bits.h"
#include "block_form.h"

namespace maitred {
namespace {

// The first `count` lanes, all from 16 on.
inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1); }

inline __m512 load(const void* p) { return _mm512_loadu_ps(p); }
inline __m512i load_bits(const void* p) { return _mm512_loadu_si512(p); }

// The same 4 bytes in every lane.
inline __m512i word(const void* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, 4);
  return _mm512_set1_epi32(bits);
}

// bf16: the even and the odd values of pairs, 16 that lie side by side, and floats rounded to nearest even, but that
// subnormals become 0.
inline __m512 even_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 odd_of(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline __m512 load_bf16(const void* p) {
  return even_of(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))));
}
inline __m512 load_f16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
// f32 whose upper halves lie apart from the lower ones.
inline __m512 load_halves(const void* upper, const void* lower) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(lower)));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(load_bf16(upper)), low));
}
inline __m256i to_bf16(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

// sum + the products of the values in each word of 4 bytes, by format.
struct F32Words {
  static constexpr int kValues = 1;
  static __m512i multiply_add(__m512i sum, __m512i a, __m512i b) {
    return _mm512_castps_si512(
        _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), _mm512_castsi512_ps(sum)));
  }
};

struct Bf16Words {
  static constexpr int kValues = 2;
  static __m512i multiply_add(__m512i sum, __m512i a, __m512i b) {
    return _mm512_castps_si512(
        _mm512_dpbf16_ps(_mm512_castsi512_ps(sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
  }
};

struct Int8Words {  // a is unsigned, b signed
  static constexpr int kValues = 4;
  static __m512i multiply_add(__m512i sum, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sum, a, b); }
};

// Block formats (block_form.h): 16 channels' d and m of a block, or of its halves.
struct BlockScales {
  __m512 d[2], m;  // d[1]: of the second half, where that has its own
};

inline __m512 widen_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

inline __m512 widen_s8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// head: of the unit, parts: of the block; both at these channels.
template <DType kDType>
inline BlockScales block_scales(const uint8_t* head, const uint8_t* parts) {
  constexpr BlockForm kForm = block_form(kDType);
  const __m512 d = kForm.wide ? load_halves(head, head + 64) : load_f16(head);
  __m512 m = kForm.minimum ? load_f16(head + 64) : _mm512_setzero_ps();
  if (kForm.zero) m = _mm512_mul_ps(d, _mm512_sub_ps(_mm512_set1_ps(static_cast<float>(kForm.offset)), m));
  if (kForm.parts && kForm.minimum) {
    const __m512 scaled = _mm512_mul_ps(m, widen_u8(parts + 32));
    return {{_mm512_mul_ps(d, widen_u8(parts))}, _mm512_sub_ps(_mm512_setzero_ps(), scaled)};
  }
  if (kForm.parts) return {{_mm512_mul_ps(d, widen_s8(parts)), _mm512_mul_ps(d, widen_s8(parts + 32))}, m};
  return {{d}, m};
}

// What a row's int32 sums of a block (of half of one) add to its float32 sums; the AMX and the AVX-512 loops share it,
// for bits are theirs alike. sums: the row's three numbers; the products start from -offset * sums[1 + half] where the
// form has an offset.
inline __m512 scaled_onto(__m512 y, __m512i products, __m512 d, const int32_t* sums) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products),
                         _mm512_mul_ps(d, _mm512_set1_ps(float_of(static_cast<uint32_t>(sums[0])))), y);
}

inline __m512 minimum_onto(__m512 y, __m512 m, const int32_t* sums) {
  const float x = float_of(static_cast<uint32_t>(sums[0])) * static_cast<float>(sums[1] + sums[2]);
  return _mm512_fmadd_ps(m, _mm512_set1_ps(x), y);
}

// Step `step` of a block's eight: 4 values of 16 channels, and of the 16 above them, as bytes.
template <int kBits>
inline void block_step(const uint8_t* codes, int step, __m512i& low, __m512i& high) {
  if (kBits == 8) {
    low = load_bits(codes + 128 * step);
    high = load_bits(codes + 128 * step + 64);
    return;
  }
  const __m512i nibble = _mm512_set1_epi8(15), both = load_bits(codes + 64 * step);
  low = _mm512_and_si512(both, nibble);
  high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
  if (kBits == 5) {
    const __m512i fifth = _mm512_set1_epi8(16);
    uint64_t bits[2];
    __builtin_memcpy(bits, codes + 512 + 16 * step, 16);
    low = _mm512_mask_add_epi8(low, bits[0], low, fifth);
    high = _mm512_mask_add_epi8(high, bits[1], high, fifth);
  }
  if (kBits == 6) {
    const __m512i two = _mm512_set1_epi8(0x30), bits = load_bits(codes + 512 + 64 * (step / 2));
    low = _mm512_or_si512(low, _mm512_and_si512(step % 2 == 0 ? _mm512_slli_epi16(bits, 4) : bits, two));
    high = _mm512_or_si512(
        high, _mm512_and_si512(step % 2 == 0 ? _mm512_slli_epi16(bits, 2) : _mm512_srli_epi16(bits, 2), two));
  }
}

struct Vec16 {
  static constexpr int width = 16;
  __m512 v;
  static Vec16 load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static Vec16 from_bf16(const uint16_t* from) { return {load_bf16(from)}; }
  static Vec16 load_part(const float* from, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), from)}; }
  static void store(float* to, Vec16 a) { _mm512_storeu_ps(to, a.v); }
  static void store_part(float* to, Vec16 a, int n) { _mm512_mask_storeu_ps(to, first_lanes(n), a.v); }
  static Vec16 set1(float x) { return {_mm512_set1_ps(x)}; }
  static Vec16 fma(Vec16 a, Vec16 b, Vec16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static Vec16 min(Vec16 a, Vec16 b) { return {_mm512_min_ps(a.v, b.v)}; }
  static Vec16 max(Vec16 a, Vec16 b) { return {_mm512_max_ps(a.v, b.v)}; }
  static Vec16 abs(Vec16 a) { return {_mm512_abs_ps(a.v)}; }
  static Vec16 round_even(Vec16 a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  static Vec16 select_less(Vec16 a, Vec16 b, Vec16 x, Vec16 y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
  }
  static Vec16 copysign(Vec16 a, Vec16 sign) {
    const __m512i bit = _mm512_set1_epi32(static_cast<int>(0x80000000u));
    return {_mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign.v), _mm512_castps_si512(a.v), 0xca))};
  }
  static Vec16 pow2(Vec16 n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
  }
  static Vec16 max_bits(Vec16 a, Vec16 b) {
    return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
  }
  static float largest_bits(Vec16 a) {
    return float_of(static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_castps_si512(a.v))));
  }
  static float sum(Vec16 a) { return _mm512_reduce_add_ps(a.v); }
  static float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }
  friend Vec16 operator+(Vec16 a, Vec16 b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Vec16 operator-(Vec16 a, Vec16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Vec16 operator*(Vec16 a, Vec16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend Vec16 operator/(Vec16 a, Vec16 b) { return {_mm512_div_ps(a.v, b.v)}; }

  static Vec16 from_int32(const int32_t* from) { return {_mm512_cvtepi32_ps(load_bits(from))}; }
  static Vec16 from_int32(const int32_t* from, int32_t start) {
    return {_mm512_cvtepi32_ps(_mm512_add_epi32(load_bits(from), _mm512_set1_epi32(start)))};
  }
  // n: a multiple of 32. Subnormal values, whose codes are below 8, come from a table.
  static void widen_f8(const uint8_t* from, int n, uint16_t* to) {
    alignas(64) static constexpr uint16_t kSubnormal[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const __m512i table = load_bits(kSubnormal), magnitude = _mm512_set1_epi16(0x7f), least = _mm512_set1_epi16(8);
    const __m512i bias = _mm512_set1_epi16(0x3c00), sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
    for (int i = 0; i < n; i += 32) {
      const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
      const __m512i below = _mm512_and_si512(bytes, magnitude);
      const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(below, 4), bias);
      const __m512i value = _mm512_mask_permutexvar_epi16(normal, _mm512_cmplt_epu16_mask(below, least), bytes, table);
      const __m512i signs = _mm512_slli_epi16(bytes, 8);  // value | (signs & sign)
      _mm512_storeu_si512(to + i, _mm512_ternarylogic_epi32(value, signs, sign, 0xf8));
    }
  }
  static void store_bf16(uint16_t* to, Vec16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_bf16(a.v)); }
  static void store_int8(int8_t* to, Vec16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
  }
  static int32_t sum_int8(const int8_t* from, int n) {
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
    __m256i sums = _mm256_setzero_si256();
    for (int i = 0; i < n; i += 32) {
      const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
      sums = _mm256_add_epi64(sums, _mm256_sad_epu8(_mm256_xor_si256(q, flip), _mm256_setzero_si256()));
    }
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return static_cast<int32_t>(_mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1)) - 128 * n;
  }
  static void prefetch_to_write(const float* line) { asm volatile("prefetchw %0" : : "m"(*line)); }
};

}  // namespace
}  // namespace maitred
