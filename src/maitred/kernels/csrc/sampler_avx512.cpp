// The sampler's passes over a row with AVX-512.
#include "sampler.h"
#include "sampler_exp.h"
#include "vec_avx512.h"

namespace maitred {
namespace {

inline __m512d term(int k) { return _mm512_set1_pd(kRootTerms[k]); }

inline __m512d power_of(__m256 x, __m512d largest, __m512d slope) {
  return _mm512_mul_pd(_mm512_sub_pd(_mm512_cvtps_pd(x), largest), slope);
}

// U vectors side by side, whose steps hide each other's latency. y[u] = power_of(...), at least kLowestPower.
template <int U>
inline void weights_of(const __m512d* y, __m512d* weights) {
#define EACH_U _Pragma("GCC unroll 4") for (int u = 0; u < U; ++u)
  const __m512d magic = _mm512_set1_pd(kMagic);
  const __m512i roots_low = _mm512_load_si512(kRoots), roots_high = _mm512_load_si512(kRoots + 8);
  __m512d f[U], t[U], q[U], s[U];
  EACH_U t[u] = _mm512_add_pd(y[u], magic);
  EACH_U f[u] = _mm512_sub_pd(y[u], _mm512_sub_pd(t[u], magic));
  EACH_U q[u] = _mm512_fmadd_pd(term(4), f[u], term(3));
  EACH_U q[u] = _mm512_fmadd_pd(q[u], f[u], term(2));
  EACH_U q[u] = _mm512_fmadd_pd(q[u], f[u], term(1));
  EACH_U q[u] = _mm512_fmadd_pd(q[u], f[u], term(0));
  EACH_U {
    const __m512i n = _mm512_castpd_si512(t[u]);
    const __m512i root = _mm512_permutex2var_epi64(roots_low, n, roots_high);  // reads the last four bits of n
    s[u] = _mm512_castsi512_pd(_mm512_add_epi64(root, _mm512_slli_epi64(n, kExponentShift)));
  }
  EACH_U weights[u] = _mm512_fmadd_pd(s[u], _mm512_mul_pd(f[u], q[u]), s[u]);
#undef EACH_U
}

bool scan(const float* x, int64_t n, const float* next, float* group_max, float* block_max) {
  const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
  __mmask16 nans = 0;
  for (int64_t begin = 0; begin < n; begin += kScanBlock, group_max += kLanes) {
    const int64_t end = begin + kScanBlock < n ? begin + kScanBlock : n;
    __m512 even = nothing, odd = nothing;
    int64_t i = begin;
    for (; i + 32 <= end; i += 32) {
      const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + 16);
      for (int u = 0; u < 2; ++u) _mm_prefetch(reinterpret_cast<const char*>(next + i + 16 * u), _MM_HINT_T1);
      nans |= _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
      even = _mm512_max_ps(even, a);
      odd = _mm512_max_ps(odd, b);
    }
    for (; i < end; i += 16) {
      const __mmask16 there = first_lanes(end - i);
      const __m512 a = _mm512_mask_loadu_ps(nothing, there, x + i);
      nans |= _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
      even = _mm512_max_ps(even, a);
    }
    const __m512 largest = _mm512_max_ps(even, odd);
    _mm512_storeu_ps(group_max, largest);
    *block_max++ = _mm512_reduce_max_ps(largest);
  }
  return nans != 0;
}

inline double sum_of_lanes(__m512d sums) {
  double s[8];
  _mm512_storeu_pd(s, sums);
  return sum_of_eight(s);
}

template <int kCount>
void weigh(const float* x, int64_t n, const float* lows, double largest, double sharpness, double* block_sums) {
  const __m512d largest_8 = _mm512_set1_pd(largest), slope_8 = _mm512_set1_pd(sharpness * k16Log2e);
  const int64_t num_blocks = (n + kBlock - 1) / kBlock;
  __m256 low_8[kCount];
  for (int c = 0; c < kCount; ++c) low_8[c] = _mm256_set1_ps(lows[c]);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t begin = block * kBlock, end = begin + kBlock < n ? begin + kBlock : n;
    __m512d sums[kCount], y[4], weight[4];
    __m256 value[4];
    for (int c = 0; c < kCount; ++c) sums[c] = _mm512_setzero_pd();
    int64_t i = begin;
    for (; i + 32 <= end; i += 32) {
      for (int u = 0; u < 4; ++u) y[u] = power_of(value[u] = _mm256_loadu_ps(x + i + 8 * u), largest_8, slope_8);
      weights_of<4>(y, weight);
      for (int u = 0; u < 4; ++u)
        for (int c = 0; c < kCount; ++c)
          sums[c] = _mm512_mask_add_pd(sums[c], _mm256_cmp_ps_mask(value[u], low_8[c], _CMP_GE_OQ), sums[c], weight[u]);
    }
    for (; i < end; i += 8) {
      const __mmask8 there = static_cast<__mmask8>(first_lanes(end - i));
      value[0] = _mm256_maskz_loadu_ps(there, x + i);
      y[0] = power_of(value[0], largest_8, slope_8);
      weights_of<1>(y, weight);
      for (int c = 0; c < kCount; ++c) {
        const __mmask8 counts = _mm256_mask_cmp_ps_mask(there, value[0], low_8[c], _CMP_GE_OQ);
        sums[c] = _mm512_mask_add_pd(sums[c], counts, sums[c], weight[0]);
      }
    }
    for (int c = 0; c < kCount; ++c) block_sums[c * num_blocks + block] = sum_of_lanes(sums[c]);
  }
}

