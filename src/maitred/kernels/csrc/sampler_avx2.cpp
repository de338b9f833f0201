// The sampler's passes over a row with AVX2.
#include <immintrin.h>

#include "sampler.h"
#include "sampler_exp.h"

namespace maitred {
namespace {

inline __m256d term(int k) { return _mm256_set1_pd(kRootTerms[k]); }

inline __m256d power_of(__m128 x, __m256d largest, __m256d slope) {
  return _mm256_mul_pd(_mm256_sub_pd(_mm256_cvtps_pd(x), largest), slope);
}

// y = power_of(...), at least kLowestPower
inline __m256d weight_of(__m256d y) {
  const __m256d magic = _mm256_set1_pd(kMagic);
  const __m256d t = _mm256_add_pd(y, magic);
  const __m256d f = _mm256_sub_pd(y, _mm256_sub_pd(t, magic));
  __m256d q = _mm256_fmadd_pd(term(4), f, term(3));
  for (int k = 2; k >= 0; --k) q = _mm256_fmadd_pd(q, f, term(k));
  const __m256i n = _mm256_castpd_si256(t);
  const __m256i last_bits = _mm256_and_si256(n, _mm256_set1_epi64x(15));
  const __m256i root = _mm256_i64gather_epi64(reinterpret_cast<const long long*>(kRoots), last_bits, 8);
  const __m256d s = _mm256_castsi256_pd(_mm256_add_epi64(root, _mm256_slli_epi64(n, kExponentShift)));
  return _mm256_fmadd_pd(s, _mm256_mul_pd(f, q), s);
}

// Values 0 to 7 from x, those from `count` on as `absent`.
inline __m256 load_some(const float* x, int64_t count, float absent) {
  alignas(32) float values[8];
  for (int64_t i = 0; i < 8; ++i) values[i] = i < count ? x[i] : absent;
  return _mm256_load_ps(values);
}

bool scan(const float* x, int64_t n, const float* next, float* group_max, float* block_max) {
  const __m256 nothing = _mm256_set1_ps(-__builtin_inff());
  __m256 nans = _mm256_setzero_ps();
  for (int64_t begin = 0; begin < n; begin += kScanBlock, group_max += kLanes) {
    const int64_t end = begin + kScanBlock < n ? begin + kScanBlock : n;
    __m256 low = nothing, high = nothing;
    for (int64_t i = begin; i < end; i += 16) {
      const bool whole = end - i >= 16;
      _mm_prefetch(reinterpret_cast<const char*>(next + i), _MM_HINT_T1);
      const __m256 a = whole ? _mm256_loadu_ps(x + i) : load_some(x + i, end - i, -__builtin_inff());
      const __m256 b = whole ? _mm256_loadu_ps(x + i + 8) : load_some(x + i + 8, end - i - 8, -__builtin_inff());
      nans = _mm256_or_ps(nans, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
      low = _mm256_max_ps(low, a);
      high = _mm256_max_ps(high, b);
    }
    _mm256_storeu_ps(group_max, low);
    _mm256_storeu_ps(group_max + 8, high);
    const __m256 eight = _mm256_max_ps(low, high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    *block_max++ = _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  return _mm256_movemask_ps(nans) != 0;
}

inline double sum_of_lanes(const __m256d* sums) {
  double s[8];
  _mm256_storeu_pd(s, sums[0]);
  _mm256_storeu_pd(s + 4, sums[1]);
  return sum_of_eight(s);
}

// Of a value or more: all bits of its lane.
inline __m256d reaches(__m128 value, float low) {
  return _mm256_castsi256_pd(_mm256_cvtepi32_epi64(_mm_castps_si128(_mm_cmpge_ps(value, _mm_set1_ps(low)))));
}

template <int kCount>
void weigh(const float* x, int64_t n, const float* lows, double largest, double sharpness, double* block_sums) {
  const __m256d largest_4 = _mm256_set1_pd(largest), slope_4 = _mm256_set1_pd(sharpness * k16Log2e);
  const int64_t num_blocks = (n + kBlock - 1) / kBlock;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t begin = block * kBlock, end = begin + kBlock < n ? begin + kBlock : n;
    __m256d sums[kCount][2];
    for (int c = 0; c < kCount; ++c) sums[c][0] = sums[c][1] = _mm256_setzero_pd();
    for (int64_t i = begin; i < end; i += 8) {
      const __m256 value = end - i >= 8 ? _mm256_loadu_ps(x + i) : load_some(x + i, end - i, __builtin_nanf(""));
      const __m128 halves[2] = {_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1)};
      for (int half = 0; half < 2; ++half) {
        const __m256d weight = weight_of(power_of(halves[half], largest_4, slope_4));
        for (int c = 0; c < kCount; ++c)
          sums[c][half] = _mm256_add_pd(sums[c][half], _mm256_and_pd(reaches(halves[half], lows[c]), weight));
      }
    }
    for (int c = 0; c < kCount; ++c) block_sums[c * num_blocks + block] = sum_of_lanes(sums[c]);
  }
}

inline __m256 rough_weight(__m256 x, const RoughSlope& slope) {
  const __m256 high = _mm256_set1_ps(slope.high), magic = _mm256_set1_ps(slope.magic);
  const __m256 t = _mm256_fmadd_ps(x, high, magic);
  const __m256 f = _mm256_fmadd_ps(x, _mm256_set1_ps(slope.low), _mm256_fmsub_ps(x, high, _mm256_sub_ps(t, magic)));
  const __m256 q = _mm256_fmadd_ps(_mm256_fmadd_ps(_mm256_set1_ps(kRoughTerms[2]), f, _mm256_set1_ps(kRoughTerms[1])),
                                   f, _mm256_set1_ps(kRoughTerms[0]));
  const __m256i n = _mm256_castps_si256(t), roots = _mm256_load_si256(reinterpret_cast<const __m256i*>(kRoughRoots));
  const __m256i root = _mm256_permutevar8x32_epi32(roots, n);  // reads the last three bits of n
  const __m256 s = _mm256_castsi256_ps(_mm256_add_epi32(root, _mm256_slli_epi32(n, kRoughShift)));
  return _mm256_fmadd_ps(s, _mm256_mul_ps(f, q), s);
}

template <int kCount>
void weigh_roughly(const float* x, int64_t n, const float* lows, double largest, double sharpness, const float* next,
                   double* block_sums) {
  constexpr int64_t kStep = 64;
  const RoughSlope slope(largest, sharpness);
  const int64_t num_blocks = (n + kBlock - 1) / kBlock;
  float last[kStep];
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t begin = block * kBlock, end = begin + kBlock < n ? begin + kBlock : n;
    __m256d sums[kCount];
    for (int c = 0; c < kCount; ++c) sums[c] = _mm256_setzero_pd();
    for (int64_t i = begin; i < end; i += kStep) {
      const float* values = x + i;
      if (end - i < kStep) {
        for (int64_t j = 0; j < kStep; ++j) last[j] = j < end - i ? x[i + j] : -__builtin_inff();
        values = last;
      }
      for (int64_t j = 0; j < kStep; j += 16) _mm_prefetch(reinterpret_cast<const char*>(next + i + j), _MM_HINT_T1);
      __m256 levels[kCount][3];  // sums of one, two and four weights that wait for their like
#pragma GCC unroll 8
      for (int u = 0; u < 8; ++u) {
        const __m256 value = _mm256_max_ps(_mm256_loadu_ps(values + 8 * u), _mm256_set1_ps(slope.lowest));
        const __m256 weight = rough_weight(value, slope);
        for (int c = 0; c < kCount; ++c) {
          __m256 sum = _mm256_and_ps(weight, _mm256_cmp_ps(value, _mm256_set1_ps(lows[c]), _CMP_GE_OQ));
          int level = 0;
          for (; level < 3 && (u >> level) % 2 == 1; ++level) sum = _mm256_add_ps(levels[c][level], sum);
          if (level < 3) {
            levels[c][level] = sum;
            continue;
          }
          sums[c] = _mm256_add_pd(sums[c], _mm256_cvtps_pd(_mm256_castps256_ps128(sum)));
          sums[c] = _mm256_add_pd(sums[c], _mm256_cvtps_pd(_mm256_extractf128_ps(sum, 1)));
        }
      }
    }
    for (int c = 0; c < kCount; ++c) {
      double s[4];
      _mm256_storeu_pd(s, sums[c]);
      block_sums[c * num_blocks + block] = ((s[0] + s[1]) + (s[2] + s[3])) * slope.unit;
    }
  }
}

// Hands put(count, i) each i with low <= x[i] < high, ascending; gives how many.
template <typename Put>
inline int64_t find(const float* x, int64_t n, float low, float high, Put put) {
  const __m256 low_8 = _mm256_set1_ps(low), high_8 = _mm256_set1_ps(high);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 8) {
    const __m256 value = n - i >= 8 ? _mm256_loadu_ps(x + i) : load_some(x + i, n - i, __builtin_nanf(""));
    const __m256 inside =
        _mm256_and_ps(_mm256_cmp_ps(value, low_8, _CMP_GE_OQ), _mm256_cmp_ps(value, high_8, _CMP_LT_OQ));
    for (int mask = _mm256_movemask_ps(inside); mask != 0; mask &= mask - 1)
      put(count++, i + __builtin_ctz(static_cast<unsigned>(mask)));
  }
  return count;
}

int64_t collect(const float* x, int64_t n, float low, float high, int32_t first, int32_t* ids) {
  return find(x, n, low, high, [&](int64_t at, int64_t i) { ids[at] = first + static_cast<int32_t>(i); });
}

int64_t collect_values(const float* x, int64_t n, float low, float high, float* values) {
  return find(x, n, low, high, [&](int64_t at, int64_t i) { values[at] = x[i]; });
}

inline __m256d weight_or_zero(__m256d y) {
  return _mm256_and_pd(_mm256_cmp_pd(y, _mm256_set1_pd(kLowestPower), _CMP_GE_OQ), weight_of(y));
}

void weights(const float* x, int64_t n, double largest, double sharpness, double* weights) {
  const __m256d largest_4 = _mm256_set1_pd(largest), slope_4 = _mm256_set1_pd(sharpness * k16Log2e);
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    _mm256_storeu_pd(weights + i, weight_or_zero(power_of(_mm_loadu_ps(x + i), largest_4, slope_4)));
  if (i == n) return;
  double last[4];
  const __m128 value = _mm256_castps256_ps128(load_some(x + i, n - i, 0.0F));
  _mm256_storeu_pd(last, weight_or_zero(power_of(value, largest_4, slope_4)));
  for (int64_t j = 0; i + j < n; ++j) weights[i + j] = last[j];
}

template <int kCount>
void add_from(const float* x, const double* weights, int64_t n, const float* lows, double* sums) {
  __m256d sums_8[kCount][2];
  for (int c = 0; c < kCount; ++c) sums_8[c][0] = sums_8[c][1] = _mm256_setzero_pd();
  for (int64_t i = 0; i < n; i += 4) {
    const bool whole = n - i >= 4;
    double last[4] = {};
    for (int64_t j = 0; !whole && i + j < n; ++j) last[j] = weights[i + j];
    const __m256d weight = _mm256_loadu_pd(whole ? weights + i : last);
    const __m128 value = whole ? _mm_loadu_ps(x + i) : _mm256_castps256_ps128(load_some(x + i, n - i, 0.0F));
    for (int c = 0; c < kCount; ++c) {
      __m256d& sum = sums_8[c][i / 4 % 2];
      sum = _mm256_add_pd(sum, _mm256_and_pd(reaches(value, lows[c]), weight));
    }
  }
  for (int c = 0; c < kCount; ++c) sums[c] = sum_of_lanes(sums_8[c]);
}

int64_t count_above(const float* x, int64_t n, float value) {
  const __m256 value_8 = _mm256_set1_ps(value);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 8) {
    const __m256 a = n - i >= 8 ? _mm256_loadu_ps(x + i) : load_some(x + i, n - i, -__builtin_inff());
    count += __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, value_8, _CMP_GT_OQ))));
  }
  return count;
}

void mask(float* x, int64_t n, const uint32_t* words) {
  const __m256 nothing = _mm256_set1_ps(-__builtin_inff());
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  for (int64_t i = 0; i < n; i += 8) {
    const __m256i bits = _mm256_set1_epi32(static_cast<int>(words[i / 32] >> i % 32));
    const __m256i kept = _mm256_cmpeq_epi32(_mm256_and_si256(bits, bit), bit);
    if (n - i >= 8) {
      _mm256_storeu_ps(x + i, _mm256_blendv_ps(nothing, _mm256_loadu_ps(x + i), _mm256_castsi256_ps(kept)));
      continue;
    }
    for (int64_t j = i; j < n; ++j)
      if ((words[j / 32] >> j % 32) % 2 == 0) x[j] = -__builtin_inff();
  }
}

}  // namespace

const SamplerKernels& sampler_avx2() {
  static const SamplerKernels kernels{
      scan,           weigh<1>, weigh<2>,    weigh_roughly<1>, weigh_roughly<2>, collect,
      collect_values, weights,  add_from<2>, add_from<4>,      count_above,      mask};
  return kernels;
}

}  // namespace maitred
