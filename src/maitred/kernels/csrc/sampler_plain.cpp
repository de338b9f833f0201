// The sampler's passes over a row in plain C++: what the other instruction sets must equal, bit for bit.
#include <cmath>
#include <cstring>
#include <limits>

#include "sampler.h"
#include "sampler_exp.h"

namespace maitred {
namespace {

// y is (x - largest) * sharpness * 16 log2(e), and at least kLowestPower
double weight_of(double y) {
  const double t = y + kMagic;
  const double f = y - (t - kMagic);
  double q = std::fma(kRootTerms[4], f, kRootTerms[3]);
  for (int k = 2; k >= 0; --k) q = std::fma(q, f, kRootTerms[k]);
  uint64_t n;
  std::memcpy(&n, &t, sizeof n);
  const uint64_t bits = static_cast<uint64_t>(kRoots[n % 16]) + (n << kExponentShift);
  double s;
  std::memcpy(&s, &bits, sizeof s);
  return std::fma(s, f * q, s);
}

bool scan(const float* x, int64_t n, const float*, float* group_max, float* block_max) {
  bool has_nan = false;
  for (int64_t begin = 0; begin < n; begin += kScanBlock, group_max += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) group_max[lane] = -std::numeric_limits<float>::infinity();
    const int64_t end = begin + kScanBlock < n ? begin + kScanBlock : n;
    for (int64_t i = begin; i < end; ++i) {
      float& largest = group_max[(i - begin) % kLanes];
      if (x[i] > largest) largest = x[i];
      has_nan |= x[i] != x[i];
    }
    *block_max = group_max[0];
    for (int lane = 1; lane < kLanes; ++lane)
      if (group_max[lane] > *block_max) *block_max = group_max[lane];
    ++block_max;
  }
  return has_nan;
}

template <int kCount>
void weigh(const float* x, int64_t n, const float* lows, double largest, double sharpness, double* block_sums) {
  const int64_t num_blocks = (n + kBlock - 1) / kBlock;
  for (int64_t block = 0; block < num_blocks; ++block) {
    double sums[kCount][8] = {};
    const int64_t begin = block * kBlock, end = begin + kBlock < n ? begin + kBlock : n;
    for (int64_t i = begin; i < end; ++i) {
      if (!(x[i] >= lows[0])) continue;
      const double weight = weight_of((static_cast<double>(x[i]) - largest) * (sharpness * k16Log2e));
      for (int c = 0; c < kCount; ++c)
        if (x[i] >= lows[c]) sums[c][(i - begin) % 8] += weight;
    }
    for (int c = 0; c < kCount; ++c) block_sums[c * num_blocks + block] = sum_of_eight(sums[c]);
  }
}

int64_t collect(const float* x, int64_t n, float low, float high, int32_t first, int32_t* ids) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i)
    if (x[i] >= low && x[i] < high) ids[count++] = first + static_cast<int32_t>(i);
  return count;
}

int64_t collect_values(const float* x, int64_t n, float low, float high, float* values) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i)
    if (x[i] >= low && x[i] < high) values[count++] = x[i];
  return count;
}

void weights(const float* x, int64_t n, double largest, double sharpness, double* weights) {
  for (int64_t i = 0; i < n; ++i) {
    const double y = (static_cast<double>(x[i]) - largest) * (sharpness * k16Log2e);
    weights[i] = y >= kLowestPower ? weight_of(y) : 0.0;
  }
}

template <int kCount>
void add_from(const float* x, const double* weights, int64_t n, const float* lows, double* sums) {
  for (int c = 0; c < kCount; ++c) {
    double s[8] = {};
    for (int64_t i = 0; i < n; ++i)
      if (x[i] >= lows[c]) s[i % 8] += weights[i];
    sums[c] = sum_of_eight(s);
  }
}

int64_t count_above(const float* x, int64_t n, float value) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += x[i] > value;
  return count;
}

void mask(float* x, int64_t n, const uint32_t* words) {
  for (int64_t begin = 0; begin < n; begin += 32) {
    const uint32_t word = words[begin / 32];
    if (word == ~0U) continue;
    const int64_t count = begin + 32 < n ? 32 : n - begin;
    for (int64_t i = 0; i < count; ++i)
      x[begin + i] = (word >> i) % 2 == 1 ? x[begin + i] : -std::numeric_limits<float>::infinity();
  }
}

}  // namespace

const SamplerKernels& sampler_plain() {
  static const SamplerKernels kernels{scan,           weigh<1>, weigh<2>,    nullptr,     nullptr,     collect,
                                      collect_values, weights,  add_from<2>, add_from<4>, count_above, mask};
  return kernels;
}

}  // namespace maitred