// Of 16 U values, each at least `lowest`.
template <int U>
inline void rough_weights(const __m512* x, const RoughSlope& slope, __m512* weights) {
#define EACH_U _Pragma("GCC unroll 4") for (int u = 0; u < U; ++u)
  const __m512 high = _mm512_set1_ps(slope.high), low = _mm512_set1_ps(slope.low), magic = _mm512_set1_ps(slope.magic);
  const __m512i roots = _mm512_load_si512(kRoughRoots);
  __m512 f[U], t[U], q[U], s[U];
  EACH_U t[u] = _mm512_fmadd_ps(x[u], high, magic);
  EACH_U f[u] = _mm512_fmsub_ps(x[u], high, _mm512_sub_ps(t[u], magic));
  EACH_U f[u] = _mm512_fmadd_ps(x[u], low, f[u]);
  EACH_U q[u] = _mm512_fmadd_ps(_mm512_set1_ps(kRoughTerms[2]), f[u], _mm512_set1_ps(kRoughTerms[1]));
  EACH_U q[u] = _mm512_fmadd_ps(q[u], f[u], _mm512_set1_ps(kRoughTerms[0]));
  EACH_U {
    const __m512i n = _mm512_castps_si512(t[u]);
    const __m512i root = _mm512_permutexvar_epi32(n, roots);  // reads the last four bits of n
    s[u] = _mm512_castsi512_ps(_mm512_add_epi32(root, _mm512_slli_epi32(n, kRoughShift)));
  }
  EACH_U weights[u] = _mm512_fmadd_ps(s[u], _mm512_mul_ps(f[u], q[u]), s[u]);
#undef EACH_U
}

