// The sampler's passes over a row with AVX-512.
#include <immintrin.h>

#include "sampler.h"
#include "sampler_exp.h"

namespace maitred {
namespace {

inline __m512d term(int k) { return _mm512_set1_pd(kExp2Terms[k]); }

// Weights of 8 * U values, step by step together so that their latencies overlap, and which of them are above 0.
template <int U>
inline void weights_of(const __m256* x, __m512d largest, __m512d slope, __m512d* weights, __mmask8* above_zero) {
  const __m512d magic = _mm512_set1_pd(kMagic);
  __m512d f[U], f2[U], f4[U], t[U], low[U], middle[U], high[U];
#define EACH_U _Pragma("GCC unroll 4") for (int u = 0; u < U; ++u)
  EACH_U f[u] = _mm512_mul_pd(_mm512_sub_pd(_mm512_cvtps_pd(x[u]), largest), slope);
  EACH_U above_zero[u] = _mm512_cmp_pd_mask(f[u], _mm512_set1_pd(kLowestPower), _CMP_GE_OQ);
  EACH_U t[u] = _mm512_add_pd(f[u], magic);
  EACH_U f[u] = _mm512_sub_pd(f[u], _mm512_sub_pd(t[u], magic));
  EACH_U f2[u] = _mm512_mul_pd(f[u], f[u]);
  EACH_U low[u] =
      _mm512_fmadd_pd(_mm512_fmadd_pd(term(3), f[u], term(2)), f2[u], _mm512_fmadd_pd(term(1), f[u], term(0)));
  EACH_U middle[u] =
      _mm512_fmadd_pd(_mm512_fmadd_pd(term(7), f[u], term(6)), f2[u], _mm512_fmadd_pd(term(5), f[u], term(4)));
  EACH_U f4[u] = _mm512_mul_pd(f2[u], f2[u]);
  EACH_U high[u] =
      _mm512_fmadd_pd(_mm512_fmadd_pd(term(11), f[u], term(10)), f2[u], _mm512_fmadd_pd(term(9), f[u], term(8)));
  EACH_U low[u] = _mm512_fmadd_pd(high[u], _mm512_mul_pd(f4[u], f4[u]), _mm512_fmadd_pd(middle[u], f4[u], low[u]));
  EACH_U weights[u] = _mm512_castsi512_pd(
      _mm512_add_epi64(_mm512_castpd_si512(low[u]), _mm512_slli_epi64(_mm512_castpd_si512(t[u]), 52)));
#undef EACH_U
}

inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1U << count) - 1); }

bool scan(const float* x, int64_t n, float* group_max) {
  const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
  __mmask16 nans = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock, group_max += kLanes) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    __m512 even = nothing, odd = nothing;
    int64_t i = begin;
    for (; i + 32 <= end; i += 32) {
      const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + 16);
      nans |= _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
      even = _mm512_max_ps(even, a);
      odd = _mm512_max_ps(odd, b);
    }
    for (; i < end; i += 16) {
      const __mmask16 there = end - i >= 16 ? 0xFFFF : first_lanes(end - i);
      const __m512 a = _mm512_mask_loadu_ps(nothing, there, x + i);
      nans |= _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
      even = _mm512_max_ps(even, a);
    }
    _mm512_storeu_ps(group_max, _mm512_max_ps(even, odd));
  }
  return nans != 0;
}

void weigh(const float* x, int64_t n, float low, double largest, double sharpness, double* block_sums) {
  const __m512d largest_8 = _mm512_set1_pd(largest), slope_8 = _mm512_set1_pd(sharpness * kLog2e);
  const __m256 low_8 = _mm256_set1_ps(low);
  for (int64_t begin = 0; begin < n; begin += kBlock, ++block_sums) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    __m512d sum = _mm512_setzero_pd();
    __m256 value[4];
    __m512d weight[4];
    __mmask8 counts[4];
    int64_t i = begin;
    for (; i + 32 <= end; i += 32) {
      for (int u = 0; u < 4; ++u) value[u] = _mm256_loadu_ps(x + i + 8 * u);
      weights_of<4>(value, largest_8, slope_8, weight, counts);
      for (int u = 0; u < 4; ++u) {
        counts[u] = _mm256_mask_cmp_ps_mask(counts[u], value[u], low_8, _CMP_GE_OQ);
        sum = _mm512_mask_add_pd(sum, counts[u], sum, weight[u]);
      }
    }
    for (; i < end; i += 8) {
      const __mmask8 there = end - i >= 8 ? 0xFF : static_cast<__mmask8>(first_lanes(end - i));
      value[0] = _mm256_maskz_loadu_ps(there, x + i);
      weights_of<1>(value, largest_8, slope_8, weight, counts);
      counts[0] = _mm256_mask_cmp_ps_mask(counts[0] & there, value[0], low_8, _CMP_GE_OQ);
      sum = _mm512_mask_add_pd(sum, counts[0], sum, weight[0]);
    }
    double s[8];
    _mm512_storeu_pd(s, sum);
    *block_sums = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
  }
}

int64_t collect(const float* x, int64_t n, float low, float high, int32_t first, int32_t* ids) {
  const __m512 low_16 = _mm512_set1_ps(low), high_16 = _mm512_set1_ps(high);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 there = n - i >= 16 ? 0xFFFF : first_lanes(n - i);
    const __m512 value = _mm512_maskz_loadu_ps(there, x + i);
    __mmask16 inside = _mm512_mask_cmp_ps_mask(there, value, low_16, _CMP_GE_OQ);
    inside = _mm512_mask_cmp_ps_mask(inside, value, high_16, _CMP_LT_OQ);
    if (inside == 0) continue;
    const __m512i found = _mm512_add_epi32(lanes, _mm512_set1_epi32(first + static_cast<int32_t>(i)));
    const int num_found = __builtin_popcount(inside);
    // Compressed in a register: compressing straight to memory takes a hundred cycles on some processors.
    _mm512_mask_storeu_epi32(ids + count, first_lanes(num_found), _mm512_maskz_compress_epi32(inside, found));
    count += num_found;
  }
  return count;
}

void weights(const float* x, int64_t n, double largest, double sharpness, double* weights) {
  const __m512d largest_8 = _mm512_set1_pd(largest), slope_8 = _mm512_set1_pd(sharpness * kLog2e);
  for (int64_t i = 0; i < n; i += 8) {
    const __mmask8 there = n - i >= 8 ? 0xFF : static_cast<__mmask8>(first_lanes(n - i));
    const __m256 value = _mm256_maskz_loadu_ps(there, x + i);
    __m512d weight;
    __mmask8 above_zero;
    weights_of<1>(&value, largest_8, slope_8, &weight, &above_zero);
    _mm512_mask_storeu_pd(weights + i, there, _mm512_maskz_mov_pd(above_zero, weight));
  }
}

int64_t count_above(const float* x, int64_t n, float value) {
  const __m512 value_16 = _mm512_set1_ps(value);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 there = n - i >= 16 ? 0xFFFF : first_lanes(n - i);
    const __m512 a = _mm512_maskz_loadu_ps(there, x + i);
    count += __builtin_popcount(_mm512_mask_cmp_ps_mask(there, a, value_16, _CMP_GT_OQ));
  }
  return count;
}

}  // namespace

const SamplerKernels& sampler_avx512() {
  static const SamplerKernels kernels{scan, weigh, collect, weights, count_above};
  return kernels;
}

}  // namespace maitred