// The sums of 64 weights by lanes, for each low.
template <int kCount>
inline void rough_sums(const float* x, const __m512* lows, const RoughSlope& slope, const float* next, __m512* sums) {
  __m512 value[4], weight[4];
  for (int u = 0; u < 4; ++u) _mm_prefetch(reinterpret_cast<const char*>(next + 16 * u), _MM_HINT_T1);
  for (int u = 0; u < 4; ++u) value[u] = _mm512_max_ps(_mm512_loadu_ps(x + 16 * u), _mm512_set1_ps(slope.lowest));
  rough_weights<4>(value, slope, weight);
  for (int c = 0; c < kCount; ++c) {
    __mmask16 counts[4];
    for (int u = 0; u < 4; ++u) counts[u] = _mm512_cmp_ps_mask(value[u], lows[c], _CMP_GE_OQ);
    const __m512 a = _mm512_maskz_mov_ps(counts[0], weight[0]), b = _mm512_maskz_mov_ps(counts[2], weight[2]);
    sums[c] =
        _mm512_add_ps(_mm512_mask_add_ps(a, counts[1], a, weight[1]), _mm512_mask_add_ps(b, counts[3], b, weight[3]));
  }
}

template <int kCount>
void weigh_roughly(const float* x, int64_t n, const float* lows, double largest, double sharpness, const float* next,
                   double* block_sums) {
  constexpr int64_t kStep = 128;
  const RoughSlope slope(largest, sharpness);
  const int64_t num_blocks = (n + kBlock - 1) / kBlock;
  __m512 low_16[kCount];
  for (int c = 0; c < kCount; ++c) low_16[c] = _mm512_set1_ps(lows[c]);
  float last[kStep];
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t begin = block * kBlock, end = begin + kBlock < n ? begin + kBlock : n;
    __m512d sums[kCount];
    for (int c = 0; c < kCount; ++c) sums[c] = _mm512_setzero_pd();
    for (int64_t i = begin; i < end; i += kStep) {
      const float* values = x + i;
      if (end - i < kStep) {
        for (int64_t j = 0; j < kStep; ++j) last[j] = j < end - i ? x[i + j] : -__builtin_inff();
        values = last;
      }
      __m512 first[kCount], second[kCount];
      rough_sums<kCount>(values, low_16, slope, next + i, first);
      rough_sums<kCount>(values + kStep / 2, low_16, slope, next + i + kStep / 2, second);
      for (int c = 0; c < kCount; ++c) {
        const __m512 sum = _mm512_add_ps(first[c], second[c]);
        sums[c] = _mm512_add_pd(sums[c], _mm512_cvtps_pd(_mm512_castps512_ps256(sum)));
        sums[c] = _mm512_add_pd(sums[c], _mm512_cvtps_pd(_mm512_extractf32x8_ps(sum, 1)));
      }
    }
    for (int c = 0; c < kCount; ++c) block_sums[c * num_blocks + block] = sum_of_lanes(sums[c]) * slope.unit;
  }
}

// Hands store(inside, values, i, count) each vector x[i..i + 16) of which some may be inside, low <= x < high, and
// where so many were before; gives how many there are in all.
template <typename Store>
inline int64_t find(const float* x, int64_t n, float low, float high, Store store) {
  const __m512 low_16 = _mm512_set1_ps(low), high_16 = _mm512_set1_ps(high);
  int64_t count = 0, i = 0;
  for (; i + 64 <= n; i += 64) {
    const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + 16);
    const __m512 c = _mm512_loadu_ps(x + i + 32), d = _mm512_loadu_ps(x + i + 48);
    const __m512 most = _mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d));
    if (_mm512_cmp_ps_mask(most, low_16, _CMP_GE_OQ) == 0) continue;
    // From here on without branches, for none could be foretold.
    const __m512 values[4] = {a, b, c, d};
    for (int u = 0; u < 4; ++u) {
      const __mmask16 reaches = _mm512_cmp_ps_mask(values[u], low_16, _CMP_GE_OQ);
      const __mmask16 inside = _mm512_mask_cmp_ps_mask(reaches, values[u], high_16, _CMP_LT_OQ);
      store(inside, values[u], i + 16 * u, count);
      count += __builtin_popcount(inside);
    }
  }
  for (; i < n; i += 16) {
    const __mmask16 there = first_lanes(n - i);
    const __m512 value = _mm512_maskz_loadu_ps(there, x + i);
    const __mmask16 reaches = _mm512_mask_cmp_ps_mask(there, value, low_16, _CMP_GE_OQ);
    const __mmask16 inside = _mm512_mask_cmp_ps_mask(reaches, value, high_16, _CMP_LT_OQ);
    store(inside, value, i, count);
    count += __builtin_popcount(inside);
  }
  return count;
}

// Stores are of 16 lanes, overwritten where fewer are inside: compressing straight to memory takes a hundred cycles on
// some processors.
int64_t collect(const float* x, int64_t n, float low, float high, int32_t first, int32_t* ids) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return find(x, n, low, high, [&](__mmask16 inside, __m512, int64_t i, int64_t count) {
    const __m512i lane_ids = _mm512_add_epi32(lanes, _mm512_set1_epi32(first + static_cast<int32_t>(i)));
    _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(inside, lane_ids));
  });
}

int64_t collect_values(const float* x, int64_t n, float low, float high, float* values) {
  return find(x, n, low, high, [&](__mmask16 inside, __m512 value, int64_t, int64_t count) {
    _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps(inside, value));
  });
}

void weights(const float* x, int64_t n, double largest, double sharpness, double* weights) {
  const __m512d largest_8 = _mm512_set1_pd(largest), slope_8 = _mm512_set1_pd(sharpness * k16Log2e);
  for (int64_t i = 0; i < n; i += 8) {
    const __mmask8 there = static_cast<__mmask8>(first_lanes(n - i));
    const __m512d y = power_of(_mm256_maskz_loadu_ps(there, x + i), largest_8, slope_8);
    const __mmask8 above_zero = _mm512_cmp_pd_mask(y, _mm512_set1_pd(kLowestPower), _CMP_GE_OQ);
    __m512d weight;
    weights_of<1>(&y, &weight);
    _mm512_mask_storeu_pd(weights + i, there, _mm512_maskz_mov_pd(above_zero, weight));
  }
}

template <int kCount>
void add_from(const float* x, const double* weights, int64_t n, const float* lows, double* sums) {
  __m512d sums_8[kCount];
  for (int c = 0; c < kCount; ++c) sums_8[c] = _mm512_setzero_pd();
  for (int64_t i = 0; i < n; i += 8) {
    const __mmask8 there = static_cast<__mmask8>(first_lanes(n - i));
    const __m256 value = _mm256_maskz_loadu_ps(there, x + i);
    const __m512d weight = _mm512_maskz_loadu_pd(there, weights + i);
    for (int c = 0; c < kCount; ++c) {
      const __mmask8 counts = _mm256_mask_cmp_ps_mask(there, value, _mm256_set1_ps(lows[c]), _CMP_GE_OQ);
      sums_8[c] = _mm512_mask_add_pd(sums_8[c], counts, sums_8[c], weight);
    }
  }
  for (int c = 0; c < kCount; ++c) sums[c] = sum_of_lanes(sums_8[c]);
}

int64_t count_above(const float* x, int64_t n, float value) {
  const __m512 value_16 = _mm512_set1_ps(value);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 there = first_lanes(n - i);
    const __m512 a = _mm512_maskz_loadu_ps(there, x + i);
    count += __builtin_popcount(_mm512_mask_cmp_ps_mask(there, a, value_16, _CMP_GT_OQ));
  }
  return count;
}

void mask(float* x, int64_t n, const uint32_t* words) {
  const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 kept = static_cast<__mmask16>(words[i / 32] >> i % 32);
    _mm512_mask_storeu_ps(x + i, static_cast<__mmask16>(~kept & first_lanes(n - i)), nothing);
  }
}

}  // namespace

const SamplerKernels& sampler_avx512() {
  static const SamplerKernels kernels{
      scan,           weigh<1>, weigh<2>,    weigh_roughly<1>, weigh_roughly<2>, collect,
      collect_values, weights,  add_from<2>, add_from<4>,      count_above,      mask};
  return kernels;
}

}  // namespace maitred
